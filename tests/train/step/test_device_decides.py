"""With `device_decides` the update equals the one that the host would have made."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.train.conftest import MODEL
from tests.without_host import WithoutHost
from workhorse.data import Batch
from workhorse.devices.transfer import ToHost
from workhorse.nn import DecoderConfig
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import OptimizerConfig, build_optimizer
from workhorse.optim.master_weights import round_weights
from workhorse.optim.muon import MuonConfig
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.step.step import LossScale, Precision, TrainingStep

CPU = torch.device("cpu")
OPTIMIZERS: list[OptimizerConfig] = [
    AdamWConfig(),
    AdamWConfig(mean_dtype="bfloat16"),
    MuonConfig(),
    MuonConfig(nesterov=False),
]


def make_step(
    config: OptimizerConfig, *, rounded: bool, device_decides: bool, scaled: bool = False
) -> TrainingStep:
    """Build a step without native operators, as on a GPU."""
    torch.manual_seed(0)
    decoder = DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 8}).build()
    low_bits = round_weights(decoder) if rounded else {}
    return TrainingStep(
        NextToken(decoder).train(),
        build_optimizer(decoder, config, low_bits),
        CPU,
        precision=Precision(CPU, torch.float32),
        scale=LossScale(enabled=scaled),
        micro_batch_size=2,
        grad_clip=0.5,
        device_decides=device_decides,
    )


def batch_of(seed: int) -> Batch:
    torch.manual_seed(seed)
    tokens, targets = torch.randint(11, (2, 4, 8))
    documents = torch.arange(8).expand(4, 8) // 3
    return Batch(tokens, targets, documents, torch.zeros(4, dtype=torch.int64))


def state_of(step: TrainingStep) -> dict[str, Tensor]:
    masters = step.optimizer.masters
    weights = {name: masters.read(name) for name in masters.parameters}
    return {name: one.clone() for name, one in (weights | step.optimizer.tensors()).items()}


@pytest.mark.parametrize("config", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("rounded", [False, True])
@pytest.mark.parametrize("scaled", [False, True])
def test_updates_have_the_same_bits(config: OptimizerConfig, rounded: bool, scaled: bool) -> None:
    host, device = (
        make_step(config, rounded=rounded, device_decides=decides, scaled=scaled)
        for decides in (False, True)
    )
    clipped = 0
    for seed, broken in enumerate(("", "", "gradient", "loss", "")):
        results = []
        for step in (host, device):
            loss, counted = step.backward(batch_of(seed))
            if broken == "gradient":
                masters = step.optimizer.masters
                next(iter(masters.gradients(masters.parameters)))[0] = math.nan
            elif broken == "loss":
                loss = loss / 0
            before = state_of(step)
            results.append(step.update(loss, counted, schedule=0.5))
            if broken:
                after = state_of(step)
                assert all(torch.equal(after[name], old) for name, old in before.items())
        expected, result = results
        assert result.finite == expected.finite == (not broken)
        if result.finite:
            assert result == expected
            clipped += result.grad_norm > 0.5
        ours, theirs = state_of(device), state_of(host)
        assert all(torch.equal(ours[name], tensor) for name, tensor in theirs.items())
    assert clipped


@pytest.mark.parametrize("config", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("rounded", [False, True])
def test_the_update_is_on_its_way_before_the_host_waits_for_figures(
    config: OptimizerConfig, rounded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = make_step(config, rounded=rounded, device_decides=True)
    before = state_of(step)
    updated: list[dict[str, Tensor]] = []
    wait = ToHost.wait

    def noting(figures: ToHost) -> list[float]:
        updated.append(state_of(step))
        return wait(figures)

    monkeypatch.setattr(ToHost, "wait", noting)
    batch = batch_of(0)
    counted = step.objective.count(batch).item()  # its tokens are on the host
    step.objective.count = lambda batch: SimpleNamespace(item=lambda: counted)
    with WithoutHost():
        assert step.update(*step.backward(batch), schedule=1.0).finite
    after, (seen,) = state_of(step), updated
    assert all(torch.equal(seen[name], one) for name, one in after.items())
    assert not any(torch.equal(before[name], one) for name, one in after.items())
