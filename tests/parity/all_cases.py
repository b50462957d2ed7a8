"""The small shapes of every model type in `cases.yaml`."""

from pathlib import Path
from typing import Any

import yaml

_DATA = yaml.safe_load(Path(__file__).with_name("cases.yaml").read_text(encoding="utf-8"))
_SMALL, GROUPED, LONG, *_ = _DATA["shapes"]
ALL: dict[str, list[dict[str, Any]]] = _DATA["cases"]
