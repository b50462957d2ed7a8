"""Text from a decoder: sampling, greedy decoding, beam search, streaming."""

from workhorse.generate import samplers
from workhorse.generate.batch import PrefixCache
from workhorse.generate.beam import beam_search
from workhorse.generate.config import GenerationConfig
from workhorse.generate.engine import generate, stream
from workhorse.generate.result import Completion, Delta, FinishReason, TokenLogprob

__all__ = [
    "Completion",
    "Delta",
    "FinishReason",
    "GenerationConfig",
    "PrefixCache",
    "TokenLogprob",
    "beam_search",
    "generate",
    "samplers",
    "stream",
]
