"""Keeping the experts of a mixture equally busy, from outside the model.

Two ways, alone or together: a term of the loss for each sequence (DeepSeek-V3, 2412.19437 §2.1.2),
and a step of each router's bias on its choices after every update (2408.15664). Both read what the
routers decide through hooks; the model knows nothing of them. Positions that predict nothing,
padding above all, count in neither.

The loss is a product of two means, so a mean over a micro-batch of it (Switch, 2101.03961 §2.2)
depends on which rows are passed through together. That of a sequence does not.
"""

import math
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from workhorse.config import ConfigError
from workhorse.nn import IGNORE, DecoderConfig
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.nn.experts.router import AdjustedRouter, Router, Routing
from workhorse.train.objectives.objective import Objective, Outcome


class Balanced(Objective):
    """An objective of rows with targets, and the balance loss beside it while it is trained.

    Args:
        objective: of a decoder with mixtures.
        balancer: of that decoder.
    """

    def __init__(self, objective: Objective, balancer: "Balancer") -> None:
        super().__init__()
        self.objective = objective
        self.balancer = balancer

    def count(self, batch: Any) -> Tensor:
        return self.objective.count(batch)

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

    def after_update(self, finite: bool) -> None:
        self.objective.after_update(finite)
        self.balancer.update(finite)

    def forget(self) -> None:
        self.objective.forget()
        self.balancer.forget()

    def state_of_update(self) -> dict[str, Any]:
        return self.objective.state_of_update() | self.balancer.figures()


class Balancer:
    """Balances the mixtures of a decoder; without weight and rate it only counts.

    Args:
        decoder: whose routers are watched.
        weight: of the loss `n_experts · Σ load_e · score_e` of each router and sequence, which is 1
            when all are alike: `load_e` the part of the sequence's choices that fell on expert e,
            `score_e` its mean part of a token's scores. A sequence counts as much as it has
            predictions.
        rate: by how much an update moves the bias of an expert on which fewer choices fell than on
            the average one (up) or more (down), counted over the whole batch.

    Attributes:
        loads: how many choices fell on each expert of a router since the last update.
        latest: the same of the last update's batch, a row for each router in the order they work.
    """

    def __init__(self, decoder: nn.Module, *, weight: float = 0.0, rate: float = 0.0) -> None:
        self.weight = weight
        self.rate = rate
        self.watching = False
        self.routings: list[tuple[Router, Routing]] = []
        self.loads: dict[Router, Tensor] = {}
        self.latest: list[Tensor] = []
        for router in decoder.modules():
            if isinstance(router, Router):
                router.register_forward_hook(self._note)

    @contextmanager
    def watch(self) -> Generator[None]:
        """Note the routings of the forward pass inside.

        What checkpointed activations compute again in the backward pass is outside, and so not
        counted twice.
        """
        self.watching = True
        try:
            yield
        finally:
            self.watching = False

    def loss(self, targets: Tensor) -> Tensor:
        """The weighted balance loss of the rows that have just passed; their loads are counted.

        Args:
            targets: (rows, seq), what the rows predict, or `IGNORE`.

        Returns:
            The sum over the rows' predictions, to be added to the sum of their losses.
        """
        counted = targets != IGNORE
        total = torch.zeros((), device=targets.device)
        for router, routing in self.routings:
            loads = loads_of(routing, counted)
            self.loads[router] = self.loads.get(router, 0.0) + loads.sum(dim=0)
            if self.weight:
                total = total + self.weight * imbalance(routing.scores, loads, counted).sum()
        self.routings.clear()
        return total

    @torch.no_grad()
    def update(self, finite: bool) -> None:
        """Move the biases by the loads since the last update, unless that update was skipped."""
        for router, load in self.loads.items():
            bias = router.selection_bias if isinstance(router, AdjustedRouter) else None
            if finite and bias is not None:
                bias.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.latest = list(self.loads.values())
        self.forget()

    def figures(self) -> dict[str, list[float]]:
        """How the last update's choices were spread: a number for each mixture, in their order.

        Returns:
            `expert_load_max`: the load of the busiest expert as a multiple of the mean load, from 1
            (all alike) to n_experts; `expert_load_entropy`: of the loads as parts of 1, divided by
            ln(n_experts), from 1 (all alike) towards 0. Nothing for a model without mixtures.
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
        """Drop what was counted since the last update."""
        self.routings.clear()
        self.loads.clear()

    def _note(self, router: Router, _inputs: tuple[Tensor, ...], routing: Routing) -> None:
        if self.watching:
            self.routings.append((router, routing))


def loads_of(routing: Routing, counted: Tensor) -> Tensor:
    """How many choices fell on each expert, (rows, n_experts).

    Args:
        routing: of rows one after the other.
        counted: (rows, seq) whose choices count.
    """
    rows, top_k = len(counted), routing.experts.shape[1]
    loads = torch.zeros(rows, routing.scores.shape[1], device=counted.device)
    weights = counted.to(loads.dtype).repeat_interleave(top_k, dim=1)
    return loads.scatter_add_(1, routing.experts.view(rows, -1), weights)


def imbalance(scores: Tensor, loads: Tensor, counted: Tensor) -> Tensor:
    """`n_experts · Σ_e load_e · score_e` of each row times its predictions, (rows,).

    Loads and scores are parts of 1, each position's scores adding up to 1; a row without
    predictions gives 0.

    Args:
        scores: (rows · seq, n_experts), positive.
        loads: (rows, n_experts).
        counted: (rows, seq).
    """
    rows, n_experts = loads.shape
    parts = (scores / scores.sum(dim=-1, keepdim=True)).view(rows, -1, n_experts)
    summed = (parts * counted.unsqueeze(-1)).sum(dim=1)  # (rows, n_experts)
    return n_experts * (loads * summed).sum(dim=1) / loads.sum(dim=1).clamp(min=1)


def has_mixtures(decoder: nn.Module) -> bool:
    """Whether there is anything to balance, or to count."""
    return any(isinstance(module, Router) for module in decoder.modules())


def check_balance(config: DecoderConfig, *, weight: float, rate: float) -> None:
    """Refuse to balance what is not there.

    Raises:
        ConfigError: a weight without a mixture of experts, or a rate without a selection bias.
    """
    blocks = config.blocks.values()
    mixtures = [block.feed_forward for block in blocks if isinstance(block.feed_forward, MoEConfig)]
    if weight and not mixtures:
        raise ConfigError(
            f"balance_loss={weight} has no mixture of experts to balance; leave it out", "train"
        )
    if rate and not any(mixture.router.selection_bias for mixture in mixtures):
        raise ConfigError(
            f"balance_rate={rate} has no router with selection_bias=true to move; "
            "set it in the model, or leave the rate out",
            "train",
        )
