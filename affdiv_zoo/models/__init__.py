"""timm models with corrected layers. Importing this package registers them with timm."""

import fnmatch

import timm

from affdiv_zoo.models import cnn, mlp, mlp_mixer, resnet, vision_transformer

__all__ = ["list_models"]

_MODULES = (cnn, mlp, mlp_mixer, resnet, vision_transformer)


def list_models(filter: str = "", pretrained: bool = False) -> list[str]:
    """The names of the timm models that this package adds.

    Args:
        filter: A wildcard such as ``"*patchnorm"``; all names if empty.
        pretrained: Only names that have weights, with their tags (``name.tag``).

    Returns:
        The names, sorted.
    """
    names = {name for module in _MODULES for name in module.__all__ if timm.is_model(name)}
    if pretrained:
        names = {name for name in timm.list_models(pretrained=True) if name.split(".")[0] in names}
    return sorted(fnmatch.filter(names, filter or "*"))
