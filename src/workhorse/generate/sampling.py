"""Sampling: choose the next token of each request in a batch from its logits.

Every row of logits is processed independently. A filter removes a token by setting its logit to
-inf.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.devices.transfer import ToHost
from workhorse.errors import WorkhorseError, shown
from workhorse.execute.backend import Backend
from workhorse.generate.config import GenerationConfig, TokenLogprob
from workhorse.generate.request import Request
from workhorse.native import Decoding
from workhorse.nn.logprobs import log_probabilities, normaliser

_READ_NATIVELY = (torch.bfloat16, torch.float32)
_NUCLEUS_FIRST_LOOK = 1024  # likeliest tokens tried before top-p sorts the whole vocabulary


def temperature(logits: Tensor, temperature: float) -> Tensor:
    """`logits / temperature`: below 1 sharpens the distribution, above 1 flattens it."""
    return logits / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens (and any that tie with the last one).

    A k larger than the vocabulary keeps everything.
    Paper: Fan et al., 1805.04833, §5.
    """
    floor = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < floor, -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least p.

    Tokens that tie with the last one are kept too, so the order of ids never matters.
    Paper: Holtzman et al., 1904.09751, §3.1 (nucleus sampling).
    """
    total = normaliser(logits)
    # A full sort of a large vocabulary costs more than a small model's step, and the nucleus is
    # nearly always among the first tokens.
    ordered = logits.topk(min(_NUCLEUS_FIRST_LOOK, logits.shape[-1]), dim=-1).values
    mass = (ordered - total).exp().cumsum(dim=-1, dtype=torch.float64)
    if ordered.shape[-1] < logits.shape[-1] and bool((mass[:, -1] < p).any()):
        ordered = logits.sort(dim=-1, descending=True).values
        mass = (ordered - total).exp().cumsum(dim=-1, dtype=torch.float64)
    last = (mass < p).sum(dim=-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)
    return logits.masked_fill(logits < ordered.gather(-1, last), -torch.inf)


def min_p(logits: Tensor, p: float) -> Tensor:
    """Keep tokens with `probability >= p * (probability of the likeliest)`.

    Paper: Nguyen et al., 2407.01082.
    """
    floor = logits.amax(dim=-1, keepdim=True) + math.log(p)
    return logits.masked_fill(logits < floor, -torch.inf)


def repetition_penalty(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Divide positive and multiply negative logits of the tokens in `seen`, bool `(batch, vocab)`.

    Paper: CTRL, 1909.05858, §4.1, which divides every logit. Multiplying negative ones, as all
    implementations do, makes a penalty above 1 lower them too.
    """
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def presence_and_frequency_penalty(
    logits: Tensor, counts: Tensor, presence: float, frequency: float
) -> Tensor:
    """`logits - presence * (counts > 0) - frequency * counts`, counts int64 `(batch, vocab)`.

    Source: the OpenAI API's `presence_penalty` and `frequency_penalty`, which count only new
    tokens.
    """
    return logits - presence * (counts > 0) - frequency * counts


def logit_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add `bias[token]` to the logit of each token in `bias`."""
    ids = torch.tensor(list(bias), device=logits.device)
    values = torch.tensor(list(bias.values()), device=logits.device, dtype=logits.dtype)
    return logits.index_add(-1, ids, values.expand(logits.shape[0], -1))


def below(logits: Tensor, vocab: int) -> Tensor:
    """Set the logits of ids >= `vocab` to -inf: an embedding may be padded with unused rows."""
    return torch.cat((logits[:, :vocab], torch.full_like(logits[:, vocab:], -torch.inf)), dim=-1)


def all_finite(logits: Tensor) -> bool:
    """True if all logits are finite. If one is not, their sum is not finite either."""
    return bool(logits.sum(dtype=torch.float32).isfinite())  # far faster than testing each


def argmax(logits: Tensor, decoding: Decoding | None = None) -> Tensor:
    """Return the likeliest token of each row, from the unprocessed logits of a model.

    The result is -1 for a row with a logit that is not finite.

    Args:
        logits: `(batch, vocab)`.
        decoding: native operators, which find the token and check the logits in one pass; None:
            use PyTorch's operators.
    """
    if decoding is not None and logits.is_cpu and logits.dtype in _READ_NATIVELY:
        return decoding.argmax(logits)
    finite = logits.sum(dim=-1, dtype=torch.float32).isfinite()
    return torch.where(finite, greedy(logits), -1)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, int64 `(batch,)`."""
    return logits.max(dim=-1).indices  # argmax is three times slower on CPU


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row from `softmax(logits)`; see `draw_from`."""
    return draw_from(logits.softmax(dim=-1, dtype=torch.float64), uniforms)


def draw_from(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token for each row, int64 `(batch,)`, with probability proportional to its weight.

    Inverts the cumulative distribution in float64. Each token uses one uniform number, so a seed
    gives the same tokens on every device, except that rounding of the weights can change a token if
    the uniform number is almost at a boundary between two tokens.

    Args:
        weights: float64 `(batch, vocab)`, 0 or more, not all 0 in a row.
        uniforms: float64 `(batch,)`, from 0 to 1 - 2^-53.
    """
    mass = weights.cumsum(dim=-1)
    # A uniform is at most 1 - 2^-53, so the product stays below the total. A token owns the
    # half-open interval from the mass before it to the mass including it (right=True), which is
    # empty for a weight of zero.
    targets = uniforms.to(mass.device)[:, None] * mass[:, -1:]
    return torch.searchsorted(mass, targets, right=True).squeeze(-1)


def after_guess(target: Tensor, token: int, draft: Tensor, uniform: float) -> Tensor:
    """Return weights for drawing the token at a guessed position, so that it follows `target`.

    With probability `min(1, target/draft)` all weight is on the guessed token; otherwise the
    weights are the excess `max(0, target - draft)`. Papers: 2211.17192 §2.3; 2302.01318,
    algorithm 2.

    Args:
        target: the model's probabilities, float64 `(vocab,)`.
        token: the guess.
        draft: the probabilities that the guess was drawn from, float64 `(vocab,)`.
        uniform: a random number in [0, 1) that is used only here.

    Returns:
        Weights, float64 `(vocab,)`.
    """
    if uniform * draft[token] < target[token]:
        accepted = torch.zeros_like(target)
        accepted[token] = 1
        return accepted
    excess = (target - draft).clamp(min=0)
    # The excess is zero if the distributions differ only by the rounding of their sums.
    return excess if bool(excess.any()) else target


@dataclass
class History:
    """The tokens that penalties apply to, one row per request.

    Attributes:
        prompt: bool `(batch, vocab)`, tokens in the prompt.
        counts: int64 `(batch, vocab)`, occurrences in the completion.
    """

    prompt: Tensor
    counts: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Sequence[int]], vocab: int, device: torch.device) -> "History":
        prompt = torch.zeros(len(prompts), vocab, dtype=torch.bool, device=device)
        for row, tokens in zip(prompt, prompts, strict=True):
            row[torch.tensor(tokens, device=device)] = True
        return cls(prompt, torch.zeros(prompt.shape, dtype=torch.int64, device=device))

    @property
    def seen(self) -> Tensor:
        """Tokens in the prompt or the completion, bool `(batch, vocab)`."""
        return self.prompt | (self.counts > 0)

    def add(self, tokens: Tensor, rows: Sequence[int] | None = None) -> None:
        """Count one new token for each row.

        Args:
            tokens: the new tokens, int64 `(len(rows),)`.
            rows: the rows that they belong to; None: all rows.
        """
        where = torch.arange(len(tokens)) if rows is None else torch.tensor(rows)
        one = torch.ones_like(tokens)
        self.counts.index_put_((where.to(tokens.device), tokens), one, accumulate=True)

    def copy(self, rows: Sequence[int]) -> "History":
        """Return a copy of these rows."""
        index = torch.tensor(rows, device=self.counts.device)
        return History(self.prompt[index], self.counts[index])


Shaper = Callable[[Tensor, History | None], Tensor]
"""Function that applies bias, penalties, temperature and filters:
`(logits (batch, vocab), history) -> logits float32 (batch, vocab)`."""


def has_penalties(config: GenerationConfig) -> bool:
    """True if `config` has penalties, so that its sampler needs a `History`."""
    return config.repetition_penalty != 1 or bool(
        config.presence_penalty or config.frequency_penalty
    )


def takes_likeliest(config: GenerationConfig) -> bool:
    """True if the next token is simply the argmax of the model's logits."""
    return not (config.samples or config.logit_bias or has_penalties(config))


def shaping(config: GenerationConfig, vocab: int | None = None) -> Shaper:
    """Create the function that applies the options of `config` to logits before a token is chosen.

    The order is the same as in Hugging Face's `generate`: bias, penalties, temperature, top-k,
    top-p, min-p. Each filter works on the result of the previous one.
    """
    steps: list[Callable[[Tensor, History | None], Tensor]] = []
    if vocab is not None:
        steps.append(lambda logits, history: below(logits, vocab))
    if config.logit_bias:
        steps.append(lambda logits, history: logit_bias(logits, config.logit_bias))
    if has_penalties(config):
        steps.append(lambda logits, history: _penalize(logits, history, config))
    if config.temperature not in (0, 1):
        steps.append(lambda logits, history: temperature(logits, config.temperature))
    if (k := config.top_k) is not None:
        steps.append(lambda logits, history: top_k(logits, k))
    if config.top_p < 1:
        steps.append(lambda logits, history: top_p(logits, config.top_p))
    if config.min_p > 0:
        steps.append(lambda logits, history: min_p(logits, config.min_p))

    def shape(logits: Tensor, history: History | None) -> Tensor:
        logits = logits.float()
        for step in steps:
            logits = step(logits, history)
        return logits

    return shape


def _penalize(logits: Tensor, history: History | None, config: GenerationConfig) -> Tensor:
    assert history is not None, "penalties need a history"
    if config.repetition_penalty != 1:
        logits = repetition_penalty(logits, history.seen, config.repetition_penalty)
    if config.presence_penalty or config.frequency_penalty:
        logits = presence_and_frequency_penalty(
            logits, history.counts, config.presence_penalty, config.frequency_penalty
        )
    return logits


class Chooser:
    """Chooses tokens for requests with the same sampling options.

    Args:
        config: the sampling options.
        vocab: the number of ids in use; larger ids are never chosen.
        backend: the backend that computes the logits.
    """

    def __init__(self, config: GenerationConfig, vocab: int, backend: Backend) -> None:
        size = backend.decoder.config.vocab_size
        self.config = config
        self.shape = shaping(config, vocab if vocab < size else None)
        self._vocab = vocab
        self._size = size
        self._backend = backend
        self._rows: list[Request] = []
        self._history: History | None = None

    def history(self, rows: Sequence[Request], device: torch.device) -> History | None:
        """Return the tokens of these requests that penalties apply to; None without penalties."""
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
        """Choose tokens from the logits of one pass, and yield them with their requests.

        The caller must call `Request.take` with each token before it asks for the next one.

        Args:
            logits: `(tokens, vocab)`, after the last token and each guess of every request.
            last: for each request, the row of `logits` after its last guess.
            rows: the requests.
            ahead: a function called with the chosen tokens, int64 `(rows,)` on the device of the
                logits, before the host waits for the tokens.
        """
        history, indices = self.history(rows, logits.device), list(range(len(rows)))
        while indices:
            chosen = [rows[r] for r in indices]
            everyone = len(indices) == len(rows)
            wanted = [last[r] - rows[r].unmet for r in indices]
            at = logits if wanted == list(range(len(logits))) else logits[wanted]
            past = history if history is None or everyone else history.copy(indices)
            tokens, processed = self._choose(at, chosen, past)
            arriving = ToHost(tokens)
            if ahead is not None:
                ahead(tokens)
            ids = arriving.wait()
            _check_rows(min(ids) >= 0, at, chosen)
            scored, own = processed, None
            if self.config.logprobs is not None and not self.config.processed_logprobs:
                scored, own = at, self._backend.scores(at, tokens)
            logprobs = token_logprobs(scored, tokens, self.config.logprobs, own)
            if history is not None:
                history.add(tokens, indices)
            yield from zip(chosen, ids, logprobs, strict=True)
            indices = [r for r in indices if rows[r].has_more_logits]

    def _choose(
        self, logits: Tensor, rows: Sequence[Request], history: History | None
    ) -> tuple[Tensor, Tensor]:
        """Choose the next token of each row.

        If logits are not finite, the token is -1 or a WorkhorseError is raised. It is -1 only if
        tokens are chosen by an argmax of unprocessed logits.

        Returns:
            The tokens, int64 `(batch,)`, and the logits that they were chosen from.
        """
        processed = any(row.processors for row in rows)
        if takes_likeliest(self.config) and not processed:
            logits = logits[:, : self._vocab]
            return argmax(logits, self._backend.operators.decoding), logits
        _check_rows(all_finite(logits), logits, rows)
        if processed:
            logits = torch.stack([_processed(*both) for both in zip(logits, rows, strict=True)])
        logits = self.shape(logits, history)
        if processed:
            _check_shaped(logits, rows)
        if not self.config.samples:
            return greedy(logits), logits
        drawn = [r for r, row in enumerate(rows) if row.unmet and row.guess.drawn_from is not None]
        if not drawn:
            return draw(logits, _uniforms(rows)), logits
        weights = logits.softmax(dim=-1, dtype=torch.float64)
        for r in drawn:
            guess, n = rows[r].guess, rows[r].agreed
            assert guess.drawn_from is not None
            weights[r] = after_guess(
                weights[r], guess.tokens[n], guess.drawn_from[n], rows[r].uniform()
            )
        return draw_from(weights, _uniforms(rows)), logits


def check_finite(finite: bool, whose: str = "the model") -> None:
    """Raise a WorkhorseError if `finite` is False; `whose` names the model in the message."""
    if not finite:
        raise WorkhorseError(f"{whose}'s logits are not finite (nan or inf); check its weights")


def _check_rows(finite: bool, logits: Tensor, rows: Sequence[Request]) -> None:
    if not finite:
        for row, its_logits in zip(rows, logits, strict=True):
            if not all_finite(its_logits[None]):
                row.fail()
    check_finite(finite)


def _check_shaped(logits: Tensor, rows: Sequence[Request]) -> None:
    """Raise a WorkhorseError if no token can be chosen from processed logits."""
    for row, largest in zip(rows, logits.amax(dim=-1).tolist(), strict=True):
        if row.processors and not math.isfinite(largest):
            row.fail()
            raise WorkhorseError(
                f"the largest logit after a processor, penalties and temperature is {largest}; "
                "return smaller logits, and allow at least one token"
            )


def _processed(logits: Tensor, row: Request) -> Tensor:
    if not row.processors:
        return logits.float()
    try:
        return _by_processors(logits, row)
    except Exception:
        row.fail()
        raise


def _by_processors(logits: Tensor, row: Request) -> Tensor:
    changed = logits.to(torch.float32, copy=True)  # processors may write to it
    for processor in row.processors:
        gave: object = processor(changed, tuple(row.tokens))
        if not isinstance(gave, Tensor) or gave.shape != logits.shape:
            what = tuple(gave.shape) if isinstance(gave, Tensor) else shown(gave)
            raise WorkhorseError(
                f"a logit processor returned {what}; return logits of shape {tuple(logits.shape)}"
            )
        changed = gave.to(logits.device, torch.float32)
        if bool((changed.isnan() | (changed == torch.inf)).any()):
            raise WorkhorseError(
                "a logit processor returned nan or inf; return finite logits, or -inf to forbid a "
                "token"
            )
    if bool((changed == -torch.inf).all()):
        raise WorkhorseError(
            "a logit processor forbids every token; allow at least one, such as the eos"
        )
    return changed


def _uniforms(rows: Sequence[Request]) -> Tensor:
    return torch.tensor([row.uniform() for row in rows], dtype=torch.float64)


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    n: int | None,
    own: Tensor | None = None,
) -> list[TokenLogprob | None]:
    """Return the log-probability of a token and the n likeliest tokens for each row of logits.

    Args:
        logits: `(rows, vocab)`.
        tokens: int64 `(rows,)`.
        n: number of likeliest tokens; None: the result is a list of None.
        own: the log-probabilities of the tokens, (rows,); None: PyTorch computes them in float32.
    """
    if n is None:
        return [None] * len(tokens)
    logprobs = log_probabilities(logits.float())
    if own is None:
        own = logprobs.gather(-1, tokens[:, None])[:, 0]
    best = logprobs.topk(min(n, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprob(
            token,
            logprob,
            tuple((one, p) for one, p in zip(ids, values, strict=True) if p > -torch.inf),
        )
        for token, logprob, ids, values in zip(
            tokens.tolist(), own.tolist(), best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
