"""Fixtures: a study that takes seconds, and a finished one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.train.conftest import MODEL
from workhorse.compare import Comparison, Study, compare

SMALLER = {**MODEL, "n_layers": 1}
FEED_FORWARD = "model.blocks.main.feed_forward"
GATED = {"kind": "gated_mlp", "d_ff": 32, "activation": "silu"}
PLAIN = {"kind": "mlp", "d_ff": 48, "activation": "gelu"}

MakeStudy = Callable[..., Study]


def study_fields(folder: Path) -> dict[str, Any]:
    """A study of two feed-forwards of equal size, with its corpus in a folder."""
    corpus = folder / "corpus.txt"
    corpus.write_text("".join(f"{number} and {number * 7}; " for number in range(400)))
    return {
        "name": "gates",
        "question": "Is a gate worth its weights?",
        "base": {
            "name": "tiny",
            "model": SMALLER,
            "tokenizer": {"kind": "bytes"},
            "data": {"corpus": {"kind": "text", "path": str(corpus)}},
            "train": {"steps": 40, "batch_size": 2, "seq_len": 16, "log_every": 1, "threads": 1},
        },
        "variants": {"gated": {}, "plain": {FEED_FORWARD: PLAIN}},
        "baseline": "plain",
        "budget": {"steps": 6, "parameters": True},
        "seeds": [1, 2],
    }


@pytest.fixture
def fields(tmp_path: Path) -> dict[str, Any]:
    return study_fields(tmp_path)


@pytest.fixture
def make_study(fields: dict[str, Any]) -> MakeStudy:
    """Return a function that makes a study with some fields changed."""

    def make(**changes: Any) -> Study:
        return Study.from_dict({**fields, **changes})

    return make


@pytest.fixture(scope="package")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Study, Comparison]:
    """A study with a learning rate search, run without interruption."""
    folder = tmp_path_factory.mktemp("finished")
    study = Study.from_dict({**study_fields(folder), "learning_rates": [1, 4], "contexts": [4, 16]})
    return study, compare(study, folder / "out")


def without_costs(results: dict[str, Any] | None) -> dict[str, Any]:
    """Results without the figures that differ in every measurement."""
    assert results is not None
    variants = {
        name: {key: value for key, value in one.items() if key != "cost"}
        for name, one in results["variants"].items()
    }
    return {**results, "variants": variants}
