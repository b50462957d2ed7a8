"""A step recorded without data allocates the same memory as a real step."""

import pytest
import torch

from tests.nn.grid import COVERING
from tests.plan.families import small
from tests.plan.measure import CPU, gradient_bytes, held_by, kept_by_autograd, most_allocated
from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.memory.step_memory import PlannedStep, StepMemory, step_memory
from workhorse.nn import DecoderConfig, products
from workhorse.nn.experts.mixture import MoEConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.train.recipe.training import TrainConfig

ROWS, SEQ = 2, 12
CONFIGS = COVERING[:6]


def training(**fields: object) -> TrainConfig:
    return TrainConfig(**{"steps": 1, "batch_size": ROWS, "seq_len": SEQ, **fields})


@pytest.mark.parametrize("number", range(len(CONFIGS)))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_activations_are_the_bytes_that_autograd_keeps(number: int, dtype: str) -> None:
    config, train = CONFIGS[number], training(dtype=dtype)
    found = step_memory(PlannedStep(config, train, CPU)).activations
    kept = kept_by_autograd(config, train)
    kept.pop("head", None)  # the head computes its gradient in the forward pass
    assert sum(found.values()) == sum(kept.values())


def test_checkpointing_keeps_the_input_of_each_layer() -> None:
    config, train = CONFIGS[0], training(activation_checkpointing=True)
    found = step_memory(PlannedStep(config, train, CPU)).activations
    kept = kept_by_autograd(config, train)
    kept.pop("head", None)
    assert sum(found.values()) == sum(kept.values())
    assert sum(found.values()) >= config.n_layers * ROWS * SEQ * config.d_model * 4
    assert (
        sum(found.values())
        < sum(step_memory(PlannedStep(config, training(), CPU)).activations.values()) / 4
    )


def test_experts_of_widths_that_no_kernel_takes() -> None:
    # The number of rows of an expert is read from a tensor, and recorded tensors have no data.
    config = next(one for one in COVERING if one.d_model % 2 and _has_experts(one))
    kept = kept_by_autograd(config, training())
    kept.pop("head", None)
    assert sum(step_memory(PlannedStep(config, training(), CPU)).activations.values()) == sum(
        kept.values()
    )


def _has_experts(config: DecoderConfig) -> bool:
    return any(isinstance(block.feed_forward, MoEConfig) for block in config.blocks.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_documents_are_kept_apart_by_a_mask(dtype: str) -> None:
    config, train = small("llama", num_hidden_layers=2), training(dtype=dtype)
    found = step_memory(PlannedStep(config, train, CPU, packed=True)).activations
    kept = kept_by_autograd(config, train, packed=True)
    kept.pop("head", None)
    assert sum(found.values()) == sum(kept.values())
    assert sum(found.values()) > sum(
        step_memory(PlannedStep(config, train, CPU)).activations.values()
    )


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "gemma2", "deepseek_v3"])
def test_the_last_part_of_a_sequence_keeps_the_keys_of_all(family: str, packed: bool) -> None:
    config, train = small(family, num_hidden_layers=2), training()
    thirds = ParallelismConfig(context=3)
    found = step_memory(PlannedStep(config, train, CPU, packed=packed, parallel=thirds)).activations
    kept = kept_by_autograd(config, train, thirds, packed=packed)
    kept.pop("head", None)
    assert sum(found.values()) == sum(kept.values())


def held(memory: StepMemory) -> dict[str, int]:
    return {kind: total for kind, sizes in memory.held.items() if (total := sum(sizes.values()))}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_what_is_held_is_what_a_step_has(dtype: str, kind: str) -> None:
    config = CONFIGS[1]
    train = training(dtype=dtype, optimizer={"kind": kind, "learning_rate": 0.01})
    memory = step_memory(PlannedStep(config, train, CPU))
    assert held(memory) == held_by(config, train)
    assert {kind: memory.timeline[kind][0] for kind in held(memory)} == held(memory)


def test_the_initial_model_is_held() -> None:
    """`kl_weight` of a policy keeps a second model in memory, without gradients."""
    found = [
        step_memory(
            PlannedStep(CONFIGS[0], training(batch_size=8, rollouts={}, objective=objective), CPU)
        )
        for objective in ({"kind": "policy"}, {"kind": "policy", "kl_weight": 0.1})
    ]
    plain, with_initial = (held(memory) for memory in found)
    assert with_initial == plain | {"weights": 2 * plain["weights"]}
    assert max(found[1].totals) == max(found[0].totals) + plain["weights"]


@pytest.mark.parametrize("number", range(5))  # oneDNN copies the odd widths of the sixth
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_is_the_allocators(number: int, dtype: str) -> None:
    # Enough rows that the workspaces of operators are small compared with their outputs.
    config, train = CONFIGS[number], training(dtype=dtype, batch_size=8, seq_len=24)
    memory = step_memory(PlannedStep(config, train, CPU))
    constants = memory.timeline["temporary"][0]  # tables of activation functions, built once
    predicted = max(memory.totals) - constants
    assert predicted == pytest.approx(most_allocated(config, train), rel=0.08)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_where_gradients_are_added_exactly(dtype: str) -> None:
    config, train = CONFIGS[0], training(dtype=dtype, batch_size=8, seq_len=24)
    parallel = ParallelismConfig(reduction={"kind": "exact", "logical_shards": 7})
    memory = step_memory(PlannedStep(config, train, CPU, parallel=parallel))
    predicted = max(memory.totals) - memory.timeline["temporary"][0]
    assert predicted == pytest.approx(most_allocated(config, train, parallel), rel=0.08)


def test_gradients_and_their_sums_over_micro_batches() -> None:
    config, train = CONFIGS[1], training(dtype="bfloat16")
    whole = step_memory(PlannedStep(config, train, CPU), updates=False).timeline
    assert (whole["gradients"][-1], whole["sums"][-1]) == (gradient_bytes(config, train), 0)
    train = training(dtype="bfloat16", micro_batch_size=1)
    parts = step_memory(PlannedStep(config, train, CPU), updates=False)
    parameters = sum(p.numel() for p in config.build().parameters() if p.requires_grad)
    assert max(parts.timeline["sums"]) == 4 * parameters
    one_row = step_memory(PlannedStep(config, training(batch_size=1, dtype="bfloat16"), CPU))
    assert parts.activations == one_row.activations


def test_the_timeline_begins_and_ends_with_what_is_held() -> None:
    memory = step_memory(PlannedStep(CONFIGS[2], training(), CPU))
    ends = {kind: values[-1] for kind, values in memory.timeline.items() if values[-1]}
    kept = {kind: ends[kind] for kind in ends if kind not in ("temporary", "loss")}
    assert kept == held(memory)
    phases = [span.phase for span in memory.spans]
    assert phases == sorted(phases, key=["forward", "backward", "update"].index)
    layers = [span.part for span in memory.spans if span.part.startswith("layers.")]
    assert layers == [*(names := [f"layers.{n}" for n in range(CONFIGS[2].n_layers)]), *names[::-1]]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_like_parts_of_the_loss_are_recorded_once(
    device: str, dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small("llama", num_hidden_layers=1, vocab_size=20_000)
    train = training(dtype=dtype, batch_size=64, seq_len=512)
    short = step_memory(PlannedStep(config, train, torch.device(device)))
    monkeypatch.setattr(products, "recording", lambda: False)
    whole = step_memory(PlannedStep(config, train, torch.device(device)))
    assert len(short.totals) < len(whole.totals)
    assert (peak(short), short.held) == (peak(whole), whole.held)
    assert short.activations == whole.activations
    for phase in ("forward", "backward", "update"):
        assert most(short, phase) == most(whole, phase)


def peak(memory: StepMemory) -> dict[str, int]:
    """Bytes of each kind at the moment with the largest total."""
    moment = memory.totals.index(max(memory.totals))
    return {kind: values[moment] for kind, values in memory.timeline.items()}


def most(memory: StepMemory, phase: str) -> int:
    """Maximum bytes at any moment of a phase."""
    begin = memory.spans[0].begin
    moments = enumerate(memory.totals[begin:], begin)
    return max(total for at, total in moments if phase_at(memory, at) == phase)


def phase_at(memory: StepMemory, moment: int) -> str:
    return next(span.phase for span in reversed(memory.spans) if span.begin <= moment)


def test_another_device_needs_no_such_device() -> None:
    memory = step_memory(PlannedStep(CONFIGS[0], training(dtype="bfloat16"), torch.device("cuda")))
    assert held(memory)["weights"] == held(memory)["low_bits"]


def test_an_unrecorded_update_leaves_the_rest_as_it_is() -> None:
    whole = step_memory(PlannedStep(CONFIGS[0], training(), CPU))
    passes = step_memory(PlannedStep(CONFIGS[0], training(), CPU), updates=False)
    assert passes.activations == whole.activations
    assert passes.totals[:-1] == whole.totals[: len(passes.totals) - 1]


ADAPTERS: dict[str, dict[str, object]] = {
    "lora": {"rank": 4},
    "dora and a norm": {"rank": 4, "dora": True, "also_train": ["final_norm"]},
    "some layers": {"rank": 4, "targets": ["layers.1.attention.q_proj"]},
    "int8": {"rank": 4, "quantize": "int8"},
    "int4": {"rank": 4, "quantize": "int4"},
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ADAPTERS)
def test_a_step_of_an_adapter(name: str, dtype: str) -> None:
    """What is held is exact; activations are what autograd keeps; the peak is the allocator's."""
    adapter = AdapterConfig.from_dict(ADAPTERS[name])
    config = small("llama", num_hidden_layers=2, hidden_size=64, intermediate_size=96)
    train = training(dtype=dtype, batch_size=8, seq_len=32, optimizer={"kind": "adamw"})
    memory = step_memory(PlannedStep(config, train, CPU, adapter=adapter))
    assert held(memory) == held_by(config, train, adapter)
    kept = kept_by_autograd(config, train, adapter=adapter)
    kept.pop("head", None)
    assert sum(memory.activations.values()) == sum(kept.values())
    predicted = max(memory.totals) - memory.timeline["temporary"][0]
    assert predicted == pytest.approx(most_allocated(config, train, adapter=adapter), rel=0.08)
    full = step_memory(PlannedStep(config, train, CPU))
    assert sum(held(memory).values()) < 0.5 * sum(held(full).values())
