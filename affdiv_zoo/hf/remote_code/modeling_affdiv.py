"""The model's code is in the affdiv-zoo package (``pip install affdiv-zoo``); this file only leads there.

With ``import affdiv_zoo`` beforehand, transformers finds the package's classes by itself: ``trust_remote_code`` is not
needed, and this file is not read.
"""

try:
    from affdiv_zoo.hf import AffDivBackbone, AffDivConfig, AffDivForImageClassification, AffDivModel
except ImportError as error:
    raise ImportError(
        f"This model needs the affdiv-zoo package: run `pip install -U affdiv-zoo`. (Its import failed: {error})"
    ) from error

__all__ = ["AffDivBackbone", "AffDivConfig", "AffDivForImageClassification", "AffDivModel"]
