"""Every wiring, embedding and head, compared with its formula."""

import math

import pytest
import torch
from pydantic import TypeAdapter
from torch import Tensor, nn

from tests.nn.grid import make, random_tokens
from workhorse.nn import Context, DecoderConfig
from workhorse.nn.blocks import Block, BlockConfig
from workhorse.nn.embedding import EmbeddingConfig, HeadConfig

D_MODEL = 8
X = torch.randn(2, 5, D_MODEL, generator=torch.Generator().manual_seed(0))


def block(kind: str, **options: object) -> Block:
    config = TypeAdapter(BlockConfig).validate_python(
        {
            "kind": kind,
            "norm": {"kind": "layer_norm"},
            "attention": {"n_heads": 2},
            "feed_forward": {"kind": "mlp", "d_ff": 12},
            **options,
        }
    )
    built = config.build(D_MODEL, 0, "eager").eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in built.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    return built


def context() -> Context:
    return Context(2, 5, torch.device("cpu"))


WIRINGS = {
    # (kind, options): (after attention, after feed-forward), with m the residual multiplier
    "pre_norm": lambda x, b, a, f, m: (
        y := x + m * a(b.attention_norm(x)),
        y + m * f(b.feed_forward_norm(y)),
    )[1],
    "normed_residual": lambda x, b, a, f, m: (
        n := b.attention_norm(x),
        y := n + m * a(n),
        n := b.feed_forward_norm(y),
        n + m * f(n),
    )[-1],
    "no_attention_norm": lambda x, b, a, f, m: (
        y := x + m * a(x),
        y + m * f(b.feed_forward_norm(y)),
    )[1],
    "post_norm": lambda x, b, a, f, m: (
        y := b.attention_norm(x + m * a(x)),
        b.feed_forward_norm(y + m * f(y)),
    )[1],
    "reordered_norm": lambda x, b, a, f, m: (
        y := x + m * b.attention_norm(a(x)),
        y + m * b.feed_forward_norm(f(y)),
    )[1],
    "sandwich_norm": lambda x, b, a, f, m: (
        y := x + m * b.attention_output_norm(a(b.attention_norm(x))),
        y + m * b.feed_forward_output_norm(f(b.feed_forward_norm(y))),
    )[1],
    "parallel": lambda x, b, a, f, m: x + m * a(b.norm(x)) + m * f(b.norm(x)),
    "parallel_two_norms": lambda x, b, a, f, m: (
        x + m * a(b.attention_norm(x)) + m * f(b.feed_forward_norm(x))
    ),
}
OPTIONS = {
    "normed_residual": ("pre_norm", {"norm_residual": True}),
    "no_attention_norm": ("pre_norm", {"norm_attention": False}),
    "parallel_two_norms": ("parallel", {"norms": 2}),
}


@pytest.mark.parametrize("wiring", WIRINGS)
@pytest.mark.parametrize("multiplier", [1.0, 0.3])
def test_a_wiring_is_its_formula(wiring: str, multiplier: float) -> None:
    kind, options = OPTIONS.get(wiring, (wiring, {}))
    built = block(kind, residual_multiplier=multiplier, **options)

    def attention(x: Tensor) -> Tensor:
        return built.attention(x, context())

    expected = WIRINGS[wiring](X, built, attention, built.feed_forward, multiplier)
    assert torch.allclose(built(X, context()), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("wiring", "norms"),
    [
        ("pre_norm", 2),
        ("post_norm", 2),
        ("reordered_norm", 2),
        ("sandwich_norm", 4),
        ("parallel", 1),
        ("parallel_two_norms", 2),
        ("normed_residual", 2),
        ("no_attention_norm", 1),
    ],
)
def test_how_many_norms_a_wiring_has(wiring: str, norms: int) -> None:
    kind, options = OPTIONS.get(wiring, (wiring, {}))
    names = [n for n, _ in block(kind, **options).named_parameters() if n.endswith("norm.weight")]
    assert len(names) == norms


def test_dropout_acts_on_what_is_added_in_training_only() -> None:
    built = block("pre_norm", dropout=0.5)
    assert torch.equal(built(X, context()), built(X, context()))
    built.train()
    assert not torch.allclose(built(X, context()), built(X, context()))
    wholly = block("pre_norm", dropout=0.5).train()
    wholly.attention_branch = wholly.feed_forward_branch = nn.Dropout(1.0)
    assert torch.equal(wholly(X, context()), X)  # the residual itself is never dropped


def test_the_embedding_is_its_formula() -> None:
    """`norm(multiplier · project(table[token])) + position`."""
    config = EmbeddingConfig(
        position={"kind": "learned", "offset": 1},
        width=4,
        multiplier=3.0,
        norm={"kind": "layer_norm"},
    )
    embedding = config.build(11, D_MODEL, 6)
    for parameter in embedding.parameters():
        parameter.data = torch.randn_like(parameter)
    tokens = torch.tensor([[3, 1, 4]])
    vectors = embedding.tokens.weight[tokens] @ embedding.project.weight.T * 3.0
    expected = embedding.norm(vectors) + embedding.positions.table.weight[1:4]
    assert torch.allclose(embedding(tokens, torch.arange(3)[None]), expected, atol=1e-5)


def test_the_head_is_its_formula() -> None:
    """`cap(multiplier · (W norm(act(dense(x))) + bias))`."""
    config = HeadConfig(
        bias=True,
        multiplier=0.5,
        cap=2.0,
        transform={"norm": {"kind": "layer_norm"}, "activation": "relu", "bias": True},
    )
    head = config.build(11, D_MODEL, D_MODEL)
    for parameter in head.parameters():
        parameter.data = torch.randn_like(parameter)
    dense, _, norm = head.transform
    x = norm((X @ dense.weight.T + dense.bias).clamp(min=0))
    logits = 0.5 * (x @ head.proj.weight.T + head.proj.bias)
    assert torch.allclose(head(X), 2.0 * torch.tanh(logits / 2.0), atol=1e-5)


def decoder_config(**changes: object) -> DecoderConfig:
    return DecoderConfig.from_dict(
        {
            "vocab_size": 29,
            "d_model": 16,
            "n_layers": 1,
            "max_seq_len": 16,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "rms_norm"},
                    "attention": {"n_heads": 2},
                    "feed_forward": {"kind": "mlp", "d_ff": 12},
                }
            },
            **changes,
        }
    )


def test_a_tied_head_shares_one_parameter() -> None:
    tied, untied = decoder_config(head={"tied": True}).build(), decoder_config().build()
    assert tied.head.proj.weight is tied.embedding.tokens.weight
    counts = [sum(p.numel() for p in d.parameters()) for d in (tied, untied)]
    assert counts[1] - counts[0] == 29 * 16
    tokens = random_tokens(tied.config, 1, 4)
    tied(tokens).sum().backward()
    used_as_input = tied.embedding.tokens.weight.grad[tokens.unique()]
    assert (used_as_input.abs().sum(-1) > 0).all()
    assert (tied.embedding.tokens.weight.grad.abs().sum(-1) > 0).all()  # all rows are outputs


def test_a_tied_head_of_a_narrow_embedding_projects_back() -> None:
    decoder = make(decoder_config(embedding={"width": 6}, head={"tied": True}))
    assert decoder.head.proj.weight is decoder.embedding.tokens.weight
    assert decoder.head.proj.weight.shape == (29, 6)
    tokens = random_tokens(decoder.config, 1, 4)
    x = decoder.hidden(tokens)
    expected = x @ decoder.head.project.weight.T @ decoder.embedding.tokens.weight.T
    assert torch.allclose(decoder(tokens), expected, atol=1e-5)


def test_unembedding_the_last_position_gives_its_logits() -> None:
    decoder = make(decoder_config(head={"cap": 3.0}))
    tokens = random_tokens(decoder.config, 2, 6)
    last = decoder.unembed(decoder.hidden(tokens)[:, -1:])
    assert torch.allclose(last, decoder(tokens)[:, -1:], atol=1e-6)


def test_layers_follow_the_pattern() -> None:
    blocks = decoder_config().to_dict()["blocks"]
    narrow = {**blocks["main"], "feed_forward": {"kind": "mlp", "d_ff": 5}}
    both = {"a": blocks["main"], "b": narrow}
    tiled = decoder_config(n_layers=5, blocks=both, pattern=["a", "a", "b"])
    assert tiled.layer_names() == ["a", "a", "b", "a", "a"]
    widths = [layer.feed_forward.up_proj.out_features for layer in tiled.build().layers]
    assert widths == [12, 12, 5, 12, 12]
    assert decoder_config(n_layers=3).layer_names() == ["main"] * 3


def test_inverse_layer_scales() -> None:
    blocks = decoder_config().to_dict()["blocks"]
    blocks["main"]["attention"]["scale_by_layer"] = True
    layers = decoder_config(n_layers=3, blocks=blocks).build("eager").layers
    scales = [layer.attention.kernel.scoring.scale for layer in layers]
    assert scales == pytest.approx([1 / math.sqrt(8) / n for n in (1, 2, 3)])
