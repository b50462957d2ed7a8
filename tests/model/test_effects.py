"""The library does not change global state of its process."""

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
import os, signal, sys
import torch

def facts():
    handlers = {number: signal.getsignal(number) for number in signal.Signals}
    ours = {name: value for name, value in os.environ.items() if "TORCHINDUCTOR" not in name}
    return ours, handlers, dict(vars(torch.nn.functional)), kept()

def kept():
    from workhorse.native import allocator
    return allocator._users

before = facts()
import workhorse
from workhorse.run import train
from workhorse.train import Recipe
from workhorse.memory.step_memory import PlannedStep, step_memory

states = []
recipe = Recipe.from_yaml(open(sys.argv[1]).read())
train(recipe, "run", on_event=lambda event: states.append(kept()))
model = workhorse.load("run")
model.generate("ab", max_new_tokens=3)
step_memory(PlannedStep(model.config, recipe.train, torch.device("meta")))
assert facts() == before, [a == b for a, b in zip(facts(), before)]
assert set(states) == {0}, states
"""


RECIPE = """
name: tiny
model: {preset: gpt2, d_model: 16, n_layers: 1, blocks: {main: {attention: {n_heads: 2}}}}
tokenizer: {kind: bytes}
data: {corpus: {kind: text, path: corpus.txt}}
train: {steps: 2, batch_size: 2, seq_len: 16, samples: {every: 1, max_new_tokens: 3}}
"""


@pytest.mark.slow  # takes seconds: starts a separate process
def test_environment_signals_functions_and_allocator_stay(tmp_path: Path) -> None:
    (tmp_path / "corpus.txt").write_text("to be or not to be; " * 200)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    done = subprocess.run(
        [sys.executable, "-c", CODE, "recipe.yaml"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
