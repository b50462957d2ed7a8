"""A resumed run is bitwise equal to an uninterrupted run."""

import errno
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.runs import assert_same_run, notices, weights
from workhorse.checkpoints import CheckpointStore, Disk, RunDirectory
from workhorse.errors import WorkhorseError
from workhorse.run import train
from workhorse.train import Recipe, read_metrics


@pytest.mark.parametrize(
    "optimizer", [{"kind": "adamw"}, {"kind": "adamw", "mean_dtype": "bfloat16"}, {"kind": "muon"}]
)
def test_resumed_run_is_bit_for_bit_the_uninterrupted_one(
    make_recipe, tmp_path: Path, optimizer: dict[str, str]
) -> None:
    fields = make_recipe(optimizer=optimizer, eval_every=4, keep=3).to_dict()
    fields["model"]["embedding"] = {"dropout": 0.2}  # random states matter
    recipe = Recipe.from_dict(fields)
    train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    torch.manual_seed(12345)
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    validations = [
        (event["step"], event["loss"])
        for out in ("whole", "resumed")
        for event in read_metrics(tmp_path / out / "metrics.jsonl")
        if event["kind"] == "validation"
    ]
    assert validations[:3] == validations[3:]
    optimizers = [
        (tmp_path / out / "checkpoints/step-00000012/optimizer.safetensors").read_bytes()
        for out in ("whole", "resumed")
    ]
    assert optimizers[0] == optimizers[1]


def test_a_bfloat16_run_saves_float32_weights_and_resumes_bit_for_bit(
    make_recipe, tmp_path: Path
) -> None:
    recipe = make_recipe(dtype="bfloat16", eval_every=4, keep=3, micro_batch_size=2)
    train(recipe, tmp_path / "whole")
    saved = weights(tmp_path / "whole", 12)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert any(not torch.equal(tensor, tensor.bfloat16().float()) for tensor in saved.values())
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    optimizers = [
        (tmp_path / out / "checkpoints/step-00000012/optimizer.safetensors").read_bytes()
        for out in ("whole", "resumed")
    ]
    assert optimizers[0] == optimizers[1]


def test_a_damaged_checkpoint_is_named_and_the_older_one_used(make_recipe, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "run")
    state = tmp_path / "run/checkpoints/step-00000012/state.json"
    state.write_text(state.read_text().replace("0", "1", 1))
    told: list[dict[str, Any]] = []
    train(make_recipe(), tmp_path / "run", resume=True, on_event=told.append)
    said = notices(told)
    assert len(said) == 1
    assert "step-00000012: state.json does not match its SHA-256" in said[0]
    assert next(event["step"] for event in told if event["kind"] == "start") == 8
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def test_more_steps_go_on_from_the_end(make_recipe, tmp_path: Path) -> None:
    schedule = {"kind": "constant"}
    train(make_recipe(schedule=schedule), tmp_path / "run")
    told: list[dict[str, Any]] = []
    more = make_recipe(steps=16, schedule=schedule, log_every=2)
    result = train(more, tmp_path / "run", resume=True, on_event=told.append)
    assert result.step == 16
    said = notices(told)
    assert said == [
        "train.steps changes from 12 to 16",
        "train.log_every changes from 1 to 2",
    ]
    assert RunDirectory(tmp_path / "run").recipe()["train"]["steps"] == 16
    train(make_recipe(steps=16, schedule=schedule), tmp_path / "whole")
    first, second = weights(tmp_path / "run", 16), weights(tmp_path / "whole", 16)
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("section", "key", "value", "named"),
    [
        ("train", "seq_len", 8, "train.seq_len changes from 16 to 8"),
        ("train", "seed", 3, "train.seed changes from 0 to 3"),
        ("train", "optimizer", {"kind": "adamw"}, "train.optimizer.kind changes from 'muon'"),
        ("model", "n_layers", 3, "model.n_layers changes from 2 to 3"),
        ("data", "packing", "documents", "data.packing changes from 'windows' to 'documents'"),
    ],
)
def test_another_run_under_the_same_name_is_refused(
    make_recipe, tmp_path: Path, *, section: str, key: str, value: Any, named: str
) -> None:
    train(make_recipe(), tmp_path / "run")
    fields = make_recipe().to_dict()
    fields[section][key] = value
    with pytest.raises(WorkhorseError, match=named):
        train(Recipe.from_dict(fields), tmp_path / "run", resume=True)


def test_changed_text_is_refused(make_recipe, corpus: Path, tmp_path: Path) -> None:
    train(make_recipe(), tmp_path / "run")
    corpus.write_text(corpus.read_text().replace("and", "or"))
    with pytest.raises(
        WorkhorseError, match=r"the data differs from .* the checkpoint of step 12 was"
    ):
        train(make_recipe(), tmp_path / "run", resume=True)


class FullDisk(Disk):
    """A disk with space for one checkpoint."""

    def __init__(self) -> None:
        self.writes = 0

    def fill(self, path: Path, slices: Any) -> None:
        self.writes += 1
        if self.writes == 4:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().fill(path, slices)


def test_a_full_disk_leaves_the_last_checkpoint_whole(make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(make_recipe(), tmp_path / "whole")
    store = CheckpointStore(out / "checkpoints", disk=FullDisk())
    with pytest.raises(
        WorkhorseError, match=r"step-00000008: No space left.*newest saved is step-00000004"
    ):
        train(make_recipe(), out, store=store)
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-00000004"]
    train(make_recipe(), out, resume=True)
    assert_same_run(tmp_path / "whole", out)


def test_fewer_checkpoints_are_kept_from_the_resume_on(make_recipe, tmp_path: Path) -> None:
    out = tmp_path / "run"
    train(make_recipe(keep=3), out)
    damaged = out / "checkpoints/step-00000012/manifest.json"
    damaged.write_text("")
    seen: list[list[int]] = []

    def look(event: dict[str, Any]) -> None:
        if event["kind"] == "start":  # before any step and any save
            seen.append(CheckpointStore(out / "checkpoints").steps())

    train(make_recipe(keep=1), out, resume=True, on_event=look)
    assert seen == [[12, 8]]  # 8 is the newest intact one
    assert CheckpointStore(out / "checkpoints").steps() == [12]


@pytest.mark.parametrize("removed", [False, True])
def test_a_run_folder_that_is_moved_ends_its_training(
    make_recipe, tmp_path: Path, removed: bool
) -> None:
    out, now = tmp_path / "run", tmp_path / "now"

    def move(event: dict[str, Any]) -> None:
        if event["kind"] == "checkpoint":
            out.rename(now)
            if removed:
                shutil.rmtree(now)

    expected = f"{out} was moved or removed during training; "
    if not removed:
        expected += (
            f"its last checkpoint is {now}/checkpoints/step-00000004: resume with workhorse "
        )
    with pytest.raises(WorkhorseError, match=re.escape(expected)):
        train(make_recipe(), out, on_event=move)
    assert not out.exists()
    if not removed:
        assert train(make_recipe(), now, resume=True).step == 12
