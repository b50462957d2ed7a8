"""From logits to the next token: small functions of logits `(batch, vocab)`, and their composition.

Every row is processed by itself, so its result does not depend on the others. A filter removes a
token by setting its logit to -inf.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from workhorse.generate.config import GenerationConfig
from workhorse.native import Decoding
from workhorse.nn.logprobs import normaliser

_READ_NATIVELY = (torch.bfloat16, torch.float32)
_NUCLEUS_FIRST_LOOK = 1024  # likeliest tokens tried before top-p sorts the whole vocabulary


def temperature(logits: Tensor, temperature: float) -> Tensor:
    """`logits / temperature`: below 1 sharpens the distribution, above 1 flattens it."""
    return logits / temperature


def top_k(logits: Tensor, k: int) -> Tensor:
    """Keep the k likeliest tokens (and any that tie with the last of them).

    A k larger than the vocabulary keeps everything.
    Paper: Fan et al., 1805.04833, §5.
    """
    floor = logits.topk(min(k, logits.shape[-1]), dim=-1).values[:, -1:]
    return logits.masked_fill(logits < floor, -torch.inf)


def top_p(logits: Tensor, p: float) -> Tensor:
    """Keep the smallest set of likeliest tokens whose probabilities sum to at least p.

    Tokens that tie with the last of them stay as well, so the order of ids never matters.
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

    Source: the OpenAI API's `presence_penalty` and `frequency_penalty`, which count new text only.
    """
    return logits - presence * (counts > 0) - frequency * counts


def logit_bias(logits: Tensor, bias: Mapping[int, float]) -> Tensor:
    """Add `bias[token]` to the logit of each token in `bias`."""
    ids = torch.tensor(list(bias), device=logits.device)
    values = torch.tensor(list(bias.values()), device=logits.device, dtype=logits.dtype)
    return logits.index_add(-1, ids, values.expand(logits.shape[0], -1))


def below(logits: Tensor, vocab: int) -> Tensor:
    """Remove the ids from `vocab` up: rows of a padded embedding that encode no text."""
    return torch.cat((logits[:, :vocab], torch.full_like(logits[:, vocab:], -torch.inf)), dim=-1)


def all_finite(logits: Tensor) -> bool:
    """Whether every number is finite: if one is not, nor is their sum."""
    return bool(logits.sum(dtype=torch.float32).isfinite())  # far faster than testing each


def argmax(logits: Tensor, decoding: Decoding | None = None) -> Tensor:
    """`greedy` for unprocessed logits of a model; -1 for a row with a logit that is not finite.

    Args:
        logits: `(batch, vocab)`.
        decoding: the native operators, which do both in one pass over the logits.
    """
    if decoding is not None and logits.is_cpu and logits.dtype in _READ_NATIVELY:
        return decoding.argmax(logits)
    finite = logits.sum(dim=-1, dtype=torch.float32).isfinite()
    return torch.where(finite, greedy(logits), -1)


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row, int64 `(batch,)`."""
    return logits.max(dim=-1).indices  # argmax is three times slower on CPU


def draw(logits: Tensor, uniforms: Tensor) -> Tensor:
    """A token for each row, drawn from `softmax(logits)`; see `draw_from`."""
    return draw_from(logits.softmax(dim=-1, dtype=torch.float64), uniforms)


def draw_from(weights: Tensor, uniforms: Tensor) -> Tensor:
    """A token for each row, int64 `(batch,)`, with probability proportional to its weight.

    Inverts the cumulative distribution in float64. A token takes one uniform number, so a seed
    means the same on every device, and a rounding difference in the weights changes the token only
    if the number falls within that rounding of a boundary.

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


@dataclass
class History:
    """The tokens that penalties count, by row.

    Attributes:
        prompt: bool `(batch, vocab)`, tokens in the prompt.
        counts: int64 `(batch, vocab)`, occurrences in the new text.
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
        """Tokens in the prompt or the new text, bool `(batch, vocab)`."""
        return self.prompt | (self.counts > 0)

    def add(self, tokens: Tensor, rows: Sequence[int] | None = None) -> None:
        """Count one new token, int64 `(len(rows),)`, in each of these rows; None: in every row."""
        where = torch.arange(len(tokens)) if rows is None else torch.tensor(rows)
        one = torch.ones_like(tokens)
        self.counts.index_put_((where.to(tokens.device), tokens), one, accumulate=True)

    def copy(self, rows: Sequence[int]) -> "History":
        """A copy of these rows."""
        index = torch.tensor(rows, device=self.counts.device)
        return History(self.prompt[index], self.counts[index])

    def select_rows(self, index: Tensor) -> None:
        self.prompt, self.counts = self.prompt[index], self.counts[index]


Shaper = Callable[[Tensor, History | None], Tensor]
"""`(logits (batch, vocab), history) -> logits float32 (batch, vocab)` that are drawn from."""


def has_penalties(config: GenerationConfig) -> bool:
    """Whether the sampler of `config` reads a `History`."""
    return config.repetition_penalty != 1 or bool(
        config.presence_penalty or config.frequency_penalty
    )


def takes_likeliest(config: GenerationConfig) -> bool:
    """Whether the next token is simply the one with the largest of the model's logits."""
    return not (config.samples or config.logit_bias or has_penalties(config))


def shaping(config: GenerationConfig, vocab: int | None = None) -> Shaper:
    """The function that `config` applies to logits before a token is chosen.

    The order is that of Hugging Face's `generate`: bias, penalties, temperature, top-k, top-p,
    min-p. Each filter sees what the one before it left.
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
