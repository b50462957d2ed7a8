"""Key and value heads merged into their means (2305.13245 §2.1)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.parity.reference import quiet
from workhorse.cli.main import main
from workhorse.errors import WorkhorseError
from workhorse.model.convert import convert
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.grouped_heads import group_heads
from workhorse.transforms.quantization import quantize

RMS = {"kind": "rms_norm"}
TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "biases": {"qkv_bias": True, "out_bias": True},
    "values of another width": {"value_dim": 6},
    "one norm": {"qk_norm": {"norm": RMS}},
    "a norm for each head": {"qk_norm": {"norm": RMS, "over": "each_head"}},
    "a norm over all": {"qk_norm": {"norm": RMS, "over": "full"}},
    "alibi, sinks and a gate": {"position": {"kind": "alibi"}, "sinks": True, "output_gate": True},
}


def decoder(n_kv_heads: int = 4, **attention: Any) -> Decoder:
    config = DecoderConfig.from_dict(
        {
            "vocab_size": 11,
            "d_model": 16,
            "n_layers": 2,
            "max_seq_len": 8,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": RMS,
                    "attention": {
                        "kind": "attention",
                        "n_heads": 4,
                        "n_kv_heads": n_kv_heads,
                        "position": {"kind": "rope"},
                        **attention,
                    },
                    "feed_forward": {"kind": "gated_mlp", "d_ff": 8},
                }
            },
            "final_norm": RMS,
        }
    )
    torch.manual_seed(0)
    made = config.build().eval()
    with torch.no_grad():
        for parameter in made.parameters():  # norms and biases too
            parameter.normal_(std=0.5)
    return made


@pytest.mark.parametrize("attention", OPTIONS.values(), ids=list(OPTIONS))
@torch.no_grad()
def test_where_the_heads_of_a_group_are_equal_nothing_changes(attention: dict[str, Any]) -> None:
    model = decoder(**attention)
    for name, weight in model.named_parameters():
        part = name.split(".attention.")[-1]
        if part.startswith(("k_proj", "v_proj", "k_norm.norm")):
            pairs = weight.unflatten(0, (2, 2, -1))
            pairs[:, 1] = pairs[:, 0]
        if part.startswith(("k_norm.heads.1.", "k_norm.heads.3.")):
            twin = name.replace("heads.1.", "heads.0.").replace("heads.3.", "heads.2.")
            weight.copy_(model.get_parameter(twin))
    merged = group_heads(model, 2)
    assert merged.config.blocks["main"].attention.n_kv_heads == 2
    torch.testing.assert_close(merged(TOKENS), model(TOKENS), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("held", "wanted"), [(4, 2), (4, 1), (2, 1), (4, 4)])
@torch.no_grad()
def test_a_head_is_the_mean_of_its_group(held: int, wanted: int) -> None:
    model = decoder(held, qkv_bias=True)
    merged = group_heads(model, wanted)
    for layer, other in zip(model.layers, merged.layers, strict=True):
        for name in ("k_proj", "v_proj"):
            before, after = (getattr(one.attention, name) for one in (layer, other))
            for head in range(wanted):
                size = held // wanted
                rows = [range(4 * member, 4 * member + 4) for member in range(held)]
                group = rows[head * size : (head + 1) * size]
                mean = sum(before.weight[list(one)] for one in group) / size
                torch.testing.assert_close(after.weight[4 * head : 4 * head + 4], mean)
                mean = sum(before.bias[list(one)] for one in group) / size
                torch.testing.assert_close(after.bias[4 * head : 4 * head + 4], mean)
    assert torch.equal(merged.embedding.tokens.weight, model.embedding.tokens.weight)


def test_bfloat16_is_averaged_in_float32() -> None:
    model = decoder().to(torch.bfloat16)
    merged = group_heads(model, 1)
    weight = model.layers[0].attention.k_proj.weight.float().unflatten(0, (4, 4)).mean(dim=0)
    assert torch.equal(merged.layers[0].attention.k_proj.weight, weight.bfloat16())


def test_what_cannot_be_merged() -> None:
    with pytest.raises(WorkhorseError, match=r"n_kv_heads=3 does not divide the 4 .* of 1, 2, 4$"):
        group_heads(decoder(), 3)
    with pytest.raises(WorkhorseError, match=r"n_kv_heads=4 does not divide the 2 .* of 1, 2$"):
        group_heads(decoder(2), 4)
    latent = {"kind": "latent_attention", "n_heads": 4, "kv_rank": 8}
    widths = {"nope_dim": 4, "rope_dim": 4, "value_dim": 4, "position": {"kind": "rope"}}
    config = decoder().config.to_dict()
    config["blocks"]["main"]["attention"] = latent | widths
    with pytest.raises(WorkhorseError, match="latent attention, which stores one"):
        group_heads(DecoderConfig.from_dict(config).build(), 2)


@torch.no_grad()
def test_transformers_computes_the_same_of_what_the_verb_wrote(
    run_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf")
    target = tmp_path / "merged"
    arguments = ["convert", str(run_folder), str(target), "--to", "hf", "--n-kv-heads", "1"]
    assert main([*arguments, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["architecture"] == "LlamaForCausalLM"
    with quiet():
        theirs = hf.AutoModelForCausalLM.from_pretrained(target)
    assert theirs.config.num_key_value_heads == 1
    import workhorse

    merged = group_heads(workhorse.load(run_folder, execution="reference").decoder, 1)
    torch.testing.assert_close(theirs(TOKENS).logits, merged(TOKENS), atol=1e-5, rtol=1e-5)
    again = convert(target, tmp_path / "gguf.gguf", "gguf", n_kv_heads=1)
    assert again.parameters == sum(weight.numel() for weight in merged.parameters())
    assert main([*arguments[:2], str(tmp_path / "x"), *arguments[3:5], "--n-kv-heads", "3"]) == 2
    assert "choose one of 1, 2" in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_a_class_without_groups_gives_way_to_one_that_has_them(tmp_path: Path) -> None:
    with quiet():
        config = hf.GPT2Config(vocab_size=11, n_embd=16, n_layer=1, n_head=4, n_positions=8)
        hf.GPT2LMHeadModel(config).save_pretrained(tmp_path / "gpt2")
    found = convert(tmp_path / "gpt2", tmp_path / "few", "hf", n_kv_heads=1, notify=list)
    assert found.architecture == "GPTBigCodeForCausalLM"
    with pytest.raises(WorkhorseError, match="no transformers class can represent this model"):
        convert(tmp_path / "gpt2", tmp_path / "two", "hf", n_kv_heads=2, notify=list)


def test_quantised_weights_have_no_mean() -> None:
    config = decoder().config.replace(d_model=64)
    with pytest.raises(
        WorkhorseError, match="group_heads cannot be applied after quantize; apply group"
    ):
        group_heads(quantize(config.build().eval(), "int8"), 2)
