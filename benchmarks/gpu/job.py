"""The main job: a recipe is trained on the device, evaluated, sampled from and talked to."""

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
"""Of the demo's recipe on a CPU."""
TEXT, VARIABLE = Path("data/tinyshakespeare.txt"), "TINYSHAKESPEARE"
"""Where tiny Shakespeare is looked for: there, or where that environment variable says."""
FEW_STEPS = ("train.steps=5", "train.schedule.warmup_steps=1", "train.eval_every=null")
PROMPTS = ("def ", "class ", "import ")
PATIENCE = 400.0
"""Seconds for one command."""


def checks(setting: Setting) -> Iterator[Check]:
    """The steps of the job, and tiny Shakespeare if its text is here."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "stdlib"
        yield Check("train", partial(_train, RECIPE, run, setting))
        yield Check("evaluate", partial(_evaluate, run, setting))
        yield Check("samples", partial(_samples, run, setting))
        yield Check("chat", partial(_chat, run, setting))
        yield Check("tiny Shakespeare", partial(_shakespeare, Path(folder) / "text", setting))


def _train(recipe: Path, out: Path, setting: Setting, *settings: str) -> Figures:
    """What a run comes to; the wall time is that of the whole process."""
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
    """Of all held-out text, in the number format that a device is given by default."""
    found = _said_by("evaluate", str(run), "--device", str(setting.device), "--compare-gzip")
    reached = found["bits_per_byte"] <= BITS_PER_BYTE
    return found | {"value": found["bits_per_byte"], "goal": BITS_PER_BYTE, "reached": reached}


def _samples(run: Path, setting: Setting) -> Figures:
    """Texts, which the same seed gives again."""
    model = workhorse.load(run, device=setting.device)
    options = {"max_new_tokens": 60, "temperature": 0.8, "seed": 1}
    together = [one.text for one in model.generate_batch(PROMPTS, **options)]
    again = [one.text for one in model.generate_batch(PROMPTS, **options)]
    texts = dict(zip(PROMPTS, together, strict=True))
    return {"texts": texts, "value": together == again, "goal": True, "reached": together == again}


def _chat(run: Path, setting: Setting) -> Figures:
    """One turn, with a model that was not trained to chat."""
    model = workhorse.load(run, device=setting.device)
    conversation = model.chat(max_new_tokens=40, seed=1)
    deltas = list(conversation.reply("Write a function that adds two numbers."))
    return {"reply": "".join(delta.text for delta in deltas), "tokens": len(deltas)}


def _shakespeare(out: Path, setting: Setting) -> Figures:
    """The recipe that is measured beside nanoGPT's on a CPU."""
    text = Path(os.environ.get(VARIABLE, TEXT))
    if not text.is_file():
        return {"left_out": f"{text} is not there; name the text in {VARIABLE}"}
    found = _train(SHAKESPEARE, out, setting, f"data.corpus.path={text.resolve()}")
    reached = found["validation_loss"] <= NANOGPT_LOSS
    return found | {"value": found["validation_loss"], "goal": NANOGPT_LOSS, "reached": reached}


def _said_by(*words: str) -> Figures:
    """What a verb prints as JSON.

    Raises:
        RuntimeError: it failed; with the end of what it said.
    """
    command = [sys.executable, "-m", "workhorse", *words, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode:
        raise RuntimeError(f"{words[0]} ended with {done.returncode}: {done.stderr[-800:]}")
    return json.loads(done.stdout)
