"""timm's own model tests, unchanged, on our models.

timm's wheel has no tests: the source distribution of the installed version is fetched from the package index, once per
version, into the temporary directory. The tests run in a process of their own, in a folder that holds nothing else, so
that timm is the installed one. None is excluded: ``-k`` selects every test that takes one of the names.
"""

import collections
import fnmatch
import getpass
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
import timm

import affdiv_zoo

OFFLINE = "AFFDIV_ZOO_OFFLINE"

FAMILIES = {
    "CIFAR ResNet": "resnet*_cifar*",
    "ResNet": "resnet*_patchnorm",
    "ViT": "vit_*",
    "Mixer": "mixer_*",
    "MLP": "mlp_*",
    "CNN": "cnn_*",
}

SMALL = (
    "resnet20_cifar",
    "resnet20_cifar_patchnorm",
    "vit_nano_patch4_32",
    "vit_nano_patch4_32_affine",
    "mlp_cifar",
    "mlp_cifar_affine",
    "cnn_cifar",
    "cnn_cifar_patchnorm",
)

# Every name takes part in these, in timm 1.0.31, and in four to seven others that depend on its family.
ALWAYS = (
    "test_model_forward",
    "test_model_backward",
    "test_model_forward_torchscript",
    "test_model_forward_fx",
    "test_model_backward_fx",
)


def family(name: str) -> str:
    return next(family for family, pattern in FAMILIES.items() if fnmatch.fnmatch(name, pattern))


@pytest.fixture(scope="session")
def timm_tests() -> Path:
    """A folder with the ``tests`` of the installed timm's source distribution, and nothing else of it."""
    if os.environ.get(OFFLINE):
        pytest.skip(f"{OFFLINE} is set: timm's tests are not fetched")
    cache = Path(tempfile.gettempdir()) / f"affdiv_zoo-{getpass.getuser()}" / f"timm-{timm.__version__}"
    if not (cache / "tests").is_dir():
        cache.parent.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache.parent) as folder:
            fetch = [
                "pip",
                "download",
                "--no-deps",
                "--no-binary",
                "timm",
                "--dest",
                folder,
                f"timm=={timm.__version__}",
            ]
            result = subprocess.run([sys.executable, "-m", *fetch], capture_output=True, text=True)
            archives = list(Path(folder).glob("timm-*.tar.gz"))
            if result.returncode or not archives:
                pytest.fail(
                    f"`{' '.join(fetch)}` did not bring timm's source distribution, whose tests are run here. "
                    f"Without a package index set {OFFLINE}=1.\n{result.stderr.strip()[-1000:]}",
                    pytrace=False,
                )
            with tarfile.open(archives[0]) as archive:
                archive.extractall(folder, [m for m in archive if "/tests/" in m.name], filter="data")
            shutil.rmtree(cache, ignore_errors=True)
            next(Path(folder).glob("timm-*/")).rename(cache)
    return cache


@pytest.mark.parametrize(
    "names", [pytest.param(SMALL, id="small"), pytest.param(None, id="all", marks=pytest.mark.slow)]
)
def test_timms_own_tests_pass(names, timm_tests, tmp_path, capsys):
    names = names or affdiv_zoo.list_models()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "GITHUB_ACTIONS")}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "tests/test_models.py", "-k", " or ".join(names), "-q", "-W", "ignore"]
        + ["-p", "no:cacheprovider", "--tb=short", f"--junitxml={tmp_path / 'report.xml'}"],
        cwd=timm_tests,
        env={**environment, "TORCH_BACKEND": "affdiv_zoo", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert (tmp_path / "report.xml").is_file(), run.stdout + run.stderr

    counts = {f: collections.Counter() for f in FAMILIES}
    passed, failed, skipped = set(), [], []
    for case in ET.parse(tmp_path / "report.xml").iter("testcase"):
        test, name = re.fullmatch(r"(\w+)\[(?:\d+-)?(\w+)(?:\.\w+)?\]", case.get("name")).groups()
        if case.find("failure") is not None or case.find("error") is not None:
            outcome = "failed"
            failed.append(case.get("name"))
        elif case.find("skipped") is not None:
            outcome = "skipped"
            skipped.append(f"{case.get('name')}: {case.find('skipped').get('message')}")
        else:
            outcome = "passed"
            passed.add((test, name))
        counts[family(name)][outcome] += 1

    with capsys.disabled():
        print(f"\ntimm {timm.__version__}'s tests/test_models.py   names  passed  failed  skipped")
        for f, count in counts.items():
            n = sum(family(name) == f for name in names)
            print(f"{f:38}{n:7}" + "".join(f"{count[o]:8}" for o in ("passed", "failed", "skipped")))

    assert not failed, "\n".join(failed) + run.stdout[-4000:]
    assert not skipped, "\n".join(skipped)
    assert run.returncode == 0, run.stdout[-4000:]
    missing = {(test, name) for test in ALWAYS for name in names} - passed
    assert not missing, f"these did not run: {sorted(missing)}"
