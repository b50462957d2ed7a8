"""Resolves hub models in a separate process with its own environment variables."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from workhorse.checkpoints.huggingface.load import resolve_model
from workhorse.errors import WorkhorseError


def fetch(rank: int, names: Sequence[str], environment: dict[str, str], said: Path) -> None:
    """Resolve each "NAME REVISION" and write the messages that a user would see; `rank` is 0."""
    for key in [key for key in os.environ if key.startswith("HF_")]:
        del os.environ[key]
    os.environ.update(environment)
    weights = "NO_WEIGHTS" not in environment
    with said.open("w") as file:
        os.dup2(file.fileno(), 1)
        for one in names:
            name, _, revision = one.partition(" ")
            try:
                found = resolve_model(
                    name, revision=revision or None, weights=weights, notify=print
                )
                print(found)
            except WorkhorseError as error:
                print("refused:", error)
        sys.stdout.flush()
