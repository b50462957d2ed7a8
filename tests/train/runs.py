"""Helpers that read and compare the results of runs."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from workhorse.checkpoints import CheckpointStore
from workhorse.checkpoints.runs.manifest import manifest_of
from workhorse.errors import WorkhorseError
from workhorse.run import train
from workhorse.train import Recipe, read_metrics


def step_losses(out: Path) -> list[tuple[int, float]]:
    events = read_metrics(out / "metrics.jsonl")
    return [(event["step"], event["loss"]) for event in events if event["kind"] == "step"]


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    return CheckpointStore(out / "checkpoints").load(step).model


def assert_same_run(one: Path, other: Path, step: int = 12) -> None:
    assert step_losses(one) == step_losses(other)
    first, second = weights(one, step), weights(other, step)
    assert all(torch.equal(first[name], second[name]) for name in first)


def assert_reference_is_checked(recipe: Recipe, run: Path, name: str, missing: str) -> None:
    """Resume with other files of the reference, also in a run of a version without checksums."""
    file, folder = run / "reference" / name, max((run / "checkpoints").glob("step-*"))
    whole = file.read_bytes()
    changed = whole[:-1] + bytes([whole[-1] ^ 1])
    for other in (changed, whole[:-1], whole[:50], b""):
        file.write_bytes(other)
        with pytest.raises(WorkhorseError, match=r"reference differs from the one that the check"):
            train(recipe, run, resume=True)
    state = json.loads((folder / "state.json").read_text())
    assert len(state.pop("reference")) == 64
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "manifest.json").write_text(manifest_of(folder, int(folder.name[-8:])))
    for other in (whole[:-1], whole[:50], b""):
        file.write_bytes(other)
        with pytest.raises(WorkhorseError) as raised:
            train(recipe, run, resume=True)
        assert str(file) in str(raised.value)
        assert "\n" not in str(raised.value)
    file.write_bytes(whole)
    train(recipe, run, resume=True)
    shutil.rmtree(run / "reference")
    with pytest.raises(WorkhorseError, match=f"reference is missing, the {missing}"):
        train(recipe, run, resume=True)


def notices(told: list[dict[str, Any]]) -> list[str]:
    """Return the notices among a run's events, without the one about `train.execution`."""
    messages = [event["message"] for event in told if event["kind"] == "notice"]
    return [message for message in messages if not message.startswith("train: ")]
