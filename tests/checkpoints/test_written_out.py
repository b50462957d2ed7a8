"""Models are exported as an equivalent class: neutral parts are added, and nothing else changes."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from workhorse.checkpoints.gguf import find_gguf_family
from workhorse.checkpoints.huggingface.export import to_equivalent, write_huggingface
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.errors import WorkhorseError
from workhorse.model.convert import convert, save
from workhorse.models import preset
from workhorse.models.huggingface import family, native_class
from workhorse.nn import DecoderConfig

RMS: dict[str, Any] = {"kind": "rms_norm"}
WEIGHTLESS = RMS | {"weight": False}
LAYER: dict[str, Any] = {"kind": "layer_norm"}
BIASLESS = LAYER | {"bias": False}


def config(
    attention: dict[str, Any] | None = None, norm: dict[str, Any] = RMS, **changes: Any
) -> DecoderConfig:
    block = {
        "kind": "pre_norm",
        "norm": norm,
        "attention": {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}}
        | (attention or {}),
        "feed_forward": changes.pop("feed_forward", {"kind": "gated_mlp", "d_ff": 48}),
    }
    data: dict[str, Any] = {
        "vocab_size": 61,
        "d_model": 32,
        "n_layers": 2,
        "max_seq_len": 24,
        "blocks": {"main": block},
        "final_norm": norm,
    }
    return DecoderConfig.from_dict(data | changes)


GPT2: dict[str, Any] = {
    "norm": BIASLESS,
    "attention": {"n_kv_heads": 4, "position": {"kind": "none"}},
    "feed_forward": {"kind": "mlp", "d_ff": 48, "activation": "gelu_tanh"},
    "embedding": {"position": {"kind": "learned"}},
    "head": {"tied": True},
}
EQUAL: dict[str, tuple[str, DecoderConfig]] = {
    "norms of heads without weights": ("qwen3", config({"qk_norm": {"norm": WEIGHTLESS}})),
    "no norm has a weight": ("qwen3", config({"qk_norm": {"norm": WEIGHTLESS}}, WEIGHTLESS)),
    "biases of q, k and v only": (
        "qwen3",
        config({"qkv_bias": True, "qk_norm": {"norm": WEIGHTLESS}}),
    ),
    "no biases": ("gpt2", config(**GPT2)),
}


@pytest.mark.parametrize("name", EQUAL)
def test_the_same_logits_in_a_class_that_has_more_parts(name: str, tmp_path: Path) -> None:
    model_type, ours = EQUAL[name]
    decoder = ours.build("eager", dtype=torch.float64).eval()
    for weight in decoder.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    family = write_huggingface(tmp_path / "hf", decoder)
    assert family.model_type == model_type
    again = HuggingFaceDirectory(tmp_path / "hf").load_decoder(dtype=torch.float64, kernel="eager")
    assert len(list(again.parameters())) > len(list(decoder.parameters()))
    tokens = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(again(tokens), decoder(tokens))
    if not name.startswith("biases"):  # llama.cpp's qwen3 has no output bias
        assert find_gguf_family(ours).model_type == model_type


def test_convert_counts_what_it_wrote(tmp_path: Path) -> None:
    save(EQUAL["no biases"][1].build("eager"), tmp_path / "ours")
    with pytest.warns(UserWarning, match="no tokenizer"):
        found = convert(tmp_path / "ours", tmp_path / "hf", "hf")
    again = HuggingFaceDirectory(tmp_path / "hf").load_decoder()
    assert found.parameters == sum(weight.numel() for weight in again.parameters())


def test_a_tied_head_becomes_a_copy() -> None:
    decoder = config(head={"tied": True}).build("eager", dtype=torch.float64)
    untied = to_equivalent(decoder, config())
    tokens = torch.randint(0, 61, (2, 20))
    with torch.no_grad():
        torch.testing.assert_close(untied(tokens), decoder(tokens))


def test_a_class_that_says_it_all_is_preferred() -> None:
    found = native_class(config({"qk_norm": {"norm": RMS}}))
    assert not isinstance(found, str)
    assert found.model_type == "qwen3"
    position = {"kind": "rope", "precision": "float32"}
    alone = BIASLESS | {"weight": False, "precision": "float32"}
    found = native_class(config({"position": position}, alone))
    assert not isinstance(found, str)
    assert found.model_type == "olmo"  # OLMo has norms without weights


def test_a_dense_model_is_not_written_as_a_mixture() -> None:
    """Qwen2-MoE may have only dense layers, and comes before Mistral in the list."""
    found = native_class(config({"window": 8}))
    assert not isinstance(found, str)
    assert found.model_type == "mistral"


REFUSED = {
    "model.blocks.main.attention.qk_norm.over is 'full', not 'head'; ": config(
        {"qk_norm": {"norm": RMS, "over": "full"}}
    ),
    "model.blocks.main.attention.softcap is 9.0, not null; ": config({"softcap": 9.0}),
    "model.blocks.main.attention.qk_norm.norm.kind is 'layer_norm', not 'rms_norm'; ": config(
        {"qk_norm": {"norm": LAYER}}
    ),
}


def test_a_refusal_names_everything_in_the_way(tmp_path: Path) -> None:
    many = config({"softcap": 9.0, "clip": 3.0, "qk_norm": {"norm": LAYER}}).build(device="meta")
    with pytest.raises(WorkhorseError) as caught:
        write_huggingface(tmp_path / "hf", many)
    message = str(caught.value)
    attention = "model.blocks.main.attention."
    assert f"{attention}clip is 3.0, not null; {attention}softcap is 9.0, not null; " in message
    assert f"{attention}qk_norm" in message
    with pytest.raises(WorkhorseError, match=r"clip is 3\.0, not null; .*softcap is 9\.0, not"):
        write_huggingface(tmp_path / "hf", many, family=family("llama"))
    with pytest.raises(WorkhorseError, match=r"softcap is 9\.0, not null"):
        find_gguf_family(many.config)


@pytest.mark.parametrize("words", REFUSED)
def test_a_refusal_names_the_option_and_what_to_do(words: str, tmp_path: Path) -> None:
    decoder = REFUSED[words].build(device="meta")
    with pytest.raises(WorkhorseError) as caught:
        write_huggingface(tmp_path / "hf", decoder)
    message = str(caught.value)
    assert message.startswith("no transformers class can represent this model; nearest is ")
    assert words in message
    assert message.endswith("or use Workhorse's own format (--to workhorse)")
    with pytest.raises(
        WorkhorseError, match=r"^llama\.cpp cannot compute this model; nearest is "
    ) as caught:
        find_gguf_family(REFUSED[words])
    assert not re.search(r"For\w+LM|LMHead|None\b", str(caught.value))


def test_a_type_that_llama_cpp_has_not_is_told_what_else_there_is() -> None:
    with pytest.raises(WorkhorseError) as caught:
        find_gguf_family(preset("gpt"), family("openai-gpt"))
    message = str(caught.value)
    assert message.startswith("llama.cpp cannot compute this model; nearest is gpt2: model.")
    assert "; keep it as a Hugging Face directory (--to hf) or in Workhorse's own format" in message
