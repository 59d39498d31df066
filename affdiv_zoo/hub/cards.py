"""Model cards, generated from the records of the runs that made the weights; nothing in them is typed by hand."""

import json
import statistics
from pathlib import Path
from typing import Any

import timm
from huggingface_hub import EvalResult, ModelCardData

from affdiv_zoo.layers import CorrectedAttention, CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d

__all__ = ["record_of", "render_card"]

PAPER = "https://arxiv.org/abs/2512.22247"
CITATION = """@article{bird2025affine,
  title   = {The Affine Divergence},
  author  = {Bird, George},
  journal = {arXiv preprint arXiv:2512.22247},
  year    = {2025}
}"""
# What datasets are called by people.
DATASETS = {
    "uoft-cs/cifar10": "CIFAR-10",
    "digits": "scikit-learn's digits",
}
_MAPS = (CorrectedLinear, PatchNormConv1d, PatchNormConv2d, PatchNormConv3d)


def record_of(folder: str | Path) -> dict[str, Any]:
    """Collects what a saved model's folder tells of itself.

    Args:
        folder: Has timm's ``config.json``; and ``results.json`` if ``recipes/train.py`` or ``finetune.py`` made it.

    Returns:
        A record as :func:`affdiv_zoo.weights.released` describes it, without what the folder does not tell. ``command``
        is made of the arguments; a data set that is a local path is named by its last part.

    Raises:
        FileNotFoundError: There is no ``config.json``.
        ValueError: ``config.json`` has no architecture.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "architecture" not in config:
        raise ValueError(f"folder={str(folder)!r}: its config.json names no architecture; save the model with timm")
    pretrained_cfg = dict(config.get("pretrained_cfg") or {})
    if config.get("label_names"):
        pretrained_cfg["label_names"] = config["label_names"]
    pretrained_cfg.setdefault("num_classes", config.get("num_classes"))
    record: dict[str, Any] = {
        "architecture": config["architecture"],
        "tag": pretrained_cfg.get("tag"),
        "model_args": {k: v for k, v in (config.get("model_args") or {}).items() if k != "num_classes"},
        "pretrained_cfg": pretrained_cfg,
        "license": pretrained_cfg.get("license"),
    }
    results_file = folder / "results.json"
    if results_file.is_file():
        results = json.loads(results_file.read_text(encoding="utf-8"))
        known = ("test_top1", "test_loss", "val_top1", "val_loss", "test_images", "train_images", "epochs", "updates")
        arguments = {key: _portable(value) for key, value in (results.get("arguments") or {}).items()}
        name = _portable(str(results.get("dataset") or "")) or None
        record |= {
            "dataset": name,
            "seed": results.get("seed"),
            "parameters": results.get("parameters"),
            "metrics": {key: results[key] for key in known if results.get(key) is not None},
            "arguments": arguments,
            "versions": results.get("versions"),
        }
    return record


def _portable(value: Any) -> Any:
    """A path without its folders, since a place on somebody's machine tells nobody anything; all else as it is."""
    if (
        isinstance(value, str)
        and value
        and (Path(value).is_absolute() or value.startswith(".") or Path(value).exists())
    ):
        return Path(value).resolve().name
    return value


def render_card(record: dict[str, Any], repo_id: str | None = None) -> str:
    """Renders a model card: Markdown with the Hub's metadata before it.

    Args:
        record: From :func:`record_of` or :func:`affdiv_zoo.weights.released`.
        repo_id: Where the model will be on the Hub, for the snippets; without it they name the bundled weights or a
            local folder.

    Returns:
        The page, which ends with a newline.
    """
    name = record["architecture"] + (f".{record['tag']}" if record.get("tag") else "")
    metadata = _metadata(record, name).to_yaml()
    parts = [f"---\n{metadata}\n---", f"# {name}", _summary(record)]
    parts += [_results(record), _usage(record, name, repo_id), _training(record), _limits(record)]
    parts.append(f"## Cite\n\nThe layers are those of [The Affine Divergence]({PAPER}):\n\n```bibtex\n{CITATION}\n```")
    return "\n\n".join(part for part in parts if part) + "\n"


def _metadata(record: dict[str, Any], name: str) -> ModelCardData:
    dataset = record.get("dataset")
    hub_id = dataset if dataset and "/" in dataset else None  # else a local one's name
    accuracy = record.get("metrics", {}).get("test_top1")
    results = None
    if accuracy is not None:
        results = [
            EvalResult(
                task_type="image-classification",
                task_name="Image classification",
                dataset_type=hub_id or dataset or "unknown",
                dataset_name=_dataset(record),
                dataset_split="test",
                metric_type="accuracy",
                metric_value=round(100 * accuracy, 2),
                metric_name="top-1 accuracy in per cent",
            )
        ]
    tags = ["image-classification", "timm", "affdiv_zoo", "affine-divergence"]
    if "patchnorm" in record["architecture"]:
        tags.append("patchnorm")
    return ModelCardData(
        license=record.get("license") or "apache-2.0",
        library_name="timm",
        pipeline_tag="image-classification",
        tags=tags,
        datasets=[hub_id] if hub_id else None,
        metrics=["accuracy"] if accuracy is not None else None,
        model_name=name,
        eval_results=results,
    )


def _dataset(record: dict[str, Any]) -> str:
    return DATASETS.get(record.get("dataset"), record.get("dataset") or "a data set that is not recorded")


def _summary(record: dict[str, Any]) -> str:
    doc = (timm.model_entrypoint(record["architecture"]).__doc__ or "").strip().split("\n")[0]
    cfg = record["pretrained_cfg"]
    size = " x ".join(map(str, cfg.get("input_size", ())))
    count = record.get("parameters")
    facts = [f"trained on {_dataset(record)}", f"{cfg.get('num_classes')} classes", f"input {size}"]
    facts += [f"{count / 1e6:.2f} M parameters"] if count else []
    text = f"{doc} {'; '.join(facts)[0].upper() + '; '.join(facts)[1:]}."
    return text + "\n\n" + _map_sentence(record)


def _map_sentence(record: dict[str, Any]) -> str:
    """What the layers compute, read off the model itself."""
    import torch

    with torch.device("meta"):
        model = timm.create_model(record["architecture"], **record.get("model_args", {}))
    layers = [m for m in model.modules() if isinstance(m, _MAPS)]
    if not layers:
        return "A net with the usual norms, as the twin of a corrected one."
    kinds = sorted({(m.correction, m.center, m.scale) for m in layers})
    words = [f"`correction={c!r}, center={center}, scale={s!r}`".replace("'", '"') for c, center, s in kinds]
    text = (
        "Its layers divide their maps by the length of their input (a convolution's by that of each patch), so that a "
        f"gradient step moves their outputs as the gradient asks: {', '.join(words)}."
    )
    attention = sorted({m.attention for m in model.modules() if isinstance(m, CorrectedAttention)})
    if attention:
        text += f" Its attention logits have the correction `{', '.join(attention)}`."
    if any("BatchNorm" in type(m).__name__ for m in model.modules()):
        return text
    return text + " An output does not depend on the rest of its batch."


def _results(record: dict[str, Any]) -> str:
    metrics, runs = record.get("metrics") or {}, record.get("runs") or []
    if "test_top1" not in metrics:
        return ""
    lines = ["## Results", "", f"On the test set of {_dataset(record)}:", "", "| | top-1 accuracy |", "|---|---|"]
    seed = f" (seed {record['seed']})" if record.get("seed") is not None else ""
    lines.append(f"| these weights{seed} | {100 * metrics['test_top1']:.2f} % |")
    if len(runs) > 1:
        values = [100 * run["test_top1"] for run in runs]
        lines.append(
            f"| mean ± standard deviation of {len(runs)} seeds | {statistics.fmean(values):.2f} ± "
            f"{statistics.stdev(values):.2f} % |"
        )
    twin = record.get("twin")
    if twin:
        values = [100 * run["test_top1"] for run in twin["runs"]]
        spread = f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        known = record.get("arguments", {}).get("model_kwargs", {})
        own = [f"`{k}={v!r}`" for k, v in (twin.get("model_args") or {}).items() if known.get(k) != v]
        name = f"`{twin['model']}`" + (f" with {', '.join(own)}" if own else "")
        lines.append(
            f"| {name}, tuned and trained alike, {len(values)} seed{'s' * (len(values) > 1)} | "
            f"{statistics.fmean(values):.2f}{spread} % |"
        )
        if twin.get("difference") is not None:
            difference = f"{100 * twin['difference']:+.2f}"
            if twin["low"] is None:
                lines.append(f"| difference, a single pair: without an interval | {difference} points |")
            else:
                lines.append(
                    f"| difference, paired by seed, with its 95 % interval | {difference} "
                    f"[{100 * twin['low']:+.2f}, {100 * twin['high']:+.2f}] points |"
                )
    if runs:
        lines += ["", "The weights are those of the first seed; no run was chosen by its test accuracy."]
    return "\n".join(lines)


def _usage(record: dict[str, Any], name: str, repo_id: str | None) -> str:
    source = f"hf-hub:{repo_id}" if repo_id else name if record.get("file") else "local-dir:DIR"
    lines = [
        "## Use",
        "",
        "```python",
        "import timm",
        "import affdiv_zoo  # pip install affdiv-zoo",
        "",
        f'model = timm.create_model("{source}", pretrained=True).eval()',
        "transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))",
        "```",
    ]
    if repo_id:
        lines += [
            "",
            "```python",
            "from transformers import pipeline",
            "import affdiv_zoo",
            "",
            f'classify = pipeline("image-classification", model="{repo_id}")',
            "```",
        ]
    labels = record["pretrained_cfg"].get("label_names")
    if labels and len(labels) <= 20:
        lines += ["", f"Classes, in order: {', '.join(map(str, labels))}."]
    return "\n".join(lines)


def _training(record: dict[str, Any]) -> str:
    if not record.get("arguments"):
        return ""
    lines = ["## Training", ""]
    if record.get("command"):
        lines += ["These weights again:", "", "```bash", record["command"], "```", ""]
    lines += ["| argument | value |", "|---|---|"]
    for key, value in sorted(_effective(record["arguments"]).items()):
        lines.append(f"| `{key}` | {value} |")
    if record.get("versions"):
        lines += ["", "Made with " + ", ".join(f"{k} {v}" for k, v in sorted(record["versions"].items())) + "."]
    return "\n".join(lines)


def _effective(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that had an effect on the weights: without what was off, and the settings of what was off."""
    given = {key: value for key, value in arguments.items() if value not in (None, False, {}, [], 0, 0.0)}
    hidden = {
        "output",
        "overwrite",
        "no_progress",
        "model",
        "workers",
        "project",
        "checkpoint_hist",
        "tracker",
        "resume",
    }
    needs = {
        "mixup_": ("mixup", "cutmix", "cutmix_minmax"),
        "model_ema_": ("model_ema",),
        "shuffle_buffer": ("streaming",),
        "clip_mode": ("clip_grad",),
        "bce_": ("bce_loss",),
        "eval_": (),
        "log_": (),
        "check_": (),
    }
    for start, switches in needs.items():
        if not any(switch in given for switch in switches):
            hidden |= {key for key in given if key.startswith(start)}
    return {key: value for key, value in given.items() if key not in hidden}


def _limits(record: dict[str, Any]) -> str:
    size = record["pretrained_cfg"].get("input_size", (3, 32, 32))
    small = f" It sees images of {size[1]} x {size[2]} pixels." if len(size) == 3 else ""
    return (
        "## Intended use and limits\n\n"
        "For research on normalisation and as a start for fine-tuning. It knows the classes of its data set and "
        f"nothing else: every image gets one of them, also a picture of something else.{small} It was not tested for "
        "robustness, bias or safety, and is not meant for decisions about people."
    )
