"""Written GGUF files are read as the same models: config, logits and tokenizer."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoints.gguf_cases import EACH, VOCAB, make
from workhorse.checkpoints.gguf import GgufFile, GgufType, read, write, write_gguf
from workhorse.checkpoints.gguf.metadata import OWN_CONFIG
from workhorse.checkpoints.gguf.write import APPROXIMATIONS
from workhorse.errors import WorkhorseError
from workhorse.models.huggingface.family import compare_plain, plain
from workhorse.nn import Decoder

gguf = pytest.importorskip("gguf")

TEXT = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(3))
TYPES: dict[GgufType, torch.dtype] = {
    "f32": torch.float32,
    "f16": torch.float16,
    "bf16": torch.bfloat16,
    "q8_0": torch.float32,
}
NEAR = tuple(field for field, *_ in APPROXIMATIONS)


def logits(decoder: Decoder) -> torch.Tensor:
    with torch.no_grad():
        return decoder(TEXT)


@pytest.fixture
def of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes our own keys, so that files look as if another program had written them."""

    def without_ours(*of: Any) -> Any:
        header = original(*of)
        del header.keys[OWN_CONFIG]
        return header

    original = read.read_gguf_header
    monkeypatch.setattr(read, "read_gguf_header", without_ours)


@pytest.mark.parametrize(("model_type", "number"), EACH)
def test_what_was_written_is_read(model_type: str, number: int, tmp_path: Path) -> None:
    """The config and the logits are the same, but a norm stored as 1 + weight is rounded."""
    decoder = make(model_type, number)
    path = tmp_path / "model.gguf"
    write_gguf(path, decoder, model_type=model_type, dtype="f32")
    file = GgufFile(path)
    assert file.remarks == []
    assert file.config == decoder.config
    assert file.family is not None
    assert model_type in (file.family.model_type, "mistral", "olmo3", "granitemoeshared")
    again = file.load_decoder(kernel="eager")
    torch.testing.assert_close(logits(again), logits(decoder))


@pytest.mark.usefixtures("of_others")
@pytest.mark.parametrize(("model_type", "number"), EACH)
def test_what_others_write_is_read(model_type: str, number: int, tmp_path: Path) -> None:
    """With only llama.cpp's keys, the model is the same except for llama.cpp's approximations."""
    decoder = make(model_type, number)
    path = tmp_path / "model.gguf"
    remarks = write_gguf(path, decoder, model_type=model_type, dtype="f32")
    file = GgufFile(path)
    assert file.remarks == []
    again = file.load_decoder(kernel="eager")
    if not remarks:
        torch.testing.assert_close(logits(again), logits(decoder))
        assert file.family is not None
    found = [one.path for one in compare_plain(plain(decoder.config), plain(file.config))]
    allowed = (
        *NEAR,
        "norm.precision",
        *(("max_seq_len", "window", "attention_factor") if remarks else ()),
    )
    assert [path for path in found if not path.endswith(allowed)] == []


def test_types_of_weights(tmp_path: Path) -> None:
    """The dtype is the file's dtype. Q8_0 is read as float32, within half a step."""
    decoder, path = make("qwen3"), tmp_path / "model.gguf"
    for dtype, expected in TYPES.items():
        write_gguf(path, decoder, model_type="qwen3", dtype=dtype)
        again = GgufFile(path).load_decoder()
        weight = again.get_parameter("layers.1.feed_forward.up_proj.weight")
        ours = decoder.get_parameter("layers.1.feed_forward.up_proj.weight")
        assert weight.dtype == expected
        step = {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 200}[dtype] * ours.abs().max()
        assert (weight.float() - ours).abs().max() <= step


WIDE = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "vocab_size": 32}
KINDS = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ4_NL", "IQ2_XS", "MXFP4"),
)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_types(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantised files give the weights of a float32 file, including permuted rows and experts."""
    decoder = make("mixtral", **WIDE, num_local_experts=2)
    number = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[number]

    def blocks(values: np.ndarray) -> np.ndarray:
        """Random blocks. Bytes below 64 give no infinite scales."""
        shape = (*values.shape[:-1], values.shape[-1] // block * size)
        return np.random.default_rng(values.size).integers(0, 64, shape, dtype=np.uint8)

    def of(quantized: bool) -> dict[str, torch.Tensor]:
        def quantize(values: np.ndarray, to: Any) -> np.ndarray:
            if values.ndim == 1:
                return values
            found = blocks(values)
            return found if quantized else gguf.quants.dequantize(found, number)

        path, original = tmp_path / f"{quantized}.gguf", write._stored
        with monkeypatch.context() as patch:
            patch.setattr(write, "quantize", quantize)
            if quantized:
                patch.setattr(
                    write,
                    "_stored",
                    lambda plan, *of: "f32" if len(plan.shape) == 1 else kind.lower(),
                )
            else:
                patch.setattr(write, "_stored", lambda plan, *of: original(plan, "f32", "bf16"))
            write_gguf(path, decoder, model_type="mixtral", dtype="f32")
        return GgufFile(path).load_decoder().state_dict()

    theirs, ours = of(False), of(True)
    for name, values in theirs.items():
        assert torch.equal(values, ours[name]), name


def test_only_quantised_types_need_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder, path = make("qwen3"), tmp_path / "model.gguf"
    write_gguf(path, decoder, model_type="qwen3", dtype="q4_0")
    with monkeypatch.context() as patch:
        patch.setattr(gguf.quants, "dequantize", lambda _, number: getattr(number, "unknown"))  # noqa: B009
        with pytest.raises(WorkhorseError, match=r"cannot read Q4_0 tensors; pip install -U gguf"):
            GgufFile(path).load_decoder()
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        WorkhorseError,
        match=r"reading Q4_0 tensors needs the package gguf; in the clone",
    ):
        GgufFile(path).load_decoder()
    monkeypatch.undo()
    write_gguf(path, decoder, model_type="qwen3", dtype="q8_0")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert GgufFile(path).load_decoder().config == decoder.config


def test_a_layer_names_its_tensor_that_is_not_there(tmp_path: Path) -> None:
    data = written(tmp_path).replace(b"blk.1.attn_q_norm.weight", b"blk.1.attn_q_worm.weight")
    with pytest.raises(
        WorkhorseError, match=r"attn_q_worm\.weight is not part of this model|is missing"
    ):
        read_bytes(tmp_path, data)
    data = data.replace(OWN_CONFIG.encode(), b"somebody.configs")
    with pytest.raises(WorkhorseError, match=r"blk\.1\.attn_q_\w+\.weight is \w+"):
        read_bytes(tmp_path, data)


def written(folder: Path, model_type: str = "qwen3") -> bytes:
    path = folder / "model.gguf"
    write_gguf(path, make(model_type), model_type=model_type, dtype="f32")
    return path.read_bytes()


def read_bytes(folder: Path, data: bytes) -> Decoder:
    path = folder / "changed.gguf"
    path.write_bytes(data)
    return GgufFile(path).load_decoder()


def test_a_file_cut_anywhere_gives_one_line(tmp_path: Path) -> None:
    data = written(tmp_path)
    for length in (*range(0, 400, 7), *range(400, len(data), len(data) // 60), len(data) - 1):
        with pytest.raises(WorkhorseError) as caught:
            read_bytes(tmp_path, data[:length])
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 600


def test_a_file_with_any_byte_changed_is_read_or_refused(tmp_path: Path) -> None:
    """Impossible sizes, types, counts and offsets give a one-line error quickly."""
    data, generator = written(tmp_path), torch.Generator().manual_seed(1)
    header = data.index(b"output_norm.weight") + 60
    for at in torch.randint(0, header, (60,), generator=generator).tolist():
        for value in (0, 255):
            changed = bytearray(data)
            changed[at] = value
            try:
                read_bytes(tmp_path, bytes(changed))
            except WorkhorseError as error:
                assert "\n" not in str(error)  # noqa: PT017 some changed files are valid


def test_another_type_of_tensors_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "q.gguf", "qwen3")
    codes = np.zeros((4, 292), dtype=np.uint8)
    kind = gguf.GGMLQuantizationType.Q8_K
    writer.add_tensor("blk.0.attn_q.weight", codes, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(
        WorkhorseError,
        match=r"tensor 'blk\.0\.attn_q\.weight' is Q8_K, which is not supported; .* Q8_0 or Q4_K_M",
    ):
        GgufFile(tmp_path / "q.gguf")


def test_other_files_and_architectures(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("no such file")
    with pytest.raises(WorkhorseError, match=r"text\.gguf is not a GGUF file; give one"):
        GgufFile(tmp_path / "text.gguf")
    data = written(tmp_path).replace(b"\x05\0\0\0\0\0\0\0qwen3", b"\x05\0\0\0\0\0\0\0qwen9", 1)
    with pytest.raises(
        WorkhorseError, match=r"architecture 'qwen9' is not supported .*mean 'qwen3'"
    ):
        read_bytes(tmp_path, data)


def test_a_config_of_ours_that_contradicts_the_keys_is_passed_over(tmp_path: Path) -> None:
    data = written(tmp_path).replace(b'"n_kv_heads":2', b'"n_kv_heads":4')
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert GgufFile(path).config.blocks["main"].attention.n_kv_heads == 2
