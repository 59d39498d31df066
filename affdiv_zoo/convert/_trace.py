"""Which norm feeds which layer, found in one forward pass.

Modules alone do not tell: residual additions, reshapes and window partitions happen between them. So every operator is
watched, by a dispatch mode, except inside linear layers, convolutions and norms, which count as one step each. A tensor
that such a layer returns is followed through operators that only move its feature vectors about, whole; everything
else that touches it uses it.
"""

import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_NORM_NAME = re.compile(r"norm(?!al)", re.IGNORECASE)


def is_norm(module: nn.Module) -> bool:
    """A normaliser of activations: torch's classes, and classes with "norm" in their name that only scale and shift."""
    if isinstance(module, nn.modules.batchnorm._NormBase | nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
        return True
    return (
        _NORM_NAME.search(type(module).__name__) is not None
        and not type(module).__module__.startswith("torch.nn.utils")  # weight and spectral norm act on weights
        and all(p.ndim <= 1 for p in module.parameters(recurse=False))
        and not any(list(m.parameters(recurse=False)) or is_norm(m) for m in list(module.modules())[1:])
    )


def is_layer(module: nn.Module) -> bool:
    """A linear layer or convolution of any make."""
    return isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or type(module).__name__ == "Conv1D"


@dataclass
class Use:
    """Something that used a followed tensor."""

    by: str
    """For people: the operator or module and where it stands."""
    layer: nn.Module | None = None
    """The layer or norm, if it is one."""
    dim: int | None = None
    """Where the features were, as a negative dimension; None if ``layer`` is."""


@dataclass
class Call:
    """One call of a layer or norm."""

    module: nn.Module
    uses: list[Use] = field(default_factory=list)
    remarks: set[str] = field(default_factory=set)
    source: "Call | None" = None
    """The call whose output this call's input is, if it came through moves alone."""
    source_dim: int | None = None
    source_name: str = "the model's input"
    input: Tensor | None = None
    version: int = 0
    channels: int | None = None
    """Where a BatchNorm of this input has its channels, as a negative dimension."""


class Trace(TorchDispatchMode):
    """Runs a model once and keeps what each norm, linear layer and convolution was fed and fed.

    Args:
        model: Any module.
        observe: Called with each norm's module, input and output; returns the (negative) feature dimension of the
            output, or None.

    Attributes:
        calls: For each layer and norm its calls, in order of execution.
        param_uses: ``id(parameter)`` to what used it outside of its layer.
    """

    def __init__(self, model: nn.Module, observe: Callable[[nn.Module, Tensor, Tensor], int | None]) -> None:
        super().__init__()
        self.names = {module: name or type(module).__name__ for name, module in model.named_modules()}
        self.calls: dict[nn.Module, list[Call]] = {}
        self.param_uses: dict[int, str] = {}
        self._observe = observe
        self._params = {id(p) for p in (*model.parameters(), *model.buffers())}
        self._stack: list[nn.Module] = []
        self._inside: list[Call] = []
        # Both by id, with a weak reference that tells whether the id still means the same tensor.
        self._followed: dict[int, tuple[weakref.ref, Call, int]] = {}
        self._origin: dict[int, tuple[weakref.ref, str]] = {}

    def run(self, model: nn.Module, example_input: Any) -> Any:
        """The model's output; fills ``calls`` and ``param_uses``."""
        handles = []
        for module in self.names:
            handles.append(module.register_forward_pre_hook(self._enter, with_kwargs=True))
            handles.append(module.register_forward_hook(self._leave, with_kwargs=True))
        try:
            with self:
                output = call(model, example_input)
        finally:
            for handle in handles:
                handle.remove()
        for tensor in tensors(output):
            self._use(tensor, Use("it is part of the model's output"))
        return output

    def _where(self) -> str:
        module = self._stack[-1]
        return f"{self.names[module]} ({type(module).__name__})"

    def _enter(self, module: nn.Module, args: tuple, kwargs: dict) -> None:
        self._stack.append(module)
        if self._inside or not (is_layer(module) or is_norm(module)):
            return
        record = Call(module)
        inputs = list(tensors((args, kwargs)))
        for i, tensor in enumerate(inputs):
            source, dim = self._look_up(tensor)
            if i == 0:
                record.source, record.source_dim = source, dim
                if id(tensor) in self._origin and self._origin[id(tensor)][0]() is tensor:
                    record.source_name = self._origin[id(tensor)][1]
            single = len(inputs) == 1
            use = Use(self._where(), module if single else None, dim if single else None)
            self._use(tensor, use)
        if len(inputs) == 1:
            record.input, record.version = inputs[0], inputs[0]._version
            record.channels = 1 - inputs[0].ndim
        if record.source is not None and is_norm(record.source.module):
            norm_input = record.source.input
            if norm_input is not None and norm_input._version != record.source.version:
                record.source.uses.append(Use("its input is changed in place before the layer runs"))
        self.calls.setdefault(module, []).append(record)
        self._inside.append(record)

    def _leave(self, module: nn.Module, args: tuple, kwargs: dict, output: Any) -> None:
        if self._inside and self._inside[-1].module is module:
            record = self._inside[-1]
            if isinstance(output, Tensor):
                dim = self._feature_dim(record, output)
                # A norm that could not be understood is followed all the same: its users are worth naming.
                self._follow(output, record, -1 if dim is None else dim)
                self._label(output, self._where())
            if not is_norm(module) or isinstance(module, nn.modules.batchnorm._NormBase):
                record.input = None  # only norms that may vanish need it, to see whether it is changed
            self._inside.pop()
        self._stack.pop()

    def _feature_dim(self, record: Call, output: Tensor) -> int | None:
        if is_norm(record.module):
            if record.input is None:
                return None
            return self._observe(record.module, record.input, output)
        if isinstance(record.module, nn.modules.conv._ConvNd):
            return -1 - len(record.module.kernel_size)
        return -1

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if self._inside or not self._stack:
            return output
        name = func.__name__.split(".")[0]
        followed = []
        for tensor in tensors((args, kwargs)):
            if id(tensor) in self._params:
                self.param_uses.setdefault(id(tensor), f"{name} in {self._where()}")
            if self._look_up(tensor)[0] is not None:
                followed.append(tensor)
        outputs = list(tensors(output))
        for tensor in followed:
            source, dim = self._look_up(tensor)
            moved = _move(name, args, kwargs, tensor, outputs, dim) if len(followed) == 1 else None
            if moved is None:
                self._use(tensor, Use(f"{name} in {self._where()}"))
                continue
            if name == "constant_pad_nd":
                source.remarks.add("where no padding is needed between the two, as here")
            for out in outputs:
                self._follow(out, source, moved)
        for out in outputs:
            self._label(out, f"{name} in {self._where()}")
        return output

    def _look_up(self, tensor: Tensor) -> tuple[Call | None, int | None]:
        entry = self._followed.get(id(tensor))
        return (entry[1], entry[2]) if entry is not None and entry[0]() is tensor else (None, None)

    def _use(self, tensor: Tensor, use: Use) -> None:
        source, _ = self._look_up(tensor)
        if source is not None:
            source.uses.append(use)

    def _follow(self, tensor: Tensor, source: Call, dim: int) -> None:
        self._followed[id(tensor)] = (weakref.ref(tensor), source, dim)

    def _label(self, tensor: Tensor, text: str) -> None:
        self._origin[id(tensor)] = (weakref.ref(tensor), text)


def call(model: nn.Module, example_input: Any) -> Any:
    """``model(x)``, ``model(*args)`` or ``model(**kwargs)``, by the type of the example."""
    if isinstance(example_input, Mapping):
        return model(**example_input)
    if isinstance(example_input, tuple | list):
        return model(*example_input)
    return model(example_input)


def tensors(tree: Any) -> Iterator[Tensor]:
    """All tensors in nested tuples, lists, mappings and objects that hold them (such as caches and model outputs)."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors(value)
    elif isinstance(tree, tuple | list):
        for value in tree:
            yield from tensors(value)
    elif hasattr(tree, "__dataclass_fields__"):
        yield from tensors(vars(tree) if hasattr(tree, "__dict__") else ())


_SAME = {"clone", "contiguous", "alias", "detach", "lift_fresh", "_to_copy"}
_VIEWS = {"view", "_unsafe_view", "reshape", "_reshape_alias", "unsqueeze", "squeeze"}
_ALONG_A_DIM = {"slice", "split", "split_with_sizes", "index_select", "narrow", "chunk"}


def _move(name: str, args: tuple, kwargs: dict, x: Tensor, outputs: list[Tensor], dim: int) -> int | None:
    """The feature dimension after an operator that moves whole feature vectors; None after any other.

    Dimensions are negative throughout, so that those in front of the features may come and go.
    """
    if not args or args[0] is not x or not outputs or any(o.dtype != x.dtype for o in outputs):
        return None
    features, out = x.shape[dim], outputs[0]
    arg = lambda i, key, default=None: args[i] if len(args) > i else kwargs.get(key, default)  # noqa: E731
    other = lambda d: (d % x.ndim) != (dim % x.ndim)  # noqa: E731
    match name:
        case _ if name in _SAME:
            return dim if out.shape == x.shape else None
        case _ if name in _VIEWS:
            # Row-major order is kept: the features stay together where the same number of entries stands behind them.
            behind = x.shape[dim:].numel()
            fits = [d for d in range(-out.ndim, 0) if out.shape[d] == features and out.shape[d:].numel() == behind]
            return fits[-1] if fits and features > 1 else None
        case "permute":
            order = [d % x.ndim for d in args[1]]
            return order.index(dim % x.ndim) - x.ndim
        case "transpose" | "t":
            order = list(range(x.ndim))
            a, b = (args[1], args[2]) if name == "transpose" else (0, x.ndim - 1)
            order[a], order[b] = order[b], order[a]
            return order.index(dim % x.ndim) - x.ndim
        case "select" | "unbind":
            d = arg(1, "dim", 0) % x.ndim
            return (dim if d < dim % x.ndim else dim + 1) if other(d) else None
        case _ if name in _ALONG_A_DIM:
            return dim if other(arg(1 if name in ("slice", "index_select", "narrow") else 2, "dim", 0)) else None
        case "roll":
            dims = arg(2, "dims", [])
            return dim if dims and all(map(other, dims)) else None
        case "flip":
            return dim if all(map(other, args[1])) else None
        case "expand":
            return dim if out.shape[dim] == features else None
        case "constant_pad_nd":
            return dim if not any(args[1]) else None
        case "index":
            used = [d for d, index in enumerate(args[1]) if index is not None]
            # A mask of several dimensions takes as many; all must stand before the features.
            spans = max((d + max(args[1][d].ndim if args[1][d].dtype == torch.bool else 1, 1) for d in used), default=0)
            return dim if used and spans <= dim % x.ndim else None
    return None
