"""Code paths of common tasks stay short."""

import json
import subprocess
import sys

from benchmarks.routes import ROUTES, total

LIMITS = {"start": 5925, "batch": 1450, "generate": 2000, "chat": 3200, "rl": 3850}
"""Largest number of lines of the functions outside `nn/` that a task executes.

The aims are 4,000 for `start`, 1,300 for `batch`, 2,000 for `generate`, 2,500 for `chat` and 2,800
for `rl`.
"""


def test_routes_stay_below_their_limits() -> None:
    """In a process of its own, because functions that only run once per process count too."""
    command = [sys.executable, "-m", "benchmarks.routes", "--json"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    lines = {name: total(route) - total(route, "nn/") for name, route in found.items()}
    assert lines.keys() == LIMITS.keys() == ROUTES.keys()
    assert all(lines.values())
    assert {name: n for name, n in lines.items() if n > LIMITS[name]} == {}
