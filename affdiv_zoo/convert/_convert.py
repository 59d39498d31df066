"""The conversion of a model: refusals, decisions norm by norm, and the passes that calibrate and check it."""

import json
import math
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from affdiv_zoo._checks import check_choice, check_options
from affdiv_zoo.convert import _attention
from affdiv_zoo.convert._norms import Formula, recognise
from affdiv_zoo.convert._report import ConversionReport, LayerChange, NormReport
from affdiv_zoo.convert._swap import (
    BatchNormStats,
    Calibrate,
    batch_norm_stats,
    correct,
    fold_batch_norm,
    fold_norm,
    is_plain,
    remove_norm,
)
from affdiv_zoo.convert._trace import Trace, Use, call, is_norm, tensors
from affdiv_zoo.layers import CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d

_CORRECTED = (CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d)
_CORRECTIONS = ("affine", "norm", "gradient")


def convert(
    model: nn.Module,
    correction: str = "affine",
    center: bool | None = None,
    scale: str = "rms",
    attention: str | None = None,
    example_input: Any = None,
) -> tuple[nn.Module, ConversionReport]:
    r"""Swaps the norm + affine pairs of any timm, torchvision or transformers model for corrected layers, in place.

    One forward pass of ``example_input`` (evaluation mode, no gradients) finds what feeds what:

    ==================================  ==================  ============================================================
    pair                                correction          what happens
    ==================================  ==================  ============================================================
    LayerNorm or RMSNorm of any make    ``"norm"``          exact: the norm's scale, shift and eps are folded into the
    whose output goes to linear layers                      layers, the norm becomes ``nn.Identity``
    (or 1x1 convolutions) only
    ..                                  ``"affine"``        exact where the folded layer has no bias (as in Llama); else
                                                            the same weights, with one factor on them and one on the
                                                            bias fitted on ``example_input`` (ours)
    convolution (or linear layer)       ``"affine"``,       approximate: the folded convolution's weights, with a gain
    followed by BatchNorm               ``"norm"``          and bias per channel such that its outputs have the means
                                                            and deviations that they had after the BatchNorm on
                                                            ``example_input``, layer after layer (ours)
    both                                ``"gradient"``      exact: the norm stays, the layer's backward is corrected
    ==================================  ==================  ============================================================

    Everything else is left as it is, and the report says why: post-norm blocks, weights tied to an embedding, norms
    that feed attention modules which read weights themselves, subclasses of ``nn.Linear`` and so on.

    **What survives.** The model object, all module objects and their names, the layers' weights and biases (the same
    ``Parameter`` objects with new values, so that an existing optimizer keeps holding them), dtype, device,
    ``requires_grad``, hooks and training mode.

    **What does not.** The norms' parameters and statistics: an optimizer keeps them without ever getting a gradient.
    Biases that layers gain are new parameters: make the optimizer after the conversion, or add them. An optimizer's
    moments refer to the old scale of the weights. What stood between a norm and its layer is no longer normalised:
    timm's ``forward_features`` and the last hidden state of a transformers causal model are now the norm's input.
    ``from_pretrained`` of a transformers class does not know the new layers: see :func:`apply_plan`.
    A path that ``example_input`` does not take (other shapes, other arguments) has not been looked at.

    Args:
        model: Any module with its weights in place. It is changed.
        correction: ``"affine"``, ``"norm"`` or ``"gradient"``; see :mod:`affdiv_zoo.functional`.
        center: Whether the layers centre their input. None follows the norm that is replaced: LayerNorm yes, RMSNorm
            no, BatchNorm yes (the zoo's default) except where a patch has only one entry.
        scale: ``"rms"`` or ``"l2"``: the same function with differently scaled weights.
        attention: Turns timm's ``Attention`` modules whose norm was folded into
            :class:`affdiv_zoo.layers.CorrectedAttention`. ``"projection"`` keeps the function and gives every head a
            learned temperature; ``"separable"``, ``"logit"`` and ``"exact"`` change it, with temperatures fitted on
            ``example_input`` (ours). None or ``"none"``: attention stays as it is.
        example_input: A tensor, a tuple of positional or a mapping of keyword arguments of the model. Give real data
            where swaps are approximate. None: noise of the size that timm's ``pretrained_cfg`` or the transformers
            config tell.

    Returns:
        ``model`` and a :class:`ConversionReport` of what happened to every norm in it.

    Raises:
        TypeError: The model is not a module, or is of a kind that cannot be converted (wrapped for data parallelism,
            quantised, scripted, compiled); the message says what to do.
        ValueError: An argument is unknown, the model has corrected layers already, or there is no example input.
    """
    check_choice("correction", correction, _CORRECTIONS)
    check_options(correction, scale, 0.0)
    if center not in (None, True, False):
        raise ValueError(f"center={center!r} is not one of None, True, False")
    if correction == "gradient" and center:
        raise ValueError("center=True changes the forward pass, which correction='gradient' keeps: leave center=None")
    attention = attention or "none"
    _refuse(model)
    _attention.check(attention, correction, model)
    default = example_input is None
    if default:
        example_input = default_example(model)

    names = {module: name for name, module in model.named_modules()}
    report = ConversionReport(type(model).__name__, correction, scale, attention)
    with _evaluation(model), torch.no_grad():
        found: dict[nn.Module, Formula | BatchNormStats | None] = {}
        separated = _separate_biases(model)
        trace = Trace(model, partial(_observe, found))
        try:
            before = trace.run(model, example_input)
        except Exception as error:
            if default:
                shapes = [tuple(t.shape) for t in tensors(example_input)]
                raise ValueError(
                    f"example_input=None: the model does not take the default of shape {shapes}: "
                    "pass example_input, a tensor, tuple or dict of what its forward takes"
                ) from error
            raise
        # All decisions first: a swap must not change what the next decision sees.
        decisions = [(norm, _decide(norm, model, trace, found, correction)) for norm in names if is_norm(norm)]
        # What each module does when its first input arrives, in the pass that calibrates.
        pending: dict[nn.Module, Calibrate] = {}
        taken: dict[nn.Module, str] = {}
        for norm, (why, layers) in decisions:
            entry = NormReport(names[norm], type(norm).__name__, "left", why)
            report.norms.append(entry)
            if not layers:
                continue
            twice = next((layer for layer in layers if layer in taken), None)
            if twice is not None:
                entry.why = f"{names[twice]} has taken over {taken[twice]} already"
                continue
            taken.update(dict.fromkeys(layers, entry.name))
            entry.result = "exact"
            for layer in layers:
                change, calibrate = _swap(layer, found[norm], correction, center, scale)
                change.name, change.bias = names[layer], layer.bias is not None
                entry.layers.append(change)
                if calibrate is not None:
                    entry.result = "approximate"
                    pending[layer] = calibrate
            if correction != "gradient":
                remove_norm(norm)
            if isinstance(found[norm], BatchNormStats) and not entry.layers[0].center and center is not False:
                one = correction != "gradient" and layers[0].weight[0].numel() == 1
                entry.why = "not centred: its patches have one entry" if one else entry.why
        if attention != "none":
            for module in filter(_attention.is_attention, names):
                if module.qkv in taken:
                    change, pending[module] = _attention.fold(module, attention, pending.pop(module.qkv, None))
                    change.name = names[module]
                    report.attentions.append(change)
                else:
                    report.notes.append(f"{names[module]} was not corrected: its qkv layer took over no norm")
        for module in separated:
            module.qkv_bias_separate = isinstance(module.qkv, CorrectedLinear)
        del trace
        after = _calibrated_pass(model, example_input, pending)
    report.output_difference = _difference(before, after)
    fitted = report.count("approximate") or (report.attentions and attention != "projection")
    if default and fitted:
        report.notes.append("Calibrated on noise: pass example_input, a batch of real data, before you use the model.")
    if not fitted and not (report.output_difference or 0.0) <= _rounding(before):
        warnings.warn(
            f"every swap is exact, yet the output changed by {report.output_difference:.1e} of its size: the model may "
            "amplify rounding errors, or computes something that the trace did not see. Please check it.",
            stacklevel=2,
        )
    return model, report


def apply_plan(model: nn.Module, plan: str) -> nn.Module:
    """Makes the swaps of an earlier conversion in a fresh model of the same architecture, without looking at weights.

    The way to load a converted model's ``state_dict``, whichever library built it:
    ``apply_plan(build(), report.plan()).load_state_dict(state)``. Works on the meta device.

    Args:
        model: An unconverted model of the same architecture. It is changed; its weights mean nothing afterwards.
        plan: :meth:`ConversionReport.plan` of the conversion.

    Returns:
        ``model``.

    Raises:
        ValueError: The plan is no JSON, or names modules that the model does not have.
    """
    try:
        record = json.loads(plan)
        correction, scale, swaps = record["correction"], record["scale"], record["swaps"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"plan={plan[:60]!r} is not the plan() of a ConversionReport") from error
    corrected = {name for _, layers in swaps for name, *_ in layers}
    for module in _separate_biases(model):
        module.qkv_bias_separate = any(module.qkv is model.get_submodule(name) for name in corrected)
    for norm_name, layers in swaps:
        try:
            norm = model.get_submodule(norm_name)
            modules = [model.get_submodule(name) for name, *_ in layers]
        except AttributeError as error:
            raise ValueError(f"plan names {norm_name!r}, which a {type(model).__name__} does not have") from error
        for module, (_, center, eps, bias) in zip(modules, layers, strict=True):
            correct(module, bias=bias, correction=correction, center=center, scale=scale, eps=eps)
        if correction != "gradient":
            remove_norm(norm)
    if record.get("attentions"):
        for name in record["attentions"]:
            _attention.correct(model.get_submodule(name), record["attention"])
    return model


def _separate_biases(model: nn.Module) -> list[nn.Module]:
    """Makes timm's EVA and BEiT attention call their qkv layer, instead of its weight with a bias made elsewhere."""
    modules = [m for m in model.modules() if getattr(m, "qkv_bias_separate", None) is False and m.qkv is not None]
    for module in modules:
        module.qkv_bias_separate = True
    return modules


def default_example(model: nn.Module) -> Tensor | dict[str, Tensor]:
    """Two samples of noise, from timm's ``pretrained_cfg`` or a transformers config.

    Raises:
        ValueError: Neither tells the input's shape.
    """
    reference = next((p for p in model.parameters() if p.is_floating_point()), torch.empty(()))
    generator = torch.Generator().manual_seed(0)

    def noise(*shape: int) -> Tensor:
        return torch.randn(2, *shape, generator=generator).to(reference)

    config = getattr(model, "config", None)
    if hasattr(model, "main_input_name") and config is not None:
        if model.main_input_name == "pixel_values":
            size = getattr(config, "image_size", None)
            if size is not None:
                height, width = (size, size) if isinstance(size, int) else size
                return {"pixel_values": noise(getattr(config, "num_channels", 3), height, width)}
        elif model.main_input_name == "input_ids" and getattr(config, "vocab_size", None):
            ids = torch.randint(0, config.vocab_size, (2, 16), generator=generator)
            return {"input_ids": ids.to(reference.device)}
    cfg = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    if cfg and cfg.get("input_size"):
        channels, *size = cfg["input_size"]
        size = getattr(getattr(model, "patch_embed", None), "img_size", None) or size
        return noise(getattr(model, "in_chans", channels), *size)
    raise ValueError(
        f"example_input=None, and a {type(model).__name__} does not tell its input's shape (timm and transformers "
        "models do): pass example_input, a tensor, tuple or dict of what its forward takes"
    )


def _refuse(model: nn.Module) -> None:
    """Raises for models that cannot be converted as they are."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model is a {type(model).__name__}, expected a torch.nn.Module")
    for name, module in model.named_modules():
        at, kind = name or "model", type(module).__name__
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(f"{at} is scripted or traced ({kind}): convert the Python model, then script it")
        if kind == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
            raise TypeError(f"{at} is compiled ({kind}): convert the model first, then torch.compile it")
        if kind in ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise TypeError(f"{at} is wrapped ({kind}): convert the model first, then wrap it")
        if type(module).__module__.startswith(("torch.ao.nn", "torch.nn.quantized", "bitsandbytes")):
            raise TypeError(f"{at} is quantised ({kind}): convert the unquantised model, then quantise it")
        if isinstance(module, _CORRECTED):
            raise ValueError(f"model is converted already, or of this package: {at} is a {kind}")
        for key, parameter in module.named_parameters(recurse=False):
            if type(parameter) is not nn.Parameter:
                raise TypeError(
                    f"{at}.{key} is a {type(parameter).__name__} (sharded, quantised or lazy), expected a plain "
                    "Parameter: convert the model before that"
                )
            if parameter.is_meta:
                raise TypeError(f"{at}.{key} is on the meta device: load the weights first, or use apply_plan")
            if not (parameter.is_floating_point() or parameter.is_complex()):
                raise TypeError(f"{at}.{key} is {parameter.dtype}, so quantised: convert the unquantised model")
    if getattr(model, "is_quantized", False):
        raise TypeError("model is quantised (is_quantized): convert the unquantised model, then quantise it")


def _observe(found: dict, norm: nn.Module, x: Tensor, y: Tensor) -> int | None:
    """Keeps what a norm computes, when the trace comes past it."""
    if norm in found:  # a second call cannot change the formula
        return found[norm].dim if isinstance(found[norm], Formula) else None
    found[norm] = None
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm):
        return None
    if getattr(norm, "running_mean", None) is not None and getattr(norm, "running_var", None) is not None:
        stats = batch_norm_stats(norm, x)
        over = [1, -1] + [1] * (x.ndim - 2)
        expected = x.double() * stats.scale.view(over) + stats.shift.view(over)
        expected = expected.to(y.dtype)
        for name in ("drop", "act"):
            child = getattr(norm, name, None)
            expected = child(expected) if isinstance(child, nn.Module) else expected
        tolerance = max(1e-3, 64 * torch.finfo(y.dtype).eps)
        if (expected - y).abs().max() <= tolerance * expected.abs().max():
            found[norm] = stats
        return None
    formula = recognise(norm, x, y)
    found[norm] = formula
    return None if formula is None else formula.dim


def _decide(
    norm: nn.Module, model: nn.Module, trace: Trace, found: dict, correction: str
) -> tuple[str, list[nn.Module]]:
    """A remark and the layers to correct, or why the norm is left and no layers."""
    calls = trace.calls.get(norm)
    if not calls:
        return "not called on example_input", []
    if "forward" in vars(norm):
        return "its forward was replaced on the object (by a wrapper such as accelerate's)", []
    for p in norm.parameters(recurse=False):
        if id(p) in trace.param_uses:
            return f"its parameters are used outside of it, by {trace.param_uses[id(p)]}", []
    if isinstance(found.get(norm), BatchNormStats):
        return _decide_batch_norm(norm, calls, trace, correction)
    formula = found.get(norm)
    if formula is None:
        return _unknown(norm, calls), []
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoderLayer) and norm in parent.children():
            return "torch's TransformerEncoderLayer reads its norms' weights itself", []
    uses = [use for c in calls for use in c.uses]
    if not uses:
        return "nothing uses its output", []
    layers: dict[nn.Module, None] = {}
    for use in uses:
        why = _why_not_fed(norm, use, trace, correction)
        if why:
            return why, []
        layers[use.layer] = None
    remarks = sorted({remark for c in calls for remark in c.remarks})
    return "; ".join(remarks), list(layers)


def _unknown(norm: nn.Module, calls: list) -> str:
    """Why a norm that is neither a running BatchNorm nor a recognised formula stays."""
    if isinstance(norm, nn.modules.instancenorm._InstanceNorm | nn.GroupNorm):
        return f"{type(norm).__name__} normalises over positions, which no corrected layer does"
    if isinstance(norm, nn.modules.batchnorm._BatchNorm) and norm.running_mean is None:
        return "keeps no running statistics"
    if any(c.input is None for c in calls) and not isinstance(norm, nn.modules.batchnorm._BatchNorm):
        return "takes other than one tensor"
    return "does not compute a LayerNorm, RMSNorm or BatchNorm (an activation, a hook, a type change of its own?)"


def _why_not_fed(norm: nn.Module, use: Use, trace: Trace, correction: str) -> str:
    """Why this use of a norm's output cannot be a corrected layer, or nothing."""
    layer = use.layer
    if layer is None or is_norm(layer):
        return use.by if use.by.startswith("it") else f"its output goes to {use.by}"
    why = _why_not_plain(layer, trace, correction)
    if why:
        return why
    name = trace.names[layer]
    sources = [c.source.module if c.source else None for c in trace.calls[layer]]
    if any(source is not norm for source in sources):
        other = next((trace.names[s] for s in sources if s not in (norm, None)), "something else")
        return f"{name} is fed by {other} too"
    if isinstance(layer, nn.Linear):
        return "" if use.dim == -1 else f"{name} mixes another dimension than the one normalised"
    dims = len(layer.kernel_size)
    if use.dim != -1 - dims:
        return f"{name} mixes another dimension than the one normalised"
    if correction != "gradient" and (math.prod(layer.kernel_size) > 1 or layer.groups > 1 or _pads(layer)):
        return f"{name} is a convolution that sees more than one normalised position, or part of one"
    return ""


def _pads(conv: nn.Module) -> bool:
    return any(conv._reversed_padding_repeated_twice) if isinstance(conv.padding, str) else any(conv.padding)


def _why_not_plain(layer: nn.Module, trace: Trace, correction: str) -> str:
    """Why a layer cannot be corrected in place, or nothing."""
    name = trace.names[layer]
    if not is_plain(layer):
        return f"{name} is a {type(layer).__name__}, not a plain linear layer or convolution"
    if "forward" in vars(layer):
        return f"{name}.forward was replaced on the object (by a wrapper such as accelerate's)"
    if "weight" not in layer._parameters:
        return f"{name}.weight is computed (pruning, weight norm)"
    slots = Counter(id(p) for m in trace.names for p in m._parameters.values() if p is not None)
    for key, p in layer._parameters.items():
        if p is None:
            continue
        if correction != "gradient" and slots[id(p)] > 1:
            owners = [f"{trace.names[m]}.{k}" for m in trace.names for k, q in m._parameters.items() if q is p]
            return f"{name}.{key} is tied to {next(o for o in owners if o != f'{name}.{key}')}"
        if id(p) in trace.param_uses:
            return f"{name}.{key} is used outside of the layer, by {trace.param_uses[id(p)]}"
    return ""


def _decide_batch_norm(norm: nn.Module, calls: list, trace: Trace, correction: str) -> tuple[str, list[nn.Module]]:
    """As :func:`_decide`, for a BatchNorm with running statistics."""
    if len(calls) > 1:
        return "called more than once", []
    source = calls[0].source
    if source is None:
        return f"its input comes from {calls[0].source_name}, not from a convolution", []
    layer, name = source.module, trace.names[source.module]
    if is_norm(layer):
        return f"its input comes from the norm {name}", []
    if calls[0].source_dim != calls[0].channels:
        return f"it normalises another dimension than the outputs of {name}", []
    if len(source.uses) > 1:
        other = next(use.by for use in source.uses if use.layer is not norm)
        return f"the output of {name} also goes to {other}", []
    if len(trace.calls[layer]) > 1:
        return f"{name} is called more than once", []
    if layer._forward_hooks and correction != "gradient":
        return f"{name} has a forward hook, which may change what the norm has seen", []
    why = _why_not_plain(layer, trace, correction)
    return why, [] if why else [layer]


def _swap(layer: nn.Module, norm: Formula | BatchNormStats, correction: str, center: bool | None, scale: str):
    if correction == "gradient":
        change = LayerChange("", False, 1e-6)
        correct(layer, bias=False, correction=correction, center=False, scale=scale, eps=change.eps)
        return change, None
    fold = fold_batch_norm if isinstance(norm, BatchNormStats) else fold_norm
    return fold(layer, norm, correction, center, scale)


def _calibrated_pass(model: nn.Module, example_input: Any, pending: dict[nn.Module, Calibrate]) -> Any:
    """The converted model's output. Each pending module is calibrated as its first input arrives: in order of use."""
    handles = {}

    def arrive(module: nn.Module, args: tuple, kwargs: dict) -> None:
        handles.pop(module).remove()
        pending[module](args[0] if args else next(iter(kwargs.values())))

    for module in pending:
        handles[module] = module.register_forward_pre_hook(arrive, with_kwargs=True)
    try:
        return call(model, example_input)
    finally:
        for handle in handles.values():
            handle.remove()


def _difference(before: Any, after: Any) -> float | None:
    pairs = [
        (a.double(), b.double())
        for a, b in zip(tensors(before), tensors(after), strict=False)
        if a.is_floating_point() and a.shape == b.shape and a.numel()
    ]
    changes = [float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs]
    return max(changes, default=None)


def _rounding(output: Any) -> float:
    """How much rounding may change an output: what a deep net makes of its type's precision."""
    types = {t.dtype for t in tensors(output) if t.is_floating_point()}
    return max([1e-3, *(torch.finfo(dtype).eps ** 0.5 for dtype in types)])


@contextmanager
def _evaluation(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for every module, and its own mode again afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
