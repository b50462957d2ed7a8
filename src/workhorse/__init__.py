"""Workhorse: train, evaluate and run decoder-only transformers, from raw text to generated text.

`import workhorse` is cheap: everything is imported when it is first used. Submodules such as
`workhorse.train` need no import statement of their own.
"""

import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workhorse.model.convert import convert, save
    from workhorse.model.load import load
    from workhorse.model.model import Model, describe

__all__ = ["Model", "__version__", "convert", "describe", "load", "save"]
__version__ = "0.11.0"

_HOMES = {
    "Model": "workhorse.model.model",
    "convert": "workhorse.model.convert",
    "describe": "workhorse.model.model",
    "load": "workhorse.model.load",
    "save": "workhorse.model.convert",
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` or a submodule when it is first used."""
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    if name in _modules():
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_modules()})


def _modules() -> set[str]:
    names = {one.name for one in pkgutil.iter_modules(__path__)}
    return {name for name in names if not name.startswith("_")}
