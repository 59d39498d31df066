"""Shared by the tests of the transformers side."""

import pytest

pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
