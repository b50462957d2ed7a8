"""Train a recipe in a process that is killed: from outside, or at a point inside a save."""

import os
import signal
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from workhorse.checkpoints import CheckpointStore, Disk, RunDirectory
from workhorse.config.base import read_yaml
from workhorse.config.overrides import apply_overrides
from workhorse.files.safetensors import Slices
from workhorse.run import train
from workhorse.train import Recipe, with_init

POINTS = (
    "before the folder is made",
    "before model.safetensors is filled",
    "before optimizer.safetensors is filled",
    "in model.safetensors",
    "after model.safetensors",
    "in optimizer.safetensors",
    "in state.json",
    "before the files are synced",
    "in manifest.json",
    "after manifest.json",
    "before the folder is synced",
    "before the rename",
    "after the rename",
    "before the oldest is renamed",
    "after the oldest is renamed",
    "in the removal of the oldest",
    "after the removal of the oldest",
)


class KillingDisk(Disk):
    """A disk that kills the process at a point of a save."""

    def __init__(self, point: str, save: int) -> None:
        self.point = point
        self.save = save
        self.saves = 0

    def reach(self, point: str) -> None:
        if self.saves == self.save and point == self.point:
            os.kill(os.getpid(), signal.SIGKILL)

    def make_folder(self, path: Path) -> None:
        self.saves += 1
        self.reach("before the folder is made")
        super().make_folder(path)

    def lay_out(self, path: Path, slices: Slices) -> None:
        super().lay_out(path, slices)
        self.reach(f"before {path.name} is filled")

    def fill(self, path: Path, slices: Slices) -> None:
        super().fill(path, slices)
        self.reach_inside(path)
        self.reach(f"after {path.name}")

    def write_text(self, path: Path, text: str) -> None:
        super().write_text(path, text)
        self.reach_inside(path)
        self.reach(f"after {path.name}")

    def reach_inside(self, path: Path) -> None:
        """Kill the process when half of the file is written."""
        if self.saves == self.save and self.point == f"in {path.name}":
            os.truncate(path, path.stat().st_size // 2)
        self.reach(f"in {path.name}")

    def sync(self, path: Path) -> None:
        if path.name == "model.safetensors":
            self.reach("before the files are synced")
        if path.name.startswith(".tmp-step"):
            self.reach("before the folder is synced")
        super().sync(path)

    def rename(self, source: Path, target: Path) -> None:
        final = target.name.startswith("step-")
        self.reach("before the rename" if final else "before the oldest is renamed")
        super().rename(source, target)
        self.reach("after the rename" if final else "after the oldest is renamed")

    def remove(self, folder: Path) -> None:
        if self.saves == self.save and self.point == "in the removal of the oldest":
            (folder / "model.safetensors").unlink()
        self.reach("in the removal of the oldest")
        super().remove(folder)
        self.reach("after the removal of the oldest")


def main(sender: "Connection[Any, Any]", recipe_file: str, out: str, *words: str) -> None:
    """Train, or resume if the run exists, and send 0 before training and the number of each step.

    Args:
        sender: where to send the numbers.
        recipe_file: the recipe.
        out: the run directory.
        words: settings `section.key=value`; before them, a point of `POINTS` and the number of a
            save (from 1) at which the process kills itself there.
    """
    settings = [word for word in words if "=" in word]
    point, save = [word for word in words if word not in settings] or ("", "0")
    recipe = Recipe.from_dict(with_init(apply_overrides(read_yaml(recipe_file), settings)))
    run = RunDirectory(out)
    disk: Disk = KillingDisk(point, int(save)) if point else Disk()
    sender.send(0)
    train(
        recipe,
        out,
        resume=run.exists,
        on_event=lambda event: sender.send(event["step"]) if event["kind"] == "step" else None,
        store=CheckpointStore(run.checkpoints_folder, recipe.train.keep, disk),
    )
