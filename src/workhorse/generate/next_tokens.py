"""The next tokens of the requests of a step: chosen from logits, or guessed before a pass."""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from workhorse.execute.backend import Backend
from workhorse.generate.config import TokenLogprob
from workhorse.generate.request import Guess, Request
from workhorse.generate.runner import Logits
from workhorse.generate.sampling import Chooser, token_logprobs
from workhorse.generate.speculation import Proposer


class NextTokens:
    """Chooses and guesses tokens, together for requests with the same options.

    Args:
        backend: the backend that computes the logits.
        vocab: the number of ids in use; larger ids are never chosen.
        proposer: guesses tokens.
        speculate: the maximum number of guessed tokens of a request in a pass.
    """

    def __init__(self, backend: Backend, vocab: int, proposer: Proposer, speculate: int) -> None:
        self._backend = backend
        self._vocab = vocab
        self._proposer = proposer
        self._speculate = speculate
        # Dynamic NTK and LongRoPE choose the angles of a whole pass by the length at its end: past
        # the original length, a guess would change the logits of the tokens before it.
        self._steady = backend.decoder.config.steady_length()
        self._choosers: dict[str, Chooser] = {}

    def leave(self, request: Request) -> None:
        """Drop a request that has ended or was preempted."""
        self._proposer.leave(request)

    def reset(self) -> None:
        """Drop all requests; must also work after an exception in another method."""
        self._choosers.clear()
        self._proposer.reset()

    def guess(self, running: Sequence[Request]) -> None:
        """Guess tokens for the running requests that decode and have a new token.

        The pass over a prompt's last token has no guesses, since other samples may start from it.
        """
        used = {request.sampling_key for request in running}
        self._choosers = {key: chooser for key, chooser in self._choosers.items() if key in used}
        for request in running:
            request.expect(Guess())
        guessing = [
            request
            for request in running
            if request.config.speculate and request.sequence.pending == 1 and request.deltas
        ]
        for chooser, indices in self._groups(guessing):
            some = [guessing[n] for n in indices]
            guesses = self._proposer.propose(some, list(map(self._most_guesses, some)), chooser)
            for request, guess in zip(some, guesses, strict=True):
                request.expect(guess)

    def choose(
        self,
        logits: Logits,
        requests: Sequence[Request],
        ahead: Callable[[Tensor], object] | None,
    ) -> Iterator[tuple[Request, int, TokenLogprob | None]]:
        """Choose the next tokens of requests from their logits; see `Chooser.choose`."""
        for chooser, indices in self._groups(requests):
            last = [logits.last[n] for n in indices]
            yield from chooser.choose(logits.of, last, [requests[n] for n in indices], ahead)

    def _groups(self, requests: Sequence[Request]) -> list[tuple[Chooser, list[int]]]:
        groups: dict[str, list[int]] = {}
        for n, request in enumerate(requests):
            groups.setdefault(request.sampling_key, []).append(n)
        for key, indices in groups.items():
            if key not in self._choosers:
                config = requests[indices[0]].config
                self._choosers[key] = Chooser(config, self._vocab, self._backend)
        return [(self._choosers[key], indices) for key, indices in groups.items()]

    def _most_guesses(self, request: Request) -> int:
        steady = self._steady - len(request.sequence.tokens)
        return max(0, min(request.config.speculate, self._speculate, request.left - 1, steady))


def may_look_ahead(requests: Sequence[Request], context: int) -> bool:
    """True if the next tokens of requests may be processed before they are on the host.

    This requires that all have the same adapter and the same sampling options, and that the context
    has room for one more token of each.
    """
    return all(
        request.sampling_key == requests[0].sampling_key
        and request.sequence.adapter == requests[0].sequence.adapter
        and request.may_look_ahead
        and request.sequence.prompt is None
        and len(request.sequence.tokens) < context
        for request in requests
    )


def score_prompt(backend: Backend, request: Request, logits: Tensor) -> None:
    """Compute log-probabilities of prompt tokens from the logits of the tokens before them."""
    start = request.sequence.cached.length - len(logits)
    following = torch.tensor(request.prompt[start + 1 : start + 1 + len(logits)])
    rows, n = logits[: len(following)], request.config.prompt_logprobs
    following = following.to(rows.device)
    scores = token_logprobs(rows, following, n, backend.scores(rows, following))
    request.score(start, [one for one in scores if one is not None])
