"""A recipe: everything that determines a training run, in one file."""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.checkpoints.stored import open_stored
from workhorse.config.base import Config, ConfigError, OnResume
from workhorse.data import DataConfig
from workhorse.errors import WorkhorseError
from workhorse.execute.body import Execution
from workhorse.models import preset
from workhorse.nn import DecoderConfig
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import CosineConfig, OptimizerConfig, ScheduleConfig
from workhorse.optim.muon import MuonConfig
from workhorse.parallel.config import UNDIVIDED, MicroBatches, ParallelismConfig
from workhorse.parallel.division.parts import check_divisible
from workhorse.tokenizers import TokenizerConfig, tokenizer_config, train_tokenizer
from workhorse.train.objectives.balance import check_balance
from workhorse.train.objectives.distill import DistillConfig
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.train.objectives.policy import PolicyConfig
from workhorse.train.objectives.preferences import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from workhorse.train.objectives.reward import RewardConfig
from workhorse.train.report.metrics import TrackerName
from workhorse.train.rollouts import RolloutConfig


class LossSpikeConfig(Config):
    """After a loss spike, return to the last checkpoint and skip the rows read until the spike.

    PaLM did this by hand (2204.02311 §5.1). There, the same rows caused no spike when training
    started from another checkpoint.
    """

    deviations: float = Field(default=8.0, gt=0)
    """Threshold of a spike: standard deviations above the mean of the last `window` normal
    losses."""
    window: int = Field(default=100, ge=2, le=10_000)
    """Number of earlier steps that a loss is compared with."""
    in_a_row: int = Field(default=2, ge=1)
    """Number of consecutive spikes after which the run returns to a checkpoint. No checkpoint is
    saved during the spikes."""
    most: int = Field(default=5, ge=1)
    """Maximum number of returns to a checkpoint; the next spike stops the run with an error."""

    def is_spike(self, loss: float, before: Sequence[float]) -> bool:
        """Return True if a loss is a spike compared with the earlier losses.

        With fewer than `window` earlier losses, no loss is a spike.
        """
        if len(before) < self.window:
            return False
        return loss > statistics.fmean(before) + self.deviations * statistics.pstdev(before)


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


Count = Annotated[int, Field(ge=1)]
AnyObjective = Annotated[
    NextTokenConfig
    | DpoConfig
    | KtoConfig
    | OrpoConfig
    | SimpoConfig
    | RewardConfig
    | PolicyConfig
    | DistillConfig,
    Field(discriminator="kind"),
]
"""The config of any objective."""
VALIDATIONS, FEWEST_STEPS, VALIDATION_COST = 10, 10, 0.03
"""Defaults: number of validations in a run, minimum number of steps between validations, and time
of all validations as a fraction of the time of all steps."""
FORWARD_PASS = 1 / 3
"""Fraction of a step's time that the forward pass takes."""
LONGEST = 10 * 366 * 24 * 60
"""Largest value of `minutes`: ten years."""


class SamplesConfig(Config):
    """Completions generated during training, for people to read."""

    every: Count = 500
    """Steps between samples. They are also generated after the last step."""
    prompts: tuple[str, ...] = ("",)
    """Prompts; each gets one completion. An empty prompt stands for the beginning of a document."""
    max_new_tokens: Count = 100
    """Maximum number of tokens to generate per prompt."""
    temperature: float = Field(default=0.8, ge=0)
    """Sampling temperature: below 1 is sharper, above 1 more varied; 0 always selects the likeliest
    token."""
    seed: int = Field(default=0, ge=0)
    """Seed of the samples, the same at every step so that samples can be compared."""


class TrainConfig(Config):
    """How a model is trained.

    Sizes are totals over all processes, except `micro_batch_size`, which is per process.
    """

    steps: Annotated[Count | None, OnResume.CONTINUES] = None
    """Number of updates of the weights. None: determined by `minutes`."""
    minutes: float | None = Field(default=None, gt=0, le=LONGEST)
    """Duration of all steps and validations in minutes, in place of `steps`. When the run begins,
    steps are timed for a twentieth of this time, up to 30 seconds, and their results are discarded.
    The recipe in the run directory stores the resulting number of steps, and a resumed run keeps
    it."""
    batch_size: Annotated[Count, OnResume.CONTINUES]
    """Sequences per step."""
    seq_len: Count
    """Predicted tokens per sequence."""
    micro_batch_size: Annotated[Count | Literal["auto"] | None, OnResume.ROUNDED] = None
    """Sequences that pass through the model at once; None: the whole batch. A smaller value needs
    less memory and gives the same gradient up to rounding. With `auto` a new run finds the largest
    equal part of the batch that fits into memory; a resumed run keeps it."""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """Seed of the initial weights, the order of the data, and dropout."""

    objective: AnyObjective = NextTokenConfig()
    """The loss that training minimises."""
    rollouts: RolloutConfig | None = None
    """Learn from rewards: each batch has completions that the model generates for prompts of the
    data. Needs `objective: {kind: policy}`. None: learn from the data itself."""
    optimizer: Annotated[OptimizerConfig, OnResume.CONTINUES] = MuonConfig()
    """How a step updates the weights from the gradient."""
    schedule: Annotated[ScheduleConfig, OnResume.CONTINUES] = CosineConfig()
    """The factor on every learning rate at each step."""
    grad_clip: Annotated[float | None, OnResume.CONTINUES] = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient; a larger gradient is scaled down. None: no clipping."""
    balance_loss: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0)
    """Weight of the loss that balances how often the experts of a mixture are chosen within each
    sequence (DeepSeek-V3, 2412.19437 §2.1.2; 0.0001 there), summed over the layers. It is computed
    per sequence, so that the gradient does not depend on `micro_batch_size`; `balance_rate`
    balances whole batches. Padding does not count."""
    balance_rate: Annotated[float, OnResume.CONTINUES] = Field(default=0.0, ge=0)
    """Change of each expert's selection bias per update, up or down, so that all experts are chosen
    equally often (0.001 in 2408.15664)."""
    max_bad_steps: Annotated[Count, OnResume.NO_EFFECT] = 10
    """Stop after this many consecutive steps whose loss or gradient is not finite."""
    loss_spikes: Annotated[LossSpikeConfig | None, OnResume.CONTINUES] = None
    """Reaction to loss spikes; None: continue training."""

    device: Annotated[str, OnResume.ROUNDED] = "auto"
    """`auto` (CUDA if available), `cpu`, `cuda`, `cuda:N` or `mps`."""
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], OnResume.ROUNDED] = (
        "float32"
    )
    """Number format of the arithmetic. The weights that the optimizer updates and that checkpoints
    hold are always float32. `auto` is bfloat16 if the device has instructions for it. `float16`
    needs CUDA, and scales the loss so that small gradients do not vanish."""
    matmul_precision: Annotated[Literal["highest", "high"], OnResume.ROUNDED] = "highest"
    """Precision of float32 matmuls, as PyTorch defines it. With `high`, linear layers on a CPU with
    a matrix unit represent each element by the sum of two bfloat16 numbers, and all matmuls on CUDA
    use TensorFloat32, if that is faster. It has no effect on other devices, or if `dtype` leaves no
    float32 matmuls."""
    kernel: Annotated[
        Literal["auto", "eager", "sdpa", "flex", "flex-uncompiled"], OnResume.ROUNDED
    ] = "auto"
    """The implementation of attention."""
    threads: Annotated[int, OnResume.ROUNDED] = Field(default=0, ge=0)
    """Number of CPU threads; 0 lets PyTorch decide. It affects rounding."""
    execution: Annotated[Execution, OnResume.ROUNDED] = "auto"
    """Implementation of forward and backward passes and updates. A log line names the one in use.
    `auto`: native operators if there are any, otherwise PyTorch.
    `reference`: the unchanged modules in PyTorch.
    `native`: native operators on a CPU; an error if there are none.
    `compiled`: as `auto`, plus `torch.compile` for the layers (identical layers are compiled once)
    and, if no native operator computes them, for the loss and AdamW's update of bfloat16 weights.
    Starting takes longer. Training is much faster on a GPU, and up to 20 % faster on CPUs."""
    fp8: Annotated[bool, OnResume.ROUNDED] = False
    """True to multiply in float8 inside the layers (torchao). Needs CUDA with compute capability
    8.9 or higher and `dtype: bfloat16`; pays off with `execution: compiled` and wide layers."""
    activation_checkpointing: Annotated[bool, OnResume.ROUNDED] = False
    """True to keep one activation per layer and recompute the rest in the backward pass."""

    log_every: Annotated[Count, OnResume.NO_EFFECT] = 10
    """Steps between log lines of metrics."""
    eval_every: Annotated[Count | Literal["auto"] | None, OnResume.NO_EFFECT] = "auto"
    """Steps between validations. `auto`: ten validations in a run, but at least ten steps apart.
    None: only after the last step."""
    eval_batches: Annotated[Count | Literal["auto"] | None, OnResume.NO_EFFECT] = "auto"
    """Batches in a validation, spread evenly over the validation split. `auto`: a number that takes
    about 3 % of the training time, at least one. None: the whole split. The validation after the
    last step always uses the whole split."""
    samples: Annotated[SamplesConfig | None, OnResume.NO_EFFECT] = None
    """Completions to generate during training; None: no completions."""
    checkpoint_every: Annotated[Count, OnResume.NO_EFFECT] = 1000
    """Steps between checkpoints. There is also one after the last step."""
    keep: Annotated[Count, OnResume.NO_EFFECT] = 2
    """Number of checkpoints to keep; older ones are removed."""
    trackers: Annotated[tuple[TrackerName, ...], OnResume.NO_EFFECT] = ()
    """Experiment trackers that get the metrics, in addition to `metrics.jsonl`."""

    @model_validator(mode="before")
    @classmethod
    def _default_kinds(cls, fields: Any) -> Any:
        """Add the default `kind` to sections without one.

        `optimizer: {learning_rate: 3e-4}` thus sets an option of the default optimizer.
        """
        if not isinstance(fields, dict):
            return fields
        tagged = ("objective", "optimizer", "schedule")
        kinds = {name: cls.model_fields[name].default.kind for name in tagged}
        fields = _renamed(fields)
        return {
            name: {"kind": kinds[name], **value}
            if name in kinds and isinstance(value, dict)
            else value
            for name, value in fields.items()
        }

    @model_validator(mode="after")
    def _rollouts_fit(self) -> Self:
        if (self.rollouts is None) != (self.objective.kind != "policy"):
            raise ConfigError(
                "rollouts and the objective policy need each other; set both or none of them"
            )
        if self.rollouts is not None and self.minutes is not None:
            raise ConfigError(
                f"minutes={self.minutes:g} cannot be converted to steps with rollouts, because "
                "their time changes with the length of completions; set steps"
            )
        if self.rollouts is not None and self.batch_size % self.rollouts.completions:
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by rollouts.completions="
                f"{self.rollouts.completions}; choose a multiple"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.steps is None and self.minutes is None:
            raise ConfigError("'steps' is missing; set one such as steps: 2000 or minutes: 5")
        if self.steps is not None and self.minutes is not None:
            raise ConfigError(
                f"steps={self.steps} and minutes={self.minutes:g} are both set; remove one"
            )
        if self.steps is not None and self.schedule.warmup_steps >= self.steps:
            raise ConfigError(
                f"warmup_steps={self.schedule.warmup_steps} is not less than "
                f"steps={self.steps}; shorten the warm-up, for example to "
                f"train.schedule.warmup_steps={self.steps // 10}",
                "schedule",
            )
        if isinstance(self.micro_batch_size, int) and self.micro_batch_size > self.batch_size:
            raise ConfigError(
                f"micro_batch_size={self.micro_batch_size} is larger than "
                f"batch_size={self.batch_size}; choose a smaller micro_batch_size"
            )
        together = self.objective.rows_together
        for name in ("batch_size", "micro_batch_size"):
            rows = getattr(self, name)
            if isinstance(rows, int) and rows % together:
                raise ConfigError(
                    f"{name}={rows} splits groups of {together} rows, which the objective "
                    f"{self.objective.kind} needs in one pass; choose a multiple of {together}"
                )
        if self.dtype == "float16" and self.device in ("cpu", "mps"):
            raise ConfigError(
                f"float16 needs CUDA, but device is {self.device}; use bfloat16 or float32",
                "dtype",
            )
        return self

    def micro_batches(self, parallel: ParallelismConfig) -> MicroBatches:
        """Return the micro-batches of each process; `micro_batch_size` must not be `auto`."""
        assert self.micro_batch_size != "auto", "see fit_micro_batch"
        return parallel.micro_batches(self.batch_size, self.micro_batch_size)

    @property
    def length(self) -> int:
        """The number of steps; `minutes` must have been converted to steps before."""
        assert self.steps is not None, "see train/minutes.py"
        return self.steps

    @property
    def needs_initial_model(self) -> bool:
        """True if each step needs log-probabilities of the model that training started from."""
        return isinstance(self.objective, PolicyConfig) and self.objective.kl_weight > 0

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_len

    @property
    def steps_between_validations(self) -> int | None:
        """Number of steps between validations; None: only after the last step."""
        if self.eval_every == "auto":
            return max(FEWEST_STEPS, math.ceil(self.length / VALIDATIONS))
        return self.eval_every

    @property
    def rows_in_validation(self) -> int | None:
        """Number of rows in each validation except the final one; None: all."""
        batches = self.eval_batches
        if batches == "auto":
            steps = VALIDATION_COST * (self.steps_between_validations or 1)
            batches = max(1, int(steps / FORWARD_PASS))
        return None if batches is None else batches * self.batch_size


def _renamed(fields: dict[str, Any]) -> dict[str, Any]:
    """Rename settings of older runs to their current names; current names take precedence."""
    fields = dict(fields)
    if "z_loss" in fields and isinstance(objective := fields.get("objective", {}), dict):
        fields["objective"] = {"z_loss": fields.pop("z_loss"), **objective}
    if "jumps" in fields:
        fields.setdefault("loss_spikes", fields.pop("jumps"))
    if isinstance(old := fields.get("compile"), bool):
        fields.setdefault("execution", "compiled" if old else "auto")
        del fields["compile"]
    elif "compile" in fields:
        raise ConfigError(
            f"compile={old!r} was replaced by execution; set execution: compiled or auto"
        )
    return fields


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
    `train.seq_len`."""
    tokenizer: TokenizerConfig
    """The tokenizer: trained on the recipe's own corpus, or read from a folder."""
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
        own = self.parallel.micro_batches(self.train.batch_size, given)
        if own.rows % together or own.size % together:
            raise ConfigError(
                f"batch_size={self.train.batch_size} gives each process {own.rows} rows in passes "
                f"of {own.size}, which splits groups of {together}; choose a multiple of "
                f"{together} for each process",
                "train",
            )
        divided = [name for name in ("tensor", "pipeline") if self.parallel.ways[name] > 1]
        if self.train.objective.needs_all_logits and divided:
            raise ConfigError(
                f"{divided[0]}={self.parallel.ways[divided[0]]} divides the logits, which the "
                f"objective {self.train.objective.kind} needs together; use shard or context",
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
            ("train.objective.kl_weight", train.needs_initial_model),
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
            from workhorse.train.recipe.overrides import with_its_place  # it imports this module

            raise with_its_place(error, fields) from None

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
