"""The process of a reward function. It needs only the standard library; see `child_process`."""

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any


def start(path: str, name: str) -> Callable[[list[list[str]]], dict[str, Any]]:
    """Return a function that calls a function of a file; the first call imports the file."""
    sys.path.insert(0, "")  # as if Python ran the file: it may import from the current folder
    load = cache(_function)

    def answer(columns: list[list[str]]) -> dict[str, Any]:
        try:
            function = load(path, name)
            rewards = function(*columns) if columns else []
            if isinstance(rewards, str | bytes | dict | set | frozenset):  # not in order
                return {"type": type(rewards).__name__}
            reply = {"rewards": list(rewards)}
            json.dumps(reply)
        except BaseException as error:
            return {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        return reply

    return answer


def _function(path: str, name: str) -> Callable[..., Any]:
    loader = SourceFileLoader("reward", path)  # whatever the suffix of the file
    spec = spec_from_loader("reward", loader)
    assert spec is not None
    loader.exec_module(module := module_from_spec(spec))
    return getattr(module, name)
