"""Masks, compared with the definition written out for every pair."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workhorse.nn.attention.masks import AttentionPattern, Placement, hides_something, visible

patterns = st.builds(
    AttentionPattern,
    causal=st.just(True),
    window=st.none() | st.integers(1, 6),
    chunk=st.none() | st.integers(1, 6),
) | st.just(AttentionPattern(causal=False))
positions = st.lists(st.integers(-1, 9), min_size=1, max_size=8)


@given(patterns, positions, positions)
def test_the_mask_is_its_definition(
    pattern: AttentionPattern, queries: list[int], keys: list[int]
) -> None:
    mask = visible(pattern, Placement(torch.tensor([queries]), torch.tensor([keys])))
    assert mask.shape == (1, 1, len(queries), len(keys))
    for row, i in enumerate(queries):
        for column, j in enumerate(keys):
            expected = i >= 0 and j >= 0
            if pattern.causal:
                expected = expected and j <= i
            if pattern.window is not None:
                expected = expected and i - j < pattern.window
            if pattern.chunk is not None:
                expected = expected and i // pattern.chunk == j // pattern.chunk
            assert mask[0, 0, row, column].item() is expected, (i, j)


@given(patterns, st.lists(st.integers(0, 2), min_size=6, max_size=6))
def test_documents_do_not_see_each_other(pattern: AttentionPattern, documents: list[int]) -> None:
    at = torch.arange(6)[None]
    alone = visible(pattern, Placement(at, at))
    mask = visible(pattern, Placement(at, at, documents=torch.tensor([documents])))
    for i in range(6):
        for j in range(6):
            same = documents[i] == documents[j]
            assert mask[0, 0, i, j].item() is (alone[0, 0, i, j].item() and same)


@pytest.mark.parametrize(
    ("pattern", "reach"),
    [
        (AttentionPattern(), None),
        (AttentionPattern(window=3), 3),
        (AttentionPattern(chunk=4), 4),
        (AttentionPattern(window=3, chunk=4), 3),
    ],
)
def test_reach(pattern: AttentionPattern, reach: int | None) -> None:
    assert pattern.reach == reach


@given(patterns, st.integers(1, 10))
def test_nothing_within_the_reach_is_lost(pattern: AttentionPattern, length: int) -> None:
    """For positions 0 … length - 1, `within` removes only limits that have no effect."""
    at = torch.arange(length)[None]
    shorter = pattern.within(length)
    assert torch.equal(visible(pattern, Placement(at, at)), visible(shorter, Placement(at, at)))
    if pattern.reach is not None and pattern.reach >= length:
        assert shorter.reach is None


@given(patterns, st.integers(1, 8))
def test_no_mask_is_left_out_that_hides_something(pattern: AttentionPattern, seq: int) -> None:
    at = torch.arange(seq)[None]
    plain = visible(AttentionPattern(causal=pattern.causal), Placement(at, at))
    for place in (Placement(at, at, aligned=True), Placement(at[:, -1:], at, last=True)):
        if hides_something(pattern, place):
            continue
        rows = slice(None) if place.aligned else slice(-1, None)
        assert torch.equal(visible(pattern, place), plain[:, :, rows])
