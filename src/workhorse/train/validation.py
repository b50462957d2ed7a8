"""Validation during training: the loss on held-out documents, and generated samples."""

import math
from dataclasses import dataclass
from textwrap import shorten
from typing import Any

import torch

from workhorse.data import Beginning, DataConfig, Split, ValidationBatches
from workhorse.data.config import Packing
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig, generate
from workhorse.nn import Decoder
from workhorse.parallel.processes.world import ALONE, World
from workhorse.tokenizers import Tokenizer
from workhorse.train.objectives.objective import Objective, Outcome
from workhorse.train.recipe.recipe import SamplesConfig
from workhorse.train.step.step import Precision


class Sampler:
    """Continues the recipe's prompts, with the same random numbers each time.

    It has its own random generators, so it does not affect training.

    Args:
        decoder: the model in training.
        tokenizer: of the decoder.
        config: the prompts, and how tokens are chosen.
        begin: how texts begin in training.

    Raises:
        WorkhorseError: a prompt is empty, and texts begin without a token of their own in training.
    """

    def __init__(
        self, decoder: Decoder, tokenizer: Tokenizer, config: SamplesConfig, begin: Beginning
    ) -> None:
        self.decoder = decoder
        self.tokenizer = tokenizer
        self.prompts = config.prompts
        self.tokens = [begin.encode(tokenizer, prompt) for prompt in config.prompts]
        if not all(self.tokens):
            raise _no_beginning()
        self.generation = GenerationConfig(
            max_new_tokens=config.max_new_tokens, temperature=config.temperature, seed=config.seed
        )
        for prompt, tokens in zip(self.prompts, self.tokens, strict=True):
            if len(tokens) > decoder.max_seq_len:  # now, and not hours later
                raise WorkhorseError(
                    f"the sample prompt {shorten(prompt, 40)!r} has {len(tokens)} tokens and the "
                    f"context is {decoder.max_seq_len}; shorten it in train.samples.prompts"
                )

    def __call__(self) -> list[dict[str, str]]:
        """A `prompt` and the `text` that follows it, for each prompt."""
        completions = generate(self.decoder, self.tokens, self.generation, tokenizer=self.tokenizer)
        return [
            {"prompt": prompt, "text": completion.text}
            for prompt, completion in zip(self.prompts, completions, strict=True)
        ]


def check_samples(config: SamplesConfig | None, data: DataConfig) -> None:
    """Refuse an empty prompt if the recipe already tells that no token begins a text.

    Raises:
        WorkhorseError: there is an empty prompt.
    """
    if config is not None and "" in config.prompts and not (data.bos or data.eos):
        raise _no_beginning()


def _no_beginning() -> WorkhorseError:
    return WorkhorseError(
        "train.samples has an empty prompt, which begins a text, and the training puts neither bos "
        "nor eos between texts; write a prompt, or set data.eos=true"
    )


@dataclass(frozen=True)
class Validation:
    """The result of a validation on held-out text."""

    loss: float
    """Mean over predictions, nats."""
    bits_per_byte: float | None
    """`loss` in bits, times the number of tokens divided by the number of bytes of the text; None
    if that is not known. All tokens that training sees count, including eos and bos, predicted or
    not, which stand for no bytes. `workhorse.evaluate` leaves them out; see docs/evaluation.md."""
    unknown_rate: float
    """Share of the text's tokens that stand for characters unknown to the tokenizer. If there are
    any, the other figures flatter the model: it need not predict which characters they are."""
    tokens: int
    """Number of predictions."""


class Validator:
    """Measures the loss on a split, always on the same rows.

    Args:
        objective: its figure `loss` is measured.
        split: the held-out tokens.
        device: of the model.
        precision: makes the context that a forward pass runs in.
        seq_len: predictions per row.
        batch_size: rows per forward pass.
        packing: as in training.
        world: the processes that share the batches.
    """

    def __init__(
        self,
        objective: Objective,
        split: Split,
        device: torch.device,
        *,
        precision: Precision,
        seq_len: int,
        batch_size: int,
        packing: Packing,
        world: World = ALONE,
    ) -> None:
        self.objective = objective
        self.split = split
        self.device = device
        self.precision = precision
        self.world = world
        self._sizes: dict[str, Any] = {
            "seq_len": seq_len,
            "batch_size": batch_size,
            "packing": packing,
        }

    @torch.no_grad()
    def __call__(self, max_rows: int | None = None) -> Validation:
        """The loss without dropout, over the whole split or over `max_rows` rows evenly spread."""
        batches = ValidationBatches(self.split, **self._sizes, max_rows=max_rows)
        losses = torch.zeros(len(batches), dtype=torch.float64, device=self.device)
        counts = torch.zeros(len(batches), dtype=torch.int64, device=self.device)
        self.objective.eval()
        try:
            for number, counts_here in self.world.passes(len(batches)):
                rows = batches[number].to(self.device, non_blocking=True)
                with self.precision.products(), self.precision():
                    outcome: Outcome = self.objective(rows)
                if counts_here:
                    losses[number] = outcome.figures.get("loss", outcome.loss)
                    counts[number] = outcome.count
        finally:
            self.objective.train()
        for tensor in (losses, counts):  # 0 on all processes but those that passed it
            self.world.add_(tensor)
        tokens = int(counts.sum())
        mean = float(losses.cpu().sum()) / tokens
        return Validation(mean, self._bits_per_byte(mean), self.split.unknown_rate, tokens)

    def _bits_per_byte(self, loss: float) -> float | None:
        """Bits per byte at this mean loss, counting the tokens between documents too."""
        if not self.split.n_bytes:
            return None
        return loss / math.log(2) * self.split.n_tokens / self.split.n_bytes
