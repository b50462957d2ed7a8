"""Trains a tokenizer of any algorithm from a stream of documents.

Memory is bounded by one text and the trainer's own data (each distinct word once).

The trainers are the `tokenizers` library's. This module determines their input (how a text is
split, which characters count) and makes the result the same on every run. Byte-level BPE is
deterministic by itself; the others are given all characters in a fixed order, because the library
numbers characters inside words, and breaks ties between rare ones, in the order of a hash table.
"""

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import IO, Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from workhorse.errors import WorkhorseError, shown, warn_caller
from workhorse.tokenizers.config import (
    SPACE,
    BpeConfig,
    ByteFallbackBpeConfig,
    BytesConfig,
    CharactersConfig,
    FileConfig,
    TokenizerConfig,
    UnigramConfig,
    WordPieceConfig,
)
from workhorse.tokenizers.control import guarded
from workhorse.tokenizers.files import load_tokenizer
from workhorse.tokenizers.pieces import BYTE_ALPHABET
from workhorse.tokenizers.tokenizer import Tokenizer

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


CHARACTER_STEP = 1e-4
"""The step of the scores that the library gives, in random order, to characters it must keep."""
DECIMALS = 4
"""Decimals to which scores (natural logarithms of probabilities) are rounded: they differ by less
than 1e-10 from run to run, because they are summed in a random order."""


def stable_vocabulary(vocab: Iterable[tuple[str, float | None]]) -> list[tuple[str, float]]:
    """Pieces with their scores, without what differs between two runs of the library's trainer.

    Characters that no longer pay for themselves but must stay get `lowest, lowest + 1e-4, ...` in
    random order: they are put in code point order. Then scores are rounded, and pieces sorted by
    score and code points.

    Raises:
        WorkhorseError: pieces without a score, as all are where the library found no text to count.
    """
    found = dict(vocab)
    scores = {piece: score for piece, score in found.items() if score is not None}
    if len(scores) < len(found):
        raise WorkhorseError(
            "the corpus holds nothing that unigram can learn from (only NULs, or invisible "
            "characters); give texts with words in them"
        )
    scores.update(_reordered(_kept_characters(scores)))
    rounded = ((piece, round(score, DECIMALS)) for piece, score in scores.items())
    return sorted(rounded, key=lambda entry: (-entry[1], entry[0]))


def _kept_characters(scores: dict[str, float]) -> dict[str, float]:
    """The characters whose scores continue the lowest score in equal steps."""
    lowest = min(scores.values(), default=0.0)
    characters = sorted((score, piece) for piece, score in scores.items() if len(piece) == 1)
    kept: dict[str, float] = {}
    following = 0
    for score, character in characters:
        steps = (score - lowest) / CHARACTER_STEP
        if round(steps) > following:
            break  # a gap: what comes now was scored by its frequency
        if abs(steps - round(steps)) < 1e-3:  # noqa: PLR2004 (above the noise, below a step)
            kept[character] = score
            following = round(steps) + 1
    return kept


def _reordered(kept: dict[str, float]) -> dict[str, float]:
    return dict(zip(sorted(kept), sorted(kept.values()), strict=True))


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], *, progress: Progress | None = None
) -> Tokenizer:
    """Learn a tokenizer from texts, in bounded memory.

    The same texts in the same order give the same tokenizer, byte for byte, whatever the process
    or the number of threads: exactly so for all kinds but Unigram, whose scores the library sums in
    random order. They are rounded far above that noise; see docs/tokenizers.md for what was seen.

    The vocabulary is smaller than asked for where the texts hold too little to fill it;
    `missing_tokens` tells.

    Args:
        config: which algorithm, how many tokens. A `FileConfig` loads, a `BytesConfig` learns
            nothing; neither reads `texts`.
        texts: read once. Kinds that count characters first keep a copy in a temporary file.
        progress: told `(bytes read, None)` while reading.

    Raises:
        WorkhorseError: no text at all or one text instead of several, text that is not UTF-8, a
            file that is no tokenizer, another thing than a config.
    """
    if isinstance(config, FileConfig):
        return load_tokenizer(config.path)
    if isinstance(config, BytesConfig):
        return _bytes(config)
    if type(config) not in _TRAINING:
        raise WorkhorseError(
            f"a tokenizer is trained from a config such as BpeConfig(vocab_size=4096), not "
            f"{shown(config)}; tokenizer_config makes one of a dict"
        )
    return _TRAINING[type(config)](config, pieces_of_texts(texts, progress))


def missing_tokens(config: TokenizerConfig, tokenizer: Tokenizer) -> int:
    """How many tokens a trained tokenizer has fewer than its config asks for."""
    if isinstance(config, FileConfig | BytesConfig | CharactersConfig):
        return 0
    return config.vocab_size - tokenizer.vocab_size


def _bpe(config: BpeConfig, pieces: Iterable[str]) -> Tokenizer:
    words = pre_tokenizers.Split(Regex(byte_level_pattern(config.digits)), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=list(config.special.names),
        initial_alphabet=list(BYTE_ALPHABET),
        show_progress=False,
    )
    splitter = pre_tokenizers.Sequence([words, as_bytes])
    model = _learn(models.BPE(), splitter, trainer, pieces, config.fixed_tokens)
    backend = tokenizers.Tokenizer(_bpe_model(model))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, config)


def byte_level_pattern(digits: int) -> str:
    """The splitting rule of byte-level BPE, after cl100k (tiktoken) and Llama 3.

    No token crosses from a word to its neighbour. Against GPT-2's rule: contractions in any case,
    digits in short groups (a number is not a word to be memorised), a word may take any one
    character before it along (`(self`, `_name`), and line ends are kept together, with punctuation
    before them, which shortens code. Marks count as letters, so that words of Indic scripts and
    decomposed accents are not torn.
    """
    return (
        r"'(?i:[sdmt]|ll|ve|re)"
        r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
        rf"|\p{{N}}{{1,{digits}}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+"
        r"|\s+(?!\S)"
        r"|\s+"
    )


def _byte_fallback_bpe(config: ByteFallbackBpeConfig, pieces: Iterable[str]) -> Tokenizer:
    with counted(map(_visible_spaces, pieces)) as corpus:
        alphabet = _alphabet(corpus, config.character_coverage, _room(config), always=SPACE)
        trainer = trainers.BpeTrainer(
            vocab_size=config.vocab_size,
            min_frequency=config.min_frequency,
            special_tokens=list(config.fixed_tokens),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        texts = corpus.keeping(alphabet, substitute=SPACE)
        splitter = _space_splitter(config.digits)
        model = _learn(models.BPE(), splitter, trainer, texts, config.fixed_tokens)
    backend = tokenizers.Tokenizer(_bpe_model(model, byte_fallback=True))
    backend.normalizer = _space_normalizer(config.prefix_space)
    backend.pre_tokenizer = splitter
    backend.decoder = _space_decoder(config.prefix_space)
    return _finished(backend, config)


def _unigram(config: UnigramConfig, pieces: Iterable[str]) -> Tokenizer:
    with counted(map(_visible_spaces, pieces)) as corpus:
        alphabet = _alphabet(corpus, config.character_coverage, _room(config), always=SPACE)
        trainer = trainers.UnigramTrainer(
            vocab_size=config.vocab_size - len(config.fixed_tokens) + 1,
            special_tokens=[config.unk],
            unk_token=config.unk,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        texts = corpus.keeping(alphabet, substitute=SPACE)
        splitter = _space_splitter(config.digits)
        model = _learn(models.Unigram(), splitter, trainer, texts, config.fixed_tokens)
    learned = stable_vocabulary(model["vocab"][1:])
    fixed = [(token, 0.0) for token in config.fixed_tokens]
    backend = tokenizers.Tokenizer(
        models.Unigram(fixed + learned, unk_id=0, byte_fallback=config.byte_fallback)
    )
    backend.normalizer = _space_normalizer(config.prefix_space)
    backend.pre_tokenizer = splitter
    backend.decoder = _space_decoder(config.prefix_space)
    return _finished(backend, config, unk=config.unk)


def _wordpiece(config: WordPieceConfig, pieces: Iterable[str]) -> Tokenizer:
    normalizer = normalizers.BertNormalizer(lowercase=config.lowercase, strip_accents=False)
    splitter = pre_tokenizers.BertPreTokenizer()
    with counted(map(normalizer.normalize_str, pieces)) as corpus:
        alphabet = _alphabet(corpus, config.character_coverage, _room(config) // 2)
        # A character inside a word is a token of its own, `##c`, which the library would number in
        # the order of a hash table. Listed as fixed tokens, they are numbered in this order.
        inside = [
            f"##{character}"
            for character in alphabet
            if len(splitter.pre_tokenize_str(f"a{character}a")) == 1
        ]
        trainer = trainers.WordPieceTrainer(
            vocab_size=config.vocab_size,
            special_tokens=[*config.fixed_tokens, *inside],
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        )
        texts = corpus.keeping(alphabet)
        model = _learn(models.WordPiece(), splitter, trainer, texts, config.fixed_tokens)
    backend = tokenizers.Tokenizer(models.WordPiece(vocab=model["vocab"], unk_token=config.unk))
    backend.normalizer = normalizer
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.WordPiece(cleanup=False)
    return _finished(backend, config, unk=config.unk)


def _characters(config: CharactersConfig, pieces: Iterable[str]) -> Tokenizer:
    fixed = (config.unk, *config.special.names)
    with counted(pieces) as corpus:
        room = len(corpus.characters) if config.vocab_size is None else config.vocab_size
        if config.vocab_size is not None:
            room -= len(fixed)
        alphabet = corpus.frequent(1.0, room)
    vocab = {token: number for number, token in enumerate((*fixed, *alphabet))}
    # A BPE without merges is what maps characters to ids fastest.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=config.unk))
    backend.decoder = decoders.Fuse()
    return _finished(backend, config, unk=config.unk)


def _bytes(config: BytesConfig) -> Tokenizer:
    vocab = {character: value for value, character in enumerate(BYTE_ALPHABET)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, config)


def _learn(
    model: models.Model,
    splitter: pre_tokenizers.PreTokenizer,
    trainer: Any,
    texts: Iterable[str],
    fixed: tuple[str, ...],
) -> dict[str, Any]:
    """The trained model in the form of a `tokenizer.json`.

    The name of a fixed token in the corpus must not be learned: the library would merge its parts
    into the same id.
    """
    student = tokenizers.Tokenizer(model)
    student.pre_tokenizer = guarded(splitter, fixed)  # pyright: ignore[reportAttributeAccessIssue]
    student.train_from_iterator(texts, trainer)
    return json.loads(student.to_str())["model"]


def _finished(
    backend: tokenizers.Tokenizer,
    config: Any,
    unk: str | None = None,
) -> Tokenizer:
    names = (*((unk,) if unk else ()), *config.special.names)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    special = config.special
    roles = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": unk}
    return Tokenizer(backend.to_str(), roles)


def _bpe_model(model: dict[str, Any], byte_fallback: bool = False) -> models.BPE:
    merges = [(left, right) for left, right in model["merges"]]
    return models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=byte_fallback)


def _room(config: ByteFallbackBpeConfig | UnigramConfig | WordPieceConfig) -> int:
    """The number of tokens to learn."""
    return config.vocab_size - len(config.fixed_tokens)


def _alphabet(corpus: CountedCorpus, coverage: float, limit: int, always: str = "") -> list[str]:
    kept = corpus.frequent(coverage, limit - len(always))
    return sorted({*kept, *always})


def _visible_spaces(text: str) -> str:
    return text.replace(" ", SPACE)


def _space_normalizer(prefix_space: bool) -> normalizers.Normalizer:
    visible = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), visible]) if prefix_space else visible


def _space_splitter(digits: int) -> pre_tokenizers.PreTokenizer:
    """Words with the space before them, numbers, punctuation, runs of spaces, line ends."""
    pattern = (
        rf"{SPACE}?[\p{{L}}\p{{M}}]+"
        rf"|\p{{N}}{{1,{digits}}}"
        rf"|{SPACE}?[^\s\p{{L}}\p{{M}}\p{{N}}{SPACE}]+"
        rf"|{SPACE}+(?={SPACE})"
        rf"|{SPACE}"
        r"|\s+"
    )
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


def _space_decoder(prefix_space: bool) -> decoders.Decoder:
    visible: list[decoders.Decoder] = [
        decoders.Replace(SPACE, " "),
        decoders.ByteFallback(),
        decoders.Fuse(),
    ]
    return decoders.Sequence([*visible, decoders.Strip(" ", 1, 0)] if prefix_space else visible)


_TRAINING: dict[type, Callable[[Any, Iterator[str]], Tokenizer]] = {
    BpeConfig: _bpe,
    ByteFallbackBpeConfig: _byte_fallback_bpe,
    UnigramConfig: _unigram,
    WordPieceConfig: _wordpiece,
    CharactersConfig: _characters,
}
