"""The simulated time of a step on several devices."""

from typing import Any

import pytest
import torch

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.memory.step_memory import PlannedStep
from workhorse.models import find_preset
from workhorse.models.describe import forward_flops
from workhorse.parallel.config import ParallelismConfig
from workhorse.plan import step_time
from workhorse.plan.devices import Cluster, Link, Ring, find_device
from workhorse.plan.plan import failures
from workhorse.plan.step_time import Pass, StepTime, pipeline_seconds, simulated_step
from workhorse.train.recipe.training import TrainConfig

CUDA = torch.device("cuda")
CLUSTER = Cluster(1e12, 1e12, near=Link(300e9, 0.0), far=Link(25e9, 0.0), node=8)


def step(ways: dict[str, Any], adapter: AdapterConfig | None = None, **fields: object) -> StepTime:
    adamw = {"kind": "adamw", "learning_rate": 1e-3}
    given = {"steps": 1, "batch_size": 64, "seq_len": 512, "dtype": "bfloat16", "optimizer": adamw}
    config = find_preset("gpt2").config.replace(n_layers=4)
    train = TrainConfig(**{**given, **fields})
    mesh = ParallelismConfig(**ways)
    planned = PlannedStep(config, train, CUDA, mesh, adapter=adapter)
    return simulated_step(planned, find_device("a100"))


def test_an_adapter_has_no_gradients_of_frozen_weights() -> None:
    whole, lora = step({}), step({}, adapter=AdapterConfig(rank=4))
    flops = forward_flops(find_preset("gpt2").config.replace(n_layers=4).build(device="meta"), 512)
    scores = flops["scores"] // 2  # a causal mask hides half of them
    weights = sum(flops.values()) - flops["scores"]
    part = (2 * weights + 3 * scores) / (3 * weights + 3 * scores)
    assert lora.compute == pytest.approx(part * whole.compute, rel=0.15)  # and memory traffic
    assert lora.optimizer < 0.02 * whole.optimizer
    several = step({"data": 4}, adapter=AdapterConfig(rank=4))
    assert 0 < several.gradient_sync < 0.1 * step({"data": 4}).gradient_sync


@pytest.mark.parametrize("micro_batches", [1, 3, 16])
@pytest.mark.parametrize("stages", [1, 2, 5])
def test_a_pipeline_fills_and_empties(stages: int, micro_batches: int) -> None:
    # 2104.04473 §2.2.1: the bubble is p - 1 passes in each direction.
    found = pipeline_seconds([(1.0, 2.0)] * stages, micro_batches)
    assert found == pytest.approx(3 * (micro_batches + stages - 1))


def test_a_slow_stage_holds_up_the_others() -> None:
    even, uneven = [(1.0, 2.0)] * 3, [(1.0, 2.0), (2.0, 4.0), (1.0, 2.0)]
    assert pipeline_seconds(uneven, 100) > 1.9 * pipeline_seconds(even, 100)
    assert pipeline_seconds(even, 4, transfer=1.0) > pipeline_seconds(even, 4)


def test_a_steady_pipeline_is_not_followed() -> None:
    stages = [(1.0, 2.5), (1.2, 2.1), (0.4, 3.3), (1.1, 2.2)]
    for transfer in (0.0, 0.3):
        assert pipeline_seconds(stages, 100, transfer) == pytest.approx(
            step_time._followed(stages, 100, transfer)
        )
    assert pipeline_seconds(stages, 10**9) == pytest.approx(10**9 * 3.7, rel=1e-6)


def test_rings() -> None:
    gather = CLUSTER.all_gather
    assert gather(Ring(8, 1), 8e9) == pytest.approx(7e9 / 300e9)
    assert CLUSTER.all_reduce(Ring(4, 2), 8e9) == pytest.approx(2 * 6e9 / 300e9)
    assert gather(Ring(4, 8), 8e9) == pytest.approx(6e9 / 25e9)  # one device of each node
    assert gather(Ring(16, 1), 16e9) == pytest.approx(15e9 / 200e9)  # eight devices of each node
    assert CLUSTER.send(1, 3e9) < CLUSTER.send(8, 3e9)


def test_one_device_only_computes() -> None:
    alone = step({})
    assert (
        alone.activation_exchange,
        alone.exposed_fsdp,
        alone.pipeline_bubble,
        alone.gradient_sync,
    ) == (0, 0, 0, 0)
    assert step({}, activation_checkpointing=True).compute > 1.1 * alone.compute


def test_each_division_takes_what_it_takes() -> None:
    assert step({"data": 8}).gradient_sync > 0
    assert step({"tensor": 4}).activation_exchange > 0
    assert step({"context": 4}).activation_exchange > 0
    assert step({"pipeline": 4}).pipeline_bubble > 0
    few = {"batch_size": 8, "seq_len": 32}
    assert step({"shard": 8}, **few).exposed_fsdp > 0
    assert step({"shard": 8}).exposed_fsdp == 0  # overlaps with computation
    far = step({"shard": 64}, batch_size=64, seq_len=32)
    assert far.exposed_fsdp > step({"shard": 8}, **few).exposed_fsdp


def test_weights_that_stay_are_sent_once() -> None:
    small = {"batch_size": 32, "seq_len": 32, "micro_batch_size": 1}
    again, once = (step({"shard": 8, "reshard": name}, **small) for name in ("pass", "step"))
    # Bytes per element for four micro-batches. `pass` gathers layers in both passes and tables in
    # one; `step` gathers each once. Gradients are sent in float32 every time.
    layers, tables = 4 * 12 * 768**2, (50_257 + 1024) * 768
    ratio = (layers + tables) * (2 + 4 * 4) / (4 * (layers * (2 + 2 + 4) + tables * (2 + 4)))
    messages = (4 + 1 + 4 * (4 + 1)) / (4 * (3 * 4 + 2))
    assert messages < once.exposed_fsdp / again.exposed_fsdp < ratio
    assert once.compute == again.compute


def test_what_is_not_sent_aside_takes_its_time() -> None:
    one = Pass(computes=2.0, waits=1.0, fetches=2.5)
    assert one.seconds(aside=True) == 3.0
    assert one.seconds(aside=False) == 5.5


def test_what_a_published_run_reached_is_near() -> None:
    """Tests 2104.04473 table 1, 39.1 billion parameters; `studies.scale` has the other models."""
    config = find_preset("gpt2").config.replace(
        **{"vocab_size": 51_200, "d_model": 8192, "n_layers": 48, "max_seq_len": 2048},
        blocks={
            "main": {
                **find_preset("gpt2").config.to_dict()["blocks"]["main"],
                "attention": {"n_heads": 64},
                "feed_forward": {"kind": "mlp", "d_ff": 4 * 8192},
            }
        },
    )
    train = TrainConfig(
        **{"steps": 1, "batch_size": 1536, "seq_len": 2048, "micro_batch_size": 1},
        **{"dtype": "bfloat16", "activation_checkpointing": True, "kernel": "eager"},
        optimizer={"kind": "adamw", "learning_rate": 1e-3},
    )
    mesh = ParallelismConfig(data=32, tensor=8, pipeline=2)
    planned = PlannedStep(config, train, CUDA, mesh)
    seconds = simulated_step(planned, find_device("a100")).seconds
    once = sum(forward_flops(config.build(device="meta"), 2048).values())
    reached = 4 * once * train.tokens_per_step / (seconds * mesh.processes)
    assert reached == pytest.approx(138e12, rel=0.15)


def test_failures() -> None:
    """Llama 3's failure rate is for 16,384 devices; rare checkpoints reduce the goodput."""
    train = TrainConfig(
        **{"steps": 100, "batch_size": 1, "seq_len": 8, "checkpoint_every": 1},
        optimizer={"kind": "adamw", "learning_rate": 1e-3},
    )
    seconds = 54 * 86_400.0
    assert failures(train, seconds, 16_384)["expected"] == pytest.approx(419)
    rarely = train.replace(checkpoint_every=50)
    often, rare = (failures(one, seconds, 16_384)["goodput"] for one in (train, rarely))
    assert 0 < rare < often < 1
