"""Load balancing of experts by a loss or by a bias, in every mode of training."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.conftest import MODEL
from tests.train.step.test_step import CPU
from tests.train.test_run import assert_same_run, weights
from workhorse.config.base import ConfigError
from workhorse.data import IGNORE, Batch
from workhorse.execute.training import checkpoint_activations
from workhorse.models.describe import flops_per_token
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.experts.router import Router, Routing
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import build_optimizer, parameters_by_role
from workhorse.optim.muon import MuonConfig
from workhorse.run import train
from workhorse.train import Recipe
from workhorse.train.objectives.balance import Balanced, Balancer, imbalance, loads_of
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.step.step import LossScale, Precision, TrainingStep

EXPERTS, TOP_K = 8, 2
MIXTURE = {
    "kind": "moe",
    "n_experts": EXPERTS,
    "top_k": TOP_K,
    "d_ff": 8,
    "bias": True,
    "router": {"score": "sigmoid", "normalize": True, "selection_bias": True, "bias": True},
}


def with_feed_forward(feed_forward: dict[str, Any]) -> dict[str, Any]:
    return {
        **MODEL,
        "blocks": {"main": {**MODEL["blocks"]["main"], "feed_forward": feed_forward}},
    }


MIXED = with_feed_forward(MIXTURE)


@pytest.fixture
def mixed() -> Decoder:
    return DecoderConfig.from_dict({**MIXED, "vocab_size": 11, "max_seq_len": 8}).build()


@pytest.fixture
def batch() -> Batch:
    """Rows with different numbers of predictions."""
    tokens, targets = torch.randint(11, (2, 4, 8))
    targets[0, 1:] = IGNORE
    targets[1, 4:] = IGNORE
    return Batch(tokens, targets, None, torch.zeros(4, dtype=torch.int64))


def make_step(decoder: Decoder, *, rows: int = 4, weight: float = 0.0, rate: float = 0.0):
    balancer = Balancer(decoder, weight=weight, rate=rate)
    return TrainingStep(
        Balanced(NextToken(decoder), balancer).train(),
        build_optimizer(decoder, AdamWConfig(learning_rate=1e-2)),
        CPU,
        precision=Precision(CPU, torch.float32),
        scale=LossScale(enabled=False),
        micro_batch_size=rows,
        grad_clip=None,
    )


def routers(decoder: Decoder) -> list[Router]:
    return [module for module in decoder.modules() if isinstance(module, Router)]


def biases(decoder: Decoder) -> list[torch.Tensor]:
    return [router.selection_bias.clone() for router in routers(decoder)]


def learned_gradients(decoder: Decoder) -> list[torch.Tensor]:
    return [weight.grad.clone() for weight in decoder.parameters() if weight.requires_grad]


def test_the_imbalance_is_its_formula() -> None:
    """Per prediction, it is 1 for equal loads and n_experts if one expert gets everything."""

    def of_one_row(scores: torch.Tensor, load: torch.Tensor) -> float:
        counted = torch.ones(1, len(scores), dtype=torch.bool)
        return imbalance(scores, load[None], counted).item() / len(scores)

    even = torch.full((4, 4), 0.25)
    assert of_one_row(even, torch.ones(4) * 3) == pytest.approx(1.0)
    one = torch.eye(4)[[0, 0]]
    assert of_one_row(one, torch.tensor([2.0, 0, 0, 0])) == pytest.approx(4.0)
    scores = torch.tensor([[0.2, 0.6], [0.9, 0.1]])  # not normalised
    expected = 2 * (0.75 * (0.25 + 0.9) / 2 + 0.25 * (0.75 + 0.1) / 2)
    assert of_one_row(scores, torch.tensor([3.0, 1.0])) == pytest.approx(expected)


def test_loads_count_every_choice_of_a_position_that_predicts(mixed: Decoder) -> None:
    routing = routers(mixed)[0](torch.randn(50, 16))
    counted = torch.rand(5, 10) < 0.7
    loads = loads_of(routing, counted)
    chosen = routing.experts.view(5, 10, TOP_K)
    for row, load in enumerate(loads):
        choices = chosen[row][counted[row]]
        assert all(load[expert] == (choices == expert).sum() for expert in range(EXPERTS))


def all_loads(routing: Routing) -> torch.Tensor:
    return loads_of(routing, torch.ones(1, len(routing.experts), dtype=torch.bool))[0]


COLLAPSED = torch.tensor([3.0, 3.0, 0, 0, 0, 0, 0, 0])


def collapse(decoder: Decoder) -> None:
    """Make every token choose the first two experts."""
    with torch.no_grad():
        for router in routers(decoder):
            router.proj.bias.copy_(COLLAPSED)
            router.proj.weight.normal_(std=0.1)


def busiest(decoder: Decoder, tokens: torch.Tensor) -> float:
    """Return the largest fraction, over layers, of choices of a layer's two busiest experts."""
    parts = []
    hooks = [
        router.register_forward_hook(lambda *args: parts.append(all_loads(args[-1])))
        for router in routers(decoder)
    ]
    with torch.no_grad():
        decoder(tokens)
    for hook in hooks:
        hook.remove()
    return max((load.topk(2).values.sum() / load.sum()).item() for load in parts)


@pytest.mark.parametrize(
    ("options", "spread"),
    [({}, False), ({"weight": 1.0}, True), ({"rate": 0.02}, True)],
    ids=["neither", "loss", "bias"],
)
def test_a_collapsed_router_spreads_out(
    mixed: Decoder, options: dict[str, float], spread: bool
) -> None:
    """The two busiest experts of 8 get all choices at first, and less than half at the end."""
    collapse(mixed)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(11, (16, 8), generator=generator)
    assert busiest(mixed, tokens) == 1.0
    step = make_step(mixed, rows=16, **options)
    batch = Batch(tokens, tokens.roll(-1, 1), None, torch.zeros(16, dtype=torch.int64))
    for _ in range(80):
        step.update(*step.backward(batch), schedule=1.0)
    assert (busiest(mixed, tokens) < 0.5) is spread


def test_the_reported_loss_is_without_the_balance_loss(mixed: Decoder, batch: Batch) -> None:
    plain, _ = make_step(mixed).backward(batch)
    before = learned_gradients(mixed)
    mixed.zero_grad()
    balanced, _ = make_step(mixed, weight=1.0).backward(batch)
    assert torch.equal(plain, balanced)
    assert not all(map(torch.equal, learned_gradients(mixed), before))


def decide(decoder: Decoder) -> None:
    """Make the choices differ between tokens, by clear margins."""
    with torch.no_grad():
        for router in routers(decoder):
            router.proj.weight.normal_()


def balance_gradients(decoder: Decoder, batch: Batch, rows: int) -> list[torch.Tensor]:
    """Return the gradients of only the balance loss, with a weight that dominates rounding."""
    decoder.zero_grad()
    make_step(decoder, rows=rows).backward(batch)
    plain = learned_gradients(decoder)
    decoder.zero_grad()
    make_step(decoder, rows=rows, weight=100.0).backward(batch)
    return [both - one for both, one in zip(learned_gradients(decoder), plain, strict=True)]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_gradient_does_not_depend_on_the_micro_batches(
    mixed: Decoder, batch: Batch, rows: int
) -> None:
    decide(mixed)
    whole = torch.cat([gradient.flatten() for gradient in balance_gradients(mixed, batch, 4)])
    split = torch.cat([gradient.flatten() for gradient in balance_gradients(mixed, batch, rows)])
    assert whole.norm() > 0.1
    assert (split - whole).norm() < 1e-5 * whole.norm()


@pytest.mark.parametrize("packed", [False, True])
def test_padding_does_not_enter_the_balance(mixed: Decoder, packed: bool) -> None:
    """Rows of five tokens give the same result with three positions of padding after them."""
    decide(mixed)
    tokens, targets = torch.randint(11, (2, 3, 5))
    sources = torch.zeros(3, dtype=torch.int64)
    documents = torch.zeros_like(tokens) if packed else None
    short = Batch(tokens, targets, documents, sources)
    longer = Batch(
        torch.nn.functional.pad(tokens, (0, 3)),
        torch.nn.functional.pad(targets, (0, 3), value=IGNORE),
        None if documents is None else torch.nn.functional.pad(documents, (0, 3), value=-1),
        sources,
    )
    results = []
    for batch in (short, longer):
        gradients = balance_gradients(mixed, batch, 3)
        step = make_step(mixed, weight=1.0, rate=0.1)
        result = step.update(*step.backward(batch), schedule=0.0)
        loads = step.objective.balancer.latest
        assert all(load.sum() == 3 * 5 * TOP_K for load in loads)
        results.append((torch.cat([g.flatten() for g in gradients]), result.terms, loads))
        for router in routers(mixed):
            router.selection_bias.data.zero_()
    (gradient, terms, loads), (padded, padded_terms, padded_loads) = results
    assert (padded - gradient).norm() < 1e-5 * gradient.norm()
    assert padded_terms == {"balance_loss": pytest.approx(terms["balance_loss"], rel=1e-5)}
    assert all(map(torch.equal, loads, padded_loads))


@pytest.mark.parametrize("rows", [1, 3, 4])
def test_an_update_moves_each_bias_by_the_load_of_the_whole_batch(
    mixed: Decoder, batch: Batch, rows: int
) -> None:
    loads, counted = [], batch.targets != IGNORE
    hooks = [
        router.register_forward_hook(
            lambda *args: loads.append(loads_of(args[-1], counted).sum(dim=0))
        )
        for router in routers(mixed)
    ]
    with torch.no_grad():
        mixed(batch.tokens)
    for hook in hooks:
        hook.remove()
    step = make_step(mixed, rows=rows, rate=0.25)
    step.update(*step.backward(batch), schedule=0.0)
    for bias, load in zip(biases(mixed), loads, strict=True):
        assert torch.equal(bias, 0.25 * torch.sign(load.mean() - load))
        assert load.sum() == (batch.targets != IGNORE).sum() * TOP_K


@pytest.mark.parametrize("options", [{"weight": 0.7}, {"rate": 0.25}, {"weight": 0.7, "rate": 0.2}])
def test_activations_computed_again_are_not_counted_again(
    mixed: Decoder, batch: Batch, options: dict[str, float]
) -> None:
    state = {name: tensor.clone() for name, tensor in mixed.state_dict().items()}
    results = []
    for checkpointed in (False, True):
        mixed.load_state_dict(state)
        mixed.zero_grad()
        if checkpointed:
            checkpoint_activations(mixed)
        step = make_step(mixed, rows=2, **options)
        loss, counted = step.backward(batch)
        found = learned_gradients(mixed)
        loads = [load.clone() for load in step.objective.balancer.loads.values()]
        step.update(loss, counted, schedule=1.0)
        results.append([*found, *loads, *biases(mixed)])
    assert all(map(torch.equal, *results))


def test_a_skipped_step_moves_no_bias_and_leaves_no_load(mixed: Decoder, batch: Batch) -> None:
    step = make_step(mixed, rate=0.25)
    loss, counted = step.backward(batch)
    assert not step.update(loss * torch.inf, counted, schedule=1.0).finite
    assert not any(bias.any() for bias in biases(mixed))
    assert not step.objective.balancer.loads


def test_validation_and_generation_are_not_watched(mixed: Decoder, batch: Batch) -> None:
    step = make_step(mixed, weight=1.0, rate=0.25)
    with torch.no_grad():
        mixed.eval()(batch.tokens)
    assert not step.objective.balancer.routings


@pytest.mark.parametrize("config", [AdamWConfig(weight_decay=0.5), MuonConfig(weight_decay=0.5)])
def test_matrices_of_experts_decay_and_their_biases_do_not(mixed: Decoder, config: Any) -> None:
    roles = parameters_by_role(mixed)
    first = "layers.0.feed_forward."
    assert first + "experts.down_proj.weight" in roles["hidden"]
    assert first + "experts.down_proj.bias" in roles["vector"]
    assert first + "router.selection_bias" in roles["vector"]
    before = {name: weight.detach().clone() for name, weight in mixed.named_parameters()}
    optimizer = build_optimizer(mixed, config)
    for weight in mixed.parameters():
        weight.grad = torch.zeros_like(weight) if weight.requires_grad else None
    optimizer.step(1.0)
    changed = {n for n, weight in mixed.named_parameters() if not torch.equal(weight, before[n])}
    assert changed == set(roles["hidden"])


def test_each_expert_is_a_matrix_of_its_own_to_muon(mixed: Decoder) -> None:
    """The update of one expert does not depend on the gradients of the others."""
    experts = mixed.layers[0].feed_forward.experts.up_proj
    start = experts.weight.detach().clone()
    updates = []
    for others in (1.0, 50.0):
        experts.weight.data.copy_(start)
        optimizer = build_optimizer(mixed, MuonConfig())
        generator = torch.Generator().manual_seed(0)
        for weight in mixed.parameters():
            if weight.requires_grad:
                weight.grad = torch.randn(weight.shape, generator=generator)
        experts.weight.grad[1:] *= others
        optimizer.step(1.0)
        updates.append(experts.weight.detach()[0].clone())
    assert not torch.equal(updates[0], start[0])
    torch.testing.assert_close(*updates)


def test_a_token_pays_for_its_experts_alone(mixed: Decoder) -> None:
    """FLOPs count `top_k` experts, as much as one feed-forward with their total width."""
    dense = with_feed_forward({"kind": "gated_mlp", "d_ff": 8 * TOP_K})
    plain = DecoderConfig.from_dict({**dense, "vocab_size": 11, "max_seq_len": 8}).build()
    router = 6 * 2 * EXPERTS * 16  # two layers
    assert flops_per_token(mixed, 8) == flops_per_token(plain, 8) + router


def recipe_of(make_recipe: Any, model: dict[str, Any], **options: Any) -> Recipe:
    fields = make_recipe().to_dict()
    return Recipe.from_dict(fields | {"model": model, "train": fields["train"] | options})


def test_a_resumed_run_has_the_biases_of_the_uninterrupted_one(
    make_recipe: Any, tmp_path: Path
) -> None:
    recipe = recipe_of(make_recipe, MIXED, balance_loss=0.01, balance_rate=0.01, keep=3)
    train(recipe, tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed/checkpoints/step-00000012")
    train(recipe, tmp_path / "resumed", resume=True)
    assert_same_run(tmp_path / "whole", tmp_path / "resumed")
    moved = weights(tmp_path / "whole", 12)["layers.0.feed_forward.router.selection_bias"]
    assert 0 < moved.abs().max() < 12 * 0.01 + 1e-6


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (
            MODEL,
            {"balance_loss": 0.01},
            "train: balance_loss=0.01 needs a mixture of experts in the model; remove balance_loss",
        ),
        (
            with_feed_forward({**MIXTURE, "router": {"score": "softmax"}}),
            {"balance_rate": 0.01},
            "train: balance_rate=0.01 needs a router with selection_bias=true; set that in",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(
    make_recipe: Any, model: dict[str, Any], options: dict[str, float], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe_of(make_recipe, model, **options)
    assert str(caught.value).startswith(message)
