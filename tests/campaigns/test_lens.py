"""Our tensors and attributions under TransformerLens's names, compared with TransformerLens 4.3."""

import logging
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse.inspect import Attribution, Trace, attribute, patch, trace

pytestmark = pytest.mark.campaign
with reference.quiet():
    bridges = pytest.importorskip(
        "transformer_lens.model_bridge", reason="needs pip install transformer_lens==4.3.0"
    )
    patching: Any = pytest.importorskip("transformer_lens.patching")
BOUND = 1e-5
TARGET = (5, 9)
OTHERS = {
    ("openai-gpt", "hook_resid_mid"),  # theirs is the sum after the feed-forward
    ("nanochat", "hook_embed"),  # theirs is before the norm of the embedding
    ("modernbert-decoder", "mlp.hook_pre"),  # theirs is the gate and the up projection together
}
"""Tensors that have another meaning in TransformerLens."""
PATCHES = {"x": "resid_pre", "attention_branch": "attn_out", "feed_forward_branch": "mlp_out"}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A tokenizer for models that have none."""
    words = models.WordLevel({str(i): i for i in range(reference.VOCAB)}, unk_token="0")
    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), bos_token="1", eos_token="2", pad_token="0"
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    made.save_pretrained(folder)
    return PreTrainedTokenizerFast.from_pretrained(folder)


@pytest.fixture(scope="module")
def worst() -> Iterator[dict[str, list[float]]]:
    """The largest differences by name, one per model type; printed at the end."""
    found: dict[str, list[float]] = defaultdict(list)
    yield found
    for name, values in sorted(found.items()):
        print(f"{name:26} {len(values):3} model types, largest difference {max(values):.1e}")


@pytest.mark.parametrize("model_type", ALL)
def test_names_and_attributions(
    model_type: str, tmp_path: Path, tokenizer: Any, worst: dict[str, list[float]]
) -> None:
    logging.disable(logging.WARNING)
    pair = reference.make(model_type, ALL[model_type][0], tmp_path)
    run = trace(pair.ours, pair.tokens)
    with reference.quiet():
        bridge = _bridge(pair, tokenizer)
        with torch.no_grad():
            logits, cache = bridge.run_with_cache(pair.tokens)
    assert reference.relative(run.logits, logits) <= BOUND
    largest: dict[str, float] = defaultdict(float)
    for name in cache:
        kind = re.sub(r"blocks\.\d+\.", "", name)
        if (model_type, kind) not in OTHERS and name in run:
            largest[kind] = max(largest[kind], _difference(run, cache, name))
    assert {"hook_resid_pre", "attn.hook_pattern", "unembed.hook_out"} <= largest.keys()
    assert max(largest.values()) <= BOUND, largest
    for kind, value in largest.items():
        worst[kind].append(value)

    found = attribute(pair.ours, pair.tokens[0], TARGET)
    with reference.quiet():
        terms = _their_terms(bridge, pair.tokens[:1])
    if terms is None:
        return
    ours = [_our_term(found, label) for label in terms]
    apart = max(abs(own - their) for own, their in zip(ours, terms.values(), strict=True))
    # If the terms differ, theirs do not sum to the logit, which they divide; ours do.
    theirs = sum(terms.values()) + sum(found.biases.values())
    assert found.total == pytest.approx(found.logit, abs=1e-8)
    if abs(theirs - found.logit) <= 1e-4:
        assert apart <= 1e-4
        worst["logit_attrs"].append(apart)
    else:
        worst["logit_attrs that do not sum"].append(apart)


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "gpt_neox", "qwen3"])
def test_activation_patching(model_type: str, tmp_path: Path, tokenizer: Any) -> None:
    def metric(logits: Tensor) -> Tensor:
        return (logits[:, -1, TARGET[0]] - logits[:, -1, TARGET[1]]).mean()

    pair = reference.make(model_type, ALL[model_type][0], tmp_path)
    clean, corrupt = pair.tokens[:1], pair.tokens[1:2]
    ours = patch(pair.ours, clean, corrupt, metric).values
    with reference.quiet(), torch.no_grad():
        bridge = _bridge(pair, tokenizer)
        _, cache = bridge.run_with_cache(clean)
        for kind, name in PATCHES.items():
            theirs = getattr(patching, f"get_act_patch_{name}")(bridge, corrupt, cache, metric)
            assert (ours[kind] - theirs).abs().max() <= BOUND


def _bridge(pair: reference.Pair, tokenizer: Any) -> Any:
    try:
        return bridges.TransformerBridge.boot_transformers(
            str(pair.folder), hf_model=pair.theirs, device="cpu", tokenizer=tokenizer
        )
    except ValueError as error:
        if "Could not determine supported architecture" not in str(error):
            raise
        pytest.skip("TransformerLens has no adapter for this model type")


def _difference(run: Trace, cache: Any, name: str) -> float:
    ours, theirs = run[name], cache[name]
    if name == "hook_pos_embed":  # ours has one row for all sequences
        ours = ours.expand_as(theirs)
    if name.endswith("attn_scores"):
        return _difference_of_scores(ours, theirs, cache[name.replace("attn_scores", "pattern")])
    theirs = theirs.reshape(ours.shape)  # their heads of latent attention, and rows of OPT
    apart = reference.relative(ours, theirs)
    if apart > BOUND and name.endswith(("_q", "_k")):  # the pairs of features that RoPE rotates
        return reference.relative(ours.sort(-1).values, theirs.sort(-1).values)
    return apart


def _difference_of_scores(ours: Tensor, theirs: Tensor, pattern: Tensor) -> float:
    """Difference of scores; or, where theirs are weights or shifted, of the softmax of ours."""
    hidden = (ours <= torch.finfo(ours.dtype).min) | (theirs <= torch.finfo(theirs.dtype).min)
    apart = reference.relative(ours.masked_fill(hidden, 0), theirs.masked_fill(hidden, 0))
    return apart if apart <= BOUND else reference.relative(ours.softmax(-1), pattern)


def _their_terms(bridge: Any, tokens: Tensor) -> dict[str, float] | None:
    """The direct logit attribution of TransformerLens, or None if it has none for the type."""
    try:
        bridge.enable_compatibility_mode()
        with torch.no_grad():
            _, cache = bridge.run_with_cache(tokens)
            stack, labels = cache.decompose_resid(mode="all", pos_slice=-1, return_labels=True)
            terms = cache.logit_attrs(stack, *TARGET, pos_slice=-1)[:, 0]
    except (RuntimeError, IndexError):  # vaultgemma, openai-gpt
        return None
    return dict(zip(labels, terms.tolist(), strict=True))


def _our_term(found: Attribution, label: str) -> float:
    if label in ("embed", "pos_embed"):
        return found.token if label == "embed" else found.position
    layer, kind = label.split("_", 1)
    branch = "attention_branch" if kind == "attn_out" else "feed_forward_branch"
    return found.terms[f"layers.{layer}.{branch}"].item()
