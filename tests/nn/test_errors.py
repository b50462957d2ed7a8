"""Messages for invalid configs and calls: one line with fact, value and remedy.

Errors of a single part (attention, caches, positions, documents, norms) are tested with that part.
"""

from typing import Any

import pytest
import torch

from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError
from workhorse.nn import Context, DecoderConfig

BLOCK = {
    "kind": "pre_norm",
    "norm": {"kind": "rms_norm"},
    "attention": {"n_heads": 2},
    "feed_forward": {"kind": "mlp", "d_ff": 8},
}
DATA = {
    "vocab_size": 11,
    "d_model": 8,
    "n_layers": 2,
    "max_seq_len": 8,
    "blocks": {"main": BLOCK},
}


LATENT = {"kv_rank": 4, "nope_dim": 4, "rope_dim": 2, "value_dim": 4}


def attention(**options: object) -> dict[str, object]:
    return {"blocks": {"main": {**BLOCK, "attention": {"n_heads": 2, **options}}}}


def rope(**scaling: object) -> dict[str, object]:
    return attention(position={"kind": "rope", "scaling": scaling})


BAD = [
    ({"vocab_sise": 3}, "unknown key 'vocab_sise'; did you mean 'vocab_size'?"),
    ({"n_layers": 0}, "n_layers: 0 is too small; give a whole number from 1 to 100000"),
    ({"blocks": {}}, "blocks: no block is defined; define at least one"),
    (
        {"blocks": {"a": BLOCK, "b": BLOCK}},
        "pattern: required with 2 blocks; list their names in order",
    ),
    (
        {"pattern": ["main"] * 3},
        "pattern: 3 names are more than n_layers=2; remove some",
    ),
    ({"pattern": ["mian"]}, "pattern: no block 'mian'; did you mean 'main'?"),
    (
        {"blocks": {"a": BLOCK, "b": BLOCK}, "pattern": ["a"]},
        "blocks.b: no layer uses this block; remove it",
    ),
    (
        {"d_model": 9},
        "blocks.main.attention: d_model=9 is not divisible by n_heads=2; choose a divisor, or give",
    ),
    (
        {"d_model": 6, **attention(position={"kind": "rope"})},
        "blocks.main.attention: fraction=1.0 of head_dim=3 rotates 3 features, which cannot be",
    ),
    (
        attention(n_heads=12, n_kv_heads=5),
        "blocks.main.attention: n_heads=12 is not divisible by n_kv_heads=5; choose a divisor of",
    ),
    (
        attention(n_hedas=12),
        "blocks.main.attention: unknown key 'n_hedas'; did you mean 'n_heads'?",
    ),
    (
        attention(position={"kind": "rop"}),
        "blocks.main.attention.position: unknown kind 'rop'; did you mean 'rope'?",
    ),
    (
        attention(position="learned"),
        "blocks.main.attention.position: unknown kind 'learned'; set this kind of position in "
        "model.embedding.position",
    ),
    (
        attention(position={"kind": "sinusoidal"}),
        "blocks.main.attention.position: unknown kind 'sinusoidal'; set this kind of "
        "position in model.embedding.position",
    ),
    (
        {"embedding": {"position": {"kind": "rope"}}},
        "embedding.position: unknown kind 'rope'; set this kind of position in "
        "model.blocks.NAME.attention.position",
    ),
    (
        {"position": "learned"},
        "unknown key 'position'; set learned or sinusoidal positions in model.embedding.position",
    ),
    (
        {"blocks": {"main": {**BLOCK, "kind": "prenorm"}}},
        "blocks.main: unknown kind 'prenorm'; did you mean 'pre_norm'?",
    ),
    (
        {"blocks": {"main": {**BLOCK, "norm": {"kind": "batch_norm"}}}},
        "blocks.main.norm: unknown kind 'batch_norm'; did you mean ",
    ),
    (
        {
            "blocks": {
                "main": {**BLOCK, "feed_forward": {"kind": "mlp", "d_ff": 8, "activation": "tan"}}
            }
        },
        "blocks.main.feed_forward.activation: 'tan' is not allowed; give 'relu', ",
    ),
    (
        {"head": {"cap": -1}},
        "head.cap: -1 is too small; give a number above 0 or null",
    ),
    (
        {"embedding": {"dropout": 1.0}},
        "embedding.dropout: 1.0 is too large; give a number from 0 to below 1",
    ),
    (
        rope(kind="yarn", factor=2, original_max_seq_len=8, beta_fast=1, beta_slow=2),
        "blocks.main.attention.position.scaling: beta_fast=1.0 is not above beta_slow=2.0; swap or",
    ),
    (
        rope(kind="yarn", factor=2, original_max_seq_len=8, beta_slow=0),
        "blocks.main.attention.position.scaling.beta_slow: 0 is too small; give a number above 0",
    ),
    (
        rope(
            kind="longrope",
            factor=2,
            original_max_seq_len=8,
            short_factor=[1, 1],
            long_factor=[1, 1, 1],
        ),
        "blocks.main.attention: longrope has 2 short and 3 long factors for 2 pairs; give one",
    ),
    (
        attention(position={"kind": "alibi", "bfloat16": True}, causal=False),
        "blocks.main.attention: position.bfloat16=true needs causal=true: its bias depends only on",
    ),
    (
        attention(kind="latent_atention"),
        "blocks.main.attention: unknown kind 'latent_atention'; did you mean 'latent_attention'?",
    ),
    (
        attention(kind="latent_attention", kv_rank=4, nope_dim=4, rope_dim=3, value_dim=4),
        "blocks.main.attention: fraction=1.0 of head_dim=3 rotates 3 features, which cannot be",
    ),
    (
        attention(kind="latent_attention", kv_rank=0, nope_dim=4, rope_dim=2, value_dim=4),
        "blocks.main.attention.kv_rank: 0 is too small; give a whole number of 1",
    ),
    (
        {"blocks": {"main": {**BLOCK, "attention": 3}}},
        "blocks.main.attention: expected settings, got 3",
    ),
    (
        attention(qk_norm={"norm": {"kind": "none"}}),
        "blocks.main.attention.qk_norm",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message for _, message in BAD])
def test_a_decoder_that_cannot_be(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        DecoderConfig.from_dict({**DATA, **changes})
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_a_block_may_be_called_like_a_kind() -> None:
    with pytest.raises(ConfigError, match=r"^blocks.pre_norm.attention: unknown key 'n_heds'"):
        DecoderConfig.from_dict(
            {**DATA, "blocks": {"pre_norm": {**BLOCK, "attention": {"n_heds": 2}}}}
        )


def test_a_text_longer_than_the_learned_positions() -> None:
    decoder = DecoderConfig.from_dict(
        {**DATA, "embedding": {"position": {"kind": "learned"}}}
    ).build()
    decoder(torch.zeros(1, 8, dtype=torch.int64))
    tokens = torch.zeros(1, 9, dtype=torch.int64)
    message = "^a sequence of 9 tokens does not fit max_seq_len=8; shorten it$"
    with pytest.raises(WorkhorseError, match=message):
        decoder(tokens)
    with pytest.raises(WorkhorseError, match=message):
        decoder(tokens, positions=torch.arange(9)[None])
    cache = decoder.new_cache(1, 20)
    with pytest.raises(WorkhorseError, match=message):
        decoder(tokens, cache=cache)
    assert cache.length == 0  # unchanged
    packed = torch.tensor([[0] * 5 + [1] * 4])
    assert decoder(tokens, documents=packed).shape == (1, 9, 11)  # each document fits


def test_other_positions_run_past_max_seq_len() -> None:
    for position in ("none", "rope", "alibi"):
        config = DecoderConfig.from_dict({**DATA, **attention(position={"kind": position})})
        assert config.build()(torch.zeros(1, 20, dtype=torch.int64)).shape == (1, 20, 11)


def test_no_tokens() -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    with pytest.raises(WorkhorseError, match=r"^there are no tokens; give at least one$"):
        decoder(torch.zeros(1, 0, dtype=torch.int64))


def test_a_cache_of_another_batch() -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    cache = decoder.new_cache(2, 8)
    with pytest.raises(
        WorkhorseError,
        match=r"^the cache has 2 rows, but tokens have 3; create a cache for this batch size$",
    ):
        decoder(torch.zeros(3, 1, dtype=torch.int64), cache=cache)


def test_attention_without_causality_has_no_cache() -> None:
    decoder = DecoderConfig.from_dict({**DATA, **attention(causal=False)}).build()
    with pytest.raises(
        ConfigError, match=r"^causal=false cannot decode with a cache; run the whole"
    ):
        decoder.new_cache(1, 8)


def test_a_context_without_tokens_leaves_the_cache_alone() -> None:
    cache = DecoderConfig.from_dict(DATA).build().new_cache(1, 4)
    with pytest.raises(WorkhorseError, match="there are no tokens"):
        Context(1, 0, torch.device("cpu"), cache=cache)
    assert cache.length == 0


def test_tokens_of_another_shape() -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    with pytest.raises(WorkhorseError, match=r"^tokens have shape \(3,\) instead of \(batch, s"):
        decoder(torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("options", [{}, {"kind": "latent_attention", **LATENT}])
def test_a_layer_by_itself_given_another_shape(options: dict[str, object]) -> None:
    block = DecoderConfig.from_dict({**DATA, **attention(**options)}).build().layers[0]
    for shape in ((3, 8), (8,)):
        for layer in (block, block.attention):
            with pytest.raises(WorkhorseError, match=r"instead of \(batch, seq, d_model\); give"):
                layer(torch.randn(shape))


@pytest.mark.parametrize("kind", ["attention", "latent_attention"])
def test_an_attention_by_itself_given_another_width(kind: str) -> None:
    options = LATENT if kind == "latent_attention" else {}
    block = DecoderConfig.from_dict({**DATA, **attention(kind=kind, **options)}).build().layers[0]
    width = DATA["d_model"]
    for other in (width // 2, width + 1):
        with pytest.raises(
            WorkhorseError,
            match=rf"^x has shape \(1, 3, {other}\), but the layer has d_model={width}; give x th",
        ):
            block.attention(torch.randn(1, 3, other))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1]], r"=\[\[1\]\] is not a tensor \(batch, seq\); give torch\.tensor\(\[ids\]\)$"),
        (None, r"=None is not a tensor \(batch, seq\); give"),
        (torch.rand(1, 2), r" have dtype torch\.float32; give ids in torch\.int64 or int32$"),
        (torch.ones(1, 2, dtype=torch.bool), r" have dtype torch\.bool; give ids"),
        (torch.ones(1, 2, dtype=torch.uint8), r" have dtype torch\.uint8; give ids"),
    ],
)
def test_what_is_no_tensor_of_tokens(tokens: Any, message: str) -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    cache = decoder.new_cache(1, 8)
    with pytest.raises(WorkhorseError, match=rf"^tokens{message}"):
        decoder(tokens, cache=cache)
    assert cache.length == 0  # unchanged
    assert decoder(torch.ones(1, 2, dtype=torch.int32)).shape == (1, 2, 11)


@pytest.mark.parametrize("name", ["batch", "capacity", "slack"])
@pytest.mark.parametrize("size", [1.5, "4", None, -1, True])
def test_sizes_of_a_cache_are_whole_numbers(name: str, size: Any) -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    message = rf"^{name}=.* is not a whole number above 0; give 1 or more$"
    if name == "slack":
        message = r"^slack=.* is not a whole number; give 0 or more$"
    with pytest.raises(WorkhorseError, match=message):
        decoder.new_cache(**{"batch": 1, "capacity": 4, name: size})


@pytest.mark.parametrize("capacity", [10**15, 10**30])
def test_a_cache_that_no_memory_holds(capacity: int) -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    message = rf"^a cache of {capacity} tokens does not fit into memory; make it smaller$"
    with pytest.raises(WorkhorseError, match=message):
        decoder.new_cache(1, capacity)


@pytest.mark.parametrize("token", [-1, 11])
def test_tokens_that_the_vocabulary_lacks(token: int) -> None:
    decoder = DecoderConfig.from_dict(DATA).build()
    with pytest.raises(WorkhorseError, match=r"; vocab_size=11 allows ids from 0 to 10$"):
        decoder(torch.tensor([[1, token]]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda decoder, tokens: decoder.new_cache(True, 4),
            "batch=True is not a whole number above 0; give",
        ),
        (
            lambda decoder, tokens: decoder.new_cache(10**30, 4),
            "a cache of 40+ tokens does not fit",
        ),
        (
            lambda decoder, tokens: decoder(tokens, positions=0),
            "positions=0 is not a tensor; give one",
        ),
        (
            lambda decoder, tokens: decoder(tokens, documents=0),
            "documents=0 is not a tensor; give one",
        ),
        (lambda decoder, tokens: decoder(tokens, cache=0), "cache=0 is not a cache; create one wi"),
        (
            lambda decoder, tokens: decoder.layers[0].attention(0),
            "x=0 is not a tensor; give one of",
        ),
    ],
)
def test_things_of_another_kind(call: Any, message: str) -> None:
    with pytest.raises(WorkhorseError, match=rf"^{message}"):
        call(DecoderConfig.from_dict(DATA).build(), torch.zeros(1, 3, dtype=torch.int64))
