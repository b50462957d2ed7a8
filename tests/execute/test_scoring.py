"""Scoring bodies: the log-probabilities of the reference, with the bits of training."""

from typing import Any

import pytest
import torch

from tests.nn.grid_factors import FACTORS
from tests.train.conftest import MODEL
from workhorse.data import Batch
from workhorse.devices.tape import without_data
from workhorse.execute.scoring import scoring_body
from workhorse.nn import IGNORE, Decoder, DecoderConfig
from workhorse.nn.logprobs import score
from workhorse.train import TrainConfig
from workhorse.train.objectives.objective import ModelObjective
from workhorse.train.step.build import build_step, training_operators

CPU = torch.device("cpu")
WIRINGS = {name: variants[0] for name, variants in FACTORS["wiring"].items()}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def config(wiring: dict[str, Any]) -> DecoderConfig:
    fields = {**MODEL, "vocab_size": 41, "max_seq_len": 16}
    return DecoderConfig.from_dict(
        {**fields, "blocks": {"main": {**MODEL["blocks"]["main"], **wiring}}}
    )


def drawn(wiring: dict[str, Any]) -> Decoder:
    torch.manual_seed(0)
    decoder = config(wiring).build()
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.1)
    return decoder


def batch() -> Batch:
    """Rows of two documents; some targets are ignored."""
    tokens = torch.randint(41, (3, 17), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[:, :3] = IGNORE
    documents = (torch.arange(16) > 8).long().expand(3, 16)
    return Batch(tokens[:, :-1], targets, documents, torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wiring", WIRINGS)
def test_scores_are_those_of_the_reference_and_have_the_bits_of_training(
    wiring: str, dtype: str, exact: bool
) -> None:
    rows, decoder = batch(), drawn(WIRINGS[wiring])
    train = TrainConfig.from_dict(
        {
            "steps": 1,
            "batch_size": 3,
            "seq_len": 16,
            "dtype": dtype,
            "objective": {"kind": "policy"},
            "rollouts": {"completions": 1, "baseline": "none", "exact": exact},
        }
    )
    objective = build_step(decoder, train, CPU).objective.eval()
    assert isinstance(objective, ModelObjective)
    body = scoring_body(decoder, training_operators(CPU, DTYPES[dtype], exact=exact), exact=exact)
    found = body(rows.tokens, rows.targets, documents=rows.documents)
    with torch.no_grad():
        logits = decoder.eval()(rows.tokens, documents=rows.documents).flatten(0, 1).float()
        assert torch.equal(found.target, objective.score(rows).target)
    expected = score(logits, rows.targets.flatten())[:, 0].view_as(found.target)
    error = 1e-5 if dtype == "float32" else 0.05
    torch.testing.assert_close(found.target, expected, atol=error, rtol=0)


def test_a_body_shares_the_weights_and_computes_no_gradients() -> None:
    decoder, rows = drawn({"dropout": 0.5}), batch()
    body = scoring_body(decoder, training_operators(CPU, torch.float32))
    before = body(rows.tokens, rows.targets)
    assert not before.target.requires_grad
    assert torch.equal(before.target, body(rows.tokens, rows.targets).target)  # without dropout
    assert decoder.training
    for own, theirs in zip(body.parameters(), decoder.parameters(), strict=True):
        assert own is theirs
    with torch.no_grad():
        decoder.head.proj.weight.mul_(2)
    assert not torch.equal(before.target, body(rows.tokens, rows.targets).target)


def test_a_body_keeps_nothing_between_its_passes() -> None:
    with without_data(CPU) as tape:
        rows = torch.zeros(3, 16, dtype=torch.int64)
        decoder = config({}).build(device=CPU)
        body = scoring_body(decoder, training_operators(CPU, torch.float32))
        before = sum(one.n_bytes for one in tape.alive)
        found = body(rows, rows)
        assert sum(one.n_bytes for one in tape.alive) > before
        del found
        assert sum(one.n_bytes for one in tape.alive) == before


@pytest.mark.parametrize("execution", ["auto", "reference"])
def test_only_native_operators_replace_modules(execution: str) -> None:
    """Without operators the modules of `nn` compute the scores."""
    operators = training_operators(CPU, torch.float32, execution)  # type: ignore[arg-type]
    body = scoring_body(drawn({}), operators)
    native = [one for one in body.modules() if "native" in type(one).__module__]
    assert bool(native) == (operators.training is not None and execution == "auto")
