"""Values as messages quote them, and arguments that are paths."""

from pathlib import Path

import numpy
import pytest
import torch

from workhorse.errors import WorkhorseError, shown, to_path


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
    ],
)
def test_a_value_is_shown_in_one_line(value: object, text: str) -> None:
    assert shown(value) == text


def test_an_argument_that_can_name_no_file() -> None:
    assert to_path("a/b", "a folder is a path") == Path("a/b")
    with pytest.raises(WorkhorseError, match=r"^a folder is a path, not 3; give it as a text"):
        to_path(3, "a folder is a path")
    with pytest.raises(WorkhorseError, match=r"^a folder is a path, and 'a\\x00' can be none; "):
        to_path("a\0", "a folder is a path")
