"""MLP-Mixers without norms, whose linear layers are corrected in the norms' place.

timm's classes and state-dict names. Where timm's Mixer normalises the channels of every token, and then transposes for
the token-mixing MLP, here that MLP's first linear is corrected with its own input, one channel at all tokens: this is
the affine-like map of that linear. The channel-mixing MLP's first linear sees a token's channels, as the norm did.
"""

from typing import Any

import torch.nn as nn
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.mlp_mixer import MlpMixer, checkpoint_filter_fn

from affdiv_zoo.models._corrected import InitCorrected, correct_linear
from affdiv_zoo.types import Correction, Scale

__all__ = ["AffineMlpMixer"]  # register_model adds the entry points


class AffineMlpMixer(InitCorrected, MlpMixer):
    """timm's MlpMixer with corrected linears for norms: both MLPs' first, and the head. Their second ones stay plain.

    Args:
        correction: ``"affine"``, ``"norm"``, ``"gradient"`` or ``"none"``; see :mod:`affdiv_zoo.functional`.
        center: Each of their inputs less its mean (ours).
        scale: ``"rms"`` (ours) or ``"l2"`` (the paper's).
        **kwargs: As in ``timm.models.mlp_mixer.MlpMixer``, without ``norm_layer`` and ``block_layer``.
    """

    def __init__(
        self, *, correction: Correction = "affine", center: bool = False, scale: Scale = "rms", **kwargs: Any
    ) -> None:
        super().__init__(norm_layer=nn.Identity, **kwargs)
        self.correction, self.center, self.scale = correction, center, scale
        for block in self.blocks:
            for mlp in (block.mlp_tokens, block.mlp_channels):
                mlp.fc1 = correct_linear(mlp.fc1, correction, center, scale)
        self.head = correct_linear(self.head, correction, center, scale)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh, corrected head; arguments as in timm's class."""
        super().reset_classifier(num_classes, global_pool)
        self.head = correct_linear(self.head, self.correction, self.center, self.scale)


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,
        "pool_size": None,
        "crop_pct": 0.875,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "stem.proj",
        "classifier": "head",
        **kwargs,
    }


default_cfgs = generate_default_cfgs(
    {f"mixer_{size}_224_affine.untrained": _cfg() for size in ("s32", "s16", "b16")},
)


def _create(variant: str, pretrained: bool, **kwargs: Any) -> AffineMlpMixer:
    return build_model_with_cfg(
        AffineMlpMixer,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **kwargs,
    )


@register_model
def mixer_s32_224_affine(pretrained: bool = False, **kwargs: Any) -> AffineMlpMixer:
    """Mixer-S/32 with corrected linears for norms."""
    model_args = dict(patch_size=32, num_blocks=8, embed_dim=512)
    return _create("mixer_s32_224_affine", pretrained, **dict(model_args, **kwargs))


@register_model
def mixer_s16_224_affine(pretrained: bool = False, **kwargs: Any) -> AffineMlpMixer:
    """Mixer-S/16 with corrected linears for norms."""
    model_args = dict(patch_size=16, num_blocks=8, embed_dim=512)
    return _create("mixer_s16_224_affine", pretrained, **dict(model_args, **kwargs))


@register_model
def mixer_b16_224_affine(pretrained: bool = False, **kwargs: Any) -> AffineMlpMixer:
    """Mixer-B/16 with corrected linears for norms."""
    model_args = dict(patch_size=16, num_blocks=12, embed_dim=768)
    return _create("mixer_b16_224_affine", pretrained, **dict(model_args, **kwargs))
