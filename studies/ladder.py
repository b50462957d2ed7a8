"""A ladder of the dial's models: laws, a prediction of the next rung, then the rung itself.

    python -m studies.ladder [--depths 1 2 3] [--tokens 8e5 1.6e6 3.2e6] [--next 4 5] [--out FOLDER]

Every depth is trained on every number of tokens, all with one tokenizer and one context: otherwise
losses per token could not be compared. Then all laws predict the loss of each next depth on the
most tokens; the prediction is written down, and only then the rung is trained. The same command
goes on where it was stopped; ladder.md in the folder says what came out.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from workhorse.dial import recipe_of_depth
from workhorse.overrides import apply_overrides
from workhorse.scaling import fit_laws, read_points
from workhorse.train import Event, Recipe, train
from workhorse.writing import write_atomically

SAME = ("tokenizer.vocab_size=4096", "train.seq_len=256", "train.samples=null")
"""Of all rungs; the dial would let vocabulary and context grow."""
STEP_TOKENS = 2048


def rung(depth: int, tokens: float) -> Recipe:
    """The dial's recipe of a depth, trained on so many tokens."""
    steps = round(tokens / STEP_TOKENS)
    settings = [
        *SAME,
        f"name=depth-{depth}-{steps}-steps",
        f"train.batch_size={STEP_TOKENS // 256}",
        f"train.steps={steps}",
        f"train.schedule.warmup_steps={min(20, steps // 4)}",
        f"train.checkpoint_every={max(1, steps // 5)}",
    ]
    return Recipe.from_dict(apply_overrides(recipe_of_depth(depth), settings))


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


def report(tested: list[tuple[str, dict[str, Any], float]]) -> str:
    """The ladder as text: its runs, the laws fitted to them, each next rung predicted and measured.

    Args:
        tested: of each next rung its name, what `predict` gave, and its loss; the first was
            predicted from the ladder alone.
    """
    ladder = tested[0][1]
    lines = ["# The ladder", "", "| run | parameters | tokens | FLOPs | loss |"]
    lines.append("| --- | --: | --: | --: | --: |")
    lines += [
        f"| {one['name']} | {one['parameters']:,.0f} | {one['tokens']:,} | {one['flops']:.3g} "
        f"| {one['loss']:.4f} |"
        for one in ladder["runs"]
    ]
    for law in ladder["laws"]:
        numbers = ", ".join(
            f"{name} = {one['value']:.4g} ({one['low']:.4g} to {one['high']:.4g})"
            for name, one in law["constants"].items()
        )
        error = f"error of a run {law['error']:.2%}"
        lines += ["", f"**{law['name']}**: loss = {law['written']}; {numbers}; {error}"]
    lines += ["", "| rung | law | predicted | 95 % | measured | inside |"]
    lines.append("| --- | --- | --: | --: | --: | --- |")
    for name, predicted, loss in tested:
        for law in predicted["laws"]:
            (one,) = law["predictions"]
            inside = "yes" if one["low"] <= loss <= one["high"] else "no"
            lines.append(
                f"| {name} | {law['name']} | {one['loss']:.4f} | {one['low']:.4f} to "
                f"{one['high']:.4f} | {loss:.4f} | {inside} |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Climb the ladder and test the next rungs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--tokens", type=float, nargs="+", default=[8e5, 1.6e6, 3.2e6])
    parser.add_argument("--next", type=int, nargs="+", default=[4, 5])
    parser.add_argument("--out", type=Path, default=Path("runs/ladder"))
    asked = parser.parse_args()
    rungs = [rung(depth, tokens) for depth in asked.depths for tokens in asked.tokens]
    runs = list(climb(rungs, asked.out))
    tested = []
    for depth in asked.next:
        recipe = rung(depth, max(asked.tokens))
        predicted = predict(runs, recipe, asked.out)
        runs += climb([recipe], asked.out)
        (own,) = read_points(runs[-1:])
        tested.append((recipe.name, predicted, own.loss))
    write_atomically(asked.out / "ladder.md", report(tested))
    print(asked.out / "ladder.md")


if __name__ == "__main__":
    main()
