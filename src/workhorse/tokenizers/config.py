"""The configs of tokenizers: one class per algorithm, and their union `TokenizerConfig`.

Sizes are in tokens. `vocab_size` counts all tokens: special, byte, character and learned tokens.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError

N_BYTES = 256
SPACE = "\u2581"
"""The character that stands for a space in SentencePiece."""
MAX_VOCAB_SIZE = 300_000

VocabSize = Annotated[int, Field(ge=N_BYTES, le=MAX_VOCAB_SIZE)]
Digits = Annotated[int, Field(ge=1, le=3)]

CHAT_TOKENS = ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
"""The control tokens that the default chat template needs."""
WITH_TOOLS = (*CHAT_TOKENS, "<|tool|>")
"""All control tokens that it uses if they exist."""


class SpecialTokensConfig(Config):
    """The special tokens, or None for an absent one. Encoding ordinary text never produces one.

    Raises:
        ConfigError: two tokens have the same name, or a name has fewer than two characters (a
            single character cannot be distinguished from the same character in ordinary text).
    """

    bos: str | None = "<|bos|>"
    """Token at the beginning of a document."""
    eos: str | None = "<|eos|>"
    """Token at the end of a document. It also stops generation."""
    pad: str | None = "<|pad|>"
    """Token for padding in batches."""
    chat: tuple[str, ...] = CHAT_TOKENS
    """Tokens that begin the turn of each role, and the token that ends a turn."""

    @property
    def names(self) -> tuple[str, ...]:
        """All special tokens in the order of their ids."""
        return (*(name for name in (self.bos, self.eos, self.pad) if name is not None), *self.chat)

    @model_validator(mode="after")
    def _check_names(self) -> Self:
        check_names(self.names)
        return self


def check_names(names: tuple[str, ...]) -> None:
    """Raise ConfigError if the name of a special token is too short or given twice."""
    for name in names:
        if len(name) <= 1:
            raise ConfigError(
                f"special token {name!r} is shorter than 2 characters; use a name like '<|eos|>'"
            )
        if names.count(name) > 1:
            raise ConfigError(f"special token {name!r} is given twice; use different names")


def few_special_tokens() -> SpecialTokensConfig:
    """Return the special tokens of small vocabularies: only eos."""
    return SpecialTokensConfig(bos=None, pad=None, chat=())


class _MadeConfig(Config):
    """The fields of all configs of tokenizers that are made here."""

    special: SpecialTokensConfig = SpecialTokensConfig()
    """The special tokens. Encoding ordinary text never produces one."""
    chat: bool = False
    """True to store the default chat template with the tokenizer. Its role tokens, which include
    `<|tool|>`, are then special tokens too. Set it for a model that will learn to chat."""

    @property
    def special_names(self) -> tuple[str, ...]:
        """All special tokens, including those of the chat template, in the order of their ids."""
        return tuple(dict.fromkeys((*self.special.names, *(WITH_TOOLS if self.chat else ()))))


class _TrainedConfig(_MadeConfig):
    """The fields of all configs with a learned vocabulary."""

    vocab_size: VocabSize
    """Size of the vocabulary, including special, byte and character tokens."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        """The tokens that exist before training, in the order of their ids."""
        return self.special_names

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        fixed = len(self.fixed_tokens)
        check_names(self.fixed_tokens)
        if self.vocab_size < fixed + self._smallest_alphabet():
            least = fixed + self._smallest_alphabet()
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small for the bytes, the special tokens and "
                f"one character; choose {least} or more"
            )
        return self

    def _smallest_alphabet(self) -> int:
        return 1


class BpeConfig(_TrainedConfig):
    """Byte-level BPE: there are no unknown characters, and any bytes can be encoded and restored.

    Paper: Sennrich et al. (1508.07909); over bytes: GPT-2 (Radford et al. 2019, §2.2).
    """

    kind: Literal["bpe"] = "bpe"
    split: Literal["default", "gpt2"] = "default"
    """Rule that splits a string into words, whose boundaries no token crosses: similar to cl100k
    and Llama 3 (`default`), or GPT-2's (`gpt2`)."""
    digits: Digits = 3
    """Maximum number of digits in a token: 1 makes arithmetic easier to learn, 3 saves tokens."""
    min_frequency: int = Field(default=2, ge=1)
    """Minimum count of a pair of tokens for it to be merged. The vocabulary stays smaller than
    `vocab_size` if there are too few such pairs."""

    def model_post_init(self, _context: object) -> None:
        if self.split == "gpt2" and self.digits != type(self).model_fields["digits"].default:
            raise ConfigError(f"digits={self.digits} has no effect on split=gpt2; remove it")

    def _smallest_alphabet(self) -> int:
        return N_BYTES


class _SentencePieceConfig(_TrainedConfig):
    """Fields of tokenizers that replace spaces by U+2581, as in SentencePiece (1808.06226).

    A U+2581 in the input is decoded as a space.
    """

    digits: Digits = 1
    """Maximum number of digits in a token."""
    prefix_space: bool = True
    """True to put a space before the input and remove it on decoding (LLaMA: True, Gemma: False).
    The first word of a string then has the same token as inside a string."""
    character_coverage: float = Field(default=0.9999, gt=0, le=1)
    """Fraction of the corpus's characters that get a token. The others are encoded as bytes or as
    unknown."""


class ByteFallbackBpeConfig(_SentencePieceConfig):
    """BPE over characters, as in LLaMA. Rare characters become byte tokens `<0x00>` to `<0xFF>`."""

    kind: Literal["byte_fallback_bpe"] = "byte_fallback_bpe"
    special: SpecialTokensConfig = SpecialTokensConfig(bos="<s>", eos="</s>")
    """The special tokens. Encoding ordinary text never produces one."""
    min_frequency: int = Field(default=2, ge=1)
    """Minimum count of a pair of tokens for it to be merged."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        return (*self.special_names, *BYTE_TOKENS)


class UnigramConfig(_SentencePieceConfig):
    """A unigram language model over pieces, pruned from many candidates (1804.10959)."""

    kind: Literal["unigram"] = "unigram"
    special: SpecialTokensConfig = SpecialTokensConfig(bos="<s>", eos="</s>")
    """The special tokens. Encoding ordinary text never produces one."""
    unk: str = "<unk>"
    """The token for characters outside the vocabulary."""
    byte_fallback: bool = True
    """True to encode characters outside the vocabulary as bytes, so that none is unknown."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        return (self.unk, *self.special_names, *(BYTE_TOKENS if self.byte_fallback else ()))


class WordPieceConfig(_TrainedConfig):
    """WordPiece over words split at spaces and punctuation, as in BERT (1609.08144).

    White space is not kept: decoding puts one space between words.
    """

    kind: Literal["wordpiece"] = "wordpiece"
    unk: str = "[UNK]"
    """The token for words that cannot be composed of other tokens."""
    lowercase: bool = False
    """True to convert the input to lower case."""
    character_coverage: float = Field(default=0.9999, gt=0, le=1)
    """Fraction of the corpus's characters that get a token. Words with other characters become
    unknown."""

    @property
    def fixed_tokens(self) -> tuple[str, ...]:
        return (self.unk, *self.special_names)

    def _smallest_alphabet(self) -> int:
        return 2  # a character at the start of a word, and the same character inside a word


class BytesConfig(_MadeConfig):
    """One token per byte: the id is the byte value. Special tokens begin at 256. Not trained."""

    kind: Literal["bytes"] = "bytes"
    special: SpecialTokensConfig = Field(default_factory=few_special_tokens)
    """The special tokens. Encoding ordinary text never produces one."""


class _CountedConfig(_MadeConfig):
    """The fields of configs whose tokens are the most frequent units of the corpus."""

    vocab_size: int | None = Field(default=None, ge=2, le=MAX_VOCAB_SIZE)
    """Maximum number of tokens; the rarest become unknown. None: no limit, or 300,000 words."""
    unk: str = "<|unk|>"
    """The token for characters or words outside the vocabulary."""
    special: SpecialTokensConfig = Field(default_factory=few_special_tokens)
    """The special tokens. Encoding ordinary text never produces one."""

    @model_validator(mode="after")
    def _check_room(self) -> Self:
        check_names((self.unk, *self.special_names))
        fixed = 1 + len(self.special_names)
        if self.vocab_size is not None and self.vocab_size <= fixed:
            raise ConfigError(
                f"vocab_size={self.vocab_size} is too small for {fixed} special tokens and one "
                f"more; choose {fixed + 1} or more"
            )
        return self


class CharactersConfig(_CountedConfig):
    """One token per character of the corpus, in code point order after the special tokens."""

    kind: Literal["characters"] = "characters"


class WordsConfig(_CountedConfig):
    """One token per word or punctuation mark of the corpus, the most frequent first.

    White space is not kept: decoding puts one space before each token except `.`, `,`, `!`, `?`.
    """

    kind: Literal["words"] = "words"


class FileConfig(Config):
    """An existing tokenizer, which is loaded and not trained."""

    kind: Literal["file"] = "file"
    path: str
    """A `tokenizer.json` or `tokenizer.model` file, or a folder with one. With `init`, the default
    is the tokenizer of `init`."""
    add_tokens: tuple[str, ...] = ()
    """New tokens, such as words of a domain. Any text that contains their names is encoded with
    them. With `init`, the embedding and the head grow."""
    chat: bool = False
    """True to store the default chat template with a tokenizer that has none, and to add its role
    tokens as special tokens. With `init`, the embedding and the head grow."""


TokenizerConfig = Annotated[
    BpeConfig
    | ByteFallbackBpeConfig
    | WordPieceConfig
    | UnigramConfig
    | BytesConfig
    | CharactersConfig
    | WordsConfig
    | FileConfig,
    Field(discriminator="kind"),
]
"""The config of any tokenizer; the field `kind` selects the class."""

BYTE_TOKENS = tuple(f"<0x{byte:02X}>" for byte in range(N_BYTES))
"""The names of the tokens for the bytes 0 to 255 in SentencePiece."""


class _AnyTokenizer(Config):
    tokenizer: TokenizerConfig


def tokenizer_config(fields: dict[str, Any]) -> TokenizerConfig:
    """Make a tokenizer config from plain data with a `kind`.

    Raises:
        ConfigError: a kind or key is unknown, or a value is invalid.
    """
    try:
        return _AnyTokenizer.from_dict({"tokenizer": fields}).tokenizer
    except ConfigError as error:
        raise ConfigError(error.reason, error.path.removeprefix("tokenizer").lstrip(".")) from None
