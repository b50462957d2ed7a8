import pytest
import torch

from workhorse.nn import Decoder, DecoderConfig


@pytest.fixture
def decoder() -> Decoder:
    """A decoder with a context of 8 tokens and a vocabulary of 128."""
    config = DecoderConfig.from_dict(
        {
            "vocab_size": 128,
            "d_model": 16,
            "n_layers": 2,
            "max_seq_len": 8,
            "blocks": {
                "main": {
                    "kind": "pre_norm",
                    "norm": {"kind": "rms_norm"},
                    "attention": {
                        "kind": "attention",
                        "n_heads": 2,
                        "position": {"kind": "rope", "theta": 10000.0},
                    },
                    "feed_forward": {"kind": "gated_mlp", "d_ff": 32, "activation": "silu"},
                }
            },
            "final_norm": {"kind": "rms_norm"},
            "init": {"kind": "normal", "std": 0.3},
        }
    )
    torch.manual_seed(0)
    return config.build().eval()


class Ascii:
    """A tokenizer with one token per character; characters outside ASCII are unknown."""

    def encode(self, text: str) -> list[int]:
        return [min(ord(character), 127) for character in text]

    def encode_batch(self, texts: list[str], *, begins: bool) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def count_unknown(self, ids: list[int]) -> int:
        return ids.count(127)


@pytest.fixture
def ascii_tokenizer() -> Ascii:
    return Ascii()
