"""The section `data` of a recipe: sources, held-out documents, and how documents become rows."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from workhorse.config.base import Config, ConfigError, OnResume

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

STDIN = Path("-")
"""A path of `-` is the standard input."""

DEFAULT_FRACTION = 0.1
"""Share of a corpus held out when its config says nothing."""

SHORTHANDS = {
    "stdlib": {"kind": "stdlib"},
    "stdin": {"kind": "text", "path": str(STDIN)},
}
"""`corpus: stdlib` and `corpus: stdin`: sources that need only a name."""

Fraction = Annotated[float, Field(ge=0.0, lt=1.0)]
Packing = Literal["windows", "random_windows", "documents"]


class HeldOut(Config):
    """The validation split of a source: a part of it, or another path."""

    validation: Annotated[Path | None, OnResume.SAME_TEXT] = None
    """A separate path for the validation split, read like `path`, all of which then trains."""
    validation_fraction: Fraction | None = None
    """Share held out, 0 for none. None: a tenth, or nothing if `validation` names a path."""

    @model_validator(mode="after")
    def _one_validation(self) -> "HeldOut":
        if self.validation == STDIN:
            raise ConfigError("the standard input can train but not validate; name a file")
        if self.validation is not None and self.validation_fraction is not None:
            raise ConfigError("validation and validation_fraction are both set; keep one")
        return self

    @property
    def held_out(self) -> float:
        """The share of `path` that belongs to the validation split."""
        if self.validation is not None:
            return 0.0
        return DEFAULT_FRACTION if self.validation_fraction is None else self.validation_fraction

    @property
    def has_validation(self) -> bool:
        return self.validation is not None or self.held_out > 0


class TextConfig(HeldOut):
    """One plain text file, one document; its validation split is the end of the text.

    Of n characters the first `int((1 - validation_fraction) * n)` train.
    """

    kind: Literal["text"] = "text"
    path: Annotated[Path, OnResume.SAME_TEXT]
    """A file, plain or compressed with gzip or zstd; `-` is the standard input."""
    errors: Annotated[Literal["strict", "replace"], OnResume.SAME_TEXT] = "strict"
    """What happens to bytes that are not UTF-8: `strict` stops with a message, `replace` makes them
    U+FFFD."""


class FolderConfig(HeldOut):
    """A folder of text files, each one document, in the order of their paths.

    A file is held out by a hash of its path inside the folder. Hidden files are left out.
    """

    kind: Literal["folder"] = "folder"
    path: Annotated[Path, OnResume.SAME_TEXT]
    """The folder."""
    glob: Annotated[str, OnResume.SAME_TEXT] = "**/*"
    """Which files: a pattern for `pathlib.Path.glob`."""
    errors: Annotated[Literal["strict", "replace"], OnResume.SAME_TEXT] = "strict"
    """What happens to bytes that are not UTF-8: `strict` stops with a message, `replace` makes them
    U+FFFD."""


class JsonlConfig(HeldOut):
    """JSON lines, each an object with the text of one document, held out by a hash of the text."""

    kind: Literal["jsonl"] = "jsonl"
    path: Annotated[Path, OnResume.SAME_TEXT]
    """A file, plain or compressed with gzip or zstd, or a folder of `.jsonl[.gz|.zst]` files; `-`
    is the standard input."""
    text_field: str = "text"
    """The key of the text. Lines in which it is null or empty are skipped."""
    errors: Annotated[Literal["strict", "replace"], OnResume.SAME_TEXT] = "strict"
    """What happens to bytes that are not UTF-8: `strict` stops with a message, `replace` makes them
    U+FFFD."""


class ParquetConfig(HeldOut):
    """Parquet files (needs pyarrow): each row a document, held out by a hash of the text."""

    kind: Literal["parquet"] = "parquet"
    path: Annotated[Path, OnResume.SAME_TEXT]
    """A file, or a folder of `.parquet` files."""
    text_field: str = "text"
    """The column of the text. Rows in which it is null or empty are skipped."""
    errors: Annotated[Literal["strict", "replace"], OnResume.SAME_TEXT] = "strict"
    """What happens to bytes that are not UTF-8: `strict` stops with a message, `replace` makes them
    U+FFFD."""


class StdlibConfig(Config):
    """The standard library of the running Python; modules are held out by a hash of their names."""

    kind: Literal["stdlib"] = "stdlib"
    validation_fraction: Fraction = DEFAULT_FRACTION
    """Share of the modules held out."""

    @property
    def held_out(self) -> float:
        return self.validation_fraction

    @property
    def has_validation(self) -> bool:
        return self.validation_fraction > 0


SourceConfig = Annotated[
    TextConfig | FolderConfig | JsonlConfig | ParquetConfig | StdlibConfig,
    Field(discriminator="kind"),
]
"""One source of text."""


def source_of(name: str | Path) -> SourceConfig:
    """The source that a bare name stands for; nothing is held out of it, except of `stdlib`.

    Args:
        name: `stdlib`, `-` for the standard input, a folder of texts, or a file: `.jsonl` and
            `.parquet` by their endings, others as plain text.
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
    return SHORTHANDS.get(source, {"kind": source}) if isinstance(source, str) else source


class MixtureConfig(Config):
    """Several named sources, their rows mixed by weight (see `workhorse.data.sampling`)."""

    kind: Literal["mixture"] = "mixture"
    sources: dict[str, SourceConfig]
    """The sources by name; a name is made of letters, digits, `_` and `-`."""
    weights: dict[str, Annotated[float, Field(gt=0)]] = Field(default={})
    """Share of each source in the training rows, in any unit; a source left out has 1."""

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
                    f"{name!r} cannot name a source; use letters, digits, '_' and '-'", "sources"
                )
        for name in self.weights:
            if name not in self.sources:
                known = ", ".join(self.sources)
                raise ConfigError(f"{name!r} is not one of the sources ({known})", "weights")
        return self


class DataConfig(Config):
    """From text to rows of tokens."""

    corpus: Annotated[
        TextConfig | FolderConfig | JsonlConfig | ParquetConfig | StdlibConfig | MixtureConfig,
        Field(discriminator="kind"),
    ]
    """One source, or a mixture of several. `stdlib` and `stdin` may be written as a bare name."""
    packing: Packing = "windows"
    """How training rows are cut from the tokens (see `workhorse.data.sampling`)."""
    bos: bool = False
    """Begin every document with the tokenizer's bos token."""
    eos: bool = True
    """End every document with the tokenizer's eos token."""
    cache_dir: Annotated[Path | None, OnResume.TAKEN] = None
    """Where token shards are kept so that runs can share them; None: in the run directory."""

    @field_validator("corpus", mode="before")
    @classmethod
    def _shorthand(cls, corpus: Any) -> Any:
        return _spelled_out(corpus)

    def kept_in(self, folder: Path) -> Path:
        """Where token shards are kept: `cache_dir`, or `folder` if it is not set."""
        try:
            return (self.cache_dir or folder).expanduser()
        except RuntimeError:
            raise ConfigError(f"there is no home of {self.cache_dir}", "data.cache_dir") from None

    @property
    def packed(self) -> bool:
        """Whether rows hold several documents, which see nothing of each other."""
        return self.packing == "documents"

    @property
    def sources(self) -> dict[str, SourceConfig]:
        """The sources by name; a single one is called `corpus`."""
        if isinstance(self.corpus, MixtureConfig):
            return self.corpus.sources
        return {"corpus": self.corpus}

    def key_of(self, name: str) -> str:
        """The key of a source in a recipe."""
        single = not isinstance(self.corpus, MixtureConfig)
        return "data.corpus" if single else f"data.corpus.sources.{name}"

    @property
    def weights(self) -> dict[str, float]:
        """The weight of every source."""
        given = self.corpus.weights if isinstance(self.corpus, MixtureConfig) else {}
        return {name: given.get(name, 1.0) for name in self.sources}


@dataclass(frozen=True)
class Beginning:
    """How texts begin for a model."""

    prefix: tuple[int, ...]
    """The tokens at the beginning of every text."""
    start: int | None
    """The token before a text's own first one: the last of `prefix`, or the end of the text before.
    None: there was none."""

    def encode(self, tokenizer: "Tokenizer", prompt: str) -> list[int]:
        """A prompt's tokens; an empty prompt asks for a text from its beginning.

        Empty if nothing stood before a text.
        """
        tokens = [*self.prefix, *tokenizer.encode(prompt)]
        return tokens or ([] if self.start is None else [self.start])


def beginning(tokenizer: "Tokenizer", data: DataConfig | None) -> Beginning:
    """How texts begin for a model.

    Args:
        tokenizer: the model's.
        data: what the model was trained on; None for a model from elsewhere, whose training is
            unknown. Its texts begin as its tokenizer says; if that adds nothing, the token before a
            text is bos or else eos, as in transformers and the lm-evaluation-harness.
    """
    bos = tokenizer.bos_id
    if data is None:
        prefix = tuple(tokenizer.prefix_ids)
        before = beginning_token(tokenizer)
    else:
        prefix = (bos,) if data.bos and bos is not None else ()
        before = tokenizer.eos_id if data.eos else None
    return Beginning(prefix, prefix[-1] if prefix else before)


def beginning_token(tokenizer: "Tokenizer") -> int | None:
    """The token that begins a text if the training is unknown: bos, or else eos."""
    return tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
