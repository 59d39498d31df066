"""The Mixers."""

import timm
import torch
import torch.nn as nn

from affdiv_zoo.functional import affine_like_linear_reference

TINY = dict(img_size=32, patch_size=8, embed_dim=24, num_blocks=2)


def test_a_net_is_the_formulas_it_stands_for():
    """Token mixing is corrected over the tokens of a channel, channel mixing over the channels of a token."""
    model = timm.create_model("mixer_s16_224_affine", **TINY).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    image = torch.randn(2, 3, 32, 32, dtype=torch.float64)

    def affine_like(layer, x):
        return affine_like_linear_reference(x, layer.weight, layer.bias, scale="rms")

    def mlp(layers, x):
        return nn.functional.gelu(affine_like(layers.fc1, x)) @ layers.fc2.weight.T + layers.fc2.bias

    x = nn.functional.conv2d(image, model.stem.proj.weight, model.stem.proj.bias, stride=8).flatten(2).mT
    for block in model.blocks:
        x = x + mlp(block.mlp_tokens, x.mT).mT
        x = x + mlp(block.mlp_channels, x)
    torch.testing.assert_close(model(image), affine_like(model.head, x.mean(1)), rtol=1e-8, atol=1e-8)


def test_plain_layers_start_as_timms():
    """Xavier's, in what no norm fed."""
    model = timm.create_model("mixer_s32_224_affine")
    for mlp in (model.blocks[0].mlp_tokens, model.blocks[7].mlp_channels):
        fan = sum(mlp.fc2.weight.shape)
        torch.testing.assert_close(mlp.fc2.weight.std(), torch.tensor((2 / fan) ** 0.5), rtol=0.05, atol=0)
        torch.testing.assert_close(mlp.fc1.weight.std(), torch.tensor(mlp.fc1.in_features**-0.5), rtol=0.05, atol=0)
