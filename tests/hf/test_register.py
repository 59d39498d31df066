"""Registration with transformers, in new processes: what is imported decides."""

import os
import subprocess
import sys

import pytest
import timm

from affdiv_zoo.hf import save_pretrained


def python(code: str, tmp_path, *args: str) -> str:
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-W", "error::UserWarning:affdiv_zoo", "-c", code, *args],
        capture_output=True,
        text=True,
        env=environment,
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert run.returncode == 0, run.stderr
    assert "could not register" not in run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model"
    save_pretrained(timm.create_model("mlp_cifar_affine", width=8, depth=1), path)
    return path


AUTO = """
import sys
config, model = AutoConfig.from_pretrained(sys.argv[1]), AutoModel.from_pretrained(sys.argv[1])
classifier = AutoModelForImageClassification.from_pretrained(sys.argv[1])
processor = AutoImageProcessor.from_pretrained(sys.argv[1])
backbone = AutoBackbone.from_config(config)
print(*(type(x).__name__ for x in (config, model, classifier, backbone, processor)))
"""

NAMES = "AutoBackbone, AutoConfig, AutoImageProcessor, AutoModel, AutoModelForImageClassification"


@pytest.mark.parametrize(
    "imports",
    (
        # Modules that import the Auto classes in the middle of their own import, and one of ours first.
        pytest.param(
            f"import affdiv_zoo.hf.configuration\nimport transformers.trainer\nfrom transformers import {NAMES}",
            id="plugin first, nested",
        ),
        pytest.param(
            f"import transformers.models.auto.configuration_auto\nimport affdiv_zoo\nfrom transformers import {NAMES}",
            id="transformers first, half",
        ),
        pytest.param(f"import affdiv_zoo\nfrom transformers import {NAMES}", id="plugin first", marks=pytest.mark.slow),
        pytest.param(
            f"from transformers import {NAMES}\nimport affdiv_zoo", id="transformers first", marks=pytest.mark.slow
        ),
    ),
)
def test_every_auto_class_finds_ours_whatever_is_imported_first(imports, folder, tmp_path):
    out = python(imports + AUTO, tmp_path, str(folder))
    ours = "AffDivConfig AffDivModel AffDivForImageClassification AffDivBackbone"
    assert out.split("\n")[-2] == f"{ours} TimmWrapperImageProcessor"


def test_writing_folders_and_importing_the_plugin_need_no_transformers(tmp_path):
    code = """
import sys
sys.modules["transformers"] = sys.modules["peft"] = None  # any import of them fails
import timm, affdiv_zoo
from affdiv_zoo.hf import save_pretrained
save_pretrained(timm.create_model("mlp_cifar_affine", width=8, depth=1), "model")
assert timm.create_model("local-dir:model", pretrained=True).layers[0].fc.out_features == 8
"""
    python(code, tmp_path)


def test_without_the_plugin_remote_code_says_what_to_install(folder, tmp_path):
    code = """
import sys
sys.modules["affdiv_zoo"] = None
from transformers import AutoModelForImageClassification
try:
    AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
except ImportError as error:
    print(error)
try:
    AutoModelForImageClassification.from_pretrained(sys.argv[1])
except ValueError as error:
    print(error)
"""
    out = python(code, tmp_path, str(folder))
    assert "This model needs the affdiv-zoo package: run `pip install -U affdiv-zoo`" in out
    assert "trust_remote_code=True" in out


@pytest.mark.slow
def test_with_the_plugin_installed_remote_code_leads_to_it(folder, tmp_path):
    code = """
import sys
from transformers import AutoModelForImageClassification
assert "affdiv_zoo" not in sys.modules
model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__)
model.save_pretrained("again")
import os
print(*sorted(os.listdir("again")))
"""
    out = python(code, tmp_path, str(folder)).split("\n")
    assert out[0] == "affdiv_zoo.hf.modeling"
    assert out[1] == "config.json model.safetensors modeling_affdiv.py"  # our code is not copied beside it
