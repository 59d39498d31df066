"""The Affine Divergence paper (George Bird, arXiv 2512.22247) for timm, transformers and accelerate.

Importing this package registers its models with timm: ``timm.create_model("resnet18_patchnorm")``.
"""

from typing import Any

from affdiv_zoo.convert import convert
from affdiv_zoo.diagnostics import diagnose
from affdiv_zoo.hf._register import register as _register
from affdiv_zoo.models import list_models

__version__ = "0.1.0"

__all__ = ["__version__", "convert", "diagnose", "list_models", "push_to_hub"]


def __getattr__(name: str) -> Any:
    if name == "push_to_hub":  # its import takes a while, and few processes publish
        from affdiv_zoo.hub import push_to_hub

        return push_to_hub
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_register()  # with transformers and peft, when they are or get imported
