"""Conversion of existing models: norm + affine pairs become corrected layers.

``affdiv_zoo.convert(model)`` is the function; this package holds it, so import from it with
``from affdiv_zoo.convert import ...``.
"""

from affdiv_zoo.convert._convert import apply_plan, convert, default_example
from affdiv_zoo.convert._report import AttentionChange, ConversionReport, LayerChange, NormReport
from affdiv_zoo.convert.saved import save_converted

__all__ = [
    "AttentionChange",
    "ConversionReport",
    "LayerChange",
    "NormReport",
    "apply_plan",
    "convert",
    "default_example",
    "save_converted",
]
