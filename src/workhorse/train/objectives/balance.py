"""Load balancing of the experts in mixture-of-experts layers.

There are two methods, which can be combined: a loss per sequence (DeepSeek-V3, 2412.19437 §2.1.2),
and a change of each router's selection bias after every update (2408.15664). Both observe the
routers through hooks, so the model needs no code for them. Positions without a target, such as
padding, do not count.

The loss is a product of two means over a sequence. Means over a micro-batch (Switch, 2101.03961
§2.2) would make it depend on how the batch is split into micro-batches.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from workhorse.config.base import ConfigError
from workhorse.nn import IGNORE, Decoder, DecoderConfig
from workhorse.nn.experts.router import Router, Routing
from workhorse.train.objectives.objective import Objective, Outcome, Wrapped

if TYPE_CHECKING:
    from workhorse.parallel.division.sequences import ContextParallelGroup


class Balanced(Wrapped):
    """Adds the balance loss to an objective during training.

    Args:
        objective: the objective of a decoder with mixtures of experts; batches need `targets`.
        balancer: the balancer of the same decoder.
    """

    def __init__(self, objective: Objective, balancer: "Balancer") -> None:
        super().__init__(objective)
        self.balancer = balancer

    def forward(self, batch: Any) -> Outcome:
        if not self.training:
            return self.objective(batch)
        with self.balancer.watch():
            loss, count, figures = self.objective(batch)
        balance = self.balancer.loss(batch.targets)
        figures = {"loss": loss.detach(), **figures}
        if self.balancer.weight:
            figures["balance_loss"] = balance.detach()
        return Outcome(loss + balance, count, figures)

    def tallies(self) -> list[Tensor]:
        return [*super().tallies(), *self.balancer.loads.values()]

    def after_update(self, finite: bool) -> None:
        super().after_update(finite)
        self.balancer.update(finite)

    def forget(self) -> None:
        super().forget()
        self.balancer.forget()

    def state_of_update(self) -> dict[str, Any]:
        return super().state_of_update() | self.balancer.figures()


class Balancer:
    """Balances how often the experts of a decoder are chosen, which is their load.

    If `weight` and `rate` are 0, the loads are only counted.

    Args:
        decoder: the decoder; forward hooks on its routers record the choices of experts.
        whole: the config of the whole model if the decoder is a pipeline stage; None: the decoder
            has all layers.
        weight: the weight of the loss `n_experts · Σ load_e · score_e` of each router and sequence,
            which is 1 if all experts are equally loaded. `load_e` is the fraction of the
            sequence's choices that selected expert e, `score_e` its mean fraction of a token's
            scores. A sequence is weighted by its number of predictions.
        rate: the change of each expert's selection bias per update: up if the expert was chosen
            less often in the batch than the average expert, down if more often.
        team: the context-parallel group: ranks that each have a part of the same sequences; None
            if sequences are not split.
        reports: False if another rank counts the same choices.

    Attributes:
        loads: how often each expert was chosen since the last update, by layer; 0 for layers that
            this rank does not have.
        latest: the loads in the batch of the last update, in the order of the layers.
    """

    def __init__(
        self,
        decoder: Decoder,
        whole: DecoderConfig | None = None,
        *,
        weight: float = 0.0,
        rate: float = 0.0,
        team: "ContextParallelGroup | None" = None,
        reports: bool = True,
    ) -> None:
        self.team = team
        self.reports = reports
        self.weight = weight
        self.rate = rate
        self.watching = False
        self.n_experts = _mixtures(decoder.config if whole is None else whole)
        self.routers: dict[int, Router] = {}
        self.routings: list[tuple[int, Routing]] = []
        self.loads: dict[int, Tensor] = {}
        self.latest: list[Tensor] = []
        for number, layer in decoder.layers.named_children():
            if int(number) in self.n_experts:
                router = layer.get_submodule("feed_forward.router")
                self.routers[int(number)] = cast(Router, router)
                router.register_forward_hook(partial(self._note, int(number)))

    @contextmanager
    def watch(self) -> Generator[None]:
        """Context manager in which forward passes record the experts that routers choose.

        With activation checkpointing, the backward pass repeats the forward pass outside this
        context, so no choice counts twice.
        """
        self.watching = True
        try:
            yield
        finally:
            self.watching = False

    def loss(self, targets: Tensor) -> Tensor:
        """Compute the weighted balance loss of the last forward pass, and add its loads to `loads`.

        Args:
            targets: (rows, seq) token ids; `IGNORE` at positions that do not count.

        Returns:
            The balance loss summed over all predictions, like the loss of an objective.
        """
        counted = targets != IGNORE
        total = torch.zeros((), device=targets.device)
        for layer, n_experts in self.n_experts.items():
            self.loads.setdefault(layer, torch.zeros(n_experts, device=targets.device))
        for layer, routing in self.routings if self.reports else ():
            loads = loads_of(routing, counted)
            self.loads[layer] += loads.sum(dim=0)
            if self.weight:
                loads = loads if self.team is None else self.team.group.add(loads)
                total = total + self.weight * imbalance(routing.scores, loads, counted).sum()
        self.routings.clear()
        return total

    @torch.no_grad()
    def update(self, finite: bool) -> None:
        """Adjust each router's selection bias to the loads since the last call; reset the loads.

        If `finite` is False, the weights were not updated, and the biases do not change either.
        """
        for layer, router in self.routers.items():
            bias: Tensor | None = getattr(router, "selection_bias", None)
            if finite and bias is not None:
                load = self.loads[layer]
                bias.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.latest = list(self.loads.values())
        self.forget()

    def figures(self) -> dict[str, list[float]]:
        """Measure how evenly the experts were loaded in the last update, one value per mixture.

        Returns:
            `expert_load_max`: the load of the busiest expert as a multiple of the mean load, from 1
            (equal loads) to n_experts. `expert_load_entropy`: the entropy of the loads as
            fractions, divided by ln(n_experts), from 1 (equal loads) down to 0. Empty before the
            first update and for a model without mixtures.
        """
        if not self.latest:
            return {}
        parts = [(load / load.sum().clamp(min=1)).cpu() for load in self.latest]
        entropies = [float(torch.special.entr(part).sum()) for part in parts]
        return {
            "expert_load_max": [round(float(part.max()) * len(part), 4) for part in parts],
            "expert_load_entropy": [
                round(entropy / math.log(max(len(part), 2)), 4)
                for entropy, part in zip(entropies, parts, strict=True)
            ],
        }

    def forget(self) -> None:
        """Discard the loads counted since the last update."""
        self.routings.clear()
        self.loads.clear()

    def _note(
        self, layer: int, _router: Router, _inputs: tuple[Tensor, ...], routing: Routing
    ) -> None:
        if self.watching:
            self.routings.append((layer, routing))


def loads_of(routing: Routing, counted: Tensor) -> Tensor:
    """Count how often each expert was chosen in each row, (rows, n_experts).

    Args:
        routing: the routing of all positions, one row after the other.
        counted: (rows, seq), True if a position's choices count.
    """
    rows, top_k = len(counted), routing.experts.shape[1]
    loads = torch.zeros(rows, routing.scores.shape[1], device=counted.device)
    weights = counted.to(loads.dtype).repeat_interleave(top_k, dim=1)
    return loads.scatter_add_(1, routing.experts.view(rows, -1), weights)


def imbalance(scores: Tensor, loads: Tensor, counted: Tensor) -> Tensor:
    """Compute `predictions · n_experts · Σ_e load_e · score_e` of each row, (rows,).

    Loads and scores are normalised to sum to 1. A row without predictions gives 0.

    Args:
        scores: (rows · seq, n_experts), positive.
        loads: (rows, n_experts), the choices of each expert in whole sequences.
        counted: (rows, seq), True at predictions. If sequences are split, `scores` and `counted`
            are this rank's part, and the results of all ranks must be added up.
    """
    rows, n_experts = loads.shape
    parts = (scores / scores.sum(dim=-1, keepdim=True)).view(rows, -1, n_experts)
    summed = (parts * counted.unsqueeze(-1)).sum(dim=1)  # (rows, n_experts)
    # Without the clamp, a row without predictions would give 0 / 0.
    return n_experts * (loads * summed).sum(dim=1) / loads.sum(dim=1).clamp(min=1)


def has_mixtures(config: DecoderConfig) -> bool:
    """Return True if a decoder has mixtures of experts, so that loads can be counted."""
    return bool(_mixtures(config))


def _mixtures(config: DecoderConfig) -> dict[int, int]:
    """Return the number of experts of each layer that has a mixture."""
    mixtures = [config.blocks[name].mixture for name in config.layer_names()]
    return {layer: mixture.n_experts for layer, mixture in enumerate(mixtures) if mixture}


def check_balance(config: DecoderConfig, *, weight: float, rate: float) -> None:
    """Check that a model has the experts and routers that load balancing needs.

    Raises:
        ConfigError: there is a weight but no mixture of experts, or a rate but no selection bias.
    """
    mixtures = [block.mixture for block in config.blocks.values() if block.mixture]
    if weight and not mixtures:
        raise ConfigError(
            f"balance_loss={weight} needs a mixture of experts in the model; remove balance_loss",
            "train",
        )
    if rate and not any(mixture.router.selection_bias for mixture in mixtures):
        raise ConfigError(
            f"balance_rate={rate} needs a router with selection_bias=true; "
            "set that in the model, or remove balance_rate",
            "train",
        )
