"""A ladder of the dial's models: laws, a prediction of the next rung, then the rung itself.

    python -m studies.ladder [--depths 1 2 3] [--tokens 8e5 1.6e6 3.2e6] [--next 4 5]
                             [--notches 1 2 3] [--out FOLDER]

Every depth is trained on every number of tokens, all with one tokenizer and one context: otherwise
losses per token could not be compared. Then all laws predict the loss of each next depth on the
most tokens, and then of depths on 1.8 tokens for each N, the dial's number; each prediction is
written down, and only then the rung is trained. The same command goes on where it was stopped;
ladder.md in the folder says what came out.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from studies.command import errors_in_one_line, parser
from workhorse.config.overrides import apply_overrides
from workhorse.files.writing import write_atomically
from workhorse.plan.subject import Parametric
from workhorse.run import train
from workhorse.scaling import fit_laws, point_of, read_points
from workhorse.scaling.law import check_points
from workhorse.train import Event, Recipe
from workhorse.train.recipe.depth import TOKENS_PER_PARAMETER, recipe_of_depth

SEQ, STEP_TOKENS = 256, 2048
SAME = ("tokenizer.vocab_size=4096", f"train.seq_len={SEQ}", "train.samples=null")
"""Of all rungs; the dial would let vocabulary and context grow."""


def rung(depth: int, tokens: float) -> Recipe:
    """The dial's recipe of a depth, trained on so many tokens."""
    steps = round(tokens / STEP_TOKENS)
    settings = [
        *SAME,
        f"name=depth-{depth}-{steps}-steps",
        f"train.batch_size={STEP_TOKENS // SEQ}",
        f"train.steps={steps}",
        f"train.schedule.warmup_steps={min(20, steps // 4)}",
        f"train.checkpoint_every={max(1, steps // 5)}",
    ]
    return Recipe.from_dict(apply_overrides(recipe_of_depth(depth), settings))


def notch(depth: int) -> Recipe:
    """The rung of a depth with the dial's number of tokens for each N of the laws.

    N counts attention too, so these are more tokens than the dial's own.
    """
    parameters = point_of(rung(depth, STEP_TOKENS)).parameters
    return rung(depth, TOKENS_PER_PARAMETER * parameters)


def climb(recipes: Sequence[Recipe], out: Path) -> Iterator[Path]:
    """Train those that are not finished; gives their folders."""
    for recipe in recipes:
        folder = out / recipe.name
        finished = folder / "ended"
        if not finished.exists():
            print(recipe.name, flush=True)
            shared = recipe.replace(data=recipe.data.replace(cache_dir=str(out / "data")))
            result = train(shared, folder, resume=folder.is_dir(), on_event=_tell)
            if result.stopped_by:
                raise SystemExit(f"stopped by {result.stopped_by}; the same command goes on")
            finished.touch()
        yield folder


def _tell(event: Event) -> None:
    if event["kind"] == "validation":
        print(f"  step {event['step']}: held-out loss {event['loss']:.4f}", flush=True)


def predict(runs: Sequence[Path], recipe: Recipe, out: Path) -> dict[str, Any]:
    """What all laws say of a rung; written before it is trained, and never again."""
    file = out / f"{recipe.name}.json"
    if not file.exists():
        write_atomically(file, json.dumps(fit_laws(runs, [recipe]), indent=1) + "\n")
    return json.loads(file.read_text("utf-8"))


def report(tested: list[tuple[str, dict[str, Any], float]], everything: dict[str, Any]) -> str:
    """The ladder as text: its runs, each next rung predicted and measured, and the laws of all.

    Args:
        tested: of each next rung its name, what `predict` gave, and its loss; the first was
            predicted from the ladder alone.
        everything: what `fit_laws` gives of the ladder and these rungs.
    """
    lines = ["# A scaling ladder", "", "`python -m studies.ladder`", ""]
    lines.append("| run | parameters | tokens | FLOPs | loss |")
    lines.append("| --- | --: | --: | --: | --: |")
    lines += [
        f"| {one['name']} | {one['parameters']:,.0f} | {one['tokens']:,} | {one['flops']:.3g} "
        f"| {one['loss']:.4f} |"
        for one in everything["runs"]
    ]
    lines += [
        "",
        "The loss of each of these runs was predicted from all earlier runs, and then measured:",
        "",
    ]
    lines.append("| rung | law | predicted | 95 % | measured | inside |")
    lines.append("| --- | --- | --: | --: | --: | --- |")
    for name, predicted, loss in tested:
        for law in predicted["laws"]:
            (one,) = law["predictions"]
            inside = "yes" if one["low"] <= loss <= one["high"] else "no"
            lines.append(
                f"| {name} | {law['name']} | {one['loss']:.4f} | {one['low']:.4f} to "
                f"{one['high']:.4f} | {loss:.4f} | {inside} |"
            )
    lines += ["", "The laws fitted to all runs:"]
    for law in everything["laws"]:
        numbers = ", ".join(
            f"{name} = {one['value']:.4g} ({one['low']:.4g} to {one['high']:.4g})"
            for name, one in law["constants"].items()
        )
        error = f"error of a run {law['error']:.2%}"
        lines += ["", f"**{law['name']}**: loss = {law['written']}; {numbers}; {error}"]
        if law["optimum"]:
            own = Parametric(
                **{name.lower(): one["value"] for name, one in law["constants"].items()}
            )
            lines += ["", *_divisions(own, [one["flops"] for one in everything["runs"]])]
    return "\n".join(lines) + "\n"


def _divisions(law: Parametric, flops: Sequence[float]) -> list[str]:
    """How a law divides the least FLOPs of some runs, the most, and what lies in their middle."""
    lines = ["| FLOPs | parameters | tokens | tokens per parameter |", "| --: | --: | --: | --: |"]
    for budget in (min(flops), (min(flops) * max(flops)) ** 0.5, max(flops)):
        parameters, tokens = law.optimum(budget)
        lines.append(
            f"| {budget:.3g} | {parameters:,.0f} | {tokens:,.0f} | {tokens / parameters:.2f} |"
        )
    return lines


def main() -> None:
    """Climb the ladder and test the next rungs."""
    command = parser(__doc__)
    add = command.add_argument
    add("--depths", type=int, nargs="+", default=[1, 2, 3], help="of the rungs that are fitted")
    add("--tokens", type=float, nargs="+", default=[8e5, 1.6e6, 3.2e6], help="each is trained on")
    add("--next", type=int, nargs="+", default=[4, 5], help="depths to predict, then train")
    add(
        "--notches",
        type=int,
        nargs="*",
        default=[1, 2, 3],
        help="likewise, by the dial's tokens for each N",
    )
    add("--out", type=Path, default=Path("runs/ladder"), help="folder of the runs and ladder.md")
    asked = command.parse_args()
    with errors_in_one_line():
        rungs = [rung(depth, amount) for depth in asked.depths for amount in asked.tokens]
        further = [rung(depth, max(asked.tokens)) for depth in asked.next]
        print(run(rungs, further + [notch(depth) for depth in asked.notches], asked.out))


def run(rungs: Sequence[Recipe], further: Sequence[Recipe], out: Path) -> Path:
    """Train the rungs, predict and train further ones; returns what came out.

    Raises:
        WorkhorseError: a rung cannot be trained, or the rungs are too few for any law; said before
            the first is trained.
    """
    check_points([point_of(recipe) for recipe in rungs])
    runs = list(climb(rungs, out))
    tested = []
    for recipe in further:
        predicted = predict(runs, recipe, out)
        runs += climb([recipe], out)
        (own,) = read_points(runs[-1:])
        tested.append((recipe.name, predicted, own.loss))
    write_atomically(out / "ladder.md", report(tested, fit_laws(runs)))
    return out / "ladder.md"


if __name__ == "__main__":
    main()
