"""PatchNorm convolutions over :mod:`affdiv_zoo.functional`."""

import math
from typing import get_args

import torch
from torch import Tensor, nn

from affdiv_zoo import _plain
from affdiv_zoo._checks import check_choice, check_length, check_options
from affdiv_zoo.functional import patch_norm_conv
from affdiv_zoo.types import Activation, Correction, PaddingMode, Scale

torch.fx.wrap("patch_norm_conv")  # one node of a symbolic trace, which cannot look inside

__all__ = ["PatchNormConv1d", "PatchNormConv2d", "PatchNormConv3d"]


class _PatchNormConv(nn.modules.conv._ConvNd):
    """What the three PatchNorm convolutions share; stands before ``nn.Conv*d`` among their bases."""

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, ...],
        stride: int | tuple[int, ...] = 1,
        padding: int | tuple[int, ...] | str = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device=None,
        dtype=None,
        *,
        correction: Correction = "affine",
        center: bool = False,
        scale: Scale = "rms",
        eps: float = 1e-6,
        act: Activation = "none",
    ) -> None:
        check_options(correction, scale, eps, center)
        check_choice("act", act, get_args(Activation))
        self.correction = correction
        self.center = center
        self.scale = scale
        self.eps = eps
        self.act = act
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            dilation,
            groups,
            bias,
            padding_mode,
            device=device,
            dtype=dtype,
        )
        check_length(self.weight[0].numel(), center, "in_channels / groups * prod(kernel_size)")

    @classmethod
    def from_conv(
        cls,
        conv: nn.Module,
        *,
        bias: bool = True,
        correction: Correction = "affine",
        center: bool = False,
        scale: Scale = "rms",
        eps: float = 1e-6,
        act: Activation = "none",
    ) -> "_PatchNormConv":
        """Turns a plain convolution into this class in place: its identity, weights, device, hooks and name survive.

        Args:
            conv: The ``nn.Conv*d`` of the same number of dimensions.
            bias: Give it a bias (zero) if it has none: the affine-like map needs one.
            correction: As in the constructor.
            center: As in the constructor.
            scale: As in the constructor.
            eps: As in the constructor.
            act: As in the constructor.

        Returns:
            ``conv``, now of this class. Its weights are as they were: call ``reset_parameters`` for ours.

        Raises:
            TypeError: ``conv`` is not exactly the plain convolution of this class.
            ValueError: An option is unknown, or there is nothing to centre.
        """
        if type(conv) is not cls.__mro__[2]:
            raise TypeError(f"conv is a {type(conv).__name__}, expected exactly {cls.__mro__[2].__name__}")
        check_options(correction, scale, eps, center)
        check_choice("act", act, get_args(Activation))
        check_length(conv.weight[0].numel(), center, "in_channels / groups * prod(kernel_size)")
        conv.__class__ = cls
        conv.correction, conv.center, conv.scale, conv.eps, conv.act = correction, center, scale, eps, act
        if bias and conv.bias is None:
            conv.bias = nn.Parameter(conv.weight.new_zeros(conv.out_channels), requires_grad=conv.weight.requires_grad)
        return conv

    def reset_parameters(self) -> None:
        """W ~ N(0, 1) under the paper's scale, N(0, 1 / n) for patches of n entries otherwise; b = 0."""
        unit = self.scale == "l2" and self.correction in ("affine", "norm")
        nn.init.normal_(self.weight, std=1.0 if unit else 1.0 / math.sqrt(max(self.weight[0].numel(), 1)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor, residual: Tensor | None = None) -> Tensor:
        """The corrected convolution of ``input``, plus ``residual``, through the activation."""
        if torch.jit.is_scripting():
            return _plain.patch_norm_conv(
                input,
                self.weight,
                self.bias,
                list(self.stride),
                self._reversed_padding_repeated_twice,
                list(self.dilation),
                self.groups,
                self.padding_mode,
                self.correction,
                self.center,
                self.scale,
                self.eps,
                self.act,
                residual,
            )
        return patch_norm_conv(
            input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.dilation,
            self.groups,
            padding_mode=self.padding_mode,
            correction=self.correction,
            center=self.center,
            scale=self.scale,
            eps=self.eps,
            act=self.act,
            residual=residual,
        )

    def extra_repr(self) -> str:
        act = "" if self.act == "none" else f", act={self.act}"
        return f"{super().extra_repr()}, correction={self.correction}, center={self.center}, scale={self.scale}{act}"


_DOC = r"""PatchNorm: a :class:`torch.nn.Conv{d}d` whose map on every patch x of n entries is corrected.

    ``"affine"``: s (W x + b) / sqrt(||x||^2 + 1), the paper's PatchNorm; ``"norm"``: s W x / sqrt(||x||^2 + eps) + b;
    ``"gradient"``: W x + b with a corrected weight gradient; ``"none"``: W x + b. See
    :func:`affdiv_zoo.functional.patch_norm_conv`.

    Initialised so that a normalised map has outputs of unit variance, whatever its input: W ~ N(0, 1) for
    ``scale="l2"``, N(0, 1 / n) otherwise, b = 0.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype: As
            in :class:`torch.nn.Conv{d}d`. Without a bias affine-like and norm-like coincide.
        correction: ``"none"``, ``"affine"``, ``"norm"`` or ``"gradient"``.
        center: The map sees x - mean(x) (ours). Needs n >= 2.
        scale: ``"l2"`` (the paper), or ``"rms"`` (ours): times sqrt(n + 1), or sqrt(n).
        eps: Added to ||x||^2 where no 1 is.
        act: ``"relu"`` to return relu(z) in one step, with less memory than a ReLU module after the layer.

    Called with a second tensor of the output's shape, the layer returns z + residual, or relu(z + residual).

    Shapes: those of :class:`torch.nn.Conv{d}d`, dtype kept.

    Raises:
        ValueError: An option is unknown, or there is nothing to centre.
    """


class PatchNormConv1d(_PatchNormConv, nn.Conv1d):
    __doc__ = _DOC.format(d=1)


class PatchNormConv2d(_PatchNormConv, nn.Conv2d):
    __doc__ = _DOC.format(d=2)


class PatchNormConv3d(_PatchNormConv, nn.Conv3d):
    __doc__ = _DOC.format(d=3)
