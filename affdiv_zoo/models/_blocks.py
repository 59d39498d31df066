"""timm's residual blocks with the activation and the residual addition inside the PatchNorm convolution.

A PatchNorm convolution keeps its output for the backward pass. With the ReLU inside, that output is what the next layer
keeps anyway, and a pass over memory is saved; with the addition inside, the block keeps nothing more than its output.
"""

import torch.nn as nn
from timm.models.resnet import BasicBlock, Bottleneck
from torch import Tensor

from affdiv_zoo.layers import PatchNormConv2d

__all__ = ["PatchNormBasicBlock", "PatchNormBottleneck", "fuse_activations"]


class PatchNormBasicBlock(BasicBlock):
    """timm's ``BasicBlock`` of PatchNorm convolutions; :func:`fuse_activations` makes them."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.aa(self.act1(self.drop_block(self.conv1(x))))
        if self.se is None and self.drop_path is None:
            return self.act2(self.conv2(x, shortcut))
        x = self.conv2(x)
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        return self.act2(x + shortcut)


class PatchNormBottleneck(Bottleneck):
    """timm's ``Bottleneck`` of PatchNorm convolutions; :func:`fuse_activations` makes them."""

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.act1(self.conv1(x))
        x = self.aa(self.act2(self.drop_block(self.conv2(x))))
        if self.se is None and self.drop_path is None:
            return self.act3(self.conv3(x, shortcut))
        x = self.conv3(x)
        if self.se is not None:
            x = self.se(x)
        if self.drop_path is not None:
            x = self.drop_path(x)
        return self.act3(x + shortcut)


_BLOCKS = {BasicBlock: PatchNormBasicBlock, Bottleneck: PatchNormBottleneck}


def fuse_activations(model: nn.Module) -> None:
    """Moves every ReLU of a timm ResNet into the PatchNorm convolution before it, where nothing stands between them.

    Args:
        model: A ResNet whose convolutions are PatchNorm convolutions and whose norms are ``nn.Identity``. Changed in
            place: blocks change class, ReLUs become ``nn.Identity``; other activations stay, but no longer work in
            place, since they would overwrite what the convolution keeps.
    """
    for module in model.modules():
        if getattr(module, "inplace", False):
            module.inplace = False
    for block in list(model.modules()):
        if type(block) not in _BLOCKS:
            continue
        block.__class__ = _BLOCKS[type(block)]
        bottleneck = isinstance(block, Bottleneck)
        if isinstance(block.drop_block, nn.Identity):
            _fuse(block, "conv2" if bottleneck else "conv1", "act2" if bottleneck else "act1")
        if bottleneck:
            _fuse(block, "conv1", "act1")
        if block.se is None and block.drop_path is None:
            _fuse(block, "conv3" if bottleneck else "conv2", "act3" if bottleneck else "act2")
    _fuse(model, "conv1", "act1")


def _fuse(parent: nn.Module, conv: str, act: str) -> None:
    if type(getattr(parent, act)) is nn.ReLU and type(getattr(parent, conv)) is PatchNormConv2d:
        getattr(parent, conv).act = "relu"
        setattr(parent, act, nn.Identity())
