"""What the model families share: corrected layers in the places of plain ones."""

from typing import Any

import torch.nn as nn
from timm.layers import register_notrace_module

from affdiv_zoo.layers import CorrectedAttention, CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d
from affdiv_zoo.types import Correction, Scale

_MAPS = (CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d)

# torch.fx takes them whole: their argument checks depend on shapes, which a symbolic trace does not know.
for _layer in _MAPS:
    register_notrace_module(_layer)


def correct_linear(linear: nn.Module, correction: Correction, center: bool, scale: Scale) -> nn.Module:
    """A fresh corrected layer of a linear's shape, bias, device, dtype and mode; other modules as they are."""
    if not isinstance(linear, nn.Linear):
        return linear  # nn.Identity where a model has no head
    return CorrectedLinear(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        device=linear.weight.device,
        dtype=linear.weight.dtype,
        correction=correction,
        center=center,
        scale=scale,
    ).train(linear.training)


class InitCorrected:
    """Stands before a timm model among the bases: its ``init_weights`` leaves corrected layers to themselves."""

    def init_weights(self, *args: Any, **kwargs: Any) -> None:
        """timm's initialisation, then the corrected layers' own; arguments as in timm's class."""
        super().init_weights(*args, **kwargs)
        for module in self.modules():
            if isinstance(module, (*_MAPS, CorrectedAttention)):
                module.reset_parameters()
