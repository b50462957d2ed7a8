"""A recipe: everything that decides a training run, in one file."""

import math
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from workhorse.config import Config, ConfigError
from workhorse.data import DataConfig
from workhorse.errors import WorkhorseError
from workhorse.models import preset
from workhorse.nn import DecoderConfig
from workhorse.on_resume import OnResume
from workhorse.optim.groups import OptimizerConfig
from workhorse.optim.muon import MuonConfig
from workhorse.optim.schedules import CosineConfig, ScheduleConfig
from workhorse.tokenizers import TokenizerConfig
from workhorse.train.objectives.balance import check_balance
from workhorse.train.report.trackers import TrackerName

Count = Annotated[int, Field(ge=1)]
VALIDATIONS, FEWEST_STEPS, VALIDATION_COST = 10, 10, 0.03
"""The defaults of a run: the number of validations, the fewest steps between them, and the share of
the steps' time that they may take."""


class SamplesConfig(Config):
    """Texts generated during training, for people to read."""

    every: Count = 500
    """Steps between samples; they are also generated after the last step."""
    prompts: tuple[str, ...] = ("",)
    """One text for each; an empty prompt begins a document."""
    max_new_tokens: Count = 100
    """The most tokens of a text."""
    temperature: float = Field(default=0.8, ge=0)
    """Below 1 sharper, above 1 more varied, 0 always the likeliest token."""
    seed: int = Field(default=0, ge=0)
    """Seed of the samples, the same at every step so that they can be compared."""


class TrainConfig(Config):
    """How a model is trained. Sizes are of the whole run, on however many devices."""

    steps: Annotated[Count, OnResume.GOES_ON]
    """Updates of the weights."""
    batch_size: Annotated[Count, OnResume.GOES_ON]
    """Sequences in a step."""
    seq_len: Count
    """Predictions in a sequence."""
    micro_batch_size: Annotated[Count | Literal["auto"] | None, OnResume.ROUNDED] = None
    """Sequences that pass through the model at once; None: the whole batch. Smaller needs less
    memory and gives the same gradient to rounding. `auto` finds the largest equal share of the
    batch that fits when a run begins; a resumed run keeps it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Determines the initial weights, the order of the data and dropout."""

    optimizer: Annotated[OptimizerConfig, OnResume.GOES_ON] = MuonConfig()
    """How a step updates the weights from the gradient."""
    schedule: Annotated[ScheduleConfig, OnResume.GOES_ON] = CosineConfig()
    """The factor of every learning rate at each step."""
    grad_clip: Annotated[float | None, OnResume.GOES_ON] = Field(default=1.0, gt=0)
    """Largest norm of the gradient of all parameters; a larger one is scaled down. None: any."""
    z_loss: Annotated[float, OnResume.GOES_ON] = Field(default=0.0, ge=0)
    """Weight of the squared log-partition in what training minimises (PaLM, 2204.02311 §5). The
    loss shown is the cross-entropy without it."""
    balance_loss: Annotated[float, OnResume.GOES_ON] = Field(default=0.0, ge=0)
    """Weight of the loss that spreads the choices of each sequence over a mixture's experts
    (DeepSeek-V3, 2412.19437 §2.1.2; 0.0001 there), summed over its layers. By sequence, so that the
    gradient does not depend on `micro_batch_size`; a batch as a whole is balanced by
    `balance_rate`. Padding does not count."""
    balance_rate: Annotated[float, OnResume.GOES_ON] = Field(default=0.0, ge=0)
    """By how much an update moves the selection bias of each expert towards an equal load (0.001 in
    2408.15664)."""
    max_bad_steps: Annotated[Count, OnResume.TAKEN] = 10
    """Stop after this many steps in a row whose loss or gradient was not finite."""

    device: Annotated[str, OnResume.ROUNDED] = "auto"
    """`auto` (CUDA where there is one), `cpu`, `cuda`, `cuda:N` or `mps`."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], OnResume.ROUNDED] = (
        "float32"
    )
    """Of the arithmetic; what the optimizer updates and checkpoints hold is always float32. `auto`
    is bfloat16 where the device multiplies it natively; `float16` needs CUDA and scales the loss so
    that small gradients survive."""
    matmul_precision: Annotated[Literal["highest", "high"], OnResume.ROUNDED] = "highest"
    """Of float32 products, with PyTorch's meaning: `high` lets each number be the sum of two of
    bfloat16, or TensorFloat32, where that is faster. Linear layers do the former on a CPU with a
    matrix unit, everything the latter on CUDA. On other devices nothing changes, nor where `dtype`
    leaves no float32 products."""
    kernel: Annotated[
        Literal["auto", "eager", "sdpa", "flex", "flex-uncompiled"], OnResume.ROUNDED
    ] = "auto"
    """How attention is computed."""
    threads: Annotated[int, OnResume.ROUNDED] = Field(default=0, ge=0)
    """CPU threads; 0 lets PyTorch decide. Another number gives other roundings."""
    compile: Annotated[bool, OnResume.ROUNDED] = False
    """Compile the layers (`torch.compile`), those that are alike together: slower to start. On
    a CPU it was seen to gain nothing."""
    fp8: Annotated[bool, OnResume.ROUNDED] = False
    """Multiply in float8 inside the layers (torchao): CUDA from compute capability 8.9 on, with
    `dtype: bfloat16`; worth it with `compile: true` and wide layers."""
    activation_checkpointing: Annotated[bool, OnResume.ROUNDED] = False
    """Keep one activation a layer and compute the rest again in the backward pass."""

    log_every: Annotated[Count, OnResume.TAKEN] = 10
    """Steps between lines of metrics."""
    eval_every: Annotated[Count | Literal["auto"] | None, OnResume.TAKEN] = "auto"
    """Steps between validations. `auto`: ten times a run, or every ten steps where it is short.
    None: after the last step only."""
    eval_batches: Annotated[Count | Literal["auto"] | None, OnResume.TAKEN] = "auto"
    """Batches in a validation, evenly spread over the split. `auto`: as many as take about 3 % of
    the training's time, at least one. None: all of the split. After the last step it is always
    all of it."""
    samples: Annotated[SamplesConfig | None, OnResume.TAKEN] = None
    """Texts generated along the way; None: no texts."""
    checkpoint_every: Annotated[Count, OnResume.TAKEN] = 1000
    """Steps between checkpoints; there is one after the last step too."""
    keep: Annotated[Count, OnResume.TAKEN] = 2
    """Checkpoints kept, the newest ones."""
    trackers: Annotated[tuple[TrackerName, ...], OnResume.TAKEN] = ()
    """Where metrics go besides `metrics.jsonl`."""

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, fields: Any) -> Any:
        """`optimizer: {learning_rate: 3e-4}`, without a kind, changes the default optimizer."""
        if not isinstance(fields, dict):
            return fields
        kinds = {name: cls.model_fields[name].default.kind for name in ("optimizer", "schedule")}
        return {
            name: {"kind": kinds[name], **value}
            if name in kinds and isinstance(value, dict)
            else value
            for name, value in fields.items()
        }

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.schedule.warmup_steps >= self.steps:
            raise ConfigError(
                f"warmup_steps={self.schedule.warmup_steps} does not end within "
                f"steps={self.steps}; shorten the warm-up, as by "
                f"train.schedule.warmup_steps={self.steps // 10}",
                "schedule",
            )
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size > self.batch_size:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} is more than "
                f"batch_size={self.batch_size}; choose at most that"
            )
        if self.dtype == "float16" and self.device in ("cpu", "mps"):
            raise ConfigError(
                f"float16 needs CUDA, and device is {self.device}; choose bfloat16 or float32",
                "dtype",
            )
        return self

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def steps_between_validations(self) -> int | None:
        """None: there is one after the last step only."""
        if self.eval_every == "auto":
            return max(FEWEST_STEPS, math.ceil(self.steps / VALIDATIONS))
        return self.eval_every

    @property
    def rows_in_validation(self) -> int | None:
        """Before the last step; None: all."""
        batches = self.eval_batches
        if batches == "auto":
            # Forward is a third of a step.
            batches = max(1, int(VALIDATION_COST * 3 * (self.steps_between_validations or 1)))
        return None if batches is None else batches * self.batch_size


class Recipe(Config):
    """One training run, from raw text to a model."""

    name: Annotated[str, OnResume.TAKEN]
    """Name of the run; its folder is `runs/NAME` unless another is given."""
    description: Annotated[str, OnResume.TAKEN] = ""
    """For people: the hardware it was written for, its duration, its results."""
    init: str | None = None
    """A trained model to start from: a run directory, a Hugging Face directory or a hub id. It
    gives the architecture (`model` holds what differs, dropout for one) and, where none is named,
    the tokenizer; both are written out in the run's own recipe."""
    init_optimizer: bool = False
    """Take over the optimizer's state too, from the run directory that `init` names; the steps and
    the schedule begin anew."""
    model: dict[str, Any]
    """The fields of a `DecoderConfig`, or `preset: NAME` and the fields that differ from it.
    `vocab_size`, where left out, is the tokenizer's; `max_seq_len` the preset's, and without one
    `train.seq_len`."""
    tokenizer: TokenizerConfig
    """How text becomes tokens: trained on the recipe's own corpus, or read from a folder."""
    data: DataConfig
    """Where the text is and how it becomes rows of tokens."""
    train: TrainConfig
    """How the weights are trained."""

    @model_validator(mode="before")
    @classmethod
    def _needs_no_other_model(cls, fields: Any) -> Any:
        init = fields.get("init") if isinstance(fields, dict) else None
        if isinstance(init, str) and not is_written_out(fields):
            raise ConfigError(
                f"the model and tokenizer of {init} are not in the recipe; "
                "workhorse.train.with_init(fields) looks them up",
                "init",
            )
        return fields

    @model_validator(mode="after")
    def _optimizer_of_something(self) -> Self:
        if self.init_optimizer and self.init is None:
            raise ConfigError("init names no run to take it from; name one", "init_optimizer")
        return self

    @field_validator("name")
    @classmethod
    def _names_a_folder(cls, name: str) -> str:
        if not name or name in (".", "..") or "/" in name or "\\" in name:
            raise ConfigError(f"{name!r} cannot name a folder; use letters, digits, '-' and '_'")
        return name

    @model_validator(mode="after")
    def _model_can_be(self) -> Self:
        # Most mistakes show here, before a tokenizer is trained and its vocabulary's size known.
        given = self.model.get("vocab_size")
        self.decoder_config(given if isinstance(given, int) and given > 0 else 1)
        return self

    @classmethod
    def from_dict(cls, fields: Any) -> Self:
        try:
            return super().from_dict(fields)
        except ConfigError as error:
            from workhorse.train.recipe.misplaced import with_its_place  # which knows this class

            raise with_its_place(error, fields) from None

    def decoder_config(self, vocab_size: int) -> DecoderConfig:
        """The model's config in full.

        Args:
            vocab_size: of the tokenizer. A larger one in the recipe stands: its last rows idle.

        Raises:
            ConfigError: an impossible model, a vocabulary smaller than the tokenizer's, a context
                shorter than the training sequences, or balancing without a mixture of experts.
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
                "leave it out",
                "model",
            )
        if config.max_seq_len < self.train.seq_len:
            raise ConfigError(
                f"max_seq_len={config.max_seq_len} is less than train.seq_len="
                f"{self.train.seq_len}; raise it or shorten the sequences",
                "model",
            )
        check_balance(config, weight=self.train.balance_loss, rate=self.train.balance_rate)
        return config

    def written_out(self) -> Self:
        """The same recipe with every setting of its model, also those that a preset stands for.

        `vocab_size` stays left out where it is: the tokenizer decides it.
        """
        given = self.model.get("vocab_size")
        model = self.decoder_config(given or 1).to_dict()
        if given is None:
            del model["vocab_size"]
        return self.replace(model=model)


def written_over(fields: dict[str, Any], model: dict[str, Any], tokenizer: Any) -> dict[str, Any]:
    """A recipe's fields, its model written over another and a tokenizer where it names none."""
    changed = merged(model, fields.get("model") or {})
    return {"tokenizer": tokenizer, **fields, "model": changed}


def is_written_out(fields: dict[str, Any]) -> bool:
    """Whether a recipe's fields hold all that `init` gives, as those of a run's own recipe do."""
    model = fields.get("model") or {}
    needed = DecoderConfig.model_fields.items()
    return not isinstance(model, dict) or (
        "tokenizer" in fields
        and all(name in model for name, field in needed if field.is_required())
    )


def preset_with(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    """A preset's fields with some changed; its vocabulary is the tokenizer's unless given."""
    try:
        fields = preset(name).to_dict()
    except ConfigError:
        raise
    except WorkhorseError as error:
        raise ConfigError(str(error), "model.preset") from None
    del fields["vocab_size"]
    return merged(fields, changes)


def merged(fields: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`changes` written over `fields`, mapping by mapping; another `kind` replaces the whole."""
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
