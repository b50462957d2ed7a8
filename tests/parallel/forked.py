"""Processes that together do something, forked from one that has imported what they need."""

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
        "workhorse.train",
    ]
)


def start(work: Callable[..., object], given: Sequence[Any], processes: int, code: int = 0) -> None:
    """Call a function in so many processes, each with its number, and wait for all.

    All have to end with the same exit code.
    """
    started = [FORKS.Process(target=work, args=(rank, *given)) for rank in range(processes)]
    for process in started:
        process.start()
    for process in started:
        process.join()
    assert [process.exitcode for process in started] == [code] * processes


def train(words: Sequence[str], workers: int, said: Path, code: int = 0) -> str:
    """`workhorse train` with so many workers, as torchrun would start them.

    Args:
        words: the arguments.
        workers: how many.
        said: a file for all that they print.
        code: with which all of them have to end.

    Returns:
        What they printed.
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
