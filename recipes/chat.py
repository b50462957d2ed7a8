"""From nothing to a chat: pretrain, fine-tune, learn from preferences, compare, chat.

    python recipes/chat.py                     # the same as make chat
    python recipes/chat.py train.steps=10      # a setting for all three recipes

Each stage is a command that also works alone. The commands and their messages are in runs/chat.log.
A finished stage is not repeated, and an interrupted run is resumed.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

RUNS = Path("runs")
BASE, CHAT, PREFERENCES = (RUNS / f"stdlib-{name}" for name in ("small", "chat", "preferences"))
PAIRS = RUNS / "stdlib-pairs"
LOG = RUNS / "chat.log"
REWARDS = ("form", "name", "kind", "module")
QUESTIONS = 20
"""Number of held-out questions to compare the models on."""
EXAMPLE = "What is threading.Thread?"
WORKHORSE = (sys.executable, "-m", "workhorse")


def main(settings: list[str]) -> None:
    """Run all stages."""
    RUNS.mkdir(exist_ok=True)
    LOG.write_text("")
    train("pretrain", BASE, settings)
    train("fine-tune", CHAT, settings)
    make_pairs()
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
    words = [
        *WORKHORSE,
        "train",
        f"recipes/{run.name}.yaml",
        *settings,
        "--out",
        str(run),
        "--json",
    ]
    result = json.loads(output([*words, *["--resume"] * (run / "recipe.yaml").exists()]))
    end(result["seconds"], f"held-out loss {result['validation_loss']:.4f}, {run}/report.html")


def make_pairs() -> None:
    """Make preference pairs of the mistakes of the fine-tuned model, unless they are made."""
    begin("pairs")
    started, last = time.monotonic(), PAIRS / "validation.jsonl"
    note = f"in {PAIRS}"
    if not last.exists() or last.stat().st_mtime < (CHAT / "checkpoints").stat().st_mtime:
        made = output([sys.executable, "recipes/stdlib_pairs.py", str(CHAT), str(PAIRS)])
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
    """Print the first part of a stage's line."""
    print(f"{stage:11}", end="  ", flush=True)


def end(seconds: float, result: str) -> None:
    """Print the rest of a stage's line."""
    minutes, seconds = divmod(round(seconds), 60)
    print(f"{minutes}:{seconds:02}  {result}", flush=True)


def output(words: list[str] | tuple[str, ...], given: str = "") -> str:
    """Run a command, and return what it prints. If it fails, print its last message and exit."""
    with LOG.open("a") as log:
        print("$", *words, file=log, flush=True)
        pipe = subprocess.PIPE
        done = subprocess.run(words, input=given, stdout=pipe, stderr=log, text=True, check=False)
    if done.returncode:
        print(f"\n{LOG.read_text().splitlines()[-1]}; see {LOG}", file=sys.stderr)
        sys.exit(done.returncode)
    return done.stdout.strip()


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        sys.exit(f"\ninterrupted; continue with {' '.join(sys.argv)}")
