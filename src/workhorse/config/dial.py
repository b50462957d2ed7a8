"""The dial: recipes of one family from one number, the depth.

Everything else follows from it, and grows with it:

- width: 64 for each layer and 64 more; heads of 64; feed-forwards of 8/3 of the width, rounded up
  to a multiple of 64;
- vocabulary: 2,048 for each layer, to the nearest power of two, up to 65,536;
- context: 64 tokens for each layer, to the next power of two, from 256 to 4,096;
- tokens: `TOKENS_PER_PARAMETER` for each parameter that multiplies, about what a ladder of these
  models finds best for the arithmetic (docs/scaling.md);
- tokens of a step: in proportion to the root of all tokens, to the nearest power of two;
- learning rates: Muon's the same at every width, since its update has the same spectral norm;
  AdamW's, of embeddings and norms, as one over the root of the width.
"""

import math
import re
from pathlib import Path
from typing import Any

from workhorse.config.base import read_yaml
from workhorse.errors import WorkhorseError

NAMED_AFTER = "depth-"
NAMED = re.compile(rf"{NAMED_AFTER}\d{{1,6}}")
"""What a recipe of the dial is called in the place of a file."""
NEARLY = re.compile(r"depth[ _=:]?-?(\d{1,6})")
"""What is meant for such a name."""
DEEPEST = 64
HEAD_DIM = 64
"""Width of a head, and what the width grows by for each layer."""
TOKENS_PER_PARAMETER = 1.8
STEP_TOKENS = 2048 / 3e6**0.5
"""Tokens of a step for the root of all tokens."""
ADAMW_RATE, ADAMW_WIDTH = 0.03, 256
"""The learning rate of embeddings and norms at that width."""


def is_on_dial(source: str | Path) -> bool:
    """Whether a recipe of the dial is meant, and no file or folder of that name."""
    return NAMED.fullmatch(str(source)) is not None and not Path(source).exists()


def read_recipe(source: str | Path) -> dict[str, Any]:
    """The fields of a recipe: of a file, or of the dial for a name such as `depth-8`.

    Raises:
        WorkhorseError: there is no such file, it holds no YAML, or the depth is out of range.
    """
    if not is_on_dial(source):
        if (meant := NEARLY.fullmatch(str(source))) and not Path(source).exists():
            raise WorkhorseError(
                f"{source} is no file; a recipe of the dial is {NAMED_AFTER}{meant[1]}"
            )
        return read_yaml(source)
    return recipe_of_depth(int(str(source).removeprefix(NAMED_AFTER)))


def recipe_of_depth(depth: int) -> dict[str, Any]:
    """The fields of the dial's recipe; its corpus is the standard library unless one is given.

    Args:
        depth: layers, from 1 to `DEEPEST`.

    Raises:
        WorkhorseError: the depth is out of range.
    """
    if not 1 <= depth <= DEEPEST:
        raise WorkhorseError(
            f"{NAMED_AFTER}{depth} is not on the dial; choose {NAMED_AFTER}1 to "
            f"{NAMED_AFTER}{DEEPEST}"
        )
    width = HEAD_DIM * (depth + 1)
    d_ff = math.ceil(8 / 3 * width / 64) * 64
    vocab_size = min(65_536, 2048 * 2 ** round(math.log2(depth)))
    seq_len = min(4096, max(256, 2 ** math.ceil(math.log2(64 * depth))))
    parameters = depth * (4 * width**2 + 3 * width * d_ff) + vocab_size * width
    tokens = TOKENS_PER_PARAMETER * parameters
    batch_size = max(1, 2 ** round(math.log2(STEP_TOKENS * tokens**0.5 / seq_len)))
    steps = math.ceil(tokens / (batch_size * seq_len))
    return {
        "name": f"{NAMED_AFTER}{depth}",
        "description": f"The dial at {depth}: {parameters:,} parameters that multiply.",
        "model": {
            "d_model": width,
            "n_layers": depth,
            "blocks": {
                "main": {
                    "kind": "parallel",
                    "norm": {"kind": "layer_norm"},
                    "attention": {
                        "n_heads": width // HEAD_DIM,
                        "position": {"kind": "rope"},
                        "qk_norm": {
                            "norm": {"kind": "layer_norm", "bias": False},
                            "over": "each_head",
                        },
                    },
                    "feed_forward": {"kind": "gated_mlp", "d_ff": d_ff, "activation": "silu"},
                    "convolution": {"width": 3},
                }
            },
            "final_norm": {"kind": "layer_norm"},
            "head": {"tied": True},
            "init": {"kind": "normal", "std": 0.02, "residual": "zero"},
        },
        "tokenizer": {"kind": "bpe", "vocab_size": vocab_size},
        "data": {"corpus": {"kind": "stdlib"}},
        "train": {
            "steps": steps,
            "batch_size": batch_size,
            "seq_len": seq_len,
            "dtype": "auto",
            "optimizer": {
                "kind": "muon",
                "learning_rate": 0.02,
                "scale": "spectral",
                "weight_decay": 0.01,
                "adamw": {
                    "learning_rate": round(ADAMW_RATE * (ADAMW_WIDTH / width) ** 0.5, 5),
                    "weight_decay": 0.0,
                },
            },
            "schedule": {"kind": "linear", "warmup_steps": min(20, steps // 4), "final": 0.0},
        },
    }
