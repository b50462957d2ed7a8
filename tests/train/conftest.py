"""Fixtures: a recipe that trains in a second, and a very small model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from workhorse.nn import Decoder, DecoderConfig
from workhorse.train import Recipe

MODEL: dict[str, Any] = {
    "d_model": 16,
    "n_layers": 2,
    "blocks": {
        "main": {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm"},
            "attention": {"kind": "attention", "n_heads": 2, "position": {"kind": "rope"}},
            "feed_forward": {"kind": "gated_mlp", "d_ff": 32, "activation": "silu"},
        }
    },
    "final_norm": {"kind": "rms_norm"},
    "head": {"tied": True},
}

MakeRecipe = Callable[..., Recipe]


@pytest.fixture
def decoder() -> Decoder:
    return DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 8}).build()


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    file = tmp_path / "corpus.txt"
    file.write_text("".join(f"{number} and {number * 7}; " for number in range(400)))
    return file


@pytest.fixture
def make_recipe(corpus: Path) -> MakeRecipe:
    """A function that makes a recipe; its keywords change fields of the `train` section."""

    def make(**train: Any) -> Recipe:
        return Recipe.from_dict(
            {
                "name": "tiny",
                "model": MODEL,
                "tokenizer": {"kind": "bytes"},
                "data": {"corpus": {"kind": "text", "path": str(corpus)}},
                "train": {
                    "steps": 12,
                    "batch_size": 4,
                    "seq_len": 16,
                    "log_every": 1,
                    "checkpoint_every": 4,
                    **train,
                },
            }
        )

    return make
