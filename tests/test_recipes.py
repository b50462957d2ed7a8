"""The recipes in `recipes/`, and the scripts beside them."""

import argparse
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from workhorse.config.base import read_yaml
from workhorse.train import Recipe
from workhorse.train.recipe.recipe import written_over

FOLDER = Path(__file__).parent.parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_read_and_says_what_it_reached(file):
    fields = read_yaml(file)
    base = fields
    while "init" in base:  # the run of another recipe
        base = read_yaml(file.with_name(f"{Path(base['init']).name}.yaml"))
    if base is not fields:
        model = {**base["model"], "vocab_size": 4096, "max_seq_len": base["train"]["seq_len"]}
        fields = written_over(fields, model, base["tokenizer"])
    recipe = Recipe.from_dict(fields)
    assert recipe.name == file.stem
    assert re.search(r"\d", recipe.description), "no measured result"


KNOWN = "`Lock` is a class of `threading`. A lock that is not reentrant."


@pytest.mark.parametrize(
    ("answer", "form", "name", "kind", "module"),
    [
        (KNOWN, 1, 1, 1, 1),
        (" `Lock` is a class of `threading`. Another sentence.\n", 1, 1, 1, 1),
        ("`Luck` is a function of `thread`. A sentence.", 1, 0, 0, 0),
        ("`Lock` is a class of `threading`. It is a lock it is a lock it is a", 0, 1, 1, 1),
        (
            "`Lock` is a class of `threading`. It is the lock that is the lock that is the lock.",
            0,
            1,
            1,
            1,
        ),
        ("`Lock` is a class of `threading`. LOLOLOCK.", 0, 1, 1, 1),
        ("`Lock` is a class of `threading`. A lock that is", 0, 1, 1, 1),
        ("`Lock` is a class of `threading`.", 0, 0, 0, 0),
        ("Lock is a class of threading. A lock.", 0, 0, 0, 0),
        ("", 0, 0, 0, 0),
    ],
)
def test_rewards_of_answers_about_the_standard_library(answer, form, name, kind, module):
    spec = importlib.util.spec_from_file_location("stdlib_answers", FOLDER / "stdlib_answers.py")
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    given = [""], [answer], [KNOWN]
    assert answers.form(*given) == [form]
    assert [answers.name(*given), answers.kind(*given), answers.module(*given)] == [
        [name],
        [kind],
        [module],
    ]
    assert answers.reward(*given) == [(form + name + kind + module) / 4]


@pytest.mark.parametrize(
    ("begun", "variables", "settings"),
    [
        ("", [], "train.steps=1469 train.minutes=5"),
        ("", ["STEPS=50"], "train.steps=50"),
        ("  steps: 400\n  minutes: null\n", [], "--resume train.steps=400 train.minutes=null"),
        ("  steps: 400\n", ["STEPS=50"], "--resume train.steps=400"),
    ],
)
def test_the_demo_is_bounded_and_a_begun_one_keeps_its_length(
    begun: str, variables: list[str], settings: str, tmp_path: Path
) -> None:
    shutil.copy(FOLDER.parent / "Makefile", tmp_path)
    shutil.copytree(FOLDER, tmp_path / "recipes")
    if begun:
        (tmp_path / "runs" / "stdlib-small").mkdir(parents=True)
        (tmp_path / "runs" / "stdlib-small" / "recipe.yaml").write_text(f"train:\n{begun}")
    for name in ("constraints.txt", "pyproject.toml", ".venv/.made", ".venv/.torch"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    (tmp_path / ".venv" / ".installed").touch()
    words = ["make", "--dry-run", "demo", *variables]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    command = " ".join(done.stdout.replace("\\\n", " ").partition(" evaluate")[0].split())
    assert settings in command
    assert command.count("train.steps=") == 1
    assert ("train.minutes=5" in command) == (not begun and not variables)


@pytest.mark.slow
def test_from_nothing_to_a_chat(tmp_path):
    """`make chat` with a tiny model: every stage, and the second call repeats none."""
    folder = shutil.copytree(FOLDER, tmp_path / "recipes")
    base = folder / "stdlib-small.yaml"
    fields = read_yaml(base)
    fields["model"]["d_model"] = 16
    fields["model"]["blocks"]["main"]["attention"]["n_heads"] = 2
    fields["model"]["blocks"]["main"]["feed_forward"]["d_ff"] = 16
    fields["tokenizer"]["vocab_size"] = 1024
    text = tmp_path / "text.txt"
    text.write_text((Path(argparse.__file__)).read_text())
    fields["data"]["corpus"] = {"kind": "text", "path": str(text)}
    base.write_text(json.dumps(fields))
    settings = [
        "train.steps=4",
        "train.schedule.warmup_steps=1",
        "train.samples=null",
        "train.batch_size=2",
    ]

    def chat() -> list[str]:
        command = [sys.executable, "recipes/chat.py", *settings]
        environment = {**os.environ, "PYTHONPATH": str(FOLDER.parent / "src")}
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr + (tmp_path / "runs" / "chat.log").read_text()
        return done.stdout.splitlines()

    lines = chat()
    stages = ["pretrain", "fine-tune", "pairs", "preferences", "compare"]
    assert [line.split()[0] for line in lines[:5]] == stages
    assert all(re.fullmatch(r"[a-z-]+ +\d+:\d\d  .+", line) for line in lines[:5])
    assert re.search(r"train: \d of 8 answers are wrong; validation: \d of 8", lines[2])
    runs = [f"runs/stdlib-{name}" for name in ("small", "chat", "preferences")]
    assert [line.split()[0] for line in lines[6:9]] == runs
    assert "> What is threading.Thread?" in lines
    made = (tmp_path / "runs" / "stdlib-pairs" / "train.jsonl").stat().st_mtime
    again = chat()
    assert again[6:] == lines[6:]  # the models are the same
    assert (tmp_path / "runs" / "stdlib-pairs" / "train.jsonl").stat().st_mtime == made
