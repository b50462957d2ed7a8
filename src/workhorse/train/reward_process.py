"""The process of a reward function. It needs only the standard library; see `child_process`."""

import json
import runpy
import sys
from collections.abc import Callable
from functools import cache
from typing import Any


def start(path: str, name: str) -> Callable[[list[list[str]]], dict[str, Any]]:
    """Return a function that calls a function of a file; the first call runs the file."""
    sys.path.insert(0, "")  # as if Python ran the file: it may import from the current folder
    load = cache(runpy.run_path)

    def answer(columns: list[list[str]]) -> dict[str, Any]:
        try:
            content = load(path, run_name="reward")
            if name not in content:
                raise AttributeError(f"module 'reward' has no attribute {name!r}")
            rewards = content[name](*columns) if columns else []
            if isinstance(rewards, str | bytes | dict | set | frozenset):  # not in order
                return {"type": type(rewards).__name__}
            reply = {"rewards": list(rewards)}
            json.dumps(reply)
        except BaseException as error:
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        return reply

    return answer
