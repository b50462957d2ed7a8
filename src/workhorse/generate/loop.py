"""The decoding loop: one token a step for every row, until each row ends.

`generate` collects what the loop yields and `stream` passes it on; there is no other loop but
beam search's.

A row is drawn with its own generator and treated by itself, so neither its neighbours in the batch
nor anything else that runs changes its text. One reservation: the logits of a row computed in
batches of different shapes agree to rounding only, so a choice can differ where two tokens are
that close to each other.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.generate.batch import PrefixCache, RowBatch
from workhorse.generate.config import GenerationConfig
from workhorse.generate.requests import TextOfTokens, stop_tokens, usable_vocab
from workhorse.generate.result import Delta, FinishReason, TokenLogprob
from workhorse.generate.samplers import History, Sampler, compose, has_penalties
from workhorse.generate.text import TextStream
from workhorse.nn import Decoder


def decode(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    tokenizer: TextOfTokens | None = None,
    *,
    seed: int = 0,
    first: int = 0,
    prefix: PrefixCache | None = None,
) -> Iterator[Delta]:
    """Yield every row's tokens as they are chosen; rows are numbered from `first`.

    Args:
        decoder: in evaluation mode.
        prompts: checked and within the context, see `requests.check_prompts`.
        config: how tokens are chosen and where a row ends.
        tokenizer: gives the text, the eos, and how many ids are in use.
        seed: row r of a prompt's samples starts its generator from `seed + r % n_samples`.
        first: the number of the first row.
        prefix: the cache of one conversation, for a single row.
    """
    vocab = usable_vocab(decoder, tokenizer)
    sampler = compose(config, vocab if vocab < decoder.config.vocab_size else None)
    rows = [
        _Row(index, prompt, decoder.max_seq_len, config, tokenizer=tokenizer, seed=seed)
        for index, prompt in enumerate(
            (prompt for prompt in prompts for _ in range(config.n_samples)), start=first
        )
    ]
    batch = RowBatch(decoder, prompts, config.max_new_tokens - 1, prefix)
    if config.n_samples > 1:  # a prompt is consumed once for all its samples
        batch.select_rows([p for p in range(len(prompts)) for _ in range(config.n_samples)])
    history = None
    if has_penalties(config):
        history = History.of(batch.rows, decoder.config.vocab_size, batch.logits.device)
    while True:
        tokens = _choose(sampler, batch.logits, rows, history)
        logprobs = _logprobs(batch.logits, tokens, config.logprobs)
        chosen = tokens.tolist()
        for row, token, logprob in zip(rows, chosen, logprobs, strict=True):
            yield row.take(token, logprob)
        going = [r for r, row in enumerate(rows) if row.finish_reason is None]
        if not going:
            break
        if history is not None:
            history.add(tokens)
        if len(going) < len(rows):  # the others leave, and cost nothing from now on
            rows = [rows[r] for r in going]
            chosen = [chosen[r] for r in going]
            batch.select_rows(going)
            if history is not None:
                history.select_rows(torch.tensor(going, device=tokens.device))
        batch.step(chosen)
    if prefix is not None:
        prefix.put(batch.cache, batch.rows[0])


class _Row:
    """One result in the making."""

    def __init__(
        self,
        index: int,
        prompt: Sequence[int],
        context: int,
        config: GenerationConfig,
        *,
        tokenizer: TextOfTokens | None,
        seed: int,
    ) -> None:
        self.finish_reason: FinishReason | None = None
        self._index = index
        self._left = config.max_new_tokens
        if config.truncate == "refuse":
            # The last token of a text is predicted but not consumed, so it may lie one beyond.
            self._left = min(self._left, context + 1 - len(prompt))
        self._stop_tokens = stop_tokens(config, tokenizer)
        self._text = None
        if tokenizer is not None:
            self._text = TextStream(tokenizer.stream(skip_special=True, after=prompt), config.stop)
        self._generator = torch.Generator()
        if config.samples:
            self._generator.manual_seed(seed + index % config.n_samples)

    def uniform(self) -> float:
        """The next number of this row's generator, on CPU whatever the device."""
        return torch.rand((), dtype=torch.float64, generator=self._generator).item()

    def take(self, token: int, logprob: TokenLogprob | None) -> Delta:
        """The chosen token, and whether the row ends with it."""
        self._left -= 1
        text = ""
        if token in self._stop_tokens:
            self.finish_reason = "eos"
        elif self._text is not None:
            text = self._text.push(token)
            if self._text.stopped:
                self.finish_reason = "stop"
        if self.finish_reason is None and self._left == 0:
            self.finish_reason = "length"
        if self.finish_reason is not None and self._text is not None:
            text += self._text.finish()
        return Delta(self._index, token, text, logprob, self.finish_reason)


@torch.no_grad()
def _choose(
    sampler: Sampler, logits: Tensor, rows: Sequence[_Row], history: History | None
) -> Tensor:
    """The next token of each row, int64 `(batch,)`."""
    if not bool(logits.isfinite().all()):
        raise WorkhorseError("the model's logits are not finite numbers; its weights are damaged")
    uniforms = torch.tensor([row.uniform() for row in rows], dtype=torch.float64)
    return sampler(logits, uniforms, history)


@torch.no_grad()
def _logprobs(logits: Tensor, tokens: Tensor, n: int | None) -> list[TokenLogprob | None]:
    if n is None:
        return [None] * len(tokens)
    logprobs = logits.float().log_softmax(dim=-1)
    own = logprobs.gather(-1, tokens[:, None])[:, 0].tolist()
    best = logprobs.topk(min(n, logprobs.shape[-1]), dim=-1)
    return [
        TokenLogprob(token, logprob, tuple(zip(ids, values, strict=True)))
        for token, logprob, ids, values in zip(
            tokens.tolist(), own, best.indices.tolist(), best.values.tolist(), strict=True
        )
    ]
