"""Campaign: compiled FlexAttention, which needs no full mask, gives the eager results.

    make campaigns    or    python -m pytest -m campaign tests/campaigns/test_flex.py

Each case compiles its own kernel, which takes seconds to a minute on a CPU. The same functions run
uncompiled over the whole grid in `tests/nn/attention/test_kernels.py`. That includes sinks, which
the compiler does not support on a CPU.
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

from tests.nn.grid import error, make, random_tokens
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import CompiledFlex

pytestmark = [
    pytest.mark.campaign,
    pytest.mark.filterwarnings("ignore"),  # warnings of the compiler
]
SEQ = 136
Inputs = dict[str, torch.Tensor]

CASES: dict[str, dict] = {
    "grouped": {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}},
    "window": {"n_heads": 4, "window": 7, "position": {"kind": "rope"}},
    "chunk": {"n_heads": 4, "chunk": 16},
    "alibi": {"n_heads": 6, "head_dim": 16, "position": {"kind": "alibi"}},
    "falcon-alibi": {
        "n_heads": 4,
        "n_kv_heads": 1,
        "position": {"kind": "alibi", "scaled": True, "bfloat16": True},
    },
    "softcap-alibi": {"n_heads": 4, "softcap": 2.0, "position": {"kind": "alibi"}},
    "bidirectional": {"n_heads": 4, "causal": False},
    "wide-values": {"n_heads": 4, "value_dim": 32},
}


def packed() -> Inputs:
    return {"documents": torch.tensor([[0] * 15 + [1] * (SEQ - 15), [0] * SEQ])}


def padded() -> Inputs:
    lengths = torch.tensor([[SEQ], [SEQ - 13]])
    return {"positions": (torch.arange(SEQ) - SEQ + lengths).clamp(min=-1)}


def config(attention: dict) -> DecoderConfig:
    return DecoderConfig.from_dict(
        {
            "vocab_size": 29,
            "d_model": 64,
            "n_layers": 1,
            "max_seq_len": 160,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "rms_norm"},
                    "attention": attention,
                    "feed_forward": {"kind": "mlp", "d_ff": 32},
                }
            },
        }
    )


@pytest.mark.parametrize("given_by", [dict, packed, padded])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_compiled_flex_gives_the_eager_numbers(case: str, given_by: Callable[[], Inputs]) -> None:
    decoder_config = config(CASES[case])
    tokens = random_tokens(decoder_config, 2, SEQ)
    expected = make(decoder_config, "eager")(tokens, **given_by())
    torch.compiler.reset()
    logits = make(decoder_config, "flex")(tokens, **given_by())
    assert error(logits, expected) <= 1e-5


def test_short_sequences_are_not_compiled() -> None:
    """PyTorch 2.13 gives other numbers, or NaN, for 8, 24, 40, ... keys."""
    decoder = make(config(CASES["grouped"]), "flex")
    (kernel,) = (module for module in decoder.modules() if isinstance(module, CompiledFlex))
    q, v = torch.zeros(1, 4, 127, 16), torch.zeros(1, 2, 127, 16)
    assert kernel.attend(q, v) is flex_attention
