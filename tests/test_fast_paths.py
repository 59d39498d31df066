"""The single autograd nodes against the plain operations, and everything in torch that must understand both."""

import itertools
import os

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import conv_cases, options
from torch.utils.checkpoint import checkpoint

from affdiv_zoo import _fused, functional
from affdiv_zoo.layers import (
    AffineLikeLinear,
    CorrectedAttention,
    CorrectedLinear,
    PatchNormConv1d,
    PatchNormConv2d,
    PatchNormConv3d,
)

CORRECTIONS = ("affine", "norm", "gradient")


def value_and_grads(function, tensors, seed):
    """The output and the gradients of a random weighting of it."""
    tensors = [None if t is None else t.detach().clone().requires_grad_() for t in tensors]
    z = function(*tensors)
    g = torch.randn(z.shape, generator=torch.Generator().manual_seed(seed), dtype=z.dtype)
    return z.detach(), torch.autograd.grad(z, [t for t in tensors if t is not None], g)


def plain(function, *args, **kwargs):
    """``function`` where no node can run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_fused, "usable", lambda: False)
        return function(*args, **kwargs)


@settings(max_examples=700)
@given(conv_cases(), options, st.sampled_from(("none", "relu")), st.booleans())
def test_the_node_of_a_convolution_equals_plain_autograd(case, options, act, with_residual):
    generator = torch.Generator().manual_seed(case["seed"])
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    x = randn(case["batch"], case["channels"], *case["size"]) + case["offset"]
    w = randn(case["out_channels"], case["channels"] // case["args"]["groups"], *case["kernel"])
    b = randn(case["out_channels"]) if case["bias"] else None
    options = {**options, "center": options["center"] and w[0].numel() > 1}
    function = lambda *t: functional.patch_norm_conv(*t[:3], **case["args"], **options, act=act, residual=t[3])  # noqa: E731
    residual = randn(*function(x, w, b, None).shape) if with_residual else None
    fast = value_and_grads(function, (x, w, b, residual), case["seed"])
    slow = plain(value_and_grads, function, (x, w, b, residual), case["seed"])
    torch.testing.assert_close(fast, slow, rtol=1e-7, atol=1e-7)


@settings(max_examples=300)
@given(
    options,
    st.integers(2, 9),
    st.integers(1, 5),
    st.lists(st.integers(1, 3), max_size=3),
    st.booleans(),
    st.integers(0, 999),
)
def test_the_node_of_a_linear_map_equals_plain_autograd(options, n, out, batch, bias, seed):
    generator = torch.Generator().manual_seed(seed)
    randn = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    tensors = (randn(*batch, n) + 1, randn(out, n), randn(out) if bias else None)
    function = lambda *t: functional.corrected_linear(*t, **options)  # noqa: E731
    torch.testing.assert_close(
        value_and_grads(function, tensors, seed), plain(value_and_grads, function, tensors, seed)
    )


@pytest.mark.parametrize(("act", "residual"), itertools.product(("none", "relu"), (False, True)))
def test_a_convolution_with_residual_and_relu_is_their_sum_and_relu(act, residual):
    x, w, b = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3), torch.randn(4)
    z = functional.patch_norm_conv_reference(x, w, b, padding=1, center=True)
    res = torch.randn(z.shape)
    expected = z + res if residual else z
    expected = expected.clamp(min=0) if act == "relu" else expected
    for function in (functional.patch_norm_conv, functional.patch_norm_conv_reference):
        got = function(x, w, b, padding=1, center=True, act=act, residual=res if residual else None)
        torch.testing.assert_close(got, expected)
    unbatched = functional.patch_norm_conv(
        x[0], w, b, padding=1, center=True, act=act, residual=res[0] if residual else None
    )
    torch.testing.assert_close(unbatched, expected[0])
    layer = PatchNormConv2d(3, 4, 3, padding=1, center=True, scale="l2", act=act)
    layer.load_state_dict({"weight": w, "bias": b})
    torch.testing.assert_close(layer(x, res) if residual else layer(x), expected)


def saved_tensors(function):
    """The shapes of what autograd keeps of ``function``, each storage once, without parameters."""
    kept = {}

    def pack(t):
        if not isinstance(t, nn.Parameter):
            kept[t.untyped_storage().data_ptr()] = tuple(t.shape)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        function()
    return sorted(kept.values())


def test_the_nodes_keep_input_output_and_divisor_and_nothing_else():
    x, residual = torch.randn(2, 3, 6, 6, requires_grad=True), torch.randn(2, 4, 6, 6)
    for center, act in itertools.product((False, True), ("none", "relu")):
        layer = PatchNormConv2d(3, 4, 3, padding=1, center=center, act=act)
        maps = [(2, 1, 6, 6)] * (1 + center)  # the divisor; centred, the patches' means
        outputs = [(2, 4, 6, 6)] * (1 + (act == "relu"))  # to take the residual off the output it is kept as well
        assert saved_tensors(lambda: layer(x)) == sorted([*maps, (2, 3, 6, 6), (2, 4, 6, 6)])  # noqa: B023
        assert saved_tensors(lambda: layer(x, residual)) == sorted([*maps, (2, 3, 6, 6), *outputs])  # noqa: B023
    for correction in CORRECTIONS:
        linear = CorrectedLinear(7, 4, correction=correction, center=True)
        assert saved_tensors(lambda: linear(torch.randn(5, 7, requires_grad=True))) == [(5, 1), (5, 7)]  # noqa: B023
    gradient = PatchNormConv2d(3, 4, 3, correction="gradient")
    assert saved_tensors(lambda: gradient(x)) == [(2, 1, 4, 4), (2, 3, 6, 6)]


@pytest.mark.parametrize("correction", ("affine", "norm"))
@pytest.mark.parametrize("center", (False, True))
def test_second_derivatives(correction, center):
    draw = lambda *shape: torch.randn(*shape, dtype=torch.float64, requires_grad=True)  # noqa: E731
    conv = lambda x, w, b, r: functional.patch_norm_conv(  # noqa: E731
        x, w, b, 1, 1, groups=2, correction=correction, center=center, act="relu", residual=r
    )
    assert torch.autograd.gradgradcheck(conv, (draw(1, 4, 3, 4), draw(4, 2, 3, 3), draw(4), draw(1, 4, 3, 4)))
    linear = lambda x, w, b: functional.corrected_linear(x, w, b, correction=correction, center=center)  # noqa: E731
    assert torch.autograd.gradgradcheck(linear, (draw(3, 4), draw(3, 4), draw(3)))


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_torch_func(correction):
    layer = PatchNormConv2d(3, 4, 3, padding=1, center=True, correction=correction).double()
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    params = dict(layer.named_parameters())

    def loss(params, sample):
        return torch.func.functional_call(layer, params, (sample[None],)).square().sum()

    per_sample = torch.func.vmap(torch.func.grad(loss), (None, 0))(params, x)
    for i in range(5):
        layer.zero_grad()
        loss(params, x[i]).backward()
        for name, p in layer.named_parameters():
            torch.testing.assert_close(per_sample[name][i], p.grad)
    if correction == "gradient":  # its backward pass is not its derivative: no Jacobian to agree with
        return
    _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
    step = 1e-6
    torch.testing.assert_close(tangent, (layer(x + step) - layer(x - step)) / (2 * step), rtol=1e-6, atol=1e-6)
    with torch.autograd.forward_ad.dual_level():
        dual = layer(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


def test_in_place_changes_are_right_or_refused():
    """An output may be changed in place, as after torch's layers; with the ReLU inside, autograd refuses."""
    for correction, bias in itertools.product(CORRECTIONS, (False, True)):
        for layer, shape in (
            (CorrectedLinear(5, 4, bias, correction=correction), (3, 5)),
            (PatchNormConv2d(3, 4, 3, bias=bias, correction=correction, center=True), (2, 3, 6, 6)),
        ):
            x = torch.randn(shape, requires_grad=True)
            z = layer(x)
            z += 1
            z.relu_()
            got = torch.autograd.grad(z.square().sum(), (x, layer.weight))
            torch.testing.assert_close(
                got, torch.autograd.grad((layer(x) + 1).relu().square().sum(), (x, layer.weight))
            )
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    z = PatchNormConv2d(3, 4, 3, act="relu")(x)
    z += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        z.sum().backward()


@pytest.mark.parametrize("correction", CORRECTIONS)
@pytest.mark.parametrize("act", ("none", "relu"))
def test_create_graph_does_not_change_the_gradients(correction, act):
    """Tensors that depend on each other: a layer called twice, residuals from before and after it, and a free one."""
    conv = PatchNormConv2d(3, 3, 3, padding=1, center=True, correction=correction, act=act).double()
    linear = CorrectedLinear(5, 5, correction=correction).double()
    attention = CorrectedAttention(6, num_heads=2, qkv_bias=True, attention="separable").double()
    x = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)
    free = torch.randn(2, 3, 5, 5, dtype=torch.float64, requires_grad=True)

    def loss():
        y = conv(conv(x, x), free)
        y = linear(linear(y)) + y
        tokens = y.flatten(1)[:, :72].unflatten(1, (12, 6))
        return attention(attention(tokens)).square().sum()

    inputs = [x, free, *conv.parameters(), *linear.parameters(), *attention.parameters()]
    expected = plain(lambda: torch.autograd.grad(loss(), inputs))
    for create_graph in (False, True):
        torch.testing.assert_close(torch.autograd.grad(loss(), inputs, create_graph=create_graph), expected)


def test_batched_backward():
    x = torch.randn(2, 3, 5, 5, requires_grad=True)
    for layer in (PatchNormConv2d(3, 4, 3, center=True, act="relu"), CorrectedLinear(5, 4, center=True)):
        z = layer(x)
        g = torch.randn(3, *z.shape)
        together = torch.autograd.grad(z, (x, layer.weight), g, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(z, (x, layer.weight), g[i], retain_graph=True) for i in range(3)]
        torch.testing.assert_close(list(together), [torch.stack(parts) for parts in zip(*one_by_one, strict=True)])

    x, w, t = torch.randn(2, 5, 4, requires_grad=True), torch.randn(12, 4, requires_grad=True), torch.ones(2)
    qkv = functional.corrected_qkv(x, w, None, t)
    for part in qkv:  # alone: the others' gradients are absent
        g = torch.randn(3, *part.shape)
        together = torch.autograd.grad(part, (x, w), g, is_grads_batched=True, retain_graph=True)
        one_by_one = [torch.autograd.grad(part, (x, w), g[i], retain_graph=True) for i in range(3)]
        torch.testing.assert_close(list(together), [torch.stack(parts) for parts in zip(*one_by_one, strict=True)])


def test_a_residual_of_another_shape_or_type_is_refused():
    x, w = torch.randn(2, 3, 6, 6), torch.randn(4, 3, 3, 3)
    for shape in ((4, 1, 1), (1, 4, 4, 4), (2, 4, 6, 6)):
        with pytest.raises(ValueError, match=r"residual has shape .* expected the output's, \(2, 4, 4, 4\)"):
            functional.patch_norm_conv(x, w, residual=torch.randn(shape))
    with pytest.raises(TypeError, match="residual has dtype torch.float64"):
        functional.patch_norm_conv(x, w, residual=torch.randn(2, 4, 4, 4).double())


def small_net():
    return nn.Sequential(
        PatchNormConv2d(3, 8, 3, padding=1, center=True, act="relu"),
        PatchNormConv2d(8, 8, 3, stride=2, groups=2, padding="valid"),
        nn.Flatten(),
        AffineLikeLinear(8 * 9, 5, center=True),
    )


def test_checkpointing_gives_the_same_gradients():
    net, x = small_net(), torch.randn(2, 3, 8, 8)
    direct = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    for reentrant in (False, True):
        z = checkpoint(net, x.requires_grad_(), use_reentrant=reentrant)
        net.zero_grad()
        z.square().sum().backward()
        torch.testing.assert_close([p.grad for p in net.parameters()], list(direct))


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_autocast(dtype):
    net, x = small_net(), torch.randn(2, 3, 8, 8)
    expected = net(x)
    with torch.autocast("cpu", dtype):
        z = net(x)
    assert z.dtype == dtype
    torch.testing.assert_close(z.float(), expected, rtol=0.05, atol=0.05)
    z.float().square().sum().backward()
    assert {p.grad.dtype for p in net.parameters()} == {torch.float32}
    with torch.autocast(
        "cpu", dtype
    ):  # the divisor is not computed in half: 300 ones squared are no multiple of its ulp
        z = functional.affine_like_linear(torch.full((1, 300), 16.0), torch.ones(1, 300))
    assert z.item() == pytest.approx(300**0.5, rel=0.01)


def test_ddp(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        net, x = small_net(), torch.randn(2, 3, 8, 8)
        expected = torch.autograd.grad(net(x).sum(), list(net.parameters()))
        nn.parallel.DistributedDataParallel(net)(x).sum().backward()
        torch.testing.assert_close([p.grad for p in net.parameters()], list(expected))
    finally:
        torch.distributed.destroy_process_group()


def compare_compiled(net, compiled, batches):
    for batch in batches:
        x = torch.randn(batch, 3, 8, 8)
        torch.testing.assert_close(compiled(x), net(x), rtol=1e-4, atol=1e-4)
        grads = [torch.autograd.grad(f(x).square().sum(), list(net.parameters())) for f in (compiled, net)]
        torch.testing.assert_close(*grads, rtol=1e-3, atol=1e-3)


def test_compile_takes_the_whole_net_with_a_dynamic_batch():
    net = small_net()
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):  # fullgraph already makes a graph break an error
        compare_compiled(net, torch.compile(net, fullgraph=True, dynamic=True, backend="aot_eager"), (2, 3, 5))


@pytest.mark.slow
def test_compile_with_inductor():
    net = small_net()
    torch._dynamo.reset()
    compare_compiled(net, torch.compile(net, fullgraph=True, dynamic=True), (2, 3, 5))


def test_export():
    net, batch = small_net(), torch.export.Dim("batch", min=2)
    exported = torch.export.export(net, (torch.randn(2, 3, 8, 8),), dynamic_shapes=({0: batch},)).module()
    x = torch.randn(4, 3, 8, 8)
    torch.testing.assert_close(exported(x), net(x))


@pytest.mark.filterwarnings("ignore")
def test_onnx(tmp_path):
    import onnxruntime

    net, batch = small_net().eval(), torch.export.Dim("batch", min=2)
    program = torch.onnx.export(
        net, (torch.randn(2, 3, 8, 8),), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
    )
    program.save(os.fspath(tmp_path / "net.onnx"))
    session = onnxruntime.InferenceSession(os.fspath(tmp_path / "net.onnx"), providers=["CPUExecutionProvider"])
    for x in (torch.randn(4, 3, 8, 8), torch.zeros(2, 3, 8, 8), 1e6 * torch.randn(3, 3, 8, 8)):
        (got,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        np.testing.assert_allclose(got, net(x).detach().numpy(), rtol=1e-4, atol=1e-5)


LAYERS = [
    (PatchNormConv2d(3, 4, 3, padding=1, stride=2, center=True, act="relu"), (2, 3, 7, 7)),
    (PatchNormConv2d(4, 4, 2, padding="same", groups=2, correction="norm"), (2, 4, 7, 6)),
    (PatchNormConv1d(3, 4, 3, padding=2, padding_mode="circular", correction="gradient"), (2, 3, 7)),
    (PatchNormConv3d(3, 4, 2, dilation=2, bias=False, scale="l2"), (2, 3, 4, 5, 6)),
    (PatchNormConv2d(3, 4, 3, correction="none", center=True), (2, 3, 7, 7)),
    (CorrectedLinear(5, 4, center=True), (2, 3, 5)),
    (CorrectedLinear(5, 4, correction="gradient"), (2, 3, 5)),
    (CorrectedLinear(5, 4, correction="norm", bias=False), (2, 3, 5)),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("layer", "shape"), LAYERS)
def test_torchscript_and_fx(layer, shape, tmp_path):
    x = torch.randn(shape)
    torch.jit.save(torch.jit.script(layer), tmp_path / "layer.pt")
    traced = torch.jit.trace(layer, x)
    symbolic = torch.fx.symbolic_trace(nn.Sequential(layer, nn.ReLU()))
    for y in (x, torch.randn(3, *shape[1:])):
        torch.testing.assert_close(torch.jit.load(tmp_path / "layer.pt")(y), layer(y))
        torch.testing.assert_close(traced(y), layer(y))
        torch.testing.assert_close(symbolic(y), layer(y).relu())
