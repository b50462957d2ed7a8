"""MXFP4 and FP8 weights: their values, and errors for weights that do not match their scales."""

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from workhorse.checkpoints.huggingface.quantized import dequantized, from_fp8, from_mxfp4
from workhorse.checkpoints.huggingface.tensor_folder import TensorFolder
from workhorse.errors import WorkhorseError

MXFP4 = {"quant_method": "mxfp4"}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


@dataclass
class Memory:
    """A source of tensors in memory."""

    tensors: dict[str, Tensor]

    @property
    def shapes(self):
        return {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}

    @property
    def dtypes(self):
        return {name: tensor.dtype for name, tensor in self.tensors.items()}

    def read(self, name):
        return self.tensors[name]


def e2m1(bits):
    """OCP Microscaling v1.0, §5.3.3: one sign, two exponent (bias 1), one mantissa bit."""
    sign, exponent, mantissa = bits >> 3, bits >> 1 & 3, bits & 1
    magnitude = mantissa / 2 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1)
    return -magnitude if sign else magnitude


def test_every_byte_and_every_scale_of_mxfp4_is_the_formulas():
    blocks = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 255, 1, 1)
    scales = torch.arange(255, dtype=torch.uint8).reshape(1, 255, 1).repeat(1, 1, 16)
    found = from_mxfp4(blocks, scales, torch.float64)
    values = [e2m1(nibble) for byte in range(256) for nibble in (byte & 15, byte >> 4)]
    expected = torch.tensor(values, dtype=torch.float64)[:, None] * torch.tensor(
        [2.0 ** (scale - 127) for scale in range(255)], dtype=torch.float64
    )
    fits = expected.abs() < 2.0**128  # 6 times 2^127 is beyond float32: infinite
    assert found.shape == (1, 512, 255)
    assert torch.equal(found[0][fits], expected[fits])
    assert found[0][~fits].isinf().all()
    assert torch.equal(found.signbit()[0], expected.signbit())  # also for minus zero


def test_a_scale_of_255_is_not_a_number():
    blocks = torch.zeros(1, 2, 1, 16, dtype=torch.uint8)
    scales = torch.tensor([[[255], [127]]], dtype=torch.uint8)
    found = from_mxfp4(blocks, scales, torch.float32)
    assert found[0, :, 0].isnan().all()
    assert (found[0, :, 1] == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mxfp4_is_what_transformers_makes_of_it(dtype):
    blocks = torch.randint(0, 256, (3, 10, 4, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (3, 10, 4), dtype=torch.uint8)
    expected = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
    assert torch.equal(from_mxfp4(blocks, scales, dtype), expected)


@pytest.mark.parametrize("shape", [(256, 256), (300, 130), (5, 7), (2, 300, 200)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_each_block_and_smaller_ones_at_the_edge(shape, dtype):
    weight = torch.randn(shape).to(torch.float8_e4m3fn)
    *outer, rows, columns = shape
    scale = torch.rand(*outer, -(-rows // 128), -(-columns // 128))
    row, column = torch.arange(rows) // 128, torch.arange(columns) // 128
    expected = weight.float() * scale[..., row, :][..., column]
    found = from_fp8(weight, scale, (128, 128), dtype)
    assert torch.equal(found, expected.to(dtype))


def test_fp8_is_what_transformers_makes_of_it():
    weight = torch.randn(300, 200).to(torch.float8_e4m3fn)
    blocks, one = torch.rand(3, 2), torch.tensor(0.3)
    for scale, block in ((blocks, (128, 128)), (one, None)):
        theirs = _dequantize_fp8_weight(weight, scale, block, torch.float32)
        assert torch.equal(from_fp8(weight, scale, block, torch.float32), theirs)


def test_an_mxfp4_checkpoint_under_its_plain_names(tmp_path):
    stored = {
        "norm.weight": torch.ones(4, dtype=torch.bfloat16),
        "experts.up_blocks": torch.randint(0, 256, (2, 6, 1, 16), dtype=torch.uint8),
        "experts.up_scales": torch.full((2, 6, 1), 127, dtype=torch.uint8),
        "experts.up_bias": torch.ones(2, 6),
    }
    save_file(stored, tmp_path / "model.safetensors")
    plain = dequantized(TensorFolder(tmp_path), MXFP4, torch.float16)
    assert plain.shapes == {
        "norm.weight": (4,),
        "experts.up_bias": (2, 6),
        "experts.up": (2, 32, 6),
    }
    for name, shape in plain.shapes.items():
        assert tuple(plain.read(name).shape) == shape
    assert plain.read("experts.up").dtype == torch.float16
    assert plain.read("norm.weight").dtype == torch.bfloat16


def test_an_fp8_checkpoint_under_its_plain_names(tmp_path):
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    stored = {
        "a.weight": weight,
        "a.weight_scale_inv": torch.tensor([[2.0]]),
        "experts.up_proj": weight[None].clone(),
        "experts.up_proj_scale_inv": torch.tensor([[[4.0]]], dtype=torch.bfloat16),
        "norm.weight": torch.ones(4),
    }
    save_file(stored, tmp_path / "model.safetensors")
    plain = dequantized(TensorFolder(tmp_path), FP8, torch.float32)
    assert plain.shapes.keys() == {"a.weight", "experts.up_proj", "norm.weight"}
    assert torch.equal(plain.read("a.weight"), weight.float() * 2)
    assert torch.equal(plain.read("experts.up_proj"), weight.float()[None] * 4)


def test_one_scale_for_a_whole_matrix_and_scales_of_activations():
    weight = torch.randn(4, 4).to(torch.float8_e4m3fn)
    source = Memory(
        {
            "a.weight": weight,
            "a.weight_scale_inv": torch.tensor(2.0),
            "a.activation_scale": torch.tensor(3.0),
        }
    )
    plain = dequantized(source, {"quant_method": "fp8", "weight_block_size": None}, torch.float32)
    assert plain.shapes == {"a.weight": (4, 4)}
    assert torch.equal(plain.read("a.weight"), weight.float() * 2)


def test_what_is_not_quantised_stays():
    source = Memory({"a": torch.ones(2)})
    assert dequantized(source, None, torch.float32) is source


BLOCKS = torch.zeros(2, 6, 3, 16, dtype=torch.uint8)
SCALES = torch.zeros(2, 6, 3, dtype=torch.uint8)
WEIGHT = torch.zeros(300, 4).to(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("config", "tensors", "message"),
    [
        ({"quant_method": "gptq"}, {}, r"method 'gptq' is not supported \(only mxfp4 and fp8\)"),
        ({"quant_method": ["x"]}, {}, r"method \['x'\] is not supported \(only mxfp4"),
        ({}, {}, r"method None is not supported \(only mxfp4"),
        (
            {"quant_method": "bitnet"},
            {},
            "'bitnet' is not supported, because its linear layers also round their inputs",
        ),
        ("fp8", {}, "quantization_config is 'fp8', not a mapping"),
        (MXFP4, {"x_blocks": BLOCKS}, "'x_blocks' has no scales: x_scales is missing"),
        (MXFP4, {"x_scales": SCALES}, "'x_scales' has no blocks: x_blocks is missing"),
        (MXFP4, {"x_blocks": BLOCKS, "x_scales": SCALES[:1]}, r"mxfp4 needs uint8 of \(experts"),
        (MXFP4, {"x_blocks": BLOCKS[..., :8], "x_scales": SCALES}, r"mxfp4 needs uint8 of \(exp"),
        (MXFP4, {"x_blocks": BLOCKS.int(), "x_scales": SCALES}, r"mxfp4 needs uint8 of \(experts"),
        (
            MXFP4,
            {"x_blocks": BLOCKS, "x_scales": SCALES, "x": SCALES},
            "'x' is stored twice: plain and as x_blocks",
        ),
        (FP8, {"x": WEIGHT}, "'x' has no scale: x_scale_inv is missing"),
        (FP8, {"x_scale_inv": SCALES}, "'x_scale_inv' is a scale without a float8 tensor"),
        (
            FP8,
            {"x": WEIGHT.float(), "x_scale_inv": torch.ones(3, 1)},
            "'x_scale_inv' is a scale without a float8 tensor",
        ),
        (
            FP8,
            {"x": WEIGHT, "x_scale_inv": torch.ones(2, 1)},
            r"shape \(2, 1\), which does not fit x",
        ),
        (
            FP8,
            {"x": WEIGHT, "x_scale_inv": torch.ones(3, 1).int()},
            "has dtype torch.int32, not a float dtype",
        ),
        (FP8, {"x": WEIGHT[:, 0], "x_scale_inv": torch.ones(3)}, "which does not fit x"),
        ({**FP8, "weight_block_size": [0, 128]}, {}, r"weight_block_size is \[0, 128\], not"),
        ({**FP8, "weight_block_size": 128}, {}, "weight_block_size is 128, not"),
    ],
)
def test_weights_and_scales_that_do_not_fit(config, tensors, message):
    with pytest.raises(WorkhorseError, match=message):
        dequantized(Memory(tensors), config, torch.float32)
