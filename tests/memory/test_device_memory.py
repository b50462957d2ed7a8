"""The memory of a step on one device of a mesh."""

from typing import Any

import pytest
import torch

from workhorse.checkpoints.adapted import AdapterConfig
from workhorse.config.base import ConfigError
from workhorse.memory import device_memory as accounts
from workhorse.memory.device_memory import DeviceMemory, device_memory
from workhorse.memory.step_memory import PlannedStep
from workhorse.nn import AttentionConfig, DecoderConfig
from workhorse.parallel.config import ParallelismConfig
from workhorse.parallel.division.parts import check_layers
from workhorse.parallel.division.teams import part_of_model
from workhorse.plan.limits import FINEST, MOST_TOKENS, largest, remedies
from workhorse.train.recipe.training import TrainConfig

CUDA = torch.device("cuda")  # no CUDA device is needed


def standard(**attention: object) -> DecoderConfig:
    """The block of 2205.05198 §4.1, with its biases."""
    norm = {"kind": "layer_norm"}
    block = {
        "kind": "pre_norm",
        "norm": norm,
        "attention": {"n_heads": 8, "qkv_bias": True, "out_bias": True, **attention},
        "feed_forward": {"kind": "mlp", "d_ff": 4 * 64, "bias": True},
        "dropout": 0.1,
    }
    return DecoderConfig.from_dict(
        {
            "vocab_size": 128,
            "d_model": 64,
            "n_layers": 4,
            "max_seq_len": 32,
            "blocks": {"main": block},
            "final_norm": norm,
        }
    )


def mixture() -> DecoderConfig:
    config = standard()
    experts = {"kind": "moe", "d_ff": 32, "n_experts": 8, "top_k": 2}
    fields = config.to_dict()
    fields["blocks"]["main"]["feed_forward"] = experts
    return DecoderConfig.from_dict(fields)


def training(**fields: object) -> TrainConfig:
    adamw = {"kind": "adamw", "learning_rate": 1e-3}
    given = {"steps": 1, "batch_size": 8, "seq_len": 32, "dtype": "bfloat16", "optimizer": adamw}
    return TrainConfig(**{**given, **fields})


def memory(config: DecoderConfig, mesh: dict[str, object], **fields: object) -> DeviceMemory:
    return device_memory(
        PlannedStep(config, training(**fields), CUDA, ParallelismConfig.from_dict(mesh))
    )


def held(found: DeviceMemory, component: str | None = None) -> int:
    return sum(
        size
        for sizes in found.held.values()
        for place, size in sizes.items()
        if component in (None, place.component)
    )


def per_token_and_layer(found: DeviceMemory, rows: int, layer: str = "layers.1") -> float:
    return found.activations[layer] / (rows * 32 * 64)


def test_a_standard_layer_keeps_what_korthikanti_et_al_count() -> None:
    # 2205.05198 eq. 1 with the selective recomputation of eq. 6 gives 34 · s · b · h. Our fused
    # kernel replaces the recomputation. We also count what the paper omits: a float32 log-sum-exp
    # for each query and head, and mean and deviation of two norms for each token.
    found = memory(standard(), {}, micro_batch_size=2)
    ours = per_token_and_layer(found, 2)
    assert ours - 4 * 8 / 64 - 2 * 2 * 4 / 64 == pytest.approx(34, rel=1e-3)


def test_an_unfused_kernel_keeps_scores() -> None:
    # 2205.05198 counts 5 · a · s / h: softmax and dropout in 16 bits, and the dropout mask.
    fused = memory(standard(), {}, micro_batch_size=2)
    plain = memory(standard(dropout=0.1), {}, micro_batch_size=2, kernel="eager")
    of_scores = (per_token_and_layer(plain, 2) - per_token_and_layer(fused, 2)) / (8 * 32 / 64)
    # Bytes: 4 for the float32 softmax, 1 for the dropout mask, 2 for the dropout output.
    assert of_scores == pytest.approx(7, abs=0.01)


def test_tensor_and_sequence_parallel() -> None:
    config = standard()
    whole = memory(config, {}, micro_batch_size=2)
    along = memory(config, {"tensor": 4}, micro_batch_size=2)
    # 2205.05198 eq. 4: 34 / t. We keep the gathered inputs of both sub-layers, in 16 bits. The
    # paper gathers them again in the backward pass.
    ours = per_token_and_layer(along, 2) - (4 * 8 / 64 + 2 * 2 * 4 / 64) / 4
    assert ours == pytest.approx(34 / 4 + 2 * 2 * (1 - 1 / 4), rel=1e-3)
    matrices = ("attention", "feed_forward", "embedding")
    for component in matrices:
        assert held(along, component) == pytest.approx(held(whole, component) / 4, rel=0.05)


def test_shards() -> None:
    whole, part = memory(standard(), {}, batch_size=1), memory(standard(), {"shard": 8})
    assert held(part) == pytest.approx(held(whole) / 8, rel=0.01)
    assert part.activations == whole.activations  # both have one row
    assert part.gathered > 0
    assert part.update < whole.update / 4


@pytest.mark.parametrize("tied", [True, False])
def test_what_shards_hold_whole(tied: bool) -> None:
    """`reshard: pass` gathers weights outside layers and of two layers; `reshard: step`, all."""
    config = standard().replace(vocab_size=16_384, head={"tied": tied})
    short, long = (
        memory(config, {"shard": 8, "reshard": reshard}, batch_size=8)
        for reshard in ("pass", "step")
    )
    table, layer = 2 * 16_384 * 64, 2 * 12 * 64 * 64
    # At the end: the head's gradient and the float32 copy that is sent. With an untied table, also
    # the table's gradient and the head's, which PyTorch still references.
    at_end = (3 if tied else 5) * table
    assert short.gathered == pytest.approx(at_end, rel=0.03)
    weights = (1 if tied else 2) * table + 4 * layer
    assert long.gathered == pytest.approx(at_end + weights, rel=0.03)
    assert held(long) == held(short)


def test_pipeline() -> None:
    whole = memory(standard(), {}, micro_batch_size=1)
    first = memory(standard(), {"pipeline": 4}, micro_batch_size=1)
    assert first.in_flight == 4  # 2205.05198 §4.2.3: the number of stages
    output = 32 * 64 * 2  # without a pipeline, the next layer keeps it
    assert first.activations["layers.0"] == whole.activations["layers.0"] - output
    assert held(first, "attention") == held(whole, "attention") / 4
    assert (first.stage, held(first, "head")) == (0, 0)
    assert held(first, "embedding") > 0


def test_a_short_pipeline_passes_no_micro_batch_beside_gradients_and_all_others() -> None:
    """With 4 micro-batches and 4 stages, all forward passes end before the first gradients."""
    few, many = (
        memory(standard(), {"pipeline": 4}, micro_batch_size=4, batch_size=rows)
        for rows in (16, 32)
    )
    assert few.in_flight == many.in_flight == 4
    most = [max(one.kinds["activations"] for one in found.moments) for found in (few, many)]
    assert most[0] == pytest.approx(most[1], rel=1e-4)
    assert many.peak.kinds["gradients"] > 0
    each = sum(few.activations.values())
    assert 0.75 * each < many.total - few.total < 1.01 * each


def test_experts() -> None:
    whole, part = memory(mixture(), {"data": 4}), memory(mixture(), {"data": 4, "expert": 4})
    assert held(part, "experts") == held(whole, "experts") / 4
    assert held(part, "attention") == held(whole, "attention")


def test_context() -> None:
    """The last of two chunks has half the activations, and the first chunk's keys and values."""
    whole, part = memory(standard(), {}), memory(standard(), {"context": 2})
    more = part.activations["layers.1"] - whole.activations["layers.1"] / 2
    keys_and_values = 8 * 16 * 2 * 64 * 2  # bytes of 8 rows of 16 tokens in bfloat16
    assert keys_and_values <= more < 1.2 * keys_and_values


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor": 3}, "tensor=3 does not divide n_heads=8"),
        ({"pipeline": 5}, "pipeline=5 is more than n_layers=4"),
        ({"shard": 3}, "shard=3 does not divide train.batch_size=8"),
        ({"context": 5}, "context=5 does not divide train.seq_len=32"),
    ],
)
def test_an_impossible_mesh(mesh: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        memory(standard(), mesh)


def test_heads_of_keys_and_values_are_divided_or_copied() -> None:
    def keys_of(n_kv_heads: int) -> int:
        config = standard(n_heads=12, head_dim=8, n_kv_heads=n_kv_heads)
        check_layers(config, 4)
        attention = part_of_model(config, 4).blocks["main"].attention
        assert isinstance(attention, AttentionConfig)
        return attention.n_kv_heads or attention.n_heads

    assert [keys_of(count) for count in (12, 4, 2, 1)] == [3, 1, 1, 1]
    with pytest.raises(ConfigError, match="tensor=4 does not divide n_kv_heads=6"):
        keys_of(6)


def test_more_expert_ways_than_experts() -> None:
    with pytest.raises(ConfigError, match="expert=3 does not divide n_experts=8"):
        memory(mixture(), {"data": 3, "expert": 3})


@pytest.mark.parametrize("room", [0, 99, 100, 399, 5_000, 123_456])
def test_most_rows(room: int) -> None:
    def needed(rows: int) -> int:
        return 90 + 10 * rows + rows // 7

    found = largest(needed, room, 1, 100_000, exact=True)
    assert needed(found) <= room or found == 0
    assert needed(found + 1) > room
    assert largest(needed, room, 1, 3, exact=True) == min(found, 3)


def test_longest() -> None:
    def needed(length: int) -> int:
        return 100 + length + length**2 // 1000

    for room, start in [(150, 256), (1_000, 256), (50_000, 256), (2_130, 1_030), (777, 333)]:
        found = largest(needed, room, start, MOST_TOKENS)
        assert needed(found) <= room < needed(found + max(1, found // FINEST))
    assert largest(needed, 10, 256, MOST_TOKENS) == 0


@pytest.mark.parametrize(
    ("ways", "fields", "adapter"),
    [
        ({}, {"batch_size": 2, "activation_checkpointing": True}, None),
        ({}, {"batch_size": 8, "micro_batch_size": 2, "kernel": "eager"}, None),
        ({"shard": 4}, {}, None),
        ({"shard": 2, "tensor": 2, "reshard": "step"}, {}, None),
        ({"pipeline": 2}, {}, None),
        ({}, {}, {"rank": 4}),
        ({}, {}, {"rank": 4, "quantize": "int4"}),
        ({}, {}, {"rank": 4, "ranks": {"layers.9.attention.q_proj": 16}}),
    ],
)
def test_the_peak_of_a_deep_model_is_that_of_all_its_layers(
    monkeypatch: pytest.MonkeyPatch,
    ways: dict[str, Any],
    fields: dict[str, Any],
    adapter: dict[str, Any] | None,
) -> None:
    config, mesh = standard().replace(n_layers=14), ParallelismConfig(**ways)
    train, given = training(**fields), adapter and AdapterConfig(**adapter)
    step = PlannedStep(config, train, CUDA, mesh, adapter=given or None)
    exact = device_memory(step, updates=False).total
    recorded: list[int] = []

    def record(step: PlannedStep, **options: Any) -> DeviceMemory:
        recorded.append(step.config.n_layers)
        return device_memory(step, **options)

    monkeypatch.setattr(accounts, "device_memory", record)
    assert accounts.peak_of_passes(step) == exact
    assert recorded == ([14] if "pipeline" in ways or "ranks" in (adapter or {}) else [4, 5])


def test_the_peak_of_a_deep_model_with_two_kinds_of_layers() -> None:
    fields = standard().replace(n_layers=21).to_dict()
    (block,) = fields["blocks"].values()
    wide = {**block, "feed_forward": {"kind": "mlp", "d_ff": 512}}
    blocks = {"pattern": ["main", "wide"], "blocks": {"main": block, "wide": wide}}
    config = DecoderConfig.from_dict({**fields, **blocks})
    step = PlannedStep(config, training(batch_size=2), CUDA)
    assert accounts.peak_of_passes(step) == device_memory(step, updates=False).total


def test_remedies_save_what_they_say() -> None:
    step = PlannedStep(standard(), training(batch_size=8, dtype="float32"), CUDA)
    before = device_memory(step).total
    found = {one.setting: one for one in remedies(step, before // 2)}
    assert next(iter(found)).startswith("train.micro_batch_size=")  # does not change results
    of_rows = {
        rows: device_memory(step.with_train(micro_batch_size=rows)).total for rows in (1, 2, 4)
    }
    for room in (of_rows[2], of_rows[1], of_rows[1] - 1):
        largest = max((rows for rows, needed in of_rows.items() if needed <= room), default=1)
        first, *_ = remedies(step, room)
        assert first.setting == f"train.micro_batch_size={largest}"
        assert first.saves == before - of_rows[largest]
        assert first.fits == (of_rows[largest] <= room)


def test_few_records_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of records is bounded; an evicted record is recorded again."""
    monkeypatch.setattr(accounts, "_RECORDS", {})
    monkeypatch.setattr(accounts, "MOST_RECORDS", 1)
    first = memory(standard(), {}, batch_size=1)
    memory(standard(), {}, batch_size=2)
    assert len(accounts._RECORDS) == 1
    assert memory(standard(), {}, batch_size=1) == first
