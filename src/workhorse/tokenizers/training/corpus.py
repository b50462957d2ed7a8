"""Texts for a trainer: checked, cut, counted, and read twice if needed.

Memory is bounded by one text and the trainer's own data (each distinct word once).
"""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO

from workhorse.errors import WorkhorseError, shown, warn_caller

MAX_CHARACTERS = 2**16
"""Longer texts are cut at line ends: the library keeps about 20 bytes per character at work."""

MAX_RUN = 2048
"""Longer runs without a space, or of spaces, are cut: the library's trainers may take the run for
one word, on which BPE takes quadratic time, and Unigram overflows the stack (100,000 letters)."""
_RUN = re.compile(rf"\S{{{MAX_RUN}}}|\s{{{MAX_RUN}}}")
_SPACE, _NO_SPACE = re.compile(r"\s"), re.compile(r"\S")

Progress = Callable[[int, int | None], None]


def pieces_of_texts(texts: Iterable[str], progress: Progress | None = None) -> Iterator[str]:
    """The texts, long ones and long runs cut; `progress(done, None)` is called with the bytes read.

    Raises:
        WorkhorseError: there are no texts, or one is not a str or cannot be encoded in UTF-8.
    """
    if isinstance(texts, str | bytes):
        raise WorkhorseError(f"{shown(texts)} is one text; give a list of texts")
    if not isinstance(texts, Iterable):
        raise WorkhorseError(f"a corpus is a list of texts, not {shown(texts)}; give one")
    done, warned = 0, False
    for text in texts:
        if not isinstance(text, str):
            raise WorkhorseError(f"a text of the corpus is a str, not {shown(text)}; give a str")
        for piece in _cut(text):
            if len(piece) == MAX_RUN and not warned and _RUN.fullmatch(piece):
                warned = True
                warn_caller(
                    f"the corpus has {MAX_RUN:,} characters without a space, or only spaces: "
                    f"{shown(piece[:20])}…; such runs are cut to train the tokenizer"
                )
            done += _utf8_bytes(piece)
            yield piece
            if progress is not None:
                progress(done, None)
    if not done:
        raise WorkhorseError("the corpus holds no text (0 bytes); give files with text in them")


def _cut(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        stop = start + MAX_CHARACTERS
        if stop < len(text):
            stop = text.rfind("\n", start, stop) + 1 or stop
        stop = min(stop, len(text))
        for run in _RUN.finditer(text, start, stop) if _may_hold_run(text, start, stop) else ():
            if run.start() > start:
                yield text[start : run.start()]
            yield run[0]
            start = run.end()
        if stop > start:
            yield text[start:stop]
        start = stop


def _may_hold_run(text: str, start: int, stop: int) -> bool:
    """False if every block of half the length is mixed; much faster than to search for runs."""
    half = MAX_RUN // 2
    return any(
        not (_SPACE.search(text, at, at + half) and _NO_SPACE.search(text, at, at + half))
        for at in range(start, stop - half + 1, half)
    )


def _utf8_bytes(text: str) -> int:
    try:
        return len(text.encode())
    except UnicodeEncodeError as error:
        raise WorkhorseError(
            f"a text of the corpus holds half a surrogate pair, {text[error.start]!r}; "
            "read it with errors='replace'"
        ) from None


@contextmanager
def counted(texts: Iterable[str]) -> Iterator["CountedCorpus"]:
    """The texts in a temporary file, which is deleted afterwards."""
    with tempfile.TemporaryFile() as file:
        yield CountedCorpus(file, texts)


class CountedCorpus:
    """Texts kept in a file, with their characters counted; read it as often as needed."""

    def __init__(self, file: IO[bytes], texts: Iterable[str]) -> None:
        self.characters: Counter[str] = Counter()
        self._file = file
        for text in texts:
            self.characters.update(text)
            data = text.encode()
            file.write(len(data).to_bytes(4, "little") + data)

    def __iter__(self) -> Iterator[str]:
        self._file.seek(0)
        while size := self._file.read(4):
            yield self._file.read(int.from_bytes(size, "little")).decode()

    def frequent(self, coverage: float, limit: int) -> list[str]:
        """The commonest characters that make up a share of the corpus, in code point order.

        Args:
            coverage: share in (0, 1].
            limit: the most characters.
        """
        wanted = coverage * self.characters.total()
        kept: list[str] = []
        for character, count in sorted(self.characters.items(), key=lambda c: (-c[1], c[0])):
            if len(kept) == limit or wanted <= 0:
                break
            kept.append(character)
            wanted -= count
        return sorted(kept)

    def keeping(self, characters: Iterable[str], substitute: str = " ") -> Iterator[str]:
        """The texts with every other character replaced, so that no piece is learned across it."""
        gone = dict.fromkeys(map(ord, self.characters.keys() - set(characters)), substitute)
        return (text.translate(gone) if gone else text for text in self)
