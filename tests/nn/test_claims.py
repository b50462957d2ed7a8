"""Claims of the literature that a small experiment can check; the results are in docs/claims.md.

Claim C1 (no output depends on a later token) is in `test_causality.py`.
"""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from tests.nn.grid import make, random_tokens
from workhorse.memory.step_memory import PlannedStep, step_memory
from workhorse.nn import AttentionConfig, Context, Decoder, DecoderConfig, next_token_loss
from workhorse.nn.blocks import BlockConfig, PreNorm
from workhorse.nn.positions.rope import RopeConfig
from workhorse.train.recipe.training import TrainConfig

SEQ = 10


def config(
    n_layers: int = 2,
    *,
    wiring: dict | None = None,
    attention: dict | None = None,
    d_model: int = 32,
) -> DecoderConfig:
    return DecoderConfig.from_dict(
        {
            "vocab_size": 31,
            "d_model": d_model,
            "n_layers": n_layers,
            "max_seq_len": 16,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "layer_norm"},
                    "attention": {"n_heads": 4, **(attention or {})},
                    "feed_forward": {"kind": "mlp", "d_ff": 4 * d_model},
                    **(wiring or {}),
                }
            },
            "final_norm": {"kind": "layer_norm"},
        }
    )


def permuted(decoder: Decoder, tokens: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of the reordered tokens, and the reordered logits of the tokens."""
    return decoder(tokens[:, order]), decoder(tokens)[:, order]


@torch.no_grad()
def test_c2_bidirectional_stacks_without_positions_are_permutation_equivariant() -> None:
    decoder = make(config(4, attention={"causal": False}))
    tokens = random_tokens(decoder.config, 2, SEQ)
    logits_of_permuted, permuted_logits = permuted(decoder, tokens, torch.randperm(SEQ))
    assert torch.allclose(logits_of_permuted, permuted_logits, atol=1e-4)


@torch.no_grad()
def test_c2_positions_break_the_equivariance() -> None:
    decoder = make(config(4, attention={"causal": False, "position": {"kind": "rope"}}))
    tokens = random_tokens(decoder.config, 2, SEQ)
    logits_of_permuted, permuted_logits = permuted(decoder, tokens, torch.randperm(SEQ))
    assert (logits_of_permuted - permuted_logits).abs().max() > 0.1


@pytest.mark.parametrize(("n_layers", "blind"), [(1, True), (2, False), (4, False)])
@torch.no_grad()
def test_c2_one_causal_layer_is_blind_to_the_order_of_its_prefix_and_two_are_not(
    n_layers: int, blind: bool
) -> None:
    """Compare the last token's logits after reordering the tokens before it."""
    decoder = make(config(n_layers))
    tokens = random_tokens(decoder.config, 2, SEQ)
    order = torch.cat([torch.randperm(SEQ - 1), torch.tensor([SEQ - 1])])
    change = (decoder(tokens[:, order])[:, -1] - decoder(tokens)[:, -1]).abs().max()
    assert change < 1e-5 if blind else change > 1e-2


def sizes(decoder: Decoder) -> list[float]:
    """The root mean square of the residual stream after every layer."""
    found: list[float] = []
    for layer in decoder.layers:
        layer.register_forward_hook(
            lambda _m, _i, x: found.append(x.double().square().mean().sqrt().item())
        )
    decoder(random_tokens(decoder.config, 2, SEQ))
    return found


@torch.no_grad()
def test_c3_norms_keep_activations_bounded_through_100_layers() -> None:
    """Matrices have variance 2 / fan_in and no scaling with depth, so only the norm matters."""
    init = {"kind": "he", "embedding_std": 1.0, "residual": "plain"}
    through = {
        (order, kind): sizes(
            config(100, wiring={"kind": order, "norm": {"kind": kind}}).replace(init=init).build()
        )
        for kind in ("layer_norm", "rms_norm", "none")
        for order in ("pre_norm", "post_norm")
    }
    for kind in ("layer_norm", "rms_norm"):
        assert max(through["post_norm", kind]) == pytest.approx(1.0, abs=0.01)
        assert max(through["pre_norm", kind]) < 30  # grows with the root of the layer count
    for order in ("pre_norm", "post_norm"):
        assert any(size > 1e12 for size in through[order, "none"][:60])


@pytest.mark.parametrize("head_dim", [16, 64, 256])
@torch.no_grad()
def test_c4_dividing_by_the_root_of_the_heads_width_keeps_the_scores_variance_at_1(
    head_dim: int,
) -> None:
    """The claim assumes queries and keys of variance 1: matrices of variance 1 / fan_in."""
    d_model = 256
    attention = AttentionConfig(n_heads=2, head_dim=head_dim).build(d_model, 0, "eager")
    for projection in (attention.q_proj, attention.k_proj):
        nn.init.normal_(projection.weight, std=d_model**-0.5)
    caught: list[tuple[Tensor, ...]] = []
    attention.kernel.register_forward_pre_hook(lambda _m, args: caught.append(args))
    attention(torch.randn(4, 64, d_model), Context(4, 64, torch.device("cpu")))
    q, k = caught[0][:2]
    raw = (q @ k.mT).var().item()
    assert raw == pytest.approx(head_dim, rel=0.25)
    assert raw * attention.kernel.scoring.scale**2 == pytest.approx(1.0, rel=0.25)


def test_c13_the_number_of_heads_does_not_change_the_parameter_count() -> None:
    counts = {
        (n_heads, kernel): sum(
            parameter.numel()
            for parameter in config(attention={"n_heads": n_heads})
            .build(kernel, device="meta")
            .parameters()
        )
        for n_heads, kernel in itertools.product((1, 2, 4, 8, 16, 32), ("eager", "sdpa", "flex"))
    }
    assert len(set(counts.values())) == 1


class NoResidual(PreNorm):
    """`attention(norm(x))`, then `feed_forward(norm(x))`: no residual connections."""

    def forward(self, x, context, cache=None):
        x = self.attention_branch(self.attention(self.attention_norm(x), context, cache))
        return self.feed_forward_branch(self.feed_forward(self.feed_forward_norm(x)))


def loss_after_a_short_training(*, residual: bool, n_layers: int, steps: int = 40) -> float:
    """Mean loss of the last five steps, in nats per token; each token determines the next one."""
    torch.manual_seed(0)
    decoder = config(n_layers, d_model=16).build()
    if not residual:
        for layer in range(n_layers):
            decoder.layers[layer] = NoResidual(decoder.config.blocks["main"], 16, layer)
        for parameter in decoder.layers.parameters():
            if parameter.ndim == 2:  # preserves the activations' scale
                nn.init.xavier_normal_(parameter)
    optimizer = torch.optim.AdamW(decoder.parameters(), lr=1e-2)
    following = torch.randperm(31)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(31, (8, 8))
        loss, count = next_token_loss(decoder(tokens), following[tokens])
        optimizer.zero_grad()
        (loss / count).backward()
        nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
        optimizer.step()
        losses.append((loss / count).item())
    return sum(losses[-5:]) / 5


def test_c15_residual_connections_make_deep_stacks_trainable() -> None:
    chance = math.log(31)
    assert loss_after_a_short_training(residual=True, n_layers=12) < 0.5 * chance
    assert loss_after_a_short_training(residual=False, n_layers=12) > 0.95 * chance
    assert loss_after_a_short_training(residual=False, n_layers=1) < 0.5 * chance  # depth matters


def half_of(block: nn.Module, config: BlockConfig, device: int) -> nn.Module:
    """The shard of a block on one of two devices: half of the heads and of the hidden features."""
    part = config.replace(
        attention=config.attention.replace(n_heads=2, head_dim=8),
        feed_forward=config.feed_forward.replace(d_ff=config.feed_forward.d_ff // 2),
    ).build(32, 0, "eager")
    for name, own in part.named_parameters():
        whole = block.get_parameter(name)
        for axis, size in enumerate(own.shape):
            if size < whole.shape[axis]:
                whole = whole.narrow(axis, device * size, size)
        own.copy_(whole)
    return part


def sub_layers(block: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of attention and feed-forward; the outputs of all devices must be added."""
    context = Context(*x.shape[:2], x.device)
    return block.attention(x, context), block.feed_forward(x)


@torch.no_grad()
def test_c8_a_parallel_block_needs_one_sum_over_devices_and_a_sequential_one_two() -> None:
    x = torch.randn(2, SEQ, 32)
    decoder = make(config(1, wiring={"kind": "parallel"}))
    parallel, block = decoder.layers[0], decoder.config.blocks["main"]
    halves = [half_of(parallel, block, device) for device in (0, 1)]
    normed = parallel.norm(x)
    one_sum = sum(sum(sub_layers(half, normed)) for half in halves)
    assert torch.allclose(x + one_sum, parallel(x), atol=1e-5)

    decoder = make(config(1))
    sequential, block = decoder.layers[0], decoder.config.blocks["main"]
    halves = [half_of(sequential, block, device) for device in (0, 1)]
    mixed = [sub_layers(half, sequential.attention_norm(x))[0] for half in halves]
    norm = sequential.feed_forward_norm
    after = x + sum(mixed)  # the first sum: the norm needs the complete sum
    second_sum = sum(half.feed_forward(norm(after)) for half in halves)
    assert torch.allclose(after + second_sum, sequential(x), atol=1e-5)
    without = sum(half.feed_forward(norm(x + own)) for half, own in zip(halves, mixed, strict=True))
    assert not torch.allclose(after + without, sequential(x), atol=1e-2)


def test_c9_fused_attention_keeps_as_much_as_the_text_is_long_and_eager_its_square() -> None:
    kept = {
        kernel: [
            sum(
                step_memory(
                    PlannedStep(
                        config(1).replace(max_seq_len=length),
                        TrainConfig(
                            steps=1, batch_size=1, seq_len=length, kernel=kernel, dtype="float32"
                        ),
                        torch.device("cpu"),
                    )
                ).activations.values()
            )
            for length in (256, 512, 1024, 2048)
        ]
        for kernel in ("sdpa", "eager")
    }
    growth = {
        kernel: [after / before for before, after in itertools.pairwise(sizes)]
        for kernel, sizes in kept.items()
    }
    assert growth["sdpa"] == pytest.approx([2, 2, 2], rel=0.01)
    assert growth["eager"][-1] == pytest.approx(4, rel=0.05)
    assert kept["eager"][-1] > 20 * kept["sdpa"][-1]


def test_c16_scores_of_rotated_queries_and_keys_decay_with_distance() -> None:
    """The mean of `|S_i|` (2104.09864 §3.4.3) bounds the score of any query and key."""
    distances = torch.arange(2048)
    cos, sin = RopeConfig().angles(distances[None], head_dim=128, length=2048)
    partial = torch.complex(cos, sin)[0, 0].cumsum(-1)  # S_i for every distance
    bound = partial.abs().mean(-1) / (128 / 2)
    by_octave = [bound[1 << n : 2 << n].mean().item() for n in range(11)]
    assert by_octave == sorted(by_octave, reverse=True)
    assert (by_octave[0], by_octave[-1]) == pytest.approx((0.49, 0.08), abs=0.005)
