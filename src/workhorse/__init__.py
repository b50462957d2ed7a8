"""Workhorse: the decoder-only transformer, every variant of it, from raw text to a served model.

`import workhorse` is cheap: nothing of torch is imported before `workhorse.load` is touched.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.load_model import load

__all__ = ["__version__", "load"]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    if name == "load":
        return importlib.import_module("workhorse.load_model").load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
