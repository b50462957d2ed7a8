"""Errors that circulate in tutorials: one test per error, which shows the correct behaviour.

`tests/campaigns/test_mutations.py` shows that each test fails if its error is introduced.
"""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.nn.grid import make, random_tokens
from workhorse.data import Batch
from workhorse.generate import GenerationConfig, generate
from workhorse.nn import IGNORE, Attention, AttentionConfig, Context, Decoder, DecoderConfig
from workhorse.nn.cache.paged import BLOCK
from workhorse.nn.feedforward import MlpConfig
from workhorse.nn.norms import LayerNormConfig
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.groups import build_optimizer
from workhorse.train.objectives.next_token import NextToken
from workhorse.train.step.step import LossScale, Precision, TrainingStep

D_MODEL, SEQ = 16, 8
KERNELS = pytest.mark.parametrize("kernel", ["eager", "sdpa"])


def config(attention: dict | None = None, feed_forward: dict | None = None) -> DecoderConfig:
    return DecoderConfig.from_dict(
        {
            "vocab_size": 29,
            "d_model": D_MODEL,
            "n_layers": 2,
            "max_seq_len": 32,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "layer_norm"},
                    "attention": {"n_heads": 4, "position": {"kind": "rope"}, **(attention or {})},
                    "feed_forward": {"kind": "mlp", "d_ff": 24, **(feed_forward or {})},
                }
            },
            "final_norm": {"kind": "layer_norm"},
        }
    )


def inputs_of_kernel(attention: Attention, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    caught: list[tuple[Tensor, Tensor, Tensor]] = []
    attention.kernel.register_forward_pre_hook(lambda _module, args: caught.append(args[:3]))
    attention(x, Context(x.shape[0], x.shape[1], x.device))
    return caught[0]


def test_01_layer_norm_is_over_the_features() -> None:
    """A norm over the sequence would mix tokens, including later ones."""
    norm = LayerNormConfig().build(D_MODEL)
    x = 3 * torch.randn(2, SEQ, D_MODEL) + 1
    y = norm(x)
    assert torch.allclose(y.mean(-1), torch.zeros(2, SEQ), atol=1e-5)
    assert torch.allclose(y.square().mean(-1), torch.ones(2, SEQ), atol=1e-3)
    for position in range(SEQ):
        alone = norm(x[:, position : position + 1])
        torch.testing.assert_close(alone, y[:, position : position + 1])


@KERNELS
def test_02_a_query_sees_itself_and_what_came_before(kernel: str) -> None:
    attention = AttentionConfig(n_heads=2).build(D_MODEL, 0, kernel)
    for given in (None, torch.arange(SEQ)[None]):  # the kernel's own causal path, and a mask
        x = torch.randn(1, SEQ, D_MODEL, requires_grad=True)
        context = Context(1, SEQ, x.device, positions=given)
        for position in range(SEQ):
            (gradient,) = torch.autograd.grad(
                attention(x, context)[0, position].sum(), x, retain_graph=False
            )
            depends = gradient[0].abs().sum(-1) > 0
            assert depends.tolist() == [s <= position for s in range(SEQ)]


@KERNELS
def test_03_scores_are_divided_by_the_root_of_the_heads_width(kernel: str) -> None:
    attention = AttentionConfig(n_heads=4).build(64, 0, kernel)
    x = torch.randn(1, SEQ, 64)
    q, k, v = inputs_of_kernel(attention, x)
    hidden = torch.ones(SEQ, SEQ).triu(1).bool()
    weights = (q @ k.mT / math.sqrt(16)).masked_fill(hidden, -math.inf).softmax(-1)
    y = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
    assert torch.allclose(attention(x, Context(1, SEQ, x.device)), y, atol=1e-6)


def test_04_the_variance_is_biased_and_eps_is_inside_the_root() -> None:
    """Few features and a large eps, so that every wrong formula gives a large difference."""
    norm = LayerNormConfig(eps=0.5).build(3)
    x = torch.tensor([[[1.0, 2.0, 4.0]]])
    mean, variance = 7 / 3, 14 / 9
    expected = [(number - mean) / math.sqrt(variance + 0.5) for number in (1.0, 2.0, 4.0)]
    assert torch.allclose(norm(x).flatten(), torch.tensor(expected), atol=1e-6)


def test_05_no_mask_is_kept_in_the_layers() -> None:
    decoder = config().build()
    decoder(random_tokens(decoder.config, 1, SEQ))
    parameters = {name for name, _ in decoder.named_parameters()}
    assert set(decoder.state_dict()) == parameters
    assert list(decoder.buffers()) == []
    held = [
        key for m in decoder.modules() for key, value in vars(m).items() if torch.is_tensor(value)
    ]
    assert held == []


def test_06_generation_projects_the_last_position_only() -> None:
    decoder = make(config())
    projected: list[int] = []
    decoder.head.register_forward_hook(lambda _m, args, _y: projected.append(args[0].shape[1]))
    generate(decoder, [[1, 2, 3, 4, 5]], GenerationConfig(max_new_tokens=4))
    assert len(projected) == 4
    assert set(projected) == {1}


@pytest.mark.parametrize("expansion", [3, 4])
def test_07_the_feed_forward_is_as_wide_as_the_config_says(expansion: int) -> None:
    decoder = config(feed_forward={"d_ff": expansion * D_MODEL}).build(device="meta")
    in_matrices = sum(p.numel() for p in decoder.layers.parameters() if p.ndim == 2)
    assert in_matrices == (4 + 2 * expansion) * decoder.config.n_layers * D_MODEL**2


# In a piece of more than two blocks, the cache does not store those that only its tokens see.
@KERNELS
@pytest.mark.parametrize("pieces", [[1] * 80, [5, 1, 1, 2 * BLOCK + 5, 4]])
@torch.no_grad()
def test_08_a_cache_filled_past_the_window_shows_what_training_showed(
    kernel: str, pieces: list[int]
) -> None:
    decoder = make(config({"window": 3}), kernel)
    tokens = random_tokens(decoder.config, 2, 80)
    full, cache, start = decoder(tokens), decoder.new_cache(2, 80), 0
    for length in pieces:
        logits = decoder(tokens[:, start : start + length], cache=cache)
        start += length
        assert torch.allclose(logits, full[:, start - length : start], atol=1e-5), start


@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_09_rope_turns_the_pairs_that_the_config_names(pairing: str) -> None:
    """Feature i with i + 4 (half), or 2i with 2i + 1 (interleaved), as complex numbers."""
    rope = {"kind": "rope", "pairing": pairing}
    x = torch.randn(1, SEQ, D_MODEL)
    attention = AttentionConfig(n_heads=2, position=rope).build(D_MODEL, 0, "eager")
    plain = AttentionConfig(n_heads=2).build(D_MODEL, 0, "eager")
    plain.load_state_dict(attention.state_dict())
    first = np.arange(4) if pairing == "half" else 2 * np.arange(4)
    second = first + (4 if pairing == "half" else 1)
    turn = np.exp(1j * np.arange(SEQ)[:, None] * 10_000.0 ** (-np.arange(4) / 4))
    turned, straight = inputs_of_kernel(attention, x), inputs_of_kernel(plain, x)
    for ours, reference in zip(turned[:2], straight[:2], strict=True):
        expected = reference.detach().numpy().copy()
        z = (expected[..., first] + 1j * expected[..., second]) * turn
        expected[..., first], expected[..., second] = z.real, z.imag
        assert np.allclose(ours.detach().numpy(), expected, atol=1e-6)


def test_10_micro_batches_give_the_full_batchs_gradient() -> None:
    """Rows with 8, 1 and 3 valid targets: a mean of means would weight the rows equally."""
    tokens = random_tokens(config(), 3, SEQ)
    targets = tokens.roll(-1, dims=1)
    targets[1, 1:] = IGNORE
    targets[2, 3:] = IGNORE
    batch = Batch(tokens, targets, None, torch.zeros(3, dtype=torch.int64))
    gradients, losses = [], []
    for rows in (3, 1, 2):
        decoder = make(config())
        losses.append(step_of(decoder, rows).backward(batch)[0].item())
        gradients.append({name: p.grad for name, p in decoder.named_parameters()})
    decoder = make(config())
    mean = torch.nn.functional.cross_entropy(
        decoder(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORE
    )
    mean.backward()
    for loss, gradient in zip(losses, gradients, strict=True):
        assert loss == pytest.approx(mean.item(), rel=1e-6)
        for name, parameter in decoder.named_parameters():
            assert torch.allclose(gradient[name], parameter.grad, atol=1e-6), name


def step_of(decoder: Decoder, rows: int) -> TrainingStep:
    device = torch.device("cpu")
    return TrainingStep(
        NextToken(decoder),
        build_optimizer(decoder, AdamWConfig()),
        device,
        precision=Precision(device, torch.float32),
        scale=LossScale(enabled=False),
        micro_batch_size=rows,
        grad_clip=None,
    )


def test_11_sharing_queries_and_keys_makes_scores_symmetric_and_not_weights() -> None:
    attention = AttentionConfig(n_heads=2, causal=False).build(D_MODEL, 0, "eager")
    attention.k_proj.weight = attention.q_proj.weight
    maps: list[Tensor] = []
    attention.kernel.weights.register_forward_hook(lambda _m, _i, weights: maps.append(weights))
    q, k, _ = inputs_of_kernel(attention, torch.randn(1, SEQ, D_MODEL))
    scores = q @ k.mT
    assert torch.allclose(scores, scores.mT, atol=1e-6)
    assert (maps[0] - maps[0].mT).abs().max() > 1e-2


def test_12_two_layer_norms_hold_four_times_d_model_numbers() -> None:
    layer = config().build(device="meta").layers[0]
    norms = [p.numel() for name, p in layer.named_parameters() if "norm" in name]
    assert sum(norms) == 4 * D_MODEL


def test_12_a_feed_forward_saves_2f_plus_1_numbers_for_each_number_of_its_input() -> None:
    """It saves its input, and d_ff elements before and after the activation."""
    expansion = 3
    module = MlpConfig(d_ff=expansion * D_MODEL).build(D_MODEL)
    saved = saved_elements(module, lambda: module(torch.randn(2, SEQ, D_MODEL).requires_grad_()))
    assert saved == (2 * expansion + 1) * 2 * SEQ * D_MODEL


def saved_elements(module: torch.nn.Module, forward: Callable[[], Tensor]) -> int:
    """Number of elements that autograd keeps, without weights; each storage counts once."""
    weights = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, int] = {}
    alive: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        pointer = tensor.untyped_storage().data_ptr()
        if pointer not in weights:
            alive.append(tensor)  # or its storage could be reused and counted once
            kept[pointer] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        forward()
    return sum(kept.values())


@pytest.mark.parametrize("n_heads", [1, 2, 4, 8])
def test_14_a_head_is_as_wide_as_d_model_over_heads(n_heads: int) -> None:
    """It also works by itself for any sequence length, without state from outside."""
    for attention in (Attention(D_MODEL, n_heads), AttentionConfig(n_heads=n_heads).build(D_MODEL)):
        assert attention.head_dim == attention.value_dim == D_MODEL // n_heads
        assert attention.q_proj.weight.shape == (D_MODEL, D_MODEL)
        for seq in (1, 5, 40):
            x = torch.randn(1, seq, D_MODEL)
            assert attention(x, Context(1, seq, x.device)).shape == x.shape
