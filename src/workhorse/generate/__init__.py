"""Text from a decoder: sampling, greedy decoding, beam search, streaming."""

from workhorse.generate.beam import beam_search
from workhorse.generate.config import GenerationConfig
from workhorse.generate.engine import generate, stream
from workhorse.generate.result import Completion, Delta, FinishReason, TokenLogprob
from workhorse.generate.sampling import samplers
from workhorse.generate.scheduler import Scheduler

__all__ = [
    "Completion",
    "Delta",
    "FinishReason",
    "GenerationConfig",
    "Scheduler",
    "TokenLogprob",
    "beam_search",
    "generate",
    "samplers",
    "stream",
]
