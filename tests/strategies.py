"""Random configurations of the maps for hypothesis, and float64 references that share no code with the package."""

import itertools

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

CORRECTIONS = ("none", "affine", "norm", "gradient")
SCALES = ("l2", "rms")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")

options = st.fixed_dictionaries(
    {
        "correction": st.sampled_from(CORRECTIONS),
        "center": st.booleans(),
        "scale": st.sampled_from(SCALES),
        "eps": st.sampled_from((1e-12, 1e-6, 1e-2)),
    }
)


@st.composite
def conv_cases(draw) -> dict:
    """A convolution's arguments in 1, 2 or 3 dimensions, such that it has at least one output."""
    dims = draw(st.integers(1, 3))
    per_dim = lambda low, high: [draw(st.integers(low, high)) for _ in range(dims)]  # noqa: E731
    kernel, dilation, groups = per_dim(1, 3), per_dim(1, 2), draw(st.integers(1, 3))
    size = [d * (k - 1) + 1 + draw(st.integers(0, 3)) for k, d in zip(kernel, dilation, strict=True)]
    mode = draw(st.sampled_from(PADDING_MODES))
    padding = draw(
        st.one_of(st.sampled_from(["same", "valid"]), st.just([draw(st.integers(0, 2)) for _ in range(dims)]))
    )
    if mode != "zeros" and not isinstance(
        padding, str
    ):  # torch: less than the input for reflect, at most it for circular
        padding = [min(p, s - 1) for p, s in zip(padding, size, strict=True)]
    if mode != "zeros" and padding == "same":
        size = [max(s, d * (k - 1) + 1) for s, k, d in zip(size, kernel, dilation, strict=True)]
    stride = [1] * dims if padding == "same" else per_dim(1, 3)
    return {
        "batch": draw(st.integers(1, 2)),
        "channels": groups * draw(st.integers(1, 3)),
        "out_channels": groups * draw(st.integers(1, 3)),
        "size": size,
        "kernel": kernel,
        "args": dict(stride=stride, padding=padding, dilation=dilation, groups=groups, padding_mode=mode),
        "bias": draw(st.booleans()),
        "offset": draw(st.sampled_from((0.0, 3.0))),
        "seed": draw(st.integers(0, 2**16)),
    }


def loop_patches(x, kernel, stride, padding, dilation, groups, padding_mode):
    """``(batch, groups, entries, *output)``, every patch sliced out by a Python loop."""
    dims = len(kernel)
    if padding == "same":
        total = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        pairs = [(t // 2, t - t // 2) for t in total]
    else:
        pairs = [(0, 0)] * dims if padding == "valid" else [(p, p) for p in padding]
    flat = [p for pair in pairs[::-1] for p in pair]
    x = F.pad(x, flat, mode="constant" if padding_mode == "zeros" else padding_mode)
    out = [(x.shape[2 + i] - dilation[i] * (kernel[i] - 1) - 1) // stride[i] + 1 for i in range(dims)]
    columns = []
    for position in itertools.product(*map(range, out)):
        window = x
        for i, p in enumerate(position):
            start = p * stride[i]
            window = window.narrow(2 + i, start, dilation[i] * (kernel[i] - 1) + 1)
            window = window.index_select(2 + i, torch.arange(0, window.shape[2 + i], dilation[i]))
        columns.append(window.reshape(x.shape[0], groups, -1))
    return torch.stack(columns, -1).unflatten(-1, out)


def map_of_vectors(x, weight, bias, correction, center, scale, eps):
    """The corrected map of each row of ``x``, from the paper's formulas: ``(rows, n)`` to ``(rows, out)``."""
    rows = []
    for v in x:
        v = v - v.sum() / len(v) if center else v
        wx = torch.stack([(w * v).sum() for w in weight])
        b = torch.zeros_like(wx) if bias is None else bias
        sqnorm = (v * v).sum()
        one = eps if bias is None else 1.0
        s = {"l2": 1.0, "rms": (len(v) + (bias is not None and correction == "affine")) ** 0.5}[scale]
        match correction:
            case "affine":
                rows.append(s * (wx + b) / (sqnorm + one).sqrt())
            case "norm":
                rows.append(s * wx / (sqnorm + eps).sqrt() + b)
            case _:
                rows.append(wx + b)
    return torch.stack(rows)
