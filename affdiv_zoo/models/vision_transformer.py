"""Vision transformers without norms, whose linear layers are corrected in the norms' place, and a nano ViT for 32 px.

timm's classes and state-dict names, so that weights map one to one. The norms are ``nn.Identity``; what they fed is
corrected: the query, key and value projections as the attention's correction says, the MLPs' first linear and the head.
The output projections of attention and MLP stay plain, with timm's small initial weights (std 0.02).
"""

import math
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from timm.layers import Attention, AttentionPoolLatent, Mlp, PatchEmbed
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models.vision_transformer import Block, VisionTransformer, checkpoint_filter_fn

from affdiv_zoo.layers import CorrectedAttention, PatchNormConv2d
from affdiv_zoo.models._corrected import InitCorrected, correct_linear
from affdiv_zoo.models._released import released_cfgs, warn_of_other_map
from affdiv_zoo.models.resnet import CIFAR10_MEAN, CIFAR10_STD
from affdiv_zoo.types import AttentionCorrection, Correction, Scale

__all__ = ["AffineVisionTransformer"]  # register_model adds the entry points


class CorrectedPatchEmbed(PatchEmbed):
    """timm's PatchEmbed with a PatchNorm convolution, which stays one when ``set_input_size`` rebuilds it.

    Args:
        *args: As in ``timm.layers.PatchEmbed``.
        correction: As in :class:`affdiv_zoo.layers.PatchNormConv2d`.
        center: Likewise.
        scale: Likewise.
        **kwargs: As in ``timm.layers.PatchEmbed``.
    """

    def __init__(self, *args: Any, correction: Correction, center: bool, scale: Scale, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.options = dict(correction=correction, center=center, scale=scale)
        PatchNormConv2d.from_conv(self.proj, bias=False, **self.options).reset_parameters()

    def set_input_size(
        self, img_size: int | tuple[int, int] | None = None, patch_size: int | tuple[int, int] | None = None
    ) -> None:
        """As in timm; resampled weights keep the size of the embedding."""
        old = self.proj
        super().set_input_size(img_size, patch_size)
        if self.proj is old:
            return
        new = PatchNormConv2d.from_conv(self.proj, bias=False, **self.options)
        if new.scale == "l2" and new.correction in ("affine", "norm"):
            # Of the same picture, ||x||^2 grows with the number of pixels. The factor of scale="rms" does the same.
            growth = math.sqrt(new.weight[0].numel() / old.weight[0].numel())
            with torch.no_grad():
                new.weight *= growth
                if new.bias is not None and new.correction == "affine":
                    new.bias *= growth


class AffineVisionTransformer(InitCorrected, VisionTransformer):
    """timm's VisionTransformer with corrected linears for norms.

    Args:
        correction: Of the value projection (and of q and k under ``attention="projection"``), the MLPs' first linear,
            the head, and what the norms around an attention pool fed: ``"affine"``, ``"norm"``, ``"gradient"`` or
            ``"none"``; see :mod:`affdiv_zoo.functional`.
        center: Each of their inputs less its mean (ours).
        scale: ``"rms"`` (ours) or ``"l2"`` (the paper's).
        attention: Of the attention logits; see :class:`affdiv_zoo.layers.CorrectedAttention`. ``"none"`` leaves q, k
            and v plain.
        embed_correction: Of the patch embedding, with the same ``center`` and ``scale``. ``"none"`` by default, a plain
            convolution: no norm feeds it in timm's net.
        **kwargs: As in ``timm.models.vision_transformer.VisionTransformer``, without the classes of the parts.

    Raises:
        ValueError: An option is unknown, or asks for a norm that feeds none of these.
    """

    def __init__(
        self,
        *,
        correction: Correction = "affine",
        center: bool = False,
        scale: Scale = "rms",
        attention: AttentionCorrection = "separable",
        embed_correction: Correction = "none",
        **kwargs: Any,
    ) -> None:
        for name in ("pre_norm", "qk_norm", "scale_attn_norm", "scale_mlp_norm"):
            if kwargs.get(name):
                raise ValueError(f"{name}={kwargs[name]!r} asks for a norm in a net without norms: leave it out")
        options = dict(correction=correction, center=center, scale=scale)
        embed_options = dict(options, correction=embed_correction)
        super().__init__(
            norm_layer=nn.Identity,
            embed_layer=PatchEmbed if embed_correction == "none" else partial(CorrectedPatchEmbed, **embed_options),
            block_fn=Block,
            attn_layer=Attention,
            mlp_layer=Mlp,
            **kwargs,
        )
        self.correction, self.center, self.scale = correction, center, scale
        for block in self.blocks:
            block.attn = _correct_attention(block.attn, attention, **options)
            block.mlp.fc1 = correct_linear(block.mlp.fc1, **options)
        if isinstance(self.attn_pool, AttentionPoolLatent):
            self.attn_pool.kv = correct_linear(self.attn_pool.kv, **options)
            self.attn_pool.mlp.fc1 = correct_linear(self.attn_pool.mlp.fc1, **options)
        self.head = correct_linear(self.head, **options)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh, corrected head; arguments as in timm's class."""
        super().reset_classifier(num_classes, global_pool)
        self.head = correct_linear(self.head, self.correction, self.center, self.scale)


def _correct_attention(plain: Attention, attention: AttentionCorrection, **options: Any) -> CorrectedAttention:
    """A fresh corrected attention of the plain one's shape. (timm takes a class, so no options can be bound to it.)"""
    corrected = CorrectedAttention(
        plain.qkv.in_features,
        plain.num_heads,
        qkv_bias=plain.qkv.bias is not None,
        attn_drop=plain.attn_drop.p,
        proj_drop=plain.proj_drop.p,
        device=plain.qkv.weight.device,
        dtype=plain.qkv.weight.dtype,
        attention=attention,
        **options,
    )
    corrected.proj = plain.proj  # initialised by timm
    if attention == "none":
        corrected.qkv = plain.qkv
    return corrected


def _cfg(**kwargs: Any) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "fixed_input_size": True,
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": (0.5, 0.5, 0.5),
        "std": (0.5, 0.5, 0.5),
        "first_conv": "patch_embed.proj",
        "classifier": "head",
        **kwargs,
    }


def _nano_cfg(**kwargs: Any) -> dict[str, Any]:
    sizes = {"num_classes": 10, "input_size": (3, 32, 32), "crop_pct": 1.0}
    return _cfg(**{**sizes, "mean": CIFAR10_MEAN, "std": CIFAR10_STD, **kwargs})


default_cfgs = generate_default_cfgs(
    {
        **{f"vit_{size}_patch16_224_affine.untrained": _cfg() for size in ("tiny", "small", "base")},
        **released_cfgs(_nano_cfg, "vit_nano_patch4_32", "vit_nano_patch4_32_affine"),
    }
)

_NANO = dict(patch_size=4, embed_dim=96, depth=6, num_heads=3, class_token=False, global_pool="avg")


def _create(cls: type[VisionTransformer], variant: str, pretrained: bool, **kwargs: Any) -> VisionTransformer:
    warn_of_other_map(cls, variant, pretrained, kwargs)
    return build_model_with_cfg(
        cls,
        variant,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg=dict(out_indices=kwargs.pop("out_indices", 3), feature_cls="getter"),
        **kwargs,
    )


@register_model
def vit_tiny_patch16_224_affine(pretrained: bool = False, **kwargs: Any) -> AffineVisionTransformer:
    """ViT-Ti/16 with corrected linears for norms."""
    model_args = dict(patch_size=16, embed_dim=192, depth=12, num_heads=3)
    return _create(AffineVisionTransformer, "vit_tiny_patch16_224_affine", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_small_patch16_224_affine(pretrained: bool = False, **kwargs: Any) -> AffineVisionTransformer:
    """ViT-S/16 with corrected linears for norms."""
    model_args = dict(patch_size=16, embed_dim=384, depth=12, num_heads=6)
    return _create(AffineVisionTransformer, "vit_small_patch16_224_affine", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_base_patch16_224_affine(pretrained: bool = False, **kwargs: Any) -> AffineVisionTransformer:
    """ViT-B/16 with corrected linears for norms."""
    model_args = dict(patch_size=16, embed_dim=768, depth=12, num_heads=12)
    return _create(AffineVisionTransformer, "vit_base_patch16_224_affine", pretrained, **dict(model_args, **kwargs))


@register_model
def vit_nano_patch4_32(pretrained: bool = False, **kwargs: Any) -> VisionTransformer:
    """A ViT of 96 channels and 6 blocks for 32 px images, with LayerNorm."""
    return _create(VisionTransformer, "vit_nano_patch4_32", pretrained, **dict(_NANO, **kwargs))


@register_model
def vit_nano_patch4_32_affine(pretrained: bool = False, **kwargs: Any) -> AffineVisionTransformer:
    """A ViT of 96 channels and 6 blocks for 32 px images, with corrected linears for norms."""
    return _create(AffineVisionTransformer, "vit_nano_patch4_32_affine", pretrained, **dict(_NANO, **kwargs))
