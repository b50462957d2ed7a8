"""Text from a decoder: sampling, greedy decoding, beam search, streaming."""

from workhorse.generate.beam import beam_search
from workhorse.generate.complete import generate, stream
from workhorse.generate.config import GenerationConfig
from workhorse.generate.engine import Engine
from workhorse.generate.result import Completion, Delta, FinishReason, TokenLogprob
from workhorse.generate.sampling import samplers

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "FinishReason",
    "GenerationConfig",
    "TokenLogprob",
    "beam_search",
    "generate",
    "samplers",
    "stream",
]
