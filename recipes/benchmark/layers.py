"""Times this package's layers against the layers that they replace.

    python recipes/benchmark/layers.py --threads 1 --json layers.json
    python recipes/benchmark/layers.py --only r18-128-28/nchw/train conv+bn

Convolutions at the shapes of ResNet-18 (224 px, batch 16) and of the CIFAR ResNets (32 px, batch 128), linear maps and
attention at those of ViT-S (197 tokens, batch 16). A row is called shape/format/pass/ours:peer, where

    train   forward, and backward for the input and every parameter, in training mode
    infer   forward without gradients, in evaluation mode
    -c      center=True: the map sees x - mean(x)
    bn, gn, ln, rms   BatchNorm, GroupNorm, LayerNorm, RMSNorm

Convolutions before a norm have no bias; `conv+bias` has one, and in the `infer` rows it is BatchNorm folded into the
convolution. A ReLU is in place behind a torch layer; PatchNorm has it fused where the layer takes `act=`.
"""

import argparse
import inspect
from collections.abc import Callable, Iterator

import torch
from timing import DTYPES, FORMATS, Row, formats, parse, parser, run
from timm.layers import Attention
from torch import Tensor, nn

import affdiv_zoo.layers as zoo

# name of the net, in and out channels, pixels of the input, stride, batch
CONVS = [
    *(("r18", *shape, 16) for shape in ((64, 64, 56, 1), (64, 128, 56, 2), (128, 128, 28, 1), (128, 256, 28, 2))),
    *(("r18", *shape, 16) for shape in ((256, 256, 14, 1), (256, 512, 14, 2), (512, 512, 7, 1))),
    *(("cifar", *shape, 128) for shape in ((16, 16, 32, 1), (16, 32, 32, 2), (32, 32, 16, 1), (32, 64, 16, 2))),
    ("cifar", 64, 64, 8, 1, 128),
]
QUICK_CONVS = [("quick", 8, 8, 6, 1, 2), ("quick", 8, 16, 6, 2, 2)]
LINEARS, QUICK_LINEARS = [("vits", 384, 1152), ("vits", 384, 1536)], [("quick", 8, 16)]
TOKENS, QUICK_TOKENS = (16, 197), (2, 5)  # batch, tokens
ATTENTION, QUICK_ATTENTION = ("vits", 384, 6), ("quick", 16, 2)  # width, heads
ATTENTION_CORRECTIONS = ("none", "projection", "separable", "logit")

FUSED_ACT = "act" in inspect.signature(zoo.PatchNormConv2d).parameters

Build = Callable[[], nn.Module]


class DyT(nn.Module):
    """tanh(alpha x) w + b, Dynamic Tanh (Zhu et al., arXiv 2503.10622); here to be compared with, not to be used."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(0.5))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x) * self.weight + self.bias


def conv_layers(c_in: int, c_out: int, stride: int) -> tuple[dict[str, Build], dict[str, Build]]:
    """Our layers and the peers by name, each with and without a ReLU behind it."""

    def plain(*rest: nn.Module, bias: bool = False) -> nn.Module:
        return nn.Sequential(nn.Conv2d(c_in, c_out, 3, stride, 1, bias=bias), *rest)

    def patchnorm(center: bool, relu: bool) -> nn.Module:
        if relu and FUSED_ACT:
            return zoo.PatchNormConv2d(c_in, c_out, 3, stride, 1, center=center, act="relu")
        layer = zoo.PatchNormConv2d(c_in, c_out, 3, stride, 1, center=center)
        return nn.Sequential(layer, nn.ReLU()) if relu else layer

    def relu() -> nn.Module:
        return nn.ReLU(inplace=True)

    groups = 32 if c_out >= 64 else c_out // 4  # 32 as in the paper of GroupNorm, fewer where channels are few
    ours = {
        "patchnorm": lambda: patchnorm(False, False),
        "patchnorm-c": lambda: patchnorm(True, False),
        "patchnorm+relu": lambda: patchnorm(False, True),
        "patchnorm-c+relu": lambda: patchnorm(True, True),
        "gradient": lambda: zoo.PatchNormConv2d(c_in, c_out, 3, stride, 1, correction="gradient"),
        "gradient-c": lambda: zoo.PatchNormConv2d(c_in, c_out, 3, stride, 1, correction="gradient", center=True),
    }
    peers = {
        "conv": plain,
        "conv+bias": lambda: plain(bias=True),
        "conv+relu": lambda: plain(relu()),
        "conv+bias+relu": lambda: plain(relu(), bias=True),
        "conv+bn": lambda: plain(nn.BatchNorm2d(c_out)),
        "conv+bn+relu": lambda: plain(nn.BatchNorm2d(c_out), relu()),
        "conv+gn": lambda: plain(nn.GroupNorm(groups, c_out)),
        "conv+gn+relu": lambda: plain(nn.GroupNorm(groups, c_out), relu()),
    }
    return ours, peers


def linear_layers(n_in: int, n_out: int) -> tuple[dict[str, Build], dict[str, Build]]:
    """Our layers and the peers by name."""
    ours = {
        "affinelike": lambda: zoo.AffineLikeLinear(n_in, n_out),
        "affinelike-c": lambda: zoo.AffineLikeLinear(n_in, n_out, center=True),
        "normlike": lambda: zoo.NormLikeLinear(n_in, n_out),
        "normlike-c": lambda: zoo.NormLikeLinear(n_in, n_out, center=True),
        "gradient": lambda: zoo.GradientCorrectedLinear(n_in, n_out),
    }
    peers = {
        "linear": lambda: nn.Linear(n_in, n_out),
        "ln+linear": lambda: nn.Sequential(nn.LayerNorm(n_in), nn.Linear(n_in, n_out)),
        "rms+linear": lambda: nn.Sequential(nn.RMSNorm(n_in), nn.Linear(n_in, n_out)),
        "dyt+linear": lambda: nn.Sequential(DyT(n_in), nn.Linear(n_in, n_out)),
    }
    return ours, peers


def attention_layers(width: int, heads: int) -> tuple[dict[str, Build], dict[str, Build]]:
    """Our layers and the peers by name; timm's attention calls scaled_dot_product_attention."""
    ours = {
        f"corrected-{name}": lambda name=name: zoo.CorrectedAttention(
            width, num_heads=heads, qkv_bias=True, attention=name
        )
        for name in ATTENTION_CORRECTIONS
    }
    peers = {
        "attention": lambda: Attention(width, heads, qkv_bias=True),
        "ln+attention": lambda: nn.Sequential(nn.LayerNorm(width), Attention(width, heads, qkv_bias=True)),
    }
    return ours, peers


def conv_pairs() -> Iterator[tuple[str, str, str]]:
    """(ours, peer, pass) of a convolution's rows, by the names of :func:`conv_layers`."""
    for c in ("", "-c"):
        for peer in ("conv+bn", "conv+gn", "conv+bias", "conv"):
            yield f"patchnorm{c}+relu", f"{peer}+relu", "train"
            yield f"patchnorm{c}", peer, "train"
        yield f"patchnorm{c}+relu", "conv+bn+relu", "infer"
        yield f"patchnorm{c}+relu", "conv+bias+relu", "infer"
        yield f"gradient{c}", "conv+bias", "train"


def make_call(build: Build, x: Tensor, mode: str, args: argparse.Namespace, memory_format=None) -> Callable[[], object]:
    """The call to be timed: one pass through a freshly built layer."""
    layer = build().to(args.device, DTYPES[args.dtype])
    if memory_format is not None:
        layer = layer.to(memory_format=memory_format)
    layer.train(mode == "train")
    call = torch.compile(layer) if args.compile else layer
    if mode == "infer":

        def infer() -> Tensor:
            with torch.no_grad():
                return call(x)

        return infer

    wanted = [x, *layer.parameters()]
    with torch.no_grad():
        grad = torch.randn_like(layer(x))
    if memory_format is not None:
        grad = grad.contiguous(memory_format=memory_format)

    def train() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(x), wanted, grad)

    return train


def rows(args: argparse.Namespace) -> tuple[list[Row], list[dict[str, str]]]:
    """All rows, and what cannot be measured."""
    found: list[Row] = []

    def add(name: str, layers, pairs, shape: tuple[int, ...], memory_format=None) -> None:
        ours, peers = layers
        for a, b, mode in pairs:

            def build(a=a, b=b, mode=mode):
                x = torch.randn(shape, device=args.device, dtype=DTYPES[args.dtype])
                if memory_format is not None:
                    x = x.contiguous(memory_format=memory_format)
                x.requires_grad_(mode == "train")
                return tuple(make_call(f, x, mode, args, memory_format) for f in (ours[a], peers[b]))

            found.append(Row(f"{name}/{mode}/{a}:{b}", build))

    for net, c_in, c_out, px, stride, batch in QUICK_CONVS if args.quick else CONVS:
        channels = f"{c_in}" if c_in == c_out else f"{c_in}to{c_out}"
        for fmt in formats(args):
            name = f"{net}-{channels}-{px}/{fmt}"
            add(name, conv_layers(c_in, c_out, stride), conv_pairs(), (batch, c_in, px, px), FORMATS[fmt])

    tokens = QUICK_TOKENS if args.quick else TOKENS
    for net, n_in, n_out in QUICK_LINEARS if args.quick else LINEARS:
        ours, peers = linear_layers(n_in, n_out)
        pairs = [(a, b, mode) for a in ours if a != "gradient" for b in peers for mode in ("train", "infer")]
        pairs.append(("gradient", "linear", "train"))
        add(f"{net}-{n_in}to{n_out}", (ours, peers), pairs, (*tokens, n_in))

    if not hasattr(zoo, "CorrectedAttention"):
        return found, [{"name": "attention", "reason": "affdiv_zoo.layers has no CorrectedAttention"}]
    net, width, heads = QUICK_ATTENTION if args.quick else ATTENTION
    ours, peers = attention_layers(width, heads)
    pairs = [(a, b, mode) for a in ours for b in peers for mode in ("train", "infer")]
    add(f"{net}-attention-{width}", (ours, peers), pairs, (*tokens, width))
    return found, []


def main(argv: list[str] | None = None) -> int:
    """Runs the program; returns its exit status."""
    args = parse(parser(__doc__), argv)
    found, skipped = rows(args)
    notes = f"PatchNorm's ReLU: {'fused, act=' if FUSED_ACT else 'an nn.ReLU behind it'}. See --help for the names."
    return run(found, skipped, args, notes)


if __name__ == "__main__":
    raise SystemExit(main())
