"""Helpers that read and compare the results of runs."""

from pathlib import Path
from typing import Any

import torch

from workhorse.checkpoints import CheckpointStore
from workhorse.train import read_metrics


def step_losses(out: Path) -> list[tuple[int, float]]:
    events = read_metrics(out / "metrics.jsonl")
    return [(event["step"], event["loss"]) for event in events if event["kind"] == "step"]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return CheckpointStore(out / "checkpoints").load(step).model


def assert_same_run(one: Path, other: Path, step: int = 12) -> None:
    assert step_losses(one) == step_losses(other)
    first, second = weights(one, step), weights(other, step)
    assert all(torch.equal(first[name], second[name]) for name in first)


def notices(told: list[dict[str, Any]]) -> list[str]:
    """Return the notices among a run's events, without the one about `train.execution`."""
    messages = [event["message"] for event in told if event["kind"] == "notice"]
    return [message for message in messages if not message.startswith("train: ")]
