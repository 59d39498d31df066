"""The whole diagnosis: against real optimizer steps, on several architectures, leaving no trace in the model."""

import copy
import random
from collections import OrderedDict

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
import transformers
from timm.optim import create_optimizer_v2
from torch import Tensor, nn

import affdiv_zoo
from affdiv_zoo import diagnose
from affdiv_zoo.diagnostics import _verify
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv2d

BATCH = 4


def vit_of_transformers() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, intermediate_size=32, image_size=32, patch_size=8
    )
    config.num_labels = 10
    return transformers.ViTForImageClassification(config)


ARCHITECTURES = {
    "ours, convolutional": lambda: timm.create_model("resnet20_cifar_patchnorm"),
    "ours, ViT": lambda: timm.create_model("vit_nano_patch4_32_affine", depth=2),
    "ours, MLP": lambda: timm.create_model("mlp_cifar_affine", depth=3, width=40),
    "timm resnet with BatchNorm": lambda: timm.create_model("resnet10t", num_classes=10, zero_init_last=False),
    "timm ViT": lambda: timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=10, depth=2),
    "timm depthwise": lambda: timm.create_model("mobilenetv3_small_050", num_classes=10),
    "timm tf-padded": lambda: timm.create_model("tf_mobilenetv3_small_minimal_100", num_classes=10),
    "MLP with BatchNorm": lambda: timm.create_model("mlp_cifar", norm="batch", depth=3, width=40),
    "transformers ViT": vit_of_transformers,
}


def digits(size: int = 32) -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, 3, size, size, dtype=torch.float64), torch.tensor([1, 2, 3, 9])


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_prediction_and_real_step_agree(name: str) -> None:
    model = ARCHITECTURES[name]().double().train()
    report = diagnose(model, *digits(), verify=True)
    moving = [e for e in report.layers if e.norm_ratio > 0]
    assert len(moving) >= 4 and len(moving) >= 0.8 * len(report.layers)
    assert all(e.verify_error is not None for e in report.layers)
    assert report.max_verify_error < 1e-6  # the project asks for 1e-3
    covered = {e.name.partition("[")[0] for e in report.layers}
    affine = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert affine <= covered  # none left out here


def test_verification_sees_a_wrong_prediction(monkeypatch: pytest.MonkeyPatch) -> None:
    model = timm.create_model("mlp_cifar", depth=2, width=8).double()
    for wrong in ("total", "sample", "divergence"):
        real = _verify.verify_layer

        def off(layer, updates, delta, wrong=wrong, real=real):
            for call in updates.calls:
                if wrong == "divergence":
                    call.divergence = [1.01 * d for d in call.divergence]
                else:
                    setattr(call, wrong, 1.01 * getattr(call, wrong))
                    call.step = call.total
            return real(layer, updates, delta)

        monkeypatch.setattr("affdiv_zoo.diagnostics._diagnose.verify_layer", off)
        report = diagnose(model, *digits(), verify=True)
        assert all(e.verify_error == pytest.approx(0.01, rel=1e-3) for e in report.layers), wrong
        monkeypatch.setattr("affdiv_zoo.diagnostics._diagnose.verify_layer", real)


class Net(nn.Module):
    """A residual net in which samples meet in a BatchNorm, and one layer is corrected, with its ReLU inside."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, stride=2, padding=1)
        self.bn = nn.BatchNorm2d(6)
        self.conv = nn.Conv2d(6, 6, 3, padding=1, groups=2)
        self.patchnorm = PatchNormConv2d(6, 6, 3, padding=1, act="relu", center=True)
        self.drop = nn.Dropout(0.5)
        self.embed = nn.Embedding(3, 6)
        self.up = nn.ConvTranspose2d(6, 6, 2)
        self.head = nn.Linear(6, 10)
        self.spare = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.bn(self.stem(x)), inplace=True)
        x = self.patchnorm(self.conv(x), x)
        x = self.up(x).mean((2, 3)) + self.embed(torch.tensor(1))
        return self.head(self.drop(x))


@pytest.mark.parametrize("name", ["stem", "conv", "patchnorm", "head"])
def test_a_real_step_of_one_layer_in_the_whole_model(name: str) -> None:
    """torch's SGD on that layer, the model run again: its output moves as the report says."""
    model = Net().double().train()
    x, y = digits(12)
    report = diagnose(model, x, y)
    layer = model.get_submodule(name)
    if name == "patchnorm":
        layer.act = "none"  # the report is about z, in front of the ReLU

    outputs = []
    layer.register_forward_hook(lambda m, args, out: outputs.append(out))
    torch.manual_seed(3)
    rng = torch.get_rng_state()

    def run() -> Tensor:
        torch.set_rng_state(rng)  # the same dropout
        with torch.no_grad():
            model(x)
        return outputs.pop()

    if name == "patchnorm":  # its gradient, through a ReLU behind it
        layer.register_forward_hook(lambda m, args, out: torch.relu(out))
    torch.set_rng_state(rng)
    logits = model(x)
    z = outputs.pop()
    z.retain_grad()
    F.cross_entropy(logits, y).backward()
    ideal = z.grad
    before, lr = run(), 1e-6
    torch.optim.SGD(layer.parameters(), lr=lr).step()
    effective = (before - run()) / lr

    # The report's dropout was another one: take it again under this one.
    torch.set_rng_state(rng)
    layer._forward_hooks.clear()
    with torch.no_grad():
        for p in layer.parameters():
            p += lr * p.grad
    if name == "patchnorm":
        layer.act = "relu"
    report = diagnose(model, x, y)
    cosine = F.cosine_similarity(effective.flatten(), ideal.flatten(), 0)
    assert report[name].cosine == pytest.approx(cosine.item(), rel=1e-4)
    assert report[name].norm_ratio == pytest.approx((effective.norm() / ideal.norm()).item(), rel=1e-4)


def test_what_changes_an_output_in_place_is_no_harm() -> None:
    """Token by token, where torch's linear layer returns a view, and for a convolution, where it does not."""
    nets = [
        nn.Sequential(nn.Linear(6, 5), nn.ReLU(inplace), nn.Flatten(), nn.Linear(20, 3)) for inplace in (True, False)
    ]
    nets += [
        nn.Sequential(nn.Conv1d(4, 5, 3), nn.ReLU(inplace), nn.Flatten(), nn.Linear(20, 3)) for inplace in (True, False)
    ]
    x, y = torch.randn(4, 4, 6).double(), torch.tensor([0, 1, 2, 0])
    for first, second in (nets[:2], nets[2:]):
        second.load_state_dict(first.state_dict())
        a, b = (diagnose(net.double(), x, y, verify=True, whole_step=True).to_dict() for net in (first, second))
        assert a == b and len(a["layers"]) == 2


def test_parts_by_hand() -> None:
    """Two samples of one linear layer: x_1 . x_2 + 1 = 3, ||x||^2 + 1 = 6 and 3."""
    net = nn.Sequential(nn.Linear(3, 2)).double()
    x = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 1.0]], dtype=torch.float64)
    g = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    (e,) = diagnose(net, x, g, lambda z, g: (z * g).sum()).layers
    length = 2**0.5
    assert (e.rows, e.calls, e.divergence, e.std) == (2, 1, 4.5, 1.5)
    assert e.spread == pytest.approx(1 / 3)
    assert e.same == pytest.approx(45**0.5 / length) and e.patch == 0
    assert e.sample == pytest.approx(18**0.5 / length)
    assert e.norm_ratio == pytest.approx(63**0.5 / length)  # (6, 3), (3, 3)
    assert e.cosine == pytest.approx(9 / (63**0.5 * length))
    assert e.shares == pytest.approx((45**0.5 / (45**0.5 + 18**0.5), 0, 18**0.5 / (45**0.5 + 18**0.5)))


def test_one_sample_has_no_interference_but_of_its_patches() -> None:
    model = timm.create_model("resnet20_cifar_patchnorm").double().eval()
    x, y = digits()
    one = diagnose(model, x[:1], y[:1])
    assert all(e.sample < 1e-9 * e.norm_ratio for e in one.layers)
    assert one["fc"].patch < 1e-9 and one["conv1"].patch > 0
    shares = [diagnose(model, x[:n], y[:n])["fc"].shares[2] for n in (2, 4)]
    assert 0 < shares[0] < shares[1]  # it grows with the batch


def test_corrections_have_their_constants() -> None:
    make = dict(depth=3, width=16, center=False, scale="l2")
    for correction, value in (("affine", 1.0), ("gradient", 1.0), ("norm", 2.0)):
        report = diagnose(timm.create_model("mlp_cifar_affine", correction=correction, **make).double(), *digits())
        assert [e.divergence for e in report.layers if e.correction == correction] == pytest.approx(
            [value] * 4, rel=1e-6
        )
        assert max(e.spread for e in report.layers) < 1e-6
    plain = diagnose(timm.create_model("mlp_cifar", depth=3, width=16).double(), *digits())
    assert min(e.spread for e in plain.layers) > 1e-3


def snapshot(model: nn.Module) -> dict:
    return {
        "state": {k: (id(v), v.clone()) for k, v in model.state_dict(keep_vars=True).items()},
        "grads": {n: None if p.grad is None else (id(p.grad), p.grad.clone()) for n, p in model.named_parameters()},
        "flags": [(n, p.requires_grad) for n, p in model.named_parameters()],
        "modes": [m.training for m in model.modules()],
        "hooks": [(len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks)) for m in model.modules()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "random": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
    }


def same(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    return a == b


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_untouched(fails: bool) -> None:
    model = Net().double().train()
    model.conv.eval()
    model.spare.requires_grad_(False)
    calls = []
    model.head.register_forward_hook(lambda m, args, out: calls.append(1))
    x, y = digits(12)
    F.cross_entropy(model(x), y).backward()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer.step()
    before, state = snapshot(model), copy.deepcopy(optimizer.state_dict())

    def loss(output: Tensor, targets: Tensor) -> Tensor:
        random.random(), np.random.rand(), torch.rand(1)
        if fails:
            raise RuntimeError("on purpose")
        return F.cross_entropy(output, targets)

    if fails:
        with pytest.raises(RuntimeError, match="on purpose"):
            diagnose(model, x, y, loss, optimizer, verify=True)
    else:
        with torch.no_grad():  # as in an evaluation loop
            diagnose(model, x, y, loss, optimizer, verify=True)
    assert len(calls) == 2  # the user's hooks run
    assert same(before, snapshot(model)) and same(state, optimizer.state_dict())
    assert not x.requires_grad and x.grad is None


def test_what_is_not_covered_is_listed() -> None:
    model = Net()
    model.norm = nn.utils.parametrizations.weight_norm(nn.Linear(10, 10))
    model.frozen = nn.Linear(10, 10).requires_grad_(False)
    forward = type(model).forward
    model.forward = lambda x: model.frozen(model.norm(forward(model, x)))
    x, y = digits(12)
    report = diagnose(model, x.float(), y)
    assert {e.name for e in report.layers} == {"stem", "conv", "patchnorm", "head"}
    left = {e.name: e.why for e in report.not_covered}
    assert left.pop("spare") == "not called" and "frozen" in left.pop("frozen")
    assert "computed from other parameters" in left.pop("norm") and "normaliser" in left.pop("bn")
    assert left.pop("embed") == left.pop("up")[: len("not a linear layer or convolution: weight")]
    assert all(name.startswith("norm.parametrizations") for name in left) and left
    counted = {n for n in (*(e.name for e in report.layers), *(e.name for e in report.not_covered))}
    assert {n.rpartition(".")[0] for n, _ in model.named_parameters()} <= counted
    assert all(e.name in str(report) for e in report.layers) and "1 Embedding (embed)" in str(report)


class Standardised(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x, self.weight / self.weight.std(), self.bias)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.embed(x)).mean(1)


def test_other_maps_and_other_uses_are_told() -> None:
    net = nn.Sequential(Standardised(3, 4, 3), nn.Flatten(), nn.LazyLinear(10))
    x, y = digits(6)
    with pytest.raises(ValueError, match="lazy layers"):
        diagnose(net, x.float(), y)
    net(x.float())
    report = diagnose(net, x.float(), y)
    assert [e.name for e in report.layers] == ["2"]
    assert "is not W x + b" in report.not_covered[0].why

    (e,) = diagnose(Tied(), torch.randint(7, (4, 3)), torch.tensor([1, 2, 3, 4])).layers
    assert "used elsewhere too" in e.note and "not in these numbers" in e.note


def test_the_optimizers_step() -> None:
    x, y = digits()
    model = timm.create_model("mlp_cifar", depth=2, width=16).double()
    plain = diagnose(model, x, y)
    sgd = diagnose(model, x, y, optimizer=torch.optim.SGD(model.parameters(), lr=0.3), verify=True)
    assert plain.optimizer is None and sgd.optimizer == "SGD"
    for a, b in zip(plain.layers, sgd.layers, strict=True):
        assert (a.cosine, a.norm_ratio, a.sample) == pytest.approx((b.cosine, b.norm_ratio, b.sample), rel=1e-9)

    for make in (
        lambda p: torch.optim.AdamW(p, lr=1e-3, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    ):
        optimizer = make(model.parameters())
        for _ in range(2):  # it has a state
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        report = diagnose(model, x, y, optimizer=optimizer, verify=True)
        assert report.max_verify_error < 1e-6
        # The real thing: the first layer's input is the model's, so its update is the whole step's.
        outputs = []
        handle = model.layers[0].fc.register_forward_hook(lambda m, args, out, outputs=outputs: outputs.append(out))
        model.zero_grad()
        logits = model(x)
        (ideal,) = torch.autograd.grad(F.cross_entropy(logits, y), outputs[0], retain_graph=True)
        F.cross_entropy(logits, y).backward()
        optimizer.step()
        model(x)
        handle.remove()
        effective = (outputs[0] - outputs[1]).detach() / optimizer.param_groups[0]["lr"]
        e = report[next(n for n, m in model.named_modules() if m is model.layers[0].fc)]
        assert e.cosine == pytest.approx(F.cosine_similarity(effective.flatten(), ideal.flatten(), 0).item(), rel=1e-6)
        assert e.norm_ratio == pytest.approx((effective.norm() / ideal.norm()).item(), rel=1e-6)


def test_the_step_of_all_layers() -> None:
    """Against a real step of the whole model, by torch's SGD; the first layer has no drift."""
    model = Net().double().train()
    x, y = digits(12)
    before = snapshot(model)
    report = diagnose(model, x, y, whole_step=True)
    assert same(before, snapshot(model))
    assert all(e.whole_cosine is not None for e in report.layers)
    assert report["stem"].whole_cosine == pytest.approx(report["stem"].cosine, rel=1e-6)
    assert report["stem"].whole_norm_ratio == pytest.approx(report["stem"].norm_ratio, rel=1e-6)
    assert report["head"].whole_norm_ratio != pytest.approx(report["head"].norm_ratio, rel=0.01)
    assert "all: cos" in str(report)

    model.drop.p, lr, outputs = 0.0, 1e-7, []
    report = diagnose(model, x, y, whole_step=True)
    model.head.register_forward_hook(lambda m, args, out: outputs.append(out))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    outputs.clear()
    logits = model(x)
    logits.retain_grad()
    F.cross_entropy(logits, y).backward()
    optimizer.step()
    effective = (logits - model(x)).detach() / lr
    cosine = F.cosine_similarity(effective.flatten(), logits.grad.flatten(), 0)
    assert report["head"].whole_cosine == pytest.approx(cosine.item(), rel=0.01)
    assert report["head"].whole_norm_ratio == pytest.approx((effective.norm() / logits.grad.norm()).item(), rel=0.02)


def test_float32_and_autocast_are_close_to_float64() -> None:
    model = timm.create_model("resnet20_cifar_patchnorm")
    x, y = digits()
    exact = diagnose(copy.deepcopy(model).double(), x, y)
    single = diagnose(model, x.float(), y, verify=True)
    assert single.max_verify_error < 1e-3
    with torch.autocast("cpu", torch.bfloat16):
        half = diagnose(model, x.float(), y)
    for a, b, c in zip(exact.layers, single.layers, half.layers, strict=True):
        assert b.divergence == pytest.approx(a.divergence, rel=1e-5) and b.cosine == pytest.approx(a.cosine, abs=1e-3)
        assert c.divergence == pytest.approx(a.divergence, rel=0.02) and c.cosine == pytest.approx(a.cosine, abs=0.1)


@pytest.mark.parametrize("tied", ["one module twice", "one parameter in two modules"])
def test_the_step_of_all_layers_moves_what_is_shared_once_and_leaves_it(tied: str) -> None:
    first, last = nn.Linear(5, 5), nn.Linear(5, 3)
    second = first
    if tied != "one module twice":
        second = nn.Linear(5, 5)
        second.weight, second.bias = first.weight, first.bias
    model = nn.Sequential(first, nn.Tanh(), second, last).double()
    x, y, outputs, lr = torch.randn(6, 5).double(), torch.tensor([0, 1, 2, 0, 1, 2]), [], 1e-7
    parameters, before = list(model.parameters()), snapshot(model)
    e = diagnose(model, x, y, whole_step=True)["0"]
    assert all(p is q for p, q in zip(model.parameters(), parameters, strict=True))
    assert second.weight is first.weight and same(before, snapshot(model))

    first.register_forward_hook(lambda m, args, out: outputs.append(out))
    if second is not first:
        second.register_forward_hook(lambda m, args, out: outputs.append(out))
    z = model(x)
    gradients = torch.cat(torch.autograd.grad(F.cross_entropy(z, y), outputs, retain_graph=True)).flatten()
    F.cross_entropy(z, y).backward()
    torch.optim.SGD(model.parameters(), lr).step()
    model(x)
    moved = ((torch.cat(outputs[:2]) - torch.cat(outputs[2:])) / lr).flatten().detach()
    assert e.whole_cosine == pytest.approx(F.cosine_similarity(moved, gradients, 0).item(), rel=0.01)
    assert e.whole_norm_ratio == pytest.approx((moved.norm() / gradients.norm()).item(), rel=0.02)


def test_the_step_of_all_layers_with_a_tied_embedding() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
            self.out.weight = self.embedding.weight

        def forward(self, words: Tensor) -> Tensor:
            return self.out(self.embedding(words).mean(1))

    model, words, y, lr = Tied().double(), torch.tensor([[0, 1, 2], [3, 4, 0]]), torch.tensor([1, 4]), 1e-7
    e = diagnose(model, words, y, whole_step=True)["out"]
    before = model(words)
    (g,) = torch.autograd.grad(F.cross_entropy(before, y), before, retain_graph=True)
    F.cross_entropy(before, y).backward()
    torch.optim.SGD(model.parameters(), lr).step()
    moved = ((before - model(words)) / lr).detach().flatten()
    assert e.whole_cosine == pytest.approx(F.cosine_similarity(moved, g.flatten(), 0).item(), rel=0.01)
    assert e.whole_norm_ratio == pytest.approx((moved.norm() / g.norm()).item(), rel=0.02)


def test_inference_mode_around_it_changes_nothing() -> None:
    model, (x, y) = Net().double(), digits(12)
    want = diagnose(model, x, y, verify=True, whole_step=True)
    with torch.inference_mode():
        own = x.clone(), y.clone()
        assert own[0].is_inference()
        assert diagnose(model, *own, verify=True, whole_step=True).to_dict() == want.to_dict()
        assert diagnose(model, (own[0],), own[1]).to_dict()["layers"][0]["cosine"] == want.layers[0].cosine


def test_brackets_in_names() -> None:
    net = nn.Sequential(OrderedDict([("b[1]", nn.Linear(4, 4)), ("a[0]", nn.Linear(4, 3))]))
    report = diagnose(net, torch.randn(3, 4), torch.tensor([0, 1, 2]))
    assert [e.name for e in report.layers] == ["b[1]", "a[0]"]
    assert [e.name for e in diagnose(net, torch.randn(3, 4), torch.tensor([0, 1, 2]), layers="a[0]").layers] == ["a[0]"]


def test_optimizers_that_draw_random_numbers_or_hold_another() -> None:
    net, x, y = nn.Linear(4, 3), torch.randn(2, 4), torch.tensor([0, 1])

    class Noisy(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            torch.rand(1)
            super().step()

    state = torch.get_rng_state()
    diagnose(net, x, y, optimizer=Noisy(net.parameters(), 0.1))
    assert torch.equal(state, torch.get_rng_state())
    with pytest.raises(TypeError, match="optimizer is a Lookahead, which cannot take a step on a copy"):
        diagnose(net, x, y, optimizer=create_optimizer_v2(net, "lookahead_sgd", 0.1))


def test_layers_are_selected_by_name() -> None:
    model = timm.create_model("vit_nano_patch4_32_affine", depth=2, img_size=16)
    x, y = digits(16)
    names = lambda layers: [e.name for e in diagnose(model, x.float(), y, layers=layers).layers]  # noqa: E731
    assert names("head") == ["head"]
    assert names(["blocks.1.attn.proj", "*.logits"]) == [
        "blocks.0.attn.logits",
        "blocks.1.attn.logits",
        "blocks.1.attn.proj",
    ]
    assert names(["*.qkv[[]v]"]) == ["blocks.0.attn.qkv[v]", "blocks.1.attn.qkv[v]"]
    assert names("blocks.1.attn.qkv[v]") == ["blocks.1.attn.qkv[v]"]  # as the report has it
    assert names("*.logits") == ["blocks.0.attn.logits", "blocks.1.attn.logits"]
    with pytest.raises(ValueError, match=r"layers='nothing' matches none .* head"):
        names("nothing")


def test_wrappers_checkpointing_and_sequences() -> None:
    net = nn.Sequential(CorrectedLinear(4, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    x, y = torch.randn(6, 4).double(), torch.tensor([0, 1, 2, 0, 1, 2])
    want = diagnose(net, x, y).to_dict()["layers"]
    assert diagnose(nn.DataParallel(net), x, y).to_dict()["layers"] == want
    assert diagnose(torch.compile(net), x, y).to_dict()["layers"] == want

    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False)

    found = diagnose(Checkpointed(), x, y).to_dict()["layers"]
    assert [e["cosine"] for e in found] == pytest.approx([e["cosine"] for e in want])

    class SequenceFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x.transpose(0, 1)).mean(0)

    report = diagnose(SequenceFirst(), torch.randn(6, 5, 4).double(), y)
    assert all("not that of the samples" in e.note and e.sample < 1e-9 for e in report.layers)


def test_mistakes_are_named() -> None:
    net, x, y = nn.Linear(4, 3), torch.randn(2, 4), torch.tensor([0, 1])
    with pytest.raises(TypeError, match="model is a str"):
        diagnose("resnet18", x, y)
    with pytest.raises(ValueError, match="no tensor with samples"):
        diagnose(net, {}, y)
    with pytest.raises(ValueError, match="targets is None"):
        diagnose(net, x)
    with pytest.raises(ValueError, match=r"loss_fn returned \(2,\)"):
        diagnose(net, x, y, lambda z, y: F.cross_entropy(z, y, reduction="none"))
    with pytest.raises(ValueError, match="the loss is nan"):
        diagnose(net, x * torch.nan, y)
    with pytest.raises(ValueError, match="no gradient"):
        diagnose(nn.Linear(4, 3).requires_grad_(False), x, y)
    with pytest.raises(ValueError, match="no gradient"):
        diagnose(nn.Linear(4, 3).requires_grad_(False), x.clone().requires_grad_(), y)
    with pytest.raises(ValueError, match="no layer of the Sequential can be covered"):
        diagnose(nn.Sequential(nn.BatchNorm1d(4)), x, y)
    with pytest.raises(TypeError, match="optimizer is a float"):
        diagnose(net, x, y, optimizer=0.1)
    with pytest.raises(TypeError, match="LBFGS"):
        diagnose(net, x, y, optimizer=torch.optim.LBFGS(net.parameters()))
    with pytest.raises(ValueError, match="learning rate of 0"):
        diagnose(net, x, y, optimizer=torch.optim.SGD(net.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="holds none"):
        diagnose(net, x, y, optimizer=torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1))


def test_it_is_public() -> None:
    assert affdiv_zoo.diagnose is diagnose and "diagnose" in affdiv_zoo.__all__
