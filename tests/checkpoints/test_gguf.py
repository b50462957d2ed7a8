"""Tests of written GGUF files, which are read with the gguf package of llama.cpp's developers.

`tests/campaigns/test_gguf.py` compares logits with llama.cpp.
"""

import json
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.checkpoints.gguf_cases import CASES, EACH, make
from workhorse.checkpoints import weights_of
from workhorse.checkpoints.gguf import GgufFile, GgufType, gguf_types, write_gguf
from workhorse.checkpoints.gguf.metadata import OWN_CONFIG, paired
from workhorse.checkpoints.gguf.quantized import quantize
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig

gguf = pytest.importorskip("gguf")


class File:
    """The keys and tensors of a GGUF file."""

    def __init__(self, path: Path) -> None:
        reader = gguf.GGUFReader(path)
        self.keys: dict[str, Any] = {
            name: field.contents()
            for name, field in reader.fields.items()
            if not name.startswith("GGUF.")
        }
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}

    def values(self, name: str) -> Tensor:
        """Values of a tensor, in float32."""
        tensor = self.tensors[name]
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        return torch.from_numpy(np.array(values))

    def kind(self, name: str) -> str:
        return self.tensors[name].tensor_type.name


def written(
    decoder: Decoder, model_type: str, folder: Path, dtype: GgufType = "f32", name: str = ""
) -> File:
    path = folder / "model.gguf"
    write_gguf(path, decoder, model_type=model_type, dtype=dtype, name=name)
    return File(path)


def test_every_type_has_a_case() -> None:
    assert set(CASES) == set(gguf_types())


@pytest.mark.parametrize(("model_type", "number"), EACH)
def test_every_weight_is_in_the_file_once(model_type: str, number: int, tmp_path: Path) -> None:
    """The only other tensors are a copy of a tied head and frequency divisors of RoPE."""
    decoder = make(model_type, number)
    file = written(decoder, model_type, tmp_path)
    weights = weights_of(decoder)
    sizes = {name: int(tensor.n_elements) for name, tensor in file.tensors.items()}
    extra = {name for name in sizes if name.startswith("rope_f")}
    if decoder.config.head.tied and "output.weight" in sizes:
        extra.add("output.weight")
    assert sum(sizes.values()) - sum(sizes[name] for name in extra) == sum(
        weight.numel() for weight in weights.values()
    )
    total = sum(file.values(name).double().sum() for name in sizes if name not in extra)
    norms = sum(
        weight.numel()
        for name, weight in weights.items()
        if name.endswith("norm.weight") and _is_offset(decoder, name)
    )
    ours = sum(weight.double().sum() for weight in weights.values()) + norms
    assert total == pytest.approx(ours.item(), abs=1e-4)


def _is_offset(decoder: Decoder, name: str) -> bool:
    return bool(getattr(decoder.get_submodule(name.removesuffix(".weight")), "offset", False))


def test_metadata_of_a_llama(tmp_path: Path) -> None:
    decoder = make("llama", 1)
    file = written(decoder, "llama", tmp_path, "f16", name="A small one")
    assert DecoderConfig.from_dict(json.loads(file.keys.pop(OWN_CONFIG))) == decoder.config
    assert file.keys == {
        "general.architecture": "llama",
        "general.name": "A small one",
        "general.file_type": 1,
        "general.quantization_version": 2,
        "llama.vocab_size": 512,
        "llama.context_length": 128,
        "llama.embedding_length": 64,
        "llama.block_count": 3,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.key_length": 32,
        "llama.attention.value_length": 32,
        "llama.attention.layer_norm_rms_epsilon": pytest.approx(1e-6),
        "llama.rope.dimension_count": 32,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "none",
    }


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_rows_of_queries_follow_the_rotation(model_type: str, tmp_path: Path) -> None:
    """llama.cpp's llama rotates neighbours, its qwen2 the halves of a head, as Workhorse does."""
    decoder = make(model_type)
    file = written(decoder, model_type, tmp_path)
    theirs = file.values("blk.1.attn_k.weight")
    ours = weights_of(decoder)["layers.1.attention.k_proj.weight"]
    if model_type == "llama":
        half = len(ours) // 2  # one head of keys
        for pair in range(half):
            assert torch.equal(theirs[2 * pair], ours[pair])
            assert torch.equal(theirs[2 * pair + 1], ours[pair + half])
    else:
        assert torch.equal(theirs, ours)


def test_only_the_part_that_turns_is_permuted() -> None:
    rows = torch.arange(2 * 6)  # two heads of width 6; the first 4 features are rotated
    neighbours = paired(rows, 6, 4, "half", "interleaved")
    assert neighbours.tolist() == [0, 2, 1, 3, 4, 5, 6, 8, 7, 9, 10, 11]
    assert torch.equal(paired(neighbours, 6, 4, "interleaved", "half"), rows)


def test_norms_around_one_are_written_whole(tmp_path: Path) -> None:
    decoder = make("gemma")
    file = written(decoder, "gemma", tmp_path)
    weights = weights_of(decoder)
    assert torch.equal(file.values("output_norm.weight"), weights["final_norm.weight"] + 1)
    assert torch.equal(
        file.values("blk.2.ffn_norm.weight"), weights["layers.2.feed_forward_norm.weight"] + 1
    )
    assert "output.weight" not in file.tensors  # the embedding is used as the head


def test_a_tied_head_is_copied_where_llama_cpp_wants_one(tmp_path: Path) -> None:
    decoder = make("olmo2", tie_word_embeddings=True)
    file = written(decoder, "olmo2", tmp_path)
    assert torch.equal(file.values("output.weight"), file.values("token_embd.weight"))


def test_projections_are_fused_in_order(tmp_path: Path) -> None:
    weights = weights_of(decoder := make("gpt2"))
    file = written(decoder, "gpt2", tmp_path)
    for kind in ("weight", "bias"):
        rows = [weights[f"layers.0.attention.{name}_proj.{kind}"] for name in "qkv"]
        assert torch.equal(file.values(f"blk.0.attn_qkv.{kind}"), torch.cat(rows))
    weights = weights_of(decoder := make("phi3"))
    file = written(decoder, "phi3", tmp_path)
    rows = [weights[f"layers.0.feed_forward.{name}_proj.weight"] for name in ("gate", "up")]
    assert torch.equal(file.values("blk.0.ffn_up.weight"), torch.cat(rows))
    assert "blk.0.ffn_gate.weight" not in file.tensors


def test_experts_are_stacked(tmp_path: Path) -> None:
    decoder = make("mixtral")
    file = written(decoder, "mixtral", tmp_path, "q8_0")
    weight = weights_of(decoder)["layers.0.feed_forward.experts.down_proj.weight"]
    assert file.values("blk.0.ffn_down_exps.weight").shape == weight.shape == (6, 64, 96)
    assert file.kind("blk.0.ffn_down_exps.weight") == "Q8_0"
    assert file.kind("blk.0.ffn_gate_inp.weight") == "F32"
    assert file.keys["llama.expert_count"] == 6
    assert file.keys["llama.expert_used_count"] == 2


def test_leading_dense_layers_and_gating(tmp_path: Path) -> None:
    keys = written(make("dots1"), "dots1", tmp_path).keys
    assert keys["dots1.leading_dense_block_count"] == 1
    assert keys["dots1.feed_forward_length"] == 96
    assert keys["dots1.expert_feed_forward_length"] == 64
    assert keys["dots1.expert_shared_count"] == 2
    assert keys["dots1.expert_gating_func"] == 2  # sigmoid


def test_scalings_of_the_rotation(tmp_path: Path) -> None:
    llama3 = written(make("llama", 2), "llama", tmp_path)
    factors = llama3.values("rope_freqs.weight")
    assert factors.shape == (16,)
    assert factors[0] == 1.0  # the fastest pair is not scaled
    assert factors[-1] == pytest.approx(8.0)  # the slowest pair is scaled by the full factor
    assert "llama.rope.scaling.type" not in llama3.keys

    yarn = written(make("llama", 5), "llama", tmp_path).keys
    assert yarn["llama.rope.scaling.type"] == "yarn"
    assert yarn["llama.rope.scaling.factor"] == 4.0
    assert yarn["llama.rope.scaling.original_context_length"] == 32
    own = 0.1 * math.log(4) + 1  # llama.cpp's own factor
    assert yarn["llama.rope.scaling.attn_factor"] * own == pytest.approx(1.3)

    linear = written(make("llama", 4), "llama", tmp_path).keys
    assert linear["llama.rope.scaling.type"] == "linear"
    assert linear["llama.rope.scaling.factor"] == 2.0

    longrope = written(make("phi3", 1), "phi3", tmp_path)
    assert longrope.values("rope_factors_long.weight")[1] == pytest.approx(2.3)
    assert longrope.values("rope_factors_short.weight")[1] == pytest.approx(1.1)


def test_windows_and_caps(tmp_path: Path) -> None:
    keys = written(make("gemma2"), "gemma2", tmp_path).keys
    assert keys["gemma2.attention.sliding_window"] == 8
    assert keys["gemma2.attention.sliding_window_pattern"] == [True, False, True]
    assert keys["gemma2.attn_logit_softcapping"] == 50.0
    assert keys["gemma2.final_logit_softcapping"] == 30.0
    keys = written(make("gemma3_text"), "gemma3_text", tmp_path).keys
    assert keys["gemma3.rope.freq_base"] == 1_000_000.0
    assert keys["gemma3.rope.freq_base_swa"] == 10_000.0


def test_a_window_that_llama_cpp_has_not_cuts_the_context(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    remarks = write_gguf(path, make("mistral", 1), model_type="mistral")
    assert File(path).keys["llama.context_length"] == 64
    assert len(remarks) == 1
    assert "64 tokens" in remarks[0]
    assert write_gguf(path, make("mistral", 0), model_type="mistral") == []


def test_multipliers_of_granite(tmp_path: Path) -> None:
    keys = written(make("granite"), "granite", tmp_path).keys
    assert keys["granite.embedding_scale"] == 3.0
    assert keys["granite.residual_scale"] == pytest.approx(0.4)
    assert keys["granite.attention.scale"] == pytest.approx(0.1)
    assert keys["granite.logit_scale"] == pytest.approx(2.0)


STEPS = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 254 + 2**-11}
"""Half a step of each type, relative to the value, or in Q8_0 to the block's largest value."""


@pytest.mark.parametrize("dtype", STEPS)
def test_types_of_tensors(dtype: GgufType, tmp_path: Path) -> None:
    decoder = make("stablelm", 1)
    file = written(decoder, "stablelm", tmp_path, dtype)
    for name, tensor in file.tensors.items():
        is_matrix = len(tensor.shape) > 1 and "norm" not in name
        assert file.kind(name) == (dtype.upper() if is_matrix else "F32"), name
    ours = weights_of(decoder)["layers.0.feed_forward.up_proj.weight"]
    theirs = file.values("blk.0.ffn_up.weight")
    blocks = ours.abs().unflatten(-1, (-1, 32)).amax(-1).repeat_interleave(32, dim=-1)
    scale = blocks if dtype == "q8_0" else ours.abs()
    assert ((ours - theirs).abs() <= STEPS[dtype] * scale).all()


@pytest.mark.parametrize(("weights", "half"), [(torch.bfloat16, "BF16"), (torch.float16, "F16")])
def test_rows_that_are_not_whole_blocks_have_16_bits(
    weights: torch.dtype, half: str, tmp_path: Path
) -> None:
    decoder, path = make("llama", intermediate_size=72).to(weights), tmp_path / "model.gguf"
    remarks = write_gguf(path, decoder, model_type="llama", dtype="q8_0")
    file = GgufFile(path)
    assert remarks == [
        "rows of 72 values are not a whole number of Q8_0 blocks; written as "
        f"{half}: blk.0.ffn_down.weight and 2 more"
    ]
    kinds = {name: stored.kind for name, stored in file._header.tensors.items()}
    assert kinds["blk.0.ffn_down.weight"] == half
    assert kinds["blk.0.ffn_up.weight"] == "Q8_0"
    assert kinds["blk.0.ffn_norm.weight"] == "F32"
    name = "layers.0.feed_forward.down_proj.weight"
    assert torch.equal(weights_of(file.load_decoder())[name], weights_of(decoder)[name].float())


def test_four_bits(tmp_path: Path) -> None:
    """Q4_K has a smaller error than Q4_0; the embedding and the head have 8 bits."""
    decoder = make("llama", hidden_size=256, intermediate_size=288, num_hidden_layers=1)
    ours, errors = weights_of(decoder), dict[str, float]()
    for dtype, down in (("q4_0", "Q4_0"), ("q4_k", "Q5_0")):
        path = tmp_path / f"{dtype}.gguf"
        remarks = write_gguf(path, decoder, model_type="llama", dtype=dtype)
        assert [remark.split(";")[0] for remark in remarks] == [
            "rows of 288 values are not a whole number of Q4_K blocks"
        ] * (dtype == "q4_k")
        file = GgufFile(path)
        kinds = {name: stored.kind for name, stored in file._header.tensors.items()}
        assert kinds["token_embd.weight"] == kinds["output.weight"] == "Q8_0"
        assert kinds["blk.0.attn_q.weight"] == kinds["blk.0.ffn_up.weight"] == dtype.upper()
        assert kinds["blk.0.ffn_down.weight"] == down
        name = "layers.0.attention.q_proj.weight"
        error = weights_of(file.load_decoder())[name] - ours[name]
        errors[dtype] = (error.square().mean() / ours[name].square().mean()).sqrt().item()
    assert errors["q4_k"] < 0.075 < errors["q4_0"] < 0.095


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0, 1e-30])
def test_q4_k_of_equal_values(value: float) -> None:
    kind = gguf.GGMLQuantizationType.Q4_K
    values = np.full((2, 256), value, np.float32)
    again = gguf.quants.dequantize(quantize(values, kind), kind)
    np.testing.assert_allclose(again, values, rtol=1e-3, atol=1e-6)


def test_tensors_are_aligned(tmp_path: Path) -> None:
    file = written(make("gpt2"), "gpt2", tmp_path, "q8_0")
    assert all(tensor.data_offset % 32 == 0 for tensor in file.tensors.values())


@pytest.mark.skipif(os.name == "nt", reason="Windows has no limit on a file's size")
@pytest.mark.parametrize("dtype", ["f32", "q8_0"])
def test_a_file_that_ends_before_its_last_page_is_refused(dtype: GgufType, tmp_path: Path) -> None:
    """NumPy's `tofile` reports no error if the last page is written when its buffer is closed."""
    import resource

    decoder, path = make("llama"), tmp_path / "model.gguf"
    write_gguf(path, decoder, model_type="llama", dtype=dtype)
    size = path.stat().st_size
    path.unlink()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for missing in (1, 33, 100):
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (size - missing, before[1]))
            with pytest.raises(WorkhorseError, match=r"model\.gguf: File too large"):
                write_gguf(path, decoder, model_type="llama", dtype=dtype)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert not list(tmp_path.iterdir())


def test_a_bfloat16_decoder_is_written_exactly(tmp_path: Path) -> None:
    decoder = make("llama").to(torch.bfloat16)
    file = written(decoder, "llama", tmp_path, "bf16")
    ours = weights_of(decoder)["layers.0.attention.v_proj.weight"]
    assert torch.equal(file.values("blk.0.attn_v.weight"), ours.float())
