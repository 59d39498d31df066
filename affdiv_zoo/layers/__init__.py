"""Corrected layers: each takes the arguments of the torch layer that it replaces, then the correction's."""

from affdiv_zoo.layers.conv import PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from affdiv_zoo.layers.linear import AffineLikeLinear, CorrectedLinear, GradientCorrectedLinear, NormLikeLinear

__all__ = [
    "AffineLikeLinear",
    "CorrectedLinear",
    "GradientCorrectedLinear",
    "NormLikeLinear",
    "PatchNormConv1d",
    "PatchNormConv2d",
    "PatchNormConv3d",
]
