"""The decoding loop: each pass of the model gives every row a token or more, until each row ends.

`generate` collects what the loop yields and `stream` passes it on; there is no other loop but
beam search's. Without speculative decoding nothing is ever guessed, and a pass gives one token.

A row is drawn with its own generator and treated by itself, so neither its neighbours in the batch
nor anything else that runs changes its text. One reservation: the logits of a row computed in
batches of different shapes agree to rounding only, so a choice can differ where two tokens are
that close to each other.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.generate.batch import PrefixCache, RowBatch
from workhorse.generate.config import GenerationConfig
from workhorse.generate.draft import Draft
from workhorse.generate.lookup import PromptLookup
from workhorse.generate.requests import TextOfTokens, usable_vocab
from workhorse.generate.result import Delta, TokenLogprob
from workhorse.generate.row import Guess, Row
from workhorse.generate.samplers import (
    History,
    Shaper,
    all_finite,
    argmax,
    draw,
    draw_from,
    greedy,
    has_penalties,
    shaping,
    takes_likeliest,
)
from workhorse.generate.speculate import Proposer, after_guess, slack_of
from workhorse.native import Decoding
from workhorse.nn import Decoder
from workhorse.transforms.record import decoding_operators

_Chooser = Callable[[Tensor, Sequence[Row], History | None], Tensor]
"""`(logits (batch, vocab), rows, history) -> tokens int64 (batch,)`."""


def decode(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    tokenizer: TextOfTokens | None = None,
    *,
    draft: Decoder | None = None,
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
        draft: what guesses, in evaluation mode, where `config.speculate` asks for guesses; without
            one they are looked up in the text.
        seed: row r of a prompt's samples starts its generator from `seed + r % n_samples`.
        first: the number of the first row.
        prefix: the cache of one conversation, for a single row.
    """
    vocab = usable_vocab(decoder, tokenizer)
    shape = shaping(config, vocab if vocab < decoder.config.vocab_size else None)
    rows = [
        Row(index, prompt, decoder.max_seq_len, config, tokenizer=tokenizer, seed=seed)
        for index, prompt in enumerate(
            (prompt for prompt in prompts for _ in range(config.n_samples)), start=first
        )
    ]
    started = time.perf_counter()
    batch = RowBatch(decoder, prompts, config.max_new_tokens - 1, prefix, slack=slack_of(config))
    prompt_seconds = batch.wait() - started
    if config.n_samples > 1:  # a prompt is consumed once for all its samples
        batch.select_rows([p for p in range(len(prompts)) for _ in range(config.n_samples)])
    history = None
    if has_penalties(config):
        history = History.of(batch.rows, decoder.config.vocab_size, batch.logits.device)
    proposer: Proposer = PromptLookup(len(rows))
    if draft is not None:
        width = decoder.config.vocab_size
        proposer = Draft(draft, config, shape, width, prefix.draft if prefix else None)
    # The tokens of one pass are turned alike, as its end asks (dynamic NTK, LongRoPE): past the
    # original length a guess would change the logits of the tokens before it.
    longest = decoder.config.steady_length()
    decoding = decoding_operators(decoder)
    choose = partial(_choose, shape=shape, config=config, vocab=vocab, decoding=decoding)
    logits = batch.logits[:, None]
    while True:
        for r, token, logprob in _taken(logits, rows, history, choose, config.logprobs):
            delta = rows[r].take(token, logprob)
            yield replace(delta, prompt_seconds=prompt_seconds) if prompt_seconds else delta
            prompt_seconds = 0.0
        batch.forget([row.unmet for row in rows])
        going = [r for r, row in enumerate(rows) if row.finish_reason is None]
        if not going:
            break
        if len(going) < len(rows):  # the others leave, and cost nothing from now on
            rows = [rows[r] for r in going]
            batch.select_rows(going)
            proposer.select_rows(going)
            if history is not None:
                history.select_rows(torch.tensor(going, device=logits.device))
        _guess(rows, batch, proposer, config, history=history, longest=longest)
        logits = batch.extend([[row.tokens[-1], *row.guess.tokens] for row in rows])
    if prefix is not None:
        prefix.put(batch.cache, batch.rows[0])
        proposer.finish()


def _guess(
    rows: Sequence[Row],
    batch: RowBatch,
    proposer: Proposer,
    config: GenerationConfig,
    *,
    history: History | None,
    longest: int,
) -> None:
    """Let the rows expect what is guessed for them; no text grows past `longest`."""
    most = [
        max(0, min(config.speculate, row.left - 1, longest - len(consumed) - 1))
        for row, consumed in zip(rows, batch.rows, strict=True)
    ]
    # A proposer with nothing to guess may still have to read the prompts.
    guesses = [Guess()] * len(rows)
    if config.speculate:
        guesses = proposer.propose(rows, most, history)
    for row, guess in zip(rows, guesses, strict=True):
        row.expect(guess)


def _taken(
    logits: Tensor,
    rows: Sequence[Row],
    history: History | None,
    choose: _Chooser,
    n_logprobs: int | None,
) -> Iterator[tuple[int, int, TokenLogprob | None]]:
    """The tokens of one pass, by row: `(row, token, logprob)`; the caller gives each to its row.

    Args:
        logits: `(batch, seq, vocab)`, after the last token and each guess of every row, ends
            aligned.
        rows: those of the batch.
        history: of all rows; every token is counted.
        choose: which tokens.
        n_logprobs: likeliest tokens that are told beside each; None: not even its own probability.
    """
    here = list(range(len(rows)))
    while here:
        some = [rows[r] for r in here]
        all_of_them = len(here) == len(rows)
        if logits.shape[1] == 1:
            at = logits[:, 0]
        else:
            at = logits[here, [-1 - row.unmet for row in some]]
        past = history if history is None or all_of_them else history.copy(here)
        tokens = choose(at, some, past)
        logprobs = _logprobs(at, tokens, n_logprobs)
        if history is not None:
            history.add(tokens, here)
        yield from zip(here, tokens.tolist(), logprobs, strict=True)
        here = [r for r in here if rows[r].is_ahead]


@torch.no_grad()
def _choose(
    logits: Tensor,
    rows: Sequence[Row],
    history: History | None,
    *,
    shape: Shaper,
    config: GenerationConfig,
    vocab: int,
    decoding: Decoding | None,
) -> Tensor:
    """The next token of each row, int64 `(batch,)`, an id below `vocab`."""
    if takes_likeliest(config):
        tokens = argmax(logits[:, :vocab], decoding)
        _check_finite(bool((tokens >= 0).all()))
        return tokens
    _check_finite(all_finite(logits))
    logits = shape(logits, history)
    if not config.samples:
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


def _check_finite(finite: bool) -> None:
    if not finite:
        raise WorkhorseError("the model's logits are not finite numbers; its weights are damaged")


def _uniforms(rows: Sequence[Row]) -> Tensor:
    return torch.tensor([row.uniform() for row in rows], dtype=torch.float64)


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
