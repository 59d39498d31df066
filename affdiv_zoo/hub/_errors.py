"""Errors that say what to do, in place of those of the HTTP client."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from huggingface_hub import get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

__all__ = ["FolderError", "HubError"]

T = TypeVar("T")


class HubError(RuntimeError):
    """Something between here and the Hub went wrong; the message says what to do, ``__cause__`` is the first error.

    Attributes:
        transient: It may be gone at the next try: an answer of 500 and more, or a cut connection.
    """

    def __init__(self, message: str, transient: bool = False) -> None:
        super().__init__(message)
        self.transient = transient


class FolderError(ValueError):
    """A model's files are missing or disagree. The message has a line for each problem.

    Attributes:
        problems: The lines.
    """

    def __init__(self, folder: object, problems: list[str]) -> None:
        self.problems = problems
        super().__init__("\n  ".join([f"{folder} is no complete model whose files agree:", *problems]))


@contextmanager
def explained(repo_id: str, revision: str | None, done: str) -> Iterator[None]:
    """Turns what the Hub's client raises in the block into a :class:`HubError`.

    Args:
        repo_id: The repository that the block is about.
        revision: The branch, tag or commit.
        done: What a failure means, such as "nothing was published".
    """
    try:
        yield
    except HFValidationError as error:
        raise HubError(f"{repo_id!r} is not the name of a repository: it looks like user/name") from error
    except (HTTPError, OSError, RuntimeError) as error:
        if isinstance(error, HubError):
            raise
        advice, transient = _advice(error, repo_id, revision)
        raise HubError(f"{advice} ({done})", transient) from error


def retried(attempt: Callable[[], T], waits: Sequence[float] = (1, 4)) -> T:
    """Calls a function again after transient errors, after so many seconds each; for what may be done twice.

    Raises:
        HubError: The last attempt's, or one that is not transient.
    """
    for wait in waits:
        try:
            return attempt()
        except HubError as error:
            if not error.transient:
                raise
            time.sleep(wait)
    return attempt()


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    """An error and those that it was raised from: an upload's reason is below a RuntimeError, for example."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _advice(error: Exception, repo_id: str, revision: str | None) -> tuple[str, bool]:
    """What to do about an error, and whether the next try may be without it."""
    for cause in _chain(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return "HF_HUB_OFFLINE=1 is set, and this needs the Hub: unset it, and run this again", False
        if isinstance(cause, RevisionNotFoundError):
            return (
                f"{repo_id} has no branch, tag or commit {revision!r}: name one from its page",
                False,
            )
        if isinstance(cause, HfHubHTTPError) and cause.response is not None:
            return _answer(cause, repo_id), cause.response.status_code >= 500
    last = list(_chain(error))[-1]
    said = str(last).split("\n")[0] or type(last).__name__
    return f"the connection to the Hub failed or was cut: {said}; run this again", True


def _answer(error: HfHubHTTPError, repo_id: str) -> str:
    """What to do about an answer that is not 2xx."""
    status = error.response.status_code
    said = error.response.headers.get("X-Error-Message") or error.response.reason_phrase
    if status == 401 and get_token() is None:
        return f"the Hub wants to know who you are ({said}): log in with `hf auth login`, or set HF_TOKEN"
    if status == 401:
        return f"the Hub does not accept the token ({said}): log in again with `hf auth login`, or set HF_TOKEN anew"
    if status == 403:
        return (
            f"the token may not do that to {repo_id} ({said}): make one with write access under Settings, Access "
            "Tokens, or name a repository of yours"
        )
    if status == 404 and isinstance(error, RepositoryNotFoundError):
        return f"there is no model {repo_id}, or it is private and not yours: check the name, and `hf auth whoami`"
    if status == 404:
        return f"the Hub does not find that in {repo_id} ({said})"
    if status in (409, 412):
        return f"somebody else changed {repo_id} meanwhile ({said}): look at the change, and run this again"
    if status == 429:
        return "the Hub asks for fewer requests: wait some minutes, and run this again"
    if status >= 500:
        return f"the Hub has a problem of its own ({status} {said}): run this again later"
    return f"the Hub refuses that ({status} {said}): run this again; if it stays, a proxy may change what is sent"
