"""Our classes in transformers' Auto classes, and our LoRA layers in peft, without importing either.

``transformers.AutoConfig`` and the others have a ``register`` method, but it takes classes, and ours need transformers,
whose import takes seconds. So each registration waits for the module that it concerns: it runs at once if that is
imported already, else when somebody has imported it. The order of ``import affdiv_zoo`` and ``import transformers``
does not matter, and who never imports transformers never pays for it.

A module is often imported by another one of its library (or of this one), which is then half there. A registration
needs whole ones, so it waits until the outermost import is done.
"""

import importlib.abc
import importlib.machinery
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import ModuleType


def _register_config(module: ModuleType) -> None:
    from affdiv_zoo.hf.configuration import AffDivConfig

    module.AutoConfig.register(AffDivConfig.model_type, AffDivConfig, exist_ok=True)


def _register_models(module: ModuleType) -> None:
    from affdiv_zoo.hf import modeling
    from affdiv_zoo.hf.configuration import AffDivConfig
    from affdiv_zoo.hf.folder import AUTO_MAP

    for auto, name in AUTO_MAP.items():
        if auto != "AutoConfig":
            getattr(module, auto).register(AffDivConfig, getattr(modeling, name), exist_ok=True)


def _register_image_processor(module: ModuleType) -> None:
    from transformers.models.timm_wrapper.image_processing_timm_wrapper import TimmWrapperImageProcessor

    from affdiv_zoo.hf.configuration import AffDivConfig

    module.AutoImageProcessor.register(
        AffDivConfig, image_processor_classes={"pil": TimmWrapperImageProcessor}, exist_ok=True
    )


def _register_lora(module: ModuleType) -> None:
    from affdiv_zoo.hf.lora import install

    install(module)


_PENDING: dict[str, Callable[[ModuleType], None]] = {
    "transformers.models.auto.configuration_auto": _register_config,
    "transformers.models.auto.modeling_auto": _register_models,
    "transformers.models.auto.image_processing_auto": _register_image_processor,
    "peft.tuners.lora.model": _register_lora,
}

_LIBRARIES = {"affdiv_zoo", *(name.split(".")[0] for name in _PENDING)}


def _run_pending() -> None:
    for name in list(_PENDING):
        if name not in sys.modules or (function := _PENDING.pop(name, None)) is None:
            continue
        try:
            function(sys.modules[name])
        except Exception as error:  # a version that we do not know must not break their import
            warnings.warn(f"affdiv_zoo could not register itself in {name}: {error!r}", stacklevel=2)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the modules of these libraries as Python does, and notices when the outermost import is done."""

    def __init__(self) -> None:
        self._imports = threading.local()

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not _PENDING or fullname.split(".")[0] not in _LIBRARIES:
            return None
        specs = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, specs), None)
        if spec is None or not isinstance(spec.loader, importlib.abc.FileLoader):  # others are shared by modules
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            depth = getattr(self._imports, "depth", 0)
            self._imports.depth = depth + 1
            try:
                execute(module)
            finally:
                self._imports.depth = depth
            if depth == 0:
                _run_pending()

        spec.loader.exec_module = exec_module
        return spec


def register() -> None:
    """Called by ``import affdiv_zoo``."""
    if not any(type(finder).__module__ == __name__ for finder in sys.meta_path):
        _run_pending()
        sys.meta_path.insert(0, _Finder())
