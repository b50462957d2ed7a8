"""A recipe: everything that determines a training run, in one file."""

from typing import Annotated, Any, Self

from pydantic import field_validator, model_validator

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.checkpoints.stored import open_stored
from workhorse.config.base import Config, ConfigError, OnResume
from workhorse.data import DataConfig
from workhorse.errors import WorkhorseError
from workhorse.models import preset
from workhorse.nn import DecoderConfig
from workhorse.optim.adamw import AdamWConfig
from workhorse.parallel.config import UNDIVIDED, ParallelismConfig
from workhorse.parallel.division.parts import check_divisible
from workhorse.tokenizers import TokenizerConfig, tokenizer_config, train_tokenizer
from workhorse.train.objectives.balance import check_balance
from workhorse.train.recipe.keys import with_its_place
from workhorse.train.recipe.training import TrainConfig


def with_init(fields: dict[str, Any]) -> dict[str, Any]:
    """Complete a recipe's fields with architecture and tokenizer of the model in `init`.

    Call it before `Recipe.from_dict`, which reads no other files. The model is read, or downloaded
    from the hub. Fields without `init`, or with full model and tokenizer, are returned unchanged.
    If the recipe adds tokens, `vocab_size` grows to the size of its tokenizer.

    Raises:
        ConfigError: there is no such model, both `init` and a preset are set, or the recipe's
            tokenizer cannot be read.
    """
    init, changes = fields.get("init"), fields.get("model") or {}
    if not isinstance(init, str) or is_written_out(fields):
        return fields
    if "preset" in changes:
        raise ConfigError(f"init={init} already sets the architecture; remove preset", "model")
    try:
        stored = open_stored(init)
        model = stored.config.to_dict()
    except WorkhorseError as error:
        raise ConfigError(str(error), "init") from None
    tokenizer = {"kind": "file", "path": str(stored.tokenizer_folder)}
    own = fields.get("tokenizer")
    if isinstance(own, dict) and own.get("kind", "file") == "file":
        tokenizer |= own
        model["vocab_size"] = max(model["vocab_size"], _tokens_of(tokenizer))
        fields = {**fields, "tokenizer": tokenizer}
    return written_over(fields, model, tokenizer)


def _tokens_of(tokenizer: dict[str, Any]) -> int:
    """Return the vocabulary size of an existing tokenizer with the tokens that a recipe adds."""
    try:
        return train_tokenizer(tokenizer_config(tokenizer), ()).vocab_size
    except WorkhorseError as error:
        error = error if isinstance(error, ConfigError) else ConfigError(str(error))
        raise error.below("tokenizer") from None


class Recipe(Config):
    """One training run, from raw text to a model."""

    name: Annotated[str, OnResume.NO_EFFECT]
    """Name of the run. Its folder is `runs/NAME` unless another is given."""
    description: Annotated[str, OnResume.NO_EFFECT] = ""
    """Description for people, such as the hardware it was written for, its duration, its
    results."""
    init: str | None = None
    """A trained model to start from: a run directory, a Hugging Face directory or a hub id. It
    provides the architecture (`model` then contains only changes, such as dropout) and, unless one
    is given, the tokenizer, to which `tokenizer: {add_tokens: [...], chat: true}` adds tokens. The
    recipe in the new run's directory contains both in full."""
    init_optimizer: bool = False
    """True to also load the optimizer's state from the run directory in `init`. Steps and schedule
    start from zero."""
    adapter: AdapterConfig | None = None
    """A low-rank adapter to train on the model in `init`, whose own weights stay frozen; None to
    train all weights. Without `train.optimizer`, the optimizer is AdamW. Checkpoints hold only the
    adapter, so the run needs the model in `init` to resume and to be loaded."""
    model: dict[str, Any]
    """The fields of a `DecoderConfig`, or `preset: NAME` and the fields that differ from it. By
    default, `vocab_size` is the tokenizer's, and `max_seq_len` is the preset's, or without a preset
    `train.seq_len`. With `init`, it is optional: the model is the one of `init`."""
    tokenizer: TokenizerConfig
    """The tokenizer: trained on the recipe's own corpus, or read from a folder. With `init`, it is
    optional: the tokenizer is the one of `init`."""
    data: DataConfig
    """The corpus, and how it is packed into sequences."""
    train: TrainConfig
    """How the weights are trained."""
    parallel: ParallelismConfig = UNDIVIDED
    """How the work is split among processes."""

    @model_validator(mode="before")
    @classmethod
    def _needs_no_other_model(cls, fields: Any) -> Any:
        init = fields.get("init") if isinstance(fields, dict) else None
        if isinstance(init, str) and not is_written_out(fields):
            raise ConfigError(
                f"the model and tokenizer of {init} are not in the recipe; "
                "add them with workhorse.train.with_init(fields)",
                "init",
            )
        return fields

    @model_validator(mode="after")
    def _rows_for_all(self) -> Self:
        try:
            self.parallel.check_batch(self.train.batch_size, self.train.seq_len)
        except ConfigError as error:
            raise error.below("parallel") from None
        together = self.train.objective.rows_together
        given = self.train.micro_batch_size
        given = given if isinstance(given, int) else None
        rows, parts = self.train.batch_size, self.parallel.parts
        if together > 1 and rows % (parts * together):
            raise ConfigError(
                f"batch_size={rows} is computed in {parts} parts, which splits groups of "
                f"{together} rows; choose a multiple of {parts * together}",
                "train",
            )
        size = self.parallel.micro_batches(rows, given).size
        if size % together:
            raise ConfigError(
                f"batch_size={rows} is computed in micro-batches of {size}, which splits groups of "
                f"{together} rows; set micro_batch_size to a multiple of {together}",
                "train",
            )
        divided = [name for name in ("tensor", "pipeline") if self.parallel.ways[name] > 1]
        if divided and (setting := self.train.objective.needs_all_logits):
            raise ConfigError(
                f"{divided[0]}={self.parallel.ways[divided[0]]} divides the logits that {setting} "
                "needs; use shard or context",
                "parallel",
            )
        return self

    @model_validator(mode="after")
    def _rollouts_fit(self) -> Self:
        if self.train.rollouts is None:
            return self
        if self.data.packing != "padded":
            raise ConfigError(
                f"packing={self.data.packing} puts several prompts into a row; set it to padded",
                "data",
            )
        if names := self.data.without_prompts:
            raise ConfigError(
                f"{names[0]} has no prompts with a right answer, which rollouts need; use tasks, "
                "or conversations with rows=conversations and learn=assistant or last",
                "data",
            )
        ways = self.parallel.ways
        if any(count > 1 for name, count in ways.items() if name != "data"):
            raise ConfigError(
                "rollouts need whole weights on each process; set only parallel.data", "parallel"
            )
        return self

    @model_validator(mode="before")
    @classmethod
    def _optimizer_of_adapters(cls, fields: Any) -> Any:
        """Make AdamW the default optimizer of an adapter."""
        train = fields.get("train") if isinstance(fields, dict) else None
        if not isinstance(train, dict) or fields.get("adapter") is None:
            return fields
        chosen = train.get("optimizer", {})
        if isinstance(chosen, dict):
            chosen = {"kind": AdamWConfig.model_fields["kind"].default, **chosen}
        return {**fields, "train": {**train, "optimizer": chosen}}

    @model_validator(mode="after")
    def _adapter_of_something(self) -> Self:
        if self.adapter is None:
            return self
        if self.init is None:
            raise ConfigError("needs a trained model; set init", "adapter")
        self.adapter.check_parallel(self.parallel)
        train = self.train
        for name, used in (
            ("init_optimizer=true", self.init_optimizer),
            ("train.fp8=true", train.fp8),
            (f"train.balance_rate={train.balance_rate:g}", train.balance_rate > 0),
            (
                "train.objective.kl_weight with also_train",
                train.objective.reference == "token" and bool(self.adapter.also_train),
            ),
        ):
            if used:
                raise ConfigError(f"does not support {name}; remove one of the two", "adapter")
        return self

    @model_validator(mode="after")
    def _optimizer_of_something(self) -> Self:
        if self.init_optimizer and self.init is None:
            raise ConfigError(
                "init_optimizer=true needs init, which is not set; set init to a run directory",
                "init_optimizer",
            )
        if self.init_optimizer and self.train.objective.critic is not None:
            raise ConfigError(
                "init_optimizer=true does not fit objective.values, whose head is new; remove it",
                "init_optimizer",
            )
        return self

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise ConfigError(f"{name!r} is not a folder name; use letters, digits, '-' and '_'")
        return name

    @model_validator(mode="after")
    def _model_can_be(self) -> Self:
        # Finds most mistakes before a tokenizer is trained, that is, with a placeholder vocabulary.
        vocab_size = self.model.get("vocab_size")
        self.decoder_config(vocab_size if isinstance(vocab_size, int) and vocab_size > 0 else 1)
        return self

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        try:
            return super().from_dict(fields)
        except ConfigError as error:
            raise with_its_place(cls, error, fields) from None

    def decoder_config(self, vocab_size: int) -> DecoderConfig:
        """Return the full config of the model.

        Args:
            vocab_size: the tokenizer's vocabulary size. The recipe may set a larger one; the
                additional ids are unused.

        Raises:
            ConfigError: the model is invalid, its vocabulary is smaller than the tokenizer's, its
                context is shorter than the training sequences, it has load balancing but no mixture
                of experts, or it cannot be split among processes.
        """
        fields = dict(self.model)
        if "preset" in fields:
            fields = preset_with(str(fields.pop("preset")), fields)
        fields.setdefault("vocab_size", vocab_size)
        fields.setdefault("max_seq_len", self.train.seq_len)
        try:
            config = DecoderConfig.from_dict(fields)
        except ConfigError as error:
            raise error.below("model") from None
        if config.vocab_size < vocab_size:
            raise ConfigError(
                f"vocab_size={config.vocab_size} is less than the tokenizer's {vocab_size}; "
                "remove vocab_size",
                "model",
            )
        if config.max_seq_len < self.train.seq_len:
            raise ConfigError(
                f"max_seq_len={config.max_seq_len} is less than train.seq_len="
                f"{self.train.seq_len}; set model.max_seq_len={self.train.seq_len}, or shorten the "
                "sequences",
                "model",
            )
        check_balance(config, weight=self.train.balance_loss, rate=self.train.balance_rate)
        check_divisible(config, self.train.kernel, self.parallel)
        return config

    def expanded(self) -> Self:
        """Return the recipe with all settings of its model, including settings from a preset.

        A missing `vocab_size` is not added, because the tokenizer determines it.
        """
        vocab_size = self.model.get("vocab_size")
        model = self.decoder_config(vocab_size or 1).to_dict()
        if vocab_size is None:
            del model["vocab_size"]
        return self.replace(model=model)


def written_over(fields: dict[str, Any], model: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Complete a recipe's fields with a model and a tokenizer; its own settings take precedence."""
    changed = merged(model, fields.get("model") or {})
    return {"tokenizer": tokenizer, **fields, "model": changed}


def is_written_out(fields: dict[str, Any]) -> bool:
    """Return True if a recipe's fields contain full model settings and a tokenizer.

    The model in `init` is then not needed. The recipe in a run directory always contains both.
    """
    model = fields.get("model") or {}
    needed = DecoderConfig.model_fields.items()
    tokenizer = fields.get("tokenizer", {})
    return not isinstance(model, dict) or (
        (not isinstance(tokenizer, dict) or "kind" in tokenizer)
        and all(name in model for name, field in needed if field.is_required())
    )


def preset_with(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the model fields of a preset with `changes` merged in.

    The preset's `vocab_size` is removed, because the tokenizer determines it.
    """
    try:
        fields = preset(name).to_dict()
    except ConfigError:
        raise
    except WorkhorseError as error:
        raise ConfigError(str(error), "model.preset") from None
    del fields["vocab_size"]
    return merged(fields, changes)


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Merge `changes` into `fields` recursively; a different `kind` replaces a whole mapping."""
    result = dict(fields)
    for key, value in changes.items():
        old = result.get(key)
        same_kind = (
            isinstance(old, dict)
            and isinstance(value, dict)
            and value.get("kind", old.get("kind")) == old.get("kind")
        )
        result[key] = merged(old or {}, value) if same_kind else value
    return result
