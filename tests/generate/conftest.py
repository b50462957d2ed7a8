"""A tiny decoder and minimal tokenizers for the tests of generation."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from workhorse.nn import Decoder, DecoderConfig


@pytest.fixture
def make_decoder() -> Callable[..., Decoder]:
    """Builds a two-layer decoder with weights large enough for decided, varied completions.

    The dtype is float64: batches of different shapes round differently, and in float32 the rounding
    changes a choice often enough to fail a test.
    """

    def make(vocab_size: int = 17, max_seq_len: int = 24, seed: int = 0, **attention) -> Decoder:
        config = DecoderConfig.from_dict(
            {
                "vocab_size": vocab_size,
                "d_model": 16,
                "n_layers": 2,
                "max_seq_len": max_seq_len,
                "blocks": {
                    "main": {
                        "kind": "pre_norm",
                        "norm": {"kind": "rms_norm"},
                        "attention": {
                            "kind": "attention",
                            "n_heads": 2,
                            "position": {"kind": "rope", "theta": 10000.0},
                            **attention,
                        },
                        "feed_forward": {"kind": "gated_mlp", "d_ff": 32, "activation": "silu"},
                    }
                },
                "final_norm": {"kind": "rms_norm"},
                "head": {"tied": False},
                "init": {"kind": "normal", "std": 0.5},
            }
        )
        torch.manual_seed(seed)
        return config.build(dtype=torch.float64).eval()

    return make


@pytest.fixture
def consumed(monkeypatch: pytest.MonkeyPatch) -> Callable[[Decoder], list[tuple[int, int]]]:
    """Records the shapes of the inputs of a decoder."""

    def watch(decoder: Decoder) -> list[tuple[int, int]]:
        shapes, hidden = [], decoder.hidden

        def spy(tokens, **arguments):
            shapes.append(tuple(tokens.shape))
            return hidden(tokens, **arguments)

        monkeypatch.setattr(decoder, "hidden", spy)
        return shapes

    return watch


class PieceTokenizer:
    """A tokenizer whose token i is the i-th byte string; `eos_id` is a special token."""

    def __init__(self, pieces: list[bytes], eos_id: int | None = None) -> None:
        self.pieces = pieces
        self.vocab_size = len(pieces)
        self.bos_id = None
        self.eos_id = eos_id

    def stream(self, *, skip_special: bool = False, shown=(), after=()):
        held = b""
        self.after = tuple(after)

        def push(token: int) -> str:
            nonlocal held
            if skip_special and token == self.eos_id:
                return ""
            held += self.pieces[token]
            try:
                text, held = held.decode(), b""
            except UnicodeDecodeError:
                return ""
            return text

        def finish() -> str:
            return held.decode(errors="replace")

        return SimpleNamespace(push=push, finish=finish)


@pytest.fixture
def letters() -> Callable[..., PieceTokenizer]:
    """Builds a tokenizer with one letter per token."""

    def make(vocab_size: int = 17, eos_id: int | None = None) -> PieceTokenizer:
        return PieceTokenizer([bytes([97 + token]) for token in range(vocab_size)], eos_id)

    return make


@pytest.fixture
def pieces() -> type[PieceTokenizer]:
    return PieceTokenizer


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the block size to four tokens, so that short sequences share and lose blocks."""
    for module in ("nn.cache.paged", "nn.cache.paged_view"):
        monkeypatch.setattr(f"workhorse.{module}.BLOCK", 4)
    for module in ("sequence", "scheduler"):
        monkeypatch.setattr(f"workhorse.generate.{module}.BLOCK", 4)
