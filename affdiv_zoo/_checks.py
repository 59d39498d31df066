"""Argument checks shared by functions and layers: every message names the argument, its value and what would work."""

from collections.abc import Sequence
from pathlib import Path
from typing import get_args

import torch
from torch import Tensor

from affdiv_zoo.types import Correction, PaddingMode, Scale


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises ValueError unless ``value`` is one of ``choices``."""
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(map(repr, choices))}")


def check_options(correction: str, scale: str, eps: float, center: bool = False) -> None:
    """The options that every corrected map takes."""
    check_choice("correction", correction, get_args(Correction))
    check_choice("scale", scale, get_args(Scale))
    if center is not True and center is not False:  # a string such as "false" would be true
        raise ValueError(f"center={center!r} is not True or False")
    if not eps >= 0:
        raise ValueError(f"eps={eps!r} must be zero or positive")


def check_length(n: int, center: bool, what: str) -> None:
    """Raises ValueError where centring would leave nothing of the input vector."""
    if center and n < 2:
        raise ValueError(f"center=True needs {what} >= 2, got {n}: nothing is left of a single number less its mean")


def check_floating(input: Tensor) -> None:
    """Raises TypeError for integer, bool and complex inputs."""
    if input.dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise TypeError(f"input has dtype {input.dtype}: convert it to a floating-point type first, e.g. input.float()")


def autocast_enabled(input: Tensor) -> bool:
    """Whether autocast is on for the input's device (the meta device knows none)."""
    device = input.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


def check_dtypes(input: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Raises TypeError where the types differ outside of autocast, which unites them."""
    if autocast_enabled(input):
        return
    for name, t in (("weight", weight), ("bias", bias)):
        if t is not None and t.dtype != input.dtype:
            raise TypeError(f"input has dtype {input.dtype}, {name} {t.dtype}: convert one, or use torch.autocast")


def check_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None, correction: str, center: bool, scale: str, eps: float
) -> None:
    """Everything that can be wrong with a corrected linear map's arguments."""
    check_options(correction, scale, eps, center)
    check_floating(input)
    if weight.ndim != 2:
        raise ValueError(f"weight has shape {tuple(weight.shape)}, expected (out_features, in_features)")
    check_length(weight.shape[1], center, "in_features")
    if input.ndim < 1 or input.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"input has shape {tuple(input.shape)}, expected (..., {weight.shape[1]}) for weight {tuple(weight.shape)}"
        )
    check_bias(weight, bias)
    check_dtypes(input, weight, bias)


def check_bias(weight: Tensor, bias: Tensor | None) -> None:
    """Raises ValueError unless there is one bias per output."""
    if bias is not None and tuple(bias.shape) != (weight.shape[0],):
        raise ValueError(f"bias has shape {tuple(bias.shape)}, expected ({weight.shape[0]},), one per output")


def check_conv(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    kernel: list[int],
    pad: list[int],
    dilation: list[int],
    groups: int,
    padding_mode: str = "zeros",
    correction: str = "affine",
    center: bool = False,
    scale: str = "l2",
    eps: float = 0.0,
) -> None:
    """Everything that can be wrong with a PatchNorm convolution's arguments (``pad`` as for ``F.pad``)."""
    check_options(correction, scale, eps, center)
    check_choice("padding_mode", padding_mode, get_args(PaddingMode))
    check_floating(input)
    dims = len(kernel)
    if dims not in (1, 2, 3):
        raise ValueError(f"{dims} spatial dimensions (from the weight's or kernel_size's length), expected 1, 2 or 3")
    if input.ndim not in (dims + 1, dims + 2):
        raise ValueError(
            f"input has shape {tuple(input.shape)}, expected ([batch,] channels, then {dims} spatial dimensions)"
        )
    channels = input.shape[-dims - 1]
    if groups < 1 or channels % groups:
        raise ValueError(f"groups={groups} does not divide the input's {channels} channels")
    n = channels // groups
    for k in kernel:
        n *= k
    check_length(n, center, "channels / groups * prod(kernel_size)")
    if weight is not None:
        if weight.shape[1] * groups != channels:
            raise ValueError(
                f"input has {channels} channels, weight {tuple(weight.shape)} with groups={groups} expects "
                f"{weight.shape[1] * groups}"
            )
        if weight.shape[0] % groups:
            raise ValueError(f"groups={groups} does not divide the weight's {weight.shape[0]} output channels")
        check_bias(weight, bias)
        check_dtypes(input, weight, bias)
    for d in range(dims):
        size = input.shape[d - dims] + pad[-2 * d - 2] + pad[-2 * d - 1]
        if dilation[d] * (kernel[d] - 1) + 1 > size:
            raise ValueError(
                f"kernel_size={kernel} with dilation={dilation} spans {dilation[d] * (kernel[d] - 1) + 1} in spatial "
                f"dimension {d}, more than the padded input's {size}: pad more, or use a smaller kernel"
            )


def check_residual(residual: Tensor, input: Tensor, shape: list[int]) -> None:
    """Raises unless the residual is what can be added to an output of this shape."""
    if list(residual.shape) != shape:
        raise ValueError(f"residual has shape {tuple(residual.shape)}, expected the output's, {tuple(shape)}")
    if not autocast_enabled(input) and residual.dtype != input.dtype:
        raise TypeError(f"residual has dtype {residual.dtype}, input {input.dtype}: convert one, or use torch.autocast")


def to_list(name: str, value: int | Sequence[int], dims: int) -> list[int]:
    """One whole number per spatial dimension."""
    if isinstance(value, int):
        return [value] * dims
    if isinstance(value, str) or len(value) != dims:
        raise ValueError(f"{name}={value!r}: expected a number or {dims} numbers, one per spatial dimension")
    return list(value)


def check_model_name(name: str) -> None:
    """Raises a ValueError, which suggests close names, unless timm knows a model's name, with or without a tag."""
    import difflib

    import timm

    if not timm.is_model(name.split(".")[0]):
        if "/" in name or Path(name).is_dir():
            raise ValueError(f"{name!r} is no timm model: write local-dir:{name} for a folder, hf-hub:... for the Hub")
        close = difflib.get_close_matches(name.split(".")[0], timm.list_models(), 2)
        hint = f"did you mean {' or '.join(close)}?" if close else "timm.list_models() has the names"
        raise ValueError(f"{name!r} is no timm model: {hint}")
