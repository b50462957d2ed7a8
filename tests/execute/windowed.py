"""A decoder with windowed and with full layers, and its completions and logits."""

import torch
from torch import Tensor

from tests.execute.passes import last_logits
from tests.nn.paged import paged
from workhorse.execute.backend import Backend, backend_of
from workhorse.generate import GenerationConfig, generate
from workhorse.nn import Decoder, DecoderConfig

WINDOW = 6


def local_and_global(width: int = 64, layers: int = 3) -> DecoderConfig:
    """A config with layers of both kinds: with a window and without."""
    return DecoderConfig.from_dict(
        {
            "vocab_size": 61,
            "d_model": width,
            "n_layers": layers,
            "max_seq_len": 400,
            "blocks": {
                kind: {
                    "kind": "pre_norm",
                    "norm": {"kind": "rms_norm"},
                    "attention": {
                        "n_heads": 4,
                        "n_kv_heads": 2,
                        "position": {"kind": "rope"},
                        "window": window,
                    },
                    "feed_forward": {"kind": "gated_mlp", "d_ff": 3 * width // 2},
                }
                for kind, window in (("local", WINDOW), ("global", None))
            },
            "pattern": ["local", "global"],
        }
    )


LOCAL_AND_GLOBAL = local_and_global(32, layers=2)


def make(seed: int = 0) -> Decoder:
    torch.manual_seed(seed)
    return LOCAL_AND_GLOBAL.build().eval()


def prompts(rows: int) -> list[list[int]]:
    """Prompts of unequal lengths."""
    return [[(7 * row + 3 * i) % 61 for i in range(5 + row)] for row in range(rows)]


def texts(model: Decoder | Backend, rows: int, new: int, guesses: int = 0) -> list[tuple[int, ...]]:
    config = GenerationConfig(max_new_tokens=new, temperature=0, speculate=guesses)
    return [done.tokens for done in generate(model, prompts(rows), config)]


@torch.no_grad()
def logits_along(model: Decoder | Backend, tokens: Tensor) -> list[Tensor]:
    """Logits after a prompt of three tokens, and after every further token."""
    cache = paged(backend_of(model).decoder, 1, tokens.shape[1] + 1)
    logits = [last_logits(model, tokens[:, :3], cache)]
    for step in range(3, tokens.shape[1]):
        logits.append(last_logits(model, tokens[:, step : step + 1], cache))
    return logits
