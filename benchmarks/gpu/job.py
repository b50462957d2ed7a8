"""The main job: train a recipe on the device, evaluate it, sample from it and chat with it."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import workhorse
from benchmarks.gpu.block import Check, Figures, Setting
from benchmarks.shakespeare import NANOGPT_LOSS
from benchmarks.shakespeare import RECIPE as SHAKESPEARE

RECIPE = SHAKESPEARE.with_name("stdlib-small.yaml")
BITS_PER_BYTE = 1.27
"""Bits per byte of the demo's recipe on a CPU."""
TEXT, VARIABLE = Path("data/tinyshakespeare.txt"), "TINYSHAKESPEARE"
"""Default path of tiny Shakespeare, and the environment variable that overrides it."""
FEW_STEPS = ("train.steps=5", "train.schedule.warmup_steps=1", "train.eval_every=null")
PROMPTS = ("def ", "class ", "import ")
PATIENCE = 400.0
"""Time limit in seconds for one command."""


def checks(setting: Setting) -> Iterator[Check]:
    """The steps of the job, and tiny Shakespeare if its file is present."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "stdlib"
        yield Check("train", partial(_train, RECIPE, run, setting))
        yield Check("evaluate", partial(_evaluate, run, setting))
        yield Check("samples", partial(_samples, run, setting))
        yield Check("chat", partial(_chat, run, setting))
        yield Check("tiny Shakespeare", partial(_shakespeare, Path(folder) / "text", setting))


def _train(recipe: Path, out: Path, setting: Setting, *settings: str) -> Figures:
    """The result of a training run; the wall time is the time of the whole process."""
    settings = (f"train.device={setting.device}", *settings)
    if setting.tiny:
        settings += FEW_STEPS
    started = time.perf_counter()
    result = _said_by("train", str(recipe), "--out", str(out), *settings)
    wall = time.perf_counter() - started
    keys = ("steps", "tokens", "parameters", "skipped_steps")
    figures = {key: result[key] for key in (*keys, "loss", "validation_loss", "bits_per_byte")}
    return {"wall_seconds": wall, "loop_seconds": result["seconds"]} | figures


def _evaluate(run: Path, setting: Setting) -> Figures:
    """Evaluation on all held-out documents, in the default dtype of the device."""
    found = _said_by("evaluate", str(run), "--device", str(setting.device), "--compare-gzip")
    reached = found["bits_per_byte"] <= BITS_PER_BYTE
    return found | {"value": found["bits_per_byte"], "goal": BITS_PER_BYTE, "reached": reached}


def _samples(run: Path, setting: Setting) -> Figures:
    """Completions, which must be the same again with the same seed."""
    model = workhorse.load(run, device=setting.device)
    options = {"max_new_tokens": 60, "temperature": 0.8, "seed": 1}
    together = [one.text for one in model.generate_batch(PROMPTS, **options)]
    again = [one.text for one in model.generate_batch(PROMPTS, **options)]
    texts = dict(zip(PROMPTS, together, strict=True))
    return {"texts": texts, "value": together == again, "goal": True, "reached": together == again}


def _chat(run: Path, setting: Setting) -> Figures:
    """One turn of chat, with a model that was not trained to chat."""
    model = workhorse.load(run, device=setting.device)
    conversation = model.chat(max_new_tokens=40, seed=1)
    deltas = list(conversation.reply("Write a function that adds two numbers."))
    return {"reply": "".join(delta.text for delta in deltas), "tokens": len(deltas)}


def _shakespeare(out: Path, setting: Setting) -> Figures:
    """The recipe that is compared with nanoGPT's on a CPU."""
    text = Path(os.environ.get(VARIABLE, TEXT))
    if not text.is_file():
        return {"left_out": f"{text} does not exist; set {VARIABLE} to the file"}
    found = _train(SHAKESPEARE, out, setting, f"data.corpus.path={text.resolve()}")
    reached = found["validation_loss"] <= NANOGPT_LOSS
    return found | {"value": found["validation_loss"], "goal": NANOGPT_LOSS, "reached": reached}


def _said_by(*words: str) -> Figures:
    """The JSON output of a command.

    Raises:
        RuntimeError: it failed; the message has the end of its stderr.
    """
    command = [sys.executable, "-m", "workhorse", *words, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr[-800:]}")
    return json.loads(done.stdout)
