"""Cost of checkpoints: the same training without them, and with them in the background or blocking.

    python -m benchmarks.saving [--rounds 3] [--steps 40] [--every 10] [--threads 2]

Times are seconds of the loop, without the last checkpoint, which every run waits for. The
contestants take turns, and costs are compared round by round.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.contestants.ours import gpt
from benchmarks.harness.command import at_least_one
from benchmarks.harness.machine import default_threads, describe
from benchmarks.harness.shapes import DTYPES, TRAINING
from benchmarks.harness.timing import in_turn
from workhorse.checkpoints import MODEL, OPTIMIZER, CheckpointStore
from workhorse.data import Batch
from workhorse.native.allocator import keep_freed_memory
from workhorse.parallel.processes.world import ALONE
from workhorse.train import saver
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.saver import Saver
from workhorse.train.step.build import build_step

SHAPE = "baby"


class Training:
    """A decoder that is trained on one batch.

    Args:
        dtype: the dtype of the training.
        folder: the folder for checkpoints.
    """

    def __init__(self, dtype: str, folder: Path) -> None:
        sizes = TRAINING[SHAPE]
        torch.manual_seed(0)
        rows = torch.randint(sizes.vocab_size, (sizes.batch, sizes.context + 1))
        sources = torch.zeros(sizes.batch, dtype=torch.int64)
        self.batch = Batch(rows[:, :-1].contiguous(), rows[:, 1:].contiguous(), None, sources)
        config: dict[str, Any] = {"batch_size": sizes.batch, "seq_len": sizes.context}
        decoder = gpt(sizes).build()
        config_of_run = TrainConfig.from_dict({"steps": 1_000_000, "dtype": dtype, **config})
        self.step = build_step(decoder, config_of_run, torch.device("cpu"))
        self.decoder = decoder
        self.store = CheckpointStore(folder)
        self.done = 0
        for _ in range(3):
            self._step()

    def _step(self) -> None:
        self.step.update(*self.step.backward(self.batch, self.done), schedule=1.0)
        self.done += 1

    def run(self, steps: int, every: int, copies: float) -> float:
        """Seconds of `steps` steps, with a checkpoint after every `every` steps; 0 for none."""
        saver.COPIES = copies
        saves = Saver(self.store, lambda step, path: None, ALONE)
        began = time.perf_counter()
        for number in range(steps):
            self._step()
            saves.look()
            if every and number % every == 0:
                self._save(saves)
        seconds = time.perf_counter() - began
        saves.wait()
        return seconds

    def _save(self, saves: Saver) -> None:
        optimizer = self.step.optimizer
        weights = partial(optimizer.masters.weights, self.decoder)
        saves.save(self.done, {MODEL: weights, OPTIMIZER: optimizer.tensors}, {})


def measure(dtype: str, options: argparse.Namespace) -> None:
    """Print the costs for one dtype."""
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        training = Training(dtype, Path(folder))
        takes: dict[str, Callable[[], float]] = {
            "none": partial(training.run, options.steps, 0, 2),
            "meanwhile": partial(training.run, options.steps, options.every, 2),
            "at once": partial(training.run, options.steps, options.every, float("inf")),
        }
        seconds = in_turn(takes, options.rounds)
        size = sum(
            file.stat().st_size for file in training.store.path(training.store.steps()[0]).iterdir()
        )
    every = f"a checkpoint of {size / 2**20:.0f} MiB every {options.every}"
    print(f"{dtype}: {options.steps} steps, {every}")
    for name, found in seconds.items():
        costs = [a / b - 1 for a, b in zip(found, seconds["none"], strict=True)]
        print(
            f"  {name:10} {statistics.median(found) / options.steps:7.3f} s a step, "
            f"{statistics.median(costs):+.1%} ({min(costs):+.1%} to {max(costs):+.1%})"
        )


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=at_least_one, default=3)
    parser.add_argument("--steps", type=at_least_one, default=40)
    parser.add_argument("--every", type=at_least_one, default=10)
    parser.add_argument("--threads", type=at_least_one, default=default_threads())
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--folder", type=Path, help="on the disk to be measured")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(describe(options.threads, "cpu"))
    with keep_freed_memory(torch.device("cpu")):
        for dtype in options.dtypes:
            measure(dtype, options)


if __name__ == "__main__":
    main()
