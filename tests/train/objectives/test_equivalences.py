"""Runs of every objective do not depend on how their work is scheduled.

Each objective trains a run of 20 steps and the same run with one setting changed. Settings that
divide the work differently may change the last bits of losses and weights, the others none.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import pytest
import torch
from torch import Tensor

from tests.parallel import forked
from tests.train.chats import chat, chat_tokenizer
from tests.train.conftest import MODEL
from tests.train.runs import weights
from workhorse.config.overrides import apply_overrides
from workhorse.run import train
from workhorse.train import Recipe, read_metrics

STEPS = 20
OBJECTIVES: dict[str, tuple[str, dict[str, Any]]] = {
    "next token": ("conversations", {"kind": "next_token"}),
    "z-loss": ("conversations", {"kind": "next_token", "z_loss": 0.01}),
    "DFT": ("conversations", {"kind": "next_token", "dft": True}),
    "distillation": ("conversations", {"kind": "distill", "beta": 0.5}),
    "DPO": ("pairs", {"kind": "dpo"}),
    "conservative DPO": ("pairs", {"kind": "dpo", "label_smoothing": 0.1}),
    "robust DPO": ("pairs", {"kind": "dpo", "loss": "robust", "label_smoothing": 0.1}),
    "hinge": ("pairs", {"kind": "dpo", "loss": "hinge"}),
    "IPO": ("pairs", {"kind": "dpo", "loss": "ipo", "per_token": True}),
    "DPO with SFT": ("pairs", {"kind": "dpo", "sft_weight": 0.5}),
    "ORPO": ("pairs", {"kind": "orpo"}),
    "SimPO": ("pairs", {"kind": "simpo"}),
    "reward": ("pairs", {"kind": "reward", "token": 3, "centre": 0.1}),
    "KTO": ("labels", {"kind": "kto"}),
    "REINFORCE": (
        "task",
        {"kind": "policy", "ratio": "none", "denominator": "constant", "max_length": 1},
    ),
    "PPO": ("task", {"kind": "policy", "clip_low": 0.2, "clip_high": 0.2}),
    "PPO with values": (
        "task",
        {"kind": "policy", "clip_low": 0.2, "clip_high": 0.2, "values": {"weight": 1.0}},
    ),
    "on-policy distillation": ("task", {"kind": "distill", "beta": 1.0}),
    "GRPO": ("task", {"kind": "policy", "denominator": "sequences", "clip_high": 0.2}),
    "Dr. GRPO": ("task", {"kind": "policy", "denominator": "constant", "max_length": 5}),
    "GSPO": ("task", {"kind": "policy", "ratio": "sequence", "denominator": "sequences"}),
    "CISPO": ("task", {"kind": "policy", "clip": "weight", "clip_high": 0.2}),
    "entropy": ("task", {"kind": "policy", "entropy_weight": 0.1}),
}
"""The rows and the options of each objective."""

NO_EFFECT = [
    *("name=other", "description=other", "train.log_every=3", "train.checkpoint_every=3"),
    *("train.keep=9", "train.eval_every=3", "train.eval_batches=1"),
]
ROUNDED: dict[str, list[str]] = {
    "passes of 2 rows": ["train.micro_batch_size=2"],
    "passes of 4 rows": ["train.micro_batch_size=4"],
    "more padding": ["train.seq_len=40"],
    "activations computed again": ["train.activation_checkpointing=true"],
    "PyTorch": ["train.execution=reference"],
    "plain attention": ["train.kernel=eager"],
    "two threads": ["train.threads=2"],
}
DIVIDED = ("data", "shard", "context")

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data of each kind, a tokenizer, and a teacher."""
    folder = tmp_path_factory.mktemp("equivalences")
    chat_tokenizer().save(folder / "tokenizer")
    records: dict[str, list[dict[str, Any]]] = {"conversations": [], "pairs": [], "labels": []}
    for n in range(48):
        prompt, right = chat(f"{n}+1?"), [{"role": "assistant", "content": str(n + 1)}]
        wrong = [{"role": "assistant", "content": str(n) * (1 + n % 2)}]
        turns = chat(f"{n}+1?", str(n + 1), *(("sure?", "yes") if n % 2 else ()))
        records["conversations"].append({"messages": turns})
        records["pairs"].append({"prompt": prompt, "chosen": right, "rejected": wrong})
        answer = wrong if n % 3 == 0 else right
        records["labels"].append({"prompt": prompt, "completion": answer, "label": n % 3 != 0})
    for rows, lines in records.items():
        (folder / f"{rows}.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    train(recipe(folder, "next token", ["train.steps=4", "train.seed=7"]), folder / "teacher")
    return folder


def recipe(folder: Path, objective: str, changes: list[str]) -> Recipe:
    rows, options = OBJECTIVES[objective]
    fields: dict[str, Any] = {
        "name": "tiny",
        "model": {**MODEL, "max_seq_len": 40},
        "tokenizer": {"kind": "file", "path": str(folder / "tokenizer")},
        "data": {"packing": "padded"},
        "train": {
            "steps": STEPS,
            "batch_size": 8,
            "micro_batch_size": 8,
            "seq_len": 28,
            "log_every": 1,
            "checkpoint_every": 10,
            "eval_every": None,
            "schedule": {"kind": "constant"},
            "optimizer": {"kind": "adamw", "learning_rate": 1e-3},
            "objective": dict(options),
        },
    }
    if rows == "task":
        fields["data"]["corpus"] = {"kind": "task", "task": "copy", "difficulty": 3, "count": 60}
        reward = {"kind": "answer", "partial": True}
        rollouts: dict[str, Any] = {"completions": 4, "max_new_tokens": 5, "reward": reward}
        if options["kind"] == "distill":
            rollouts |= {"completions": 1, "reward": None}
        if "values" in options:
            rollouts["baseline"] = "none"
        fields["train"]["rollouts"] = rollouts
    else:
        fields["data"]["corpus"] = {
            "kind": "conversations",
            "path": str(folder / f"{rows}.jsonl"),
            "rows": rows,
            "validation_fraction": 0.2,
        }
    if options["kind"] == "distill":
        fields["train"]["objective"]["teacher"] = str(folder / "teacher")
    return Recipe.from_dict(apply_overrides(fields, changes))


class Result(NamedTuple):
    losses: list[float]
    weights: Tensor

    @classmethod
    def of(cls, run: Path) -> Self:
        events = [one for one in read_metrics(run / "metrics.jsonl") if one["kind"] == "step"]
        found = [event["loss"] for event in events if event["step"] % 3 == 0]
        assert len(found) == STEPS // 3
        last = weights(run, STEPS)
        return cls(found, torch.cat([last[name].flatten() for name in sorted(last)]))


@pytest.fixture(scope="module")
def plain(folder: Path) -> Callable[[str], Result]:
    """A function that returns the result of an objective without changes."""

    @cache
    def run(objective: str) -> Result:
        train(recipe(folder, objective, []), folder / objective)
        return Result.of(folder / objective)

    return run


def assert_same(found: Result, expected: Result) -> None:
    assert found.losses == expected.losses
    assert torch.equal(found.weights, expected.weights)


def assert_close(found: Result, expected: Result) -> None:
    """Steps of AdamW move a weight by up to 0.001, so a single other step would be seen."""
    assert found.losses == pytest.approx(expected.losses, rel=1e-5, abs=1e-6)
    torch.testing.assert_close(found.weights, expected.weights, rtol=0, atol=1e-4)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_settings_that_change_no_bit(
    folder: Path, tmp_path: Path, plain: Callable[[str], Result], objective: str
) -> None:
    train(recipe(folder, objective, NO_EFFECT), tmp_path / "run")
    assert_same(Result.of(tmp_path / "run"), plain(objective))


@pytest.mark.parametrize("setting", ROUNDED)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_settings_that_divide_the_work_differently(
    folder: Path, tmp_path: Path, plain: Callable[[str], Result], objective: str, setting: str
) -> None:
    train(recipe(folder, objective, ROUNDED[setting]), tmp_path / "run")
    assert_close(Result.of(tmp_path / "run"), plain(objective))


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_resumed_run(
    folder: Path, tmp_path: Path, plain: Callable[[str], Result], objective: str
) -> None:
    train(recipe(folder, objective, ["train.steps=7"]), tmp_path / "run")
    train(recipe(folder, objective, []), tmp_path / "run", resume=True)
    assert_same(Result.of(tmp_path / "run"), plain(objective))


@pytest.mark.parametrize("way", DIVIDED)
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_two_processes(
    folder: Path, tmp_path: Path, plain: Callable[[str], Result], objective: str, way: str
) -> None:
    if way != "data" and OBJECTIVES[objective][0] == "task":
        pytest.skip("rollouts need whole weights on each process")
    file = tmp_path / "tiny.yaml"
    file.write_text(recipe(folder, objective, []).to_yaml())
    words = [str(file), "--out", str(tmp_path / "run"), "train.micro_batch_size=4"]
    forked.train([*words, f"parallel.{way}=2"], 2, tmp_path / "said")
    assert_close(Result.of(tmp_path / "run"), plain(objective))
