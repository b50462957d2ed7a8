"""Train a tokenizer of any algorithm from a stream of texts.

The trainers are the `tokenizers` library's. This module determines their input (how a text is
split, which characters count) and makes the result the same on every run. Byte-level BPE is
deterministic by itself; the others are given all characters in a fixed order, because the library
numbers characters inside words, and breaks ties between rare ones, in the order of a hash table.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from workhorse.errors import WorkhorseError, shown
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
from workhorse.tokenizers.files import load_tokenizer
from workhorse.tokenizers.guard import guarded
from workhorse.tokenizers.pieces import BYTE_ALPHABET
from workhorse.tokenizers.tokenizer import Tokenizer
from workhorse.tokenizers.training.corpus import CountedCorpus, Progress, counted, pieces_of_texts
from workhorse.tokenizers.training.unigram import stable_vocabulary


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
