"""The tokenizer report: counts that can be checked by hand."""

from collections.abc import Callable

import pytest

from workhorse.errors import WorkhorseError
from workhorse.tokenizers import CharactersConfig, Tokenizer, tokenizer_report, train_tokenizer

Trained = Callable[[str], Tokenizer]


def test_bytes_are_a_byte_each(trained: Trained) -> None:
    report = tokenizer_report(trained("bytes"), ["two words", "é"])
    assert (report.bytes, report.tokens, report.words, report.texts) == (11, 11, 3, 2)
    assert report.bytes_per_token == 1
    assert report.tokens_per_word == pytest.approx(11 / 3)
    assert report.used_share == pytest.approx(9 / 257)
    assert (report.unknown_rate, report.changed_documents, report.first_change) == (0, 0, None)


def test_unknown_characters_are_counted_and_shown() -> None:
    tokenizer = train_tokenizer(CharactersConfig(), ["abc "])
    report = tokenizer_report(tokenizer, ["ab", "abca xb abcabcabcabc", "xx"])
    assert report.unknown_tokens == 3
    assert report.unknown_rate == pytest.approx(3 / 24)
    assert report.changed_documents == 2
    assert report.first_change == ("'abca xb abcabcabcabc' -> 'abca <|unk|>b abcabcabcabc'")


def test_a_subword_tokenizer_is_shorter_than_bytes(trained: Trained) -> None:
    report = tokenizer_report(trained("bpe"), ["The lazy dog jumps over the quick fox.\n"])
    assert report.bytes_per_token > 2
    assert report.changed_documents == 0


def test_nothing_to_measure_is_refused(trained: Trained) -> None:
    with pytest.raises(WorkhorseError, match="the corpus has no text"):
        tokenizer_report(trained("bytes"), [])
    with pytest.raises(WorkhorseError, match="2 bytes of text have no tokens"):
        tokenizer_report(trained("wordpiece"), ["\n "])
