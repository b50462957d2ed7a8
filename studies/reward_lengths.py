"""Test claim C17: a loss that is divided by its completion's length makes wrong answers longer.

    python -m studies.reward_lengths [--seeds 1 2 3] [--steps 100] [--out FOLDER]

For each seed, a model first learns from examples to sort letters and to write any number of dots
after them (`studies/bases/sorted-tail.yaml`). Then it learns from rewards, once with each loss of
`LOSSES`. The reward ignores the dots, so the length of an answer is free. The same command resumes
a study that was stopped; lengths.md in the folder has the result.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

from studies.command import errors_in_one_line, parser
from studies.ladder import climb
from workhorse.compare.statistics import Interval, interval, paired
from workhorse.config.base import read_yaml
from workhorse.config.overrides import apply_overrides
from workhorse.data.tasks import LETTERS
from workhorse.errors import WorkhorseError
from workhorse.files.writing import write_atomically
from workhorse.train import Recipe, read_metrics, with_init

HERE = Path(__file__).parent
QUESTIONS, WORD, MOST_DOTS, CONTINUES = 6000, 5, 24, 6 / 7
"""Number of questions, letters of each, largest number of dots, probability of another dot."""
LOSSES = {
    "by length": "{kind: policy, ratio: none, denominator: sequences}",
    "by a constant": "{kind: policy, ratio: none, denominator: constant, max_length: 12}",
}
"""The objectives: GRPO's division of each completion's loss, and Dr. GRPO's."""
WINDOW = 10
"""Number of steps that a length or a reward is averaged over."""
Steps = list[dict[str, Any]]


def questions() -> Iterator[dict[str, str]]:
    """Yield prompts with their answers: five letters to sort, then a random number of dots."""
    random = Random("reward lengths")
    for _ in range(QUESTIONS):
        word = "".join(random.choices(LETTERS, k=WORD))
        dots = 0
        while dots < MOST_DOTS and random.random() < CONTINUES:
            dots += 1
        yield {"prompt": f"sort {word}=", "completion": "".join(sorted(word)) + "." * dots}


def run(seeds: Sequence[int], steps: int, out: Path) -> dict[int, dict[str, Steps]]:
    """Train all runs; return the logged steps of each, by seed and loss."""
    if len(seeds) < 2:  # noqa: PLR2004 - one seed has no interval
        raise WorkhorseError(f"{len(seeds)} seed has no interval; give --seeds two or more")
    if steps < WINDOW:
        raise WorkhorseError(f"--steps {steps} is too small; choose {WINDOW} or more")
    file = out / "questions.jsonl"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(file, "".join(json.dumps(one) + "\n" for one in questions()))
    found: dict[int, dict[str, Steps]] = {}
    for seed in seeds:
        common = [f"data.corpus.path={file}", f"train.seed={seed}"]
        fields = read_yaml(HERE / "bases" / "sorted-tail.yaml")
        first = Recipe.from_dict(apply_overrides(fields, [*common, f"name=prime-{seed}"]))
        (primed,) = climb([first], out)
        found[seed] = {}
        for loss, objective in LOSSES.items():
            recipe = rewarded(fields, primed, objective, steps, common).replace(
                name=f"{loss.replace(' ', '-')}-{seed}"
            )
            (folder,) = climb([recipe], out)
            events = read_metrics(folder / "metrics.jsonl")
            found[seed][loss] = [event for event in events if event["kind"] == "step"]
    return found


def rewarded(
    fields: Mapping[str, Any], primed: Path, objective: str, steps: int, settings: Sequence[str]
) -> Recipe:
    """Return the recipe that trains a primed model with rewards, at a constant rate."""
    of_run = {"init": str(primed), "model": {}, "data": fields["data"], "name": "rewards"}
    train = {**fields["train"], "steps": steps, "batch_size": 128, "log_every": 1}
    changes = [
        *settings,
        f"train.objective={objective}",
        "train.rollouts={completions: 8, max_new_tokens: 40, baseline: group}",
        f"train.rollouts.reward={{kind: python, path: {HERE / 'sorted_answer.py'}}}",
        "train.optimizer.learning_rate=5e-4",
        "train.schedule={kind: constant}",
        "train.grad_clip=null",
    ]
    return Recipe.from_dict(with_init(apply_overrides({**of_run, "train": train}, changes)))


def mean_of(steps: Steps, figure: str) -> float:
    """Return the mean of a figure over the steps that have it; NaN if none has.

    `longer` is the length of wrong answers minus that of right ones.
    """
    if figure == "longer":
        return mean_of(steps, "wrong_tokens") - mean_of(steps, "right_tokens")
    values = [step[figure] for step in steps if figure in step]
    return fmean(values) if values else math.nan


def windows(steps: Steps) -> list[Steps]:
    """Return all windows of consecutive steps."""
    return [steps[first : first + WINDOW] for first in range(len(steps) - WINDOW + 1)]


def at_equal_reward(runs: Mapping[str, Steps]) -> dict[str, Steps]:
    """Return for each run the first window with the highest reward that all runs reach."""
    rewards = {
        loss: [mean_of(part, "reward") for part in windows(steps)] for loss, steps in runs.items()
    }
    level = min(max(one) for one in rewards.values())
    return {
        loss: windows(runs[loss])[next(at for at, reward in enumerate(one) if reward >= level)]
        for loss, one in rewards.items()
    }


def at_equal_step(n: int) -> Callable[[Mapping[str, Steps]], dict[str, Steps]]:
    """Return a function that selects the n-th window of steps, or the n-th last if negative."""
    return lambda runs: {loss: windows(steps)[n] for loss, steps in runs.items()}


MOMENTS = {
    "first": at_equal_step(0),
    "last": at_equal_step(-1),
    "at equal reward": at_equal_reward,
}
FIGURES = {
    "reward": "reward",
    "wrong_tokens": "wrong answers",
    "right_tokens": "right answers",
    "longer": "wrong, minus right",
}
"""Names of figures, and their titles in the table."""


def report(found: Mapping[int, Mapping[str, Steps]]) -> str:
    """Return a table: lengths with each loss, and their paired differences over the seeds."""
    lines = [
        f"Means over {WINDOW} steps and {len(found)} seeds with 95 % intervals; lengths in tokens.",
        "",
        f"| steps | figure | {' | '.join(f'divided {loss}' for loss in LOSSES)} | difference | p |",
        "|---|---|---|---|---|--:|",
    ]
    means: dict[tuple[str, str, str], list[float]] = {}
    for moment, select in MOMENTS.items():
        chosen = [select(runs) for runs in found.values()]
        for figure, title in FIGURES.items():
            for loss in LOSSES:
                means[moment, figure, loss] = [mean_of(runs[loss], figure) for runs in chosen]
            values = [means[moment, figure, loss] for loss in LOSSES]
            both = paired(*values)
            shown = [cell(interval(one)) for one in values]
            lines.append(
                f"| {moment} | {title} | {' | '.join(shown)} | {cell(both)} | {both.p:.2g} |"
            )
    for figure, title in FIGURES.items():
        changes = [
            paired(means["last", figure, loss], means["first", figure, loss]) for loss in LOSSES
        ]
        shown = " | ".join(f"{cell(one)}, p = {one.p:.2g}" for one in changes)
        lines.append(f"| last, minus first | {title} | {shown} | | |")
    return "\n".join(lines) + "\n"


def cell(found: Interval) -> str:
    """Format a mean with its interval."""
    return f"{found.mean:.2f} ({found.low:.2f} to {found.high:.2f})"


def main() -> None:
    """Train all runs and write lengths.md."""
    command = parser(__doc__)
    add = command.add_argument
    add("--seeds", type=int, nargs="+", default=[*range(1, 9)], help="of the compared runs")
    add("--steps", type=int, default=100, help="number of steps with rewards")
    add("--out", type=Path, default=Path("runs/reward-lengths"), help="folder of the runs")
    asked = command.parse_args()
    with errors_in_one_line():
        text = report(run(asked.seeds, asked.steps, asked.out))
        write_atomically(asked.out / "lengths.md", text)
        print(text, end="")


if __name__ == "__main__":
    main()
