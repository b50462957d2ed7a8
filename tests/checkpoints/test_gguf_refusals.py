"""Models that GGUF cannot store give a one-line error, and a failed write leaves no file."""

import copy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoints.gguf_cases import make
from workhorse.checkpoints.gguf import GgufType, write, write_gguf
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig

pytest.importorskip("gguf")

Change = Callable[[dict[str, Any]], object]


def changed(decoder: Decoder, change: Change) -> Decoder:
    """A decoder with a changed config and random weights."""
    data = decoder.config.to_dict()
    (block,) = data["blocks"].values()
    change(block)
    return DecoderConfig.from_dict(data).build("eager", device="meta")


YARN = {"kind": "yarn", "factor": 2.0, "original_max_seq_len": 32}
REFUSED: dict[str, tuple[str, Change, str]] = {
    "softcap": ("llama", lambda b: b["attention"].update(softcap=9.0), "attention.softcap is 9.0"),
    "sinks": ("llama", lambda b: b["attention"].update(sinks=True), "attention.sinks is true"),
    "clip": ("qwen2", lambda b: b["attention"].update(clip=1.0), "attention.clip is 1.0"),
    "scale": ("llama", lambda b: b["attention"].update(scale=0.5), "attention.scale is 0.5"),
    "chunk": ("llama", lambda b: b["attention"].update(chunk=8), "attention.chunk is 8"),
    "value width": ("llama", lambda b: b["attention"].update(value_dim=64), "value_dim is 64"),
    "partial rotation": (
        "llama",
        lambda b: b["attention"]["position"].update(fraction=0.5),
        "position.fraction is 0.5",
    ),
    "odd rotation": (
        "gpt_neox",
        lambda b: b["attention"]["position"].update(fraction=0.3),
        "rotates 9 features, which is an odd number",
    ),
    "dynamic rotation": (
        "llama",
        lambda b: b["attention"]["position"].update(
            scaling={"kind": "dynamic_ntk", "factor": 2.0, "original_max_seq_len": 32}
        ),
        "position.scaling",
    ),
    "ramp of yarn": (
        "llama",
        lambda b: b["attention"]["position"].update(scaling=YARN | {"beta_fast": 16.0}),
        "beta_fast is 16.0, not 32.0",
    ),
    "activation": (
        "llama",
        lambda b: b["feed_forward"].update(activation="relu"),
        "activation is 'relu', not 'silu'",
    ),
    "wiring": ("llama", lambda b: b.update(norm_residual=True), "norm_residual is true"),
    "eps of one norm": (
        "qwen3",
        lambda b: b["attention"]["qk_norm"]["norm"].update(eps=1e-3),
        "qk_norm.norm.eps is 0.001",
    ),
    "residual": (
        "llama",
        lambda b: b.update(residual_multiplier=0.5),
        "residual_multiplier is 0.5",
    ),
    "narrow heads": ("qwen2", lambda b: b["attention"].update(head_dim=16), "n_heads · head_dim"),
    "no window": ("gemma2", lambda b: b["attention"].update(window=None), "no layer has a"),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_llama_cpp_does_not_compute(reason: str, tmp_path: Path) -> None:
    model_type, change, words = REFUSED[reason]
    kinds = {"layer_types": ["full_attention"] * 3} if model_type == "gemma2" else {}
    decoder = changed(make(model_type, **kinds), change)
    with pytest.raises(WorkhorseError) as caught:
        write_gguf(tmp_path / "model.gguf", decoder, model_type=model_type)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


LINEAR = {"kind": "linear", "factor": 2.0}
UNEVEN: dict[str, tuple[Change, str]] = {
    "width": (lambda b: b["feed_forward"].update(d_ff=128), r"feed_forward\.d_ff: 96 and 128"),
    "theta": (lambda b: b["attention"]["position"].update(theta=5e4), r"position\.theta"),
    "scaling": (lambda b: b["attention"]["position"].update(scaling=LINEAR), "position.scaling"),
    "biases": (lambda b: b["attention"].update(qkv_bias=True), r"attention\.qkv_bias"),
}


@pytest.mark.parametrize("what", UNEVEN)
def test_layers_that_differ_where_the_file_has_one_number(what: str, tmp_path: Path) -> None:
    change, words = UNEVEN[what]
    data = make("llama").config.to_dict()
    (block,) = data["blocks"].values()
    other = copy.deepcopy(block)
    change(other)
    data |= {"blocks": {"a": block, "b": other}, "pattern": ["a", "b", "a"]}
    decoder = DecoderConfig.from_dict(data).build("eager", device="meta")
    with pytest.raises(WorkhorseError, match=rf"layers differ in .*{words}"):
        write_gguf(tmp_path / "model.gguf", decoder, model_type="llama")


def test_the_published_depth_of_gemma_2_has_its_own_scale(tmp_path: Path) -> None:
    """llama.cpp takes 46 layers for the 27B and scales its scores by d_model // n_heads."""
    path, deep = tmp_path / "model.gguf", {"num_hidden_layers": 46}
    as_published = make("gemma2", query_pre_attn_scalar=64 // 4, **deep)
    assert write_gguf(path, as_published, model_type="gemma2") == []
    with pytest.raises(WorkhorseError, match=r"attention\.scale is 0\.176\d*, not 0\.25"):
        write_gguf(path, make("gemma2", query_pre_attn_scalar=32, **deep), model_type="gemma2")


def test_an_unknown_model_type(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match=r"model type 'lama' are not supported.*llama"):
        write_gguf(tmp_path / "model.gguf", make("llama"), model_type="lama")


def test_a_decoder_of_another_type(tmp_path: Path) -> None:
    with pytest.raises(
        WorkhorseError, match=r"llama\.cpp's architecture gpt2 cannot compute this model"
    ):
        write_gguf(tmp_path / "model.gguf", make("llama"), model_type="gpt2")


def test_an_unknown_dtype(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match="dtype='q2_k' is not supported; choose f32, f16"):
        write_gguf(tmp_path / "a.gguf", make("llama"), model_type="llama", dtype="q2_k")  # pyright: ignore


def test_the_package_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(WorkhorseError, match=r"pip install -e '.\[gguf\]'"):
        write_gguf(tmp_path / "model.gguf", make("llama"), model_type="llama")


def test_numbers_beyond_float16(tmp_path: Path) -> None:
    decoder = make("llama")
    with torch.no_grad():
        decoder.head.proj.weight[3, 4] = 1e5
    path = tmp_path / "model.gguf"
    with pytest.raises(
        WorkhorseError, match=r"output\.weight has values beyond float16's range; choose"
    ):
        write_gguf(path, decoder, model_type="llama", dtype="f16")
    assert list(tmp_path.iterdir()) == []
    assert write_gguf(path, decoder, model_type="llama", dtype="bf16") == []


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"old")
    made = iter(range(5))

    def full(*_: object) -> None:
        if next(made, None) is None:
            raise OSError(28, "No space left on device")
        return original(*_)

    original = write._encoded
    monkeypatch.setattr(write, "_encoded", full)
    with pytest.raises(WorkhorseError, match=r"cannot write .*model\.gguf: No space left"):
        write_gguf(path, make("llama"), model_type="llama")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(WorkhorseError, match=r"cannot write .*: No such file"):
        write_gguf(tmp_path / "no" / "model.gguf", make("llama"), model_type="llama")


@pytest.mark.parametrize("dtype", ["f32", "bf16", "f16", "q8_0", "q4_k"])
@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan")])
def test_infinite_weights_and_nan(number: float, dtype: GgufType, tmp_path: Path) -> None:
    decoder = make("llama", num_hidden_layers=1)
    with torch.no_grad():
        decoder.layers[0].feed_forward.up_proj.weight[3, 4] = number
    expected = r"blk\.0\.ffn_up\.weight has infinite values or NaN; use an earlier checkpoint"
    with pytest.raises(WorkhorseError, match=expected):
        write_gguf(tmp_path / "model.gguf", decoder, model_type="llama", dtype=dtype)
    assert list(tmp_path.iterdir()) == []


def test_a_write_that_numpy_says_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def short(*_: object) -> None:
        raise OSError("4096 requested and 12 written")  # as numpy does, without an errno

    monkeypatch.setattr(write, "_encoded", short)
    with pytest.raises(WorkhorseError, match=r"gguf: only a part was written \(4096 requested"):
        write_gguf(tmp_path / "model.gguf", make("llama"), model_type="llama")
