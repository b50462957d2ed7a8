"""Workhorse: the decoder-only transformer, every variant of it, from raw text to generated text.

`import workhorse` is cheap: nothing of torch is imported before `workhorse.load` is touched.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.convert import save
    from workhorse.load_model import load

__all__ = ["__version__", "load", "save"]
__version__ = "0.1.0"

_HOMES = {"load": "workhorse.load_model", "save": "workhorse.convert"}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
