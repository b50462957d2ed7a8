"""A block: checks that run in turn, and whose results are saved as they arrive."""

import json
import re
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """Device, sizes and files of a block.

    Attributes:
        device: `cuda`, or `cpu` to test a block.
        tiny: True for sizes that a CPU computes in seconds.
        models: the folder for models that are made once.
    """

    device: torch.device
    tiny: bool
    models: Path


@dataclass(frozen=True)
class Check:
    """One measurement or comparison.

    Attributes:
        name: the name of the check.
        work: returns figures that JSON can express. A missed goal is a figure too: an exception
            means that the check did not run.
    """

    name: str
    work: Callable[[], Figures]


Block = Callable[[Setting], Iterable[Check]]
"""Yields checks; objects that it creates for several checks live as long as the block runs."""


def run(
    name: str, block: Block, setting: Setting, seconds: float, only: str | re.Pattern[str] = ""
) -> Iterator[Figures]:
    """Yield the results of a block's checks as they arrive; an error is a result.

    Args:
        name: the block's name.
        block: the block.
        setting: device, sizes and files.
        seconds: time limit; checks that would start later are reported as left out.
        only: a pattern to find in the names of the checks to run.
    """
    begun = time.perf_counter()
    for check in block(setting):
        if not re.search(only, check.name):
            continue
        about = {"block": name, "check": check.name}
        if time.perf_counter() - begun > seconds:
            yield about | {"left_out": f"{seconds:.0f} s are over"}
            continue
        started = time.perf_counter()
        try:
            figures = check.work()
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(last.filename).name}:{last.lineno}"
            figures = {"error": f"{type(error).__name__}: {error}"[:1000], "at": where}
            traceback.print_exception(error)
        if setting.device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
        yield about | figures | {"seconds": round(time.perf_counter() - started, 2)}


def keep(results: Iterable[Figures], file: Path) -> None:
    """Append results to a file, one line each, and print them."""
    with file.open("a", encoding="utf-8") as lines:
        for result in results:
            line = json.dumps(result)
            lines.write(line + "\n")
            lines.flush()
            print(line, flush=True)


def seconds_of(work: Callable[[], object], device: torch.device, repeats: int = 10) -> float:
    """The median time of a function, after one call that does not count."""
    work()
    found: list[float] = []
    for _ in range(repeats):
        if device.type == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(time.perf_counter() - started)
    return sorted(found)[repeats // 2]
