"""Trains a tokenizer of any algorithm from a stream of documents.

Memory holds only one document and the trainer's own data (each distinct word once).

The trainers are those in the `tokenizers` library. This module prepares their input (splitting of
documents, selection of characters) and makes the result the same on every run. Byte-level BPE is
already deterministic. The other trainers are given all characters in a fixed order. Otherwise the
order of a hash table would decide the ids of characters, and which of equally rare ones are kept.
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
from workhorse.tokenizers.chat.template import with_template
from workhorse.tokenizers.config import (
    MAX_VOCAB_SIZE,
    SPACE,
    WITH_TOOLS,
    BpeConfig,
    ByteFallbackBpeConfig,
    BytesConfig,
    CharactersConfig,
    FileConfig,
    TokenizerConfig,
    UnigramConfig,
    WordPieceConfig,
    WordsConfig,
)
from workhorse.tokenizers.control import guarded
from workhorse.tokenizers.load import load_tokenizer
from workhorse.tokenizers.pieces import BYTE_ALPHABET
from workhorse.tokenizers.tokenizer import Tokenizer

MAX_CHARACTERS = 2**16
"""Maximum length of a string passed to the library, which needs about 20 bytes per character."""

MAX_RUN = 2048
"""Maximum length of a run without spaces, or of spaces. The library's trainers may treat a run as
one word: BPE then takes quadratic time, and Unigram overflows the stack (100,000 letters)."""
_RUN = re.compile(rf"\S{{{MAX_RUN}}}|\s{{{MAX_RUN}}}")
_SPACE, _NO_SPACE = re.compile(r"\s"), re.compile(r"\S")

Progress = Callable[[int, int | None], None]


def split_documents(texts: Iterable[str], progress: Progress | None = None) -> Iterator[str]:
    """Yield the documents, cut into strings of up to `MAX_CHARACTERS`, at line ends if possible.

    Runs without spaces, or of only spaces, are also cut, after `MAX_RUN` characters.

    Args:
        texts: the documents as strings.
        progress: called with `(bytes read, None)`.

    Raises:
        WorkhorseError: the documents have no text, or one is not a str or cannot be encoded in
            UTF-8.
    """
    if isinstance(texts, str | bytes):
        raise WorkhorseError(f"texts={shown(texts)} is one string; pass a list of strings")
    if not isinstance(texts, Iterable):
        raise WorkhorseError(f"texts={shown(texts)} is not a list of strings; pass a list")
    done, warned = 0, False
    for text in texts:
        if not isinstance(text, str):
            raise WorkhorseError(f"{shown(text)} is not a string; pass documents as str")
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
        raise WorkhorseError("the corpus has no text (0 bytes); use files with text in them")


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
    """Return False if the text cannot contain a run of `MAX_RUN` characters.

    It cannot if each block of half that length has both spaces and other characters. This check is
    faster than a search for runs.
    """
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
            f"a document of the corpus has a lone surrogate, {text[error.start]!r}; "
            "read it with errors='replace'"
        ) from None


@contextmanager
def counted(texts: Iterable[str]) -> Iterator["CountedCorpus"]:
    """Store strings in a temporary file and count their characters; delete the file on exit."""
    with tempfile.TemporaryFile() as file:
        yield CountedCorpus(file, texts)


class CountedCorpus:
    """Strings stored in a file, with character counts. They can be iterated several times."""

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
        """Return the most common characters that together cover a fraction of the corpus, sorted.

        Args:
            coverage: fraction of all characters in the corpus, in (0, 1].
            limit: maximum number of characters to return.
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
        """Yield the strings with all characters replaced that are not in `characters`.

        So the trainer learns no tokens with the replaced characters.
        """
        gone = dict.fromkeys(map(ord, self.characters.keys() - set(characters)), substitute)
        return (text.translate(gone) if gone else text for text in self)


CHARACTER_STEP = 1e-4
"""Step between the scores that the library's Unigram trainer assigns to characters in random order
(see `stable_vocabulary`)."""
DECIMALS = 4
"""Number of decimals of rounded scores (natural logarithms of probabilities). Between runs, scores
differ by less than 1e-10, because they are summed in random order."""


def stable_vocabulary(vocab: Iterable[tuple[str, float | None]]) -> list[tuple[str, float]]:
    """Make the vocabulary of the library's Unigram trainer the same on every run.

    The trainer keeps single characters that it would otherwise prune, and assigns the scores
    `lowest, lowest + 1e-4, ...` to them in random order. Here these scores are reassigned in code
    point order. Then all scores are rounded, and the pieces are sorted by score and code points.

    Raises:
        WorkhorseError: pieces have no score, because the library found no text to count.
    """
    found = dict(vocab)
    scores = {piece: score for piece, score in found.items() if score is not None}
    if len(scores) < len(found):
        raise WorkhorseError(
            "the corpus has nothing that unigram can learn from (only NULs or invisible "
            "characters); use documents with words in them"
        )
    scores.update(_reordered(_kept_characters(scores)))
    rounded = ((piece, round(score, DECIMALS)) for piece, score in scores.items())
    return sorted(rounded, key=lambda entry: (-entry[1], entry[0]))


def _kept_characters(scores: dict[str, float]) -> dict[str, float]:
    """Return the characters that the trainer would otherwise have pruned, with their scores.

    They are recognised by their scores: the lowest score, and steps of `CHARACTER_STEP` above it
    without a gap.
    """
    lowest = min(scores.values(), default=0.0)
    characters = sorted((score, piece) for piece, score in scores.items() if len(piece) == 1)
    kept: dict[str, float] = {}
    following = 0
    for score, character in characters:
        steps = (score - lowest) / CHARACTER_STEP
        if round(steps) > following:
            break  # a gap: the remaining scores come from frequencies
        if abs(steps - round(steps)) < 1e-3:  # noqa: PLR2004 (above the noise, below a step)
            kept[character] = score
            following = round(steps) + 1
    return kept


def _reordered(kept: dict[str, float]) -> dict[str, float]:
    return dict(zip(sorted(kept), sorted(kept.values()), strict=True))


def train_tokenizer(
    config: TokenizerConfig, texts: Iterable[str], *, progress: Progress | None = None
) -> Tokenizer:
    """Train a tokenizer on documents, in bounded memory.

    The same documents in the same order give the same tokenizer, byte for byte, in any process and
    with any number of threads. For Unigram this is very likely but not certain, because the library
    sums scores in random order. They are rounded to much larger steps; see docs/tokenizers.md.

    The vocabulary is smaller than requested if the documents are too small to fill it; see
    `missing_tokens`.

    Args:
        config: algorithm and size. A `FileConfig` loads a tokenizer and a `BytesConfig` learns
            nothing; neither reads `texts`.
        texts: the documents, read once. Kinds that first count characters store a copy in a
            temporary file.
        progress: called with `(bytes read, None)`.

    Raises:
        WorkhorseError: the documents have no text, `texts` is one string, a document cannot be
            encoded in UTF-8, the file of a `FileConfig` is not a tokenizer or cannot be extended,
            or `config` is not a tokenizer config.
    """
    if isinstance(config, FileConfig):
        return _extended(config)
    if isinstance(config, BytesConfig):
        return _bytes(config)
    if type(config) not in _TRAINING:
        raise WorkhorseError(
            f"config={shown(config)} is not a tokenizer config; pass one such as "
            "BpeConfig(vocab_size=4096), or use tokenizer_config for a dict"
        )
    return _TRAINING[type(config)](config, split_documents(texts, progress))


def _extended(config: FileConfig) -> Tokenizer:
    """Load a tokenizer, and add the config's tokens and the default chat template."""
    tokenizer = load_tokenizer(config.path)
    if config.chat and tokenizer.chat_templates:
        raise WorkhorseError(
            f"the tokenizer {config.path} has a chat template already; remove chat=true"
        )
    if config.add_tokens:
        tokenizer = tokenizer.with_tokens(config.add_tokens)
    if not config.chat:
        return tokenizer
    missing = [name for name in WITH_TOOLS if name not in tokenizer.special_tokens]
    return with_template(tokenizer.with_tokens(missing, special=True))


def missing_tokens(config: TokenizerConfig, tokenizer: Tokenizer) -> int:
    """Return by how many tokens a trained tokenizer is smaller than `config.vocab_size`."""
    if isinstance(config, FileConfig | BytesConfig | CharactersConfig | WordsConfig):
        return 0
    return config.vocab_size - tokenizer.vocab_size


def _bpe(config: BpeConfig, pieces: Iterable[str]) -> Tokenizer:
    gpt2 = config.split == "gpt2"  # the library's `ByteLevel` has GPT-2's pattern
    words = pre_tokenizers.Split(Regex(byte_level_pattern(config.digits)), behavior="isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=gpt2)
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        min_frequency=config.min_frequency,
        special_tokens=list(config.special_names),
        initial_alphabet=list(BYTE_ALPHABET),
        show_progress=False,
    )
    splitter = as_bytes if gpt2 else pre_tokenizers.Sequence([words, as_bytes])
    model = _learn(models.BPE(), splitter, trainer, pieces, config.fixed_tokens)
    backend = tokenizers.Tokenizer(_bpe_model(model))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.ByteLevel()
    return _finished(backend, config)


def byte_level_pattern(digits: int) -> str:
    """Return the splitting pattern of byte-level BPE, similar to cl100k (tiktoken) and Llama 3.

    No token crosses a word boundary. The differences from GPT-2's pattern are:

    - Contractions match in upper and lower case.
    - Digits form short groups, so that numbers are not memorised as words.
    - A word may include one character before it, as in `(self` and `_name`.
    - Line ends are grouped with the punctuation before them, which shortens code.
    - Combining marks count as letters, so that words of Indic scripts and decomposed accents are
      not split.
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
            # The trainer counts unk, which is also one of the fixed tokens.
            vocab_size=config.vocab_size - len(config.fixed_tokens) + 1,
            special_tokens=[config.unk],
            unk_token=config.unk,
            initial_alphabet=alphabet,
            show_progress=False,
        )
        texts = corpus.keeping(alphabet, substitute=SPACE)
        splitter = _space_splitter(config.digits)
        model = _learn(models.Unigram(), splitter, trainer, texts, config.fixed_tokens)
    learned = stable_vocabulary(model["vocab"][1:])  # without unk
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
        # Half of the available tokens: a character needs two, `c` and `##c`.
        alphabet = _alphabet(corpus, config.character_coverage, _room(config) // 2)
        # A character inside a word is a separate token, `##c`. The library would assign its id in
        # hash table order. As fixed tokens, these tokens get ids in the order of this list.
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
    fixed = (config.unk, *config.special_names)
    with counted(pieces) as corpus:
        room = len(corpus.characters) if config.vocab_size is None else config.vocab_size
        if config.vocab_size is not None:
            room -= len(fixed)
        alphabet = corpus.frequent(1.0, room)
    vocab = {token: number for number, token in enumerate((*fixed, *alphabet))}
    # A BPE without merges is the fastest model that maps characters to ids.
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token=config.unk))
    backend.decoder = decoders.Fuse()
    return _finished(backend, config, unk=config.unk)


def _words(config: WordsConfig, pieces: Iterable[str]) -> Tokenizer:
    fixed = (config.unk, *config.special_names)
    size, special = config.vocab_size or MAX_VOCAB_SIZE, list(fixed)
    trainer = trainers.WordLevelTrainer(
        vocab_size=size, special_tokens=special, show_progress=False
    )
    # A word can have apostrophes and hyphens inside; any other character is a token.
    words = Regex(r"\w+(?:['’-]\w+)*|[^\w\s]")
    splitter = pre_tokenizers.Split(words, behavior="removed", invert=True)
    model = _learn(models.WordLevel(unk_token=config.unk), splitter, trainer, pieces, fixed)
    backend = tokenizers.Tokenizer(models.WordLevel(model["vocab"], unk_token=config.unk))
    backend.pre_tokenizer = splitter
    backend.decoder = decoders.WordPiece(cleanup=True)
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
    """Train a model and return it in the form of the `model` of a `tokenizer.json`.

    The names of the `fixed` tokens must not be learned from the corpus. Otherwise, if a user types
    such a name, it would be encoded as that token.
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
    names = (*((unk,) if unk else ()), *config.special_names)
    backend.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in names])
    special = config.special
    roles = {"bos": special.bos, "eos": special.eos, "pad": special.pad, "unk": unk}
    made = Tokenizer(backend.to_str(), roles)
    return with_template(made) if config.chat else made


def _bpe_model(model: dict[str, Any], byte_fallback: bool = False) -> models.BPE:
    merges = [(left, right) for left, right in model["merges"]]
    return models.BPE(vocab=model["vocab"], merges=merges, byte_fallback=byte_fallback)


def _room(config: ByteFallbackBpeConfig | UnigramConfig | WordPieceConfig) -> int:
    """Return the number of tokens in the vocabulary that are not fixed before training."""
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
    """Return a pre-tokenizer that splits text into words, numbers, punctuation, spaces, line ends.

    A space before a word or punctuation belongs to it.
    """
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
    WordsConfig: _words,
}
