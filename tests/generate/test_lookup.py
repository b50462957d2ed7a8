"""What is guessed from the text itself."""

import pytest

from workhorse.generate import GenerationConfig
from workhorse.generate.lookup import PromptLookup
from workhorse.generate.row import Guess, Row


@pytest.mark.parametrize(
    ("text", "n", "guess"),
    [
        ([1, 2, 3, 4, 1, 2], 3, (3, 4, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, (4, 1)),  # the latest occurrence
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, (9,)),  # the longest one first
        ([5, 5, 5], 4, (5, 5, 5, 5)),  # on into what is being guessed
        ([1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),
        ([1, 2, 3, 1], 2, ()),
        ([1], 2, ()),
    ],
)
def test_lookup(text, n, guess):
    def row(tokens):
        request = GenerationConfig()
        return Row(0, tokens, 99, request, tokenizer=None, seed=0)

    assert PromptLookup(1).propose([row(text)], [n], None) == [Guess(guess)]
    growing = PromptLookup(2)  # read bit by bit, beside another text
    for end in range(1, len(text)):
        growing.propose([row([1]), row(text[:end])], [0, 1], None)
    growing.select_rows([1])
    assert growing.propose([row(text)], [n], None) == [Guess(guess)]
