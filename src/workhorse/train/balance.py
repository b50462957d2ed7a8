"""Keeping the experts of a mixture equally busy, from outside the model.

Two ways, alone or together: a term of the loss (Switch, 2101.03961 §2.2), and a step of each
router's bias on its choices after every update (2408.15664). Both read what the routers decide
through hooks; the model knows nothing of them.
"""

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from workhorse.config import ConfigError
from workhorse.nn import DecoderConfig
from workhorse.nn.moe import MoEConfig
from workhorse.nn.router import AdjustedRouter, Router, Routing


class Balancer:
    """Balances the mixtures of a decoder; without weight and rate it does nothing.

    Args:
        decoder: whose routers are watched.
        weight: of the loss `n_experts · Σ load_e · score_e` of each router, which is 1 when all are
            alike: `load_e` the part of all choices that fell on expert e, `score_e` its mean part
            of a token's scores. Each micro-batch is balanced by itself (2501.11873 §3 on what that
            means), and counts as much as it has predictions.
        rate: by how much an update moves the bias of an expert on which fewer choices fell than on
            the average one (up) or more (down), counted over the whole batch.
    """

    def __init__(self, decoder: nn.Module, *, weight: float = 0.0, rate: float = 0.0) -> None:
        self.weight = weight
        self.rate = rate
        self.watching = False
        self.routings: list[tuple[Router, Routing]] = []
        self.loads: dict[Router, Tensor] = {}
        for router in decoder.modules() if weight or rate else ():
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

    def add_to(self, loss: Tensor, counted: Tensor) -> Tensor:
        """The summed loss of some rows and their balance loss, and count the loads they caused.

        Args:
            loss: over all of the rows' predictions.
            counted: how many these are.
        """
        for router, routing in self.routings:
            load = load_of(routing)
            self.loads[router] = self.loads.get(router, 0.0) + load
            if self.weight:
                loss = loss + self.weight * counted * imbalance(routing.scores, load)
        self.routings.clear()
        return loss

    @torch.no_grad()
    def update(self, finite: bool) -> None:
        """Move the biases by the loads since the last update, unless that update was skipped."""
        for router, load in self.loads.items():
            bias = router.selection_bias if isinstance(router, AdjustedRouter) else None
            if finite and bias is not None:
                bias.add_(torch.sign(load.mean() - load), alpha=self.rate)
        self.forget()

    def forget(self) -> None:
        """Drop what was counted since the last update."""
        self.routings.clear()
        self.loads.clear()

    def _note(self, router: Router, _inputs: tuple[Tensor, ...], routing: Routing) -> None:
        if self.watching:
            self.routings.append((router, routing))


def load_of(routing: Routing) -> Tensor:
    """How many choices fell on each expert, (n_experts,)."""
    chosen = routing.experts.flatten()
    load = torch.zeros(routing.scores.shape[1], device=chosen.device)
    return load.index_add_(0, chosen, torch.ones_like(chosen, dtype=load.dtype))


def imbalance(scores: Tensor, load: Tensor) -> Tensor:
    """`n_experts · Σ_e load_e · score_e`, both as parts of 1; scores of one token add up to 1.

    Args:
        scores: (tokens, n_experts), positive.
        load: (n_experts,).
    """
    parts = scores / scores.sum(dim=-1, keepdim=True)
    return len(load) * (load / load.sum() * parts.mean(dim=0)).sum()


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
