"""Campaign: repeated kills of workers, with changing numbers of workers, only cost time.

`make campaign-faults` runs it and prints its figures. PyTorch's agent restarts the workers. When a
job has no restarts left, the next job resumes with another number of workers.
"""

import json
import random
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.campaigns.fault_driver import POINTS
from tests.parallel.runs import GATED, MIXTURE, fields, state_of
from workhorse.checkpoints import CheckpointStore
from workhorse.run import train
from workhorse.train import Recipe

pytestmark = pytest.mark.campaign

ROOT = Path(__file__).parents[2]
KILLS, IN_SAVES, A_JOB = 100, 40, 5
"""Kills per kind of run: in total, inside a save (of the total), and in one job."""
BY_ALL = ("in model.safetensors", "after model.safetensors", "in optimizer.safetensors")
"""Points that are reached by every worker that writes rows."""


@dataclass
class Elastic:
    """One run, in several jobs with some workers each."""

    folder: Path
    recipe: Path
    jobs: int = 0
    restarts: list[float] = field(default_factory=list)

    @property
    def out(self) -> Path:
        return self.folder / "run"

    def job(self, kills: list[dict[str, Any]], workers: int, *settings: str) -> int:
        """Train until the end or the last listed kill, and return the exit status."""
        self.jobs += 1
        listed = self.folder / f"kills-{self.jobs}.json"
        listed.write_text(json.dumps(kills))
        words = ["train", str(self.recipe), *settings, "--out", str(self.out)]
        if (self.out / "recipe.yaml").exists():
            words.append("--resume")
        agent = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "1"),
            *("--nproc-per-node", str(workers), "--max-restarts", str(max(len(kills) - 1, 0))),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
            *("--monitor-interval", "0.1", "-m", "tests.campaigns.fault_worker"),
        ]
        command = [*agent, str(listed), str(self.notes), *words, "--workers", str(workers)]
        with (self.folder / "log.txt").open("a") as log:
            done = subprocess.run(
                command, cwd=ROOT, stdout=log, stderr=log, check=False, timeout=900
            )
        return done.returncode

    @property
    def notes(self) -> Path:
        return self.folder / "notes.txt"

    def killed(self) -> int:
        """Number of workers that were killed."""
        return self.notes.read_text().count("killed\n")

    def batches(self) -> dict[int, set[str]]:
        """The recorded hashes of each step's batch."""
        found: dict[int, set[str]] = {}
        for line in self.notes.read_text().replace("killed\n", "").splitlines():
            step, digest = line.split()
            found.setdefault(int(step), set()).add(digest)
        return found


def some_kills(chance: random.Random, workers: int, *, sharded: bool) -> list[dict[str, Any]]:
    kills: list[dict[str, Any]] = []
    for _ in range(A_JOB):
        rank = chance.randrange(workers)
        if chance.random() < IN_SAVES / KILLS:
            point = chance.choice(POINTS)
            rank = rank if sharded and point in BY_ALL else 0
            kills.append({"rank": rank, "point": point, "save": chance.randint(1, 3)})
        else:
            moment = {"steps": chance.randrange(12), "seconds": chance.uniform(0, 0.1)}
            kills.append({"rank": rank, **moment})
    return kills


@pytest.mark.parametrize("kind", ["data", "shard"])
def test_killed_workers_leave_no_trace(kind: str, tmp_path: Path) -> None:
    chance = random.Random(kind)
    sharded = kind == "shard"
    recipe = fields(
        tmp_path,
        MIXTURE if sharded else GATED,
        **{"steps": 10_000, "batch_size": 12, "dtype": "bfloat16", "checkpoint_every": 3},
        keep=2,
    )
    recipe["parallel"]["reduction"]["logical_shards"] = 12
    file = tmp_path / "recipe.yaml"
    file.write_text(yaml.safe_dump(recipe))
    run = Elastic(tmp_path, file)
    assert run.job([], 1, "train.steps=6") == 0  # gives `keep` checkpoints
    began = time.perf_counter()
    done = in_saves = 0
    while done < KILLS:
        workers = chance.choice((2, 3, 4))
        ways = chance.choice([n for n in (2, 3, 4) if workers % n == 0]) if sharded else 1
        kills = some_kills(chance, workers, sharded=sharded)
        assert run.job(kills, workers, f"parallel.shard={ways}") != 0
        done += len(kills)
        assert run.killed() == done
        in_saves += sum("point" in kill for kill in kills)
    steps = CheckpointStore(run.out / "checkpoints").steps()[0] + 3
    assert run.job([], 2, "parallel.shard=1", f"train.steps={steps}") == 0
    recipe["train"]["steps"] = steps
    train(Recipe.from_dict(recipe), tmp_path / "whole")
    assert state_of(run.out) == state_of(tmp_path / "whole")
    seen = run.batches()
    assert seen.keys() == set(range(steps))
    assert all(len(digests) == 1 for digests in seen.values())
    print(
        f"\n{kind}: {done} workers killed, {in_saves} inside a save, in {run.jobs - 2} "
        f"jobs of 2 to 4 workers and {steps} steps: every loss, batch, weight and the optimizer "
        f"bit-identical to one process's; {time.perf_counter() - began:.0f} s"
    )
