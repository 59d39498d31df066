"""Measures what affdiv_zoo.diagnose costs, in training steps of the same model on the same batch.

    python recipes/benchmark/diagnose.py --threads 1 --json diagnose.json
    python recipes/benchmark/diagnose.py --only resnet18/ peak --memory-format nchw

A row is called model/pixels/batch/format/quantity; ours is the diagnosis, the peer a training step. The goal is a ratio
of at most 3 for ResNet-18 at batch 32.

    step            their times; the step is forward, cross entropy, backward and the optimizer's step
    flops           the multiply-adds of their convolutions and matrix products, which torch's counter finds: of the
                    same size on every machine, whatever else it does
    peak            the most that torch's allocator holds during one above what it held before
    largest         numbers in the largest tensor that either makes: for an image with P positions of n entries it may
                    grow as P n, not as P^2
"""

import argparse
from collections.abc import Callable

import torch
from models import MIB, OPTIMIZERS, Bench, peak_bytes
from timing import Row, formats, parse, parser, run
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from affdiv_zoo import diagnose

# model, pixels and batch, and what --quick makes of the latter two
MODELS = [
    ("resnet18", (224, 32), (32, 2)),
    ("resnet18_patchnorm", (224, 32), (32, 2)),
    ("vit_tiny_patch16_224_affine", (224, 32), (224, 1)),
    ("mlp_cifar", (32, 128), (32, 4)),
]
SIZES = [(112, 8), (224, 8), (448, 8)]  # of ResNet-18, for the memory alone
QUICK_SIZES = [(32, 2), (64, 2)]


class Largest(TorchDispatchMode):
    """The number of entries of the largest tensor that an operator returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, tuple | list) else (output,):
            if isinstance(tensor, torch.Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // tensor.element_size())
        return output


def largest(call: Callable[[], object]) -> int:
    """How many numbers the largest tensor has that a call makes."""
    with Largest() as mode:
        call()
    return mode.numbers


def addbmm_flops(input_shape, a_shape, b_shape, *args, out_shape=None, **kwargs) -> int:
    """Of a sum of products, which torch's counter does not know: 2 for each multiply-add."""
    batch, rows, inner = a_shape
    return 2 * batch * rows * inner * b_shape[2]


def giga_flops(call: Callable[[], object]) -> float:
    """The floating-point operations of a call's convolutions and matrix products, in units of 10^9."""
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addbmm: addbmm_flops})
    with counter:
        call()
    return counter.get_total_flops() / 1e9


def rows(args: argparse.Namespace) -> list[Row]:
    """All rows."""
    found = []
    for name, full, quick in MODELS:
        px, batch = quick if args.quick else full
        for fmt in formats(args):

            def pair(name=name, px=px, batch=batch, fmt=fmt) -> tuple[Callable, Callable]:
                bench = Bench(name, {}, px, batch, fmt, args)
                step = bench.step()
                return lambda: diagnose(bench.model, bench.x, bench.target), step

            def both(measure, pair=pair) -> Callable[[], tuple]:
                return lambda: tuple(map(measure, pair()))

            title = f"{name}/{px}/{batch}/{fmt}"
            found.append(Row(f"{title}/step", pair))
            found.append(Row(f"{title}/flops", both(giga_flops), "GFLOP"))
            found.append(Row(f"{title}/peak", both(lambda call: _peak(call, args)), "MiB"))
    for px, batch in QUICK_SIZES if args.quick else SIZES:

        def pair(px=px, batch=batch) -> tuple[Callable, Callable]:
            bench = Bench("resnet18", {}, px, batch, "nchw", args)
            step = bench.step()
            return lambda: diagnose(bench.model, bench.x, bench.target), step

        def numbers(pair=pair) -> tuple[float, ...]:
            return tuple(largest(call) / 2**20 for call in pair())

        found.append(Row(f"resnet18/{px}/{batch}/nchw/largest", numbers, "2^20"))
    return found


def _peak(call: Callable[[], object], args: argparse.Namespace) -> float:
    call()  # whatever is made only once
    return peak_bytes(call, args.device) / MIB


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    p = parser(__doc__)
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="of the training step")
    args = parse(p, argv)
    return run(rows(args), [], args)


if __name__ == "__main__":
    raise SystemExit(main())
