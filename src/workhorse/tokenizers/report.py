"""Measuring a tokenizer on held-out text."""

import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.tokenizer import Tokenizer
from workhorse.tokenizers.training import Progress, pieces_of_texts

_WORD = re.compile(r"\S+")


@dataclass(frozen=True, slots=True)
class TokenizerReport:
    """How well a tokenizer suits some texts."""

    vocab_size: int
    fingerprint: str
    texts: int
    bytes: int
    """UTF-8 bytes of the texts."""
    words: int
    """Runs of characters other than white space."""
    tokens: int
    bytes_per_token: float
    """Higher is shorter; 1 for a byte tokenizer."""
    tokens_per_word: float
    unknown_tokens: int
    unknown_rate: float
    """Share of the tokens that are unk; 0 where bytes can spell everything."""
    used_share: float
    """Share of the vocabulary that occurs at all."""
    changed_texts: int
    """Texts that `decode(encode(text))` changes."""
    first_change: str | None
    """The first difference, as `'before' -> 'after'`."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def tokenizer_report(
    tokenizer: Tokenizer, texts: Iterable[str], *, progress: Progress | None = None
) -> TokenizerReport:
    """Measure a tokenizer on texts it was not trained on. Long texts are cut at line ends.

    Raises:
        WorkhorseError: there is no text, or text without a single token.
    """
    n_texts = n_bytes = n_words = n_tokens = n_unknown = n_changed = 0
    used: set[int] = set()
    first_change = None
    for text in pieces_of_texts(texts, progress):
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
            f"{n_bytes} bytes of text made no token; give texts with words in them"
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
        changed_texts=n_changed,
        first_change=first_change,
    )


def _difference(before: str, after: str) -> str:
    """The first place where two texts differ, with a little of what follows."""
    at = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b), -1)
    start = max(at if at >= 0 else min(len(before), len(after)), 10) - 10
    return f"{before[start : start + 30]!r} -> {after[start : start + 30]!r}"
