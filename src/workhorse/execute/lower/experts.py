"""Instructions of mixtures of experts: the router, the experts' linear layers, and their sum."""

from collections.abc import Callable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from workhorse.execute.lower.program import Register, Writer
from workhorse.execute.record import CannotTranslate
from workhorse.native.steps import ACTIVATIONS, CHOICE_BYTES, Op, RouterFlag
from workhorse.nn.elementwise import is_identity
from workhorse.nn.experts.mixture import (
    Experts,
    GatedSharedMixture,
    GroupedLinear,
    MixtureOfExperts,
    SharedMixture,
)
from workhorse.nn.experts.router import (
    TOP2,
    AdjustedRouter,
    BestGroups,
    Float32Linear,
    LogitRouter,
    Router,
    SparseMixer,
    TopKRouter,
)
from workhorse.nn.feedforward import GatedMlp

FLOAT_BYTES = 4


def mixture(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of a mixture of experts, including its router."""
    layer = cast(MixtureOfExperts, module)
    y = _experts(writer, layer, x)
    return writer.modules((layer.multiply, layer.output_norm), y)


def shared_mixture(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of a mixture of experts with a shared expert."""
    layer = cast(SharedMixture, module)
    return _mixture_with(writer, layer, x, _gated(writer, layer.shared, x))


def gated_mixture(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write the instructions of a mixture of experts with a gated shared expert."""
    layer = cast(GatedSharedMixture, module)
    shared, gate = _gated(writer, layer.shared, x), writer.module(layer.shared_gate, x)
    writer.write(Op.ACTIVATE, gate, gate, options=(ACTIVATIONS.index("sigmoid"),))
    writer.write(Op.MULTIPLY, shared, shared, gate)
    writer.release(gate)
    return _mixture_with(writer, layer, x, shared)


def _mixture_with(writer: Writer, layer: SharedMixture, x: Register, shared: Register) -> Register:
    y = _experts(writer, layer, x)
    writer.write(Op.ADD, y, y, shared)
    writer.release(shared)
    return writer.modules((layer.multiply, layer.output_norm), y)


def _experts(writer: Writer, layer: MixtureOfExperts, x: Register) -> Register:
    """Write the weighted sum of the experts' outputs."""
    experts, top_k = layer.experts, layer.router.top_k
    _check_class(experts, Experts)
    choices = _choices(writer, layer.router, x)
    options = top_k, not is_identity(experts.weigh_input)
    pairs = writer.write(Op.SEND, writer.reserve(top_k * x.width), x, choices, options=options)
    projections = (experts.gate_proj, experts.up_proj)
    gate, up = (_grouped(writer, one, pairs, choices, top_k) for one in projections)
    writer.release(pairs)
    hidden = writer.modules((experts.dropout,), writer.module(experts.activation, gate, up))
    writer.release(gate, up)
    rows = _grouped(writer, experts.down_proj, hidden, choices, top_k)
    y = writer.write(Op.GATHER, writer.reserve(x.width), rows, choices, options=options)
    writer.release(choices, hidden, rows)
    return y


def _grouped(
    writer: Writer, module: nn.Module, pairs: Register, choices: Register, top_k: int
) -> Register:
    """Write a linear map of each expert, for all pairs of a token and one of its experts."""
    _check_class(module, GroupedLinear)
    layer = cast(GroupedLinear, module)
    count, out, _ = layer.weight.shape
    to, options = writer.reserve(top_k * out), (out, count, top_k)
    weight, bias = layer.weight, layer.bias
    return writer.write(Op.EXPERT, to, pairs, choices, weight=weight, bias=bias, options=options)


class _Rule(NamedTuple):
    """How a router chooses: the options of the instruction CHOOSE."""

    flags: RouterFlag
    scale: float = 1.0
    jitter: float = 0.0
    groups: tuple[int, int] = (1, 1)
    bias: Tensor | None = None


def _plain_rule(router: Router) -> _Rule:
    part, flags = cast(TopKRouter, router), RouterFlag(0)
    if isinstance(part.score, nn.Sigmoid):
        flags |= RouterFlag.SIGMOID
    if not is_identity(part.normalize):
        flags |= RouterFlag.NORMALISED
    return _Rule(flags, part.scale)


def _adjusted_rule(router: Router) -> _Rule:
    part, rule = cast(AdjustedRouter, router), _plain_rule(router)
    flags, groups, bias = rule.flags, (1, 1), part.selection_bias
    if bias is not None and bias.dtype != torch.float32:
        raise CannotTranslate(f"a bias of a router in {bias.dtype}")
    if not is_identity(part.limit):
        limit = cast(BestGroups, part.limit)
        groups = limit.n_groups, limit.top_groups
        flags |= RouterFlag.TOP_TWO if limit.summed == TOP2 else 0
    return rule._replace(flags=flags, groups=groups, bias=bias)


def _score_rule(router: Router) -> _Rule:
    rule = _adjusted_rule(router)
    return rule._replace(flags=rule.flags | RouterFlag.RANKS_SCORES)


def _sparse_rule(router: Router) -> _Rule:
    return _Rule(RouterFlag.SPARSE, jitter=cast(SparseMixer, router).jitter)


RULES: dict[type[Router], Callable[[Router], _Rule]] = {
    TopKRouter: _plain_rule,
    AdjustedRouter: _score_rule,
    LogitRouter: _adjusted_rule,
    SparseMixer: _sparse_rule,
}


def _choices(writer: Writer, router: Router, x: Register) -> Register:
    """Write the instructions of a router; return the register of choices, sorted by expert."""
    count, top_k, size = router.n_experts, router.top_k, writer.dtype.itemsize
    _check_class(router, *RULES)
    _check_class(router.proj, Float32Linear)
    flags, scale, jitter, groups, bias = RULES[type(router)](router)
    logits = writer.reserve(count * FLOAT_BYTES // size)
    writer.write(Op.SCORE, logits, x, weight=router.proj.weight, bias=router.proj.bias)
    choices = writer.reserve((top_k * CHOICE_BYTES + count * FLOAT_BYTES) // size)
    options, numbers = (top_k, flags, *groups), (scale, jitter)
    writer.write(Op.CHOOSE, choices, logits, weight=bias, options=options, numbers=numbers)
    writer.release(logits)
    return writer.write(Op.ORDER, choices, choices, options=(top_k, count))


def _gated(writer: Writer, module: nn.Module, x: Register) -> Register:
    """Write a gated feed-forward that is applied to every token."""
    _check_class(module, GatedMlp)
    part = cast(GatedMlp, module)
    gate, up = (writer.module(one, x) for one in (part.gate_proj, part.up_proj))
    hidden = writer.module(part.activation, gate, up)
    writer.release(gate, up)
    hidden = writer.modules((part.dropout, part.inner_norm), hidden)
    y = writer.module(part.down_proj, hidden)
    writer.release(hidden)
    return y


def _check_class(module: nn.Module, *known: type[nn.Module]) -> None:
    if type(module) not in known:
        raise CannotTranslate(type(module).__name__)


TRANSLATIONS: dict[type[nn.Module], Callable[..., Register]] = {
    MixtureOfExperts: mixture,
    SharedMixture: shared_mixture,
    GatedSharedMixture: gated_mixture,
}
"""For each class of mixtures, the function that writes its instructions."""
