"""Mixtures of experts compared with a loop over tokens, routers with formulas; their errors."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from workhorse.config.base import ConfigError
from workhorse.nn.experts import mixture
from workhorse.nn.experts.mixture import GroupedLinear, MoEConfig, group_sorted
from workhorse.nn.experts.router import Router, RouterConfig
from workhorse.nn.feedforward import GatedMlp

D_MODEL = 16


def build(**fields: object) -> nn.Module:
    """A mixture of six experts with top_k=2, with weights large enough to matter."""
    config = {"n_experts": 6, "top_k": 2, "d_ff": 8, **fields}
    return randomised(MoEConfig.from_dict(config).build(D_MODEL))


def randomised(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        parameter.data = 0.4 * torch.randn_like(parameter)
    return module


def build_router(n_experts: int = 6, top_k: int = 2, **fields: object) -> Router:
    config = RouterConfig.from_dict(fields)
    config.check(n_experts, top_k)
    return randomised(config.build(D_MODEL, n_experts, top_k))


def expert_of(mixture: nn.Module, number: int) -> GatedMlp:
    """One expert as a separate feed-forward."""
    experts = mixture.experts
    bias = experts.gate_proj.bias is not None
    d_ff, d_model = experts.gate_proj.weight.shape[1:]
    expert = GatedMlp(d_model, d_ff, activation=experts.activation, bias=bias)
    for name in ("gate_proj", "up_proj", "down_proj"):
        for key, parameter in getattr(expert, name).named_parameters():
            parameter.data = getattr(getattr(experts, name), key).data[number]
    return expert


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"bias": True, "activation": "gelu"},
        {"weigh": "input", "router": {"score": "sigmoid"}},
        {"clamped": {"limit": 0.5}, "bias": True},
        {"d_ff": 7},  # rows are not multiples of 16 bytes: no grouped kernel
        {"n_experts": 40, "top_k": 3},  # more experts than tokens
    ],
)
def test_a_mixture_is_a_loop_over_tokens_and_their_experts(fields: dict[str, object]) -> None:
    mixture = build(**fields)
    x = torch.randn(2, 6, D_MODEL)
    routing = mixture.router(x.flatten(0, 1))
    expected = torch.zeros(12, D_MODEL)
    for token, row in enumerate(x.flatten(0, 1)):
        for number, weight in zip(routing.experts[token], routing.weights[token], strict=True):
            expert = expert_of(mixture, int(number))
            if fields.get("weigh") == "input":
                expected[token] += expert(row * weight)
            else:
                expected[token] += weight * expert(row)
    torch.testing.assert_close(mixture(x), expected.view_as(x), atol=1e-6, rtol=1e-5)


def test_a_shared_expert_is_added() -> None:
    x = torch.randn(2, 6, D_MODEL)
    mixture = build(shared={"d_ff": 10}, shared_gate=True)
    routed = build()
    routed.load_state_dict(mixture.state_dict(), strict=False)
    gate = torch.sigmoid(x @ mixture.shared_gate.weight.T)
    torch.testing.assert_close(mixture(x), routed(x) + gate * mixture.shared(x))
    ungated = build(shared={"d_ff": 10})
    ungated.load_state_dict(mixture.state_dict(), strict=False)
    torch.testing.assert_close(ungated(x), routed(x) + mixture.shared(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_grouped_kernel_and_single_products_agree(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forward and backward, with empty groups at the start, in the middle and at the end."""
    linear = randomised(GroupedLinear(5, 16, 8, bias=True).to(dtype))
    groups = group_sorted(torch.tensor([1, 1, 1, 3, 3]), 5)
    assert groups.ends.tolist() == [0, 3, 3, 5, 5]
    x = torch.randn(5, 16, dtype=dtype)
    results = []
    for takes in (True, False):
        monkeypatch.setattr(mixture, "_kernel_takes", lambda _, takes=takes: takes)
        x.grad, linear.weight.grad = None, None
        y = linear(x.requires_grad_(), groups)
        y.square().sum().backward()
        results.append((y.detach(), x.grad, linear.weight.grad))
    for kernel, single in zip(*results, strict=True):
        torch.testing.assert_close(
            kernel, single, atol=1e-6, rtol=1e-2 if x.itemsize == 2 else 1e-5
        )
    assert torch.count_nonzero(results[0][2][[0, 2, 4]]) == 0


def test_the_gradient_of_a_plain_sum() -> None:
    """PyTorch's grouped kernel fails on the expanded gradient that a sum gives."""
    mixture = build()
    mixture(torch.randn(1, 4, D_MODEL)).sum().backward()
    assert mixture.experts.down_proj.weight.grad.isfinite().all()


def test_under_autocast_experts_work_in_low_precision_and_routers_do_not() -> None:
    mixture = build(router={"normalize": True})
    x = torch.randn(2, 6, D_MODEL)
    plain, dtypes = mixture.router(x.flatten(0, 1)), []
    mixture.experts.down_proj.register_forward_hook(lambda *args: dtypes.append(args[-1].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        y = mixture(x)
        routing = mixture.router(x.flatten(0, 1))
    assert dtypes == [torch.bfloat16]
    assert torch.equal(routing.scores, plain.scores)
    torch.testing.assert_close(y, mixture(x), atol=0.05, rtol=0.05)


def test_scores_of_a_softmax_and_weights_that_add_up_to_one() -> None:
    """A softmax over all, normalised over the chosen, is a softmax over the chosen logits."""
    x = torch.randn(20, D_MODEL)
    router = build_router(normalize=True, bias=True)
    logits = x @ router.proj.weight.T + router.proj.bias
    best = logits.topk(2)
    routing = router(x)
    assert torch.equal(routing.experts, best.indices)
    torch.testing.assert_close(routing.weights, best.values.softmax(dim=-1))
    torch.testing.assert_close(routing.scores, logits.softmax(dim=-1))
    plain = build_router(bias=True, scale=3.0)
    plain.load_state_dict(router.state_dict())
    torch.testing.assert_close(plain(x).weights, 3 * routing.scores.gather(-1, best.indices))


def test_experts_are_ranked_by_their_logits_where_sigmoids_are_all_one() -> None:
    x = torch.randn(20, D_MODEL)
    router = build_router(score="sigmoid")
    router.proj.weight.data.mul_(100)
    routing = router(x)
    assert (routing.scores.eq(1).sum(dim=-1) > 2).any()
    assert torch.equal(routing.experts, (x @ router.proj.weight.T).topk(2).indices)


def test_a_bias_on_logits_decides_otherwise_than_one_on_scores() -> None:
    x = torch.randn(200, D_MODEL)
    routers = [
        build_router(score="sigmoid", selection_bias=True, bias_on=kind)
        for kind in ("score", "logit")
    ]
    bias = torch.linspace(-0.3, 0.3, routers[0].n_experts)
    for router in routers:
        router.proj.weight.data = routers[0].proj.weight.data
        router.selection_bias.data = bias
    by_score, by_logit = (router(x) for router in routers)
    logits = x @ routers[0].proj.weight.T
    best = (logits + bias).topk(routers[0].top_k).indices
    assert torch.equal(by_logit.experts, best)
    assert not torch.equal(by_score.experts, best)
    torch.testing.assert_close(by_logit.weights, torch.sigmoid(logits).gather(-1, best))


def test_an_output_norm_is_of_all_experts_together() -> None:
    shape = {"n_experts": 4, "top_k": 2, "d_ff": 6, "shared": {"d_ff": 5}, "multiplier": 0.5}
    plain, normed = (
        randomised(MoEConfig.from_dict(shape | more).build(D_MODEL))
        for more in ({}, {"output_norm": {"kind": "rms_norm", "eps": 1e-3}})
    )
    plain.load_state_dict(normed.state_dict(), strict=False)
    x = torch.randn(2, 5, D_MODEL)
    y = plain(x)
    expected = y / (y.square().mean(-1, keepdim=True) + 1e-3).sqrt() * normed.output_norm.weight
    torch.testing.assert_close(normed(x), expected)


def test_a_selection_bias_decides_who_and_not_how_much() -> None:
    x = torch.randn(20, D_MODEL)
    router = build_router(score="sigmoid", selection_bias=True)
    router.selection_bias.data = torch.tensor([0.0, 0, 0, 0, 9, 9])
    routing = router(x)
    assert set(routing.experts.flatten().tolist()) == {4, 5}
    expected = torch.sigmoid(x @ router.proj.weight.T)
    torch.testing.assert_close(routing.weights, expected.gather(-1, routing.experts))
    routing.weights.sum().backward()
    assert router.selection_bias.grad is None
    assert router.proj.weight.grad is not None


@pytest.mark.parametrize(
    ("group_score", "chosen"),
    [("max", {0, 1}), ("top2_sum", {2, 3})],
)
def test_groups_are_ranked_by_their_best_or_their_best_two(
    group_score: str, chosen: set[int]
) -> None:
    """Group 0 has the best expert, group 1 the best pair."""
    router = build_router(score="sigmoid", n_groups=3, top_groups=1, group_score=group_score)
    router.proj.weight.data.zero_()
    router.proj.weight.data[:, 0] = torch.tensor([3.0, -3, 2, 2, 0, 0])
    x = torch.zeros(1, D_MODEL)
    x[0, 0] = 1
    assert set(router(x).experts.flatten().tolist()) == chosen


def test_a_sparse_mixer_weighs_among_near_rivals() -> None:
    """Logits 10, 9.9, 9 and 1, tolerance 0.1: 10 competes with 9.9 and 9, then 9.9 with 9."""
    router = build_router(4, 2, score="sparsemixer", jitter=0.05)
    router.proj.weight.data.zero_()
    router.proj.weight.data[:, 0] = torch.tensor([9.0, 1.0, 10.0, 9.9])
    x = torch.zeros(1, D_MODEL)
    x[0, 0] = 1
    routing = router(x)
    assert routing.experts.tolist() == [[2, 3]]
    first = torch.tensor([10.0, 9.9, 9.0]).softmax(dim=0)[0]
    second = torch.tensor([9.9, 9.0]).softmax(dim=0)[0]
    torch.testing.assert_close(routing.weights[0], torch.stack((first, second)))


def test_the_same_result_every_time() -> None:
    """Contributions are added in a fixed order, for any load of the experts."""
    mixture = build(top_k=5)
    x = torch.randn(4, 64, D_MODEL)
    runs: list[tuple[Tensor, Tensor]] = []
    for _ in range(3):
        rows = x.clone().requires_grad_()
        y = mixture(rows)
        y.square().sum().backward()
        runs.append((y.detach(), rows.grad))
    for run in runs[1:]:
        assert all(torch.equal(one, other) for one, other in zip(run, runs[0], strict=True))


ROUTER_ERRORS: list[tuple[dict[str, object], str]] = [
    ({"top_groups": 3, "n_groups": 2}, "top_groups=3 is more than n_groups=2; lower it"),
    ({"n_groups": 4}, "n_experts=6 is not divisible by n_groups=4; choose a divisor"),
    (
        {"n_groups": 6, "top_groups": 1},
        "top_k=2 is more than the 1 experts of top_groups=1; lower top_k",
    ),
    (
        {"n_groups": 6, "top_groups": 3, "group_score": "top2_sum"},
        "group_score=top2_sum needs two experts per group; choose fewer groups",
    ),
    (
        {"group_score": "top2_sum"},
        "group_score=top2_sum has no effect if every group is kept; lower top_groups",
    ),
    (
        {"n_groups": 3, "top_groups": 3, "group_score": "top2_sum"},
        "group_score=top2_sum has no effect if every group is kept; lower top_groups",
    ),
    (
        {"score": "sparsemixer"},
        "jitter=None does not match score=sparsemixer; set jitter with sparsemixer and only with",
    ),
    ({"bias_on": "logit"}, "bias_on=logit needs selection_bias=true; set it"),
    ({"jitter": 0.1}, "jitter=0.1 does not match score=softmax; set jitter with sparsemixer"),
    (
        {"score": "sparsemixer", "jitter": 0.1, "normalize": True},
        "normalize is not supported with score=sparsemixer; remove it",
    ),
    (
        {"score": "sparsemixer", "jitter": 0.1, "selection_bias": True},
        "selection_bias is not supported with score=sparsemixer; remove it",
    ),
]
MIXTURE_ERRORS: list[tuple[dict[str, object], str]] = [
    ({"top_k": 7}, "top_k=7 is more than n_experts=6; lower it"),
    ({"shared_gate": True}, "shared_gate=true needs a shared expert; set shared"),
    (
        {"clamped": {}, "activation": "gelu"},
        "activation=gelu and clamped exclude each other; remove one",
    ),
]
ERRORS = [({"router": router}, message) for router, message in ROUTER_ERRORS] + MIXTURE_ERRORS


@pytest.mark.parametrize(("fields", "message"), ERRORS, ids=[message for _, message in ERRORS])
def test_a_mixture_that_cannot_be(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build(**fields)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_dropout_acts_in_training_only() -> None:
    mixture = build(dropout=0.5)
    x = torch.randn(1, 8, D_MODEL)
    assert torch.equal(mixture.eval()(x), mixture.eval()(x))
    assert not torch.allclose(mixture.train()(x), mixture.eval()(x))


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # occurs at graph breaks
def test_it_compiles() -> None:
    """If the compiler cannot trace the grouped kernel, separate matmuls replace it."""
    mixture = build(router={"score": "sigmoid", "selection_bias": True}, shared={"d_ff": 8})
    compiled: Callable[[Tensor], Tensor] = torch.compile(mixture, backend="aot_eager")
    x = torch.randn(2, 6, D_MODEL)
    torch.testing.assert_close(compiled(x), mixture(x), atol=1e-6, rtol=1e-5)
