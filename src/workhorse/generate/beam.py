"""Beam search: find the likeliest completion with `beams` hypotheses.

The semantics are as in Hugging Face's `generate`. A hypothesis of n new tokens, including the
stop token, scores `(sum of its log-probabilities) / n ** length_penalty`. It finishes when a stop
token, or any token at the length limit, is among the `beams` best candidates of a step. The search
ends when `beams` hypotheses have finished and (unless `early_stopping` is True) no running one can
score more than the worst finished one. Hugging Face calls this `early_stopping="never"`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from workhorse.execute.backend import Backend, backend_of
from workhorse.generate.checks import (
    StreamingTokenizer,
    TextStream,
    check_prompts,
    stop_tokens,
    usable_vocab,
)
from workhorse.generate.config import Completion, GenerationConfig
from workhorse.generate.runner import Chunk, Runner, tokens_needed, wait
from workhorse.generate.sampling import all_finite, below, check_finite, logit_bias
from workhorse.generate.sequence import TokenSequence
from workhorse.nn import Decoder
from workhorse.nn.logprobs import log_probabilities


@dataclass(frozen=True, slots=True)
class _Hypothesis:
    tokens: tuple[int, ...]
    total: float
    """Summed log-probability, nats."""
    stopped: bool = False

    def score(self, length_penalty: float) -> float:
        return self.total / len(self.tokens) ** length_penalty


def beam_search(
    decoder: Decoder | Backend,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    *,
    tokenizer: StreamingTokenizer | None = None,
) -> list[list[Completion]]:
    """Find up to `config.beams` completions of each prompt, best first.

    All prompts are searched together, as a batch of `len(prompts) * beams` sequences. The sequences
    of a finished prompt are removed. Log-probabilities include `logit_bias`. The decoder must be in
    evaluation mode.

    Raises:
        WorkhorseError: see `check_prompts`; or logits are not finite.
    """
    backend = backend_of(decoder)
    decoder = backend.decoder
    fitting = check_prompts(decoder, prompts, config, tokenizer)
    if not fitting:
        return []
    stops = stop_tokens(config, tokenizer)
    limits = [min(config.max_new_tokens, decoder.max_seq_len + 1 - len(p)) for p in fitting]
    searches = [_Search(config, stops, limit) for limit in limits]
    running = list(searches)
    new = config.max_new_tokens - 1
    rows, longest = len(fitting) * config.beams, max(map(len, fitting))
    each_text = tokens_needed(longest, new, decoder.max_seq_len)
    runner = Runner(backend, tokens=rows * each_text, sequences=rows)
    started = time.perf_counter()
    sequences = [runner.new_sequence(prompt, exact=config.exact) for prompt in fitting]
    logits = _read(runner, sequences)
    wait(logits)
    prompt_seconds = time.perf_counter() - started
    repeated = [row for row in range(len(fitting)) for _ in range(config.beams)]
    sequences, logits = runner.select(sequences, repeated), logits[repeated]
    vocab = usable_vocab(decoder, tokenizer)
    while True:
        _advance(running, _log_probabilities(logits, vocab, config), stops)
        parents: list[int] = []
        tokens: list[int] = []
        for row, search in enumerate(running):
            if not search.done:
                parents += [row * config.beams + parent for parent in search.parents]
                tokens += [hypothesis.tokens[-1] for hypothesis in search.beams]
        running = [search for search in running if not search.done]
        if not running:
            break
        sequences = runner.select(sequences, parents)
        for sequence, token in zip(sequences, tokens, strict=True):
            sequence.tokens.append(token)
        logits = _read(runner, sequences)
    completions = [
        [_completion(hypothesis, config, tokenizer, prompt) for hypothesis in search.finished]
        for search, prompt in zip(searches, prompts, strict=True)
    ]
    completions[0][0] = replace(completions[0][0], prompt_seconds=prompt_seconds)
    return completions


def _read(runner: Runner, sequences: Sequence[TokenSequence]) -> Tensor:
    """Process all tokens that are not in the cache yet.

    Returns the logits after the last token of each sequence, `(sequences, vocab)`.
    """
    found: dict[TokenSequence, Tensor] = {}
    # A long prompt of an exact sequence takes several passes, one for each piece.
    while left := [sequence for sequence in sequences if sequence.pending]:
        logits = runner.run([Chunk(one, one.chunk(one.pending)) for one in left])
        found |= {one: logits.of[last] for one, last in zip(left, logits.last, strict=True)}
    return torch.stack([found[sequence] for sequence in sequences])


@dataclass
class _Search:
    """State of the search for completions of one prompt."""

    config: GenerationConfig
    stops: frozenset[int]
    limit: int
    beams: list[_Hypothesis] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    """For each hypothesis, the index in the previous step's `beams` of the one that it extends."""
    finished: list[_Hypothesis] = field(default_factory=list)
    """Up to `config.beams` finished hypotheses, best first."""
    done: bool = False

    def __post_init__(self) -> None:
        # Only one beam is live at first: equal beams would stay equal.
        totals = [0.0] + [-torch.inf] * (self.config.beams - 1)
        self.beams = [_Hypothesis((), total) for total in totals]

    def advance(self, candidates: Sequence[tuple[float, int, int]]) -> None:
        """Extend the hypotheses by one token.

        Args:
            candidates: best first: the summed log-probability, the index of the hypothesis in
                `beams`, and the token that extends it.
        """
        before, self.beams, self.parents = self.beams, [], []
        length = len(before[0].tokens) + 1
        last = length == self.limit
        for rank, (total, beam, token) in enumerate(candidates):
            stops = token in self.stops
            hypothesis = _Hypothesis((*before[beam].tokens, token), total, stops)
            if (stops or last) and rank < self.config.beams:
                self._finish(hypothesis)
            elif not stops and len(self.beams) < self.config.beams:
                self.beams.append(hypothesis)
                self.parents.append(beam)
        # If every token of the vocabulary is a stop token, no beam is left.
        self.done = last or not self.beams or self._decided(length)

    def _finish(self, hypothesis: _Hypothesis) -> None:
        if hypothesis.total > -torch.inf:
            self.finished.append(hypothesis)
            self.finished.sort(key=self._score, reverse=True)
            del self.finished[self.config.beams :]

    def _score(self, hypothesis: _Hypothesis) -> float:
        return hypothesis.score(self.config.length_penalty)

    def _decided(self, length: int) -> bool:
        """True if the search can end although some hypotheses are still running."""
        if len(self.finished) < self.config.beams:
            return False
        if self.config.early_stopping:
            return True
        # Totals never increase. A penalty above 0 favours length, so the best score that a
        # hypothesis can reach is its current total at the length limit.
        alpha = self.config.length_penalty
        best = self.beams[0].total / (self.limit if alpha > 0 else length) ** alpha
        return self._score(self.finished[-1]) >= best


@torch.no_grad()
def _log_probabilities(logits: Tensor, vocab: int, config: GenerationConfig) -> Tensor:
    """Log-probabilities of the next token, in float64 so that long sums stay accurate."""
    check_finite(all_finite(logits))
    logits = below(logits.double(), vocab)
    if config.logit_bias:
        logits = logit_bias(logits, config.logit_bias)
    return log_probabilities(logits)


def _advance(searches: Sequence[_Search], logprobs: Tensor, stops: frozenset[int]) -> None:
    """Advance every search by one token, given logprobs `(len(searches) * beams, vocab)`."""
    beams, vocab = searches[0].config.beams, logprobs.shape[-1]
    totals = logprobs.new_tensor([[beam.total] for search in searches for beam in search.beams])
    totals = totals + logprobs
    # Enough candidates for `beams` hypotheses to continue even if all stop tokens are included.
    n_candidates = min(beams * max(2, 1 + len(stops)), beams * vocab)
    best = totals.view(len(searches), beams * vocab).topk(n_candidates, dim=-1)
    for search, values, indices in zip(
        searches, best.values.tolist(), best.indices.tolist(), strict=True
    ):
        search.advance(
            [
                (value, index // vocab, index % vocab)
                for value, index in zip(values, indices, strict=True)
            ]
        )


def _completion(
    hypothesis: _Hypothesis,
    config: GenerationConfig,
    tokenizer: StreamingTokenizer | None,
    prompt: Sequence[int],
) -> Completion:
    text = ""
    if tokenizer is not None:
        stream = TextStream(tokenizer.stream(skip_special=True, after=prompt), ())
        text_tokens = hypothesis.tokens[: -1 if hypothesis.stopped else None]
        text = "".join(stream.push(token) for token in text_tokens) + stream.finish()
    return Completion(
        text=text,
        tokens=hypothesis.tokens,
        finish_reason="eos" if hypothesis.stopped else "length",
        prompt_tokens=len(prompt),
        score=hypothesis.score(config.length_penalty),
        decoded=tokenizer is not None,
    )
