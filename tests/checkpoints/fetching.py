"""Asks the hub for models, in a process whose environment is its own."""

import os
from collections.abc import Sequence
from pathlib import Path

from workhorse.checkpoints.huggingface.hub import resolve_model
from workhorse.errors import WorkhorseError


def fetch(rank: int, names: Sequence[str], environment: dict[str, str], said: Path) -> None:
    """Resolve "NAME REVISION"s, and write what a user would be told; `rank` is 0."""
    for key in [key for key in os.environ if key.startswith("HF_")]:
        del os.environ[key]
    os.environ.update(environment)
    with said.open("w") as file:
        for one in names:
            name, _, revision = one.partition(" ")
            weights = "NO_WEIGHTS" not in environment

            def tell(line: str) -> None:
                print(line, file=file)

            try:
                tell(
                    str(resolve_model(name, revision=revision or None, weights=weights, tell=tell))
                )
            except WorkhorseError as error:
                tell(f"refused: {error}")
