"""Corrected attention in converted models: timm's ``Attention`` whose qkv layer has taken over its norm."""

import math
from collections.abc import Callable
from typing import get_args

import torch
import torch.nn as nn
from timm.layers import Attention
from torch import Tensor

from affdiv_zoo._checks import check_choice
from affdiv_zoo.convert._report import AttentionChange
from affdiv_zoo.convert._swap import least_squares, relative_rms
from affdiv_zoo.functional import corrected_attention_logits, corrected_linear
from affdiv_zoo.layers import CorrectedAttention, CorrectedLinear
from affdiv_zoo.types import AttentionCorrection


def is_attention(module: nn.Module) -> bool:
    """Exactly timm's class: subclasses and other attentions compute something else."""
    return type(module) is Attention


def check(attention: str, correction: str, model: nn.Module) -> None:
    """Raises ValueError for an attention correction that the model or the linear correction does not allow."""
    check_choice("attention", attention, get_args(AttentionCorrection))
    if attention == "none":
        return
    if correction == "gradient":
        raise ValueError(
            f"attention={attention!r} needs the norms folded, which correction='gradient' keeps: "
            "use correction='affine' or 'norm', or attention=None"
        )
    if not any(map(is_attention, model.modules())):
        raise ValueError(
            f"attention={attention!r}: {type(model).__name__} has no timm.layers.Attention, the kind that can be "
            "corrected: use attention=None"
        )


def correct(module: nn.Module, attention: str) -> None:
    """Turns timm's attention with a corrected qkv layer into :class:`CorrectedAttention`, in place."""
    qkv = module.qkv
    # What the constructor would set, whatever that is; what the module has already stays.
    made = CorrectedAttention(
        qkv.in_features,
        module.num_heads,
        attn_head_dim=module.head_dim,
        qkv_bias=qkv.bias is not None,
        qk_norm=not isinstance(module.q_norm, nn.Identity),
        norm_layer=nn.LayerNorm,
        attention=attention,
        correction=qkv.correction,
        center=qkv.center,
        scale=qkv.scale,
        eps=qkv.eps,
        device="meta",
    )
    for ours, theirs in ((module, made), (qkv, made.qkv)):
        ours.__class__ = type(theirs)
        for key, value in vars(theirs).items():
            vars(ours).setdefault(key, value)
    module.logit_scale = nn.Parameter(qkv.weight.new_empty(module.num_heads), requires_grad=qkv.weight.requires_grad)
    if not module.logit_scale.is_meta:
        module.reset_parameters()


def fold(
    module: nn.Module, attention: str, calibrate_qkv: Callable[[Tensor], None] | None
) -> tuple[AttentionChange, Callable[[Tensor], None]]:
    """Corrects an attention; the returned function is to be called with its input, and calibrates its qkv layer too.

    Under ``"projection"`` the function does not change. Otherwise (ours) q and k become plain maps with the weights
    that they had times the mean radial factor, and every head's temperature is the one for which its logits, each
    row less its mean (which softmax ignores), are closest to the uncorrected ones in the least squares sense.
    """
    change = AttentionChange("")
    correct(module, attention)

    def calibrate(x: Tensor) -> None:
        kind, module.qkv.__class__ = type(module.qkv), CorrectedLinear
        if calibrate_qkv is not None:
            calibrate_qkv(x)
        before = Attention.forward(module, x)
        target = _logits(module, x)
        module.qkv.__class__ = kind
        if attention != "projection":
            _unnormalise(module.qkv, x)
            got = _corrected_logits(module, x)
            heads = [
                least_squares(g - g.mean(-1, keepdim=True), t - t.mean(-1, keepdim=True))
                for g, t in zip(got.unbind(1), target.unbind(1), strict=True)
            ]
            heads = torch.stack(heads)
            module.logit_scale.copy_(torch.where(heads > 0, heads, module.temperature).log())
        change.difference = relative_rms((module.forward(x) - before).double(), before.double())

    return change, calibrate


def _unnormalise(qkv: CorrectedLinear, x: Tensor) -> None:
    """Gives the q and k rows of a normalising layer the mean radial factor that they lose."""
    x = x.double()
    v = x - x.mean(-1, keepdim=True) if qkv.center else x
    n, augmented = qkv.in_features, qkv.correction == "affine" and qkv.bias is not None
    s = math.sqrt(n + augmented) if qkv.scale == "rms" else 1.0
    radial = float((s * torch.rsqrt(v.square().sum(-1) + (1.0 if augmented else qkv.eps))).mean())
    plain = qkv.out_features // 3 * 2
    qkv.weight[:plain] *= radial
    if augmented:
        qkv.bias[:plain] *= radial


def _split(module: nn.Module, qkv: Tensor, parts: int) -> list[Tensor]:
    """``(batch, tokens, ...)`` to q, k (and v) of ``(batch, heads, tokens, head_dim)``, q and k normed if they are."""
    q, k, *v = qkv.unflatten(-1, (parts, module.num_heads, module.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
    return [module.q_norm(q), module.k_norm(k), *v]


def _logits(module: nn.Module, x: Tensor) -> Tensor:
    """The uncorrected logits, of a qkv layer that is a plain :class:`CorrectedLinear` still."""
    q, k, _ = _split(module, module.qkv(x), 3)
    return (q @ k.transpose(-2, -1)).double() * module.head_dim**-0.5


def _corrected_logits(module: CorrectedAttention, x: Tensor) -> Tensor:
    """The logits at temperature 1, as :class:`CorrectedAttention` computes them."""
    plain, bias = module.qkv.out_features // 3 * 2, module.qkv.bias
    qk = corrected_linear(
        x,
        module.qkv.weight[:plain],
        None if bias is None else bias[:plain],
        correction="none",
        center=module.center,
    )
    q, k = _split(module, qk, 2)
    options = dict(bias=bias is not None, center=module.center, eps=module.eps)
    return corrected_attention_logits(x, q, k, module.attention, **options).double()
