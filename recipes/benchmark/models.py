"""Measures this package's models against the models that they replace: time and memory.

    python recipes/benchmark/models.py --threads 1 --json models.json
    python recipes/benchmark/models.py --only resnet20 step --memory-format nchw
    python recipes/benchmark/models.py --model resnet18_patchnorm --peer resnet18 --model-kwargs center=false

A row is called ours:peer/format/quantity, where

    step            a training step: forward, cross entropy, backward, the optimizer's step
    forward         the forward pass alone, in training mode and recorded for a backward pass
    infer           forward without gradients, in evaluation mode
    infer-folded    the same, the peer's BatchNorms folded into its convolutions
    saved           what one training forward keeps for the backward pass: the storages of the saved tensors, each
                    counted once, without parameters and buffers, with the input; tensors that a custom autograd
                    function hides from torch's hooks are not seen
    peak            the most that torch's allocator holds during one training step above what it held before it
                    (parameters, optimizer state, input): activations, gradients and scratch
"""

import argparse
import copy
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says on stderr that it starts and stops

import timm
import torch
import torch.nn.functional as F
import yaml
from timing import DTYPES, FORMATS, Row, formats, parse, parser, run
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.profiler import ProfilerActivity, profile

import affdiv_zoo  # noqa: F401  registers the models with timm

# ours, peer, pixels, batch, and what --quick makes of the latter two
PAIRS = [
    ("resnet18_patchnorm", "resnet18", (224, 16), (32, 2)),
    ("resnet20_cifar_patchnorm", "resnet20_cifar", (32, 128), (16, 2)),
    ("vit_nano_patch4_32_affine", "vit_nano_patch4_32", (32, 128), (32, 1)),
    ("vit_small_patch16_224_affine", "vit_small_patch16_224", (224, 16), (224, 1)),
]
OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=1e-3, momentum=0.9, weight_decay=5e-4),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-5, weight_decay=0.05),
    "none": None,
}
MIB = 2**20


# ---------------------------------------------------------------------------------------------------------------------
# What is measured
# ---------------------------------------------------------------------------------------------------------------------


def saved_bytes(model: nn.Module, x: Tensor, forward: Callable[[Tensor], object] | None = None) -> int:
    """Bytes that a forward pass saves for its backward pass.

    Args:
        model: Its parameters and buffers are not counted: they exist anyway.
        x: The input.
        forward: Called with ``x``; the model itself if None (it may be a compiled model, whose parameters are hidden).

    Returns:
        The sizes of the saved tensors' storages, each storage once. The input counts where it is saved.
    """
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    storages = {}  # holds them, so that no address is used twice

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        (model if forward is None else forward)(x)
    return sum(storage.nbytes() for storage in storages.values())


def peak_bytes(call: Callable[[], object], device: torch.device) -> int:
    """The most that torch's allocator holds during ``call`` above what it holds before.

    CUDA keeps this statistic. On the CPU it is the highest running total of the allocations and frees that torch's
    profiler records; memory that is not torch's, such as a library's own, is not seen.
    """
    if device.type == "cuda":
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"peak memory is not known on device {device}, only on cpu and cuda")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(trace))
        events = [e for e in json.loads(trace.read_text())["traceEvents"] if e.get("name") == "[memory]"]
    total = peak = 0
    for event in sorted(events, key=lambda e: (e["ts"], e["args"]["Ev Idx"])):
        total += event["args"]["Bytes"]
        peak = max(peak, total)
    return peak


def has_batchnorm(model: nn.Module) -> bool:
    """Whether there is anything for :func:`fold_batchnorm`."""
    return any(isinstance(m, nn.BatchNorm2d) for m in model.modules())


def fold_batchnorm(model: nn.Module, x: Tensor) -> nn.Module:
    """A copy in evaluation mode in which every BatchNorm is folded into the convolution whose output it takes.

    Args:
        model: A convolutional net.
        x: An input, to see which output a BatchNorm takes.

    Returns:
        The copy. That it computes the same is for the caller to check, with :func:`check_folded`.

    Raises:
        ValueError: A BatchNorm takes something else.
    """
    model = copy.deepcopy(model).eval()
    outputs: list[tuple[Tensor, str]] = []
    pairs: list[tuple[str, str]] = []
    hooks = []
    for name, m in model.named_modules():
        if isinstance(m, nn.Conv2d):
            hooks.append(m.register_forward_hook(lambda m, args, out, name=name: outputs.append((out, name))))
        elif isinstance(m, nn.BatchNorm2d):
            hooks.append(
                m.register_forward_pre_hook(
                    lambda m, args, name=name: pairs.extend((conv, name) for out, conv in outputs if out is args[0])
                )
            )
    with torch.no_grad():
        model(x[:1])
    for hook in hooks:
        hook.remove()
    for conv_name, bn_name in pairs:
        bn = model.get_submodule(bn_name)
        model.set_submodule(conv_name, fuse_conv_bn_eval(model.get_submodule(conv_name), bn))
        model.set_submodule(bn_name, getattr(bn, "act", nn.Identity()))  # timm's BatchNormAct2d has one inside
    if has_batchnorm(model):
        raise ValueError("a BatchNorm takes something else than a convolution's output: this net cannot be folded")
    return model


def check_folded(model: nn.Module, folded: nn.Module, x: Tensor) -> None:
    """Raises RuntimeError unless both compute the same in evaluation mode."""
    with torch.no_grad():
        want, got = model.eval()(x).double(), folded(x).double()
    # Rounding once more per layer: a relative error of the size of the dtype's own, times a few.
    error = ((got - want).norm() / want.norm()).item()
    if not error < 30 * torch.finfo(x.dtype).eps:
        raise RuntimeError(f"the net with folded BatchNorms differs from the original by {error:.1e} of its output")


def settle_batchnorm(model: nn.Module) -> None:
    """Gives every BatchNorm statistics and weights as after some training.

    A new one's are 0 and 1, and timm's last one in a block has weight 0: the check of the folded net would be blind.
    """
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            nn.init.uniform_(m.weight, 0.5, 1.5)
            nn.init.normal_(m.bias, std=0.1)
            nn.init.normal_(m.running_mean, std=0.1)
            nn.init.uniform_(m.running_var, 0.5, 1.5)


# ---------------------------------------------------------------------------------------------------------------------
# Rows
# ---------------------------------------------------------------------------------------------------------------------


class Bench:
    """One model with its input, ready for any of the measurements."""

    def __init__(self, name: str, kwargs: dict, px: int, batch: int, fmt: str, args: argparse.Namespace) -> None:
        self.device = args.device
        torch.manual_seed(0)
        self.model = timm.create_model(name, **kwargs)
        settle_batchnorm(self.model)
        self.model.to(args.device, DTYPES[args.dtype], memory_format=FORMATS[fmt])
        channels = getattr(self.model, "in_chans", 3)
        x = torch.randn(batch, channels, px, px, device=args.device, dtype=DTYPES[args.dtype])
        self.x = x.contiguous(memory_format=FORMATS[fmt])
        self.target = torch.randint(self.model.num_classes, (batch,), device=args.device)
        self.wrap = torch.compile if args.compile else lambda model: model
        self.make_optimizer = OPTIMIZERS[args.optimizer]

    def step(self) -> Callable[[], object]:
        call = self.wrap(self.model.train())
        optimizer = self.make_optimizer(self.model.parameters()) if self.make_optimizer else None

        def step() -> None:
            self.model.zero_grad(set_to_none=True)
            F.cross_entropy(call(self.x), self.target).backward()
            if optimizer is not None:
                optimizer.step()

        return step

    def forward(self) -> Callable[[], object]:
        call = self.wrap(self.model.train())
        return lambda: call(self.x)

    def infer(self, fold: bool = False) -> Callable[[], object]:
        model = self.model.eval()
        if fold and has_batchnorm(model):
            model = fold_batchnorm(self.model, self.x)
            check_folded(self.model, model, self.x)
        call = self.wrap(model)

        def infer() -> Tensor:
            with torch.no_grad():
                return call(self.x)

        return infer

    def saved(self) -> float:
        call = self.wrap(self.model.train())
        call(self.x)  # whatever is made only once
        return saved_bytes(self.model, self.x, call) / MIB

    def peak(self) -> float:
        step = self.step()
        step()  # the optimizer makes its state
        self.model.zero_grad(set_to_none=True)
        return peak_bytes(step, self.device) / MIB


def rows(args: argparse.Namespace) -> tuple[list[Row], list[dict[str, str]]]:
    """All rows, and what cannot be measured."""
    pairs = PAIRS
    if args.model:
        px, batch = timm.get_pretrained_cfg(args.model).input_size[-1], 16
        pairs = [(args.model, args.peer, (px, batch), (px, 2))]
    found, skipped = [], []
    for ours, peer, full, quick in pairs:
        missing = [name for name in (ours, peer) if not timm.is_model(name)]
        if missing:
            skipped.append({"name": f"{ours}:{peer}", "reason": f"there is no model {' and no '.join(missing)}"})
            continue
        px, batch = quick if args.quick else full
        px, batch = args.image_size or px, args.batch_size or batch

        for fmt in formats(args):

            def pair(ours=ours, peer=peer, px=px, batch=batch, fmt=fmt) -> tuple[Bench, Bench]:
                return (
                    Bench(ours, args.model_kwargs, px, batch, fmt, args),
                    Bench(peer, args.peer_kwargs, px, batch, fmt, args),
                )

            def add(quantity: str, measure, unit: str = "ms", name=f"{ours}:{peer}/{fmt}", pair=pair) -> None:
                found.append(Row(f"{name}/{quantity}", lambda: tuple(map(measure, pair())), unit))

            add("step", Bench.step)
            add("forward", Bench.forward)
            add("infer", Bench.infer)
            if has_batchnorm(timm.create_model(peer, **args.peer_kwargs)):
                add("infer-folded", lambda bench: bench.infer(fold=True))
            add("saved", Bench.saved, "MiB")
            add("peak", Bench.peak, "MiB")
    return found, skipped


def kwarg(text: str) -> tuple[str, object]:
    """Parses `key=value`, the value as YAML does: a bool, a number or else a string."""
    key, equals, value = text.partition("=")
    if not equals or not key.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form key=value")
    return key, yaml.safe_load(value)


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    p = parser(__doc__)
    p.add_argument("--model", metavar="NAME", help="with --peer: compare these two instead of this package's pairs")
    p.add_argument("--peer", metavar="NAME", help="any of timm's names")
    p.add_argument("--model-kwargs", nargs="+", default=[], type=kwarg, metavar="K=V", help="of ours: center=false")
    p.add_argument("--peer-kwargs", nargs="+", default=[], type=kwarg, metavar="K=V", help="of the peer")
    p.add_argument("--image-size", type=int, metavar="PX", help="instead of the pair's own")
    p.add_argument("--batch-size", type=int, metavar="N", help="instead of the pair's own (--model: 16)")
    p.add_argument("--optimizer", choices=OPTIMIZERS, default="sgd", help="of step and peak")
    args = parse(p, argv)
    if bool(args.model) != bool(args.peer):
        p.error("--model and --peer belong together")
    for name in filter(None, (args.model, args.peer)):
        if not timm.is_model(name):
            p.error(f"{name!r} is no model that timm or affdiv_zoo has")
    args.model_kwargs, args.peer_kwargs = dict(args.model_kwargs), dict(args.peer_kwargs)
    found, skipped = rows(args)
    return run(found, skipped, args)


if __name__ == "__main__":
    raise SystemExit(main())
