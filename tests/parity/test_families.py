"""Every model type beside transformers: logits, caches, generations, and the way there and back."""

from pathlib import Path
from typing import Any

import pytest

from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse.models.huggingface import MODEL_TYPES, family

BOUND = 1e-5
"""Of the largest difference, relative to the logits' scale; float32's own noise is 2.4e-6."""
EACH = [
    pytest.param(model_type, options, id=f"{model_type}-{n}")
    for model_type, cases in ALL.items()
    for n, options in enumerate(cases)
]
FIRST = [pytest.param(model_type, cases[0], id=model_type) for model_type, cases in ALL.items()]


def test_every_model_type_has_cases() -> None:
    assert set(ALL) == set(MODEL_TYPES)
    assert all(len(cases) > 1 for cases in ALL.values())


@pytest.mark.parametrize(("model_type", "options"), EACH)
def test_parity(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The whole way: out of a directory, through the model, and back into one."""
    pair = reference.make(model_type, options, tmp_path / "theirs")
    assert reference.full(pair) <= BOUND
    if not reference.depends_on_length(pair):
        assert reference.cached(pair) <= BOUND
    assert reference.ragged(pair) <= BOUND
    assert reference.written_back(pair, tmp_path / "ours") == 0.0
    assert family(model_type).difference(pair.ours.config) is None


@pytest.mark.parametrize(("model_type", "options"), FIRST)
def test_generations_are_the_same(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    pair = reference.make(model_type, options, tmp_path / "theirs")
    for beams in (1, 3):
        ours, theirs = reference.generations(pair, beams)
        assert ours == theirs


@pytest.mark.parametrize(("model_type", "options"), EACH)
def test_missing_keys_mean_what_they_mean_there(model_type: str, options: dict[str, Any]) -> None:
    assert reference.keys_with_wrong_defaults(model_type, options) == []
