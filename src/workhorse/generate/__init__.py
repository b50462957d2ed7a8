"""Generation with a decoder: sampling, greedy decoding, beam search, streaming.

The names are imported when they are first used, so that `workhorse.generate.options` can be read
without PyTorch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.generate import sampling
    from workhorse.generate.beam import beam_search
    from workhorse.generate.complete import generate, stream
    from workhorse.generate.config import (
        Completion,
        Delta,
        FinishReason,
        GenerationConfig,
        TokenLogprob,
    )
    from workhorse.generate.engine import Engine

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "FinishReason",
    "GenerationConfig",
    "TokenLogprob",
    "beam_search",
    "generate",
    "sampling",
    "stream",
]

_MODULES = {"beam_search": "beam", "Engine": "engine", "generate": "complete", "stream": "complete"}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    if name == "sampling":
        return importlib.import_module("workhorse.generate.sampling")
    if name in __all__:
        home = importlib.import_module(f"workhorse.generate.{_MODULES.get(name, 'config')}")
        return getattr(home, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
