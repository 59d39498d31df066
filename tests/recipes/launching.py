"""Starts train.py in processes of their own, quickly and often: forked from one that has imported it already."""

import multiprocessing
import os
import socket
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes"


def call_main(argv: list[str], log: str, env: dict[str, str]) -> None:
    """Runs the recipe in this process, with what it prints going to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(env)
    # Loader workers would follow the way this process was made, which would import everything anew in each of them.
    multiprocessing.set_start_method("fork", force=True)
    sys.path.insert(0, str(RECIPES))
    import torch
    import train

    torch.set_num_threads(1)
    sys.exit(train.main(argv))


def context() -> multiprocessing.context.BaseContext:
    """Returns what makes the processes. All of them come from one server, which imports the recipe once."""
    forkserver = multiprocessing.get_context("forkserver")
    forkserver.set_forkserver_preload(["launching_preload"])
    return forkserver


class Launch:
    """train.py in one or several processes, as a launcher starts them.

    Args:
        argv: The arguments.
        log: The file for what they print.
        processes: How many; more than one talk through gloo.
    """

    def __init__(self, argv: list[object], log: Path, processes: int = 1):
        self.log = log
        self.processes: list[BaseProcess] = []
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        for rank in range(processes):
            env = dict(ACCELERATE_USE_CPU="true", OMP_NUM_THREADS="1")
            if processes > 1:
                env |= dict(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(processes))
                env |= dict(LOCAL_WORLD_SIZE=str(processes), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            arguments = (list(map(str, argv)), str(log), env)
            self.processes.append(context().Process(target=call_main, args=arguments))
            self.processes[-1].start()

    def wait(self, seconds: float = 240) -> list[int | None]:
        """Waits for the processes to end and returns their statuses; None for one that is still there."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(0, end - time.monotonic()))
        return [process.exitcode for process in self.processes]

    def is_alive(self) -> bool:
        """Returns whether all processes are running."""
        return all(process.is_alive() for process in self.processes)

    def kill(self) -> None:
        """Ends all processes with SIGKILL."""
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def said(self) -> str:
        """Returns what the processes have printed."""
        return self.log.read_text() if self.log.exists() else ""
