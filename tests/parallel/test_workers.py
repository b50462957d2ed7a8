"""`workhorse train` in several processes on this machine: bitwise identical runs."""

import errno
import json
import os
import signal
import socket
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.parallel import forked
from tests.parallel.runs import GATED, MIXTURE, begun, fields, run, state_of, steps_of
from workhorse.errors import WorkhorseError
from workhorse.parallel.processes import environment
from workhorse.run import train
from workhorse.train import Recipe, read_metrics


def test_any_number_of_workers_gives_the_same_bits(tmp_path: Path) -> None:
    """A mixture with one worker equals a run that starts with three and resumes with two."""
    recipe = fields(tmp_path, MIXTURE, balance_rate=0.001, balance_loss=0.01)
    train(Recipe.from_dict(recipe), tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    walk = tmp_path / "walk"
    for steps, workers in ((4, 3), (6, 2)):
        more = ["--resume"] if walk.exists() else []
        words = [str(file), f"train.steps={steps}", "--out", str(walk), *more]
        said = forked.train(words, workers, tmp_path / "said")
        assert "rounded differently" not in said
    assert state_of(walk) == state_of(tmp_path / "one")


def test_bfloat16_in_micro_batches(tmp_path: Path) -> None:
    recipe = fields(tmp_path, GATED, dtype="bfloat16", micro_batch_size=1)
    train(Recipe.from_dict(recipe), tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    words = [str(file), "--out", str(tmp_path / "two"), "--json"]
    said = forked.train(words, 2, tmp_path / "said")
    assert json.loads(said.splitlines()[-1])["step"] == 6
    assert state_of(tmp_path / "two") == state_of(tmp_path / "one")


def test_the_fast_reduction_differs_by_rounding_alone(tmp_path: Path) -> None:
    """A large eps is set, because AdamW would amplify gradients that are only rounding errors."""
    recipe = fields(tmp_path, GATED, optimizer={"kind": "adamw", "eps": 1e-3})
    recipe["parallel"] = {}
    recipe["model"]["blocks"]["main"]["dropout"] = 0.0
    train(Recipe.from_dict(recipe), tmp_path / "one")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    forked.train([str(file), "--out", str(tmp_path / "two")], 2, tmp_path / "said")
    for one, other in zip(*(steps_of(tmp_path / name) for name in ("one", "two")), strict=True):
        assert other["loss"] == pytest.approx(one["loss"], rel=1e-6)
        assert other["grad_norm"] == pytest.approx(one["grad_norm"], rel=1e-6)


def test_a_signal_ends_all_after_one_step(tmp_path: Path) -> None:
    process, out = begun(tmp_path, fields(tmp_path, GATED, steps=100_000, checkpoint_every=5))
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143, said
    assert "Traceback" not in said
    assert "closing signal" not in said  # a log line of PyTorch's agent
    *_, checkpoint, end = read_metrics(out / "metrics.jsonl")
    assert (checkpoint["kind"], end["kind"], end["reason"]) == ("checkpoint", "end", "SIGTERM")
    assert checkpoint["step"] == end["step"]


def test_a_killed_worker_costs_the_others_nothing(tmp_path: Path) -> None:
    """All workers restart, and the result is bitwise identical to a single process."""
    process, out = begun(
        tmp_path, fields(tmp_path, GATED, steps=40, checkpoint_every=5), "--max-restarts", "1"
    )
    os.kill(_worker(process.pid), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert "restart 1 of all processes, because one had failed" in said
    assert "Traceback" not in said
    starts = [one["step"] for one in read_metrics(out / "metrics.jsonl") if one["kind"] == "start"]
    assert len(starts) == 2
    assert starts[1] > 0
    train(Recipe.from_dict(fields(tmp_path, GATED, steps=40)), tmp_path / "one")
    assert state_of(out) == state_of(tmp_path / "one")


def test_workers_save_and_end_when_what_started_them_is_gone(tmp_path: Path) -> None:
    """The workers shard the weights and save them together."""
    recipe = fields(tmp_path, GATED, steps=100_000, batch_size=8, checkpoint_every=5)
    process, out = begun(tmp_path, {**recipe, "parallel": {"shard": 2}})
    process.kill()
    _, said = process.communicate(timeout=120)  # until the workers exit: they inherit its pipes
    assert "Traceback" not in said
    *_, checkpoint, end = read_metrics(out / "metrics.jsonl")
    assert (checkpoint["kind"], end["kind"], end["reason"]) == ("checkpoint", "end", "SIGTERM")
    assert checkpoint["step"] == end["step"]


def _worker(parent: int) -> int:
    """The id of the child process with rank 1."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    ranks = {
        pid: dict(
            pair.split("=", 1)
            for pair in Path(f"/proc/{pid}/environ").read_text().split("\0")
            if "=" in pair
        ).get("RANK")
        for pid in children
    }
    return next(int(pid) for pid, rank in ranks.items() if rank == "1")


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (
            {"data": 2},
            "parallel needs 2 processes, but only 1 is running; start 2 with workhorse",
        ),
        ({"data": 8}, "parallel: data=8 is more than train.batch_size=7"),
        ({"shard": 2}, "parallel: shard=2 does not divide train.batch_size=7"),
        (
            {"shard": 2, "reduction": {"kind": "exact", "logical_shards": 5}},
            "parallel: shard=2 does not divide reduction.logical_shards=5",
        ),
        ({"context": 3}, "parallel: context=3 does not divide train.seq_len=16; choose a divisor"),
        ({"data": 3, "expert": 2}, "parallel: expert=2 does not divide data=3; choose a divisor"),
        (
            {"context": 2, "reduction": "exact"},
            "parallel: context=2 is not supported with reduction=exact, which needs undivided seq",
        ),
        (
            {"reduction": "exact"},
            "parallel: reduction.logical_shards=8 is more than train.batch_size=7",
        ),
        (
            {"reduction": {"kind": "exact", "logical_shards": 2}, "data": 3},
            "parallel: reduction.logical_shards=2 is less than data=3, but each process needs a",
        ),
        ({"patience": 1e9}, "parallel.patience: 1000000000.0 is too large"),
        ({"reduction": "slow"}, "parallel.reduction: unknown kind 'slow'; known: exact, fast"),
        (
            {"reduction": {"kind": "fast", "logical_shards": 4}},
            "parallel.reduction: unknown key 'logical_shards'",
        ),
    ],
)
def test_what_cannot_be_divided_is_refused(
    tmp_path: Path, parallel: dict[str, Any], said: str
) -> None:
    with pytest.raises(WorkhorseError) as refused:
        train(Recipe.from_dict({**fields(tmp_path, GATED), "parallel": parallel}), tmp_path / "run")
    assert said in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_a_mistake_of_several_workers_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(fields(tmp_path, GATED)))
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("something else")
    words = [str(file), "--out", str(tmp_path / "taken"), "--workers", "2"]
    found = run([*words, "--max-restarts", "3"])
    assert found.returncode == 2
    (line,) = found.stderr.splitlines()
    assert "is not empty and not a run" in line


def test_what_every_worker_refuses_is_told_by_one(tmp_path: Path) -> None:
    recipe = fields(tmp_path, GATED, steps=1)
    train(Recipe.from_dict(recipe), tmp_path / "run")
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(recipe))
    words = [str(file), "--out", str(tmp_path / "run"), "--resume", "model.d_model=64"]
    (line,) = forked.train(words, 2, tmp_path / "said", code=2).splitlines()
    assert "model.d_model" in line


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE='two' in the environment is not a number"),
        ({"WORLD_SIZE": "9" * 5000}, "WORLD_SIZE='9999.*… in the environment is not a number"),
        ({"WORLD_SIZE": "٢"}, "WORLD_SIZE='٢' in the environment is not a number"),
        (
            {"WORLD_SIZE": "2", "RANK": "2"},
            "RANK=2 in the environment is not less than WORLD_SIZE=2",
        ),
        ({"WORLD_SIZE": "0"}, "RANK=0 in the environment is not less than WORLD_SIZE=0"),
    ],
    ids=["a word", "5,000 digits", "Arabic digits", "a rank above the world size", "none"],
)
def test_an_environment_without_sense_is_refused(
    environment: dict[str, str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(WorkhorseError, match=said):
        train(Recipe.from_dict(fields(tmp_path, GATED)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_an_address_that_cannot_be_resolved_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error comes at once; PyTorch itself would retry for ten minutes."""
    monkeypatch.setenv("MASTER_ADDR", "no such place")  # not a valid name: no DNS query is sent
    with pytest.raises(WorkhorseError, match=r"MASTER_ADDR='no such place' .* cannot be resolved"):
        environment.check_address(patience=0)


def test_a_machine_without_a_loopback_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.check_loopback()

    def refuse(*_: object) -> None:
        raise OSError(errno.ENETUNREACH, os.strerror(errno.ENETUNREACH))

    monkeypatch.setattr(socket, "create_connection", refuse)
    with pytest.raises(WorkhorseError, match=r"at localhost .*unreachable.*; enable the loopback"):
        environment.check_loopback()
