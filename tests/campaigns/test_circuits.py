"""Known circuits are found: trained induction heads, and edges of circuits set by hand."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.inspect.circuits import CIRCUITS, auroc
from tests.parity import reference
from tests.parity.all_cases import ALL
from workhorse.inspect import (
    Tracer,
    ablate,
    edge_scores,
    head_labels,
    head_scores,
    patch,
    repeated_tokens,
)
from workhorse.nn import Decoder, DecoderConfig

pytestmark = pytest.mark.campaign
VOCAB, SEQ, BATCH = 32, 40, 32
SEEDS = 5
ATTENTION_ONLY = f"""
vocab_size: {VOCAB}
d_model: 64
n_layers: 2
max_seq_len: {SEQ}
embedding: {{position: {{kind: learned}}}}
blocks:
  main:
    kind: pre_norm
    norm: {{kind: rms_norm}}
    attention: {{n_heads: 4}}
    feed_forward: {{kind: mlp, d_ff: 1}}
final_norm: {{kind: rms_norm}}
"""
Heads = list[tuple[int, int]]


@pytest.mark.parametrize("seed", range(SEEDS))
def test_induction_heads(seed: int) -> None:
    decoder = _trained(seed)
    scores = head_scores(decoder, seed=100 + seed)
    labels = head_labels(scores, threshold=0.3)
    heads = [(layer, head) for layer in range(2) for head in range(4)]
    induction = [(layer, head) for layer, head in heads if labels[layer][head] == "induction"]
    control = [(layer, head) for layer, head in heads if labels[layer][head] is None]
    best = scores["induction"].max().item()
    first, second = _losses(decoder, [])
    gain = first - second
    lost = [(_losses(decoder, each)[1] - second) / gain for each in (induction, control)]
    print(
        f"seed {seed}: {len(induction)} induction heads, best score {best:.3f}; "
        f"gain {gain:.2f} nats, lost without them {lost[0]:.1%}, "
        f"without {len(control)} control heads {lost[1]:.1%}"
    )
    assert best >= 0.9
    assert lost[0] >= 0.9
    assert control
    assert lost[1] < 0.05


@pytest.mark.parametrize("name", CIRCUITS)
def test_edges(name: str) -> None:
    found: dict[str, list[float]] = {"exact": [], "gradient": []}
    for seed in range(SEEDS):
        made = CIRCUITS[name](seed)
        given = made.decoder(made.clean)[:, -1].argmax(-1)
        assert (given == made.answers).float().mean() >= 0.9
        for method in ("exact", "gradient"):
            edges = edge_scores(made.decoder, made.clean, made.corrupt, made.metric, method=method)
            found[method].append(auroc(edges, made.edges))
    whole = edges.scores.isfinite().sum().item()
    lowest = {method: min(values) for method, values in found.items()}
    print(
        f"{name:26} {len(made.edges)} of {whole:3} edges, lowest AUROC of {SEEDS} seeds: "
        f"exact {lowest['exact']:.4f}, gradient {lowest['gradient']:.4f}"
    )
    assert lowest["exact"] >= 0.98


def _trained(seed: int) -> Decoder:
    """Two layers of attention, trained on random sequences that repeat with random periods.

    The feed-forwards always add zero. With a fixed period, a head could learn its length.
    """
    torch.manual_seed(seed)
    decoder = DecoderConfig.from_yaml(ATTENTION_ONLY).build()
    for name, weight in decoder.named_parameters():
        if "embedding" in name:
            weight.data.mul_(25)  # positions that differ more: the heads form sooner
        elif "down_proj" in name:
            weight.requires_grad_(False).zero_()
    learned = [weight for weight in decoder.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(learned, lr=3e-3, weight_decay=0.01, betas=(0.9, 0.98))
    remaining = None
    for step in range(2000):
        rate = min(1, (step + 1) / 50) if remaining is None else remaining / 500
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        places = torch.arange(SEQ) % torch.randint(6, 21, (BATCH, 1))
        tokens = torch.rand(BATCH, VOCAB).argsort(-1).gather(1, places)
        loss = _loss(decoder(tokens[:, :-1]), tokens)
        optimizer.zero_grad()
        loss.mean().backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if remaining is None and loss[:, 25:].mean() < 0.1:
            remaining = 500  # the heads have formed: decay the learning rate
        elif remaining is not None:
            remaining -= 1
            if remaining == 0:
                return decoder
    raise AssertionError(f"seed {seed}: no induction heads in {step + 1} steps")


def _loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Losses of the tokens after the first, (batch, seq - 1)."""
    return F.cross_entropy(logits.transpose(1, 2), tokens[:, 1:], reduction="none")


def _losses(decoder: Decoder, ablated: Heads) -> tuple[float, float]:
    """Losses of random tokens and of their repetition, with heads set to their means."""

    def ablate(x: Tensor, layer: int) -> Tensor:
        own = [head for at, head in ablated if at == layer]
        x = x.clone()
        x[:, own] = x[:, own].mean((0, 2), keepdim=True)
        return x

    tokens = repeated_tokens(VOCAB, SEQ // 2, 64, seed=7)
    edits = {
        f"layers.{layer}.attention.kernel": lambda x, layer=layer: ablate(x, layer)
        for layer in range(2)
    }
    losses = _loss(Tracer(decoder)(tokens, edits=edits, keep=()).logits[:, :-1], tokens)
    half = SEQ // 2
    return losses[:, : half - 1].mean().item(), losses[:, half:].mean().item()


@pytest.mark.parametrize("model_type", ALL)
def test_every_model_type(model_type: str, tmp_path: Path) -> None:
    """The gradient approximates the exact effect of a small change of one token."""
    made = reference.make(model_type, ALL[model_type][0], tmp_path).ours
    clean, corrupt = torch.tensor([[5, 9, 23, 44, 8, 31]]), torch.tensor([[5, 9, 24, 44, 8, 31]])
    table = made.embedding.tokens.weight
    with torch.no_grad():
        table[24] = table[23] + 2e-3 * table.std() * torch.randn(table.shape[1])
    exact, gradient = (
        edge_scores(made, clean, corrupt, lambda logits: logits[0, -1, 5], method=method).scores
        for method in ("exact", "gradient")
    )
    assert torch.equal(exact.isnan(), gradient.isnan())
    edges = exact.isfinite()
    assert F.cosine_similarity(exact[edges], gradient[edges], dim=0) > 0.98
    ablated = ablate(made, clean, lambda logits: logits[0, -1, 5], parts="neurons")
    assert all(effect.any() for effect in ablated.values())
    restored = patch(made, clean, corrupt, lambda logits: logits[0, -1, 5]).restored["x"][0]
    assert restored[2] == pytest.approx(1, abs=0.05)  # only that token differs
