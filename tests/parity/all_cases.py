"""The cases of every model type, gathered from `cases/`."""

import importlib
from pathlib import Path
from typing import Any

ALL: dict[str, list[dict[str, Any]]] = {}
for _path in sorted(Path(__file__).with_name("cases").glob("*.py")):
    ALL |= importlib.import_module(f"tests.parity.cases.{_path.stem}").CASES
