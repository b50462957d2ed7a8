"""The process of `GrammarChecker`: reads grammars as lines of JSON, and answers with their errors.

It imports only llguidance and the standard library.
"""

import json
import resource
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

MEMORY = 2 << 30
"""Limit of the address space in bytes."""


def limits() -> LLParserLimits:
    """Return llguidance's limits: a mask may take a few milliseconds, a grammar megabytes."""
    return LLParserLimits(step_lexer_fuel=50_000, step_max_items=5_000, verbose_errors=False)


def error_of(matcher: LLMatcher) -> str:
    """Return the reason why a grammar cannot be used; empty if it can."""
    return " ".join(matcher.get_error().split())[:300] if matcher.is_error() else ""


def main() -> None:
    """Answer until the input ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")
    for line in sys.stdin:
        matcher = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        print(json.dumps(error_of(matcher)), flush=True)


if __name__ == "__main__":
    main()
