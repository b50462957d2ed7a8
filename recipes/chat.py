"""From nothing to a chat: pretrain, fine-tune, learn from preferences, compare, chat.

    python recipes/chat.py                     # the same as make chat
    python recipes/chat.py train.steps=10      # a setting for all three recipes

Each stage is a command that also works alone. The commands and their messages are in runs/chat.log.
A finished stage is not repeated, and an interrupted run is resumed. On a slow machine each run
trains fewer steps than its recipe has, for five minutes.
"""

import json
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import yaml

RUNS = Path("runs")
BASE, CHAT, PREFERENCES = (RUNS / f"stdlib-{name}" for name in ("small", "chat", "preferences"))
PAIRS = RUNS / "stdlib-pairs"
LOG = RUNS / "chat.log"
REWARDS = ("form", "name", "kind", "module")
MINUTES = 5
"""Longest training of a stage, unless the settings have a length."""
QUESTIONS_PER_STEP = 2
"""Number of questions that are asked for pairs, for each step of shortened trainings."""
QUESTIONS = 20
"""Number of held-out questions to compare the models on."""
EXAMPLE = "What is threading.Thread?"
SAVE, RESTORE = ("\0337", "\0338\033[J") if sys.stdout.isatty() else ("", "")
"""Terminal codes: keep the cursor's place, and return to it and clear what follows."""
WORKHORSE = (sys.executable, "-m", "workhorse")


def main(settings: list[str]) -> None:
    """Run all stages."""
    RUNS.mkdir(exist_ok=True)
    LOG.write_text("")
    print(f"progress and messages: {LOG}", file=sys.stderr)
    train("pretrain", BASE, settings)
    train("fine-tune", CHAT, settings)
    make_pairs(settings)
    train("preferences", PREFERENCES, settings)
    compare()
    chat = (*WORKHORSE, "chat", str(PREFERENCES), "--temperature", "0")
    if sys.stdin.isatty():
        print(f"\nchat with {PREFERENCES}; /quit ends it", flush=True)
        sys.exit(subprocess.call(chat))
    print(f"\n> {EXAMPLE}\n{output(chat, EXAMPLE)}\nnext: make inspect")


def train(stage: str, run: Path, settings: list[str]) -> None:
    """Train or resume a recipe, and print the time of its steps and its loss."""
    begin(stage)
    recipe, begun = f"recipes/{run.name}.yaml", run / "recipe.yaml"
    whole = length_of(recipe)["steps"]
    lengths = [f"train.{key}=" for key in ("steps", "minutes")]
    others = [one for one in settings if not one.startswith(tuple(lengths))]
    if begun.exists():  # it keeps its number of steps
        settings = [*others, *(f"train.{key}={value}" for key, value in length_of(begun).items())]
        settings.append("--resume")
    elif others == settings:
        settings = [*settings, f"train.steps={whole}", f"train.minutes={MINUTES}"]
    words = [*WORKHORSE, "train", recipe, *settings, "--out", str(run), "--json"]
    result = json.loads(output(words))
    steps = result["steps"]
    note = f"held-out loss {result['validation_loss']:.4f}, {run}/report.html"
    if steps < whole:
        lines = (run / "metrics.jsonl").read_text("utf-8").splitlines()
        *_, last = (one for one in map(json.loads, lines) if one["kind"] == "step")
        # The speed does not include the first step, which waits for compilation.
        about = last["tokens"] / last["step"] * whole / last["tokens_per_second"] / 60
        note += f"; {steps:,} of {whole:,} steps, all take about {about:.1f} minutes"
    end(result["seconds"], note)


def length_of(recipe: str | Path) -> dict[str, float]:
    """Return `steps` and `minutes` of a recipe, those that are set."""
    train = yaml.safe_load(Path(recipe).read_text("utf-8"))["train"]
    return {key: train[key] for key in ("steps", "minutes") if train.get(key) is not None}


def make_pairs(settings: list[str]) -> None:
    """Make preference pairs of the mistakes of the fine-tuned model, unless they are made."""
    begin("pairs")
    started, last = time.monotonic(), PAIRS / "validation.jsonl"
    note = f"in {PAIRS}"
    if not last.exists() or last.stat().st_mtime < (CHAT / "checkpoints").stat().st_mtime:
        lengths = [one.partition("=")[2] for one in settings if one.startswith("train.steps=")]
        most = [str(QUESTIONS_PER_STEP * int(length)) for length in lengths[-1:]]
        made = output([sys.executable, "recipes/stdlib_pairs.py", str(CHAT), str(PAIRS), *most])
        note = f"{made.replace(chr(10), '; ')}, {note}"
    end(time.monotonic() - started, note)


def compare() -> None:
    """Print the scores of the three models, and their first answers."""
    begin("compare")
    started = time.monotonic()
    words = [*WORKHORSE, "evaluate", str(BASE), "--data", "stdlib", "--limit", str(QUESTIONS)]
    for name in REWARDS:
        words += ["--reward", f"recipes/stdlib_answers.py:{name}"]
    for run in (CHAT, PREFERENCES):
        words += ["--beside", str(run)]
    table = output(words)
    end(time.monotonic() - started, f"{QUESTIONS} held-out questions")
    print(f"\n{table}")


def begin(stage: str) -> None:
    """Print the first part of a stage's line. On a terminal, `output` writes after it."""
    print(f"{stage:11}", end=f"  {SAVE}", flush=True)


def end(seconds: float, result: str) -> None:
    """Print the rest of a stage's line."""
    minutes, seconds = divmod(round(seconds), 60)
    print(f"{RESTORE}{minutes}:{seconds:02}  {result}", flush=True)


def output(words: list[str] | tuple[str, ...], given: str = "") -> str:
    """Run a command, and return its output. If it fails, print its last message and exit.

    Messages of the command go to the log. On a terminal the last one is also shown.
    """
    with LOG.open("a") as log, tempfile.TemporaryFile("w+") as printed:
        print("$", *words, file=log, flush=True)
        pipe = subprocess.PIPE
        with subprocess.Popen(words, stdin=pipe, stdout=printed, stderr=pipe, text=True) as running:
            assert running.stdin
            assert running.stderr
            with suppress(BrokenPipeError), running.stdin:
                running.stdin.write(given)
            for line in running.stderr:
                print(line, end="", file=log, flush=True)
                print(f"{RESTORE}{line.strip()[:60]}" if RESTORE else "", end="", flush=True)
        printed.seek(0)
        result = printed.read().strip()
    if running.returncode:
        print(f"\n{LOG.read_text().splitlines()[-1]}; see {LOG}", file=sys.stderr)
        sys.exit(running.returncode)
    return result


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; continue with {' '.join(sys.argv)}")
