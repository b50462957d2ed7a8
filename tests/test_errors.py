"""Formatting of values in error messages."""

import numpy
import pytest
import torch

from workhorse.errors import shown


def test_a_long_text_is_shown_in_one_short_line() -> None:
    assert shown("a\nb") == r"'a\nb'"
    assert len(shown("x" * 10_000)) < 100


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("a\nb  c", r"'a\nb  c'"),
        (numpy.ones((2, 2), dtype=int), "array([[1, 1], [1, 1]])"),
        (torch.nn.Sequential(torch.nn.ReLU()), "Sequential( (0): ReLU() )"),
        ("x" * 100, f"'{'x' * 79}…"),
        ([10**5000], "a very large list"),
    ],
)
def test_a_value_is_shown_in_one_line(value: object, text: str) -> None:
    assert shown(value) == text
