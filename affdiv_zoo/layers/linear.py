"""Linear layers over :mod:`affdiv_zoo.functional`."""

import math

import torch
from torch import Tensor, nn

from affdiv_zoo import _plain
from affdiv_zoo._checks import check_length, check_options
from affdiv_zoo.functional import corrected_linear
from affdiv_zoo.types import Correction, Scale

torch.fx.wrap("corrected_linear")  # one node of a symbolic trace, which cannot look inside

__all__ = ["AffineLikeLinear", "CorrectedLinear", "GradientCorrectedLinear", "NormLikeLinear"]


class CorrectedLinear(nn.Linear):
    r"""A :class:`torch.nn.Linear` whose map is corrected: :func:`affdiv_zoo.functional.corrected_linear`.

    Initialised so that a normalised map has outputs of unit variance, whatever its input: W ~ N(0, 1) for
    ``scale="l2"``, N(0, 1 / in_features) otherwise, b = 0.

    Args:
        in_features: Length of x.
        out_features: Length of z.
        bias: Whether there is a b. Without it affine-like and norm-like coincide.
        device: As in :class:`torch.nn.Linear`.
        dtype: As in :class:`torch.nn.Linear`.
        correction: ``"none"``, ``"affine"``, ``"norm"`` or ``"gradient"``.
        center: The map sees x - mean(x). Needs in_features >= 2.
        scale: ``"l2"`` (the paper) or ``"rms"``: times sqrt(in_features + 1), or sqrt(in_features).
        eps: Added to ||x||^2 where no 1 is.

    Shapes: ``(..., in_features)`` to ``(..., out_features)``, dtype kept.

    Raises:
        ValueError: An option is unknown, or there is nothing to centre.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device=None,
        dtype=None,
        *,
        correction: Correction = "affine",
        center: bool = False,
        scale: Scale = "rms",
        eps: float = 1e-6,
    ) -> None:
        check_options(correction, scale, eps, center)
        check_length(in_features, center, "in_features")
        self.correction = correction
        self.center = center
        self.scale = scale
        self.eps = eps
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        bias: bool = True,
        correction: Correction = "affine",
        center: bool = False,
        scale: Scale = "rms",
        eps: float = 1e-6,
    ) -> "CorrectedLinear":
        """Turns a plain linear layer into this class in place: its identity, weights, device, hooks and name survive.

        Args:
            linear: The ``nn.Linear``.
            bias: Give it a bias (zero) if it has none: the affine-like map needs one.
            correction: As in the constructor.
            center: As in the constructor.
            scale: As in the constructor.
            eps: As in the constructor.

        Returns:
            ``linear``, now of this class. Its weights are as they were: call ``reset_parameters`` for ours.

        Raises:
            TypeError: ``linear`` is no ``nn.Linear``, or is corrected already.
            ValueError: An option is unknown, or there is nothing to centre.
        """
        if not isinstance(linear, nn.Linear) or isinstance(linear, CorrectedLinear):
            raise TypeError(f"linear is a {type(linear).__name__}, expected a plain Linear")
        check_options(correction, scale, eps, center)
        check_length(linear.in_features, center, "in_features")
        linear.__class__ = cls
        linear.correction, linear.center, linear.scale, linear.eps = correction, center, scale, eps
        if bias and linear.bias is None:
            linear.bias = nn.Parameter(
                linear.weight.new_zeros(linear.out_features), requires_grad=linear.weight.requires_grad
            )
        return linear

    def reset_parameters(self) -> None:
        """W ~ N(0, 1) under the paper's scale, N(0, 1 / in_features) otherwise; b = 0."""
        unit = self.scale == "l2" and self.correction in ("affine", "norm")
        nn.init.normal_(self.weight, std=1.0 if unit else 1.0 / math.sqrt(max(self.in_features, 1)))
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return _plain.corrected_linear(
                input, self.weight, self.bias, self.correction, self.center, self.scale, self.eps
            )
        return corrected_linear(
            input,
            self.weight,
            self.bias,
            correction=self.correction,
            center=self.center,
            scale=self.scale,
            eps=self.eps,
        )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, correction={self.correction}, center={self.center}, scale={self.scale}"


class AffineLikeLinear(CorrectedLinear):
    r"""s (W x + b) / sqrt(||x||^2 + 1), see :func:`affdiv_zoo.functional.affine_like_linear`."""


class NormLikeLinear(CorrectedLinear):
    r"""s W x / sqrt(||x||^2 + eps) + b, see :func:`affdiv_zoo.functional.norm_like_linear`."""

    def __init__(self, *args, correction: Correction = "norm", **kwargs) -> None:
        super().__init__(*args, correction=correction, **kwargs)


class GradientCorrectedLinear(CorrectedLinear):
    r"""W x + b with a corrected weight gradient: :func:`affdiv_zoo.functional.gradient_corrected_linear`. See
    :class:`CorrectedLinear`."""

    def __init__(self, *args, correction: Correction = "gradient", **kwargs) -> None:
        super().__init__(*args, correction=correction, **kwargs)
