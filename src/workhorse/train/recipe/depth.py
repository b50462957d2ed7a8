"""Built-in recipes named `depth-N`: one family of models, with N layers.

All other sizes are computed from the number of layers and grow with it:

- width (`d_model`): 64 per layer plus 64, with heads of width 64; the width of feed-forward layers
  is 8/3 of `d_model`, rounded up to a multiple of 64;
- vocabulary: 2,048 per layer, rounded to the nearest power of two, up to 65,536;
- context: 64 tokens per layer, rounded up to a power of two, from 256 to 4,096;
- training tokens: `TOKENS_PER_PARAMETER` per parameter in matmuls, about the compute-optimal ratio
  of these models (docs/scaling.md);
- tokens per step: proportional to the square root of the training tokens, rounded to a power of
  two;
- learning rates: Muon's is the same at every width, since its update has the same spectral norm;
  AdamW's, for embeddings and norms, is proportional to one over the square root of the width.
"""

import math
import re
from pathlib import Path
from typing import Any

from workhorse.config.base import read_yaml
from workhorse.errors import WorkhorseError

NAMED_AFTER = "depth-"
NAMED = re.compile(rf"{NAMED_AFTER}\d{{1,6}}")
"""Pattern of the names of built-in recipes, which can be given instead of a file."""
NEARLY = re.compile(r"depth[ _=:]?-?(\d{1,6})")
"""Pattern of misspelt names of built-in recipes, for a suggestion in the error."""
DEEPEST = 64
HEAD_DIM = 64
"""Width of an attention head, and increase of the model's width per layer."""
TOKENS_PER_PARAMETER = 1.8
STEP_TOKENS = 2048 / 3e6**0.5
"""Ratio of the tokens per step to the square root of the training tokens."""
ADAMW_RATE, ADAMW_WIDTH = 0.03, 256
"""Learning rate of embeddings and norms in a model of width `ADAMW_WIDTH`, and that width."""


def is_on_dial(source: str | Path) -> bool:
    """True if `source` is the name of a built-in recipe, and no file or folder has this name."""
    return NAMED.fullmatch(str(source)) is not None and not Path(source).exists()


def read_recipe(source: str | Path) -> dict[str, Any]:
    """Return the fields of a recipe, from a file or by a built-in name such as `depth-8`.

    Raises:
        WorkhorseError: the file is missing or not YAML, or the depth is out of range.
    """
    if not is_on_dial(source):
        if (meant := NEARLY.fullmatch(str(source))) and not Path(source).exists():
            raise WorkhorseError(
                f"{source} is not a file; did you mean the recipe {NAMED_AFTER}{meant[1]}?"
            )
        return read_yaml(source, "recipe")
    return recipe_of_depth(int(str(source).removeprefix(NAMED_AFTER)))


def recipe_of_depth(depth: int) -> dict[str, Any]:
    """Return the fields of the built-in recipe `depth-N`. Its corpus is Python's standard library.

    Raises:
        WorkhorseError: the depth is not from 1 to `DEEPEST`.
    """
    if not 1 <= depth <= DEEPEST:
        raise WorkhorseError(
            f"{NAMED_AFTER}{depth} is not a recipe; choose {NAMED_AFTER}1 to {NAMED_AFTER}{DEEPEST}"
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
        "description": f"The dial at {depth}: {parameters:,} parameters in matmuls.",
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
