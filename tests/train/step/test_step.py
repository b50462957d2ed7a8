import math
from typing import Any

import pytest
import torch

from workhorse.data import IGNORE, Batch
from workhorse.errors import WorkhorseError
from workhorse.execute.training import checkpoint_activations
from workhorse.nn import Decoder, next_token_loss
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import build_optimizer
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.recipe.training import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.train.step.step import LossScale, Precision, TrainingStep

CPU = torch.device("cpu")


def make_step(decoder: Decoder, **changes: Any) -> TrainingStep:
    options: dict[str, Any] = {
        "precision": Precision(CPU, torch.float32),
        "scale": LossScale(enabled=False),
        "micro_batch_size": 4,
        "grad_clip": None,
        **changes,
    }
    return TrainingStep(
        NextToken(decoder).train(), build_optimizer(decoder, AdamWConfig()), CPU, **options
    )


@pytest.fixture
def batch() -> Batch:
    """Four rows with 1, 4, 8 and 8 predictions."""
    tokens, targets = torch.randint(11, (2, 4, 8))
    targets[0, 1:] = IGNORE
    targets[1, 4:] = IGNORE
    return Batch(tokens, targets, None, torch.zeros(4, dtype=torch.int64))


def gradients(decoder: Decoder) -> list[torch.Tensor]:
    return [parameter.grad.clone() for parameter in decoder.parameters()]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_micro_batches_give_the_whole_batchs_gradient(
    decoder: Decoder, batch: Batch, rows: int
) -> None:
    loss, counted = make_step(decoder).backward(batch)
    whole = gradients(decoder)
    decoder.zero_grad()
    again, counted_again = make_step(decoder, micro_batch_size=rows).backward(batch)
    torch.testing.assert_close(again, loss)
    assert counted == counted_again == 1 + 4 + 8 + 8
    for ours, expected in zip(gradients(decoder), whole, strict=True):
        torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-4)


def test_loss_is_the_mean_over_what_counts(decoder: Decoder, batch: Batch) -> None:
    loss, counted = make_step(decoder).backward(batch)
    total, count = next_token_loss(decoder(batch.tokens), batch.targets)
    assert counted == int(count)
    torch.testing.assert_close(loss, (total / count).detach())


def test_long_gradients_are_shortened_and_reported_whole(decoder: Decoder, batch: Batch) -> None:
    step = make_step(decoder, grad_clip=1e-3)
    lengths = []
    step.optimizer.step = lambda schedule, grad_scale: lengths.append(
        grad_scale * torch.stack([p.grad.norm() for p in decoder.parameters()]).norm().item()
    )
    result = step.update(*step.backward(batch), schedule=1.0)
    assert result.grad_norm > 0.01
    assert lengths == [pytest.approx(1e-3, rel=1e-3)]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_never_reaches_the_weights(
    decoder: Decoder, batch: Batch, value: float, where: str
) -> None:
    step = make_step(decoder, grad_clip=1.0)
    before = [parameter.detach().clone() for parameter in decoder.parameters()]
    state = {name: tensor.clone() for name, tensor in step.optimizer.tensors().items()}
    loss, counted = step.backward(batch)
    if where == "loss":
        loss = loss * value
    else:
        decoder.final_norm.weight.grad[3] = value
    result = step.update(loss, counted, schedule=1.0)
    assert not result.finite
    for parameter, old in zip(decoder.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
        assert parameter.grad is None
    for name, tensor in step.optimizer.tensors().items():
        assert torch.equal(tensor, state[name])
    assert step.update(*step.backward(batch), schedule=1.0).finite


def test_scaled_loss_gives_the_same_update(decoder: Decoder, batch: Batch) -> None:
    plain = make_step(decoder)
    norms = [plain.update(*plain.backward(batch), schedule=0.0).grad_norm]
    scaled = make_step(decoder, scale=LossScale(enabled=True))
    loss, counted = scaled.backward(batch)
    result = scaled.update(loss, counted, schedule=0.0)
    assert result.loss == pytest.approx(float(loss))
    assert result.grad_norm == pytest.approx(norms[0], rel=1e-5)


def test_loss_scale_halves_on_overflow_and_doubles_after_quiet() -> None:
    scale = LossScale(enabled=True)
    start = scale.value
    scale.update(finite=False)
    assert scale.value == start / 2
    for _ in range(2000):
        scale.update(finite=True)
    assert scale.value == start
    copy = LossScale(enabled=True)
    scale.update(finite=True)
    copy.load(scale.state())
    assert (copy.value, copy.good_steps) == (start, 1)


def test_z_loss_is_of_training_alone(decoder: Decoder, batch: Batch) -> None:
    plain, with_z = NextToken(decoder), NextToken(decoder, z_loss=0.1)
    outcome = with_z(batch)
    assert outcome.figures["loss"] == plain(batch).loss
    assert outcome.figures["z_loss"] > 0
    assert outcome.loss == outcome.figures["loss"] + outcome.figures["z_loss"]
    assert with_z.eval()(batch).loss == plain.eval()(batch).loss
    assert set(with_z(batch).figures) == {"loss"}


@pytest.mark.parametrize("rows", [4, 1])
def test_the_loss_shown_is_the_cross_entropy_and_the_z_loss_stands_beside_it(
    decoder: Decoder, batch: Batch, rows: int
) -> None:
    logits = decoder(batch.tokens).detach()
    counted = batch.targets != IGNORE
    weight = 0.3
    step = make_step(decoder, micro_batch_size=rows)
    step.objective.z_loss = weight
    result = step.update(*step.backward(batch), schedule=0.0)
    total, count = next_token_loss(logits, batch.targets)
    assert result.loss == pytest.approx(float(total / count), rel=1e-5)
    z = (logits.logsumexp(-1).square() * counted).sum() / count
    assert result.terms == {"z_loss": pytest.approx(weight * float(z), rel=1e-5)}


def test_checkpointed_activations_change_no_gradient(decoder: Decoder, batch: Batch) -> None:
    names = [name for name, _ in decoder.named_parameters()]
    make_step(decoder).backward(batch)
    whole = gradients(decoder)
    decoder.zero_grad()
    checkpoint_activations(decoder)
    make_step(decoder).backward(batch)
    assert all(map(torch.equal, gradients(decoder), whole))
    assert [name for name, _ in decoder.named_parameters()] == names


def test_bfloat16_arithmetic_keeps_float32_weights(decoder: Decoder, batch: Batch) -> None:
    step = make_step(decoder, precision=Precision(CPU, torch.bfloat16))
    exact, _ = make_step(decoder).backward(batch)
    step.optimizer.masters.zero_grad()
    loss, counted = step.backward(batch)
    assert loss != exact
    torch.testing.assert_close(loss, exact, atol=0.02, rtol=0.01)
    assert step.update(loss, counted, schedule=1.0).finite
    assert {parameter.dtype for parameter in decoder.parameters()} == {torch.float32}


def test_a_decoder_of_which_nothing_is_trained_is_refused(decoder: Decoder) -> None:
    config = TrainConfig.from_dict({"steps": 1, "batch_size": 2, "seq_len": 4})
    with pytest.raises(WorkhorseError, match="no weight has requires_grad=True"):
        build_step(decoder.requires_grad_(False), config, torch.device("cpu"))
