"""transformers' own common tests of models, pipelines, backbones and configurations, on our classes.

transformers' wheel has no tests: the source distribution of the installed version is fetched from the package index,
once per version, into the temporary directory. It has the common tests, but not the files that some of them import
from; :data:`STUBS` are in their places. ``transformers_suite.py`` names our classes to the mixins. The tests run in a
process of their own. Two of them skip themselves, being written for transformers' layout: mismatched shapes and the
mapping of names are tested in ``tests/hf``.
"""

import collections
import getpass
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
import transformers

OFFLINE = "AFFDIV_ZOO_OFFLINE"

# What the common tests import, and the source distribution does not have.
STUBS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    # Export to other runtimes is not what is tested here (see tests/models and tests/layers for TorchScript and ONNX).
    "exporters/test_export.py": "class ExportTesterMixin: pass\n",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: pass\n",  # image models generate nothing
    "utils/__init__.py": "",
    # Values other than the defaults, which a configuration has to keep.
    "utils/test_configuration_utils.py": """config_common_kwargs = {
    "return_dict": False, "output_hidden_states": True, "output_attentions": True, "dtype": "float16",
    "chunk_size_feed_forward": 5, "architectures": ["AffDivForImageClassification"], "id2label": {0: "label"},
    "label2id": {"label": "0"}, "problem_type": "regression",
}
""",
}

CLASSES = ("AffDivViTTest", "AffDivResNetTest", "AffDivMlpTest", "AffDivViTBackboneTest", "AffDivResNetBackboneTest")

# By default one model through the tests of saving, loading, initialisation and outputs, and a backbone.
SMALL = "AffDivMlpTest or AffDivViTBackboneTest or (AffDivViTTest and (attention_outputs or retain_grad))"

# These must have run and passed in the classes of models, whatever transformers renames or adds.
ALWAYS = (
    "test_config",
    "test_save_load",
    "test_can_init_all_missing_weights",
    "test_init_weights_can_init_buffers",
    "test_load_with_mismatched_shapes",
    "test_hidden_states_output",
    "test_model_outputs_equivalence",
    "test_problem_types",
    "test_training",
    "test_training_gradient_checkpointing",
    "test_can_be_initialized_on_meta",
    "test_pipeline_image_classification",
    "test_pipeline_image_feature_extraction",
)


@pytest.fixture(scope="session")
def transformers_tests() -> Path:
    """A folder with the ``tests`` of the installed transformers' source distribution, and nothing else of it."""
    if os.environ.get(OFFLINE):
        pytest.skip(f"{OFFLINE} is set: transformers' tests are not fetched")
    version = transformers.__version__
    cache = Path(tempfile.gettempdir()) / f"affdiv_zoo-{getpass.getuser()}" / f"transformers-{version}"
    if not (cache / "tests").is_dir():
        cache.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            fetch = ["pip", "download", "--no-deps", "--no-build-isolation", "--no-binary", "transformers"]
            fetch += ["--dest", folder, f"transformers=={version}"]
            result = subprocess.run([sys.executable, "-m", *fetch], capture_output=True, text=True)
            archives = list(Path(folder).glob("transformers-*.tar.gz"))
            if not archives:
                pytest.fail(
                    f"`{' '.join(fetch)}` did not bring transformers' source distribution, whose tests are run here. "
                    f"Without a package index set {OFFLINE}=1.\n{result.stderr.strip()[-1000:]}",
                    pytrace=False,
                )
            with tarfile.open(archives[0]) as archive:
                members = [m for m in archive if re.match(r"[^/]+/tests/", m.name)]
                archive.extractall(folder, members, filter="data")
            shutil.rmtree(cache, ignore_errors=True)
            next(p for p in Path(folder).glob("transformers-*/")).rename(cache)
    return cache


@pytest.mark.parametrize(
    "selected", [pytest.param(SMALL, id="small"), pytest.param("AffDiv", id="all", marks=pytest.mark.slow)]
)
def test_transformers_own_tests_pass(selected, transformers_tests, tmp_path, capsys):
    tests = tmp_path / "tests"
    shutil.copytree(transformers_tests / "tests", tests)
    for name, text in STUBS.items():
        (tests / name).parent.mkdir(exist_ok=True)
        (tests / name).write_text(text)
    shutil.copy(Path(__file__).with_name("transformers_suite.py"), tests / "test_affdiv.py")
    (tmp_path / "src").mkdir()  # the tests look for the library's source there
    (tmp_path / "src" / "transformers").symlink_to(Path(transformers.__file__).parent)
    tiny = {"tokenizer_classes": [], "processor_classes": ["TimmWrapperImageProcessor"]}
    (tmp_path / "tiny" / "reports").mkdir(parents=True)
    (tmp_path / "tiny" / "reports" / "tiny_model_summary.json").write_text(
        json.dumps({"AffDivModel": tiny, "AffDivForImageClassification": tiny})
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "GITHUB_ACTIONS")}
    environment |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_TINY_MODEL_PATH": str(tmp_path / "tiny")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_affdiv.py", "-k", selected, "-q", "-W", "ignore"]
        + ["-p", "no:cacheprovider", "--tb=short", f"--junitxml={tmp_path / 'report.xml'}"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "report.xml").is_file(), run.stdout + run.stderr

    counts = {name: collections.Counter() for name in CLASSES}
    reasons, passed, failed = collections.Counter(), set(), []
    for case in ET.parse(tmp_path / "report.xml").iter("testcase"):
        name = case.get("classname").rsplit(".", 1)[-1]
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failed.append(f"{name}.{case.get('name')}")
        elif (skip := case.find("skipped")) is not None:
            outcome = "skipped"
            reason = re.sub(r"^(Skipped: |.*? is skipped: )", "", skip.get("message") or "no reason given")
            reasons[re.sub(r"`?AffDiv\w+`?", "...", reason)] += 1
        else:
            outcome = "passed"
            passed.add((name, case.get("name")))
        counts[name][outcome] += 1

    with capsys.disabled():
        print(f"\ntransformers {transformers.__version__}'s common tests  passed  failed  skipped")
        for name, count in counts.items():
            if count:
                print(f"{name:36}" + "".join(f"{count[o]:8}" for o in ("passed", "failed", "skipped")))
        for reason, n in reasons.most_common():
            print(f"{n:6} skipped: {reason}")

    assert not failed, "\n".join(failed) + run.stdout[-4000:]
    assert run.returncode == 0, run.stdout[-4000:]
    assert "no reason given" not in reasons
    models = [name for name in CLASSES if "Backbone" not in name and counts[name]]
    if selected == SMALL:
        models = ["AffDivMlpTest"]
    missing = {(name, test) for name in models for test in ALWAYS} - passed
    assert not missing, f"these did not run: {sorted(missing)}"
