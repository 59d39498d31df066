"""What a model is made of, for the command line. Models are built on the meta device: no memory, no weights."""

import inspect
import textwrap
from collections.abc import Iterator

import timm
import torch
import torch.nn as nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from affdiv_zoo._checks import check_model_name
from affdiv_zoo.layers import CorrectedAttention


def info(name: str) -> str:
    """Parameters, multiply-accumulates, pretrained tags and every layer's correction, in lines of up to 80 columns.

    Args:
        name: Of a model in timm, with or without a tag.

    Returns:
        The lines.

    Raises:
        ValueError: There is no such model; the message suggests names close to it.
    """
    base = name.split(".")[0]
    check_model_name(name)
    with torch.device("meta"):
        model = timm.create_model(base).eval()
    cfg = model.pretrained_cfg
    size = " x ".join(map(str, cfg["input_size"]))
    parameters = sum(p.numel() for p in model.parameters())
    tags = [n.split(".", 1)[1] for n in timm.list_pretrained(base) if n.split(".")[0] == base]
    facts = {
        "parameters": f"{parameters / 1e6:.2f} M",
        "MACs": f"{count_macs(model) / 1e6:.1f} M for an image of {size}",
        "classes": str(model.num_classes),
        "weights": ", ".join(tags) or "none released",
    }
    lines = [name, *textwrap.wrap((inspect.getdoc(timm.model_entrypoint(base)) or "").split("\n")[0], 80), ""]
    for key, value in facts.items():
        lines += textwrap.wrap(f"{key:12}{value}", 80, subsequent_indent=" " * 12)
    rows = [("layer", "map", "correction"), *_layers(model)]
    widths = [max(len(row[i]) for row in rows) for i in range(2)]
    return "\n".join(lines + [""] + [f"{n:{widths[0]}}  {m:{widths[1]}}  {c}" for n, m, c in rows])


def count_macs(model: nn.Module) -> int:
    """Multiply-accumulates of the matrix products and convolutions for one image, attention's included."""
    parameter = next(model.parameters())
    image = torch.empty((1, *model.pretrained_cfg["input_size"]), device=parameter.device, dtype=parameter.dtype)
    # The counter does not know every fused attention kernel; SDPBackend.MATH is made of products that it knows.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(image)
    return counter.get_total_flops() // 2


def _layers(model: nn.Module) -> Iterator[tuple[str, str, str]]:
    """Name, map and correction of every linear layer, convolution and corrected attention, in the model's order."""
    only_values = set()
    for name, module in model.named_modules():
        if isinstance(module, CorrectedAttention) and module.attention != "none":
            yield name, f"{module.num_heads} heads", f"{module.attention} attention"
            if module.attention != "projection":
                only_values.add(module.qkv)
        elif isinstance(module, nn.modules.conv._ConvNd):
            kernel = "x".join(map(str, module.kernel_size))
            groups = f" in {module.groups} groups" if module.groups > 1 else ""
            yield name, f"{kernel} conv {module.in_channels} to {module.out_channels}{groups}", _correction(module)
        elif isinstance(module, nn.Linear):
            correction = _correction(module)
            if module in only_values:
                correction = f"v: {correction}"
            yield name, f"{module.in_features} to {module.out_features}", correction


def _correction(layer: nn.Module) -> str:
    if not hasattr(layer, "correction"):
        return "-"
    return ", ".join([layer.correction, *(["centred"] if layer.center else []), layer.scale])
