"""From a folder or a model to the Hub, in one commit."""

import functools
import hashlib
import io
import json
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.nn as nn
from huggingface_hub import CommitOperationAdd, HfApi
from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import validate_repo_id
from huggingface_hub.utils.sha import git_hash, sha_fileobj

from affdiv_zoo.convert import ConversionReport
from affdiv_zoo.convert.saved import save_converted
from affdiv_zoo.hf import ChangedModelError, save_pretrained
from affdiv_zoo.hub._errors import FolderError, HubError, explained, retried
from affdiv_zoo.hub._folder import CONFIG, RESULTS, Folder, prepare

__all__ = ["PushReport", "push", "push_to_hub"]


@dataclass(frozen=True)
class PushReport:
    """What a push did or would do; ``str()`` of it is what the command prints.

    Attributes:
        repo_id: The repository.
        revision: The branch.
        states: Path to ``"new"``, ``"changed"`` or ``"unchanged"`` on the branch; ``"not compared"`` in a dry run that
            did not reach the Hub.
        sizes: Path to bytes.
        left_out: Files of the folder that do not go.
        commit: The commit that holds the files; None if there is none.
        url: The model's page, or the pull request's.
        dry_run: Nothing was sent.
        target: The repository and the branch in words.
        note: Why the Hub was not asked.
    """

    repo_id: str
    revision: str
    states: dict[str, str]
    sizes: dict[str, int]
    left_out: tuple[str, ...]
    commit: str | None
    url: str
    dry_run: bool
    target: str
    note: str = ""

    @property
    def changed(self) -> bool:
        """Whether there was, or is, anything to publish."""
        return any(state != "unchanged" for state in self.states.values())

    def __str__(self) -> str:
        width = max(map(len, self.states))
        lines = [f"  {path:{width}}  {_human(self.sizes[path]):>9}  {state}" for path, state in self.states.items()]
        if self.left_out:
            lines.append(f"  stays here: {', '.join(self.left_out)}")
        if self.note:
            lines.append(f"  not compared with the Hub: {self.note}")
        if not self.changed:
            lines.append(f"nothing to do: commit {self.commit} of {self.target} has all this")
        elif self.dry_run:
            lines.append(f"dry run: would be one commit to {self.target}")
        else:
            lines.append(f"published as commit {self.commit} of {self.target}: {self.url}")
        return "\n".join(lines)


@dataclass(frozen=True)
class _Repo:
    """A repository as a push finds it."""

    exists: bool
    private: bool
    head: str | None = None  # of the branch, if there is one
    oids: dict[str, str] = field(default_factory=dict)  # path to SHA-256, or to git's SHA-1 where it is not an LFS file


def push(
    folder: str | Path,
    repo_id: str,
    *,
    commit_message: str = "Add model",
    token: str | None = None,
    revision: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    dry_run: bool = False,
) -> PushReport:
    """Publishes a saved model's folder in one commit: weights, configuration, preprocessing and card.

    The folder is one that the recipes, ``affdiv-zoo convert``, :func:`affdiv_zoo.hf.save_pretrained` or transformers'
    ``save_pretrained`` wrote. If the branch has the same files already, nothing is sent. The commit comes last, after
    all uploads: whatever fails, the branch has all of the files or none of them.

    Args:
        folder: Has ``config.json`` and ``model.safetensors``; with ``results.json`` the card tells its metrics. The
            card is ``README.md``, or generated where there is none.
        repo_id: ``user/name``. Made if it does not exist.
        commit_message: The commit's title.
        token: A token with write access; else that of ``hf auth login`` or ``HF_TOKEN``.
        revision: The branch, made if it does not exist; ``main`` if None.
        private: Make the repository a private one, and refuse one that is public.
        create_pr: Open a pull request instead of changing the branch.
        dry_run: Only look, and report what would be done.

    Returns:
        What was done.

    Raises:
        FolderError: The folder is incomplete, or its files disagree.
        HubError: The Hub could not be reached or refused; the message says what to do.
    """
    with explained(repo_id, revision, "nothing was published"):
        validate_repo_id(repo_id)  # a dry run would not hear of it from the Hub
    prepared = prepare(folder, repo_id)
    attempt = functools.partial(
        _push, prepared, repo_id, revision or "main", commit_message, token, private, create_pr, dry_run
    )
    # A second pull request is not what a lost answer to the first should lead to.
    return attempt() if create_pr else retried(attempt)


def _push(
    prepared: Folder,
    repo_id: str,
    branch: str,
    commit_message: str,
    token: str | None,
    private: bool,
    create_pr: bool,
    dry_run: bool,
) -> PushReport:
    """One attempt at :func:`push`. Another after a failure sends what is missing; after a lost answer, nothing."""
    api = HfApi(token=token, library_name="affdiv_zoo")
    done, note = "nothing was published", ""
    try:
        with explained(repo_id, branch, done):
            before = _look(api, repo_id, branch, private)
    except HubError as error:
        if not dry_run:
            raise
        before, note = _Repo(exists=True, private=private), str(error)
    if before.exists and private and not before.private:
        raise HubError(f"{repo_id} is public: make it private under Settings on its page, then push ({done})")

    states = {path: _state(content, before.oids.get(path)) for path, content in prepared.files.items()}
    if note:
        states = dict.fromkeys(states, "not compared")
    changed = [path for path, state in states.items() if state != "unchanged"]
    commit, url = None if changed else before.head, f"{api.endpoint}/{repo_id}"
    if changed and not dry_run:
        with explained(repo_id, branch, done):
            if not before.exists:
                api.create_repo(repo_id, private=private, exist_ok=True)
            if before.head is None and branch != "main":
                api.create_branch(repo_id, branch=branch, exist_ok=True)
            info = api.create_commit(
                repo_id,
                [CommitOperationAdd(path, _content(prepared.files[path])) for path in changed],
                commit_message=commit_message,
                revision=branch,
                create_pr=create_pr,
                parent_commit=before.head,  # nobody else's commit is overwritten unseen
            )
            commit, url = info.oid, info.pr_url or url
    target = f"{'private' if before.private else 'public'} {repo_id}, "
    target += f"{'a pull request to ' if create_pr else ''}branch {branch}"
    if dry_run and not before.exists:
        target += " (both would be made)" if branch != "main" else " (which would be made)"
    sizes = {path: len(c) if isinstance(c, bytes) else c.stat().st_size for path, c in prepared.files.items()}
    return PushReport(repo_id, branch, states, sizes, prepared.left_out, commit, url, dry_run, target, note)


def push_to_hub(
    model: nn.Module,
    repo_id: str,
    commit_message: str = "Add model",
    token: str | None = None,
    revision: str | None = None,
    private: bool = False,
    create_pr: bool = False,
    *,
    report: ConversionReport | None = None,
    label_names: Sequence[str] | None = None,
    model_args: Mapping[str, Any] | None = None,
    results: Mapping[str, Any] | None = None,
    dry_run: bool = False,
) -> PushReport:
    """Publishes a model in one commit; ``timm`` and ``transformers`` both load the repository.

        model = timm.create_model("resnet20_cifar_patchnorm", num_classes=10)
        affdiv_zoo.push_to_hub(model, "user/name")
        timm.create_model("hf-hub:user/name", pretrained=True)
        transformers.AutoModelForImageClassification.from_pretrained("user/name")

    Args:
        model: Made by ``timm.create_model``, or one of :mod:`affdiv_zoo.hf`.
        repo_id: ``user/name``. Made if it does not exist.
        commit_message: As in :func:`push`.
        token: As in :func:`push`.
        revision: As in :func:`push`.
        private: As in :func:`push`.
        create_pr: As in :func:`push`.
        report: What :func:`affdiv_zoo.convert` returned with the model, if that made it.
        label_names: Of the classes, in order; else those of the weights that timm loaded.
        model_args: Keywords of the model's constructor, where timm did not note them.
        results: Metrics for the card, as ``recipes/train.py`` writes them into ``results.json``.
        dry_run: As in :func:`push`.

    Returns:
        What was done.

    Raises:
        FolderError: The model cannot be published, such as for weights that are NaN.
        HubError: The Hub could not be reached or refused; the message says what to do.
        ValueError: timm did not make the model, or an argument does not fit it.
    """
    hint = "if affdiv_zoo.convert made it: pass report=, which convert returned with it"
    with tempfile.TemporaryDirectory(prefix="affdiv_zoo-") as temporary:
        folder = Path(temporary, "model")
        args = None if model_args is None else dict(model_args)
        if hasattr(model, "save_pretrained"):
            for name, value in (("report", report), ("label_names", label_names), ("model_args", model_args)):
                if value is not None:
                    raise ValueError(f"{name}={value!r}: a transformers model has that in its config; leave it out")
            model.save_pretrained(folder)
        else:
            if label_names is None:
                known = (getattr(model, "pretrained_cfg", None) or {}).get("label_names") or ()
                label_names = known if len(known) == model.num_classes else None
            if report is None:
                try:
                    save_pretrained(model, folder, label_names=label_names, model_args=args)
                except ChangedModelError as error:
                    raise FolderError(f"the {type(model).__name__}", [str(error), hint]) from error
            else:
                save_converted(model, report, folder, model_args=args)
                if label_names is not None:
                    config = json.loads((folder / CONFIG).read_text())
                    (folder / CONFIG).write_text(json.dumps({**config, "label_names": list(label_names)}))
        if results is not None:
            (folder / RESULTS).write_text(json.dumps(dict(results), indent=2, default=str) + "\n")
        try:
            return push(
                folder,
                repo_id,
                commit_message=commit_message,
                token=token,
                revision=revision,
                private=private,
                create_pr=create_pr,
                dry_run=dry_run,
            )
        except FolderError as error:
            raise FolderError(f"the {type(model).__name__}", [*error.problems, hint]) from error


def _look(api: HfApi, repo_id: str, branch: str, private: bool) -> _Repo:
    try:
        is_private = bool(api.model_info(repo_id).private)
    except RepositoryNotFoundError:
        return _Repo(False, private)
    try:
        head = api.model_info(repo_id, revision=branch).sha
    except RevisionNotFoundError:
        return _Repo(True, is_private)
    oids = {
        file.path: file.lfs.sha256 if file.lfs else file.blob_id
        for file in api.list_repo_tree(repo_id, recursive=True, revision=head)
        if isinstance(file, RepoFile)
    }
    return _Repo(True, is_private, head, oids)


def _state(content: bytes | Path, oid: str | None) -> str:
    if oid is None:
        return "new"
    return "unchanged" if oid in _names(content) else "changed"


def _names(content: bytes | Path) -> tuple[str, str]:
    """What the Hub calls a file: its SHA-256 under LFS, git's SHA-1 otherwise."""
    if isinstance(content, bytes):
        return hashlib.sha256(content).hexdigest(), git_hash(content)
    with content.open("rb") as file:
        sha256 = sha_fileobj(file).hex()
    return sha256, git_hash(content.read_bytes())


def _content(content: bytes | Path) -> io.BytesIO | str:
    return io.BytesIO(content) if isinstance(content, bytes) else str(content)


def _human(size: float) -> str:
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
