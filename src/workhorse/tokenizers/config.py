"""The configs of tokenizers: one class per algorithm, and `TokenizerConfig`, any of them.

Sizes are in tokens. `vocab_size` counts all of them: special tokens, bytes, characters, the rest.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError

N_BYTES = 256
SPACE = "\u2581"
"""The visible character for a space in SentencePiece."""
MAX_VOCAB_SIZE = 300_000

VocabSize = Annotated[int, Field(ge=N_BYTES, le=MAX_VOCAB_SIZE)]
Digits = Annotated[int, Field(ge=1, le=3)]


class SpecialTokensConfig(Config):
    """The tokens that typed text never becomes; None leaves one out.

    Raises:
        ConfigError: two tokens have the same name, or a name has fewer than two characters (a
            single character cannot be distinguished from the same character in a text).
    """

    bos: str | None = "<|bos|>"
    """Begins a document."""
    eos: str | None = "<|eos|>"
    """Ends a document; stops generation."""
    pad: str | None = "<|pad|>"
    """Fills up a batch."""
    chat: tuple[str, ...] = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    """Begin each role's turn, and end any turn."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every token, in the order of their ids."""
        return (*(name for name in (self.bos, self.eos, self.pad) if name is not None), *self.chat)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_names(self.names)
        return self


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError unless the names can all be special tokens of one tokenizer."""
    for name in names:
        if len(name) <= 1:
            raise ConfigError(
                f"special token {name!r} is too short; write something like '<|eos|>'"
            )
        if names.count(name) > 1:
            raise ConfigError(f"special token {name!r} is there twice; give each its own name")


def few_special_tokens() -> SpecialTokensConfig:
    """The default for small vocabularies: eos alone."""
    return SpecialTokensConfig(bos=None, pad=None, chat=())


class _TrainedConfig(Config):
    """The fields that all algorithms with a learned vocabulary share."""

    vocab_size: VocabSize
    """Number of all tokens: special tokens, bytes, characters and learned ones."""
    special: SpecialTokensConfig = SpecialTokensConfig()
    """The tokens that typed text never becomes."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        """The tokens that exist before anything is learned, in the order of their ids."""
        return self.special.names

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        fixed = len(self.fixed_tokens)
        check_names(self.fixed_tokens)
        if self.vocab_size < fixed + self._smallest_alphabet():
            least = fixed + self._smallest_alphabet()
            raise ConfigError(
                f"vocab_size={self.vocab_size} has no room for the tokens that are always there "
                f"(bytes, special tokens, one character); choose at least {least}"
            )
        return self

    def _smallest_alphabet(self) -> int:
        return 1


class BpeConfig(_TrainedConfig):
    """Byte-level BPE: no text is unknown, and any bytes round-trip.

    Paper: Sennrich et al. (1508.07909); over bytes: GPT-2 (Radford et al. 2019, §2.2).
    """

    kind: Literal["bpe"] = "bpe"
    digits: Digits = 3
    """The most digits in a token; 1 makes arithmetic easiest to learn, 3 makes texts shortest."""
    min_frequency: int = Field(default=2, ge=1)
    """A pair seen less often is not merged, even if the vocabulary stays smaller."""

    def _smallest_alphabet(self) -> int:
        return N_BYTES


class _SentencePieceConfig(_TrainedConfig):
    """Spaces become the visible character U+2581, as in SentencePiece (1808.06226).

    A U+2581 in a text is decoded as a space.
    """

    digits: Digits = 1
    """The most digits in a token."""
    prefix_space: bool = True
    """Begin a text with a space, taken away on decoding, so that its first word is the same token
    as in the middle of a text (LLaMA does, Gemma does not)."""
    character_coverage: float = Field(default=0.9999, gt=0, le=1)
    """Share of the corpus's characters that get their own token; the rest is bytes or unknown."""


class ByteFallbackBpeConfig(_SentencePieceConfig):
    """BPE over characters, with the bytes `<0x00>` to `<0xFF>` for rare ones, as LLaMA has it."""

    kind: Literal["byte_fallback_bpe"] = "byte_fallback_bpe"
    special: SpecialTokensConfig = SpecialTokensConfig(bos="<s>", eos="</s>")
    """The tokens that typed text never becomes."""
    min_frequency: int = Field(default=2, ge=1)
    """A pair seen less often is not merged."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        return (*self.special.names, *BYTE_TOKENS)


class UnigramConfig(_SentencePieceConfig):
    """A unigram language model over pieces, pruned from many candidates (1804.10959)."""

    kind: Literal["unigram"] = "unigram"
    special: SpecialTokensConfig = SpecialTokensConfig(bos="<s>", eos="</s>")
    """The tokens that typed text never becomes."""
    unk: str = "<unk>"
    """The token for characters without one."""
    byte_fallback: bool = True
    """Spell characters without a token as bytes, so that none is unknown."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        return (self.unk, *self.special.names, *(BYTE_TOKENS if self.byte_fallback else ()))


class WordPieceConfig(_TrainedConfig):
    """WordPiece over words split at spaces and punctuation, as BERT has it (1609.08144).

    White space is not kept: decoding gives one space between words.
    """

    kind: Literal["wordpiece"] = "wordpiece"
    unk: str = "[UNK]"
    """The token for a word that cannot be composed of tokens."""
    lowercase: bool = False
    """Make every text lower-case first."""
    character_coverage: float = Field(default=0.9999, gt=0, le=1)
    """Share of the corpus's characters that are known; a word with any other becomes unknown."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        return (self.unk, *self.special.names)

    def _smallest_alphabet(self) -> int:
        return 2  # a character at the start of a word and the same inside one


class BytesConfig(Config):
    """One token per byte, its value the id; special tokens follow from 256 on. Not trained."""

    kind: Literal["bytes"] = "bytes"
    special: SpecialTokensConfig = Field(default_factory=few_special_tokens)
    """The tokens that typed text never becomes."""


class CharactersConfig(Config):
    """One token per character of the corpus, in code point order after the special tokens."""

    kind: Literal["characters"] = "characters"
    vocab_size: int | None = Field(default=None, ge=2, le=MAX_VOCAB_SIZE)
    """The most tokens; the rarest characters become unknown. None: a token for each character."""
    unk: str = "<|unk|>"
    """The token for characters without one."""
    special: SpecialTokensConfig = Field(default_factory=few_special_tokens)
    """The tokens that typed text never becomes."""

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        check_names((self.unk, *self.special.names))
        fixed = 1 + len(self.special.names)
        if self.vocab_size is not None and self.vocab_size <= fixed:
            raise ConfigError(
                f"vocab_size={self.vocab_size} has no room for characters beside {fixed} special "
                f"tokens; choose at least {fixed + 1}"
            )
        return self


class FileConfig(Config):
    """An existing tokenizer; nothing is trained."""

    kind: Literal["file"] = "file"
    path: str
    """A folder with `tokenizer.json` or `tokenizer.model`, or such a file."""


TokenizerConfig = Annotated[
    BpeConfig
    | ByteFallbackBpeConfig
    | WordPieceConfig
    | UnigramConfig
    | BytesConfig
    | CharactersConfig
    | FileConfig,
    Field(discriminator="kind"),
]
"""Any of the above, told apart by `kind`; a config's field may have this type."""

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(N_BYTES))
"""How SentencePiece writes the bytes 0 to 255."""


class _AnyTokenizer(Config):
    tokenizer: TokenizerConfig


def tokenizer_config(fields: dict[str, Any]) -> TokenizerConfig:
    """The config that plain data with a `kind` describes.

    Raises:
        ConfigError: a kind or key is unknown, or a value is invalid.
    """
    try:
        return _AnyTokenizer.from_dict({"tokenizer": fields}).tokenizer
    except ConfigError as error:
        raise ConfigError(error.reason, error.path.removeprefix("tokenizer").lstrip(".")) from None
