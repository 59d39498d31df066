"""Makes what a run trains, all of it of timm's parts: model, optimizer, schedule, loss, Mixup. And saves the model."""

import argparse
import json
from pathlib import Path
from typing import Any

import timm
import torch
from data import Data, RecipeError, did_you_mean, one_line
from safetensors.torch import save_file
from timm.data import Mixup
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from timm.models import get_pretrained_cfg
from timm.models._hub import save_config_for_hf
from timm.optim import create_optimizer_v2, get_optimizer_info, list_optimizers
from timm.scheduler import create_scheduler_v2
from timm.scheduler.scheduler import Scheduler
from torch import nn

from affdiv_zoo.hf import complete_folder

# What create_model takes besides a model's own keywords. The first three follow from the data; the others would load
# weights or change what the model returns.
RESERVED_KWARGS = (
    "num_classes",
    "in_chans",
    "img_size",
    "pretrained",
    "pretrained_cfg",
    "pretrained_cfg_overlay",
    "checkpoint_path",
    "cache_dir",
    "features_only",
)

# What a model's pretrained configuration may say of weights and images that are not this run's.
FOREIGN_CFG_KEYS = (
    "tag",
    "license",
    "description",
    "origin_url",
    "paper_name",
    "paper_ids",
    "notes",
    "label_offset",
    "label_descriptions",
    "test_input_size",
    "test_pool_size",
    "test_crop_pct",
    "min_input_size",
)


def check_names(args: argparse.Namespace) -> None:
    """Raises a RecipeError for an unknown model, optimizer or reserved model keyword."""
    if not timm.is_model(args.model):
        raise RecipeError(f"--model {args.model!r} is unknown to timm{did_you_mean(args.model, timm.list_models())}")
    try:
        get_pretrained_cfg(args.model)
    except RuntimeError as error:
        raise RecipeError(f"--model {args.model!r}: {one_line(error)} Leave the tag off") from error
    check_optimizer_name(args)
    for key in args.model_kwargs:
        if key in RESERVED_KWARGS:
            raise RecipeError(f"--model-kwargs {key}=...: the recipe sets that itself; leave it out")


def check_optimizer_name(args: argparse.Namespace) -> None:
    """Raises a RecipeError for an unknown optimizer."""
    if args.opt.lower() not in list_optimizers():
        raise RecipeError(f"--opt {args.opt!r} is unknown to timm{did_you_mean(args.opt.lower(), list_optimizers())}")
    if get_optimizer_info(args.opt.lower()).second_order:
        raise RecipeError(f"--opt {args.opt!r} needs second derivatives, which these recipes do not take; name another")


def drop_kwargs(args: argparse.Namespace) -> dict[str, float]:
    """Returns the model's keywords for `--drop` and `--drop-path`, those that are given."""
    given = dict(drop_rate=args.drop, drop_path_rate=args.drop_path)
    return {name: value for name, value in given.items() if value is not None}


def build_model(args: argparse.Namespace, data: Data) -> nn.Module:
    """Creates the model for the data's channels, size and classes, and tries it on one empty image."""
    channels, height, width = data.config["input_size"]
    own = dict(num_classes=len(data.label_names), in_chans=channels)
    if get_pretrained_cfg(args.model).fixed_input_size:
        own["img_size"] = height
    kwargs = {**args.model_kwargs, **drop_kwargs(args)}
    try:
        model = timm.create_model(args.model, **kwargs, **own)
    except (TypeError, ValueError, KeyError, AssertionError, RuntimeError, ArithmeticError) as error:
        if kwargs:
            timm.create_model(args.model, **own)  # raises if the keywords are not to blame
            given = [f"{key}={value}" for key, value in args.model_kwargs.items()]
            given = ["--model-kwargs", *given] if given else []
            given += [f"--drop {args.drop}"] if args.drop is not None else []
            given += [f"--drop-path {args.drop_path}"] if args.drop_path is not None else []
            raise RecipeError(f"{' '.join(given)}: {args.model} does not take that ({one_line(error)})") from error
        if "img_size" in own:
            raise RecipeError(
                f"--model {args.model!r} cannot be made for {height}x{width} images ({one_line(error)}); "
                "name another --img-size or model"
            ) from error
        raise
    try_model(args, model, data)
    return model.train()


def try_model(args: argparse.Namespace, model: nn.Module, data: Data) -> None:
    """Raises a RecipeError unless a model takes one empty image of the data's size; leaves it in eval mode."""
    channels, height, width = data.config["input_size"]
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, channels, height, width))
    except (RuntimeError, ValueError, AssertionError) as error:
        raise RecipeError(
            f"--model {args.model!r} does not take {channels}x{height}x{width} images ({one_line(error)}); "
            "name another --img-size or model"
        ) from error


def enable_grad_checkpointing(args: argparse.Namespace, model: nn.Module) -> None:
    """Has a model recompute activations with `--grad-checkpointing`."""
    if not args.grad_checkpointing:
        return
    try:
        model.set_grad_checkpointing(True)
    except (AttributeError, AssertionError) as error:
        raise RecipeError(f"--grad-checkpointing: {args.model} cannot do that; leave it off") from error


def build_optimizer(args: argparse.Namespace, model: nn.Module) -> torch.optim.Optimizer:
    """Creates the optimizer; with `--layer-decay`, in groups whose rates fall towards the input."""
    settings: dict[str, Any] = {}
    if args.opt_eps is not None:
        settings["eps"] = args.opt_eps
    if args.opt_betas is not None:
        settings["betas"] = tuple(args.opt_betas)
    if args.layer_decay is not None:
        settings["layer_decay"] = args.layer_decay
    try:
        return create_optimizer_v2(
            model, opt=args.opt, lr=args.lr, weight_decay=args.weight_decay, momentum=args.momentum, **settings
        )
    except (ImportError, AssertionError) as error:
        # timm lists optimizers of packages that need not be there (apex, bitsandbytes).
        raise RecipeError(f"--opt {args.opt!r} is not available here ({one_line(error)}); name another") from error
    except (ValueError, TypeError, IndexError) as error:  # the last for too few betas
        given = f"--lr {args.lr} --weight-decay {args.weight_decay} --momentum {args.momentum}"
        given += f" --opt-eps {args.opt_eps}" if args.opt_eps is not None else ""
        given += f" --opt-betas {' '.join(map(str, args.opt_betas))}" if args.opt_betas is not None else ""
        raise RecipeError(f"--opt {args.opt!r} does not take {given} ({one_line(error)}); change those") from error


def build_scheduler(
    args: argparse.Namespace, optimizer: torch.optim.Optimizer, total: int, updates_per_epoch: int
) -> Scheduler:
    """Creates the schedule: a warm-up, then `--sched`.

    It is counted in updates alone, so that it also ends where `--max-steps` does, and is a function of their number:
    `step_update(n)` sets the rates for update n + 1, whatever came before.
    """
    if args.warmup_epochs is not None:
        warmup = min(total, round(args.warmup_epochs * updates_per_epoch))
    else:
        warmup = round(total * args.warmup_fraction)
    scheduler, _ = create_scheduler_v2(
        optimizer,
        sched="poly" if args.sched == "linear" else args.sched,
        decay_rate=1.0,  # the power of poly
        num_epochs=total,
        warmup_epochs=warmup,
        warmup_lr=args.lr / 100 if args.warmup_lr is None else args.warmup_lr,
        min_lr=args.min_lr,
        step_on_epochs=False,
        updates_per_epoch=1,
    )
    return scheduler


def build_mixup(args: argparse.Namespace, classes: int) -> Mixup | None:
    """Creates Mixup and CutMix, or None without `--mixup` and `--cutmix`. Labels come out smoothed and as shares."""
    if not args.mixup and not args.cutmix:
        return None
    if args.batch_size % 2:
        raise RecipeError(f"--batch-size {args.batch_size}: --mixup and --cutmix mix pairs; choose an even number")
    return Mixup(
        mixup_alpha=args.mixup,
        cutmix_alpha=args.cutmix,
        prob=args.mixup_prob,
        switch_prob=args.mixup_switch_prob,
        mode=args.mixup_mode,
        label_smoothing=args.label_smoothing,
        num_classes=classes,
    )


def build_criterion(args: argparse.Namespace) -> nn.Module:
    """Creates the loss of logits and labels, which are class numbers, or shares of the classes under Mixup."""
    mixes = bool(args.mixup or args.cutmix)
    if args.bce_loss:
        return BinaryCrossEntropy(
            smoothing=0.0 if mixes else args.label_smoothing, target_threshold=args.bce_target_thresh
        )
    if mixes:
        return SoftTargetCrossEntropy()
    return nn.CrossEntropyLoss(label_smoothing=args.label_smoothing)


def save_model(
    folder: Path, model: nn.Module, args: argparse.Namespace, data: Data, state: dict[str, torch.Tensor] | None = None
) -> None:
    """Writes weights and configuration in the form that both timm and transformers load.

    Args:
        folder: An existing folder, which gets `model.safetensors` and `config.json`.
        model: The model, without wrappers.
        args: The recipe's arguments; `model_kwargs` is what timm needs to make the model again, unless the model has an
            attribute `recipe_model_args` that says it.
        data: The data, for classes and preprocessing.
        state: The weights, if they are not the model's own.
    """
    state = model.state_dict() if state is None else state
    # In the usual memory order and each in memory of its own, whatever the run used.
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in state.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    usual = model.pretrained_cfg
    label_names = tuple(data.label_names)
    pretrained_cfg = dict(data.config, num_classes=len(label_names), label_names=label_names)
    if tuple(usual["input_size"][1:]) != tuple(data.config["input_size"][1:]):
        pretrained_cfg["pool_size"] = None  # the size of the last feature map follows from the input's
    path = folder / "config.json"
    model.pretrained_cfg = {key: value for key, value in usual.items() if key not in FOREIGN_CFG_KEYS}
    try:
        save_config_for_hf(
            model,
            path,
            model_config=dict(label_names=label_names, pretrained_cfg=pretrained_cfg),
            model_args=getattr(model, "recipe_model_args", args.model_kwargs),
        )
    finally:
        model.pretrained_cfg = usual
    config = json.loads(path.read_text())
    # timm reads the number of classes elsewhere, and transformers refuses to get it twice.
    config.get("model_args", {}).pop("num_classes", None)
    path.write_text(json.dumps(config, indent=2) + "\n")
    if timm.model_entrypoint(config["architecture"]).__module__.startswith("affdiv_zoo."):
        complete_folder(folder)  # transformers finds timm's own by itself
