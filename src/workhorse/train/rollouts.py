"""Rollouts: completions that the model in training generates, as the batch of a step.

The batch of a step depends only on the weights at that step, the seed and the step. So a resumed
run generates the same rollouts again, and a checkpoint needs no state for them. Token ids and their
log-probabilities go from generation to the loss as they are; nothing is tokenized again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from statistics import fmean, pstdev
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field, model_validator
from torch import Tensor

from workhorse.config.base import Config, ConfigError
from workhorse.data import IGNORE, Batch, Batches
from workhorse.data.sampling import derive
from workhorse.errors import WorkhorseError, warn_caller
from workhorse.execute.backend import Backend
from workhorse.generate import GenerationConfig
from workhorse.generate.engine import Engine
from workhorse.parallel.processes.world import ALONE, World
from workhorse.tokenizers import Tokenizer
from workhorse.train.objectives.policy import (
    Baseline,
    PolicyBatch,
    advantages_of,
    with_advantages,
)
from workhorse.train.objectives.value_head import ValuesConfig
from workhorse.train.rewards import AnswerRewardConfig, AnyReward, Reward

CHECKED = 2
"""Number of prompts that `Rollouts.check_exact` completes."""


class RolloutConfig(Config):
    """Completions of training prompts, sampled with temperature 1 from the model in training."""

    completions: int = Field(default=8, ge=1)
    """Number of completions per prompt, a divisor of `train.batch_size`."""
    max_new_tokens: int = Field(default=64, ge=1)
    """Maximum number of tokens of a completion; fewer if `train.seq_len` does not have room."""
    reward: AnyReward | None = AnswerRewardConfig()
    """The reward of a completion; None for the objective `distill`, which needs no rewards."""
    baseline: Baseline = "group"
    """Subtracted from rewards to give advantages: `none`, the mean over the `batch`, the mean over
    the completions of a prompt (`group`; Dr. GRPO, 2503.20783), the same divided by the standard
    deviation (`group_std`; GRPO, 2402.03300), or the mean over the other completions of the prompt
    (`leave_one_out`; RLOO, 2402.14740). A value head needs `none`."""
    credit: Literal["completion", "token"] = "completion"
    """`completion`: each token has the advantage of its completion. `token`: each
    token has its own advantage: the change of the reward by this token, compared by `baseline` with
    the other tokens at this position. It learns faster if each correct token raises the reward, as
    with a partial `answer`. A token gets no credit for its effect on later tokens."""
    keep_unfinished: bool = True
    """False to ignore completions that reached `max_new_tokens` (DAPO, 2503.14476 §3.4)."""
    exact: bool = False
    """True to record, for each sampled token, bit by bit the log-probability that the training step
    computes, so that every ratio is exactly 1 before the update. This is possible on a CPU, for
    models whose training and decoding steps are both native."""

    @model_validator(mode="after")
    def _without_reward(self) -> "RolloutConfig":
        if self.reward is None and (self.baseline, self.credit) != ("group", "completion"):
            raise ConfigError("baseline and credit have no effect on reward=null; remove them")
        return self


@dataclass(frozen=True)
class Prompt:
    """A prompt of the data with its answer."""

    tokens: list[int]
    text: str
    answer: str


@dataclass(frozen=True)
class Rolled:
    """One completion."""

    tokens: list[int]
    logprobs: list[float]
    """The model's log-probability of each token when it was chosen."""
    text: str
    """All tokens but the one that ended the completion. Other special tokens are visible, so that
    the model does not learn to fill a completion with them."""
    finished: bool
    """False if it ended because of its length."""


def prompts_of(batch: Batch, tokenizer: Tokenizer) -> list[Prompt]:
    """Return the prompt and the answer of each row.

    The answer is the last run of targets: in a conversation of several turns, the last learned
    answer. The prompt is everything before it.
    """
    found = []
    for tokens, targets in zip(batch.tokens.tolist(), batch.targets.tolist(), strict=True):
        stop = max(at for at, target in enumerate(targets) if target != IGNORE) + 1
        start = stop - 1
        while start > 0 and targets[start - 1] != IGNORE:
            start -= 1
        prompt = tokens[: start + 1]
        text = tokenizer.decode(targets[start:stop], skip_special=True)
        found.append(Prompt(prompt, tokenizer.decode(prompt), text))
    return found


def roll(
    backend: Backend,
    prompts: Sequence[Sequence[int]],
    seeds: Sequence[int] | None,
    *,
    tokenizer: Tokenizer,
    seq_len: int,
    max_new_tokens: int,
    stop_tokens: tuple[int, ...],
) -> list[Rolled]:
    """Generate one completion for each prompt.

    Args:
        backend: the decoding backend of the model in training.
        prompts: token ids.
        seeds: the seed of each completion; None: choose the likeliest tokens.
        tokenizer: the model's tokenizer.
        seq_len: maximum number of predictions of prompt and completion together.
        max_new_tokens: maximum number of tokens of a completion.
        stop_tokens: ids that end a completion.
    """
    rooms = [min(max_new_tokens, seq_len + 1 - len(prompt)) for prompt in prompts]
    most = max(len(prompt) + room for prompt, room in zip(prompts, rooms, strict=True))
    engine = Engine(
        backend,
        tokenizer=tokenizer,
        max_sequences=len(prompts),
        max_tokens=len(prompts) * (most + 32),
    )

    def request(row: int) -> tuple[int, Sequence[int]]:
        return row if seeds is None else seeds[row] - row, prompts[row]

    # A prompt is processed once for adjacent rows with consecutive seeds.
    for _, (row, *others) in groupby(range(len(prompts)), request):
        config = GenerationConfig(
            max_new_tokens=rooms[row],
            temperature=0.0 if seeds is None else 1.0,
            seed=None if seeds is None else seeds[row],
            n_samples=1 + len(others),
            stop_tokens=stop_tokens,
            logprobs=0,
        )
        engine.add(prompts[row], config)
    tokens: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    finished = [False] * len(prompts)
    with torch.no_grad():
        while not engine.is_idle:
            for delta in engine.step():
                assert delta.logprob is not None
                tokens[delta.index].append(delta.token)
                logprobs[delta.index].append(delta.logprob.logprob)
                finished[delta.index] = delta.finish_reason == "eos"
    texts = [tokenizer.decode(_seen(*one)) for one in zip(tokens, finished, strict=True)]
    return [Rolled(*one) for one in zip(tokens, logprobs, texts, finished, strict=True)]


def _seen(tokens: list[int], finished: bool) -> list[int]:
    """Return the tokens of a completion without the one that ended it."""
    return tokens[:-1] if finished else tokens


class Critic(NamedTuple):
    """The value head in training."""

    config: ValuesConfig
    values: Callable[[Batch], Tensor]
    """Computes the current value at each position of some rows, (rows, seq)."""


class Rollouts:
    """The batches of a run that learns from its own completions, by step.

    Args:
        prompts: batches of rows with prompts and answers; `prompts.batch_size` is the number of
            prompts per step.
        backend: the decoding backend of the model in training, with its current weights.
        tokenizer: the model's tokenizer.
        config: how completions are generated and scored.
        stop_tokens: ids that end a completion.
        reward: scores completions; None if the objective does not need rewards.
        seed: seed of the completions.
        reference: computes the reference model's log-probabilities of the targets of some rows,
            (rows, seq); None if the objective does not need them.
        critic: the value head; None if advantages do not depend on values.
        world: the processes that divide the prompts among themselves.
        notify: called with a warning if a step has nothing to learn from, the first time.

    Attributes:
        ahead: False: a batch must not be read before the previous update.
        figures: means of the last rollouts, to log.
        shown: the first prompts of the last rollouts with their completions and rewards.
    """

    ahead = False

    def __init__(
        self,
        prompts: Batches,
        backend: Backend,
        tokenizer: Tokenizer,
        config: RolloutConfig,
        *,
        stop_tokens: tuple[int, ...],
        reward: Reward | None,
        seed: int,
        reference: Callable[[Batch], Tensor] | None = None,
        critic: Critic | None = None,
        world: World = ALONE,
        notify: Callable[[str], object] = warn_caller,
    ) -> None:
        self.prompts = prompts
        self.backend = backend
        self.device = backend.decoder.device
        self.tokenizer = tokenizer
        self.config = config
        self.stop_tokens = stop_tokens
        self.reward = reward
        self.seed = seed
        self.reference = reference
        self.critic = critic
        self.world = world
        self.notify = notify
        self.source_names = prompts.source_names
        self.rows_per_epoch = prompts.rows_per_epoch
        self.figures: dict[str, float] = {}
        self.shown: list[dict[str, Any]] = []
        self._warned = False

    def __getitem__(self, step: int) -> PolicyBatch:
        """Generate the completions of a step with the current weights, and score them."""
        started = time.perf_counter()
        read = self.prompts[step]
        prompts, each = prompts_of(read, self.tokenizer), range(self._each)
        asked = [prompt for prompt in prompts for _ in each]
        first = [derive(self.seed, "rollout", step, row) >> 2 for row in range(len(prompts))]
        seeds = [seed + sample for seed in first for sample in each]
        rolled = self.complete(asked, seeds)
        rewards = self.score(asked, rolled)
        self._note(asked, rolled, rewards)
        self._warn_of_nothing_learned(step, rolled)
        batch = self._batch(asked, rolled, rewards, read)
        if self.config.credit == "token":
            batch = replace(batch, advantages=self._token_advantages(asked, rolled, batch))
        if self.reference is not None:
            batch = replace(batch, reference_tokens=self._divided(self.reference, batch))
        if self.critic is not None:
            values = self._divided(self.critic.values, batch)
            batch = with_advantages(batch, values, self.critic.config)
        self.figures["rollout_seconds"] = time.perf_counter() - started
        return batch

    def check_exact(self, step: int, logprobs: Callable[[Batch], Tensor], decoding: str) -> None:
        """Raise a WorkhorseError if recorded log-probabilities differ from those in training.

        Args:
            step: the step whose first prompts are completed for the comparison.
            logprobs: computes the log-probabilities of targets in training, (rows, seq).
            decoding: describes how the decoder runs, for the message.
        """
        read = self.prompts[step].rows(0, CHECKED)
        asked = [prompt for prompt in prompts_of(read, self.tokenizer) for _ in range(self._each)]
        rolled = self.complete(asked, [*range(len(asked))])
        rolled = [replace(one, finished=True) for one in rolled]  # so that none is ignored
        batch = self._batch(asked, rolled, [0.0] * len(asked), read)
        chosen = batch.targets != IGNORE
        differing = int((logprobs(batch) != batch.old_logprobs)[chosen].sum())
        if differing:
            raise WorkhorseError(
                f"rollouts.exact is not possible for this model: {differing} of "
                f"{int(chosen.sum())} log-probabilities differ in training ({decoding}); remove it"
            )

    @property
    def _each(self) -> int:
        return self.config.completions

    def complete(self, asked: Sequence[Prompt], seeds: Sequence[int] | None) -> list[Rolled]:
        """Complete each prompt, divided among the ranks.

        Args:
            asked: the prompts.
            seeds: the seed of each completion; None: choose the likeliest tokens.
        """
        share, longest = self.world.share(len(asked)), self.config.max_new_tokens
        own: list[Rolled] = []
        if share:
            own = roll(
                self.backend,
                [asked[row].tokens for row in share],
                None if seeds is None else [seeds[row] for row in share],
                tokenizer=self.tokenizer,
                seq_len=self.prompts.seq_len,
                max_new_tokens=longest,
                stop_tokens=self.stop_tokens,
            )
        if self.world.size == 1:
            return own
        tokens = torch.zeros(len(asked), longest + 2, dtype=torch.int64)
        logprobs = torch.zeros(len(asked), longest, dtype=torch.float64)
        for row, one in zip(share, own, strict=True):
            tokens[row, : len(one.tokens)] = torch.tensor(one.tokens)
            logprobs[row, : len(one.logprobs)] = torch.tensor(one.logprobs, dtype=torch.float64)
            tokens[row, -2:] = torch.tensor([len(one.tokens), one.finished])
        tokens, logprobs = tokens.to(self.device), logprobs.to(self.device)
        self.world.add_(tokens)
        self.world.add_(logprobs)
        found = []
        for row, values in zip(tokens.tolist(), logprobs.tolist(), strict=True):
            *ids, count, finished = row
            text = self.tokenizer.decode(_seen(ids[:count], bool(finished)))
            found.append(Rolled(ids[:count], values[:count], text, bool(finished)))
        return found

    def score(self, asked: Sequence[Prompt], rolled: Sequence[Rolled]) -> list[float]:
        """Return the reward of each completion. Rank 0 computes them for all ranks."""
        rewards = torch.zeros(len(asked), dtype=torch.float64)
        if self.world.is_first and self.reward is not None:
            found = self.reward(
                [prompt.text for prompt in asked],
                [one.text for one in rolled],
                [prompt.answer for prompt in asked],
            )
            rewards.copy_(torch.tensor(found, dtype=torch.float64))
        rewards = rewards.to(self.device)
        self.world.add_(rewards)
        return rewards.tolist()

    def _batch(
        self,
        asked: Sequence[Prompt],
        rolled: Sequence[Rolled],
        rewards: Sequence[float],
        read: Batch,
    ) -> PolicyBatch:
        shape = (len(rolled), self.prompts.seq_len)
        tokens = torch.zeros(shape, dtype=torch.int64)
        targets = torch.full(shape, IGNORE)
        old = torch.zeros(shape)
        for row, (prompt, one) in enumerate(zip(asked, rolled, strict=True)):
            first, count = len(prompt.tokens) - 1, len(one.tokens)
            whole = torch.tensor([*prompt.tokens, *one.tokens])
            tokens[row, : first + count] = whole[:-1]
            if one.finished or self.config.keep_unfinished:
                targets[row, first : first + count] = whole[first + 1 :]
                old[row, first : first + count] = torch.tensor(one.logprobs)
        group = torch.arange(len(rolled)) // self._each
        values = torch.tensor(rewards, dtype=torch.float64)
        return PolicyBatch(
            tokens,
            targets,
            None,
            read.sources.repeat_interleave(self._each),
            group=group,
            values=values.float(),
            old_logprobs=old,
            advantages=advantages_of(
                values, group, self.config.baseline if self.reward else "none"
            ).float(),
        )

    def _token_advantages(
        self, asked: Sequence[Prompt], rolled: Sequence[Rolled], batch: PolicyBatch
    ) -> Tensor:
        """Compute the advantage of each token, (rows, seq), from the rewards of all prefixes."""
        assert batch.group is not None
        prefixes = [
            (prompt, replace(one, text=self.tokenizer.decode(one.tokens[:end])))
            for prompt, one in zip(asked, rolled, strict=True)
            for end in range(len(_seen(one.tokens, one.finished)) + 1)
        ]
        rewards = iter(self.score(*zip(*prefixes, strict=True)))
        shape = len(rolled), max(len(one.tokens) for one in rolled)
        gains = torch.zeros(shape, dtype=torch.float64)
        for row, one in enumerate(rolled):  # 0 for the token that ends it, and after it
            count = len(_seen(one.tokens, one.finished))
            of_prefixes = torch.tensor([*islice(rewards, count + 1)], dtype=torch.float64)
            gains[row, :count] = of_prefixes.diff()
        columns = [advantages_of(one, batch.group, self.config.baseline) for one in gains.T]
        advantages = torch.zeros(batch.tokens.shape)
        for row, (prompt, values) in enumerate(zip(asked, torch.stack(columns, 1), strict=True)):
            first, count = len(prompt.tokens) - 1, len(rolled[row].tokens)
            advantages[row, first : first + count] = values[:count]
        return advantages

    def _divided(self, compute: Callable[[Batch], Tensor], batch: PolicyBatch) -> Tensor:
        """Compute a figure of each target, (rows, seq), divided among the ranks by rows."""
        found, share = torch.zeros(batch.tokens.shape), self.world.share(len(batch))
        if share:
            found[share.start : share.stop] = compute(batch.rows(share.start, share.stop))
        found = found.to(self.device)
        self.world.add_(found)
        return found.cpu()

    def _note(
        self, asked: Sequence[Prompt], rolled: Sequence[Rolled], rewards: Sequence[float]
    ) -> None:
        lengths = [len(one.tokens) for one in rolled]
        groups = [rewards[row : row + self._each] for row in range(0, len(rolled), self._each)]
        of_rewards = {
            "reward": fmean(rewards),
            "reward_std": pstdev(rewards),
            "equal_rewards": fmean(min(group) == max(group) for group in groups),
        }
        self.figures = {
            **({} if self.reward is None else of_rewards),
            "exact_match": exact_match(asked, rolled),
            "completion_tokens": fmean(lengths),
            "longest_completion": max(lengths),
            "unfinished": fmean(not one.finished for one in rolled),
        }
        scored = [*zip(lengths, rewards, strict=True)] if self.reward else []
        for name, is_right in (("right_tokens", True), ("wrong_tokens", False)):
            if own := [count for count, reward in scored if (reward >= 1) == is_right]:
                self.figures[name] = fmean(own)
        first = [*zip(asked, rolled, rewards, strict=True)][:: self._each][:4]
        self.shown = [
            {"prompt": prompt.text, "text": one.text, "reward": reward, "answer": prompt.answer}
            for prompt, one, reward in first
        ]
        if self.reward is None:
            for one in self.shown:
                del one["reward"]

    def _warn_of_nothing_learned(self, step: int, rolled: Sequence[Rolled]) -> None:
        """Warn, once, if all completions of a step are ignored."""
        learned = self.config.keep_unfinished or any(one.finished for one in rolled)
        if not (learned or self._warned):
            self._warned = True
            self.notify(
                f"step {step + 1} learns nothing: all {len(rolled)} completions reached "
                f"train.rollouts.max_new_tokens={self.config.max_new_tokens} or train.seq_len, and "
                "keep_unfinished=false ignores them; increase them"
            )


def exact_match(asked: Sequence[Prompt], rolled: Sequence[Rolled]) -> float:
    """Return the fraction of completions that equal the answers of their prompts."""
    pairs = zip(asked, rolled, strict=True)
    return fmean(one.text.lstrip() == prompt.answer.strip() for prompt, one in pairs)
