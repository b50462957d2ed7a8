"""The process of `GrammarChecker`, which answers a grammar with its error; see `child_process`.

It imports only llguidance and the standard library.
"""

import resource
from collections.abc import Callable

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY = 2 << 30
"""Limit of the address space in bytes."""


def limits() -> LLParserLimits:
    """Return llguidance's limits: a mask may take a few milliseconds, a grammar megabytes."""
    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=5_000, verbose_errors=False)


def error_of(matcher: LLMatcher) -> str:
    """Return the reason why a grammar cannot be used; empty if it can."""
    return " ".join(matcher.get_error().split())[:300] if matcher.is_error() else ""


def start() -> Callable[[str], str]:
    """Return the function that compiles a grammar and returns its error, within limits."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")

    def answer(source: str) -> str:
        matcher = LLMatcher(tokenizer, source, log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        return error_of(matcher)

    return answer
