"""The values that the string arguments take."""

from typing import Literal

Correction = Literal["none", "affine", "norm", "gradient"]
"""How a map is corrected: the table in :mod:`affdiv_zoo.functional`."""

Scale = Literal["l2", "rms"]
"""``"l2"``: the paper's form; ``"rms"``: times the square root of the augmented vector's length."""

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
"""torch's padding modes of convolutions."""
