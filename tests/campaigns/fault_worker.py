"""Runs `workhorse` in a worker that may be killed; started by `torchrun`.

    torchrun … -m tests.campaigns.fault_worker KILLS.json BATCHES.txt train RECIPE.yaml …

`KILLS.json` lists one kill per attempt. `{"rank": 1, "steps": 3, "seconds": 0.01}` kills rank 1
0.01 seconds after 3 steps. `{"rank": 0, "point": "in model.safetensors", "save": 2}` kills rank 0
at a point of `fault_driver.POINTS`. Every worker appends the step and the hash of each batch to
`BATCHES.txt`, and a line `killed` before it is killed.
"""

import hashlib
import json
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.campaigns.fault_driver import KillingDisk
from workhorse.checkpoints import CheckpointStore, Disk, RunDirectory
from workhorse.cli.main import main
from workhorse.files.safetensors import Slices
from workhorse.parallel.processes import environment
from workhorse.train.step.step import TrainingStep


def note_batches(file: Path) -> None:
    """Make every step append its number and the SHA-256 of its batch to a file."""
    backward = TrainingStep.backward

    def noting(self: TrainingStep, batch: Any, step: int = 0) -> tuple[Tensor, int]:
        digest = hashlib.sha256(batch.tokens.numpy()).hexdigest()
        with file.open("a") as lines:
            lines.write(f"{step} {digest}\n")
        return backward(self, batch, step)

    TrainingStep.backward = noting


def note_kills(file: Path) -> None:
    """Make a process append a line to a file before it kills itself."""
    kill = os.kill

    def noting(pid: int, number: int) -> None:
        with file.open("a") as lines:
            lines.write("killed\n")
        kill(pid, number)

    os.kill = noting


def die_after(steps: int, seconds: float) -> None:
    """Kill the process `seconds` after a number of steps."""
    update = TrainingStep.update
    left = steps

    def counting(self: TrainingStep, *given: Any) -> Any:
        nonlocal left
        if left == 0:
            threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        left -= 1
        return update(self, *given)

    TrainingStep.update = counting


class FillingDisk(KillingDisk):
    """The disk of a worker that only fills files created by rank 0."""

    def fill(self, path: Path, slices: Slices) -> None:
        self.saves += path.name == "model.safetensors"
        super().fill(path, slices)


def save_on(disk: Disk) -> None:
    """Make runs save on a disk."""
    RunDirectory.store = lambda run, keep=2: CheckpointStore(run.checkpoints_folder, keep, disk)


if __name__ == "__main__":
    kills_file, batches, *words = sys.argv[1:]
    kills: list[dict[str, Any]] = json.loads(Path(kills_file).read_text())
    note_batches(Path(batches))
    note_kills(Path(batches))
    for kill in kills[environment.attempt() : environment.attempt() + 1]:
        if kill["rank"] == environment.rank():
            if "point" in kill:
                kind = KillingDisk if kill["rank"] == 0 else FillingDisk
                save_on(kind(kill["point"], kill["save"]))
            else:
                die_after(kill["steps"], kill["seconds"])
    sys.exit(main(words))
