"""The Affine Divergence paper (George Bird, arXiv 2512.22247) for timm, transformers and accelerate.

Importing this package registers its models with timm: ``timm.create_model("resnet18_patchnorm")``.
"""

from affdiv_zoo.convert import convert
from affdiv_zoo.diagnostics import diagnose
from affdiv_zoo.models import list_models

__version__ = "0.1.0"

__all__ = ["__version__", "convert", "diagnose", "list_models"]
