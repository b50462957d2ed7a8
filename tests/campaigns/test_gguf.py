"""Campaign: llama.cpp gives our logits and our tokens.

    make campaign-gguf    or    python -m pytest -m campaign tests/campaigns/test_gguf.py

It needs llama-cpp-python, in the environment or on PYTHONPATH.

In float32 the two differ only by rounding, except for GELU, which llama.cpp looks up in a float16
table. In the other types llama.cpp rounds the weights, as stored in the file, and the input of each
matmul to the same type. Our decoder does both here, so that most short sequences give the same
logits up to float32 rounding. In other sequences, a value was so near the middle between two steps
that the programs rounded it differently, an error of one step of the type.
"""

import dataclasses
import importlib.util
import json
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from torch import Tensor, nn

from tests.checkpoints.gguf_cases import EACH, VOCAB, make
from tests.tokenizers.conftest import CORPUS
from workhorse.checkpoints.gguf import (
    GgufFile,
    GgufType,
    splitting,
    tensors,
    vocabulary,
    write,
    write_gguf,
)
from workhorse.checkpoints.gguf.metadata import model_metadata
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.latent import LatentAttention
from workhorse.nn.experts.mixture import GroupedLinear
from workhorse.nn.experts.router import Router
from workhorse.tokenizers import Tokenizer, load_tokenizer, tokenizer_config, train_tokenizer

gguf = pytest.importorskip("gguf")
Kind = gguf.GGMLQuantizationType

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.skipif(
        importlib.util.find_spec("llama_cpp") is None,
        reason="llama-cpp-python is not installed; pip install llama-cpp-python",
    ),
]
DTYPES = {"f32": Kind.F32, "f16": Kind.F16, "bf16": Kind.BF16, "q8_0": Kind.Q8_0}
SHAPES = {"f32": (2, 40), "f16": (15, 3), "bf16": (15, 3), "q8_0": (15, 3)}
"""Sequences and their length; short ones if different rounding would hide everything."""
TYPICAL = {"f32": 1e-5, "f16": 5e-4, "bf16": 1e-5, "q8_0": 1e-5}
"""Bounds of the largest difference, relative to the largest logit, in the median sequence. float16
is so fine that most sequences have a value that is rounded differently."""
WORST = {"f32": 1e-5, "f16": 2e-3, "bf16": 2e-2, "q8_0": 4e-2}
"""The same bound for every sequence: a few steps of the type."""
DEEP = 16
"""Number of layers from which every sequence has a value that is rounded differently."""
APART = {"f32": 1e-5, "f16": 1e-3, "bf16": 1e-2, "q8_0": 4e-2}
"""Bounds of the median if every sequence has values that are rounded differently: llama.cpp
multiplies latent attention's matrices in another order, and its GELU is a float16 table. In a
mixture with latent attention, a few sequences then choose another expert, and the largest
difference has no bound."""
GELU_STEP = 1e-3
"""Error of the GELU table, in every type."""


def ask(folder: Path, jobs: list[dict[str, Any]]) -> None:
    """Run jobs in llama.cpp."""
    request = folder / "request.json"
    request.write_text(json.dumps(jobs))
    command = [sys.executable, "-m", "tests.campaigns.llama_cpp_driver", str(request)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def logits_of(files: list[Path], tokens: list[Tensor], folder: Path) -> list[Tensor]:
    """llama.cpp's logits for each file, `(batch, seq, vocab)`."""
    jobs = [
        {"file": str(file), "tokens": some.tolist(), "out": f"{file}.npy"}
        for file, some in zip(files, tokens, strict=True)
    ]
    ask(folder, jobs)
    return [torch.from_numpy(np.load(job["out"])) for job in jobs]


def relative(theirs: Tensor, ours: Tensor) -> Tensor:
    """The largest difference in each sequence, relative to the largest logit."""
    return (theirs - ours).abs().amax(dim=(1, 2)) / ours.abs().max()


def rounded(values: Tensor, kind: Any) -> Tensor:
    """Values as a file of a type stores them."""
    if kind is Kind.F32 or (kind is Kind.Q8_0 and values.shape[-1] % 32):
        return values
    flat = values.detach().contiguous().numpy()
    return torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(flat, kind), kind))


@contextmanager
def rounding(decoder: Decoder, kind: Any) -> Iterator[None]:
    """Round the decoder's matrices and the inputs of their matmuls to a type."""
    exact = {name: weight.clone() for name, weight in decoder.state_dict().items()}
    precise = {
        name
        for name, module in decoder.named_modules()
        if isinstance(module, Router) or name.endswith("shared_gate")
    }
    hooks = []
    for name, module in decoder.named_modules():
        if any(name.startswith(one) for one in precise):
            continue
        if isinstance(module, nn.Linear | nn.Embedding | GroupedLinear):
            module.weight.data = rounded(module.weight.data, kind)
        if isinstance(module, nn.Linear | GroupedLinear):

            def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
                return (rounded(inputs[0], kind), *inputs[1:])

            hooks.append(module.register_forward_pre_hook(hook))
    yield
    for one in hooks:
        one.remove()
    decoder.load_state_dict(exact)
    decoder.tie_weights()


def as_there(data: Any) -> Any:
    """A plain config with the approximations of llama.cpp that `write_gguf` warns about.

    GELU has its tanh form, YaRN's ramp has its ends at whole pairs, and LongRoPE always uses the
    factors for long contexts, because the driver's context is long.
    """
    if isinstance(data, list):
        return [as_there(item) for item in data]
    if not isinstance(data, dict):
        return data
    data = {key: as_there(value) for key, value in data.items()}
    changed = {
        "activation": "gelu_tanh" if data.get("activation") == "gelu" else data.get("activation"),
        "truncate": True,
        "short_factor": data.get("long_factor"),
    }
    return data | {key: value for key, value in changed.items() if key in data}


def twin_of(decoder: Decoder) -> Decoder:
    """A decoder with the same weights that computes as llama.cpp does."""
    config = DecoderConfig.from_dict(as_there(decoder.config.to_dict()))
    twin = config.build("eager").eval()
    twin.load_state_dict(decoder.state_dict())
    return twin


@pytest.mark.parametrize(("model_type", "number"), EACH)
@torch.no_grad()
def test_logits(model_type: str, number: int, tmp_path: Path) -> None:
    decoder = make(model_type, number)
    dtypes = list(DTYPES) if decoder.config.n_layers < DEEP else ["f32"]
    files = [tmp_path / f"{dtype}.gguf" for dtype in dtypes]
    tokens = [torch.randint(0, VOCAB, SHAPES[dtype]) for dtype in dtypes]
    for file, dtype in zip(files, dtypes, strict=True):
        write_gguf(file, decoder, model_type=model_type, dtype=dtype)
    twin = twin_of(decoder)
    gelu = any(isinstance(module, nn.GELU) for module in twin.modules())
    found: dict[str, tuple[float, float]] = {}
    logits = logits_of(files, tokens, tmp_path)
    for dtype, some, theirs in zip(dtypes, tokens, logits, strict=True):
        with rounding(twin, DTYPES[dtype]):
            errors = relative(theirs, twin(some))
        found[dtype] = errors.median().item(), errors.max().item()
    shown = {dtype: f"{typical:.0e} {worst:.0e}" for dtype, (typical, worst) in found.items()}
    print(f"\n{model_type}-{number}", shown)
    latent = any(isinstance(module, LatentAttention) for module in twin.modules())
    least = GELU_STEP if gelu else 0.0
    for dtype, (typical, worst) in found.items():
        assert typical <= max(least, (APART if gelu or latent else TYPICAL)[dtype]), dtype
        assert (dtype != "f32" and latent) or worst <= max(least, WORST[dtype]), dtype


def rounded_to_q8_k(values: Tensor) -> Tensor:
    """Round as llama.cpp does for K-quant matmuls: 8 bits, and a float32 scale per 256 values."""
    blocks = values.unflatten(-1, (-1, 256))
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    inverse = -127 / largest
    return ((inverse * blocks).round().clamp(max=127) / inverse).flatten(-2)


@pytest.mark.parametrize("dtype", ["q8_0", "q4_0", "q4_k"])
@torch.no_grad()
def test_logits_of_a_quantised_file_that_is_read(dtype: GgufType, tmp_path: Path) -> None:
    """The weights are read from the file; inputs of matmuls are rounded as in llama.cpp."""
    file = tmp_path / f"{dtype}.gguf"
    write_gguf(
        file,
        make("llama", hidden_size=256, intermediate_size=512),
        model_type="llama",
        dtype=dtype,
    )
    ours = GgufFile(file).load_decoder(kernel="eager")
    for name, module in ours.named_modules():
        if isinstance(module, nn.Linear):
            fine = dtype != "q4_k" or name.startswith("head")

            def hook(_: nn.Module, inputs: tuple[Any, ...], fine: bool = fine) -> tuple[Any, ...]:
                change = (lambda x: rounded(x, Kind.Q8_0)) if fine else rounded_to_q8_k
                return (change(inputs[0]), *inputs[1:])

            module.register_forward_pre_hook(hook)
    tokens = torch.randint(0, VOCAB, SHAPES["q8_0"])
    (theirs,) = logits_of([file], [tokens], tmp_path)
    errors = relative(theirs, ours(tokens))
    print(f"\n{dtype}: median {errors.median():.1e}, worst {errors.max():.1e}")
    assert errors.median() <= 1e-3


FUSED_WRONG = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_up": ("ffn_up", "ffn_gate")}
Patch = Callable[[pytest.MonkeyPatch], None]


def patch_metadata(change: dict[str, Any]) -> Patch:
    """Change the values of keys in the file; None removes a key."""

    def patched(monkeypatch: pytest.MonkeyPatch) -> None:
        def metadata(architecture: Any, data: Any) -> dict[str, Any]:
            keys = {**model_metadata(architecture, data)}
            names = {name: f"{architecture.name}.{name}" for name in change}
            assert all(names[name] in keys for name in change)
            changed = {names[name]: value for name, value in change.items()}
            return {key: value for key, value in (keys | changed).items() if value is not None}

        monkeypatch.setattr(write, "model_metadata", metadata)

    return patched


def patch_tensors(name: str, value: object) -> Patch:
    return lambda monkeypatch: monkeypatch.setattr(tensors, name, value)


def swapped(architecture: str, field: str, value: object) -> Patch:
    """Change a field of an architecture."""

    def patched(monkeypatch: pytest.MonkeyPatch) -> None:
        entries = tuple(
            dataclasses.replace(one, **{field: value}) if one.name == architecture else one
            for one in write.ARCHITECTURES
        )
        monkeypatch.setattr(write, "ARCHITECTURES", entries)

    return patched


MISTAKES: dict[str, tuple[str, int, Patch]] = {
    "rows of q and k unpermuted": ("llama", 0, swapped("llama", "pairing", "half")),
    "rows of q and k permuted": ("qwen2", 0, swapped("qwen2", "pairing", "interleaved")),
    "norm weight without the added 1": (
        "gemma",
        0,
        patch_tensors("_offset_weights", lambda _: set()),
    ),
    "eps": ("llama", 0, patch_metadata({"attention.layer_norm_rms_epsilon": 1e-3})),
    "theta": ("llama", 0, patch_metadata({"rope.freq_base": 20000.0})),
    "no factors of llama3": ("llama", 2, patch_tensors("_rope_factors", lambda _: {})),
    "yarn's factor": ("llama", 3, patch_metadata({"rope.scaling.factor": 2.0})),
    "yarn's amplitude": ("llama", 5, patch_metadata({"rope.scaling.attn_factor": None})),
    "no linear scaling": ("llama", 4, patch_metadata({"rope.scaling.factor": None})),
    "window": ("gemma2", 0, patch_metadata({"attention.sliding_window": 9})),
    "layers with windows": (
        "gemma2",
        0,
        patch_metadata({"attention.sliding_window_pattern": [False, True, False]}),
    ),
    "cap of scores": ("gemma2", 0, patch_metadata({"attn_logit_softcapping": 5.0})),
    "cap of logits": ("gemma2", 0, patch_metadata({"final_logit_softcapping": 3.0})),
    "theta of local layers": ("gemma3_text", 0, patch_metadata({"rope.freq_base_swa": 1e6})),
    "q and k swapped": (
        "gpt2",
        0,
        swapped("gpt2", "fused", {"attn_qkv": ("attn_k", "attn_q", "attn_v")}),
    ),
    "gate and up swapped": ("phi3", 0, swapped("phi3", "fused", FUSED_WRONG)),
    "experts per token": ("mixtral", 0, patch_metadata({"expert_used_count": 3})),
    "score scale": ("granite", 0, patch_metadata({"attention.scale": None})),
    "residual scale": ("granite", 0, patch_metadata({"residual_scale": None})),
    "logit scale": ("granite", 0, patch_metadata({"logit_scale": 1.0})),
    "rotary width": ("phi", 0, patch_metadata({"rope.dimension_count": 32})),
    "expert gating": ("dots1", 0, patch_metadata({"expert_gating_func": 1})),
}


@pytest.mark.parametrize("mistake", MISTAKES)
@torch.no_grad()
def test_a_mistake_is_seen(mistake: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file with one mistake gives logits that are far off."""
    model_type, number, patch = MISTAKES[mistake]
    decoder = make(model_type, number)
    patch(monkeypatch)
    file, tokens = tmp_path / "wrong.gguf", torch.randint(0, VOCAB, SHAPES["f32"])
    write_gguf(file, decoder, model_type=model_type, dtype="f32")
    (theirs,) = logits_of([file], [tokens], tmp_path)
    twin = twin_of(decoder)
    error = relative(theirs, twin(tokens)).max().item()
    gelu = any(isinstance(module, nn.GELU) for module in twin.modules())
    print(f"\n{mistake}: {error:.1e}")
    assert error > 3 * (GELU_STEP if gelu else WORST["f32"])


PAGE = [
    *CORPUS,
    "",
    " ",
    "  two  spaces   three\t\ttabs \n\n\nlines\r\nmore\r\n \n x",
    "I'm, we'll, they'Re, DON'T, it's; rock'n'roll 'quoted' ''",
    "1 12 123 1234 12345 1234567 3.14159 1,000,000 ٣٤٥ ½ Ⅷ x2 2x",
    "snake_case camelCase HTMLParser __init__ (self) [i+1] {a: b} -> != // /* */ #!@$%^&",
    "café cafe\u0301 naïve Ελληνικά עברית العربية 한국어 中文字符 ไทย 🦊👩‍👩‍👧",
    "marks: e\u0301\u0301 !!\u0301 --\u0302",
    "The END of Mr. O'Neill's   trailing spaces   ",
]


def byte_level(pre_tokenizer: pre_tokenizers.PreTokenizer, *, ignore_merges: bool) -> Tokenizer:
    """A small byte-level tokenizer with a splitting rule."""
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500,
        special_tokens=["<|begin|>", "<|end|>"],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    backend.train_from_iterator(PAGE, trainer)
    return Tokenizer(backend.to_str(), {"bos": "<|begin|>", "eos": "<|end|>"})


def split_by(rule: str) -> pre_tokenizers.PreTokenizer:
    if rule == splitting.GPT2:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if rule == splitting.DIGITS:
        return pre_tokenizers.Digits(individual_digits=True)
    return pre_tokenizers.Split(Regex(rule), behavior="isolated")


def tokens_of(tokenizer: Tokenizer, folder: Path) -> tuple[list[list[int]], list[str]]:
    """The ids that llama.cpp gives for `PAGE`, and the remarks of `write_gguf`."""
    file, out = folder / "words.gguf", folder / "ids.json"
    decoder = make("llama", vocab_size=tokenizer.vocab_size)
    remarks = write_gguf(file, decoder, model_type="llama", tokenizer=tokenizer)
    ask(folder, [{"file": str(file), "texts": PAGE, "out": str(out)}])
    return json.loads(out.read_text()), remarks


def split_apart(tokenizer: Tokenizer, theirs: list[list[int]]) -> list[str]:
    """The strings of `PAGE` that llama.cpp tokenises differently."""
    ours = tokenizer.encode_batch(PAGE)
    return [text for text, ids, others in zip(PAGE, ours, theirs, strict=True) if ids != others]


def tokenizer_of(rules: tuple[str, ...], ignore_merges: bool) -> Tokenizer:
    steps = [split_by(rule) for rule in rules]
    if splitting.GPT2 not in rules:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    return byte_level(pre_tokenizers.Sequence(steps), ignore_merges=ignore_merges)


@pytest.mark.parametrize("rule", splitting.RULES, ids=list(splitting.RULES.values()))
def test_tokens_of_byte_level_bpe(rule: tuple[tuple[str, ...], bool], tmp_path: Path) -> None:
    tokenizer = tokenizer_of(*rule)
    theirs, remarks = tokens_of(tokenizer, tmp_path)
    assert split_apart(tokenizer, theirs) == []
    assert remarks == []


@pytest.mark.parametrize("rule", splitting.NEAR, ids=[name for name, _ in splitting.NEAR.values()])
def test_tokens_of_rules_that_are_near(rule: tuple[tuple[str, ...], bool], tmp_path: Path) -> None:
    """Strings without combining marks have the same tokens, and the remark names the marks."""
    tokenizer = tokenizer_of(*rule)
    theirs, remarks = tokens_of(tokenizer, tmp_path)
    different = split_apart(tokenizer, theirs)
    assert different
    assert all(any(unicodedata.category(sign)[0] == "M" for sign in text) for text in different)
    assert len(remarks) == 1
    assert "combining marks" in remarks[0]


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning"
)  # SentencePiece's SWIG types have no module
def test_tokens_of_sentencepiece(tmp_path: Path) -> None:
    sentencepiece = pytest.importorskip("sentencepiece")
    stem, corpus = tmp_path / "model", tmp_path / "corpus.txt"
    corpus.write_text("\n".join(PAGE))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(stem),
        vocab_size=600,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    tokenizer = load_tokenizer(stem.with_suffix(".model"))
    theirs, remarks = tokens_of(tokenizer, tmp_path)
    assert split_apart(tokenizer, theirs) == []
    assert remarks == []


def test_tokens_of_our_own_byte_fallback(tmp_path: Path) -> None:
    """Tokens differ only in runs of spaces, as the remark says."""
    config = tokenizer_config({"kind": "byte_fallback_bpe", "vocab_size": 600})
    tokenizer = train_tokenizer(config, PAGE)
    theirs, remarks = tokens_of(tokenizer, tmp_path)
    different = split_apart(tokenizer, theirs)
    assert all("  " in f" {text}" for text in different)
    assert vocabulary.RUNS_OF_SPACES in remarks
