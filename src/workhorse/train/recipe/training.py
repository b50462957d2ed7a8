"""The section `train` of a recipe: how weights are trained."""

import math
import statistics
from collections.abc import Sequence
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import Field, model_validator

from workhorse.config.base import Config, ConfigError, OnResume
from workhorse.execute.body import Execution
from workhorse.optim.groups import CosineConfig, OptimizerConfig, ScheduleConfig
from workhorse.optim.muon import MuonConfig
from workhorse.parallel.config import MicroBatches, ParallelismConfig
from workhorse.train.objectives.distill import DistillConfig
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.train.objectives.objective import ObjectiveConfig, Weight
from workhorse.train.objectives.policy import PolicyConfig
from workhorse.train.objectives.preferences import DpoConfig, KtoConfig, OrpoConfig, SimpoConfig
from workhorse.train.objectives.reward import RewardConfig
from workhorse.train.report.metrics import TrackerName
from workhorse.train.rollouts import RolloutConfig

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
OBJECTIVES: dict[str, type[ObjectiveConfig]] = {
    one.model_fields["kind"].default: one for one in get_args(get_args(AnyObjective)[0])
}
"""The config class of each objective, by `kind`."""
VALIDATIONS, FEWEST_STEPS, VALIDATION_COST = 10, 10, 0.03
"""Defaults: number of validations in a run, minimum number of steps between validations, and time
of all validations as a fraction of the time of all steps."""
FORWARD_PASS = 1 / 3
"""Fraction of a step's time that the forward pass takes."""
LONGEST = 10 * 366 * 24 * 60
"""Largest value of `minutes`: ten years."""


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


OTHER_OBJECTIVES = {
    **dict.fromkeys(
        [
            f"objective={name}"
            for name in ("cispo", "dapo", "dr_grpo", "grpo", "gspo", "ppo", "reinforce", "rloo")
        ],
        "use kind: policy with its settings (workhorse recipe train.objective)",
    ),
    "objective=gkd": "use kind: distill",
    "objective=ipo": "use kind: dpo with loss: ipo",
    "objective=reward_modeling": "use kind: reward",
    "objective=sft": "use kind: next_token with conversations as data.corpus",
}
"""Remedies for names that objectives have in other programs; see `Config.elsewhere`."""


class TrainConfig(Config):
    """How a model is trained.

    Sizes are totals over all processes, except `micro_batch_size`, which is per process.
    """

    elsewhere = OTHER_OBJECTIVES

    steps: Annotated[Count | None, OnResume.CONTINUES] = None
    """Number of updates of the weights. None: determined by `minutes`."""
    minutes: float | None = Field(default=None, gt=0, le=LONGEST)
    """Duration of all steps and validations in minutes, in place of `steps`. With `steps`, the
    longest duration: fewer steps are trained if they would take longer. When the run begins, steps
    are timed for a twentieth of this time, up to 30 seconds (5 with `steps`), and their results are
    discarded. The recipe in the run directory stores the resulting number of steps, and a resumed
    run keeps it."""
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
    """Learn from the model's own completions of prompts of the data: from rewards with
    `objective: {kind: policy}`, from a teacher with `{kind: distill}` and `reward: null`. None:
    learn from the data itself."""
    optimizer: Annotated[OptimizerConfig, OnResume.CONTINUES] = MuonConfig()
    """How a step updates the weights from the gradient."""
    schedule: Annotated[ScheduleConfig, OnResume.CONTINUES] = CosineConfig()
    """The factor on every learning rate at each step."""
    grad_clip: Annotated[float | None, OnResume.CONTINUES] = Field(default=1.0, gt=0)
    """Largest norm of the whole gradient; a larger gradient is scaled down. None: no clipping."""
    balance_loss: Weight = 0.0
    """Weight of the loss that balances how often the experts of a mixture are chosen within each
    sequence (DeepSeek-V3, 2412.19437 §2.1.2; 0.0001 there), summed over the layers. It is computed
    per sequence, so that the gradient does not depend on `micro_batch_size`; `balance_rate`
    balances whole batches. Padding does not count."""
    balance_rate: Weight = 0.0
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
        rollouts, objective = self.rollouts, self.objective
        if objective.source == ("rollouts" if rollouts is None else "data"):
            raise ConfigError("rollouts and the objective policy need each other; set both or none")
        if rollouts is None:
            return self
        if objective.rewarded == (rollouts.reward is None):
            need = "needs a" if objective.rewarded else "takes no"
            remedy = "set it" if objective.rewarded else "set it to null"
            raise ConfigError(f"the objective {objective.kind} {need} rollouts.reward; {remedy}")
        several = rollouts.baseline in ("group", "group_std", "leave_one_out")
        if rollouts.reward is not None and rollouts.completions == 1 and several:
            raise ConfigError(
                f"rollouts.completions=1 leaves nothing to compare for rollouts.baseline="
                f"{rollouts.baseline}; increase it"
            )
        if objective.critic is not None and rollouts.baseline != "none":
            raise ConfigError(
                f"objective.values replaces rollouts.baseline={rollouts.baseline}; set it to none"
            )
        if self.minutes is not None:
            raise ConfigError(
                f"minutes={self.minutes:g} cannot be converted to steps with rollouts, because "
                "their time changes with the length of completions; set steps"
            )
        if self.batch_size % rollouts.completions:
            raise ConfigError(
                f"batch_size={self.batch_size} is not divisible by rollouts.completions="
                f"{rollouts.completions}; choose a multiple"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.steps is None and self.minutes is None:
            raise ConfigError("'steps' is missing; set one such as steps: 2000 or minutes: 5")
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
        assert self.steps is not None, "see run/minutes.py"
        return self.steps

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
