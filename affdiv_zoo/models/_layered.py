"""What the nets that are no more than layers, one behind the other, share: timm's interface."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from timm.layers import create_classifier, get_act_layer
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq


def check_size(width: int, depth: int) -> None:
    """Raises a ValueError unless there is at least one layer of at least one feature."""
    for name, value in (("width", width), ("depth", depth)):
        if value < 1:
            raise ValueError(f"{name}={value!r} must be 1 or more")


def act_layer(act: str) -> Callable[[], nn.Module]:
    """timm's activation of that name, or a ValueError."""
    try:
        return get_act_layer(act)
    except KeyError:
        raise ValueError(
            f"act={act!r} is not an activation of timm's, such as 'relu', 'tanh' or 'leaky_relu'"
        ) from None


class LayeredNet(nn.Module):
    """Layers, a norm behind the last, pooling and classifier.

    A subclass calls :meth:`_build` at the end of its constructor. :meth:`_prepare` and :meth:`_as_map` are for layers
    that do not work on maps.
    """

    def _build(
        self,
        layers: list[nn.Module],
        norm: nn.Module,
        feature_info: list[dict[str, Any]],
        num_classes: int,
        in_chans: int,
        global_pool: str,
        drop_rate: float,
        **dd: Any,
    ) -> None:
        """Everything but the subclass's own attributes; ``feature_info`` has timm's form, an entry per layer."""
        width = feature_info[-1]["num_chs"]
        self.num_classes, self.in_chans, self.num_features = num_classes, in_chans, width
        self.grad_checkpointing = False
        self.layers = nn.Sequential(*layers)
        self.feature_info = feature_info
        self.norm = norm
        self.head_drop = nn.Dropout(drop_rate)
        self.global_pool, self.head = create_classifier(width, num_classes, pool_type=global_pool, **dd)
        self.head_hidden_size = width * self.global_pool.feat_mult()
        self.init_weights()

    def _prepare(self, x: torch.Tensor) -> torch.Tensor:
        """The images as the first layer takes them."""
        return x

    def _as_map(self, x: torch.Tensor) -> torch.Tensor:
        """A layer's output as ``(batch, channels, height, width)``."""
        return x

    @torch.jit.ignore
    def init_weights(self) -> None:
        """W ~ N(0, 1 / fan_in), b = 0, as in the corrected layers."""
        for module in self.modules():
            if isinstance(module, (nn.Conv2d, nn.Linear)):
                nn.init.normal_(module.weight, std=module.weight[0].numel() ** -0.5)
                nn.init.zeros_(module.bias)

    @torch.jit.ignore
    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameters by depth, for layer-wise learning rates."""
        return dict(stem=r"^layers\.0\.", blocks=[(r"^layers\.(\d+)", None), (r"^norm", (99999,))])

    @torch.jit.ignore
    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recompute every layer in the backward pass."""
        self.grad_checkpointing = enable

    @torch.jit.ignore
    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A fresh classifier; the pooling stays as it is if ``global_pool`` is None."""
        self.num_classes = num_classes
        pool = self.global_pool.pool_type if global_pool is None else global_pool
        like = next(self.layers.parameters())
        self.global_pool, self.head = create_classifier(
            self.num_features, num_classes, pool_type=pool, device=like.device, dtype=like.dtype
        )
        self.global_pool.train(self.training)
        self.head.train(self.training)

    def forward_intermediates(
        self,
        x: torch.Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[torch.Tensor] | tuple[torch.Tensor, list[torch.Tensor]]:
        """The outputs of the chosen layers, and of the last; arguments as in timm's models."""
        assert output_fmt == "NCHW", "Output shape must be NCHW."
        take, last = feature_take_indices(len(self.layers), indices)
        x = self._prepare(x)
        intermediates = []
        for i, layer in enumerate(self.layers[: last + 1] if stop_early else self.layers):
            x = checkpoint_seq([layer], x) if self.grad_checkpointing and not torch.jit.is_scripting() else layer(x)
            if i in take:
                intermediates.append(self._as_map(self.norm(x) if norm else x))
        return intermediates if intermediates_only else (self._as_map(self.norm(x)), intermediates)

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drops the layers behind the last chosen one; arguments as in timm's models."""
        take, last = feature_take_indices(len(self.layers), indices)
        self.layers = self.layers[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return take

    def forward_features(self, x: torch.Tensor) -> torch.Tensor:
        """The last layer's output, ``(batch, channels, height, width)``."""
        x = self._prepare(x)
        if self.grad_checkpointing and not torch.jit.is_scripting():
            x = checkpoint_seq(self.layers, x)
        else:
            x = self.layers(x)
        return self._as_map(self.norm(x))

    def forward_head(self, x: torch.Tensor, pre_logits: bool = False) -> torch.Tensor:
        """Pooling and classifier."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward_head(self.forward_features(x))
