"""The next tokens of rows with the same options: from logits to tokens and log-probabilities."""

import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from workhorse.devices.to_host import ToHost
from workhorse.errors import WorkhorseError, shown
from workhorse.generate.config import GenerationConfig
from workhorse.generate.request import Request
from workhorse.generate.result import TokenLogprob
from workhorse.generate.sampling.samplers import (
    History,
    all_finite,
    argmax,
    draw,
    draw_from,
    greedy,
    has_penalties,
    shaping,
    takes_likeliest,
)
from workhorse.generate.speculation.speculate import after_guess
from workhorse.native import Decoding
from workhorse.nn.logprobs import log_probabilities


class Chooser:
    """Chooses tokens for rows with the same options.

    Args:
        config: of one of the requests.
        vocab: the number of ids in use; larger ids are never chosen.
        size: of the vocabulary, padding included.
        decoding: the native operators that the decoder was prepared with.
    """

    def __init__(
        self, config: GenerationConfig, vocab: int, size: int, decoding: Decoding | None = None
    ) -> None:
        self.config = config
        self.shape = shaping(config, vocab if vocab < size else None)
        self._vocab = vocab
        self._size = size
        self._decoding = decoding
        self._rows: list[Request] = []
        self._history: History | None = None

    def history(self, rows: Sequence[Request], device: torch.device) -> History | None:
        """The tokens that penalties count; None without penalties."""
        if not has_penalties(self.config):
            return None
        if self._history is None or self._rows != list(rows):
            prompts = [row.prompt for row in rows]
            self._history, self._rows = History.of(prompts, self._size, device), list(rows)
            for n, row in enumerate(rows):
                if row.new_tokens:
                    new = torch.tensor(row.new_tokens, device=device)
                    self._history.add(new, [n] * len(new))
        return self._history

    @torch.no_grad()
    def choose(
        self,
        logits: Tensor,
        last: Sequence[int],
        rows: Sequence[Request],
        ahead: Callable[[Tensor], object] | None = None,
    ) -> Iterator[tuple[Request, int, TokenLogprob | None]]:
        """The tokens of one pass. The caller takes each (`Request.take`) before the next.

        Args:
            logits: `(tokens, vocab)`, after the last token and each guess of every request.
            last: for each request, the row of `logits` after its last guess.
            rows: the requests.
            ahead: called with the chosen tokens, int64 (rows,) on the device of the logits, before
                the host waits for them.
        """
        history, indices = self.history(rows, logits.device), list(range(len(rows)))
        while indices:
            chosen = [rows[r] for r in indices]
            everyone = len(indices) == len(rows)
            wanted = [last[r] - rows[r].unmet for r in indices]
            at = logits if wanted == list(range(len(logits))) else logits[wanted]
            past = history if history is None or everyone else history.copy(indices)
            tokens = self._choose(at, chosen, past)
            arriving = ToHost(tokens)
            if ahead is not None:
                ahead(tokens)
            ids = arriving.wait()
            _check_rows(min(ids) >= 0, at, chosen)
            logprobs = _logprobs(at, tokens, self.config.logprobs)
            if history is not None:
                history.add(tokens, indices)
            yield from zip(chosen, ids, logprobs, strict=True)
            indices = [r for r in indices if rows[r].has_more_logits]

    def _choose(self, logits: Tensor, rows: Sequence[Request], history: History | None) -> Tensor:
        """The next token of each row, int64 `(batch,)`, an id in use; -1 for logits not finite."""
        processed = any(row.processors for row in rows)
        if takes_likeliest(self.config) and not processed:
            return argmax(logits[:, : self._vocab], self._decoding)
        _check_rows(all_finite(logits), logits, rows)
        if processed:
            logits = torch.stack([_processed(*both) for both in zip(logits, rows, strict=True)])
        logits = self.shape(logits, history)
        if processed:
            _check_shaped(logits, rows)
        if not self.config.samples:
            return greedy(logits)
        drawn = [r for r, row in enumerate(rows) if row.unmet and row.guess.drawn_from is not None]
        if not drawn:
            return draw(logits, _uniforms(rows))
        weights = logits.softmax(dim=-1, dtype=torch.float64)
        for r in drawn:
            guess, n = rows[r].guess, rows[r].agreed
            assert guess.drawn_from is not None
            weights[r] = after_guess(
                weights[r], guess.tokens[n], guess.drawn_from[n], rows[r].uniform()
            )
        return draw_from(weights, _uniforms(rows))


def check_finite(finite: bool, whose: str = "the model") -> None:
    """Refuse logits that are not all finite numbers."""
    if not finite:
        raise WorkhorseError(f"{whose}'s logits are not finite numbers; its weights are damaged")


def _check_rows(finite: bool, logits: Tensor, rows: Sequence[Request]) -> None:
    if not finite:
        for row, its_logits in zip(rows, logits, strict=True):
            row.is_at_fault = not all_finite(its_logits[None])
    check_finite(finite)


def _check_shaped(logits: Tensor, rows: Sequence[Request]) -> None:
    """Refuse processed logits from which no token can be chosen."""
    for row, largest in zip(rows, logits.amax(dim=-1).tolist(), strict=True):
        if row.processors and not math.isfinite(largest):
            row.is_at_fault = True
            raise WorkhorseError(
                f"the largest logit after a processor, penalties and temperature is {largest}; "
                "allow at least one token, with smaller numbers"
            )


def _processed(logits: Tensor, row: Request) -> Tensor:
    if not row.processors:
        return logits.float()
    try:
        return _by_processors(logits, row)
    except Exception:
        row.is_at_fault = True
        raise


def _by_processors(logits: Tensor, row: Request) -> Tensor:
    changed = logits.to(torch.float32, copy=True)  # they may write to it
    for processor in row.processors:
        gave: object = processor(changed, tuple(row.tokens))
        if not isinstance(gave, Tensor) or gave.shape != logits.shape:
            what = tuple(gave.shape) if isinstance(gave, Tensor) else shown(gave)
            raise WorkhorseError(
                f"a logit processor returned {what}; return logits, {tuple(logits.shape)}"
            )
        changed = gave.to(logits.device, torch.float32)
        if bool((changed.isnan() | (changed == torch.inf)).any()):
            raise WorkhorseError(
                "a logit processor returned nan or inf; return numbers, or -inf to forbid a token"
            )
    if bool((changed == -torch.inf).all()):
        raise WorkhorseError(
            "a logit processor forbids every token; allow at least one, such as the eos"
        )
    return changed


def _uniforms(rows: Sequence[Request]) -> Tensor:
    return torch.tensor([row.uniform() for row in rows], dtype=torch.float64)


def _logprobs(logits: Tensor, tokens: Tensor, n: int | None) -> list[TokenLogprob | None]:
    if n is None:
        return [None] * len(tokens)
    logprobs = log_probabilities(logits.float())
    own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    best = logprobs.topk(min(n, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            tokens.tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
