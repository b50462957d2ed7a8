"""Rope scalings that depend on the sequence length use each sequence's own length in a batch."""

from typing import Any

import pytest
import torch
from torch import Tensor

from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.paged_view import PagedView

ORIGINAL = 8
SCALINGS: dict[str, dict[str, Any]] = {
    "dynamic_ntk": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0, 1.1, 1.2, 1.3],
        "long_factor": [4.0, 5.0, 6.0, 7.0],
    },
}
both_scalings = pytest.mark.parametrize("scaling", SCALINGS)
LENGTHS = [5, 30, 9, 1, 8]
"""Lengths below, at and above the original length."""


def make(scaling: str, **attention: object) -> Decoder:
    stretch = {"kind": scaling, "original_max_seq_len": ORIGINAL, **SCALINGS[scaling]}
    block = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": {
            "n_heads": 2,
            "position": {"kind": "rope", "theta": 100.0, "scaling": stretch},
            **attention,
        },
        "feed_forward": {"kind": "gated_mlp", "d_ff": 32},
    }
    config = DecoderConfig.from_dict(
        {
            "vocab_size": 50,
            "d_model": 16,
            "n_layers": 2,
            "max_seq_len": 64,
            "blocks": {"main": block},
            "init": {"kind": "normal", "std": 0.5},
        }
    )
    torch.manual_seed(0)
    return config.build(dtype=torch.float64).eval()


def texts(lengths: list[int]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(50, (1, length), generator=generator) for length in lengths]


def side_by_side(rows: list[Tensor], starts: list[int], left: bool) -> tuple[Tensor, Tensor]:
    """Pad rows to the longest; their positions begin at `starts`."""
    seq = max(row.shape[1] for row in rows)
    tokens = torch.zeros(len(rows), seq, dtype=torch.int64)
    positions = torch.full_like(tokens, -1)
    for r, (row, start) in enumerate(zip(rows, starts, strict=True)):
        where = slice(seq - row.shape[1], seq) if left else slice(0, row.shape[1])
        tokens[r, where] = row
        positions[r, where] = torch.arange(start, start + row.shape[1])
    return tokens, positions


@both_scalings
@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_padded_rows_are_what_they_are_alone(scaling: str, left: bool) -> None:
    decoder, rows = make(scaling), texts(LENGTHS)
    tokens, positions = side_by_side(rows, [0] * len(rows), left)
    logits = decoder(tokens, positions=positions)
    for r, row in enumerate(rows):
        torch.testing.assert_close(logits[r][positions[r] >= 0], decoder(row)[0])


@both_scalings
@pytest.mark.parametrize("window", [None, 4])
@torch.no_grad()
def test_cached_rows_are_what_they_are_alone(scaling: str, window: int | None) -> None:
    """Prompts in unequal pieces, decode steps, truncation, and reordered rows."""
    decoder, rows = make(scaling, window=window), texts([length + 6 for length in LENGTHS])
    together = decoder.new_cache(len(rows), 40, slack=2)
    alone = [decoder.new_cache(1, 40, slack=2) for _ in rows]
    for pieces in ([4, 20, 3, 1, 2], [1, 10, 6, 0, 6], [1] * 5, [3] * 5, "back", [1] * 5, [2] * 5):
        held = [int(cache.lengths) for cache in alone]
        if isinstance(pieces, str):
            kept = [held[0] - 1, *held[1:3], held[3] - 2, held[4]]
            for cache, length in zip(alone, kept, strict=True):
                cache.truncate([length])
            together.truncate(kept)
            reordered = [together.sequences[r] for r in (4, 2, 1, 0, 3)]
            together = PagedView(together.cache, reordered, 40)
            rows = [rows[r] for r in (4, 2, 1, 0, 3)]
            alone = [alone[r] for r in (4, 2, 1, 0, 3)]
            continue
        new = [row[:, start : start + n] for row, start, n in zip(rows, held, pieces, strict=True)]
        tokens, positions = side_by_side(new, held, left=True)
        logits = decoder(tokens, positions=positions, cache=together)
        for r, (piece, cache) in enumerate(zip(new, alone, strict=True)):
            if piece.shape[1]:
                own = decoder(piece, cache=cache)[0]
                torch.testing.assert_close(logits[r, -piece.shape[1] :], own)
    assert min(together.lengths.tolist()) <= ORIGINAL < max(together.lengths.tolist())


@both_scalings
@torch.no_grad()
def test_up_to_the_original_length_cached_equals_whole_beside_longer_rows(scaling: str) -> None:
    decoder, rows = make(scaling), texts([ORIGINAL, 30])
    tokens, positions = side_by_side([rows[0][:, :3], rows[1][:, :20]], [0, 0], left=True)
    cache = decoder.new_cache(2, 40)
    logits = [decoder(tokens, positions=positions, cache=cache)[0, -3:]]
    for step in range(3, ORIGINAL):
        pair = torch.cat((rows[0][:, step : step + 1], rows[1][:, step + 17 : step + 18]))
        logits.append(decoder(pair, cache=cache)[0])
    torch.testing.assert_close(torch.cat(logits), decoder(rows[0])[0])


@both_scalings
@torch.no_grad()
def test_packed_documents_have_lengths_of_their_own(scaling: str) -> None:
    decoder, rows = make(scaling), texts(LENGTHS)
    documents = torch.tensor([[n for n, length in enumerate(LENGTHS) for _ in range(length)]])
    logits = decoder(torch.cat(rows, dim=1), documents=documents)
    whole = torch.cat([decoder(row) for row in rows], dim=1)
    torch.testing.assert_close(logits, whole)
