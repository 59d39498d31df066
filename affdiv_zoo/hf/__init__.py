"""The timm models in transformers, and folders that both libraries load.

What writes folders needs no transformers; the four classes are imported with it when they are first asked for.
"""

import importlib
from typing import TYPE_CHECKING, Any

from affdiv_zoo.hf.folder import (
    REMOTE_CODE_FILE,
    ChangedModelError,
    complete_config,
    complete_folder,
    remote_code,
    save_pretrained,
)

if TYPE_CHECKING:
    from affdiv_zoo.hf.configuration import AffDivConfig
    from affdiv_zoo.hf.lora import register_lora
    from affdiv_zoo.hf.modeling import AffDivBackbone, AffDivForImageClassification, AffDivModel

__all__ = [
    "REMOTE_CODE_FILE",
    "AffDivBackbone",
    "AffDivConfig",
    "AffDivForImageClassification",
    "AffDivModel",
    "ChangedModelError",
    "complete_config",
    "complete_folder",
    "register_lora",
    "remote_code",
    "save_pretrained",
]

_LAZY = {
    "AffDivConfig": "configuration",
    "AffDivBackbone": "modeling",
    "AffDivForImageClassification": "modeling",
    "AffDivModel": "modeling",
    "register_lora": "lora",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_LAZY[name]}"), name)


def __dir__() -> list[str]:
    return __all__
