"""From the Hub to the cache, and to a folder."""

import functools
import os
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi, constants, snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.file_download import repo_folder_name

from affdiv_zoo.convert.saved import check_directory
from affdiv_zoo.hub._errors import HubError, explained, retried
from affdiv_zoo.hub._folder import PUBLISHED, check_model

__all__ = ["pull"]


def pull(
    repo_id: str,
    directory: str | Path | None = None,
    *,
    revision: str | None = None,
    token: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Downloads a model, and checks it: every file's hash, and that config and weights agree.

    The files come into the Hub's cache, where ``timm.create_model("hf-hub:user/name")`` and transformers'
    ``from_pretrained("user/name")`` find them, from then on without a connection too (``HF_HUB_OFFLINE=1``). A file
    whose hash is not what the Hub states is deleted from the cache: huggingface_hub by itself compares sizes only.

    Args:
        repo_id: ``user/name``.
        directory: Copy the files here too; ``timm.create_model("local-dir:DIRECTORY")`` loads it. All files appear, or
            none.
        revision: A branch, tag or commit; ``main`` if None.
        token: For private repositories; else that of ``hf auth login`` or ``HF_TOKEN``.
        overwrite: Replace the model's files in a folder that is not empty.

    Returns:
        ``directory``, or the snapshot in the cache.

    Raises:
        FileExistsError: The folder is not empty.
        FolderError: What is on the Hub is no model, or its files disagree.
        HubError: The Hub could not be reached or refused, or what came is damaged; the message says what to do.
    """
    if directory is not None:
        directory = Path(directory)
        check_directory(directory, overwrite)
    if constants.HF_HUB_OFFLINE:
        try:
            snapshot = Path(
                snapshot_download(repo_id, revision=revision, local_files_only=True, allow_patterns=list(PUBLISHED))
            )
        except LocalEntryNotFoundError as error:
            name = repo_id + (f" at {revision}" if revision else "")
            raise HubError(
                f"{name} is not wholly in the cache, and HF_HUB_OFFLINE=1 is set: unset it, and pull"
            ) from error
    else:
        snapshot = retried(functools.partial(_download, repo_id, revision, token))
    check_model(snapshot, repo_id)
    if directory is None:
        return snapshot
    _copy(snapshot, directory)
    return directory


def _download(repo_id: str, revision: str | None, token: str | None) -> Path:
    """One attempt at downloading into the cache."""
    api = HfApi(token=token, library_name="affdiv_zoo")
    with explained(repo_id, revision, "nothing was downloaded"):
        # Asked first, since snapshot_download answers with an old snapshot where the Hub refuses or fails.
        api.model_info(repo_id, revision=revision)
    with explained(repo_id, revision, "what came whole is kept, the rest is not there"):
        try:
            snapshot = Path(snapshot_download(repo_id, revision=revision, token=token, allow_patterns=list(PUBLISHED)))
        except OSError as error:
            if "Consistency check failed" in str(error):  # some versions would go on from a part of the wrong size
                blobs = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repo_id, repo_type="model"), "blobs")
                for part in blobs.glob("*.incomplete"):
                    part.unlink(missing_ok=True)
            raise
    _verify(api, repo_id, snapshot)
    return snapshot


def _verify(api: HfApi, repo_id: str, snapshot: Path) -> None:
    """Deletes files with another hash than the Hub states, and raises HubError if there are any."""
    with explained(repo_id, snapshot.name, "what came could not be checked"):
        report = api.verify_repo_checksums(repo_id, revision=snapshot.name)
    for mismatch in report.mismatches:
        path = snapshot / mismatch["path"]
        path.resolve().unlink()  # the blob that the snapshot's link leads to
        path.unlink(missing_ok=True)
    if report.mismatches:
        names = ", ".join(mismatch["path"] for mismatch in report.mismatches)
        raise HubError(
            f"{names} of {repo_id} came with another hash than the Hub states: deleted from the cache, pull again; if "
            "it stays, something on the way (a proxy, a mirror) changes files"
        )


def _copy(snapshot: Path, directory: Path) -> None:
    """Copies a snapshot's files; each is written elsewhere first, so that none is ever half there."""
    directory.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
    try:
        names = sorted(
            (name for name in PUBLISHED if (snapshot / name).is_file()),
            key=lambda name: name == "config.json",  # last: what loaders look for
        )
        for name in names:
            shutil.copyfile(snapshot / name, temporary / name)
        directory.mkdir(exist_ok=True)
        for name in names:
            os.replace(temporary / name, directory / name)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
