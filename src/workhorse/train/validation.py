"""Validation during training: the loss on held-out documents, and generated samples."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean
from textwrap import shorten

import torch

from workhorse.data import DataConfig, SequenceStart, Split, ValidationBatches
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend
from workhorse.generate import GenerationConfig, generate
from workhorse.nn import Decoder
from workhorse.parallel.processes.world import ALONE, World
from workhorse.tokenizers import Tokenizer
from workhorse.tokenizers.chat.template import ChatTemplate
from workhorse.train.objectives.objective import Objective, Outcome
from workhorse.train.recipe.training import SamplesConfig
from workhorse.train.rollouts import Rolled, Rollouts, exact_match, prompts_of
from workhorse.train.step.step import Precision


class Sampler:
    """Generates completions of the recipe's prompts, with the same random numbers each time.

    It uses its own random generators, so it does not affect training.

    Args:
        tokenizer: the tokenizer of the model.
        config: the prompts and the sampling options.
        begin: encodes the beginning of a document as in training; None: the model is trained on
            conversations, and each prompt is a user's message.
        context: the maximum length of a sequence, in tokens.

    Raises:
        WorkhorseError: a prompt has no tokens, because it is empty and documents start without a
            special token in training; or a prompt is longer than the context.
    """

    def __init__(
        self, tokenizer: Tokenizer, config: SamplesConfig, begin: SequenceStart | None, context: int
    ) -> None:
        self.tokenizer = tokenizer
        self.prompts = config.prompts
        if begin is None:
            template = ChatTemplate.of(tokenizer)
            chats = [[{"role": "user", "content": prompt}] for prompt in config.prompts]
            self.tokens = [template.encode(tokenizer, chat) for chat in chats]
        else:
            self.tokens = [begin.encode(tokenizer, prompt) for prompt in config.prompts]
        if not all(self.tokens):
            raise _no_beginning()
        self.generation = GenerationConfig(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
        )
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            if len(tokens) > context:  # fail before training, not hours later
                raise WorkhorseError(
                    f"the sample prompt {shorten(prompt, 40)!r} has {len(tokens)} tokens, but the "
                    f"context is {context}; shorten it in train.samples.prompts"
                )

    def __call__(self, decoder: Decoder | Backend) -> list[dict[str, str]]:
        """Return `prompt` and completion (`text`) for each prompt."""
        completions = generate(decoder, self.tokens, self.generation, tokenizer=self.tokenizer)
        return [
            {"prompt": prompt, "text": completion.text}
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]


def check_samples(config: SamplesConfig | None, data: DataConfig) -> None:
    """Raise WorkhorseError for an empty prompt if training uses neither bos nor eos.

    An empty prompt needs one of these tokens to start a completion.
    """
    if data.has_conversations:
        return
    if config is not None and "" in config.prompts and not (data.bos or data.eos):
        raise _no_beginning()


def _no_beginning() -> WorkhorseError:
    return WorkhorseError(
        "train.samples has an empty prompt, but training puts neither bos nor eos between "
        "documents, so no token can start a sample; write a prompt, or set data.eos=true"
    )


@dataclass(frozen=True)
class Validation:
    """The result of a validation on held-out documents."""

    loss: float
    """Mean loss per prediction, in nats."""
    bits_per_byte: float | None
    """`loss` in bits, times tokens per byte of the documents; None if the number of bytes is not
    known, or if tokens have weights. All tokens that training sees count, predicted or not,
    including eos and bos, which have no bytes. `workhorse.evaluate` does not count eos and bos; see
    docs/evaluation.md."""
    unknown_rate: float
    """Fraction of the tokens that stand for characters unknown to the tokenizer. If it is not 0,
    the other figures are too low: the model does not have to predict which characters they are."""
    tokens: int
    """The denominator of the objective: the number of predictions, or the sum of their weights."""
    whole: bool
    """True if the whole split was measured."""
    figures: dict[str, float] = field(default_factory=dict)
    """Means of the other values that the objective reports, such as the accuracy of preferences."""


class Validator:
    """Measures the loss on a split, always on the same rows.

    Args:
        objective: the objective; the `loss` of its `Outcome.figures` is measured.
        split: the held-out tokens.
        device: the device of the model.
        precision: creates the context that a forward pass runs in.
        batches: returns the batches of the split, up to `max_rows` rows.
        world: the processes that divide the batches among themselves.
    """

    def __init__(
        self,
        objective: Objective,
        split: Split,
        device: torch.device,
        *,
        precision: Precision,
        batches: Callable[..., ValidationBatches],
        world: World = ALONE,
    ) -> None:
        self.objective = objective
        self.split = split
        self.device = device
        self.precision = precision
        self.batches = batches
        self.world = world

    @torch.no_grad()
    def __call__(self, max_rows: int | None = None) -> Validation:
        """Measure the loss, without dropout.

        Args:
            max_rows: number of rows, spread evenly over the split; None for the whole split.
        """
        batches = self.batches(max_rows=max_rows)
        none = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        sums = {"loss": none, "count": none.clone()}
        self.objective.eval()
        try:
            for number, counts_here in self.world.passes(len(batches)):
                rows = batches[number].to(self.device, non_blocking=True)
                with self.precision.products(), self.precision():
                    outcome: Outcome = self.objective(rows)
                found = {"loss": outcome.loss, "count": outcome.count, **outcome.figures}
                for name, value in found.items() if counts_here else ():
                    sums.setdefault(name, torch.zeros_like(none))[number] = value
        finally:
            self.objective.train()
        # A rank without batches knows no other names, but takes part in the sums.
        spare = self.world.most(len(sums)) - len(sums)
        table = torch.stack([*sums.values(), *[torch.zeros_like(none)] * spare])
        self.world.add_(table)  # an element is 0 on all ranks but the one that computed it
        totals = dict(zip(sums, table.cpu().sum(dim=1).tolist(), strict=False))
        counted = totals.pop("count")
        figures = {name: total / counted for name, total in totals.items()}
        mean, rate = figures.pop("loss"), self.split.unknown_rate
        bits = self._bits_per_byte(mean)
        return Validation(mean, bits, rate, round(counted), batches.whole, figures)

    def _bits_per_byte(self, loss: float) -> float | None:
        """Convert a mean loss to bits per byte; bos and eos count as tokens."""
        if not self.split.n_bytes or self.split.weighted:
            return None
        return loss / math.log(2) * self.split.n_tokens / self.split.n_bytes


class RolloutValidator:
    """Measures the mean reward of greedy completions of held-out prompts.

    Args:
        rollouts: the rollouts in training.
        prompts: the held-out prompts and answers.
    """

    def __init__(self, rollouts: Rollouts, prompts: ValidationBatches) -> None:
        self.rollouts = rollouts
        self.prompts = prompts

    def __call__(self, max_rows: int | None = None) -> Validation:
        """Validate on the first `max_rows` prompts; None: on all. The loss is minus the reward."""
        own, rolled, rewards = self.rollouts, list[Rolled](), list[float]()
        read = [batch.rows(0, int((batch.sources >= 0).sum())) for batch in self.prompts]
        every = [one for batch in read for one in prompts_of(batch, own.tokenizer)]
        asked = every[:max_rows]
        size = self.prompts.batch_size
        for start in range(0, len(asked), size):
            part = asked[start : start + size]
            rolled += own.complete(part, None)
            rewards += own.score(part, rolled[start:])
        figures = {
            "reward": fmean(rewards),
            "exact_match": exact_match(asked, rolled),
            "completion_tokens": fmean(len(one.tokens) for one in rolled),
        }
        whole = len(asked) == len(every)
        return Validation(-figures["reward"], None, 0.0, len(asked), whole, figures)
