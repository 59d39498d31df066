"""Corrected layers: each takes the arguments of the torch layer that it replaces, then the correction's."""

from affdiv_zoo.layers.attention import CorrectedAttention
from affdiv_zoo.layers.conv import PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from affdiv_zoo.layers.linear import AffineLikeLinear, CorrectedLinear, GradientCorrectedLinear, NormLikeLinear
from affdiv_zoo.layers.radial import ParameterisedScale, RadialActivation

__all__ = [
    "AffineLikeLinear",
    "CorrectedAttention",
    "CorrectedLinear",
    "GradientCorrectedLinear",
    "NormLikeLinear",
    "ParameterisedScale",
    "PatchNormConv1d",
    "PatchNormConv2d",
    "PatchNormConv3d",
    "RadialActivation",
]
