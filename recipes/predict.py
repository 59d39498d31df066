"""Predicts the classes of images: a CSV file with class and probability, and a contact sheet.

    python recipes/predict.py photos/ --model runs/resnet20_cifar_patchnorm-digits-seed0
    accelerate launch recipes/predict.py photos/ cat.jpg --model resnet50.a1_in1k --topk 5 --output predicted

The folder of --output gets predictions.csv, one row for each image in the order of their paths, and contact_sheet.png.
Preprocessing and class names are those of the model's configuration.
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from checkpoints import write_text
from data import (
    UNREADABLE,
    FileImages,
    RecipeError,
    TransformDataset,
    check_skipped,
    cpu_workers,
    image_files,
    listed,
    load_image,
    one_line,
)
from evaluate import add_trained_model_options
from options import Flag, Parser, count, not_negative_int, parse
from PIL import Image, ImageDraw, ImageFont
from pretrained import (
    DEFAULT_MODEL,
    check_keywords,
    class_names,
    complete_name,
    input_config,
    load_pretrained,
    outputs,
    try_input,
)
from timm.data import create_transform, get_img_extensions
from train import run_program

PROGRAM = "predict.py"
CSV_FILE = "predictions.csv"
SHEET_FILE = "contact_sheet.png"
MARGIN = 6  # pixels around and between a contact sheet's images
TEXT_SIZE = 11  # pixels

# An image's most probable classes with their probabilities, the most probable first.
Prediction = list[tuple[str, float]]


def build_parser() -> argparse.ArgumentParser:
    """Returns the command line."""
    parser = Parser(
        prog=PROGRAM,
        usage="accelerate launch recipes/predict.py PATH [PATH ...] [--model NAME] [options]",
        description="Predict the classes of images with a trained classifier.",
    )
    parser.add_argument("input", type=Path, nargs="+", metavar="PATH", help="image files, and folders with images")
    add_trained_model_options(parser, DEFAULT_MODEL)
    group = parser.add_argument_group("output")
    group.add_argument("--output", type=Path, default=Path("predictions"), help="folder to write to")
    group.add_argument("--overwrite", action=Flag, default=False, help="replace the files of an earlier call")
    group.add_argument("--topk", type=count, default=1, metavar="K", help="classes for each image")
    group.add_argument(
        "--sheet-images", type=not_negative_int, default=100, metavar="N", help="first images to show; 0: no sheet"
    )
    group.add_argument("--sheet-size", type=count, default=112, metavar="PIXELS", help="side of each image shown")
    group.add_argument(
        "--max-decode-errors",
        type=not_negative_int,
        default=0,
        metavar="N",
        help="leave out so many files that cannot be decoded, each with a warning; 0: stop at the first",
    )
    group.add_argument("--no-progress", action="store_true", help="show no progress bar")
    return parser


def find_images(inputs: Sequence[Path]) -> list[Path]:
    """Lists image files: those that are named and those in and below folders that are named, each once.

    Raises:
        RecipeError: A path is not there, or there is no image.
    """
    paths: list[Path] = []
    for path in inputs:
        if path.is_dir():
            paths += sorted(image_files(path))
        elif path.is_file():
            paths.append(path)
        else:
            raise RecipeError(f"PATH {str(path)!r}: no such file or folder")
    paths = list(dict.fromkeys(paths))
    if not paths:
        raise RecipeError(
            f"PATH {listed(list(map(str, inputs)))}: no images; file names end in {listed(get_img_extensions())}"
        )
    return paths


def check_output(output: Path, overwrite: bool) -> None:
    """Raises a RecipeError if the results cannot be put into a folder."""
    if output.exists() and not output.is_dir():
        raise RecipeError(f"--output {str(output)!r} is a file; name a folder")
    for name in (CSV_FILE, SHEET_FILE):
        if (output / name).exists() and not overwrite:
            raise RecipeError(f"--output {str(output)!r} has a {name}; name another folder or add --overwrite")


def predict(
    args: argparse.Namespace,
    accelerator: Accelerator,
    model: torch.nn.Module,
    config: dict[str, Any],
    paths: list[Path],
) -> tuple[dict[int, Prediction], int]:
    """Predicts the classes of image files.

    Args:
        args: The arguments.
        accelerator: What runs it.
        model: The model.
        config: timm's description of its input.
        paths: The files.

    Returns:
        The predictions by the files' positions, and the number of files that could not be decoded.
    """
    positions = np.arange(len(paths))
    dataset = TransformDataset(
        FileImages(paths),
        positions,
        positions,
        create_transform(**config),
        listed(list(map(str, args.input))),
        max_errors=args.max_decode_errors,
        replace=False,
        mode="L" if config["input_size"][0] == 1 else "RGB",
    )
    names = class_names(model)
    workers = min(cpu_workers() if args.workers is None else args.workers, math.ceil(len(paths) / args.batch_size))
    found: dict[int, Prediction] = {}
    for logits, numbers in outputs(accelerator, model, dataset, args.batch_size, workers, not args.no_progress):
        top = logits.softmax(1).topk(min(args.topk, len(names)), dim=1)
        rows = zip(numbers.tolist(), top.indices.tolist(), top.values.tolist(), strict=True)
        for number, classes, probabilities in rows:
            if number != UNREADABLE:
                found[number] = [(names[index], value) for index, value in zip(classes, probabilities, strict=True)]
    return found, check_skipped(accelerator, dataset, "input")


def printable(path: str | Path) -> str:
    """Returns a path as UTF-8 text: bytes of file names that are none are written as \\udc80 to \\udcff."""
    return str(path).encode("utf-8", "backslashreplace").decode()


def to_csv(paths: Sequence[Path], predictions: dict[int, Prediction]) -> str:
    """Returns a table: path, class, probability, and further pairs with `--topk`."""
    pairs = max((len(prediction) for prediction in predictions.values()), default=1)
    header = ["path", "class", "probability"]
    for rank in range(2, pairs + 1):
        header += [f"class_{rank}", f"probability_{rank}"]
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for number, prediction in sorted(predictions.items()):
        cells = (cell for name, probability in prediction for cell in (name, f"{probability:.6f}"))
        writer.writerow([printable(paths[number]), *cells])
    return text.getvalue()


def contact_sheet(images: Sequence[Image.Image], captions: Sequence[tuple[str, str]], size: int) -> Image.Image:
    """Lays images out in rows, each with two lines below it.

    Args:
        images: The images; they are fitted into squares, small ones without smoothing.
        captions: Two lines for each; what is too long is cut off.
        size: The squares' side in pixels.
    """
    columns = max(1, min(len(images), round(math.sqrt(len(images) * 1.5))))
    rows = math.ceil(len(images) / columns)
    font = ImageFont.load_default(TEXT_SIZE)
    line = TEXT_SIZE + 3
    width, height = size + MARGIN, size + 2 * line + MARGIN
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    draw = ImageDraw.Draw(sheet)
    for number, (image, lines) in enumerate(zip(images, captions, strict=True)):
        left, top = MARGIN + number % columns * width, MARGIN + number // columns * height
        factor = size / max(image.size)
        fitted = tuple(max(1, round(side * factor)) for side in image.size)
        # Pixels of small images are shown as they are.
        how = Image.Resampling.NEAREST if factor >= 2 else Image.Resampling.LANCZOS
        thumbnail = image.convert("RGB").resize(fitted, how)
        sheet.paste(thumbnail, (left + (size - fitted[0]) // 2, top + (size - fitted[1]) // 2))
        for place, text in enumerate(lines):
            text = cut = " ".join(printable(text).split())  # of one line
            while cut and draw.textlength(cut if cut == text else f"{cut}...", font=font) > size:
                cut = cut[:-1]
            draw.text((left, top + size + place * line), cut if cut == text else f"{cut}...", "black", font)
    return sheet


def write_results(args: argparse.Namespace, paths: list[Path], predictions: dict[int, Prediction]) -> None:
    """Writes the CSV file and the contact sheet, each under a temporary name first."""
    try:
        args.output.mkdir(parents=True, exist_ok=True)
        write_text(args.output / CSV_FILE, to_csv(paths, predictions))
        shown = sorted(predictions)[: args.sheet_images]
        if not shown:
            return
        files = FileImages(paths)
        images = [load_image(files, number, str(paths[number])) for number in shown]
        captions = [
            (f"{predictions[number][0][0]} {predictions[number][0][1]:.0%}", paths[number].name) for number in shown
        ]
        temporary = args.output / f".{SHEET_FILE}.part"
        try:
            contact_sheet(images, captions, args.sheet_size).save(temporary, "PNG")
            temporary.replace(args.output / SHEET_FILE)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise RecipeError(f"--output {str(args.output)!r} cannot be written ({one_line(error)})") from error


def run(args: argparse.Namespace) -> None:
    """Predicts, writes the files and prints where they are."""
    check_output(args.output, args.overwrite)
    paths = find_images(args.input)
    name = complete_name(args.model)
    check_keywords(args.model_kwargs)
    model = load_pretrained(name, **args.model_kwargs)
    config = input_config(model, args.img_size)
    try_input(model, config, args.model)
    accelerator = Accelerator(mixed_precision=args.mixed_precision)
    predictions, skipped = predict(args, accelerator, model, config, paths)
    if accelerator.is_main_process:
        write_results(args, paths, predictions)
    unreadable = f", {skipped} unreadable left out" if skipped else ""
    accelerator.print(f"{len(predictions)} image{'s' * (len(predictions) != 1)}{unreadable}: written to {args.output}")
    accelerator.end_training()


def main(argv: list[str] | None = None) -> int:
    """Runs the recipe."""
    args = parse(argv, build_parser())
    return run_program(PROGRAM, lambda stop: run(args))


if __name__ == "__main__":
    sys.exit(main())
