"""Generation with a decoder: sampling, greedy decoding, beam search, streaming."""

from workhorse.generate import sampling
from workhorse.generate.beam import beam_search
from workhorse.generate.complete import generate, stream
from workhorse.generate.config import (
    Completion,
    Delta,
    FinishReason,
    GenerationConfig,
    TokenLogprob,
)
from workhorse.generate.engine import Engine

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "FinishReason",
    "GenerationConfig",
    "TokenLogprob",
    "beam_search",
    "generate",
    "sampling",
    "stream",
]
