"""Every model type compared with transformers: logits, caches, generation, and round trips."""

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.parity import reference
from tests.parity.all_cases import ALL, GROUPED, LONG
from workhorse.models.huggingface import MODEL_TYPES, family

BOUND = 1e-5
"""Bound on the largest difference, relative to the logits; float32 noise is 2.4e-6."""
EACH = [  # by default the first shape of each type
    pytest.param(model_type, options, id=f"{model_type}-{n}", marks=[pytest.mark.slow] if n else [])
    for model_type, cases in ALL.items()
    for n, options in enumerate(cases)
]
FIRST = [pytest.param(model_type, cases[0], id=model_type) for model_type, cases in ALL.items()]
PAST_8 = {"rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 8}
BY_LENGTH = [
    {"max_position_embeddings": 8, "rope_parameters": {"rope_type": "dynamic", **PAST_8}},
    {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "longrope", **PAST_8, **LONG}},
]


def test_every_model_type_has_cases() -> None:
    assert set(ALL) == set(MODEL_TYPES)
    assert all(len(cases) > 1 for cases in ALL.values())


@pytest.mark.parametrize(("model_type", "options"), EACH)
def test_parity(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """The round trip: read a directory, run the model, and write a directory."""
    pair = reference.make(model_type, options, tmp_path / "theirs")
    assert reference.full(pair) <= BOUND
    if not reference.depends_on_length(pair):
        assert reference.cached(pair) <= BOUND
    assert reference.ragged(pair) <= BOUND
    assert reference.written_back(pair, tmp_path / "ours") <= BOUND
    assert family(model_type).difference(pair.ours.config) is None


@pytest.mark.parametrize("options", BY_LENGTH, ids=["dynamic", "longrope"])
@torch.no_grad()
def test_rotations_that_depend_on_the_length(options: dict[str, Any], tmp_path: Path) -> None:
    """Test lengths within and beyond the original one: whole sequences, and cached tokens.

    Beyond it, cached keys keep their angles in the reference too.
    """
    pair = reference.make("llama", GROUPED | options, tmp_path)
    assert reference.depends_on_length(pair)
    tokens = pair.tokens[:, :14]
    for seq in (6, 14):
        expected = pair.theirs(tokens[:, :seq], use_cache=False).logits
        assert reference.relative(pair.ours(tokens[:, :seq]), expected) <= BOUND
    cache, past = pair.ours.new_cache(len(tokens), 14), None
    # transformers 5.24 renamed the argument
    renamed = "cache" in inspect.signature(pair.theirs.forward).parameters
    name = "cache" if renamed else "past_key_values"
    for part in tokens.split([6, *[1] * 8], dim=1):
        step = pair.theirs(part, **{name: past}, use_cache=True)
        past = step[name]
        assert reference.relative(pair.ours(part, cache=cache), step.logits) <= BOUND


@pytest.mark.parametrize(("model_type", "options"), FIRST)
def test_generations_are_the_same(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    pair = reference.make(model_type, options, tmp_path / "theirs")
    for beams in (1, 3):
        ours, theirs = reference.generations(pair, beams)
        assert ours == theirs


@pytest.mark.parametrize(("model_type", "options"), EACH)
def test_missing_keys_mean_what_they_mean_there(model_type: str, options: dict[str, Any]) -> None:
    assert reference.keys_with_wrong_defaults(model_type, options) == []
