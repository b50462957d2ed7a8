"""Compares our reading and writing of a model type with transformers, on a random small model.

Every check returns a figure or raises. `tests/parity/test_families.py` asserts the bounds, and
`tests/parity/table.py` writes the figures to `docs/families.md`.
"""

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from workhorse.checkpoints.huggingface.export import write_huggingface
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.generate import GenerationConfig, generate
from workhorse.models.huggingface import Fields, family
from workhorse.models.huggingface.family import compare_plain, plain
from workhorse.nn import Decoder
from workhorse.nn.positions.rope import RopeConfig

VOCAB, SEQ, ROWS = 67, 21, 3
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
PROMPTS = ([5, 9, 23, 44, 8], [7, 11, 3], [31, 4, 6, 40, 41, 60, 12])
NEW_TOKENS = 8
# Older versions of transformers read some types differently (cohere_compass_text, dbrx).
pytest.importorskip("transformers", minversion="5.21")


@dataclass(frozen=True)
class Pair:
    """One random model, in transformers and in Workhorse, and the directory it was saved to."""

    folder: Path
    theirs: nn.Module
    ours: Decoder

    @property
    def tokens(self) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return torch.randint(3, VOCAB, (ROWS, SEQ), generator=generator)


@contextmanager
def quiet() -> Iterator[None]:
    """Silence warnings of transformers that do not matter for a random model."""
    before = hf.logging.get_verbosity()
    hf.logging.set_verbosity_error()
    hf.logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf.logging.set_verbosity(before)


def make(model_type: str, options: dict[str, Any], folder: Path) -> Pair:
    """Save a random model with transformers, and load it with Workhorse."""
    with quiet():
        theirs = randomised(hf.AutoModelForCausalLM.from_config(their_config(model_type, options)))
        theirs.save_pretrained(folder)
        theirs.generation_config.eos_token_id = None
    found = HuggingFaceDirectory(folder)
    assert found.remarks == [], found.remarks
    return Pair(folder, theirs, found.load_decoder(dtype=torch.float32))


def their_config(model_type: str, options: dict[str, Any]) -> hf.PretrainedConfig:
    """The transformers config; skips the test if transformers is too old for the type."""
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"transformers {hf.__version__} is too old for {model_type}")
    whole = {"vocab_size": VOCAB, **TOKENS, "attn_implementation": "eager", **options}
    return hf.AutoConfig.for_model(model_type, **whole)


@torch.no_grad()
def randomised(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw weights large enough for every part to matter; move norms and biases from 1 and 0."""
    generator = torch.Generator().manual_seed(seed)
    model.eval()
    for name, tensor in (*model.named_parameters(), *float_buffers(model)):
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.ndim < 2 or "norm" in name:
            tensor.add_(0.2 * noise)
        else:
            tensor.copy_(noise / tensor.shape[-1] ** 0.5)
    return model


def float_buffers(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the buffers that checkpoints store: biases of routers."""
    saved = model.state_dict()
    for name, buffer in model.named_buffers():
        if name in saved and buffer.is_floating_point() and "bias" in name:
            yield name, buffer


def relative(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference, relative to the scale of the logits."""
    return ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1.0)).item()


def depends_on_length(pair: Pair) -> bool:
    """True if RoPE angles depend on the length, so chunks cannot equal the whole sequence."""
    positions = (block.attention.position for block in pair.ours.config.blocks.values())
    return any(isinstance(one, RopeConfig) and one.depends_on_length for one in positions)


@torch.no_grad()
def full(pair: Pair) -> float:
    """Largest relative difference of the logits of whole sequences."""
    return relative(pair.ours(pair.tokens), pair.theirs(pair.tokens, use_cache=False).logits)


@torch.no_grad()
def cached(pair: Pair) -> float:
    """Largest relative difference of logits with our sequence in chunks through the cache."""
    reference = pair.theirs(pair.tokens, use_cache=False).logits
    cache = pair.ours.new_cache(ROWS, SEQ)
    sizes = (7, 1, 1, 5, 1, SEQ - 15)
    parts = [pair.ours(part, cache=cache) for part in pair.tokens.split(sizes, dim=1)]
    return relative(torch.cat(parts, dim=1), reference)


@torch.no_grad()
def ragged(pair: Pair) -> float:
    """Largest relative difference of logits with left-padded prompts; theirs run one by one."""
    longest = max(map(len, PROMPTS))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in PROMPTS])
    places = [[-1] * (longest - len(row)) + list(range(len(row))) for row in PROMPTS]
    ours = pair.ours(tokens, positions=torch.tensor(places))
    return max(
        relative(logits[-len(row) :], pair.theirs(torch.tensor([row])).logits[0])
        for logits, row in zip(ours, PROMPTS, strict=True)
    )


@torch.no_grad()
def generations(pair: Pair, beams: int) -> tuple[list[list[int]], list[list[int]]]:
    """Our and transformers' completions of each prompt, without an end-of-text token."""
    how = {"temperature": 0.0} if beams == 1 else {"beams": beams}
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, stop_tokens=(), **how)
    ours = generate(pair.ours, PROMPTS, config)
    theirs = []
    with quiet():
        for row in PROMPTS:
            prompt = torch.tensor([row])
            settings = hf.GenerationConfig(
                max_new_tokens=NEW_TOKENS,
                do_sample=False,
                num_beams=beams,
                eos_token_id=None,
                pad_token_id=0,
            )
            out = pair.theirs.generate(
                prompt, attention_mask=torch.ones_like(prompt), generation_config=settings
            )
            theirs.append(out[0, len(row) :].tolist())
    return [list(completion.tokens) for completion in ours], theirs


def written_back(pair: Pair, folder: Path) -> float:
    """Write our model, compare every byte with theirs, and load it with transformers.

    The reloaded weights have the same bits. The logits may differ, because a matmul may choose
    another kernel for weights at another address.

    Returns:
        The largest relative difference of logits between the first and the reloaded model.
    """
    source = HuggingFaceDirectory(pair.folder)
    write_huggingface(folder, pair.ours, family=source.family)
    before, after = (load_file(path / "model.safetensors") for path in (pair.folder, folder))
    assert_same_bytes(before, after)
    with quiet():
        again, info = hf.AutoModelForCausalLM.from_pretrained(
            folder,
            output_loading_info=True,
            attn_implementation=pair.theirs.config._attn_implementation,
        )
    assert type(again) is type(pair.theirs)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), (
        info
    )
    assert_same_bytes(pair.theirs.state_dict(), again.state_dict())
    with torch.no_grad():
        return relative(
            again.eval()(pair.tokens, use_cache=False).logits,
            pair.theirs(pair.tokens, use_cache=False).logits,
        )


def assert_same_bytes(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    """Assert equal names, shapes, dtypes and values."""
    assert sorted(before) == sorted(after), set(before) ^ set(after)
    for name, tensor in before.items():
        assert tensor.shape == after[name].shape, name
        assert tensor.dtype == after[name].dtype, name
        assert torch.equal(tensor, after[name]), name


def keys_with_wrong_defaults(model_type: str, options: dict[str, Any]) -> list[str]:
    """Config keys for which our default differs from the default of transformers."""
    with quiet():
        return list(_wrong_defaults(model_type, options))


def _wrong_defaults(model_type: str, options: dict[str, Any]) -> Iterator[str]:
    whole = json.loads(their_config(model_type, options).to_json_string(use_diff=False))
    for key in sorted(whole):
        if key in ("model_type", "architectures", "dtype", "transformers_version"):
            continue
        rest = {name: value for name, value in whole.items() if name != key}
        try:
            parsed = hf.AutoConfig.for_model(**rest).to_dict()
        except Exception:
            continue
        try:
            ours = family(model_type).read(Fields(rest))
        except ValueError:
            continue  # required key: an error is correct
        try:
            theirs = family(model_type).read(Fields(parsed))
        except ValueError as error:
            yield f"{key}: {error}"
            continue
        yield from (f"{key}: {one}" for one in compare_plain(plain(ours), plain(theirs)))
