"""The experiments as sweeps: writes sweeps/*.yaml, which recipes/sweep.py runs.

    python recipes/reproduce/grids.py

Every experiment is there twice: sized for one CPU core and an evening (`fc_tanh.yaml`), and as a GPU would do it
(`fc_tanh_full.yaml`). The lists below are the design; a longer one only adds runs, since what the ledger has is not run
again.
"""

import itertools
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent / "sweeps"

# The nets of the fully connected experiments: name -> arguments. norm="l2" is also the paper's norm-like correction,
# and norm="rms", gains aside, its scale="rms" form: these are the same maps (tests/models/test_mlp.py).
FC_METHODS: dict[str, dict[str, Any]] = {
    "none": {"model": "mlp_cifar", "model_kwargs": {"norm": "none"}},
    "batch": {"model": "mlp_cifar", "model_kwargs": {"norm": "batch"}},
    "layer": {"model": "mlp_cifar", "model_kwargs": {"norm": "layer"}},
    "rms": {"model": "mlp_cifar", "model_kwargs": {"norm": "rms"}},
    "l2": {"model": "mlp_cifar", "model_kwargs": {"norm": "l2"}},
    "affine": {"model": "mlp_cifar_affine", "model_kwargs": {}},
    "affine_l2": {"model": "mlp_cifar_affine", "model_kwargs": {"scale": "l2"}},
    "affine_centred": {"model": "mlp_cifar_affine", "model_kwargs": {"center": True}},
    "gradient": {"model": "mlp_cifar_affine", "model_kwargs": {"correction": "gradient"}},
}

# Four rates each, a factor of about three apart. The plain map moves by the rate times ||x||^2 + 1, about the number of
# its inputs; with a factor of 1 in place of that one (gradient-only, and the paper's scale="l2") the four stand higher,
# the more so the wider the net. The places come from a pilot of one seed on validation images: ledgers/pilot.jsonl.
RATES = [0.01, 0.03, 0.1, 0.3]
HIGH_RATES = {1: [0.1, 0.3, 1.0, 3.0], 16: [0.3, 1.0, 3.0, 10.0], 64: [1.0, 3.0, 10.0, 30.0]}
HIGH = ("affine_l2", "gradient")


def rates(method: str, width: int) -> list[float]:
    """Returns a method's learning rates for a net of a width."""
    return HIGH_RATES[max(w for w in HIGH_RATES if w <= width)] if method in HIGH else RATES


# (width, depth), the most telling first: an unfinished sweep has whole cells.
SHAPES = {
    "tanh": [(256, 6), (1, 6), (256, 12), (256, 2), (16, 6), (4, 6), (64, 6)],
    "leaky_relu": [(256, 6), (1, 6), (256, 12)],
}
FULL_SHAPES = [(width, depth) for width in (1, 2, 4, 16, 64, 256, 1024) for depth in (1, 2, 4, 6, 12, 24)]

BATCH_SIZES = [8, 32, 128, 512]
FULL_BATCH_SIZES = [2, 8, 32, 128, 512, 2048]
BATCH_METHODS = ["none", "batch", "layer", "affine", "affine_centred", "gradient"]

# Convolutional nets: norms behind plain convolutions, and PatchNorm. "layer" is over an image, "rms" over a pixel.
CNN_METHODS: dict[str, dict[str, Any]] = {
    **{
        norm: {"model": "cnn_cifar", "model_kwargs": {"norm": norm}}
        for norm in ("none", "batch", "layer", "rms", "group")
    },
    "pn_affine": {"model": "cnn_cifar_patchnorm", "model_kwargs": {"center": False}},
    "pn_norm": {"model": "cnn_cifar_patchnorm", "model_kwargs": {"center": False, "correction": "norm"}},
    "pn_centred": {"model": "cnn_cifar_patchnorm", "model_kwargs": {"center": True}},
    "pn_affine_l2": {"model": "cnn_cifar_patchnorm", "model_kwargs": {"center": False, "scale": "l2"}},
    "pn_gradient": {"model": "cnn_cifar_patchnorm", "model_kwargs": {"center": False, "correction": "gradient"}},
}
CNN_RATES = {"pn_affine_l2": [1.0, 3.0, 10.0, 30.0], "pn_gradient": [0.3, 1.0, 3.0, 10.0]}


def common(**changes: Any) -> dict[str, Any]:
    """Returns what all runs share."""
    small = dict(train_limit=10000, epochs=4, batch_size=128)
    rest = dict(opt="momentum", momentum=0.9, weight_decay=0)
    merged = {"dataset": "uoft-cs/cifar10", "augment": "none", **small, **rest, **changes}
    return {name: value for name, value in merged.items() if value is not None}


def sweep(arguments: dict[str, Any], methods: dict[str, Any], seeds: int, tune_seeds: int = 1) -> dict[str, Any]:
    """Returns a sweep; all methods have the same number of rates, seeds and images."""
    tune = {"grid": {"lr": RATES}, "seeds": [100 + i for i in range(tune_seeds)], "val_fraction": 0.05}
    return {
        "dataset_name": "cifar10",
        "arguments": arguments,
        "methods": methods,
        "tune": tune,
        "seeds": list(range(seeds)),
    }


def fully_connected(act: str, shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Returns the methods of all shapes; a baseline is the plain net of the same shape."""
    methods = {}
    for width, depth in shapes:
        for name, arguments in FC_METHODS.items():
            if name == "affine_centred" and width == 1:
                continue  # one number less its mean is nothing: the layer raises an error
            kwargs = {**arguments["model_kwargs"], "width": width, "depth": depth, "act": act}
            own = {"model": arguments["model"], "model_kwargs": kwargs, "baseline": f"w{width}_d{depth}_none"}
            methods[f"w{width}_d{depth}_{name}"] = {**own, "grid": {"lr": [*rates(name, width)]}}
    return methods


def batch_sizes(sizes: list[int]) -> dict[str, Any]:
    """Returns the methods of all batch sizes. The grid of rates moves with the batch, alike for all methods."""
    methods = {}
    for size in sizes:
        for name in BATCH_METHODS:
            arguments = FC_METHODS[name]
            kwargs = {**arguments["model_kwargs"], "width": 64, "depth": 3, "act": "tanh"}
            # A factor of three for every factor of four, up to 128: there the highest rates diverge already.
            shift = {8: 0.1, 32: 0.3, 128: 1.0, 512: 1.0, 2: 0.03, 2048: 1.0}[size]
            shifted = [float(f"{rate * shift:.1g}") for rate in rates(name, 64)]
            own = {"model": arguments["model"], "model_kwargs": kwargs, "batch_size": size, "grid": {"lr": shifted}}
            methods[f"b{size}_{name}"] = {**own, "baseline": f"b{size}_none"}
    return methods


def convolutional(shapes: list[tuple[int, int]]) -> dict[str, Any]:
    """Returns the methods of the convolutional nets of all shapes."""
    methods = {}
    for (width, depth), (name, arguments) in itertools.product(shapes, CNN_METHODS.items()):
        kwargs = {**arguments["model_kwargs"], "width": width, "depth": depth}
        own = {"model": arguments["model"], "model_kwargs": kwargs, "baseline": f"w{width}_d{depth}_none"}
        methods[f"w{width}_d{depth}_{name}"] = {**own, "grid": {"lr": [*CNN_RATES.get(name, RATES)]}}
    return methods


def files() -> dict[str, str]:
    """Returns the sweeps' file names and texts."""
    sweeps, titles = {}, {}
    everything = {"train_limit": None}  # all images

    def add(name: str, title: str, small: dict[str, Any], full: dict[str, Any]) -> None:
        images = small["arguments"]["train_limit"]
        titles[name], sweeps[name] = f"{title}: {images:,} images, one CPU core.", small
        titles[f"{name}_full"], sweeps[f"{name}_full"] = f"{title}: all images, for a GPU.", full

    for act, shapes in SHAPES.items():
        add(
            f"fc_{act}",
            f"Fully connected nets with {act}, norms and corrections over width and depth",
            sweep(common(), fully_connected(act, shapes), seeds=3),
            sweep(common(epochs=20, **everything), fully_connected(act, FULL_SHAPES), seeds=10, tune_seeds=3),
        )
    add(
        "batch_size",
        "Accuracy against batch size at tuned rates, tanh nets of 3 layers of 64",
        sweep(common(epochs=3), batch_sizes(BATCH_SIZES), seeds=4),
        sweep(common(epochs=20, **everything), batch_sizes(FULL_BATCH_SIZES), seeds=10, tune_seeds=3),
    )
    add(
        "cnn",
        "Plain convolutional nets, norms against PatchNorm",
        sweep(common(train_limit=5000, batch_size=32), convolutional([(16, 4)]), seeds=3),
        sweep(
            common(epochs=30, batch_size=64, **everything),
            convolutional([(32, 4), (64, 8), (128, 12)]),
            seeds=10,
            tune_seeds=3,
        ),
    )
    return {f"{name}.yaml": text(titles[name], spec) for name, spec in sweeps.items()}


def text(title: str, spec: dict[str, Any]) -> str:
    """Returns a sweep's YAML text."""
    runs = len(spec["methods"]) * (len(RATES) * len(spec["tune"]["seeds"]) + len(spec["seeds"]))
    body = yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, width=200)
    return f"# {title} {runs} runs.\n# Written by grids.py.\n{body}"


def main() -> None:
    """Writes the files."""
    FOLDER.mkdir(exist_ok=True)
    for name, content in files().items():
        (FOLDER / name).write_text(content, encoding="utf-8")


if __name__ == "__main__":
    main()
