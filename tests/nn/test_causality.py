"""No output depends on a later token, for the grid and random configs (claim C1).

Outputs are compared bitwise; mixtures of experts must have a gradient of exactly zero.
"""

import pytest
import torch
from hypothesis import assume, given, settings
from torch import Tensor

from tests.nn.grid import (
    CAUSAL,
    COVERING,
    configs,
    make,
    mixes_experts,
    name,
    random_tokens,
    refused,
)
from workhorse.nn import Decoder, DecoderConfig

SEQ = 12
every_causal_config = pytest.mark.parametrize(
    "config", CAUSAL, ids=[name(COVERING.index(config)) for config in CAUSAL]
)
SAME_BITS = [config for config in CAUSAL if not mixes_experts(config)]


def changed_after(tokens: Tensor, last: int, vocab_size: int) -> Tensor:
    """Replace every token after column `last` by another one."""
    changed = tokens.clone()
    changed[:, last + 1 :] = (changed[:, last + 1 :] + 1 + last % (vocab_size - 1)) % vocab_size
    return changed


def assert_causal(decoder: Decoder, tokens: Tensor) -> None:
    with torch.no_grad():
        logits = decoder(tokens)
        for last in (0, 3, 6, SEQ - 2):
            others = decoder(changed_after(tokens, last, decoder.config.vocab_size))
            assert torch.equal(others[:, : last + 1], logits[:, : last + 1]), f"column {last}"
            assert not torch.equal(others[:, last + 1 :], logits[:, last + 1 :])


@pytest.mark.parametrize(
    "config", SAME_BITS, ids=[name(COVERING.index(config)) for config in SAME_BITS]
)
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
def test_no_output_depends_on_a_later_token(config: DecoderConfig, kernel: str) -> None:
    if refused(config, kernel):
        kernel = "auto"
    assert_causal(make(config, kernel), random_tokens(config, 2, SEQ))


def assert_no_gradient_reaches_back(decoder: Decoder, tokens: Tensor) -> None:
    vectors: list[Tensor] = []
    decoder.embedding.tokens.register_forward_hook(
        lambda _module, _inputs, output: vectors.append(output.retain_grad() or output)
    )
    decoder(tokens)[:, 5].sum().backward()
    gradient = vectors[0].grad
    assert gradient is not None
    assert torch.count_nonzero(gradient[:, 6:]) == 0
    assert torch.count_nonzero(gradient[:, 5]) > 0


@every_causal_config
def test_no_gradient_reaches_a_later_token(config: DecoderConfig) -> None:
    """The derivative also shows dependencies that are too small to change a bit."""
    assert_no_gradient_reaches_back(make(config, "auto"), random_tokens(config, 1, SEQ))


@settings(max_examples=25)
@given(configs)
def test_no_output_of_any_combination_depends_on_a_later_token(config: DecoderConfig) -> None:
    assume(all(block.attention.causal for block in config.blocks.values()))
    check = assert_no_gradient_reaches_back if mixes_experts(config) else assert_causal
    check(make(config, "auto"), random_tokens(config, 2, SEQ))


def test_bidirectional_attention_sees_the_future() -> None:
    """The tests above can fail: bidirectional attention would not pass them."""
    config = next(c for c in COVERING if c not in CAUSAL and not mixes_experts(c))
    decoder = make(config)
    tokens = random_tokens(config, 1, SEQ)
    changed = changed_after(tokens, 6, config.vocab_size)
    assert not torch.equal(decoder(tokens)[:, :7], decoder(changed)[:, :7])
