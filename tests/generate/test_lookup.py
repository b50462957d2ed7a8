"""Guesses looked up in the sequence itself."""

from typing import cast

import pytest

from workhorse.generate import GenerationConfig
from workhorse.generate.request import Guess, Request
from workhorse.generate.sampling import Chooser
from workhorse.generate.speculation import PromptLookup


@pytest.mark.parametrize(
    ("text", "n", "guess"),
    [
        ([1, 2, 3, 4, 1, 2], 3, (3, 4, 1)),
        ([1, 2, 3, 1, 2, 4, 1, 2], 2, (4, 1)),  # the latest occurrence
        ([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], 1, (9,)),  # the longest match first
        ([5, 5, 5], 4, (5, 5, 5, 5)),  # the guess continues with itself
        ([1, 2, 1, 2], 5, (1, 2, 1, 2, 1)),
        ([1, 2, 3, 1], 2, ()),
        ([1], 2, ()),
    ],
)
def test_lookup(text, n, guess):
    def row(tokens):
        return Request(0, tokens, GenerationConfig(), 0, 99, tokenizer=None)

    def guessed(lookup, rows, most):
        return lookup.propose(rows, most, cast(Chooser, None))

    assert guessed(PromptLookup(), [row(text)], [n]) == [Guess(guess)]
    lookup = PromptLookup()  # reads token by token, beside another request that leaves
    growing, other = row(text[:1]), row([1])
    for token in text[1:]:
        guessed(lookup, [other, growing], [0, 1])
        growing.tokens.append(token)
    lookup.leave(other)
    assert guessed(lookup, [growing], [n]) == [Guess(guess)]
