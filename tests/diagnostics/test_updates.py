"""The three parts of the update: the fast path against the kernel of all pairs of rows, and against numbers by hand."""

import pytest
import timm.layers
import torch
import torch.nn.functional as F
from torch import nn
from transformers.pytorch_utils import Conv1D

from affdiv_zoo.diagnostics import _updates
from affdiv_zoo.diagnostics._record import Layer, run
from affdiv_zoo.diagnostics._updates import layer_updates, layer_updates_reference
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d


def recorded(net: nn.Module, x: torch.Tensor) -> list[Layer]:
    """The layers after a backward pass of a loss whose gradient is different at every output."""
    net.double()

    def loss(output: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(1)
        return (output * torch.randn_like(output)).sum() / len(x)

    layers = run(net, x.double(), loss).layers
    assert layers and not any(layer.why_not for layer in layers), [layer.why_not for layer in layers]
    return layers


def check(layer: Layer, batch: int) -> None:
    fast, slow = layer_updates(layer, batch), layer_updates_reference(layer, batch)
    assert fast.samples == slow.samples and len(fast.calls) == len(slow.calls) == len(layer.calls)
    assert fast.unexplained < 1e-12
    for a, b in zip(fast.calls, slow.calls, strict=True):
        for part in ("ideal", "sample", "total"):
            torch.testing.assert_close(getattr(a, part), getattr(b, part))
        torch.testing.assert_close(a.divergence, b.divergence)
        assert float(a.ideal.norm()) > 0 and a.step is a.total


CONVS = {
    "plain": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 6, 5)),
    "no bias": (lambda: nn.Conv2d(4, 6, 3, bias=False), (4, 6, 5)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 6, 5)),
    "depthwise": (lambda: nn.Conv2d(4, 4, 3, groups=4, padding=1), (4, 6, 5)),
    "strided": (lambda: nn.Conv2d(4, 6, (3, 2), stride=(2, 3), padding=(1, 2)), (4, 7, 6)),
    "dilated": (lambda: nn.Conv2d(4, 6, 3, dilation=2, padding=2), (4, 6, 5)),
    "1x1": (lambda: nn.Conv2d(4, 6, 1), (4, 3, 5)),
    "strided 1x1": (lambda: nn.Conv2d(4, 6, 1, stride=2), (4, 5, 5)),
    "reflect": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (4, 6, 5)),
    "same": (lambda: nn.Conv2d(4, 6, 4, padding="same"), (4, 6, 5)),
    "timm's same": (lambda: timm.layers.Conv2dSame(4, 6, 3, stride=2), (4, 6, 5)),
    "1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1), (4, 9)),
    "3d": (lambda: nn.Conv3d(2, 3, 2, padding=1, dilation=2), (2, 4, 3, 3)),
}


@pytest.mark.parametrize("name", CONVS)
def test_convolutions(name: str) -> None:
    make, shape = CONVS[name]
    (layer,) = recorded(make(), torch.randn(3, *shape))
    check(layer, 3)


@pytest.mark.parametrize("correction", ["none", "affine", "norm", "gradient"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_corrected_layers(correction: str, center: bool, bias: bool) -> None:
    options = dict(bias=bias, correction=correction, center=center)
    net = nn.Sequential(
        PatchNormConv2d(4, 6, 3, padding=1, groups=2, scale="l2", act="relu", **options),
        PatchNormConv2d(6, 4, 3, stride=2, **options),
        nn.Flatten(2),
        PatchNormConv1d(4, 4, 2, **options),
        nn.Unflatten(2, (1, 1, -1)),
        PatchNormConv3d(4, 3, (1, 1, 2), **options),
        nn.Flatten(),
        CorrectedLinear(6, 3, scale="l2", **options),
    )
    s2 = {"none": None, "affine": 1.0, "norm": 2.0 if bias else 1.0, "gradient": 1.0}[correction]
    layers = recorded(net, torch.randn(5, 4, 5, 5))
    for layer in layers:
        check(layer, 5)
    if s2 is not None:  # in the paper's form the factor is this constant
        for layer in (layers[0], layers[-1]):
            for d in layer_updates(layer, 5).calls[0].divergence:
                torch.testing.assert_close(d, torch.full_like(d, s2), rtol=1e-5, atol=0)


def test_rows_by_hand() -> None:
    linear = nn.Linear(3, 2)
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0], [3.0, 0.0, 0.0]])
    (layer,) = recorded(linear, x)
    (call,) = layer_updates(layer, 3).calls
    assert call.divergence[0].flatten().tolist() == [6.0, 3.0, 10.0]
    g = call.ideal[:, 0, :, 0]
    torch.testing.assert_close(call.total[1, 0, :, 0], 3 * g[0] + 3 * g[1] + 1 * g[2])  # x_q . x_1 + 1 = 3, 3, 1
    torch.testing.assert_close(call.sample, call.same(0, layer.map.parts[0]))  # a sample is one row: no other patches


class Twice(nn.Module):
    """Calls one layer on its own output, and another in windows of the image."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4)
        self.tied.weight, self.tied.bias = self.shared.weight, self.shared.bias
        self.windows = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.tied(torch.tanh(self.shared(torch.tanh(self.shared(x)))))
        return self.windows(y.reshape(-1, 3, 4)).reshape(x.shape[0], -1)


def test_several_calls_shared_modules_and_windows() -> None:
    shared, windows = recorded(Twice(), torch.randn(5, 6, 4))
    assert len(shared.calls) == 3 and shared.name == "shared" and "tied" in shared.note
    assert windows.calls[0].input.shape == (10, 3, 4)
    check(shared, 5)
    check(windows, 5)
    (call,) = layer_updates(windows, 5).calls
    assert call.ideal.shape == (5, 1, 3, 6)  # both windows of a sample
    for s in range(5):  # what a step on that sample alone does to its windows
        x, g = (t[2 * s : 2 * s + 2].flatten(0, 1) for t in (windows.calls[0].input, windows.calls[0].grad))
        torch.testing.assert_close(call.ideal[s, 0].mT, g)
        torch.testing.assert_close(call.sample[s, 0].mT, x @ (g.mT @ x).mT + g.sum(0))


@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_a_frozen_weight_or_bias_takes_no_part(frozen: str) -> None:
    conv = nn.Conv2d(2, 3, 3)
    getattr(conv, frozen).requires_grad_(False)
    (layer,) = recorded(conv, torch.randn(2, 2, 5, 5))
    check(layer, 2)
    d = layer_updates(layer, 2).calls[0].divergence[0]
    patches = F.unfold(layer.calls[0].input, 3).square().sum(1)
    torch.testing.assert_close(d[:, 0], torch.ones_like(patches) if frozen == "weight" else patches)

    linear = CorrectedLinear(3, 2, correction="norm", scale="l2", eps=0.0)
    getattr(linear, frozen).requires_grad_(False)
    (layer,) = recorded(linear, torch.randn(4, 3))
    check(layer, 4)
    (d,) = layer_updates(layer, 4).calls[0].divergence  # 2 if both train
    torch.testing.assert_close(d, torch.ones_like(d))


def test_transformers_conv1d() -> None:
    (layer,) = recorded(Conv1D(5, 3), torch.randn(2, 4, 3))
    check(layer, 2)


@pytest.mark.parametrize("limit", [1, 300, 10**9])
@pytest.mark.parametrize("outputs", [2, 40])
def test_chunks_and_both_ways_to_multiply_agree(limit: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_updates, "CHUNK", limit)
    (layer,) = recorded(nn.Conv2d(4, outputs, 3), torch.randn(5, 4, 6, 6))
    assert _updates._by_positions(16, 36, outputs) == (outputs == 40)
    check(layer, 5)


def test_memory_is_linear_in_the_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of an image of 64 x 64 positions has anything near 4096^2 entries."""
    (layer,) = recorded(nn.Conv2d(2, 3, 3, padding=1), torch.randn(2, 2, 64, 64))
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        layer_updates(layer, 2)
    assert 0 < largest <= 2 * 64 * 64 * 2 * 9  # the patches themselves
