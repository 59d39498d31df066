"""Models of three libraries with random weights, and the table of what a conversion makes of them.

``python tests/convert/architectures.py [name ...]`` prints the table.
"""

import copy
import re
import sys
from collections.abc import Callable
from typing import Any

import timm
import torch
import torch.nn as nn

import affdiv_zoo
from affdiv_zoo.convert import default_example

ViT = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
)
LM = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64, vocab_size=64)
CausalLM = dict(LM, num_key_value_heads=2, tie_word_embeddings=False)

# name: (norms, exact, approximate, left) under correction="norm". Known from the architectures: read next to each name.
TIMM = {
    "test_resnet": (15, 0, 15, 0),
    "test_efficientnet": (13, 0, 13, 0),
    "test_convnext": (14, 10, 0, 4),  # as convnext_tiny
    "test_vit": (13, 13, 0, 0),
    "resnet18": (20, 0, 20, 0),
    "resnet50": (53, 0, 53, 0),
    "resnext50_32x4d": (53, 0, 53, 0),
    "wide_resnet50_2": (53, 0, 53, 0),
    "seresnet50": (53, 0, 53, 0),
    "regnety_004": (53, 0, 53, 0),
    "mobilenetv2_100": (52, 0, 52, 0),
    "efficientnet_b0": (49, 0, 49, 0),
    "convnext_tiny": (23, 19, 0, 4),  # left: the stem's (a residual), three before 2x2 convolutions
    "vit_tiny_patch16_224": (25, 25, 0, 0),
    "vit_tiny_patch16_224/norm_layer=rmsnorm": (25, 25, 0, 0),
    "vit_small_patch16_224": (25, 25, 0, 0),
    "deit3_small_patch16_224": (25, 25, 0, 0),
    "eva02_tiny_patch14_224": (25, 24, 0, 1),  # left: the model has no head, the norm is its output
    "eva02_tiny_patch14_224/norm_layer=rmsnorm": (25, 24, 0, 1),
    "swin_tiny_patch4_window7_224": (29, 27, 0, 2),  # left: the embedding's and the one before the mean
    "mixer_s32_224": (17, 8, 0, 9),  # left: those that mix tokens and the one before the mean
    "gmlp_s16_224": (61, 30, 0, 31),  # left: the gates', which mix tokens, and the one before the mean
    "resmlp_12_224": (0, 0, 0, 0),
    "resnetv2_50": (49, 0, 32, 17),  # left: one of three in each of 16 blocks follows the residual sum; and the last
}
TORCHVISION = {
    "resnet18": (20, 0, 20, 0),
    "vit_b_16": (25, 13, 0, 12),  # left: those that feed nn.MultiheadAttention
    "swin_t": (29, 15, 0, 14),  # left: those of attention, which uses its qkv layer's weight itself
}
TRANSFORMERS = {
    "ViTForImageClassification": (ViT, (5, 5, 0, 0)),
    "DeiTForImageClassification": (ViT, (5, 5, 0, 0)),
    "Dinov2ForImageClassification": (ViT | {"mlp_ratio": 2}, (5, 4, 0, 1)),  # left: a mean over tokens follows
    "SwinForImageClassification": (
        dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4),
        (11, 9, 0, 2),  # as in timm
    ),
    "BertForSequenceClassification": (LM, (5, 1, 0, 4)),  # post-norm; only the last feeds the pooler alone
    "LlamaForCausalLM": (CausalLM, (5, 5, 0, 0)),
    "Qwen2ForCausalLM": (CausalLM, (5, 5, 0, 0)),
    "Qwen3ForCausalLM": (CausalLM | {"head_dim": 8}, (9, 5, 0, 4)),  # left: the norms of q and k
    "GemmaForCausalLM": (CausalLM | {"head_dim": 8}, (5, 5, 0, 0)),
    "GPT2LMHeadModel": (
        dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=0, eos_token_id=0),
        (5, 0, 0, 5),
    ),
    "T5EncoderModel": (dict(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64), (5, 4, 0, 1)),
}
EXPECTED = {
    **{f"timm/{name}": counts for name, counts in TIMM.items()},
    **{f"torchvision/{name}": counts for name, counts in TORCHVISION.items()},
    **{f"transformers/{name}": counts for name, (_, counts) in TRANSFORMERS.items()},
}


def build(name: str) -> tuple[nn.Module, Any]:
    """A model in evaluation mode with random weights, norms included, and an input (None: the default's)."""
    library, name, *options = name.split("/")
    torch.manual_seed(0)
    example = None
    match library:
        case "timm":
            kwargs = dict(option.split("=") for option in options)
            if "norm_layer" in kwargs:  # some models take only classes
                kwargs["norm_layer"] = timm.layers.get_norm_layer(kwargs["norm_layer"])
            model = timm.create_model(name, **kwargs)
            if name.startswith("test_") and name != "test_vit":
                example = torch.randn(2, 3, 64, 64)
        case "torchvision":
            import torchvision

            model = torchvision.models.get_model(name)
            example = torch.randn(2, 3, 224, 224)
        case "transformers":
            import transformers

            cls = getattr(transformers, name)
            model = cls(cls.config_class(**TRANSFORMERS[name][0]))
    randomise(model)
    return model.eval(), example


def randomise(model: nn.Module) -> None:
    """Biases, norm scales, shifts and statistics that are not 0 and 1, and a norm eps that shows."""
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim == 1 or not p.any():  # a head of zeros would hide everything
                p += 0.2 * torch.randn(p.shape)
        for module in model.modules():
            if getattr(module, "running_var", None) is not None:
                module.running_mean.normal_(std=0.1)
                module.running_var.uniform_(0.5, 2.0)
            if re.search("Norm", type(module).__name__) and hasattr(module, "eps"):
                module.eps = 3e-3


def count_norms(model: nn.Module) -> int:
    """Without the package: by the names of the classes that these models use."""
    return sum(re.search(r"(Batch|Layer|RMS|Rms)Norm", type(m).__name__) is not None for m in model.modules())


def change(before: Any, after: Any) -> float:
    """The largest relative change of the first tensor of two outputs."""
    a, b = (o if isinstance(o, torch.Tensor) else o[0] for o in (before, after))
    return float((a - b).abs().max() / a.abs().max())


def row(name: str, correction: str = "norm", prepare: Callable[[nn.Module], nn.Module] = lambda m: m):
    """The counts, and the change of the output on another input than the conversion's."""
    model, example = build(name)
    model = prepare(model)
    if example is None:
        example = default_example(model)
    elif next(model.parameters()).dtype != example.dtype:
        example = example.to(next(model.parameters()).dtype)
    fresh = example
    if isinstance(example, torch.Tensor):
        fresh = torch.randn_like(example)
    elif "pixel_values" in example:
        fresh = {"pixel_values": torch.randn_like(example["pixel_values"])}
    run = lambda m: m(**fresh) if isinstance(fresh, dict) else m(fresh)  # noqa: E731
    original = copy.deepcopy(model)
    with torch.no_grad():
        before = run(original)
        converted, report = affdiv_zoo.convert(model, correction, example_input=example)
        after = run(converted)
    counts = (len(report.norms), *(report.count(r) for r in ("exact", "approximate", "left")))
    return counts, change(before, after), report, count_norms(original)


def main() -> None:
    print("| model | norms | exact | approximate | left | largest change of the output |\n|---|---|---|---|---|---|")
    for name in sys.argv[1:] or EXPECTED:
        counts, difference, *_ = row(name)
        print(f"| {name} | {' | '.join(map(str, counts))} | {difference:.1e} |", flush=True)


if __name__ == "__main__":
    main()
