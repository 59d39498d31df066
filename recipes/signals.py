"""Signals to stop: in the main process between two updates, in loader workers not at all."""

import atexit
import contextlib
import multiprocessing
import signal
from collections.abc import Iterator
from typing import Any


class Stopped(Exception):
    """A signal to stop, which came after the run had been saved.

    Attributes:
        number: The signal.
        updates: The number of updates so far.
    """

    def __init__(self, number: int, updates: int):
        super().__init__(number, updates)
        self.number = number
        self.updates = updates


class StopSignal:
    """A handler of signals to stop: at once while nothing can be saved, else between two updates.

    Further signals change nothing: launchers pass on a signal that the whole process group has got already.
    """

    def __init__(self) -> None:
        self.number: int | None = None
        self._can_wait = False

    def __call__(self, number: int, frame: Any = None) -> None:
        if not self._can_wait:
            raise KeyboardInterrupt(number)
        self.number = self.number or number

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Lets signals wait in this block."""
        self._can_wait = True
        try:
            yield
        finally:
            self._can_wait = False

    @contextlib.contextmanager
    def installed(self) -> Iterator["StopSignal"]:
        """Handles SIGTERM and SIGINT in this block."""
        previous = {number: signal.signal(number, self) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield self
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def leave_signals_to_parent(_: int) -> None:
    """Has a loader worker ignore signals to stop: the main process still needs its images."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


@atexit.register
def end_workers() -> None:
    """Kills loader workers that an error left behind.

    Python sends them a signal to stop at its exit and waits for them, and that signal they ignore.
    """
    if hasattr(signal, "SIGCHLD"):  # torch's handler takes the end of a worker for an error
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        process.kill()
