"""Checkpoints that survive a kill at any moment, and the folder of a run while it lasts.

An unfinished run lies in `<output>.part`, which becomes `<output>` when the run is complete: a run folder is always
whole, and the one of an earlier run stays until then. In it, `checkpoints/` holds one folder for each saved moment. The
last in the order of their names is the latest:

    epoch-0003-batch-000120/
        model.safetensors, optimizer.bin, ...   accelerate's state, which is also that of its FSDP and DeepSpeed
        ema.safetensors                         the averaged weights, with --model-ema
        state.json                              position, log, arguments
        manifest.json                           size and SHA-256 of all the others

A checkpoint is written under a hidden name, the manifest last, and renamed when all of it is on the disk. Whatever has
no manifest that fits is refused before anything of it is loaded. accelerate reads optimizer states with torch's
`weights_only`; nothing that could run code is loaded.
"""

import contextlib
import hashlib
import json
import os
import pickle
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from data import RecipeError, listed, one_line
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

try:
    import fcntl
except ImportError:  # Windows, where nothing keeps two runs from one folder
    fcntl = None

FORMAT = 1
MANIFEST = "manifest.json"
STATE = "state.json"
EMA = "ema.safetensors"

# Arguments that a resumed run may change: they do not bear on the weights.
FREE = (
    *("config", "output", "overwrite", "resume", "no_progress", "no_plot", "tracker", "project", "log_interval"),
    *("workers", "eval_batch_size", "checkpoint_interval", "checkpoint_steps", "checkpoint_hist", "keep_checkpoints"),
    *("check_interval", "diagnose_every"),
)
WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)  # torch's writer turns a full disk into a RuntimeError


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------


def write_text(path: Path, text: str) -> None:
    """Writes a file under a temporary name and renames it when it is on the disk."""
    temporary = path.with_name(f".{path.name}.part")
    try:
        with open(temporary, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def sync(path: Path) -> None:
    """Has the system write a file or a folder's entries to the disk."""
    if path.is_dir() and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_folder(folder: Path) -> None:
    """Removes a folder, under another name first so that no kill leaves a part of it under its own."""
    hidden = folder.with_name(f".{folder.name}.old-{os.getpid()}")
    with contextlib.suppress(OSError):
        folder.rename(hidden)
        shutil.rmtree(hidden, ignore_errors=True)


def file_hash(path: Path) -> str:
    """Returns a file's SHA-256."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def files_below(folder: Path) -> list[Path]:
    """Lists the files in and below a folder, sorted."""
    return sorted(path for path in folder.rglob("*") if path.is_file())


# --------------------------------------------------------------------------------------------------------------------
# The run folder
# --------------------------------------------------------------------------------------------------------------------


class RunFolder:
    """The folder of one run: `<output>.part` while it lasts, `<output>` when it is complete.

    Only the main process makes, completes and leaves it; all processes write checkpoints into it.

    Args:
        output: Where the complete run is to be.

    Attributes:
        work: Where it is until then.
        checkpoints: Where its checkpoints are.
        begun_from: The checkpoint it was resumed from.
    """

    def __init__(self, output: Path):
        if output.name in ("", ".."):
            raise RecipeError(f"--output {str(output)!r} is no folder of its own; name one, such as runs/first")
        self.output = output
        self.work = output.with_name(output.name + ".part")
        self.checkpoints = self.work / "checkpoints"
        self.begun_from: Path | None = None
        self._lock: Any = None

    def __str__(self) -> str:
        return str(self.output)

    def names(self) -> list[Path]:
        """Lists the checkpoints, the latest first."""
        return sorted(self.checkpoints.glob("epoch-*-batch-*"), reverse=True)

    def check(self, overwrite: bool, resumes: bool = False) -> None:
        """Raises a RecipeError unless a run can be begun here, or gone on with if it `resumes`."""
        try:
            self._check(overwrite, resumes)
        except PermissionError as error:
            raise RecipeError(
                f"--output {str(self)!r} cannot be read ({error.strerror}); name another folder"
            ) from error
        try:
            # Tried, as what the permission bits say is not all (access lists, read-only mounts); it leaves nothing.
            with tempfile.TemporaryFile(dir=next(path for path in self.work.absolute().parents if path.exists())):
                pass
        except OSError as error:
            raise RecipeError(
                f"--output {str(self)!r} cannot be made ({error.strerror}); name another folder"
            ) from error

    def _check(self, overwrite: bool, resumes: bool) -> None:
        if self.output.exists() and not self.output.is_dir():
            raise RecipeError(f"--output {str(self)!r} is a file; name a folder")
        if self.output.is_dir() and any(self.output.iterdir()):
            if not overwrite and not resumes:
                raise RecipeError(f"--output {str(self)!r} is not empty; name another folder or add --overwrite")
            if not (self.output / "results.json").is_file():
                # Nobody's other files are ever deleted.
                raise RecipeError(f"--output {str(self)!r} is not empty and no run's folder; name another")
        if self.work.exists() and not self._is_ours():
            raise RecipeError(f"--output {str(self)!r}: {str(self.work)!r} is in the way and no run's; name another")
        if self.names() and not overwrite and not resumes:
            raise RecipeError(
                f"--output {str(self)!r}: an unfinished run lies in {str(self.work)!r}; add --resume auto to go on "
                "with it or --overwrite to begin anew"
            )

    def _is_ours(self) -> bool:
        if not self.work.is_dir():
            return False
        names = {child.name for child in self.work.iterdir()}
        return not names - {"lock", ".args.yaml.part"} or "args.yaml" in names

    def open(self, config: str, resume: bool) -> None:
        """Makes the folder, or takes over that of an unfinished run.

        Args:
            config: What `args.yaml` is to hold.
            resume: Whether to keep what is there.

        Raises:
            RecipeError: It cannot be made, or another process is using it.
        """
        try:
            self.work.mkdir(parents=True, exist_ok=True)
            self._take_lock()
            if not resume:
                for child in self.work.iterdir():
                    if child.name != "lock":
                        shutil.rmtree(child) if child.is_dir() else child.unlink()
            write_text(self.work / "args.yaml", config)
            self.checkpoints.mkdir(exist_ok=True)
            for child in self.checkpoints.glob(".*"):  # what a kill left
                shutil.rmtree(child)
        except OSError as error:
            self.leave()
            raise RecipeError(
                f"--output {str(self)!r} cannot be made ({error.strerror}); name another folder"
            ) from error

    def _take_lock(self) -> None:
        # Such a lock ends with its process, however it ends, and is not passed on to loader workers.
        if fcntl is None:
            return
        self._lock = open(self.work / "lock", "ab")  # noqa: SIM115  open as long as the run
        try:
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError) as error:
            self._lock.close()
            self._lock = None
            raise RecipeError(f"--output {str(self)!r}: another process is training there; name another") from error
        except OSError:
            pass  # a file system without locks

    def _release_lock(self) -> None:
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        with contextlib.suppress(OSError):  # the folder may have become one that cannot be written
            (self.work / "lock").unlink()

    def leave(self) -> None:
        """Ends an unfinished run: keeps what can be gone on with, and else leaves nothing."""
        if self._lock is None and fcntl is not None:
            return  # it was never ours
        self._release_lock()
        if not self.names():
            shutil.rmtree(self.work, ignore_errors=True)

    def finish(self, keep_checkpoints: bool) -> None:
        """Puts the complete run in its place. A kill on the way leaves an unfinished or a complete run."""
        self._release_lock()
        old = self.output.with_name(f".{self.output.name}.old-{os.getpid()}")
        if self.output.exists():
            self.output.rename(old)
        self.work.rename(self.output)
        self.tidy(keep_checkpoints)

    def tidy(self, keep_checkpoints: bool) -> None:
        """Removes what a complete run has no need of, and what a kill on its last way has left."""
        if not keep_checkpoints:
            remove_folder(self.output / "checkpoints")
        leftovers = [*self.output.glob(".checkpoints.old-*"), *self.output.parent.glob(f".{self.output.name}.old-*")]
        for folder in leftovers:
            shutil.rmtree(folder, ignore_errors=True)


# --------------------------------------------------------------------------------------------------------------------
# Writing
# --------------------------------------------------------------------------------------------------------------------


def save_checkpoint(
    accelerator: Accelerator, run: RunFolder, state: dict[str, Any], ema: nn.Module | None, history: int
) -> None:
    """Saves a moment between two updates. All processes call it.

    Args:
        accelerator: What has prepared the model and its optimizer.
        run: The run's folder.
        state: The position and all else that is not a tensor, as JSON. Its `epoch` and `batch` make the name.
        ema: The averaged model.
        history: How many checkpoints to keep.

    Raises:
        RecipeError: It cannot be written. Earlier ones are as they were.
    """
    name = f"epoch-{state['epoch']:04d}-batch-{state['batch']:06d}"
    final, part = run.checkpoints / name, run.checkpoints / f".{name}.part"
    if run.begun_from is not None and final == run.begun_from:  # resumed, and stopped again at once
        return
    with reported_failure(accelerator, run):
        part.mkdir(exist_ok=True)
        accelerator.save_state(part)
    with reported_failure(accelerator, run):
        if accelerator.is_main_process:
            if ema is not None:
                tensors = {key: value.detach().cpu().contiguous().clone() for key, value in ema.state_dict().items()}
                save_file(tensors, part / EMA)
            (part / STATE).write_text(json.dumps(state, default=str))
            files = files_below(part)
            manifest = {
                path.relative_to(part).as_posix(): {"bytes": path.stat().st_size, "sha256": file_hash(path)}
                for path in files
            }
            (part / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": manifest}, indent=1))
            for path in (*files, part / MANIFEST, part):
                sync(path)
            if final.exists():  # of the same run, which was then resumed from an earlier one
                remove_folder(final)
            os.replace(part, final)
            sync(run.checkpoints)
            for old in run.names()[history:]:
                remove_folder(old)


@contextlib.contextmanager
def reported_failure(accelerator: Accelerator, run: RunFolder) -> Iterator[None]:
    """Turns a failure to write, in any process, into a RecipeError in all of them."""
    why, cause = "", None
    try:
        yield
    except WRITE_ERRORS as error:
        why, cause = reason(error, run.work), error
    if agree(accelerator, bool(why)):
        if accelerator.is_main_process:
            for hidden in run.checkpoints.glob(".*"):
                shutil.rmtree(hidden, ignore_errors=True)
        last = run.names()[:1]
        kept = f"the last checkpoint is {str(last[0])!r}" if last else "there is no earlier checkpoint"
        raise RecipeError(
            f"--output {str(run)!r}: a checkpoint cannot be written ({why or 'in another process'}); {kept}; make room "
            "there" + (", then go on with --resume auto" if last else " or name another folder")
        ) from cause


@contextlib.contextmanager
def told_failure(run: RunFolder) -> Iterator[None]:
    """Turns a failure to write into the run's folder into a RecipeError."""
    try:
        yield
    except WRITE_ERRORS as error:
        raise RecipeError(
            f"--output {str(run)!r} cannot be written ({reason(error, run.work)}); make room there, then add "
            "--resume auto"
        ) from error


def reason(error: BaseException, folder: Path) -> str:
    """Words why something could not be written: torch's own message says nothing of a full disk."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    with contextlib.suppress(OSError):
        return f"{one_line(error)}, with {shutil.disk_usage(folder).free / 1e6:.1f} MB free"
    return one_line(error)


def agree(accelerator: Accelerator, flag: bool) -> bool:
    """Returns whether the flag is set in any process; all of them wait here."""
    if accelerator.num_processes == 1:
        return flag
    count = torch.tensor([float(flag)], device=accelerator.device)
    return bool(accelerator.reduce(count, "sum").item())


# --------------------------------------------------------------------------------------------------------------------
# Reading
# --------------------------------------------------------------------------------------------------------------------


def verify(folder: Path) -> dict[str, Any]:
    """Checks that a checkpoint is one, and whole, without loading anything but its JSON files.

    Returns:
        What `state.json` holds.

    Raises:
        RecipeError: The folder is no checkpoint, or a file in it is missing, cut off or changed.
    """
    if not folder.is_dir():
        raise RecipeError(f"--resume {str(folder)!r}: there is no such folder; name a checkpoint's, or auto")
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files, version = manifest["files"], manifest["format"]
        sizes = {name: (entry["bytes"], entry["sha256"]) for name, entry in files.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise RecipeError(
            f"--resume {str(folder)!r} is no checkpoint of this recipe: it has no {MANIFEST} that can be read; "
            "name another, or auto"
        ) from error
    if version != FORMAT:
        raise RecipeError(f"--resume {str(folder)!r} has format {version!r}, and this version reads {FORMAT}")
    for name, (size, digest) in sizes.items():
        path = folder / name
        if not path.is_file():
            raise RecipeError(f"--resume {str(folder)!r} is damaged: {name} is missing; name another checkpoint")
        if path.stat().st_size != size:
            raise RecipeError(
                f"--resume {str(folder)!r} is damaged: {name} has {path.stat().st_size} bytes instead of {size}; "
                "name another checkpoint"
            )
        if file_hash(path) != digest:
            raise RecipeError(
                f"--resume {str(folder)!r} is damaged: {name} is not what was written; name another checkpoint"
            )
    unknown = [path.relative_to(folder).as_posix() for path in files_below(folder) if path.name != MANIFEST]
    unknown = [name for name in unknown if name not in sizes]
    if unknown:
        raise RecipeError(f"--resume {str(folder)!r} has files that are not its own: {listed(unknown)}; remove them")
    return json.loads((folder / STATE).read_text())


def check_same_run(where: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raises a RecipeError if what was saved belongs to another run.

    Args:
        where: What was saved, for the message.
        old: The arguments it was saved with.
        new: The arguments of this run, in the same form.
    """
    wrong = [name for name in old if name not in FREE and name in new and old[name] != new[name]]
    if wrong:
        name = wrong[0]
        more = f" (and {len(wrong) - 1} more differences)" if len(wrong) > 1 else ""
        raise RecipeError(
            f"{where} is of a run with {name}={old[name]!r}, and this one has {name}={new[name]!r}{more}; give the "
            "same arguments, or another --output without --resume"
        )


def find_checkpoint(
    accelerator: Accelerator, run: RunFolder, resume: str, identity: dict[str, Any]
) -> tuple[Path | None, dict[str, Any] | None, dict[Path, str]]:
    """Chooses and checks the checkpoint to go on from. All processes call it and get the same answer.

    `auto` takes the latest of the run's that is whole. A damaged one is passed over, which is told, and an error if
    there is no other.

    Args:
        accelerator: For the processes' agreement.
        run: The run's folder.
        resume: The value of `--resume`.
        identity: What the run is, as `check_same_run` compares it.

    Returns:
        The checkpoint's folder and state, None and None if there is none; and what was passed over, with the reasons.

    Raises:
        RecipeError: The checkpoint, or each of them, is damaged, or it is another run's.
    """
    answer: list[Any] = [None, None, {}, None]
    if accelerator.is_main_process:
        try:
            answer[:3] = _find(run, resume)
            if answer[0] is not None:
                check_same_run(f"--resume: {str(answer[0])!r}", answer[1]["identity"], identity)
        except RecipeError as error:
            answer[3] = str(error)
    if accelerator.num_processes > 1:
        broadcast_object_list(answer)
    folder, state, damaged, problem = answer
    if problem is not None:
        raise RecipeError(problem)
    return folder, state, damaged


def _find(run: RunFolder, resume: str) -> tuple[Path | None, dict[str, Any] | None, dict[Path, str]]:
    if resume != "auto":
        return Path(resume), verify(Path(resume)), {}
    damaged: dict[Path, str] = {}
    for folder in run.names():
        try:
            return folder, verify(folder), damaged
        except RecipeError as error:
            damaged[folder] = str(error)
    if damaged:
        raise RecipeError(next(iter(damaged.values())))
    return None, None, {}


def load_checkpoint(accelerator: Accelerator, folder: Path, ema: nn.Module | None) -> None:
    """Loads what `verify` has checked into the prepared model and optimizer, and into the averaged model."""
    try:
        accelerator.load_state(folder)
        if ema is not None:
            ema.load_state_dict(load_file(folder / EMA))
    except (OSError, RuntimeError, ValueError, KeyError, SafetensorError, pickle.UnpicklingError) as error:
        raise RecipeError(
            f"--resume {str(folder)!r} does not fit this model and optimizer ({one_line(error)}); name another"
        ) from error
