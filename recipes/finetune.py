"""Fine-tunes a trained image classifier on other images, as it is or converted to corrected layers.

    accelerate launch recipes/finetune.py
    accelerate launch recipes/finetune.py --model resnet50.a1_in1k --dataset path/to/images --freeze-stages 2
    accelerate launch recipes/finetune.py --model vit_tiny_patch16_224 --dataset path/to/images \\
        --convert affine --distill features --lr 5e-4 --layer-decay 0.75

The first line fine-tunes the PatchNorm ResNet that comes with the package from CIFAR-10 to scikit-learn's digits,
within two minutes on a laptop's CPU, and downloads nothing. The model is a name of timm or of affdiv_zoo that has
weights, a repository as hf-hub:owner/name, or a folder with config.json and model.safetensors.

The head is made anew for the data set's classes; the rate falls by --layer-decay from each layer to the one before it.
The defaults suit small convolutional nets. For a large net or a ViT begin with --lr 5e-4 --layer-decay 0.75.
With --convert the norms are folded into corrected layers first, which is exact for some and near for others (see
`affdiv_zoo.convert`); --distill pulls the features back to those of the unconverted model while it is fine-tuned.

Everything else is as in train.py: the run folder, checkpoints and --resume auto, configuration files and trackers.
"""

import argparse
import copy
import fnmatch
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator, PartialState
from building import RESERVED_KWARGS, check_optimizer_name, drop_kwargs, try_model
from data import (
    MAX_ARRAY_SIDE,
    ArrayDataset,
    Data,
    RecipeError,
    decode_small,
    did_you_mean,
    find_source,
    listed,
    load_data,
    one_line,
    timm_augmentation,
)
from options import (
    Flag,
    Parser,
    add_augmentation_options,
    add_config_option,
    add_data_options,
    add_evaluation_options,
    add_model_options,
    add_output_options,
    add_training_options,
    count,
    default_output,
    not_negative,
    parse,
    positive,
)
from PIL import Image
from pretrained import DEFAULT_MODEL, complete_name, load_pretrained, saved_config
from signals import StopSignal
from timm.data.transforms import str_to_pil_interp
from timm.models import get_pretrained_cfg
from timm.models._manipulate import group_parameters
from torch import nn
from torch.utils.data import IterableDataset
from train import check_arguments, check_output, fit, is_finished, last_line, run_program

import affdiv_zoo
from affdiv_zoo.convert import ConversionReport

PROGRAM = "finetune.py"
CONVERTED = "affdiv_converted"  # timm's name for converted models


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = Parser(
        prog=PROGRAM,
        usage="accelerate launch recipes/finetune.py [--config FILE] [options]",
        description="Fine-tune a trained image classifier with timm and accelerate, as it is or converted.",
        epilog="A switch such as --keep-head in a config file is taken back by --no-keep-head.",
    )
    add_config_option(parser)
    add_model_options(
        parser,
        default=DEFAULT_MODEL,
        what="a name of timm or affdiv_zoo with weights, hf-hub:owner/name, or a folder with config.json and "
        "model.safetensors",
    )
    size = next(action for action in parser._actions if action.dest == "img_size")
    size.help = "side of the model's square input; the one it was trained with without it"
    group = parser.add_argument_group("fine-tuning")
    group.add_argument(
        "--convert",
        choices=("affine", "norm", "gradient"),
        help="swap norm + affine pairs for corrected layers first; approximate swaps are fitted on training images",
    )
    group.add_argument(
        "--convert-center", choices=("auto", "true", "false"), default="auto", help="auto: as the norm that is replaced"
    )
    group.add_argument("--convert-scale", choices=("rms", "l2"), default="rms", help="as in affdiv_zoo.convert")
    group.add_argument(
        "--convert-attention",
        choices=("none", "projection", "separable", "logit", "exact"),
        default="none",
        help="correct timm's attention modules too",
    )
    group.add_argument(
        "--calibration-images", type=count, default=64, metavar="N", help="training images that --convert looks at"
    )
    group.add_argument(
        "--keep-head", action=Flag, default=False, help="keep the trained head; the classes have to be the same"
    )
    group.add_argument(
        "--freeze",
        nargs="+",
        action="extend",
        default=[],
        metavar="PATTERN",
        help="do not train the parameters whose names match, such as 'conv1*' 'layer1.*'",
    )
    group.add_argument(
        "--freeze-stages", type=count, metavar="N", help="do not train the first N stages, of which the stem is one"
    )
    group.add_argument(
        "--distill",
        choices=("features", "logits"),
        help="also stay near a teacher: by its features before the head, or by its class probabilities",
    )
    group.add_argument(
        "--teacher",
        metavar="MODEL",
        help="the teacher; without it the unconverted --model, which has its old classes",
    )
    group.add_argument("--distill-weight", type=not_negative, default=1.0, metavar="W", help="weight of that loss")
    group.add_argument(
        "--distill-temperature", type=positive, default=2.0, metavar="T", help="softens the probabilities of logits"
    )
    add_data_options(parser)
    add_augmentation_options(parser)
    add_training_options(parser, epochs=6, lr=5e-3, layer_decay=0.9)
    add_evaluation_options(parser)
    add_output_options(parser, "runs/<model>-<convert>-<dataset>-seed<seed>")
    return parser


def parse_args(argv: list[str] | None = None, parser: argparse.ArgumentParser | None = None) -> argparse.Namespace:
    """Parses the command line and completes what depends on other options."""
    parser = parser or build_parser()
    args = parse(argv, parser)
    check_arguments(args, parser)
    if args.teacher is not None and args.distill is None:
        parser.error("--teacher: is for --distill; set that too")
    if args.distill == "logits" and args.teacher is None and not args.keep_head:
        parser.error(
            "--distill logits: the unconverted model has other classes; name a --teacher with these, set --keep-head "
            "if they are the same, or use --distill features"
        )
    for key in args.model_kwargs:
        if key in RESERVED_KWARGS:
            parser.error(f"--model-kwargs {key}=...: the recipe sets that itself; leave it out")
    if args.output is None:
        model = Path(args.model).name.removeprefix("local-dir:").removeprefix("hf-hub:")
        dataset = "digits" if args.dataset == "digits" else Path(args.dataset).resolve().name
        names = (model, *([args.convert] if args.convert else []), "to", dataset, f"seed{args.seed}")
        args.output = default_output(args, names)
    return args


# --------------------------------------------------------------------------------------------------------------------
# Data
# --------------------------------------------------------------------------------------------------------------------


def load_images(args: argparse.Namespace, cfg: dict[str, Any]) -> Data:
    """Makes the data sets for a trained model: in the size that it knows, and normalised as it knows it.

    Small images are scaled to the model's size once and then held in memory. Gray ones stay gray: timm sums the first
    layer's weights over the colours. What a gray image's mean and deviation are, is taken from the data.

    Args:
        args: The recipe's arguments. `img_size` is filled in.
        cfg: timm's description of the model.
    """
    args.img_size = args.img_size or cfg["input_size"][-1]
    if args.streaming:
        return load_data(args, cfg)
    source = find_source(args)
    if args.img_size <= MAX_ARRAY_SIDE and not timm_augmentation(args):
        arrays = decode_small(source, None, args.dataset, args.max_decode_errors)
        how = str_to_pil_interp(cfg.get("interpolation") or "bicubic")
        source.arrays[args.img_size] = arrays and [scaled(array, args.img_size, how) for array in arrays]
    data = load_data(args, cfg, source)
    channels = data.config["input_size"][0]
    if data.in_memory and channels == 3 and len(cfg.get("mean") or ()) == 3:
        data.config.update(mean=tuple(cfg["mean"]), std=tuple(cfg["std"]))
        for part in (data.train, data.val, data.test):
            if isinstance(part, ArrayDataset):
                part.mean, part.std = torch.tensor(cfg["mean"]) * 255, torch.tensor(cfg["std"]) * 255
    return data


def scaled(images: np.ndarray, side: int, how: Image.Resampling) -> np.ndarray:
    """Scales N x H x W x C bytes as timm's transforms would scale each image."""
    if images.shape[1] == side:
        return images
    result = np.empty((len(images), side, side, images.shape[-1]), dtype=np.uint8)
    for index, image in enumerate(images):
        picture = Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)
        result[index] = np.asarray(picture.resize((side, side), how)).reshape(side, side, -1)
    return result


def some_images(data: Data, number: int) -> torch.Tensor:
    """Returns some of the training images, evenly picked, as one batch; the same in every process."""
    if isinstance(data.train, IterableDataset):
        images = iter(data.train.part(0, 1, number))
        return torch.stack([next(images)[0] for _ in range(min(number, len(data.train)))])
    step = -(-len(data.train) // number)
    return torch.stack([data.train[index][0] for index in range(0, len(data.train), step)])


# --------------------------------------------------------------------------------------------------------------------
# The model
# --------------------------------------------------------------------------------------------------------------------


class FineTuning:
    """Makes the model of a run and what it is to minimise.

    Args:
        args: The recipe's arguments.
        name: The trained model, as `complete_name` returns it.
        teacher: The teacher's name likewise, or None.
    """

    def __init__(self, args: argparse.Namespace, name: str, teacher: str | None = None):
        self.args = args
        self.name = name
        self.teacher_name = teacher
        self.teacher: nn.Module | None = None
        self.model: nn.Module | None = None
        self.report: ConversionReport | None = None

    def load(self, name: str, data: Data, classes: int | None, **kwargs: Any) -> nn.Module:
        """Loads a trained model for the data's channels and size, with a head for `classes` if that is given."""
        channels, height, _ = data.config["input_size"]
        cfg, architecture, saved = saved_config(name)
        own = dict(in_chans=channels)
        if classes is not None:
            own["num_classes"] = classes
        base = get_pretrained_cfg(saved.get("base", architecture))
        if base is not None and base.fixed_input_size and height != cfg["input_size"][-1]:
            own["img_size"] = height
        return load_pretrained(name, **kwargs, **own)

    def build(self, args: argparse.Namespace, data: Data) -> nn.Module:
        """Loads the model, gives it a head, converts and freezes it, as the arguments say."""
        classes = len(data.label_names)
        cfg, architecture, saved = saved_config(self.name)
        saved = {key: value for key, value in saved.items() if key not in RESERVED_KWARGS}  # as the data has it
        if args.keep_head:
            self.check_same_classes(cfg, data)
        model = self.load(self.name, data, classes, **args.model_kwargs, **drop_kwargs(args))
        if args.distill and self.teacher_name is None:
            # With the head that the model has been trained with, if that is to be kept, or with any.
            self.teacher = copy.deepcopy(model)
        elif args.distill:
            self.teacher = self.load_teacher(data, classes)
        if not args.keep_head and cfg["num_classes"] == classes:
            reset_head(model)  # else timm has made a new one
        saved |= args.model_kwargs
        if args.convert:
            saved = {"base": saved.pop("base", architecture), **saved, "plan": self.convert(model, data)}
            model.pretrained_cfg = {**model.pretrained_cfg, "architecture": CONVERTED}
        model.recipe_model_args = saved  # what save_model writes
        try_model(args, model, data)
        freeze(args, model)
        self.model = model
        return model.train()

    def check_same_classes(self, cfg: dict[str, Any], data: Data) -> None:
        """Raises a RecipeError unless the data set has the model's classes in the model's order."""
        known = cfg.get("label_names")
        names = list(data.label_names)
        if cfg["num_classes"] != len(names) or (known is not None and list(known) != names):
            raise RecipeError(
                f"--keep-head: the model has {cfg['num_classes']} classes ({listed(list(known or ())[:5])}, ...) and "
                f"{self.args.dataset!r} {len(names)} ({listed(names[:5])}, ...); leave it off"
            )

    def load_teacher(self, data: Data, classes: int) -> nn.Module:
        """Loads the model of `--teacher`."""
        assert self.teacher_name is not None
        cfg = saved_config(self.teacher_name)[0]
        if self.args.distill == "logits" and cfg["num_classes"] != classes:
            raise RecipeError(
                f"--teacher {self.args.teacher!r} has {cfg['num_classes']} classes and {self.args.dataset!r} "
                f"{classes}; name one that was trained for these, or use --distill features"
            )
        return self.load(self.teacher_name, data, None)

    def convert(self, model: nn.Module, data: Data) -> str:
        """Converts the model in place and returns the plan of it."""
        args = self.args
        center = {"auto": None, "true": True, "false": False}[args.convert_center]
        images = some_images(data, args.calibration_images)
        try:
            _, self.report = affdiv_zoo.convert(
                model, args.convert, center, args.convert_scale, args.convert_attention, images
            )
        except (TypeError, ValueError) as error:
            raise RecipeError(
                f"--convert {args.convert}: {args.model} cannot be converted ({one_line(error)})"
            ) from error
        if not any(norm.layers for norm in self.report.norms):
            raise RecipeError(f"--convert {args.convert}: {args.model} has no norm that can be swapped; leave it off")
        PartialState().print(str(self.report).split("\n---")[0].rsplit("\n", 1)[0])
        return self.report.plan()

    # Distillation -----------------------------------------------------------------------------------------------------

    def make_objective(
        self, accelerator: Accelerator, criterion: nn.Module
    ) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
        """Returns the loss of a batch: the labels' and, weighted, the distance to the teacher."""
        args = self.args
        if not args.distill:
            return lambda images, logits, labels: criterion(logits, labels)
        assert self.teacher is not None and self.model is not None
        teacher = self.teacher.to(accelerator.device).eval().requires_grad_(False)
        if args.distill == "features":
            own, taught = self.watched()
            student_features, teacher_features = InputOf(self.model, own), InputOf(teacher, taught)

        def objective(images: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            with torch.no_grad(), accelerator.autocast():
                teacher_logits = teacher(images)
            loss = criterion(logits, labels)
            if args.distill == "logits":
                distance = logit_distance(logits, teacher_logits, args.distill_temperature)
            else:
                distance = feature_distance(student_features.value, teacher_features.value)
            return loss + args.distill_weight * distance

        return objective

    def watched(self) -> tuple[str, str]:
        """Returns the names of the student's and the teacher's module whose inputs are the features.

        That is the head. If the conversion folded a norm into the head, the student's head sees what the teacher's norm
        sees, and that norm is the module in both.
        """
        own, taught = head_name(self.model), head_name(self.teacher)
        if self.report is not None and self.teacher_name is None:
            for norm in self.report.norms:
                if any(change.name == own for change in norm.layers):
                    return norm.name, norm.name
        return own, taught


class InputOf:
    """Keeps the input of one module from the last forward pass.

    Args:
        model: The model.
        name: The module's name in it.
    """

    def __init__(self, model: nn.Module, name: str):
        self.value: torch.Tensor = torch.empty(0)
        model.get_submodule(name).register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.value = inputs[0]


def feature_distance(own: torch.Tensor, taught: torch.Tensor) -> torch.Tensor:
    """Returns 1 - the cosine of the angle between two models' features, on average over the images.

    It does not depend on their scale, which a conversion may change.

    Args:
        own: The student's features, (B, ...).
        taught: The teacher's, of the same shape.

    Raises:
        RecipeError: They differ in size.
    """
    if own.shape != taught.shape:
        sizes = " and ".join("x".join(map(str, features.shape[1:])) for features in (own, taught))
        raise RecipeError(f"--distill features: student and teacher have {sizes} features; use --distill logits")
    return 1 - nn.functional.cosine_similarity(own.flatten(1).float(), taught.flatten(1).float()).mean()


def logit_distance(own: torch.Tensor, taught: torch.Tensor, temperature: float) -> torch.Tensor:
    """Returns T^2 KL(teacher || student) of the class probabilities at temperature T (Hinton et al. 2015).

    Args:
        own: The student's logits, (B, classes).
        taught: The teacher's likewise.
        temperature: T.
    """
    student, teacher = ((logits.float() / temperature).log_softmax(1) for logits in (own, taught))
    return temperature**2 * nn.functional.kl_div(student, teacher, reduction="batchmean", log_target=True)


def heads(model: nn.Module) -> list[nn.Module]:
    """Returns a timm model's classifier, which may be several layers."""
    found = model.get_classifier()
    return list(found) if isinstance(found, tuple | list) else [found]


def head_name(model: nn.Module) -> str:
    """Returns the name of a model's first classifier layer."""
    return next(name for name, module in model.named_modules() if module is heads(model)[0])


def reset_head(model: nn.Module) -> None:
    """Gives a model's classifier new weights."""
    for head in heads(model):
        for module in head.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def freeze(args: argparse.Namespace, model: nn.Module) -> None:
    """Stops the training of parameters, and keeps modules without any others in evaluation mode.

    BatchNorm then keeps its statistics, and dropout does nothing, in what is frozen.

    Raises:
        RecipeError: A pattern matches nothing, there are not so many stages, or nothing is left to train.
    """
    names = [name for name, _ in model.named_parameters()]
    frozen: set[str] = set()
    for pattern in args.freeze:
        matching = fnmatch.filter(names, pattern)
        if not matching:
            raise RecipeError(f"--freeze {pattern!r}: no parameter has such a name{did_you_mean(pattern, names)}")
        frozen.update(matching)
    if args.freeze_stages is not None:
        stages = group_parameters(model, model.group_matcher(coarse=True))
        if args.freeze_stages >= len(stages):
            raise RecipeError(
                f"--freeze-stages {args.freeze_stages}: {args.model} has {len(stages)} stages, the last of which is "
                "the head; name fewer"
            )
        for stage in sorted(stages)[: args.freeze_stages]:
            frozen.update(stages[stage])
    if frozen >= set(names):
        raise RecipeError(f"--freeze {' '.join(args.freeze)}: leaves nothing to train; freeze fewer parameters")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name not in frozen)
    if frozen:
        for module in frozen_modules(model):
            module.register_forward_pre_hook(stay_in_eval)


def frozen_modules(model: nn.Module) -> Iterator[nn.Module]:
    """Finds the modules that have parameters, all of which are frozen."""
    for module in model.modules():
        parameters = list(module.parameters())
        if parameters and not any(parameter.requires_grad for parameter in parameters):
            yield module


def stay_in_eval(module: nn.Module, _: Any) -> None:
    """Puts a module into evaluation mode before it is used; a hook, for `model.train()` reaches all modules."""
    module.eval()


# --------------------------------------------------------------------------------------------------------------------
# The program
# --------------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace, stop: StopSignal | None = None) -> None:
    """Checks everything that can be checked, then fine-tunes and writes the run folder."""
    if is_finished(args):
        PartialState().print(f"{args.output} is finished already")
        return
    check_output(args)
    check_optimizer_name(args)
    name = complete_name(args.model)
    teacher = None if args.teacher is None else complete_name(args.teacher, "--teacher")
    data = load_images(args, saved_config(name)[0])
    tuning = FineTuning(args, name, teacher)
    results, _ = fit(args, data, args.output, build=tuning.build, make_objective=tuning.make_objective, stop=stop)
    PartialState().print(last_line(args, results))


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe."""
    args = parse_args(argv)
    return run_program(PROGRAM, lambda stop: run(args, stop))


if __name__ == "__main__":
    sys.exit(main())
