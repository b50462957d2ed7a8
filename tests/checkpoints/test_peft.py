"""Adapters in PEFT's format: the same bytes as PEFT writes, and the same logits as PeftModel."""

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.checkpoints.peft import TAKEN_FOR_EXPERTS, WEIGHTS, add_peft, write_peft
from workhorse.checkpoints.peft_config import matching
from workhorse.errors import WorkhorseError
from workhorse.model.convert import convert
from workhorse.nn import Decoder
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import LoraConfig

hf = pytest.importorskip("transformers", minversion="5.21")
peft = pytest.importorskip("peft", minversion="0.21")
get_pattern_key = pytest.importorskip("peft.utils.other").get_pattern_key

TOKENS = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
SMALL = {"vocab_size": 32, "num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4}
SMALL |= {"intermediate_size": 48, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
BASES: dict[str, dict[str, Any]] = {
    "llama": SMALL | {"num_key_value_heads": 2},
    "gpt2": {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 16},
    "gpt_neox": SMALL,
    "qwen3_moe": SMALL
    | {"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24}
    | {"num_experts": 4, "num_experts_per_tok": 2},
    "mixtral": SMALL | {"num_key_value_heads": 2, "num_local_experts": 4},
}
LINEAR = ["q_proj", "down_proj"]
EXPERTS = ["gate_up_proj", "down_proj"]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {"target_modules": LINEAR, "r": 4, "lora_alpha": 6}),
    "rslora": ("llama", {"target_modules": LINEAR, "use_rslora": True, "lora_dropout": 0.1}),
    "dora": ("llama", {"target_modules": LINEAR, "use_dora": True, "modules_to_save": ["lm_head"]}),
    "saved": (
        "llama",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens", "model.norm"]},
    ),
    "patterns": (
        "llama",
        {"target_modules": LINEAR, "rank_pattern": {"down_proj": 2}}
        | {"alpha_pattern": {"0.self_attn.q_proj": 32}},
    ),
    "head": ("llama", {"target_modules": ["q_proj", "lm_head"]}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"]}),
    "transposed dora": ("gpt2", {"target_modules": ["c_attn"], "use_dora": True}),
    "joined": ("gpt_neox", {"target_modules": ["query_key_value", "dense"]}),
    "joined dora": ("gpt_neox", {"target_modules": ["query_key_value"], "use_dora": True}),
    "experts": ("qwen3_moe", {"target_modules": ["v_proj"], "target_parameters": EXPERTS}),
    "router": (
        "qwen3_moe",
        {"target_modules": ["q_proj"], "target_parameters": ["gate.weight"]}
        | {"rank_pattern": {"1.mlp.gate.weight": 2}},
    ),
    "one stack": (
        "qwen3_moe",
        {"target_modules": [], "target_parameters": EXPERTS[1:], "use_rslora": True},
    ),
}


def base_of(model_type: str, folder: Path, *, tied: bool = False) -> Any:
    """A random model of transformers, saved to a folder."""
    options = {"tie_word_embeddings": tied, "attn_implementation": "eager", **BASES[model_type]}
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(hf.AutoConfig.for_model(model_type, **options))
    model.save_pretrained(folder)
    return hf.AutoModelForCausalLM.from_pretrained(folder)


@torch.no_grad()
def with_peft(model: Any, options: dict[str, Any], folder: Path) -> Tensor:
    """Save an adapter with random values in PEFT's format; return the logits of `TOKENS`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
        theirs = peft.get_peft_model(model, config).eval()
        for path, parameter in theirs.named_parameters():
            if "lora_magnitude" in path:
                parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
            elif "lora_" in path or "modules_to_save" in path:
                parameter.normal_(std=0.2)
        theirs.save_pretrained(folder)
        return theirs(TOKENS).logits


def with_sorted_targets(folder: Path) -> str:
    """The config file, with the targets sorted: PEFT writes sets, in a random order."""
    config = json.loads((folder / "adapter_config.json").read_text())
    for key in ("target_modules", "target_parameters"):
        config[key] = config[key] if config[key] is None else sorted(config[key])
    return json.dumps(config, indent=2, sort_keys=True)


@pytest.fixture(autouse=True)
def _quiet() -> None:
    hf.logging.disable_progress_bar()


@pytest.mark.parametrize(("model_type", "options"), CASES.values(), ids=CASES)
@torch.no_grad()
def test_adapters_of_peft(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """PEFT's files give PEFT's logits, and are written again with the same bytes."""
    base, theirs, ours = (tmp_path / name for name in ("base", "theirs", "ours"))
    expected = with_peft(base_of(model_type, base), options, theirs)
    stored = HuggingFaceDirectory(base)
    decoder = stored.load_decoder()
    plain = decoder(TOKENS)
    add_peft(decoder, theirs, stored.family)
    assert (plain - expected).abs().max() > 1e-2
    torch.testing.assert_close(decoder(TOKENS), expected, rtol=0, atol=1e-5)
    write_peft(ours, decoder, stored.family, str(base))
    assert (ours / WEIGHTS).read_bytes() == (theirs / WEIGHTS).read_bytes()
    assert (ours / "adapter_config.json").read_text() == with_sorted_targets(theirs)


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe"])
@torch.no_grad()
def test_all_linear_layers_of_mixtures(model_type: str, tmp_path: Path) -> None:
    """PEFT adapts routers too; its rank of gate and up is doubled, by a regular expression."""
    base, theirs, ours = (tmp_path / name for name in ("base", "theirs", "ours"))
    options = {"target_modules": "all-linear", "r": 2, "lora_alpha": 4}
    expected = with_peft(base_of(model_type, base), options, theirs)
    stored = HuggingFaceDirectory(base)
    decoder = stored.load_decoder()
    add_peft(decoder, theirs, stored.family)
    torch.testing.assert_close(decoder(TOKENS), expected, rtol=0, atol=1e-5)
    write_peft(ours, decoder, stored.family, str(base))
    assert (ours / WEIGHTS).read_bytes() == (theirs / WEIGHTS).read_bytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = peft.PeftModel.from_pretrained(hf.AutoModelForCausalLM.from_pretrained(base), ours)
    assert torch.equal(again.eval()(TOKENS).logits, expected)
    convert(str(base), tmp_path / "merged", "hf", adapter=theirs, notify=print)
    merged = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    torch.testing.assert_close(merged(TOKENS).logits, expected, rtol=0, atol=1e-5)


@torch.no_grad()
def shaken(decoder: Decoder) -> Decoder:
    """Give the adapter of a decoder random values."""
    for path, parameter in adapter_parameters(decoder).items():
        if path.endswith("magnitude"):
            parameter.mul_(1 + 0.3 * torch.rand_like(parameter))
        else:
            parameter.normal_(std=0.1)
    return decoder


FAMILIES = {model_type: cases[0] for model_type, cases in ALL.items()}
NOT_DENSE = (
    "q_proj",
    "v_proj",
    "out_proj",
    "router.proj",
    "experts.gate_proj",
    "experts.down_proj",
)
"""Targets of models whose feed-forwards PEFT takes for experts."""
REFUSED = {"dbrx": "can have no adapter", **dict.fromkeys(TAKEN_FOR_EXPERTS, "PEFT takes")}


@pytest.mark.slow
@pytest.mark.parametrize(("model_type", "options"), FAMILIES.items(), ids=FAMILIES)
@torch.no_grad()
def test_adapters_of_ours(model_type: str, options: dict[str, Any], tmp_path: Path) -> None:
    """PEFT reads an adapter of all linear layers of each model type, and gives our logits."""
    pair = reference.make(model_type, options, tmp_path / "base")
    stored = HuggingFaceDirectory(pair.folder)
    targets: Any = "all"
    if model_type in REFUSED:
        every = add_adapter(stored.load_decoder(), LoraConfig(rank=2))
        with pytest.raises(WorkhorseError, match=REFUSED[model_type]):
            write_peft(tmp_path / "all", every, stored.family, str(pair.folder))
        names = [name for name, _ in pair.ours.named_modules()]
        targets = [end for end in NOT_DENSE if any(name.endswith(end) for name in names)]
        targets = targets[:3] if model_type == "dbrx" else targets
    decoder = shaken(add_adapter(pair.ours, LoraConfig(rank=2, targets=targets)))
    expected = decoder(pair.tokens)
    write_peft(tmp_path / "ours", decoder, stored.family, str(pair.folder))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(pair.theirs, tmp_path / "ours").eval()
    assert reference.relative(expected, theirs(pair.tokens, use_cache=False).logits) <= 1e-5
    again = stored.load_decoder(dtype=torch.float32)
    add_peft(again, tmp_path / "ours", stored.family)
    assert reference.relative(again(pair.tokens), expected) <= 1e-5


JOINED = LoraConfig(rank=2, alpha=3, ranks={"k_proj": 4}, alphas={"v_proj": 8})
OURS = {
    "stacked A's": ("gpt_neox", JOINED),
    "stacked A's, rsLoRA": ("gpt_neox", JOINED.replace(scaling="sqrt_rank")),
    "a part": ("gpt_neox", LoraConfig(targets=("q_proj", "v_proj"))),
    "tied": ("gpt2", LoraConfig(also_train=("embedding",))),
    "one router": ("qwen3_moe", LoraConfig(targets=("layers.1.feed_forward.router.proj",))),
    "one stack, with dropout": (
        "qwen3_moe",
        LoraConfig(targets=("layers.1.feed_forward.experts.down_proj",), dropout=0.1),
    ),
}


@pytest.mark.parametrize(("model_type", "config"), OURS.values(), ids=OURS)
@torch.no_grad()
def test_peft_computes_what_we_do(model_type: str, config: LoraConfig, tmp_path: Path) -> None:
    """Layers that transformers joins may have different A's, and a head may be tied."""
    theirs = base_of(model_type, tmp_path / "base", tied=bool(config.also_train))
    stored = HuggingFaceDirectory(tmp_path / "base")
    decoder = shaken(add_adapter(stored.load_decoder(), config))
    expected = decoder(TOKENS)
    write_peft(tmp_path / "ours", decoder, stored.family, str(tmp_path / "base"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "ours").eval()
    torch.testing.assert_close(theirs(TOKENS).logits, expected, rtol=0, atol=1e-5)
    again = stored.load_decoder()
    add_peft(again, tmp_path / "ours", stored.family, name="other")
    torch.testing.assert_close(again(TOKENS), expected, rtol=0, atol=1e-5)


@torch.no_grad()
def test_experts_in_the_names_of_transformers_4(tmp_path: Path) -> None:
    """There each expert has its own A and B."""
    base_of("qwen3_moe", tmp_path / "base")
    stored = HuggingFaceDirectory(tmp_path / "base")
    config = LoraConfig(rank=2, targets=("experts.up_proj", "experts.down_proj"))
    decoder = shaken(add_adapter(stored.load_decoder(), config))
    tensors: dict[str, Tensor] = {}
    for layer in range(2):
        for name in ("up_proj", "down_proj"):
            adapter = adapter_parameters(decoder)
            ours = f"layers.{layer}.feed_forward.experts.{name}.adapters.default"
            for part, end in (("lora_a", "lora_A"), ("lora_b", "lora_B")):
                for expert, value in enumerate(adapter[f"{ours}.{part}.weight"]):
                    theirs = f"base_model.model.model.layers.{layer}.mlp.experts.{expert}.{name}"
                    tensors[f"{theirs}.{end}.weight"] = value.detach().clone()
    save_file(tensors, tmp_path / WEIGHTS)
    keys = {"peft_type": "LORA", "r": 2, "lora_alpha": 16}
    (tmp_path / "adapter_config.json").write_text(json.dumps(keys))
    again = stored.load_decoder()
    add_peft(again, tmp_path, stored.family)
    assert torch.equal(again(TOKENS), decoder(TOKENS))
    part = {name: value for name, value in tensors.items() if "experts.3.up_proj" not in name}
    save_file(part, tmp_path / WEIGHTS)
    with pytest.raises(WorkhorseError, match=r"but not .*experts\.3\.up_proj\.weight;"):
        add_peft(stored.load_decoder(), tmp_path, stored.family)


NAME = "model.layers.10.self_attn.q_proj"
PATTERNS = {
    "q_proj": True,
    "proj": False,
    "self_attn.q_proj": True,
    "k_proj|q_proj": True,
    r".*\.q_proj": True,
    r"^model\.layers\.[0-9]+\.self_attn\.(?:k|q)_proj$": True,
    r".*layers\.\d+\..*\.(q|v)_proj": True,
    r"layers\.[^1]\d?\..+": False,
    "^layers.10.self_attn.q_proj": False,
}


@pytest.mark.parametrize(("pattern", "fits"), PATTERNS.items())
def test_patterns_of_layers(pattern: str, fits: bool) -> None:
    assert matching({pattern: 1}, NAME, 0) == fits == (get_pattern_key([pattern], NAME) == pattern)


SLOW = [
    "([a-z._0-9]+)+X",
    "(a|a)*b",
    ".?" * 5,
    "(a" * 2 + ")+" * 2,
    "(a",
    "a{9999}",
    ".*" * 5,
    "q" * 201,
    "(?=q)q",
    "",
]


@pytest.mark.parametrize("pattern", SLOW)
def test_patterns_that_are_not_matched(pattern: str) -> None:
    with pytest.raises(WorkhorseError, match="is invalid, or may take too long to match"):
        matching({pattern: 1}, NAME, 0)
