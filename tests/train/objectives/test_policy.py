"""Policy gradients against their papers, in float64, one completion at a time."""

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import pytest
import torch
from torch import Tensor

from tests.train.objectives.data import assert_same, logprobs, model
from tests.train.objectives.data import rollouts as rollouts_of
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.nn import IGNORE
from workhorse.train.objectives.policy import (
    Baseline,
    PolicyBatch,
    PolicyConfig,
    advantages_of,
    with_advantages,
)
from workhorse.train.objectives.value_head import ValuesConfig

DECODER = model()
CLIPPED = {"clip_low": 0.2, "clip_high": 0.2}
rollouts = partial(rollouts_of, DECODER)


def completions(batch: PolicyBatch) -> list[dict[str, Tensor]]:
    """For each row, the values of its sampled tokens only."""
    now = logprobs(DECODER, batch)
    found = []
    for row, targets in enumerate(batch.targets):
        own = targets != IGNORE
        values = {
            "now": now[row][own],
            "old": batch.old_logprobs[row][own],
            "a": batch.advantages[row],
        }
        found.append(values | {"reference": batch.reference_tokens[row][own]})
    return found


def clipped(ratio: Tensor, advantage: Tensor, low: float, high: float) -> Tensor:
    return torch.min(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def test_reinforce_on_the_policy_itself() -> None:
    """The gradient is that of `-Σ A log p`, and both forms of the loss have it."""
    batch = rollouts()
    expected = -sum((one["now"] * one["a"]).sum() for one in completions(batch)) / 8
    options = {"ratio": "none", "denominator": "constant", "max_length": 1}
    assert_same(PolicyConfig(**options, clip="weight").build(DECODER), batch, expected)
    value = sum(len(one["now"]) * one["a"] for one in completions(batch)) / 8
    on_policy = PolicyConfig(**options).build(DECODER)
    assert_same(on_policy, batch, expected - expected.detach() - value)


def test_ppo_and_dapo_average_over_all_tokens() -> None:
    batch = rollouts()
    for low, high in ((0.2, 0.2), (0.2, 0.28)):
        parts = [
            clipped((one["now"] - one["old"]).exp(), one["a"], low, high)
            for one in completions(batch)
        ]
        expected = -torch.cat(parts).mean()
        config = PolicyConfig(clip_low=low, clip_high=high, denominator="tokens")
        assert_same(config.build(DECODER), batch, expected)


def test_grpo_averages_completions_and_adds_the_third_estimate_of_the_kl() -> None:
    batch, losses = rollouts(), []
    for one in completions(batch):
        ratio = (one["now"] - one["old"]).exp()
        back = one["reference"] - one["now"]
        kl = back.exp() - back - 1
        losses.append(-(clipped(ratio, one["a"], 0.2, 0.2) - 0.04 * kl).mean())
    config = PolicyConfig(**CLIPPED, denominator="sequences", kl_weight=0.04)
    assert_same(config.build(DECODER), batch, torch.stack(losses).mean())


def test_dr_grpo_divides_by_a_constant() -> None:
    batch = rollouts()
    sums = [
        clipped((one["now"] - one["old"]).exp(), one["a"], 0.2, 0.2).sum()
        for one in completions(batch)
    ]
    config = PolicyConfig(**CLIPPED, denominator="constant", max_length=20)
    assert_same(config.build(DECODER), batch, -torch.stack(sums).mean() / 20)


def test_gspo_has_one_ratio_per_completion() -> None:
    batch = rollouts()
    parts = [
        clipped((one["now"] - one["old"]).mean().exp(), one["a"], 0.05, 0.1)
        for one in completions(batch)
    ]
    options = {"ratio": "sequence", "clip_low": 0.05, "clip_high": 0.1}
    config = PolicyConfig(**options, denominator="sequences")
    assert_same(config.build(DECODER), batch, -torch.stack(parts).mean())
    lengths = [len(one["now"]) for one in completions(batch)]
    weighted = sum(part * n for part, n in zip(parts, lengths, strict=True)) / sum(lengths)
    assert_same(PolicyConfig(**options).build(DECODER), batch, -weighted)


def test_cispo_clips_the_weight_and_keeps_the_gradient_of_every_token() -> None:
    batch, parts = rollouts(), []
    for one in completions(batch):
        weight = (one["now"] - one["old"]).exp().detach().clamp(max=1.3)
        parts.append(-weight * one["a"] * one["now"])
    config = PolicyConfig(clip="weight", clip_high=0.3)
    assert_same(config.build(DECODER), batch, torch.cat(parts).mean())


def choices(field: str) -> tuple[str, ...]:
    return get_args(PolicyConfig.model_fields[field].annotation)


RATIOS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "token": lambda now, old: (now - old).exp(),
    "sequence": lambda now, old: (now - old).mean().exp().expand_as(now),
    "none": lambda now, _: (now - now.detach()).exp(),
}
CLIPS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "surrogate": lambda r, a, _: torch.min(r * a, r.clamp(0.8, 1.3) * a),
    "weight": lambda r, a, now: r.detach().clamp(0.8, 1.3) * a * now,
}
DENOMINATORS: dict[str, Callable[[list[Tensor]], Tensor]] = {
    "tokens": lambda rows: torch.cat(rows).mean(),
    "sequences": lambda rows: torch.stack([row.mean() for row in rows]).mean(),
    "constant": lambda rows: torch.stack([row.sum() / 20 for row in rows]).mean(),
}


@pytest.mark.parametrize("denominator", choices("denominator"))
@pytest.mark.parametrize("clip", choices("clip"))
@pytest.mark.parametrize("ratio", choices("ratio"))
def test_each_combination_is_its_formula(ratio: str, clip: str, denominator: str) -> None:
    """A new value needs its formula in `RATIOS`, `CLIPS` or `DENOMINATORS`."""
    batch, limits = rollouts(), {} if ratio == "none" else {"clip_low": 0.2, "clip_high": 0.3}
    length = {"max_length": 20} if denominator == "constant" else {}
    values = [
        -CLIPS[clip](RATIOS[ratio](one["now"], one["old"]), one["a"], one["now"])
        for one in completions(batch)
    ]
    config = PolicyConfig(ratio=ratio, clip=clip, denominator=denominator, **limits, **length)
    assert_same(config.build(DECODER), batch, DENOMINATORS[denominator](values))


@pytest.mark.parametrize("estimator", choices("kl_estimator"))
def test_estimates_of_the_kl_divergence(estimator: str) -> None:
    """Without advantages the loss is the estimate; see `PolicyConfig.kl_estimator`."""
    batch = rollouts()
    batch = replace(batch, advantages=torch.zeros(8))
    d = torch.cat([one["now"] - one["reference"] for one in completions(batch)])
    expected = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() - 1 + d}[estimator].mean()
    objective = PolicyConfig(kl_weight=1.0, kl_estimator=estimator).build(DECODER)
    assert_same(objective, batch, expected)
    outcome = objective(batch)
    torch.testing.assert_close(outcome.figures["kl"] / outcome.count, expected.detach())


@pytest.mark.parametrize(("estimator", "forward"), [("k2", False), ("k3", True)])
def test_their_expected_gradients(estimator: str, forward: bool) -> None:
    """Over all tokens with their probabilities: of KL(model || ref), or of KL(ref || model)."""
    from workhorse.train.objectives.policy import KL_ESTIMATORS

    generator = torch.Generator().manual_seed(2)
    logits, other = torch.randn(2, 9, generator=generator, dtype=torch.float64)
    logits.requires_grad_()
    log_p, log_q = logits.log_softmax(0), other.log_softmax(0)
    mean = (log_p.exp().detach() * KL_ESTIMATORS[estimator](log_p - log_q)).sum()
    of, to = (log_q, log_p) if forward else (log_p, log_q)
    kl = (of.exp() * (of - to)).sum()
    found, expected = (torch.autograd.grad(one, logits, retain_graph=True) for one in (mean, kl))
    torch.testing.assert_close(found, expected)
    noise = torch.autograd.grad((log_p.exp().detach() * KL_ESTIMATORS["k1"](log_p)).sum(), logits)
    torch.testing.assert_close(noise[0], torch.zeros(9, dtype=torch.float64), atol=1e-12, rtol=0)


def test_an_entropy_bonus_and_advantages_of_tokens() -> None:
    batch = rollouts()
    counted = batch.targets != IGNORE
    advantages = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).double()
    batch = replace(batch, advantages=advantages)
    log_p = DECODER(batch.tokens).log_softmax(-1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    now = log_p.gather(2, batch.targets.where(counted, 0)[..., None])[..., 0]
    each = -(now - batch.old_logprobs).where(counted, 0).exp() * advantages - 0.1 * entropy
    expected = each[counted].mean()
    assert_same(PolicyConfig(entropy_weight=0.1).build(DECODER), batch, expected)


def test_figures_show_clipped_tokens_and_the_distance_to_the_old_policy() -> None:
    batch = rollouts()
    outcome = PolicyConfig(**CLIPPED).build(DECODER)(batch)
    ratios = torch.cat([(one["now"] - one["old"]).exp() for one in completions(batch)]).detach()
    a = torch.cat([one["a"].expand(len(one["now"])) for one in completions(batch)])
    lost = ((ratios > 1.2) & (a > 0)) | ((ratios < 0.8) & (a < 0))
    figures = {name: figure / outcome.count for name, figure in outcome.figures.items()}
    assert 0 < lost.double().mean() < 1
    torch.testing.assert_close(figures["clip_fraction"].double(), lost.double().mean())
    far = ((ratios - 1).abs() > 0.1).double().mean()
    torch.testing.assert_close(figures["ratio_outside"].double(), far)
    torch.testing.assert_close(figures["kl_old"], (ratios - 1 - ratios.log()).mean())


def test_advantages() -> None:
    rewards = torch.tensor([1.0, 0, 0, 5, 3, 4, 4], dtype=torch.float64)
    group = torch.tensor([7, 7, 7, 9, 9, 9, 9])
    values = rewards.tolist()
    first, second = values[:3], values[3:]
    means = [statistics.mean(first)] * 3 + [statistics.mean(second)] * 4
    spreads = [statistics.stdev(first)] * 3 + [statistics.stdev(second)] * 4
    others = [statistics.mean(first[:i] + first[i + 1 :]) for i in range(3)]
    others += [statistics.mean(second[:i] + second[i + 1 :]) for i in range(4)]
    centred = [value - mean for value, mean in zip(values, means, strict=True)]
    expected = {
        "none": values,
        "batch": [value - statistics.mean(values) for value in values],
        "group": centred,
        "group_std": [one / (std + 1e-4) for one, std in zip(centred, spreads, strict=True)],
        "leave_one_out": [value - other for value, other in zip(values, others, strict=True)],
    }
    assert set(expected) == set(get_args(Baseline))  # a new one needs its formula
    for baseline, wanted in expected.items():
        found = advantages_of(rewards, group, baseline)
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=torch.float64))
    with pytest.raises(WorkhorseError, match="a group has 1 completion; baseline=leave_one_out"):
        advantages_of(torch.ones(3), torch.tensor([0, 0, 1]), "leave_one_out")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("reward", [1.0, 0.1, -1000.1, 1e15 / 3])
def test_equal_rewards_have_no_advantage(reward: float, dtype: torch.dtype) -> None:
    """The mean of equal numbers is rounded, so it can differ from them."""
    rewards, group = torch.full((7,), reward, dtype=dtype), torch.tensor([7, 7, 7, 9, 9, 9, 9])
    for baseline in ("batch", "group", "group_std", "leave_one_out"):
        assert not advantages_of(rewards, group, baseline).any()
    batch = rollouts()
    batch = replace(batch, advantages=torch.full((8,), reward, dtype=dtype))
    config, values = ValuesConfig(whiten=True, gae_lambda=1.0), torch.zeros(8, 8, dtype=dtype)
    assert not with_advantages(batch, values, config).advantages.any()


@pytest.mark.parametrize("clip", [0.3, None])
def test_ppo_with_a_value_head(clip: float | None) -> None:
    """The loss is `L_clip + c · max((V - R)², (V_clipped - R)²) / 2`, each a mean over targets."""
    batch, generator = rollouts(), torch.Generator().manual_seed(4)
    config = PolicyConfig(**CLIPPED, values=ValuesConfig(weight=0.7, clip=clip))
    objective = config.build(DECODER)
    assert not objective.values_at(batch).any()
    with torch.no_grad():
        for weight in objective.value_head.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator))
    w, b = objective.value_head.parameters()
    policy, errors, cut = [], [], 0
    for row, one in enumerate(completions(batch)):
        own = batch.targets[row] != IGNORE
        values = DECODER.hidden(batch.tokens[row : row + 1])[0][own] @ w[0] + b
        old, returns = batch.old_values[row][own], batch.returns[row][own]
        error = (values - returns) ** 2
        if clip is not None:
            near = torch.minimum(torch.maximum(values, old - clip), old + clip)
            cut += int(((near - returns) ** 2 > error).sum())
            error = torch.maximum(error, (near - returns) ** 2)
        errors.append(error / 2)
        policy.append(-clipped((one["now"] - one["old"]).exp(), one["a"], 0.2, 0.2))
    assert clip is None or 0 < cut < len(torch.cat(errors))
    error = torch.cat(errors).mean()
    loss, count, figures = objective(batch)
    torch.testing.assert_close(loss / count, torch.cat(policy).mean() + 0.7 * error)
    torch.testing.assert_close(figures["value_loss"] / count, error.detach())
    found, wanted = (
        torch.autograd.grad(one, (w, b), retain_graph=True) for one in (loss / count, 0.7 * error)
    )
    torch.testing.assert_close(found, wanted)
    # Without advantages only the value loss is left, whose gradient reaches the model.
    assert_same(objective, replace(batch, advantages=torch.zeros(8)), 0.7 * error)


def test_a_detached_head_does_not_change_the_gradient_of_the_model() -> None:
    batch = rollouts()
    objective = PolicyConfig(values={"detach": True}).build(DECODER)
    with torch.no_grad():
        objective.value_head.weight.fill_(0.5)
    plain, *_ = PolicyConfig().build(DECODER)(batch)
    loss, *_ = objective(batch)
    assert loss != plain
    found = torch.autograd.grad(loss, [objective.value_head.weight, *DECODER.parameters()])
    torch.testing.assert_close(found[1:], torch.autograd.grad(plain, list(DECODER.parameters())))
    assert found[0].any()


@pytest.mark.parametrize("targets", [0, 1])
def test_whitened_advantages_of_few_targets_are_0(targets: int) -> None:
    """One target has no variance; a batch can have none if unfinished completions are ignored."""
    batch = rollouts()
    batch = replace(batch, targets=torch.full_like(batch.targets, IGNORE))
    batch.targets[0, :targets] = 1
    values = torch.ones(8, 8, dtype=torch.float64)
    found = with_advantages(batch, values, ValuesConfig(whiten=True))
    assert torch.equal(found.advantages, torch.zeros_like(values))


@pytest.mark.parametrize("of_tokens", [False, True])
def test_generalised_advantages(of_tokens: bool) -> None:
    """`A_t = Σ (γλ)^l δ_{t+l}` over the targets of a row (1506.02438 eq. 16), one at a time."""
    batch, generator = rollouts(), torch.Generator().manual_seed(3)
    values, rewards = torch.randn(2, 8, 8, generator=generator, dtype=torch.float64)
    if not of_tokens:
        rewards = rewards[:, 0]
    batch = replace(batch, targets=batch.targets.clone(), advantages=rewards)
    batch.targets[3] = IGNORE  # an ignored completion
    config = ValuesConfig(gae_lambda=0.8, gamma=0.9)
    expected, returns = torch.zeros(2, 8, 8, dtype=torch.float64)
    for row in range(8):
        own = [at for at in range(8) if batch.targets[row, at] != IGNORE]
        for at in own:
            for later in (one for one in own if one >= at):
                reward = rewards[row, later] if of_tokens else (later == own[-1]) * rewards[row]
                following = 0 if later == own[-1] else values[row, later + 1]
                error = reward + 0.9 * following - values[row, later]
                expected[row, at] += (0.9 * 0.8) ** (later - at) * error
            returns[row, at] = expected[row, at] + values[row, at]
    found = with_advantages(batch, values, config)
    torch.testing.assert_close(found.advantages, expected)
    torch.testing.assert_close(found.returns, returns)
    learned = batch.targets != IGNORE
    whitened = with_advantages(batch, values, config.replace(whiten=True))
    mean, n = expected[learned].mean(), int(learned.sum())
    variance = ((expected[learned] - mean) ** 2).sum() / (n - 1)
    wanted = torch.where(learned, (expected - mean) / (variance + 1e-8).sqrt(), 0)
    torch.testing.assert_close(whitened.advantages, wanted)
    torch.testing.assert_close(whitened.returns, returns)
    if not of_tokens:  # with γ = λ = 1 the advantage of each token is the reward minus its value
        plain = with_advantages(batch, values, ValuesConfig(gae_lambda=1.0))
        wanted = (rewards[:, None] - values).where(learned, 0)
        torch.testing.assert_close(plain.advantages, wanted)


def test_options_that_would_be_ignored_are_refused() -> None:
    with pytest.raises(ConfigError, match="have no effect on ratio=none"):
        PolicyConfig(ratio="none", clip_high=0.2)
    with pytest.raises(ConfigError, match="denominator=tokens does not fit max_length=9"):
        PolicyConfig(max_length=9)
    with pytest.raises(ConfigError, match="denominator=constant does not fit max_length=None"):
        PolicyConfig(denominator="constant")
