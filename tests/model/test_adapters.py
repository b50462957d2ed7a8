"""Adapters on disk: loaded with their base, merged, and converted, without PEFT itself."""

import json
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import workhorse
from workhorse.checkpoints.peft import WEIGHTS, write_peft
from workhorse.cli.main import main
from workhorse.errors import WorkhorseError
from workhorse.model.convert import convert
from workhorse.model.model import Model
from workhorse.models.huggingface import family
from workhorse.nn import Decoder, DecoderConfig
from workhorse.transforms.adapters import (
    adapter_parameters,
    adapters_of,
    add_adapter,
    set_adapter,
)
from workhorse.transforms.lora import LoraConfig

LAYER: dict[str, Any] = {
    "kind": "pre_norm",
    "norm": "rms_norm",
    "attention": {"kind": "attention", "n_heads": 4, "n_kv_heads": 2, "position": "rope"},
    "feed_forward": {"kind": "gated_mlp", "d_ff": 48},
}
CONFIG = {"vocab_size": 257, "d_model": 32, "n_layers": 2, "max_seq_len": 16}
LLAMA = DecoderConfig.from_dict(
    CONFIG | {"blocks": {"main": LAYER}, "final_norm": "rms_norm", "head": {"tied": False}}
)
TOKENS = torch.tensor([[65, 66, 67, 68]])


@torch.no_grad()
def adapted(decoder: Decoder, config: LoraConfig, name: str = "default") -> Decoder:
    """Add an adapter with random values."""
    add_adapter(decoder, config, name=name)
    for parameter in adapter_parameters(decoder, name).values():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return decoder


@torch.no_grad()
def logits(model: Model) -> Tensor:
    return model.reference(TOKENS)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A Hugging Face directory without tokenizer."""
    decoder = LLAMA.build()
    convert(Model("random", decoder, None, trained=True), tmp_path / "base", "hf", notify=print)
    return tmp_path / "base"


def load(path: Path, **options: Any) -> Model:
    return workhorse.load(path, notify=lambda line: None, **options)


def saved(base: Path, folder: Path, **options: Any) -> tuple[Path, Tensor]:
    """Save an adapter of the base in PEFT's format; return it and the logits."""
    decoder = adapted(load(base).reference, LoraConfig(rank=2, **options))
    write_peft(folder, decoder, family("llama"), str(base))
    with torch.no_grad():
        return folder, decoder(TOKENS)


def test_several_adapters_on_one_base(base: Path, tmp_path: Path) -> None:
    one, first = saved(base, tmp_path / "one")
    two, second = saved(base, tmp_path / "two", targets=("q_proj",), dora=True)
    change(two, ensure_weight_tying=True)  # without effect if no embedding is saved
    model = load(base, adapter={"a": one, "b": two})
    torch.testing.assert_close(logits(model), first)
    set_adapter(model.reference, "b")
    torch.testing.assert_close(logits(model), second)
    torch.testing.assert_close(logits(load(base, adapter=two)), second)
    with torch.no_grad():  # the body that decodes
        torch.testing.assert_close(load(base, adapter=one).decoder(TOKENS), first)
        merged = load(base, adapter=one).merged().with_execution()
        torch.testing.assert_close(merged.decoder(TOKENS), first)
    assert not adapters_of(merged.reference)


def test_a_quantised_base(base: Path, tmp_path: Path) -> None:
    path, _ = saved(base, tmp_path / "one")
    plain = load(base, quantize="int8")
    found = load(base, quantize="int8", adapter=path)
    assert not torch.allclose(logits(found), logits(plain), atol=1e-2)
    assert torch.equal(
        found.reference.layers[0].attention.q_proj.codes,
        plain.reference.layers[0].attention.q_proj.codes,
    )


def test_models_with_different_adapters_share_the_weights_of_the_base(
    base: Path, tmp_path: Path
) -> None:
    one, _ = saved(base, tmp_path / "one", also_train=("embedding",))
    two, _ = saved(base, tmp_path / "two", targets=("q_proj",), dora=True)
    model = load(base)
    plain = logits(model)
    for path in (one, two):
        found = model.with_adapter(path)
        assert torch.equal(logits(found), logits(load(base, adapter=path)))
        assert found.reference.head.proj.weight is model.reference.head.proj.weight
        with pytest.raises(WorkhorseError, match=r"has an adapter; add .*one to its base"):
            found.with_adapter(one)
    assert torch.equal(logits(model), plain)
    with pytest.raises(WorkhorseError, match="gpt2 is a preset, which has no weights to adapt"):
        Model("gpt2", LLAMA.build(), None, trained=False).with_adapter(one)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_merging(base: Path, tmp_path: Path, dtype: Any) -> None:
    """The sum is computed in float32 and rounded once, whatever the dtype of base and result."""
    path, _ = saved(base, tmp_path / "one")
    done = convert(base, tmp_path / "half", "hf", dtype="bfloat16", notify=print)
    convert(done.path, tmp_path / "merged", "hf", adapter=path, dtype=dtype, notify=print)
    wide = load(done.path, dtype="float32", adapter=path).reference
    layer = wide.layers[1].feed_forward.down_proj
    found = load_file(tmp_path / "merged/model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(found, layer.matrix().to(getattr(torch, dtype)))


def test_the_command_line(base: Path, tmp_path: Path, capsys: Any) -> None:
    path, _ = saved(base, tmp_path / "one")
    options = ["--to", "peft", "--adapter", str(path)]
    assert main(["convert", str(base), str(tmp_path / "again"), *options]) == 0
    for name in (WEIGHTS, "adapter_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()
    for arguments in (["--to", "peft"], ["--to", "peft", "--dtype", "float16"]):
        assert main(["convert", str(base), str(tmp_path / "no"), *arguments]) == 2
    assert "has no adapter" in capsys.readouterr().err


FORMS: dict[str, dict[str, Any]] = {
    "llama": {},
    "phi3": {},
    "scaled": {"scaling": "sqrt_rank", "ranks": {"down_proj": 4}, "alphas": {"q_proj": 5.0}},
}


@pytest.mark.parametrize("form", FORMS)
def test_files_for_llama_cpp(form: str, base: Path, tmp_path: Path) -> None:
    """`W + alpha / rank · B A` of the two files is the tensor of the merged model's file."""
    model_type = form if form == "phi3" else "llama"
    if form == "phi3":
        plain = Model("random", LLAMA.build(), None, trained=True, family=family(form))
        base = convert(plain, tmp_path / "phi3", "hf", notify=print).path
    options = FORMS[form]
    whole = load(base)
    convert(whole, tmp_path / "base.gguf", "gguf", notify=print)
    adapted(whole.reference, LoraConfig(rank=2, **options))
    model = whole.with_execution("reference")
    convert(model, tmp_path / "merged.gguf", "gguf", notify=print)
    convert(model, tmp_path / "lora.gguf", "gguf-lora", notify=print)
    merged, before, lora = (
        gguf.GGUFReader(tmp_path / f"{name}.gguf") for name in ("merged", "base", "lora")
    )
    keys = {key: field.contents() for key, field in lora.fields.items()}
    assert keys["general.type"] == "adapter"
    assert keys["adapter.type"] == "lora"
    assert keys["general.architecture"] == model_type
    parts = {one.name: torch.tensor(one.data) for one in lora.tensors}
    expected = {one.name: torch.tensor(one.data) for one in merged.tensors}
    for one in before.tensors:
        weight = torch.tensor(one.data)
        if f"{one.name}.lora_a" in parts:
            a, b = parts.pop(f"{one.name}.lora_a"), parts.pop(f"{one.name}.lora_b")
            weight = weight + keys["adapter.lora.alpha"] / len(a) * (b @ a)
        torch.testing.assert_close(weight, expected[one.name], rtol=0, atol=1e-5)
    assert not parts


def change(folder: Path, **keys: Any) -> None:
    """Change keys of `adapter_config.json`."""
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | keys))


def poison(folder: Path, value: float, dtype: torch.dtype) -> None:
    tensors = load_file(folder / WEIGHTS)
    name, first = next(iter(tensors.items()))
    first = first.double()
    first[0, 0] = value
    save_file(tensors | {name: first.to(dtype)}, folder / WEIGHTS)


def twice(folder: Path) -> None:
    """Store a tensor with and without PEFT's prefix."""
    tensors = load_file(folder / WEIGHTS)
    others = {name.removeprefix("base_model.model."): one + 1 for name, one in tensors.items()}
    save_file(tensors | others, folder / WEIGHTS)


def rename(folder: Path, old: str, new: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name.replace(old, new): one for name, one in tensors.items()}, folder / WEIGHTS)


def omit(folder: Path, layer: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    save_file({name: one for name, one in tensors.items() if layer not in name}, folder / WEIGHTS)


WRONG: dict[str, tuple[Any, str]] = {
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "adapter_model.safetensors does not exist"),
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "can run code"),
    "no config": (lambda f: (f / "adapter_config.json").unlink(), "is not an adapter"),
    "kind": (lambda f: change(f, peft_type="IA3"), "peft_type: 'IA3' is not allowed; give 'LORA'"),
    "rank": (lambda f: change(f, r=0), "r: 0 is too small"),
    "pattern": (lambda f: change(f, rank_pattern={"(": 1}), "the pattern '\\(' is invalid"),
    "slow pattern": (
        lambda f: change(f, alpha_pattern={"([a-z._0-9]+)+X": 1}),
        "may take too long to match; give the names of layers",
    ),
    "many patterns": (
        lambda f: change(f, rank_pattern={f"{n}.*": 2 for n in range(21)}),
        "matching 21 patterns would take long",
    ),
    "alpha": (lambda f: change(f, lora_alpha=1e308), "lora_alpha: 1e.308 is too large"),
    "alphas": (lambda f: change(f, alpha_pattern={"q": 1e308}), "alpha_pattern.q: 1e.308 is too"),
    "bias": (lambda f: change(f, bias="all"), "bias: 'all' is not allowed"),
    "option": (lambda f: change(f, use_qalora=True), "use_qalora=true is not supported"),
    "arrow": (lambda f: change(f, arrow_config={"k": 1}), "train the adapter without it"),
    **{
        one: (
            lambda f, one=one: change(f, init_lora_weights=one),
            f"init_lora_weights='{one}' changes the weights of the base; save the adapter as LoRA",
        )
        for one in ("pissa", "pissa_niter_4", "olora", "corda", "lora_ga")
    },
    "loftq": (lambda f: change(f, init_lora_weights="loftq"), "with PEFT's merge_and_unload"),
    "twice": (twice, r"tensor 'model.layers.* has another tensor for the same weight"),
    "not saved": (
        lambda f: change(f, modules_to_save=["lm_head"]),
        "modules_to_save names lm_head.weight, which is not in the file",
    ),
    "a layer without tensors": (
        lambda f: omit(f, "0.self_attn.q_proj"),
        r"target_modules names model\.layers\.0\.self_attn\.q_proj, which is not in the file",
    ),
    "unknown": (lambda f: change(f, use_wlora=4), "use_wlora=4 is not supported"),
    "another rank": (lambda f: change(f, r=3), r"has shape \(2, 32\), but this base needs \(3, 32"),
    "not dora": (
        lambda f: rename(f, "lora_B.weight", "lora_magnitude_vector"),
        r"lora_magnitude_vector' does not belong to an adapter with use_dora=false",
    ),
    "integers": (lambda f: poison(f, 1, torch.int32), r"has torch\.int32 values; save the adapter"),
    "embedding": (lambda f: rename(f, "lora_A.weight", "lora_embedding_A"), "LoRA of an embedding"),
    **{
        f"{old}, not {new}": (
            lambda f, old=old, new=new: rename(f, f"0.self_attn.q_proj.{old}", new),
            rf"tensor '.*0\.self_attn\.q_proj\.{old}' is missing; save the adapter again",
        )
        for old in ("lora_A.weight", "lora_B.weight")
        for new in ("x", "0.self_attn.q_proj.lora_Z.weight")
    },
    **{
        f"{value} in {dtype}": (
            lambda f, value=value, dtype=dtype: poison(f, value, dtype),
            "has infinite values or NaN; use an earlier checkpoint of the adapter",
        )
        for value, dtype in (
            (torch.nan, torch.float32),
            (torch.nan, torch.float8_e4m3fn),
            (torch.nan, torch.float8_e8m0fnu),
            (1e300, torch.float64),
        )
    },
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_adapters(case: str, base: Path, tmp_path: Path) -> None:
    path, _ = saved(base, tmp_path / "one")
    spoil, message = WRONG[case]
    spoil(path)
    with pytest.raises(WorkhorseError, match=message) as error:
        load(base, adapter=path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("to", ["peft", "gguf-lora"])
def test_adapters_that_are_not_written(to: Any, base: Path, tmp_path: Path) -> None:
    model = load(base, execution="reference")
    adapted(model.reference, LoraConfig(rank=2))
    model.reference.layers[0].attention.q_proj.adapters["default"].lora_a.weight.data[0] = torch.inf
    with pytest.raises(WorkhorseError, match="NaN; use an earlier checkpoint of the adapter"):
        convert(model, tmp_path / "out", to, notify=print)
    model = load(base, execution="reference")
    adapted(model.reference, LoraConfig(rank=2, dora=True, also_train=("final_norm",)))
    if to == "gguf-lora":
        with pytest.raises(WorkhorseError, match=r"llama.cpp has no adapters with dora"):
            convert(model, tmp_path / "out", to, notify=print)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["hf", "gguf", "workhorse"])
def test_the_adapter_of_a_tied_head_is_merged(to: Any, tmp_path: Path) -> None:
    """The merged model has a separate head; llama.cpp has no adapter for a tied one."""
    decoder = adapted(
        LLAMA.replace(head={"tied": True}).build(), LoraConfig(targets=("head.proj",))
    )
    model = Model("random", decoder, None, trained=True, family=family("llama"))
    name = "out.gguf" if to == "gguf" else "out"
    convert(model, tmp_path / name, to, notify=print)
    torch.testing.assert_close(logits(load(tmp_path / name)), logits(model))
    plain = Model("random", LLAMA.replace(head={"tied": True}).build(), None, trained=True)
    base = convert(plain, tmp_path / "base", "hf", notify=print).path
    path, _ = saved(base, tmp_path / "one", targets=("head.proj",))
    with pytest.raises(WorkhorseError, match=r"no adapter for head.proj.weight .*\(--to hf\)"):
        convert(base, tmp_path / "lora.gguf", "gguf-lora", adapter=path, notify=print)


def test_wrong_bases(base: Path, tmp_path: Path) -> None:
    path, _ = saved(base, tmp_path / "one", also_train=("head",))
    with pytest.raises(WorkhorseError, match="give its base as the model"):
        load(path)
    with pytest.raises(WorkhorseError, match="is a preset"):
        load(Path("gpt2"), adapter=path)
    others = {
        "model.layers.1.* is not a weight of this llama model": {"n_layers": 1},
        "but this base needs": {"d_model": 64},
        "modules_to_save trains head and embedding apart": {"head": {"tied": True}},
    }
    for n, (message, changes) in enumerate(others.items()):
        other = LLAMA.replace(**changes).build()
        model = Model("random", other, None, trained=True)
        convert(model, tmp_path / f"other-{n}", "hf", notify=print)
        with pytest.raises(WorkhorseError, match=message):
            load(tmp_path / f"other-{n}", adapter=path)
