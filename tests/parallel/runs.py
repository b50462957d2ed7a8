"""Small runs of `workhorse train`, in other processes or in this one."""

import hashlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from workhorse.train import read_metrics

MIXTURE = {
    "kind": "moe",
    "router": {"selection_bias": True},
    "n_experts": 4,
    "top_k": 2,
    "d_ff": 16,
    "activation": "silu",
}
GATED = {"kind": "gated_mlp", "d_ff": 48, "activation": "silu"}


def fields(folder: Path, feed_forward: dict[str, Any], **settings: Any) -> dict[str, Any]:
    texts = folder / "texts"
    texts.mkdir(exist_ok=True)
    for number in range(12):
        lines = (f"{number} times {factor} is {number * factor}\n" for factor in range(60))
        (texts / f"{number}.txt").write_text("".join(lines))
    block = {
        "kind": "pre_norm",
        "norm": "rms_norm",
        "attention": {"n_heads": 4, "n_kv_heads": 2, "position": "rope"},
        "feed_forward": feed_forward,
        "dropout": 0.1,
    }
    train = {
        **{"steps": 6, "batch_size": 7, "seq_len": 16, "log_every": 1, "threads": 1},
        **{"checkpoint_every": 2, "schedule": {"kind": "constant"}},
    }
    return {
        "name": "tiny",
        "model": {
            "d_model": 32,
            "n_layers": 2,
            "blocks": {"main": block},
            "final_norm": "rms_norm",
            "head": {"tied": True},
        },
        "tokenizer": {"kind": "bytes"},
        "data": {"corpus": {"kind": "folder", "path": str(texts)}},
        "train": {**train, **settings},
        "parallel": {"reduction": {"kind": "exact", "logical_shards": 5}},
    }


def run(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "workhorse", "train", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, **options)


def state_of(folder: Path) -> dict[str, Any]:
    """The result of a finished run for bitwise comparison: weights, optimizer, metrics of steps."""
    checkpoint = max((folder / "checkpoints").iterdir())
    hashes = {
        name: hashlib.sha256((checkpoint / name).read_bytes()).hexdigest()
        for name in ("model.safetensors", "optimizer.safetensors")
    }
    timed = (
        "seconds",
        "tokens_per_second",
        "peak_fraction",
        "warming_up",
        "pass_seconds",
        "memory",
    )
    events = [
        {name: value for name, value in event.items() if name not in timed}
        for event in steps_of(folder)
    ]
    return {**hashes, "events": events, "validation": _validation(folder)}


def _validation(folder: Path) -> float:
    """The validation loss after the last step."""
    events = read_metrics(folder / "metrics.jsonl")
    return [event["loss"] for event in events if event["kind"] == "validation"][-1]


def steps_of(folder: Path) -> list[dict[str, Any]]:
    return [one for one in read_metrics(folder / "metrics.jsonl") if one["kind"] == "step"]


def begun(folder: Path, recipe: dict[str, Any], *more: str) -> tuple["subprocess.Popen[str]", Path]:
    """Start a run of two workers, wait for its first checkpoint, and return process and folder."""
    file, out = folder / "tiny.yaml", folder / "run"
    file.write_text(yaml.safe_dump(recipe))
    command = [sys.executable, "-m", "workhorse", "train", str(file), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--workers", "2", *more],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    until = time.monotonic() + 120
    while not list(out.glob("checkpoints/step-*")):
        assert time.monotonic() < until, "the run saved no checkpoint within two minutes"
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.05)
    return process, out
