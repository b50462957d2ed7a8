"""Groups of test processes, forked from a server process that has already imported PyTorch."""

import multiprocessing
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from workhorse.cli.main import main

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    [
        "tests.parallel.teams",
        "torch._dynamo",
        "torch.distributed.fsdp",
        "workhorse.cli.train_progress",
        "workhorse.run",
    ]
)


def start(work: Callable[..., object], given: Sequence[Any], processes: int, code: int = 0) -> None:
    """Call a function with the rank in each of `processes` processes, and wait for all.

    Asserts that all exit with `code`.
    """
    started = [FORKS.Process(target=work, args=(rank, *given)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [code] * processes


def train(words: Sequence[str], workers: int, said: Path, code: int = 0) -> str:
    """Run `workhorse train` with several workers, as torchrun would start them.

    Args:
        words: the arguments.
        workers: number of workers.
        said: a file for their output.
        code: the exit code that all workers must have.

    Returns:
        Their output.
    """
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    environment = {
        **{"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers},
        **{"MASTER_ADDR": "localhost", "MASTER_PORT": port},
    }
    said.write_text("")
    try:
        start(_worker, (list(words), environment, said), workers, code)
    except AssertionError:
        raise AssertionError(said.read_text()) from None
    return said.read_text()


def _worker(rank: int, words: list[str], environment: dict[str, Any], said: Path) -> None:
    whole = {**environment, "RANK": rank, "LOCAL_RANK": rank}
    os.environ.update({name: str(value) for name, value in whole.items()})
    with said.open("a") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        code = main(["train", *words])
    except BaseException:
        traceback.print_exc()
        raise
    sys.exit(code)
