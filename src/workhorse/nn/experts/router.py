"""Routers: the choice of experts for each token, and the weights of the chosen experts."""

import math
from abc import ABC, abstractmethod
from typing import Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from pydantic import Field
from torch import Tensor, nn

from workhorse.config.base import Config, ConfigError
from workhorse.nn.products import without_autocast

TOP2 = 2
ALWAYS_FLOAT32 = "selection_bias"
"""Name suffix of parameters that are always float32, for any dtype of the decoder."""
Scores = Float[Tensor, "tokens n_experts"]


class Routing(NamedTuple):
    """The result of a router."""

    experts: Int[Tensor, "tokens top_k"]
    """Indices of the chosen experts of each token."""
    weights: Float[Tensor, "tokens top_k"]
    """The weight of each chosen expert, float32."""
    scores: Scores
    """The scores of all experts, float32, for balancing the load."""


class RouterConfig(Config):
    """A linear map to one score per expert; the `top_k` best experts are chosen.

    A softmax over only the chosen logits (Mixtral, gpt-oss, Granite) is `score: softmax` with
    `normalize`. The noise on inputs or logits that some families train with is not implemented.
    """

    score: Literal["softmax", "sigmoid", "sparsemixer"] = "softmax"
    """`softmax` over all experts, or `sigmoid` of each logit (DeepSeek-V3, 2412.19437 §2.1.2).
    `sparsemixer` (PhiMoE; 2409.12136) weighs the best expert by a softmax over the experts with
    similar logits. It then removes this expert and does the same for the next best. In training,
    the paper samples experts; here the best are chosen."""
    normalize: bool = False
    """Divide the weights of the chosen experts by their sum."""
    scale: float = Field(default=1.0, gt=0)
    """Factor on the weights (DeepSeek's `routed_scaling_factor`)."""
    n_groups: int = Field(default=1, gt=0)
    """Number of groups of consecutive experts."""
    top_groups: int = Field(default=1, gt=0)
    """Choose only among the experts of the `top_groups` best groups (DeepSeek-V2, 2405.04434
    §2.2.2)."""
    group_score: Literal["max", "top2_sum"] = "max"
    """Score of a group: the score of its best expert (DeepSeek-V2) or the sum of its best two (V3).
    Used only if top_groups < n_groups."""
    selection_bias: bool = False
    """A bias per expert, added to its score for the choice but not for the weight. It has no
    gradient; it balances the load (2408.15664)."""
    bias_on: Literal["score", "logit"] = "score"
    """The value that `selection_bias` is added to: an expert's score, or its logit (Kolibri)."""
    bias: bool = False
    """A bias on the logits (gpt-oss)."""
    jitter: float | None = Field(default=None, gt=0)
    """Only for sparsemixer: a logit is similar to the best if their difference is at most
    `2 · jitter` times the larger of the best logit and the logit's absolute value."""

    def model_post_init(self, _context: object) -> None:
        if (self.score == "sparsemixer") != (self.jitter is not None):
            raise ConfigError(
                f"jitter={self.jitter} does not match score={self.score}; "
                "set jitter with sparsemixer and only with it"
            )
        if self.score == "sparsemixer":
            self._check_sparsemixer()
        if self.bias_on == "logit" and not self.selection_bias:
            raise ConfigError("bias_on=logit needs selection_bias=true; set it")
        if self.top_groups > self.n_groups:
            raise ConfigError(
                f"top_groups={self.top_groups} is more than n_groups={self.n_groups}; lower it"
            )
        if self.top_groups == self.n_groups and self.group_score != "max":
            raise ConfigError(
                f"group_score={self.group_score} has no effect if every group is kept; "
                "lower top_groups"
            )

    def _check_sparsemixer(self) -> None:
        for field in ("normalize", "scale", "n_groups", "group_score", "selection_bias"):
            if getattr(self, field) != type(self).model_fields[field].default:
                raise ConfigError(f"{field} is not supported with score=sparsemixer; remove it")

    def check(self, n_experts: int, top_k: int) -> None:
        """Check the number of experts and the number of experts per token.

        Raises:
            ConfigError: more experts are chosen than available, or groups differ in size.
        """
        if top_k > n_experts:
            raise ConfigError(f"top_k={top_k} is more than n_experts={n_experts}; lower it")
        if n_experts % self.n_groups:
            raise ConfigError(
                f"n_experts={n_experts} is not divisible by n_groups={self.n_groups}; "
                "choose a divisor"
            )
        size = n_experts // self.n_groups
        if top_k > size * self.top_groups:
            raise ConfigError(
                f"top_k={top_k} is more than the {size * self.top_groups} experts of "
                f"top_groups={self.top_groups}; lower top_k"
            )
        if self.group_score == "top2_sum" and size < TOP2:
            raise ConfigError(
                "group_score=top2_sum needs two experts per group; choose fewer groups"
            )

    def build(self, d_model: int, n_experts: int, top_k: int) -> "Router":
        if self.score == "sparsemixer":
            return SparseMixer(d_model, n_experts, top_k, self)
        plain = self.n_groups == 1 and not self.selection_bias
        adjusted = LogitRouter if self.bias_on == "logit" else AdjustedRouter
        router = TopKRouter if plain else adjusted
        return router(d_model, n_experts, top_k, self)


class Router(nn.Module, ABC):
    """Scores every expert for every token, and chooses the best.

    Args:
        d_model: width of a token's vector.
        n_experts: number of experts.
        top_k: number of experts per token.
        config: options for scores, choice and weights.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, config: RouterConfig) -> None:
        super().__init__()
        self.n_experts = n_experts
        self.top_k = top_k
        self.proj = Float32Linear(d_model, n_experts, bias=config.bias)

    @abstractmethod
    def forward(self, x: Float[Tensor, "tokens d_model"]) -> Routing:
        """Choose the experts of each token and compute their weights."""


class TopKRouter(Router):
    """Chooses the experts with the `top_k` largest logits, and weights them by their scores."""

    def __init__(self, d_model: int, n_experts: int, top_k: int, config: RouterConfig) -> None:
        super().__init__(d_model, n_experts, top_k, config)
        self.score = nn.Sigmoid() if config.score == "sigmoid" else nn.Softmax(dim=-1)
        self.normalize = SumToOne() if config.normalize else nn.Identity()
        self.scale = config.scale

    def forward(self, x: Float[Tensor, "tokens d_model"]) -> Routing:
        logits = self.proj(x)
        scores = self.score(logits)
        experts = self.rank(logits, scores).topk(self.top_k).indices
        weights = self.normalize(scores.gather(-1, experts)) * self.scale
        return Routing(experts, weights, scores)

    def rank(self, logits: Scores, scores: Scores) -> Scores:
        """The values to rank experts by: logits, because a saturated sigmoid loses their order."""
        del scores
        return logits


class AdjustedRouter(TopKRouter):
    """A router that chooses by score plus bias, among the experts of the best groups."""

    def __init__(self, d_model: int, n_experts: int, top_k: int, config: RouterConfig) -> None:
        super().__init__(d_model, n_experts, top_k, config)
        bias = torch.empty(n_experts, dtype=torch.float32)  # steps of 0.001 vanish in bfloat16
        self.selection_bias = (
            nn.Parameter(bias, requires_grad=False) if config.selection_bias else None
        )
        limited = config.top_groups < config.n_groups
        self.limit = BestGroups(config) if limited else nn.Identity()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.selection_bias is not None:
            nn.init.zeros_(self.selection_bias)

    def rank(self, logits: Scores, scores: Scores) -> Scores:
        """The values to rank experts by: score plus bias, and -inf outside the best groups."""
        del logits
        bias = 0.0 if self.selection_bias is None else self.selection_bias
        return self.limit(scores.detach() + bias)


class LogitRouter(AdjustedRouter):
    """A router that chooses by logit plus bias."""

    def rank(self, logits: Scores, scores: Scores) -> Scores:
        """The values to rank experts by: logit plus bias, and -inf outside the best groups."""
        del scores
        return super().rank(logits, logits)


class BestGroups(nn.Module):
    """Sets scores of experts outside the best groups to -inf (2405.04434 §2.2.2)."""

    def __init__(self, config: RouterConfig) -> None:
        super().__init__()
        self.n_groups = config.n_groups
        self.top_groups = config.top_groups
        self.summed = TOP2 if config.group_score == "top2_sum" else 1

    def forward(self, scores: Scores) -> Scores:
        grouped = scores.view(len(scores), self.n_groups, -1)  # (tokens, groups, size)
        group_scores = grouped.topk(self.summed).values.sum(dim=-1)
        best = group_scores.topk(self.top_groups).indices
        hidden = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(hidden.unsqueeze(-1), -math.inf).flatten(-2)


class SparseMixer(Router):
    """PhiMoE's router: chooses one expert after another, each weighted among similar logits.

    Paper: GRIN, 2409.12136 §2. The choice for evaluation is also used in training.
    """

    def __init__(self, d_model: int, n_experts: int, top_k: int, config: RouterConfig) -> None:
        super().__init__(d_model, n_experts, top_k, config)
        assert config.jitter is not None
        self.jitter = config.jitter

    def forward(self, x: Float[Tensor, "tokens d_model"]) -> Routing:
        logits = remaining = self.proj(x)
        experts: list[Tensor] = []
        weights: list[Tensor] = []
        for _ in range(self.top_k):
            best, expert = remaining.max(dim=-1, keepdim=True)
            size = logits.abs().clamp(min=best)
            far = (best - logits) / size > 2 * self.jitter
            rivals = remaining.masked_fill(far, -math.inf).softmax(dim=-1)
            experts.append(expert)
            weights.append(rivals.gather(-1, expert))
            remaining = remaining.scatter(-1, expert, -math.inf)
        scores = logits.softmax(dim=-1)
        return Routing(torch.cat(experts, dim=-1), torch.cat(weights, dim=-1), scores)


class Float32Linear(nn.Linear):
    """A linear map that always computes in float32, even under autocast (2101.03961 §2.4)."""

    def forward(self, input: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch out"]:
        with without_autocast(input):
            bias = cast(Tensor | None, self.bias)
            bias = None if bias is None else bias.float()
            return F.linear(input.float(), self.weight.float(), bias)


class SumToOne(nn.Module):
    """`x / sum(x)` over the last axis; all zeros stay zero."""

    def forward(self, x: Float[Tensor, "*batch width"]) -> Float[Tensor, "*batch width"]:
        return x / x.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
