"""The values that the string arguments take."""

from typing import Literal

Correction = Literal["none", "affine", "norm", "gradient"]
"""How a map is corrected: the table in :mod:`affdiv_zoo.functional`."""

Scale = Literal["l2", "rms"]
"""``"l2"``: the paper's form; ``"rms"``: times the square root of the augmented vector's length."""

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
"""torch's padding modes of convolutions."""

Activation = Literal["none", "relu"]
"""What a convolution applies to its output."""

AttentionCorrection = Literal["none", "projection", "separable", "logit", "exact"]
"""How attention logits are corrected: the table in :func:`affdiv_zoo.functional.corrected_attention_logits`."""

RadialKind = Literal["l2", "soft"]
"""x / ||x||, or x / sqrt(||x||^2 + 1)."""
