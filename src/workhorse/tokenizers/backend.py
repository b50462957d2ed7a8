"""Wraps tokenizers of the `tokenizers` library: loading, encoding, and one-line errors."""

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import tokenizers
from tokenizers import AddedToken

from workhorse.errors import WorkhorseError, shown

MAX_TOKEN_ID = 2**21
"""Largest token id that is accepted. Tables indexed by id would otherwise have no size limit."""

ORIGINAL = "use the original files, or another tokenizer"
"""The remedy in error messages about damaged tokenizers."""


def library_tokenizer(definition: str) -> tokenizers.Tokenizer:
    """Load a tokenizer of the `tokenizers` library, with truncation and padding turned off.

    Args:
        definition: content of a `tokenizer.json`.

    Raises:
        WorkhorseError: `definition` is not a `tokenizer.json`, or an id is above `MAX_TOKEN_ID`.
    """
    with library_errors("not a tokenizer.json", "use a file that the tokenizers library wrote"):
        backend = tokenizers.Tokenizer.from_str(definition)
    backend.no_truncation()
    backend.no_padding()
    if max(backend.get_vocab().values(), default=0) > MAX_TOKEN_ID:
        raise WorkhorseError(f"a token id is above {MAX_TOKEN_ID:,}; use the original file")
    return backend


def rules(part: Mapping[str, Any] | None) -> Iterator[Mapping[str, Any]]:
    """Yield the rules in a component of a `tokenizer.json` (normalizer, decoder, …) one by one.

    Sequences of rules are flattened. Nothing is yielded for None.
    """
    if part is None:
        return
    if part["type"] != "Sequence":
        yield part
        return
    for key in ("normalizers", "pretokenizers", "processors", "decoders"):
        for inner in part.get(key, ()):
            yield from rules(inner)


def add_tokens(backend: tokenizers.Tokenizer, tokens: Sequence[AddedToken]) -> None:
    """Add tokens to a tokenizer. The library normalises those with the flag `normalized`.

    Raises:
        WorkhorseError: the normalizer fails on a token.
    """
    with library_errors("the tokenizer fails on an added token", ORIGINAL):
        backend.add_tokens(list(tokens))


@contextmanager
def library_errors(fact: str, remedy: str) -> Iterator[None]:
    """Turn errors of the `tokenizers` library in a `with` block into one-line errors.

    The library raises plain `Exception`s, or panics in its Rust code, for example because of an
    endless regular expression. A panic is also printed on stderr.

    Args:
        fact: the beginning of the error message: what failed.
        remedy: the end of the error message: what to do.
    """
    try:
        yield
    except (WorkhorseError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split())[:200]
        raise WorkhorseError(f"{fact} ({reason}); {remedy}") from None


def ids_of(backend: tokenizers.Tokenizer, texts: Sequence[str]) -> list[list[int]]:
    """Encode several strings, without bos, eos or other added tokens.

    Raises:
        WorkhorseError: `texts` is not a list of strings; a string has a lone surrogate, which UTF-8
            cannot encode; or the tokenizer fails on a string, for example because it has no unk
            token.
    """
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        raise WorkhorseError(f"texts={shown(texts)} is not a list of strings; pass a list")
    texts = list(texts)
    for text in texts:
        if not isinstance(text, str):
            raise WorkhorseError(f"{shown(text)} is not a string; pass a str")
    with library_errors("the tokenizer fails on a string", ORIGINAL):
        try:
            found = backend.encode_batch_fast(texts, add_special_tokens=False)
        except TypeError:
            _check_texts(texts)
            raise
    return [encoding.ids for encoding in found]


def checked_ids(ids: Sequence[int], vocab_size: int) -> list[int]:
    """Return the ids as Python ints.

    Raises:
        WorkhorseError: an id is not an integer, or is outside `[0, vocab_size)`.
    """
    try:
        if isinstance(ids, bytes | bytearray):  # sequences of integers, but not token ids
            raise TypeError
        numbers = [operator.index(token) for token in ids]
    except TypeError:
        raise WorkhorseError(
            f"{shown(ids)} is not a list of integer token ids; pass ids returned by encode"
        ) from None
    for token in (min(numbers), max(numbers)) if numbers else ():
        if not 0 <= token < vocab_size:
            raise WorkhorseError(
                f"token id {shown(token)} is not in the vocabulary of {vocab_size}; "
                "decode with the tokenizer that made the ids"
            )
    return numbers


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise WorkhorseError(
                f"the string has a lone surrogate, {text[error.start]!r}, at character "
                f"{error.start}; read it with errors='replace', or encode its bytes"
            ) from None
