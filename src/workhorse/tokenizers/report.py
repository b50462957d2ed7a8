"""Measures a tokenizer on held-out text."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.tokenizer import Tokenizer
from workhorse.tokenizers.training import Progress, split_documents

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """Measurements of a tokenizer on a set of documents."""

    vocab_size: int
    fingerprint: str
    texts: int
    bytes: int
    """Number of UTF-8 bytes of the documents."""
    words: int
    """Number of words, separated by white space."""
    tokens: int
    bytes_per_token: float
    """Compression: higher means fewer tokens. It is 1 for a byte tokenizer."""
    tokens_per_word: float
    unknown_tokens: int
    unknown_rate: float
    """Fraction of the tokens that are the unknown token; 0 for tokenizers with byte tokens."""
    used_share: float
    """Fraction of the vocabulary that occurs in the documents."""
    changed_documents: int
    """Number of documents that `decode(encode(text))` changes."""
    first_change: str | None
    """The first change by `decode(encode(text))`, as `'before' -> 'after'`; None if none."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tokenizer_report(
    tokenizer: Tokenizer, texts: Iterable[str], *, progress: Progress | None = None
) -> TokenizerReport:
    """Measure a tokenizer on documents that it was not trained on.

    Long documents are cut at line ends, and each part counts as a document.

    Raises:
        WorkhorseError: the documents have no text, or no tokens.
    """
    n_texts = n_bytes = n_words = n_tokens = n_unknown = n_changed = 0
    used: set[int] = set()
    first_change = None
    for text in split_documents(texts, progress):
        ids = tokenizer.encode(text)
        back = tokenizer.decode(ids)
        n_texts += 1
        n_bytes += len(text.encode())
        n_words += sum(1 for _ in _WORD.finditer(text))
        n_tokens += len(ids)
        n_unknown += tokenizer.count_unknown(ids)
        used.update(ids)
        if back != text:
            n_changed += 1
            first_change = first_change or _difference(text, back)
    if not n_tokens:
        raise WorkhorseError(
            f"{n_bytes} bytes of text have no tokens; use documents with words in them"
        )
    return TokenizerReport(
        vocab_size=tokenizer.vocab_size,
        fingerprint=tokenizer.fingerprint,
        texts=n_texts,
        bytes=n_bytes,
        words=n_words,
        tokens=n_tokens,
        bytes_per_token=n_bytes / n_tokens,
        tokens_per_word=n_tokens / max(n_words, 1),
        unknown_tokens=n_unknown,
        unknown_rate=n_unknown / n_tokens,
        used_share=len(used) / tokenizer.vocab_size,
        changed_documents=n_changed,
        first_change=first_change,
    )


def _difference(before: str, after: str) -> str:
    """Show the first difference of two strings with a few characters around it."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), -1)
    start = max(at if at >= 0 else min(len(before), len(after)), 10) - 10
    return f"{before[start : start + 30]!r} -> {after[start : start + 30]!r}"
