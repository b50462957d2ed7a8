"""Learning-rate schedules, parameter groups, and the optimizer that updates all groups.

A schedule is a multiplier of the learning rates. It rises linearly to 1 during the warm-up.
Schedules differ in how the multiplier changes after the warm-up.
"""

import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Protocol

from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config
from workhorse.devices.transfer import copy_tensors
from workhorse.errors import WorkhorseError
from workhorse.native import Training
from workhorse.nn import Decoder
from workhorse.optim.adamw import AdamW, AdamWConfig
from workhorse.optim.master_weights import MasterWeights
from workhorse.optim.muon import Muon, MuonConfig

if TYPE_CHECKING:
    from workhorse.parallel.division.parts import ModelPart

Fraction = Annotated[float, Field(ge=0, le=1)]


class WarmupConfig(Config):
    """Base class of schedules: a linear warm-up to the peak learning rate."""

    warmup_steps: int = Field(default=0, ge=0)
    """Number of steps in which the learning rate rises linearly to its peak. At step s, counted
    from 0, it is the peak times `(s + 1) / warmup_steps`."""

    def factor(self, step: int, steps: int) -> float:
        """Return the learning-rate multiplier at a step, counted from 0, of a run of `steps`."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        return self.after_warmup((step - self.warmup_steps) / (steps - self.warmup_steps))

    @abstractmethod
    def after_warmup(self, progress: float) -> float:
        """Return the learning-rate multiplier after the warm-up.

        `progress` is the fraction of the steps after the warm-up that are done, from 0 to below 1.
        """


class ConstantConfig(WarmupConfig):
    """The learning rate stays at its peak after the warm-up."""

    kind: Literal["constant"] = "constant"

    def after_warmup(self, progress: float) -> float:
        return 1.0


class InverseSqrtConfig(WarmupConfig):
    """After the warm-up, the peak times `sqrt(warmup_steps / (s + 1))` at step s, counted from 0.

    Paper: 1706.03762 §5.3, with the peak `1/sqrt(d_model * warmup_steps)`.
    """

    kind: Literal["inverse_sqrt"] = "inverse_sqrt"

    def factor(self, step: int, steps: int) -> float:
        return min(super().factor(step, steps), math.sqrt(max(self.warmup_steps, 1) / (step + 1)))

    def after_warmup(self, progress: float) -> float:
        return 1.0


class LinearConfig(WarmupConfig):
    """The learning rate falls linearly after the warm-up."""

    kind: Literal["linear"] = "linear"
    final: Fraction = 0.0
    """Learning rate after the last step, as a fraction of the peak."""

    def after_warmup(self, progress: float) -> float:
        return 1 - (1 - self.final) * progress


class CosineConfig(WarmupConfig):
    """The learning rate falls along half a cosine after the warm-up (1608.03983, no restarts)."""

    kind: Literal["cosine"] = "cosine"
    final: Fraction = 0.1
    """Learning rate after the last step, as a fraction of the peak."""

    def after_warmup(self, progress: float) -> float:
        return self.final + (1 - self.final) * (1 + math.cos(math.pi * progress)) / 2


class WsdConfig(WarmupConfig):
    """Warm-up, stable, decay: the rate stays at its peak, then falls linearly (2404.06395)."""

    kind: Literal["wsd"] = "wsd"
    decay: float = Field(default=0.2, gt=0, le=1)
    """Fraction of the steps after the warm-up in which the learning rate falls."""
    final: Fraction = 0.0
    """Learning rate after the last step, as a fraction of the peak."""

    def after_warmup(self, progress: float) -> float:
        return 1 - (1 - self.final) * max(0.0, progress - (1 - self.decay)) / self.decay


ScheduleConfig = Annotated[
    CosineConfig | LinearConfig | WsdConfig | ConstantConfig | InverseSqrtConfig,
    Field(discriminator="kind"),
]


OptimizerConfig = Annotated[AdamWConfig | MuonConfig, Field(discriminator="kind")]
Parameters = dict[str, nn.Parameter]


def parameters_by_role(decoder: Decoder) -> dict[str, Parameters]:
    """Group all parameters by the role that decides how they are updated.

    - `hidden`: matrices inside the layers. Muon, if it is used, updates them. With weight decay.
    - `embedding`: token and position embeddings, including a tied head. Weight decay only with
      `decay_embeddings`.
    - `head`: matrices outside the layers, such as an untied head. With weight decay.
    - `vector`: norms, biases (also of each expert), attention sinks, weights of convolutions and
      other vectors. No weight decay. They include a router's selection bias, which has no gradient
      and is not updated by the optimizer.
    """
    tables = {id(module.weight) for module in decoder.modules() if isinstance(module, nn.Embedding)}
    roles: dict[str, Parameters] = {"hidden": {}, "embedding": {}, "head": {}, "vector": {}}
    for name, parameter in decoder.named_parameters():  # a tied matrix comes once, as the embedding
        if id(parameter) in tables or name.startswith("embedding.position"):
            role = "embedding"
        elif parameter.ndim <= 1 or name.endswith((".bias", "_convolution.weight")):
            role = "vector"
        else:
            role = "hidden" if name.startswith("layers.") else "head"
        roles[role][name] = parameter
    return roles


def check_base_width(decoder: Decoder, config: OptimizerConfig, *, drawn: bool = True) -> None:
    """Check that `base_width` (for muP) has an effect and fits the initial weights.

    Args:
        decoder: the decoder, on any device.
        config: the options of its optimizer.
        drawn: True if its weights are initialised by `model.init`, not loaded.

    Raises:
        WorkhorseError: `base_width` has no effect, because the head is tied and Muon updates all
            other matrices; or `model.init` has the same standard deviation at any width.
    """
    muon = isinstance(config, MuonConfig)
    width, init = decoder.config.d_model, decoder.config.init
    if (
        drawn
        and isinstance(config, AdamWConfig)
        and config.base_width not in (None, width)
        and init.fixed_std is not None
    ):
        raise WorkhorseError(
            f"train.optimizer.base_width={config.base_width} needs initial weights that are "
            f"smaller in a wider model, and model.init has a std of {init.fixed_std:g} at any "
            "width; set model.init={kind: fan_in}"
        )
    if muon and config.adamw.base_width is not None and not parameters_by_role(decoder)["head"]:
        raise WorkhorseError(
            f"train.optimizer.adamw.base_width={config.adamw.base_width} has no effect: with Muon "
            "it applies only to an untied head, and this head is tied; remove it, and set "
            "model.head.multiplier"
        )


def build_optimizer(
    decoder: Decoder,
    config: AdamWConfig | MuonConfig,
    low_bits: Mapping[str, Tensor] | None = None,
    *,
    operators: Training | None = None,
    uniform: bool = False,
    compiled: bool = False,
    part: "ModelPart | None" = None,
    trained: Parameters | None = None,
) -> "Optimizer":
    """Build the optimizer of a decoder's trainable parameters.

    Args:
        decoder: the decoder, with the initial weights.
        config: the options of the optimizer.
        low_bits: the low bits that `round_weights` returned; None if weights were not rounded.
        operators: native training operators, which update CPU tensors.
        uniform: see `AdamW`.
        compiled: see `AdamW`.
        part: this rank's part of the model, if layers are divided among ranks.
        trained: the parameters to train, by name. They may include parameters outside the decoder.
            None: the decoder's parameters.
    """
    parameters = dict(decoder.named_parameters()) if trained is None else trained
    masters = MasterWeights(parameters, low_bits, operators=operators, part=part)
    roles = {
        role: {name: weight for name, weight in parameters.items() if name in masters.parameters}
        for role, parameters in parameters_by_role(decoder).items()
    }
    of_decoder = {name for parameters in roles.values() for name in parameters}
    for name, weight in masters.parameters.items():
        if name not in of_decoder:
            roles["head" if weight.ndim > 1 else "vector"][name] = weight
    parts: list[Part] = []
    if isinstance(config, MuonConfig):
        parts.append(Muon(roles["hidden"], config, masters=masters))
        adamw, matrices = config.adamw, roles["head"]
    else:
        adamw, matrices = config, roles["hidden"] | roles["head"]
    factor = adamw.base_width / decoder.config.d_model if adamw.base_width else 1.0
    decay = adamw.weight_decay
    groups: dict[tuple[float, float], Parameters] = defaultdict(dict)
    groups[decay, factor].update(matrices)
    groups[decay if adamw.decay_embeddings else 0.0, 1.0].update(roles["embedding"])
    groups[0.0, 1.0].update(roles["vector"])
    parts += [
        AdamW(
            parameters,
            adamw,
            weight_decay=decay,
            rate_factor=factor,
            masters=masters,
            uniform=uniform,
            compiled=compiled,
        )
        for (decay, factor), parameters in groups.items()
        if parameters
    ]
    return Optimizer(masters, parts)


class Part(Protocol):
    """The optimizer of one group of parameters: `AdamW` or `Muon`."""

    def step(self, schedule: float, grad_scale: float | Tensor) -> None: ...

    def tensors(self) -> dict[str, Tensor]: ...


class Optimizer:
    """The optimizer of all trainable parameters: one `AdamW` or `Muon` for each parameter group."""

    def __init__(self, masters: MasterWeights, parts: list[Part]) -> None:
        self.masters = masters
        self.parts = parts

    def gradients(self) -> list[Tensor]:
        """Return the gradients of all parameters that have a gradient."""
        found = map(self.masters.gradient, self.masters.parameters)
        return [gradient for gradient in found if gradient is not None]

    def step(self, schedule: float, grad_scale: float | Tensor = 1.0) -> None:
        """Update every parameter once.

        Args:
            schedule: factor of every learning rate.
            grad_scale: factor of the gradients, which may be overwritten. A float, or a tensor ()
                on the device, so that the host need not wait for its value; if it is not finite,
                nothing changes. Native operators need a float.
        """
        for part in self.parts:
            part.step(schedule, grad_scale)

    def tensors(self) -> dict[str, Tensor]:
        """Return the optimizer state, named `<parameter>.<state>`, without copying it."""
        return {name: tensor for part in self.parts for name, tensor in part.tensors().items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Load unsharded state tensors of an optimizer with the same config and parameters.

        They are named as by the method `tensors`.
        """
        copy_tensors(self.masters.destinations(self.tensors()), tensors, "optimizer")
