"""recipes/accelerate: accelerate loads every file as it is meant, and those for the CPU run."""

import importlib
import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml
from pictures import LAUNCH, ROOT, run_script

pytest.importorskip("accelerate")
pytest.importorskip("sklearn")

import timm  # noqa: E402
from accelerate.commands.config.config_args import load_config_from_file  # noqa: E402
from accelerate.commands.launch import _validate_launch_command, launch_command_parser  # noqa: E402
from accelerate.utils import DistributedType  # noqa: E402
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env  # noqa: E402

FOLDER = ROOT / "recipes" / "accelerate"
FILES = sorted(FOLDER.glob("*.yaml"))
KINDS = {
    "cpu": DistributedType.NO,
    "cpu_2_processes": DistributedType.MULTI_GPU,
    "ddp": DistributedType.MULTI_GPU,
    "multi_node": DistributedType.MULTI_GPU,
    "fsdp2": DistributedType.FSDP,
    "deepspeed_zero2": DistributedType.DEEPSPEED,
    "deepspeed_zero3": DistributedType.DEEPSPEED,
}


def test_there_is_a_file_for_each_way_to_run_and_the_page_names_it():
    assert {file.stem for file in FILES} == KINDS.keys()
    page = (FOLDER / "README.md").read_text()
    assert set(re.findall(r"^\| `(\w+\.yaml)`", page, re.MULTILINE)) == {file.name for file in FILES}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_accelerate_loads_it(file: Path):
    """Its loader refuses unknown keys."""
    config = load_config_from_file(str(file))
    assert config.distributed_type == KINDS[file.stem]
    assert config.mixed_precision == ("no" if "cpu" in file.stem else "bf16")
    assert config.num_processes % config.num_machines == 0
    assert (config.num_machines > 1) == (file.stem == "multi_node")
    assert config.use_cpu == ("cpu" in file.stem)


def launched(file: str, *options: str):
    """What `accelerate launch` makes of a file."""
    args = launch_command_parser().parse_args(["--config_file", str(FOLDER / file), *options, "train.py"])
    return _validate_launch_command(args)[0]


def test_fsdp2_reaches_the_launcher_and_names_a_block_that_models_have():
    args = launched("fsdp2.yaml")
    assert args.use_fsdp and not args.multi_gpu
    env = prepare_multi_gpu_env(args)
    assert env["FSDP_VERSION"] == "2"
    assert env["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    name = env["FSDP_TRANSFORMER_CLS_TO_WRAP"]
    for model in ("vit_nano_patch4_32_affine", "vit_tiny_patch16_224"):
        assert name in {type(module).__name__ for module in timm.create_model(model).modules()}
    other = launched("fsdp2.yaml", "--fsdp_transformer_layer_cls_to_wrap", "MixerBlock")
    assert prepare_multi_gpu_env(other)["FSDP_TRANSFORMER_CLS_TO_WRAP"] == "MixerBlock"


@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_leaves_accumulation_to_the_recipe(stage: str, monkeypatch: pytest.MonkeyPatch):
    """accelerate takes the launcher's number before that of the script, if the launcher has one."""
    monkeypatch.setattr("accelerate.utils.launch.is_deepspeed_available", lambda: True, raising=False)
    args = launched(f"deepspeed_zero{stage}.yaml")
    assert args.use_deepspeed
    args.deepspeed_fields_from_accelerate_config = ""
    env = prepare_deepspeed_cmd_env(args)[1]
    assert env["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == stage
    assert "ACCELERATE_GRADIENT_ACCUMULATION_STEPS" not in env
    assert "ACCELERATE_GRADIENT_CLIPPING" not in env


def test_several_machines_take_rank_and_address_from_the_command_line():
    args = launched("multi_node.yaml", "--machine_rank", "1", "--main_process_ip", "node0")
    env = prepare_multi_gpu_env(args)
    assert args.nproc_per_node == "8" and args.nnodes == "2" and args.node_rank == 1
    assert args.rdzv_endpoint == "node0:29500"
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"


# --------------------------------------------------------------------------------------------------------------------
# Those for the CPU
# --------------------------------------------------------------------------------------------------------------------


def train(file: str, cwd: Path, **env: str) -> subprocess.CompletedProcess:
    options = ["--max-steps", "2", "--batch-size", "16", "--test", "never", "--val-fraction", "0.1"]
    command = [*LAUNCH, "--config_file", str(FOLDER / file), str(ROOT / "recipes" / "train.py"), *options]
    return run_script([*command, "--output", "run", "--no-progress", "--no-plot"], cwd, **env)


@pytest.mark.parametrize(("file", "processes"), [("cpu.yaml", 1), ("cpu_2_processes.yaml", 2)])
def test_cpu_files_run(file: str, processes: int, tmp_path: Path):
    done = train(file, tmp_path, **({} if processes == 1 else {"ACCELERATE_USE_CPU": "true"}))
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["processes"] == processes
    assert results["device"].startswith("cpu")
    assert results["updates"] == 2


@pytest.mark.usefixtures("clean_process")
@pytest.mark.parametrize("program", ["train", "finetune", "evaluate", "predict"])
def test_processes_that_do_not_find_each_other_are_an_error(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    """What accelerate's launcher sets for two processes, when the environment does not say that they use the CPU."""
    argv = {"evaluate": ["--model", "x"], "predict": ["x"]}.get(program, [])
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ACCELERATE_USE_CPU", raising=False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert importlib.import_module(program).main(argv) == 2
    stderr = capsys.readouterr().err
    assert stderr.startswith(f"{program}.py: error: the launcher has started 2 processes")
    assert "ACCELERATE_USE_CPU=true" in stderr
    assert not list(tmp_path.iterdir())


def test_the_comments_command_is_the_one_that_runs():
    text = (FOLDER / "cpu_2_processes.yaml").read_text()
    assert "ACCELERATE_USE_CPU=true accelerate launch --config_file recipes/accelerate/cpu_2_processes.yaml" in text
    assert yaml.safe_load(text)["num_processes"] == 2
