"""The tokenizer of the `tokenizers` library that a `tokenizer.json` describes, and its errors."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers
from tokenizers import AddedToken

from workhorse.errors import WorkhorseError, shown

MAX_TOKEN_ID = 2**21
"""Far more than any vocabulary; a table as long as a larger id could fill the memory."""

ORIGINAL = "give its files as they were made, or use another tokenizer"
"""The remedy for a tokenizer that is damaged."""


def library_tokenizer(definition: str) -> tokenizers.Tokenizer:
    """The library's tokenizer, without truncation and padding.

    Raises:
        WorkhorseError: this is not a `tokenizer.json`, or it has ids beyond `MAX_TOKEN_ID`.
    """
    with library_errors("not a tokenizer.json", "give a file that the tokenizers library wrote"):
        backend = tokenizers.Tokenizer.from_str(definition)
    backend.no_truncation()
    backend.no_padding()
    if max(backend.get_vocab().values(), default=0) > MAX_TOKEN_ID:
        raise WorkhorseError(f"token ids beyond {MAX_TOKEN_ID:,}; no vocabulary is that large")
    return backend


def rules(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """The rules of a part of a `tokenizer.json` (its normalizer, its decoder), one by one."""
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        for inner in part.get(key, ()):
            yield from rules(inner)


def add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens outside the vocabulary, each normalized if its flag says so.

    Raises:
        WorkhorseError: the normalizer fails at one.
    """
    with library_errors("the tokenizer fails at a token beside its vocabulary", ORIGINAL):
        backend.add_tokens(list(tokens))


@contextmanager
def library_errors(fact: str, remedy: str) -> Iterator[None]:
    """Turn the library's errors into one line: it raises bare `Exception`, or panics.

    A panic (of an endless regular expression, for one) is also printed on stderr.
    """
    try:
        yield
    except (WorkhorseError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise WorkhorseError(f"{fact} ({reason}); {remedy}") from None


def ids_of(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """The ids of several texts, without tokens before or after them.

    Raises:
        WorkhorseError: these are not texts; one holds half a surrogate pair, which UTF-8 cannot
            encode; or the tokenizer fails at one, such as without an unk token.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise WorkhorseError(f"several texts to encode are a list, not {shown(texts)}; give one")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise WorkhorseError(f"a text to encode is a str, not {shown(text)}; give a str")
    with library_errors("the tokenizer fails at a text", ORIGINAL):
        try:
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            _check_texts(texts)
            raise
    return [encoding.ids for encoding in found]


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """The same ids as Python ints.

    Raises:
        WorkhorseError: they are not whole numbers, or one is outside `[0, vocab_size)`.
    """
    try:
        if isinstance(ids, bytes | bytearray):  # integers too, but of another meaning
            raise TypeError
        numbers = [operator.index(token) for token in ids]
    except TypeError:
        raise WorkhorseError(
            f"token ids are whole numbers in a list, not {shown(ids)}; give what encode gave"
        ) from None
    for token in (min(numbers), max(numbers)) if numbers else ():
        if not 0 <= token < vocab_size:
            raise WorkhorseError(
                f"token id {token} is not in the vocabulary of {vocab_size}; "
                "decode with the tokenizer that made the ids"
            )
    return numbers


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise WorkhorseError(
                f"the text holds half a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}; read it with errors='replace', or encode its bytes"
            ) from None
