"""The recipe section `data`: sources, validation splits, and packing of documents into rows."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from workhorse.config.base import Config, ConfigError, OnResume
from workhorse.data.tasks import TaskName

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

STDIN = Path("-")
"""The path that stands for the standard input."""

DEFAULT_FRACTION = 0.1
"""Default fraction of a corpus that is held out for validation."""

SHORTHANDS = {
    "stdlib": {"kind": "stdlib"},
    "stdin": {"kind": "text", "path": str(STDIN)},
}
"""Sources that a recipe can give as a bare name, such as `corpus: stdlib`, and their configs."""

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Packing = Literal["windows", "random_windows", "documents", "padded"]
TooLong = Literal["split", "drop", "keep_start", "keep_end"]
Learn = Literal["assistant", "last", "all"]
RowKind = Literal["conversations", "pairs", "labels"]


class HeldOut(Config):
    """The validation split of a source: a fraction of its text, or a separate path."""

    validation: Annotated[Path | None, OnResume.SAME_DATA] = None
    """A separate path for the validation split, read like `path`. All of `path` is then used for
    training."""
    validation_fraction: Fraction | None = None
    """Fraction of the data held out for validation; 0: no validation split. None: 0.1, or 0 if
    `validation` is set."""

    @model_validator(mode="after")
    def _one_validation(self) -> "HeldOut":
        if self.validation == STDIN:
            raise ConfigError(
                "validation=- is not supported: stdin can only be training data; name a file"
            )
        if self.validation is not None and self.validation_fraction is not None:
            raise ConfigError("validation and validation_fraction are both set; keep one")
        return self

    @property
    def held_out(self) -> float:
        """Fraction of `path` that belongs to the validation split."""
        if self.validation is not None:
            return 0.0
        return DEFAULT_FRACTION if self.validation_fraction is None else self.validation_fraction

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self.held_out > 0


class Decoded(HeldOut):
    """Files of text."""

    errors: Annotated[Literal["strict", "replace"], OnResume.SAME_DATA] = "strict"
    """Handling of bytes that are not UTF-8: `strict` raises an error, `replace` decodes them as
    U+FFFD."""


class TextConfig(Decoded):
    """One plain text file. The validation split is its end, or documents chosen by their hash.

    Without `documents`, `int((1 - validation_fraction) * n)` of n characters are for training.
    """

    kind: Literal["text"] = "text"
    path: Annotated[Path, OnResume.SAME_DATA]
    """A file, plain or compressed with gzip or zstd. `-` is the standard input."""
    documents: str | None = None
    """`lines`, if each line is a document, or the string between two documents, which is removed.
    Documents of only white space are skipped. None: the file is one document."""

    def model_post_init(self, _context: object) -> None:
        if self.documents == "":
            raise ConfigError("'' separates nothing; use lines or another string", "documents")


class FolderConfig(Decoded):
    """A folder of text files, sorted by path. Each file is one document.

    Files are held out for validation by a hash of their path inside the folder. Hidden files are
    skipped.
    """

    kind: Literal["folder"] = "folder"
    path: Annotated[Path, OnResume.SAME_DATA]
    """The folder."""
    glob: Annotated[str, OnResume.SAME_DATA] = "**/*"
    """Pattern of the files to read, as for `pathlib.Path.glob`."""


class JsonlConfig(Decoded):
    """JSON Lines files: each line is an object with the text of one document.

    Documents are held out for validation by a hash of their text.
    """

    kind: Literal["jsonl"] = "jsonl"
    path: Annotated[Path, OnResume.SAME_DATA]
    """A file, plain or compressed with gzip or zstd, or a folder of `.jsonl[.gz|.zst]` files. `-`
    is the standard input."""
    text_field: str = "text"
    """Key of the text in each object. Lines whose text is null or empty are skipped."""


class ParquetConfig(Decoded):
    """Parquet files (needs pyarrow): each row is one document.

    Documents are held out for validation by a hash of their text.
    """

    kind: Literal["parquet"] = "parquet"
    path: Annotated[Path, OnResume.SAME_DATA]
    """A file, or a folder of `.parquet` files."""
    text_field: str = "text"
    """Name of the text column. Rows whose text is null or empty are skipped."""


class ConversationsConfig(HeldOut):
    """Conversations in JSON Lines or Parquet files, rendered with the tokenizer's chat template.

    Only the messages of the assistant are learned. A record has these fields, by `rows`:

    - `conversations`: `messages`, each with `role` and `content`; or ShareGPT's `conversations`,
      each with `from` and `value`; or `prompt` and `completion`. Optional: `tools`, `system`.
    - `pairs`: `chosen` and `rejected`, both answers to `prompt`; or both whole conversations, and
      the prompt is their common beginning. Optional: `margin`.
    - `labels`: `prompt`, `completion`, and a boolean `label`, true if the answer is desirable.

    Prompts and answers are messages, or strings, which are encoded without the template. A hash of
    a conversation, or of the prompt, decides if a record is held out for validation.
    """

    kind: Literal["conversations"] = "conversations"
    path: Annotated[Path, OnResume.SAME_DATA]
    """A file, or a folder of files: `.jsonl`, `.jsonl.gz`, `.jsonl.zst` or `.parquet`. `stdlib`:
    questions about the functions and classes of Python's standard library, if there is no file of
    this name."""
    rows: RowKind = "conversations"
    """The meaning of a record. Each record of `pairs` is two sequences."""
    learn: Learn = "assistant"
    """The tokens to learn. `assistant`: all messages of the assistant; `last`: only the last one;
    `all`: all tokens. A message's `weight` (a number) or `train` (a boolean) takes precedence."""
    overlap: Literal["keep", "drop"] = "keep"
    """Training records that are also in `validation`: `drop` skips them; `keep` only reports their
    number."""
    on_error: Annotated[Literal["stop", "skip"], OnResume.SAME_DATA] = "stop"
    """Handling of records that cannot be used: malformed ones, and those that the chat template
    rejects or changes. `stop` raises an error; `skip` omits them and reports their number."""
    errors: ClassVar[Literal["strict"]] = "strict"

    @model_validator(mode="after")
    def _every_option_is_read(self) -> "ConversationsConfig":
        if self.overlap == "drop" and self.validation is None:
            raise ConfigError(
                "overlap=drop has no effect without validation, because a record is then in only "
                "one split; remove it"
            )
        if self.learn != "assistant" and self.rows != "conversations":
            raise ConfigError(
                f"learn={self.learn} has no effect on rows={self.rows}, which learns answers; "
                "remove it"
            )
        return self

    @property
    def of_stdlib(self) -> bool:
        """True if the conversations are questions about the standard library."""
        return self.path == Path("stdlib") and not self.path.exists()

    @property
    def group(self) -> int:
        """Number of sequences per record."""
        return 2 if self.rows == "pairs" else 1


class Generated(Config):
    """Documents that are not read from a path."""

    validation_fraction: Fraction = DEFAULT_FRACTION
    """Fraction of the documents held out for validation."""

    @property
    def held_out(self) -> float:
        return self.validation_fraction

    @property
    def has_validation(self) -> bool:
        return self.validation_fraction > 0


class StdlibConfig(Generated):
    """The source code of the running Python's standard library: each module is one document.

    Modules are held out for validation by a hash of their name.
    """

    kind: Literal["stdlib"] = "stdlib"


class TaskConfig(Generated):
    """Generated prompts and answers of a verifiable task; see `workhorse.data.tasks`.

    A hash of the prompt decides if an example is held out for validation. Only answers are learned.
    """

    kind: Literal["task"] = "task"
    task: TaskName
    """The task."""
    difficulty: int = Field(default=4, ge=1, le=100)
    """Largest number of letters, digits, or numbers to combine in a prompt."""
    count: int = Field(default=10_000, ge=2)
    """Number of different prompts, over both splits."""
    seed: int = Field(default=0, ge=0)
    """Seed of the prompts."""


AnySource = (
    TextConfig
    | FolderConfig
    | JsonlConfig
    | ParquetConfig
    | ConversationsConfig
    | StdlibConfig
    | TaskConfig
)
SourceConfig = Annotated[AnySource, Field(discriminator="kind")]
"""The config of one source, selected by `kind`."""


def source_of(name: str | Path) -> SourceConfig:
    """Return the config for a source given as a name or path, as on the command line.

    Only `stdlib` has text held out for validation.

    Args:
        name: `stdlib`, `-` for the standard input, a folder of text files, or a file. Files named
            `.jsonl` and `.parquet` are read in these formats, all others as plain text.
    """
    path = Path(name)
    if str(name) == "stdlib" and not path.exists():
        return StdlibConfig()
    if path.is_dir():
        return FolderConfig(path=path, validation_fraction=0)
    if path.suffix == ".parquet":
        return ParquetConfig(path=path, validation_fraction=0)
    kind = JsonlConfig if ".jsonl" in path.suffixes else TextConfig
    return kind(path=path, validation_fraction=0)


def _spelled_out(source: Any) -> Any:
    if not isinstance(source, str):
        return source
    if Path(source).suffix or Path(source).name != source:
        kind = source_of(source).kind
        raise ConfigError(
            f"{source!r} is a path, not a kind of corpus; write {{kind: {kind}, path: {source}}}"
        )
    return SHORTHANDS.get(source, {"kind": source})


class MixtureConfig(Config):
    """Several named sources. Training rows are drawn from each in proportion to its weight."""

    kind: Literal["mixture"] = "mixture"
    sources: dict[str, SourceConfig]
    """The sources by name. Names consist of letters, digits, `_` and `-`."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Relative number of training rows per source. The default for each source is 1."""

    @field_validator("sources", mode="before")
    @classmethod
    def _shorthands(cls, sources: Any) -> Any:
        if not isinstance(sources, dict):
            return sources
        return {name: _spelled_out(source) for name, source in sources.items()}

    @model_validator(mode="after")
    def _names(self) -> "MixtureConfig":
        if not self.sources:
            raise ConfigError("a mixture needs sources; name at least one", "sources")
        for name in self.sources:
            if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
                raise ConfigError(
                    f"{name!r} is not a valid source name; use letters, digits, '_' and '-'",
                    "sources",
                )
        for name in self.weights:
            if name not in self.sources:
                known = ", ".join(self.sources)
                raise ConfigError(
                    f"{name!r} is not one of the sources ({known}); correct it", "weights"
                )
        return self


class DataConfig(Config):
    """The training and validation data of a run."""

    corpus: Annotated[
        AnySource | MixtureConfig,
        Field(discriminator="kind"),
    ]
    """One source, or a mixture of several. `stdlib` and `stdin` can be given as a bare name."""
    packing: Packing = "windows"
    """How training rows are cut from the token stream. `windows`: adjacent windows, each used once
    per epoch. `random_windows`: windows at random positions. `documents`: whole documents, packed
    into rows, that do not attend to each other. `padded`: one document per row. The default for
    conversations is `documents`, and for pairs and labels `padded`."""
    too_long: TooLong | None = None
    """Documents with more than `train.seq_len` predictions, if `packing` is `documents` or
    `padded`: `split` them into several rows, `drop` them, or keep only their start or their end.
    None: `split` for text, `drop` for conversations and if `packing` is `padded`."""
    bos: bool = False
    """True to begin every document with the tokenizer's bos token."""
    eos: bool = True
    """True to end every document with the tokenizer's eos token."""
    cache_dir: Annotated[Path | None, OnResume.NO_EFFECT] = None
    """Folder for token shards that runs can share. None: a folder in the run directory."""

    @field_validator("corpus", mode="before")
    @classmethod
    def _shorthand(cls, corpus: Any) -> Any:
        return _spelled_out(corpus)

    @model_validator(mode="before")
    @classmethod
    def _packing_of_conversations(cls, fields: Any) -> Any:
        """Set the default packing of conversations."""
        if not isinstance(fields, dict) or "packing" in fields:
            return fields
        corpus: Any = fields.get("corpus")
        several = corpus.get("sources") if isinstance(corpus, dict) else None
        sources = [*several.values()] if isinstance(several, dict) else [corpus]
        rows = [
            one.get("rows")
            for one in sources
            if isinstance(one, dict) and one.get("kind") in ("conversations", "task")
        ]
        if not rows:
            return fields
        padded = any(one in ("pairs", "labels") for one in rows)
        return {**fields, "packing": "padded" if padded else "documents"}

    @model_validator(mode="after")
    def _rows_of_conversations(self) -> "DataConfig":
        weighted = [
            one
            for one in self.sources.values()
            if isinstance(one, ConversationsConfig | TaskConfig)
        ]
        chats = [one for one in weighted if isinstance(one, ConversationsConfig)]
        kinds = {one.rows for one in chats}
        whole = self.packing in ("documents", "padded")
        if weighted and not whole:
            raise ConfigError(
                f"packing={self.packing} mixes conversations; set it to documents or padded",
            )
        if kinds - {"conversations"} and (len(kinds) > 1 or len(chats) < len(self.sources)):
            raise ConfigError("pairs or labels cannot be mixed with other rows; use one kind")
        if kinds - {"conversations"} and self.packing != "padded":
            raise ConfigError(
                f"packing={self.packing} puts several answers into a row; set it to padded"
            )
        if self.too_long is not None and not whole:
            raise ConfigError(
                f"too_long={self.too_long} has no effect with packing={self.packing}; remove it, "
                "or set packing=documents"
            )
        if self.too_long == "split" and self.packing == "padded":
            raise ConfigError("padded rows cannot be split; choose drop, keep_start or keep_end")
        return self

    @property
    def has_conversations(self) -> bool:
        return any(isinstance(one, ConversationsConfig) for one in self.sources.values())

    @property
    def without_prompts(self) -> list[str]:
        """Names of the sources whose documents are not a prompt and its right answer."""
        return [
            name
            for name, one in self.sources.items()
            if not isinstance(one, TaskConfig)
            and not (
                isinstance(one, ConversationsConfig)
                and one.rows == "conversations"
                and one.learn != "all"
            )
        ]

    def kept_in(self, folder: Path) -> Path:
        """Return the folder of the token shards: `cache_dir`, or `folder` if it is not set."""
        try:
            return (self.cache_dir or folder).expanduser()
        except RuntimeError:
            raise ConfigError(
                f"cannot expand {self.cache_dir}: no home directory found", "data.cache_dir"
            ) from None

    @property
    def packed(self) -> bool:
        """True if rows hold several documents that do not attend to each other."""
        return self.packing == "documents"

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The sources by name. A single source is named `corpus`."""
        if isinstance(self.corpus, MixtureConfig):
            return self.corpus.sources
        return {"corpus": self.corpus}

    def key_of(self, name: str) -> str:
        """Return the recipe key of a source, such as `data.corpus`."""
        single = not isinstance(self.corpus, MixtureConfig)
        return "data.corpus" if single else f"data.corpus.sources.{name}"

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every source."""
        given = self.corpus.weights if isinstance(self.corpus, MixtureConfig) else {}
        return {name: given.get(name, 1.0) for name in self.sources}


@dataclass(frozen=True)
class SequenceStart:
    """The tokens that a model expects at the beginning of a sequence."""

    prefix: tuple[int, ...]
    """Tokens at the beginning of every document."""
    start: int | None
    """The token before a document's text in the training data: the last token of `prefix`, or else
    the eos token of the previous document. None if the training data has no such token."""

    def encode(self, tokenizer: "Tokenizer", prompt: str) -> list[int]:
        """Return the ids of `prefix` and the prompt. If there are none, return `[start]` if set."""
        tokens = [*self.prefix, *tokenizer.encode(prompt)]
        return tokens or ([] if self.start is None else [self.start])


def sequence_start(tokenizer: "Tokenizer", data: DataConfig | None) -> SequenceStart:
    """Return the tokens that a model expects at the beginning of a sequence.

    Args:
        tokenizer: the model's tokenizer.
        data: the model's training data; None if it is unknown, as for a downloaded model. Sequences
            then begin with the tokens that the tokenizer adds. If it adds none, the token before a
            document is bos, or else eos, as in transformers and the lm-evaluation-harness.
    """
    bos = tokenizer.bos_id
    if data is None:
        prefix = tuple(tokenizer.prefix_ids)
        before = start_token(tokenizer)
    else:
        prefix = (bos,) if data.bos and bos is not None else ()
        before = tokenizer.eos_id if data.eos else None
    return SequenceStart(prefix, prefix[-1] if prefix else before)


def start_token(tokenizer: "Tokenizer") -> int | None:
    """Return the token before a document if the training data is unknown: bos, else eos."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
