"""Parts of the model work without a decoder or a context, as in a notebook."""

import pytest
import torch
from torch import Tensor, nn

from workhorse.errors import WorkhorseError
from workhorse.nn import Attention, AttentionConfig, Context, Decoder
from workhorse.nn.attention.latent import LatentAttentionConfig
from workhorse.nn.blocks import PreNormConfig
from workhorse.nn.positions.rope import RopeConfig

X = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
ATTENTIONS = [
    Attention(16, 4, n_kv_heads=2, rope=RopeConfig(), kernel="eager"),
    AttentionConfig(n_heads=4, window=2, position=RopeConfig()).build(16),
    LatentAttentionConfig(n_heads=2, kv_rank=8, nope_dim=4, rope_dim=4, value_dim=4).build(16),
    PreNormConfig.from_dict(
        {
            "norm": {"kind": "rms_norm"},
            "attention": {"n_heads": 4},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 8},
        }
    ).build(16),
]


@pytest.mark.parametrize("part", ATTENTIONS, ids=lambda part: type(part).__name__)
def test_without_a_context_the_input_is_a_whole_text(part: nn.Module) -> None:
    assert torch.equal(part(X), part(X, Context(2, 5, X.device)))
    later = X.clone()
    later[:, 3:] = 0
    assert torch.equal(part(later)[:, :3], part(X)[:, :3])


def test_a_kernel_by_name_gives_its_weights_to_a_hook() -> None:
    attention = Attention(16, 4, kernel="eager")
    seen: list[Tensor] = []
    attention.kernel.weights.register_forward_hook(lambda _m, _args, out: seen.append(out))
    attention(X)
    assert seen[0].shape == (2, 4, 5, 5)
    assert torch.allclose(seen[0].sum(-1), torch.ones(2, 4, 5))
    with pytest.raises(WorkhorseError, match=r"kernel='fast' is unknown; choose auto, eager"):
        Attention(16, 4, kernel="fast")


def test_an_entry_of_a_cache_needs_the_caches_context(decoder: Decoder) -> None:
    cache = decoder.new_cache(2, 8)
    with pytest.raises(WorkhorseError, match=r"needs its cache's context; give Context\("):
        decoder.layers[0].attention(
            torch.zeros(2, 5, decoder.config.d_model), None, cache.entries[0]
        )


@pytest.fixture
def decoder() -> Decoder:
    from workhorse.models import preset

    small = preset("gpt2").replace(n_layers=1, d_model=24, vocab_size=11, max_seq_len=8)
    return small.build()
