"""Loss on tiny Shakespeare after nanoGPT's 2,000 steps of 12 × 64 characters.

    python -m benchmarks.equal_steps --data tinyshakespeare.txt --save

The recipe is `recipes/shakespeare-char.yaml` with nanoGPT's steps, batch and context. Learning rate
and parts of the model are chosen on the last tenth of the training split. Only the chosen settings
are then trained on the whole training split, with several seeds, and evaluated on the validation
split. nanoGPT's figure is the one that its README publishes.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

import torch

from benchmarks.harness.command import RESULTS, at_least_one, command_line
from benchmarks.harness.machine import describe, versions

RECIPE = Path(__file__).parent.parent / "recipes" / "shakespeare-char.yaml"
BUDGET = ("train.steps=2000", "train.batch_size=12", "train.seq_len=64", "train.eval_every=null")
PUBLISHED = 1.88
"""Validation loss of the CPU recipe in nanoGPT's README (0.80 M parameters)."""
SEED = 1
"""Seed of the runs that choose; the reported seeds follow it."""


def rates(factor: float) -> tuple[str, ...]:
    """Settings that multiply both learning rates of the recipe."""
    return (
        f"train.optimizer.learning_rate={0.005 * factor:g}",
        f"train.optimizer.adamw.learning_rate={0.015 * factor:g}",
    )


RATES = {f"learning rates × {factor:g}": rates(factor) for factor in (1, 2, 4)}
PARTS = {
    "all parts": (),
    "no gate": ("model.blocks.main.attention.output_gate=false",),
    "no convolution": ("model.blocks.main.convolution=null",),
}


def loss(data: Path, settings: tuple[str, ...], seed: int) -> float:
    """Train and return the validation loss, of all windows of 64 characters."""
    with tempfile.TemporaryDirectory() as folder:
        command = [
            *(sys.executable, "-m", "workhorse", "train", str(RECIPE), *BUDGET, *settings),
            *(f"data.corpus.path={data}", f"train.seed={seed}", "--out", f"{folder}/run", "--json"),
        ]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(done.stdout)["validation_loss"]


def choose(data: Path) -> tuple[dict[str, float], tuple[str, ...]]:
    """Return the loss of each candidate, and the settings of the best.

    `data` is the training split; its last tenth is held out. The learning rate is chosen first.
    """
    tried: dict[str, float] = {}
    settings: tuple[str, ...] = ()
    for name, candidates in ("learning rate", RATES), ("parts", PARTS):
        losses = {one: loss(data, settings + added, SEED) for one, added in candidates.items()}
        best = min(losses, key=losses.__getitem__)
        print(f"{name}: {losses}: {best}", file=sys.stderr)
        settings += candidates[best]
        tried |= losses
    return tried, settings


def main() -> None:
    """Choose settings, train several seeds, print and store the losses."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", type=at_least_one, default=5)
    parser.add_argument("--save", action="store_true", help="write the result into results/")
    arguments = parser.parse_args()
    text = arguments.data.read_text("utf-8")
    with tempfile.TemporaryDirectory() as folder:
        training_split = Path(folder) / "training.txt"
        training_split.write_text(text[: int(0.9 * len(text))], "utf-8")
        tried, settings = choose(training_split)
    seeds = range(SEED + 1, SEED + 1 + arguments.seeds)
    losses = {str(seed): loss(arguments.data.resolve(), settings, seed) for seed in seeds}
    result = {
        "tried": tried,
        "settings": [*BUDGET, *settings],
        "losses": losses,
        "mean": statistics.mean(losses.values()),
        "nanogpt_published": PUBLISHED,
        "command": command_line("equal_steps", sys.argv[1:]),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": describe(torch.get_num_threads(), "cpu"),
        "versions": versions(),
    }
    if arguments.save:
        (RESULTS / "equal_steps.json").write_text(json.dumps(result, indent=1) + "\n", "utf-8")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
