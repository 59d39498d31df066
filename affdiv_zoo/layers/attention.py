"""Self-attention whose logits and value projection are corrected, over :mod:`affdiv_zoo.functional`."""

import math
from typing import Any, Final, get_args

import torch
import torch.nn.functional as F
from timm.layers import Attention, maybe_add_mask, register_notrace_function, register_notrace_module
from timm.layers.attention import resolve_self_attn_mask
from torch import Tensor, nn

from affdiv_zoo import _plain
from affdiv_zoo._checks import check_choice, check_options
from affdiv_zoo._plain import corrected_attention_logits, rescale_qk
from affdiv_zoo.functional import corrected_linear, corrected_qkv
from affdiv_zoo.layers.linear import CorrectedLinear
from affdiv_zoo.types import AttentionCorrection, Correction, Scale

__all__ = ["CorrectedAttention"]

# torch.fx takes them whole: they look at dtypes, which a symbolic trace does not know.
register_notrace_function(corrected_attention_logits)
register_notrace_function(rescale_qk)


class CorrectedAttention(Attention):
    r"""timm's ``Attention`` with corrected logits and projections; its arguments, attributes and state-dict keys.

    ``attention`` chooses the logits, :func:`affdiv_zoo.functional.corrected_attention_logits`:

    ================  ================================================  ======================  ======================
    ``attention``     q and k, then the logit                           v                       kernel
    ================  ================================================  ======================  ======================
    ``"none"``        plain, q . k / sqrt(head_dim)                     plain                   fused: timm's attention
    ``"projection"``  with the linear correction, q . k                 the linear correction   fused
    ``"separable"``   plain, then divided by sqrt(||q|| s)              the linear correction   fused
    ``"logit"``       plain, q . k / sqrt(D)                            the linear correction   unfused
    ``"exact"``       plain, (||q / s + k / s|| - ||q / s - k / s||)/2  the linear correction   unfused
    ================  ================================================  ======================  ======================

    Every logit is multiplied by its head's temperature, exp(``logit_scale``), which is learned. It starts where random
    tokens have logits of unit standard deviation, as plain attention does after a LayerNorm, with the weights of
    ``reset_parameters`` (q and k entries of variance 1 under ``"projection"``, weights of variance 1 / dim else):

    * ``"projection"``: q . k has variance head_dim, so the temperature is head_dim^(-1/2);
    * the others: ||q||^2 / s^2 and ||k||^2 / s^2 are near u = head_dim / dim, and their product's cosine has variance
      1 / head_dim. The logit is near sqrt(u / 2) times the cosine, so the temperature is (2 dim)^(1/2).

    The correction is derived for q and k as they leave their projections. With ``qk_norm`` it is applied to the
    normalised ones, whose size it then finds constant.

    Args:
        *args: As in ``timm.layers.Attention``: dim, num_heads, ...
        attention: The table above. Under ``"none"`` the next three have no effect on q, k and v.
        correction: The linear correction of the value projection, and of q and k under ``"projection"``: ``"affine"``,
            ``"norm"``, ``"gradient"`` or ``"none"``; see :mod:`affdiv_zoo.functional`.
        center: q, k and v are maps of x - mean(x) (ours).
        scale: Of the linear correction, ``"l2"`` (the paper) or ``"rms"`` (ours).
        eps: Added to ||x||^2 where no 1 is (without ``qkv_bias``), and to the squared norms of queries and keys.
        temperature: Where every head's temperature starts, instead of the above.
        proj_correction: The linear correction of the output projection, with the same ``center`` and ``scale``.
            Plain by default, since its input is a mean of corrected values.
        flex: Compute ``"logit"`` by torch's ``flex_attention`` where that can (no mask, no dropout, no gradient on a
            CPU). Worth it only inside ``torch.compile`` on CUDA, where the tokens' matrix is then never formed.
        **kwargs: As in ``timm.layers.Attention``.

    Shapes: ``(batch, tokens, dim)`` to ``(batch, tokens, dim_out)``, dtype kept.

    Raises:
        ValueError: An option is unknown, or does not fit the others.
    """

    fused_attn: Final[bool]

    def __init__(
        self,
        *args: Any,
        attention: AttentionCorrection = "none",
        correction: Correction = "affine",
        center: bool = False,
        scale: Scale = "rms",
        eps: float = 1e-6,
        temperature: float | None = None,
        proj_correction: Correction = "none",
        flex: bool = False,
        **kwargs: Any,
    ) -> None:
        check_choice("attention", attention, get_args(AttentionCorrection))
        check_choice("proj_correction", proj_correction, get_args(Correction))
        check_options(correction, scale, eps, center)
        if temperature is not None and (attention == "none" or not 0 < temperature < math.inf):
            raise ValueError(
                f"temperature={temperature!r} with attention={attention!r}: it must be positive, and None under 'none'"
            )
        if flex and attention != "logit":
            raise ValueError(f"flex=True with attention={attention!r}: only 'logit' has a flex_attention form")
        super().__init__(*args, **kwargs)
        self.flex = flex
        self.attention = attention
        self.center = center
        self.eps = eps
        options = dict(center=center, scale=scale, eps=eps)
        if proj_correction != "none":
            self.proj = _like(self.proj, CorrectedLinear, correction=proj_correction, **options)
        self.register_parameter("logit_scale", None)
        if attention == "none":
            return
        cls = CorrectedLinear if attention == "projection" else _QKV
        self.qkv = _like(self.qkv, cls, correction=correction, **options)
        if temperature is None:
            temperature = self.head_dim**-0.5 if attention == "projection" else math.sqrt(2 * self.qkv.in_features)
        self.temperature = temperature
        self.logit_scale = nn.Parameter(self.qkv.weight.new_empty(self.num_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The temperatures; the projections have methods of their own."""
        if self.logit_scale is not None:
            nn.init.constant_(self.logit_scale, math.log(self.temperature))

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Attention among the tokens; ``attn_mask`` and ``is_causal`` as in timm's and torch's attention."""
        B, N, C = x.shape
        gate = self.gate(x).sigmoid() if self.gate is not None else None
        pairwise = self.attention == "logit" or self.attention == "exact"
        scale = self.scale
        temperature = x  # TorchScript wants it defined
        if self.logit_scale is not None:
            scale = 1.0
            temperature = self.logit_scale.exp()

        if not torch.jit.is_scripting() and self._in_one(x):
            w, b = self.qkv.weight, self.qkv.bias
            q, k, v = corrected_qkv(
                x, w, b, temperature, self.attention, center=self.center, scale=self.qkv.scale, eps=self.eps
            )
        else:
            q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
            q, k = self.q_norm(q), self.k_norm(k)
            if self.logit_scale is not None and not pairwise:
                bias = self.qkv.bias is not None
                q, k = rescale_qk(x, q, k, temperature, self.attention, bias, self.center, self.eps)

        if not torch.jit.is_scripting() and self._can_flex(x, attn_mask):
            x = logit_flex_attention(
                x, q, k, v, temperature, self.qkv.bias is not None, self.center, self.eps, is_causal
            )
        elif self.fused_attn and not pairwise:
            x = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=attn_mask,
                dropout_p=self.attn_drop.p if self.training else 0.0,
                is_causal=is_causal,
                scale=scale,
            )
        else:
            if pairwise:
                attn = corrected_attention_logits(
                    x, q, k, self.attention, self.qkv.bias is not None, self.center, self.eps
                )
                attn = (attn * temperature.view(-1, 1, 1)).to(q.dtype)
            else:
                attn = (q * scale) @ k.transpose(-2, -1)
            attn = maybe_add_mask(attn, resolve_self_attn_mask(N, attn, attn_mask, is_causal))
            attn = self.attn_drop(attn.softmax(dim=-1))
            x = attn @ v

        x = self.norm(x.transpose(1, 2).reshape(B, N, self.attn_dim))
        if gate is not None:
            x = x * gate
        return self.proj_drop(self.proj(x))

    @torch.jit.unused
    def _in_one(self, x: Tensor) -> bool:
        """Whether q, k and v can come from one node, past the modules between: these are ours, and nobody watches."""
        between = (self.qkv, self.q_norm, self.k_norm)
        hooked = any(
            m._forward_hooks or m._forward_pre_hooks or m._backward_hooks or m._backward_pre_hooks for m in between
        ) or any("forward" in m.__dict__ for m in between)  # accelerate's hooks, which bring offloaded weights
        return (
            self.attention in ("projection", "separable")
            and type(self.qkv) in (CorrectedLinear, _QKV)
            and self.qkv.correction == "affine"
            and type(self.q_norm) is type(self.k_norm) is nn.Identity
            and type(x) is Tensor
            and not hooked
        )

    @torch.jit.unused
    def _can_flex(self, x: Tensor, attn_mask: Tensor | None) -> bool:
        if not self.flex:
            return False
        dropout = self.training and self.attn_drop.p > 0
        no_backward = x.device.type == "cpu" and torch.is_grad_enabled()
        return attn_mask is None and not dropout and not no_backward and x.shape[1] > 0

    def extra_repr(self) -> str:
        return f"attention={self.attention}"


@register_notrace_module
class _QKV(CorrectedLinear):
    """The three projections in one: q and k plain, v corrected, all of x - mean(x) if ``center``."""

    def reset_parameters(self) -> None:
        """W ~ N(0, 1 / in_features) for q and k, :class:`CorrectedLinear`'s for v; b = 0."""
        super().reset_parameters()
        nn.init.normal_(self.weight[: self.out_features // 3 * 2], std=self.in_features**-0.5)

    def forward(self, input: Tensor) -> Tensor:
        if torch.jit.is_scripting():
            return _plain.attention_projections(
                input, self.weight, self.bias, "separable", self.correction, self.center, self.scale, self.eps
            )
        plain, center, eps = self.out_features // 3 * 2, self.center, self.eps
        qk_bias = None if self.bias is None else self.bias[:plain]
        v_bias = None if self.bias is None else self.bias[plain:]
        qk = corrected_linear(input, self.weight[:plain], qk_bias, correction="none", center=center, eps=eps)
        v = corrected_linear(
            input, self.weight[plain:], v_bias, correction=self.correction, center=center, scale=self.scale, eps=eps
        )
        return torch.cat([qk, v], -1)


def logit_flex_attention(
    x: Tensor, q: Tensor, k: Tensor, v: Tensor, temperature: Tensor, bias: bool, center: bool, eps: float, causal: bool
) -> Tensor:
    """Attention with the logits q . k / sqrt(D) by ``flex_attention``: the divergence modifies the score."""
    from torch.nn.attention.flex_attention import flex_attention

    r = _plain.inverse_token_norm(x, bias, center, eps).detach()
    q, k = (q * r).to(q.dtype), (k * r).to(k.dtype)
    q_squares, k_squares = (_plain.widen(t.detach()).square().sum(-1) for t in (q, k))

    def corrected(score: Tensor, batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        score = score * torch.rsqrt(q_squares[batch, head, i] + k_squares[batch, head, j] + eps)
        return torch.where(i >= j, score, -math.inf) if causal else score

    return flex_attention((q * temperature.view(-1, 1, 1)).to(q.dtype), k, v, score_mod=corrected, scale=1.0)


def _like(linear: nn.Linear, cls: type[CorrectedLinear], **options: Any) -> CorrectedLinear:
    """A corrected layer of the plain one's shape."""
    weight, bias = linear.weight, linear.bias is not None
    return cls(linear.in_features, linear.out_features, bias, device=weight.device, dtype=weight.dtype, **options)
