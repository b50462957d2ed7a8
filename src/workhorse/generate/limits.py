"""The limits of an engine, the check of a request against them, and the engine's load."""

from dataclasses import dataclass
from typing import NamedTuple, Self

from workhorse.config.arguments import integer
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend
from workhorse.generate.checks import check_exact
from workhorse.generate.config import GenerationConfig
from workhorse.generate.runner import tokens_needed
from workhorse.generate.sequence import PIECE
from workhorse.nn.cache.paged import PagedCache

TOKEN_BUDGET = 4096


class Load(NamedTuple):
    """The load of an engine."""

    running: int
    """Number of requests that have cache blocks."""
    waiting: int
    """Number of requests in the queue."""
    cache: float
    """Fraction of the cache blocks that sequences use."""


@dataclass(frozen=True)
class Limits:
    """Limits of an engine; see the arguments of `Engine`.

    Attributes:
        context: the decoder's maximum sequence length.
        sequences: maximum number of completions that advance together.
        speculate: maximum number of guessed tokens of a request per step.
        budget: maximum number of tokens per step.
        tokens: maximum number of tokens in the cache.
        has_draft: True if a draft model guesses.
    """

    context: int
    sequences: int
    speculate: int
    budget: int
    tokens: int
    has_draft: bool

    @classmethod
    def checked(
        cls,
        context: int,
        *,
        max_sequences: int,
        speculate: int,
        token_budget: int | None,
        max_tokens: int | None,
        has_draft: bool,
    ) -> Self:
        """Check an engine's arguments, and replace None by the defaults."""
        sequences = integer("max_sequences", max_sequences, 1)
        speculate = integer("speculate", speculate, 0)
        least = sequences * (1 + speculate)
        if token_budget is None:
            token_budget = max(TOKEN_BUDGET, least)
        budget = integer("token_budget", token_budget, 1)
        if budget < least:
            raise WorkhorseError(
                f"token_budget={budget} is too small for one token and speculate={speculate} "
                f"guesses of each of max_sequences={sequences} sequences; "
                f"give token_budget={least} or more"
            )
        tokens = sequences * (context + speculate)
        if max_tokens is not None:
            tokens = integer("max_tokens", max_tokens, 1)
        return cls(context, sequences, speculate, budget, tokens, has_draft)

    def check(
        self, config: GenerationConfig, prompt_tokens: int, backend: Backend, cache: PagedCache
    ) -> None:
        """Raise a WorkhorseError if the engine can never serve a request with this backend."""
        if config.beams > 1:
            raise WorkhorseError(
                f"beams={config.beams}: beam search returns no tokens before its end, so an engine "
                "cannot run it; omit beams"
            )
        if slack_of(config, self.context) > self.speculate:
            raise WorkhorseError(
                f"speculate={config.speculate} is more than speculate={self.speculate} of this "
                f"engine; create it with speculate={config.speculate}"
            )
        check_exact(backend, config, self.speculate, has_draft=self.has_draft)
        piece = self.sequences - 1 + min(PIECE, self.context)
        if config.exact and not backend.is_invariant and self.budget < piece:
            raise WorkhorseError(
                f"token_budget={self.budget} is too small for exact=True with "
                f"max_sequences={self.sequences}; "
                f"create the engine with token_budget={piece}"
            )
        if config.n_samples > self.sequences:
            raise WorkhorseError(
                f"n_samples={config.n_samples} is more than max_sequences={self.sequences}; "
                f"create the engine with max_sequences={config.n_samples}"
            )
        most = tokens_needed(prompt_tokens, config.max_new_tokens - 1, self.context, self.speculate)
        if not cache.holds(most):
            raise WorkhorseError(
                f"the request needs {most} tokens of cache, and the engine has {cache.tokens}; "
                "reduce max_new_tokens, or create the engine with a larger max_tokens"
            )


def slack_of(config: GenerationConfig, context: int) -> int:
    """Return the maximum number of guesses in a pass. A cache must be able to remove them."""
    return min(config.speculate, config.max_new_tokens, context)
