"""One forward and backward pass of a model, watched: what every affine layer was fed, and its output's gradient."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import timm.layers
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.overrides import TorchFunctionMode

from affdiv_zoo.convert._trace import call as call_model
from affdiv_zoo.convert._trace import is_norm, tensors
from affdiv_zoo.diagnostics._maps import LayerMap, agrees, is_affine, is_corrected, refusal


class LossNotFiniteError(ValueError):
    """The loss is infinite or not a number: there is no update to diagnose."""


@dataclass
class Call:
    """One call of an affine layer.

    Attributes:
        input: What it was fed, the first dimension kept or added.
        output: What it returned, detached; its values may have been changed in place since.
        version: The output's version as the layer left it.
        edge: Where the output's gradient arrives.
        active: Where a built-in ReLU let the output pass; None without one.
        number: Which of the layer's calls it is.
        value: A copy of the output, if it is to be kept.
        grad: dL/dz, set after the backward pass.
    """

    input: Tensor
    input_version: int
    source: Tensor
    output: Tensor
    version: int
    edge: GradientEdge
    active: Tensor | None
    number: int
    value: Tensor | None = None
    grad: Tensor | None = None


@dataclass
class Layer:
    """An affine layer and its calls; modules that share all of their parameters are one layer.

    Attributes:
        name: Its name in the model.
        module: The first module of that name.
        map: Its map.
        calls: In order of execution.
        why_not: Why it is not covered; empty if it is.
        weight_grad: dL/dW by autograd.
        bias_grad: dL/db by autograd.
        note: A remark for the report.
        silent: Whether there were calls without a gradient.
    """

    name: str
    module: nn.Module
    map: LayerMap | None
    calls: list[Call] = field(default_factory=list)
    why_not: str = ""
    weight_grad: Tensor | None = None
    bias_grad: Tensor | None = None
    note: str = ""
    silent: bool = False

    @property
    def weight(self) -> Tensor:
        return self.module.weight

    @property
    def bias(self) -> Tensor | None:
        return self.module.bias

    @property
    def trains(self) -> tuple[bool, bool]:
        """Whether the weight and the bias have an update."""
        return self.weight_grad is not None, self.bias_grad is not None


@dataclass
class View:
    """A part of a linear layer's output, as ``Tensor.as_strided`` takes it."""

    layer: Layer
    call: Call
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, tensor: Tensor) -> Tensor:
        """The same part of a tensor that is laid out as the output."""
        return tensor.contiguous().as_strided(self.size, self.stride, self.offset)


@dataclass
class Attention:
    """One call of an attention whose logits are reached.

    Attributes:
        name: The attention module's.
        module: It.
        query: Where q comes from, ``(batch, heads, tokens, head_dim)``.
        key: Where k comes from.
        value: v.
        mask: Added to the logits, or a bool mask of what takes part, or None.
        is_causal: Whether a query sees only the keys up to its own position.
        scale: What q . k is multiplied with; None for a corrected attention, which has a temperature per head.
        edge: Where the gradient of the attention's output arrives, ``(batch, heads, tokens, head_dim)``.
        grad: That gradient, set after the backward pass.
    """

    name: str
    module: nn.Module
    query: View
    key: View
    value: Tensor
    mask: Tensor | None
    is_causal: bool
    scale: float | None
    edge: GradientEdge
    grad: Tensor | None = None


@dataclass
class Record:
    """What one pass showed.

    Attributes:
        layers: All affine layers by name, covered or not.
        attentions: The calls of attentions whose logits are reached.
        unreached: Names of attentions whose logits are not, and why.
        batch: The number of samples.
        loss: The loss.
        grads: dL/dparameter, by id of the parameter.
    """

    layers: list[Layer]
    attentions: list[Attention]
    unreached: dict[str, str]
    batch: int
    loss: float
    grads: dict[int, Tensor]


@contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Puts buffers and the random generators back as they were; nothing else of a model changes in a pass."""
    buffers = [
        (m._buffers, name, buffer, buffer.detach().clone())
        for m in model.modules()
        for name, buffer in m._buffers.items()
        if buffer is not None
    ]
    devices = {p.device for p in model.parameters() if p.device.type != "cpu"}
    kinds = {d.type for d in devices} or {"cuda"}
    python = random.getstate()
    numpy = sys.modules["numpy"].random.get_state() if "numpy" in sys.modules else None
    try:
        with torch.random.fork_rng([d.index or 0 for d in devices], device_type=kinds.pop()):
            yield
    finally:
        random.setstate(python)
        if numpy is not None:
            sys.modules["numpy"].random.set_state(numpy)
        with torch.no_grad():
            for owner, name, buffer, value in buffers:
                owner[name] = buffer
                if not torch.equal(buffer, value):
                    buffer.copy_(value)


class _Watch(TorchFunctionMode):
    """Hooks on the modules and on torch's attention, for one forward pass."""

    def __init__(self, model: nn.Module, keep: bool) -> None:
        super().__init__()
        self.keep = keep
        self.entered: dict[int, int] = {}
        self.layers: dict[tuple[int, int], Layer] = {}
        self.by_module: dict[nn.Module, Layer] = {}
        self.names = {module: name for name, module in model.named_modules()}
        self.attentions: list[Attention] = []
        self.unreached: dict[str, str] = {}
        self._stack: list[nn.Module] = []
        self._values: dict[nn.Module, GradientEdge] = {}  # of what an attention's output projection is fed
        self._calls: list[tuple[Layer, Call]] = []
        self._attention_of_proj: dict[nn.Module, nn.Module] = {}
        for name, module in model.named_modules():
            if is_affine(module):
                weight = module._parameters.get("weight")
                key = (id(module), 0) if weight is None else (id(weight), id(getattr(module, "bias", None)))
                if key not in self.layers:
                    why = refusal(module)
                    self.layers[key] = Layer(name, module, None if why else LayerMap(module), why_not=why)
                else:
                    self.layers[key].note = f"shares its parameters with {name}"
                self.by_module[module] = self.layers[key]
            if _is_timm_attention(module):
                self._attention_of_proj[module.proj] = module

    @contextmanager
    def hooked(self) -> Iterator[None]:
        """While this is open the model is watched."""
        handles = []
        try:
            for module in self.names:
                handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
                handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
            with self:
                yield
        finally:
            for handle in handles:
                handle.remove()

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._stack.append(module)
        if module in self._attention_of_proj and args and args[0].requires_grad:
            self._values[self._attention_of_proj[module]] = get_gradient_edge(args[0])

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        while self._stack and self._stack.pop() is not module:
            pass  # an exception that the model itself caught left modules behind
        if module in self.by_module:
            if isinstance(output, Tensor) and output._is_view() and output.requires_grad:
                # What changes a view in place takes its history over, and with it the edge that the gradient comes by.
                output = output.clone()
            self._record(self.by_module[module], module, args, kwargs, output)
        elif _is_timm_attention(module):
            self._record_timm_attention(module, args, kwargs)
        return output

    def _record(self, layer: Layer, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if layer.why_not:
            return
        number = self.entered.get(id(layer), 0)
        self.entered[id(layer)] = number + 1
        given = list(tensors((args, kwargs)))
        if not given or not isinstance(output, Tensor):
            layer.why_not = "it does not take and return a tensor"
            return
        if not output.requires_grad:
            layer.silent = True
            return
        x, z, map = given[0].detach(), output.detach(), layer.map
        if x.ndim == (len(module.kernel_size) + 1 if map.conv else 1):
            x, z = x.unsqueeze(0), z.unsqueeze(0)
        act = getattr(module, "act", "none") if is_corrected(module) else "none"
        residual = is_corrected(module) and len(given) > 1
        if act == "none" and not residual and x.numel():
            bias = None if module.bias is None else module.bias.detach()
            with _no_autocast(x):
                same = agrees(map, wide(x[:1]), wide(z[:1]), module.weight.detach(), bias)
            if not same:
                layer.why_not = "its output is not W x + b (nor a corrected one) of its own weight and bias"
                return
        active = z > 0 if act == "relu" else None
        kept = z.clone() if self.keep else None
        call = Call(x, x._version, given[0], z, z._version, get_gradient_edge(output), active, number, kept)
        layer.calls.append(call)
        self._calls.append((layer, call))

    # ---- attention ----

    def _view(self, tensor: Tensor) -> View | None:
        """Which linear layer's output a tensor is a part of, if it is of any."""
        pointer = tensor.untyped_storage().data_ptr()
        for layer, call in reversed(self._calls):
            z = call.output
            if z.untyped_storage().data_ptr() == pointer and not layer.map.conv:
                plain = z.is_contiguous() and z.dtype == tensor.dtype and z._version == call.version
                offset = tensor.storage_offset() - z.storage_offset()
                return View(layer, call, tuple(tensor.shape), tensor.stride(), offset) if plain else None
        return None

    def _record_timm_attention(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        name = self.names[module]
        layer = self.by_module.get(module.qkv)
        if layer is None or not layer.calls or module not in self._values:
            self.unreached[name] = "its qkv layer is not covered"
            return
        named = dict(zip(("x", "attn_mask", "is_causal"), args, strict=False)) | kwargs
        if module.training and module.attn_drop.p > 0:
            self.unreached[name] = "its attention has dropout"
            return
        call = layer.calls[-1]
        z = call.output
        B, N = z.shape[:2]
        qkv = z.reshape(B, N, 3, module.num_heads, module.head_dim).permute(2, 0, 3, 1, 4)
        q, k, v = (self._view(t) for t in qkv.unbind(0))
        if q is None or k is None or v is None:
            self.unreached[name] = "its q, k and v were changed in place"
            return
        edge = self._values.pop(module)
        scale = None if getattr(module, "attention", "none") != "none" else module.scale
        mask, causal = named.get("attn_mask"), named.get("is_causal", False)
        self.attentions.append(Attention(name, module, q, k, v.of(z), mask, causal, scale, edge))

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        # timm's attention is recorded as a module, fused or not.
        if func is F.scaled_dot_product_attention and self._stack and not any(map(_is_timm_attention, self._stack)):
            self._record_sdpa(args, kwargs, output)
        return output

    def _record_sdpa(self, args: tuple, kwargs: dict, output: Tensor) -> None:
        names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal", "scale")
        a = dict(zip(names, args, strict=False)) | kwargs
        module = self._stack[-1]
        name = self.names[module]
        q, k, v = a["query"].detach(), a["key"].detach(), a["value"].detach()
        why = ""
        if a.get("dropout_p", 0.0) > 0:
            why = "its attention has dropout"
        elif not output.requires_grad:
            why = "no gradient reaches it"
        elif q.ndim != 4 or q.shape[:2] != k.shape[:2]:
            why = "its queries and keys are not (batch, heads, tokens, head_dim), with as many heads"
        else:
            q_view, k_view = self._view(q), self._view(k)
            if q_view is None or k_view is None:
                why = "its q and k are not the outputs of covered linear layers, but of something after them"
        if why:
            self.unreached[name] = why
            return
        scale = q.shape[-1] ** -0.5 if a.get("scale") is None else a["scale"]
        mask, causal = a.get("attn_mask"), a.get("is_causal", False)
        edge = get_gradient_edge(output)
        self.attentions.append(Attention(name, module, q_view, k_view, v, mask, causal, scale, edge))


def _is_timm_attention(module: nn.Module) -> bool:
    """timm's plain attention, or ours, with nothing between its projections and its logits, or behind its values."""
    from affdiv_zoo.layers import CorrectedAttention

    if type(module) not in (timm.layers.Attention, CorrectedAttention):
        return False
    between = (module.q_norm, module.k_norm, module.norm)
    return all(isinstance(m, nn.Identity) for m in between) and getattr(module, "gate", None) is None


def is_attention(module: nn.Module) -> bool:
    """A module that says of itself that it is an attention, with none below it."""
    says = lambda m: "attention" in type(m).__name__.lower() or type(m).__name__.endswith("Attn")  # noqa: E731
    return says(module) and not any(says(m) for m in list(module.modules())[1:])


def run(model: nn.Module, inputs: Any, loss_of: Callable[[Any], Tensor], keep: bool = False) -> Record:
    """One pass; the model is as before, but for its buffers and the random state, which :func:`untouched` keeps.

    Args:
        model: Any module.
        inputs: A tensor, a tuple or a mapping of arguments.
        loss_of: The loss of the model's output.
        keep: Keep copies of the layers' outputs.

    Returns:
        The record.

    Raises:
        ValueError: There is no sample, or the loss is no scalar with a gradient.
        LossNotFiniteError: The loss is not finite.
    """
    first = next((t for t in tensors(inputs) if t.ndim), None)
    if first is None or first.shape[0] == 0:
        raise ValueError("inputs holds no tensor with samples along its first dimension")
    watch = _Watch(model, keep)
    with torch.enable_grad():
        with watch.hooked():
            output = call_model(model, inputs)
        loss = loss_of(output)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(f"loss_fn returned {shape}, expected a scalar tensor, such as the mean over the batch")
        params = [p for p in model.parameters() if p.requires_grad]
        if not loss.requires_grad or not params:  # the inputs may be what requires a gradient
            raise ValueError("the loss has no gradient: does any parameter of the model require one?")
        if not torch.isfinite(loss):
            raise LossNotFiniteError(f"the loss is {loss.item()}: there is no update to diagnose")
        edges = [call.edge for layer in watch.layers.values() if not layer.why_not for call in layer.calls]
        edges += [attention.edge for attention in watch.attentions]
        grads = torch.autograd.grad(loss.reshape(()), [*edges, *params], allow_unused=True)
    by_param = {id(p): g.detach() for p, g in zip(params, grads[len(edges) :], strict=True) if g is not None}
    arrived = iter(grads[: len(edges)])
    for layer in watch.layers.values():
        if layer.why_not:
            layer.calls.clear()
            continue
        if not layer.calls:
            used = id(layer.module.weight) in by_param
            silent = "no gradient reaches it" if layer.silent else "not called"
            layer.why_not = "its weight is used, but not by calling it" if used else silent
            continue
        for call in layer.calls:
            call.grad = next(arrived)
            if call.grad is not None:
                call.grad = call.grad.detach().reshape(call.output.shape)
        layer.calls = [call for call in layer.calls if call.grad is not None]
        if not layer.calls:
            layer.why_not = "no gradient reaches it"
        elif any(call.source._version != call.input_version for call in layer.calls):
            layer.why_not = "its input was changed in place after its call"
        layer.weight_grad = by_param.get(id(layer.module.weight))
        layer.bias_grad = None if layer.module.bias is None else by_param.get(id(layer.module.bias))
    for attention in watch.attentions:
        attention.grad = next(arrived)
        if attention.grad is not None and attention.grad.ndim == 3:  # of the output projection's input
            B, H, N, d = attention.value.shape
            attention.grad = attention.grad.reshape(B, N, H, d).transpose(1, 2)
    return Record(list(watch.layers.values()), watch.attentions, watch.unreached, first.shape[0], loss.item(), by_param)


def logits_name(attention: str) -> str:
    """What an attention module's logits are called in the report."""
    return f"{attention}.logits" if attention else "logits"


def not_covered(model: nn.Module, record: Record) -> Iterator[tuple[str, str, int, str]]:
    """Every module with parameters of its own that the record does not cover: name, class, parameters and why."""
    affine = {layer.module: layer for layer in record.layers}
    weights = {id(layer.module._parameters.get("weight")) for layer in record.layers}
    reached = {a.name for a in record.attentions}
    for name, module in model.named_modules():
        kind = type(module).__name__
        own = {n: p for n, p in module._parameters.items() if p is not None}
        count = sum(p.numel() for p in own.values())
        layer = affine.get(module)
        if layer is not None:
            if layer.why_not:
                yield name, kind, count, layer.why_not
            continue
        if is_affine(module) and id(module._parameters.get("weight")) in weights:
            continue  # the same layer under another name
        if own:
            if is_norm(module):
                why = "a normaliser: scales and shifts, no affine map of a vector"
            elif all(p.ndim <= 1 for p in own.values()):
                why = f"no affine map of a vector: {', '.join(own)}"
            else:
                why = f"not a linear layer or convolution: {', '.join(own)}"
            yield name, kind, count, why
        if name in record.unreached and name not in reached:
            yield logits_name(name), kind, 0, record.unreached[name]
        elif is_attention(module) and name not in reached:
            yield logits_name(name), kind, 0, "its logits, if it has any, do not pass through torch's fused attention"


def wide(x: Tensor) -> Tensor:
    """float32 or wider: what all is computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _no_autocast(x: Tensor):
    return torch.autocast(x.device.type, enabled=False)
