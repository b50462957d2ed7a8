"""The process of a reward function. It needs only the standard library; see `child_process`."""

import json
import sys
from collections.abc import Callable
from functools import cache
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from typing import Any


def start(path: str, name: str) -> Callable[[list[list[str]]], dict[str, Any]]:
    """Return a function that calls a function of a file; the first call runs the file."""
    sys.path.insert(0, "")  # as if Python ran the file: it may import from the current folder
    function = cache(_function)

    def answer(columns: list[list[str]]) -> dict[str, Any]:
        try:
            score = function(path, name)
            rewards = score(*columns) if columns else []
            if isinstance(rewards, str | bytes | dict | set | frozenset):  # not in order
                return {"type": type(rewards).__name__}
            plain = [one.item() if hasattr(one, "item") else one for one in rewards]
            reply = {"rewards": plain}
            json.dumps(reply)
        except BaseException as error:
            return {"error": " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")[:300]}
        return reply

    return answer


def _function(path: str, name: str) -> Callable[..., Any]:
    own = "__reward__"  # no name that the file could import
    loader = SourceFileLoader(own, path)  # whatever the suffix of the file
    spec = spec_from_loader(own, loader)
    assert spec is not None
    module = sys.modules[own] = module_from_spec(spec)  # dataclasses and pickle look it up
    loader.exec_module(module)
    return getattr(module, name)
