"""The package as a whole: what an import costs, where the version stands."""

import importlib.metadata
import subprocess
import sys

import affdiv_zoo


def test_the_import_is_light_and_registers():
    code = (
        "import sys, timm; before = set(sys.modules); import affdiv_zoo; "
        "heavy = {'transformers', 'datasets', 'sklearn', 'matplotlib', 'accelerate', 'pandas', 'typer'};"
        "print(sorted(heavy & (set(sys.modules) - before)), timm.is_model('resnet18_patchnorm'))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[] True"


def test_the_version_stands_in_one_place():
    assert importlib.metadata.version("affdiv-zoo") == affdiv_zoo.__version__
