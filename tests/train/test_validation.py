"""Validation: means of the loss and of the objective's other figures, on one rank or several."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.train.conftest import MODEL, MakeRecipe
from workhorse.data import Batch, ValidationBatches, prepare, prepare_tokenizer
from workhorse.nn import DecoderConfig
from workhorse.train.objectives.next_token import NextTokenConfig
from workhorse.train.objectives.objective import Outcome, Wrapped
from workhorse.train.step.step import Precision
from workhorse.train.validation import Validation, Validator


class Doubled(Wrapped):
    """Also reports twice the loss."""

    def forward(self, batch: Batch) -> Outcome:
        loss, count, figures = self.objective(batch)
        return Outcome(loss, count, {**figures, "double": 2 * loss.detach()})


def test_a_rank_without_batches_gets_the_same_loss(make_recipe: MakeRecipe, tmp_path: Path) -> None:
    recipe = make_recipe()
    tokenizer = prepare_tokenizer(recipe.tokenizer, recipe.data, tmp_path)
    split = prepare(recipe.data, tokenizer, tmp_path).validation
    assert split is not None
    torch.manual_seed(0)
    fields = {**MODEL, "vocab_size": tokenizer.vocab_size, "max_seq_len": 16}
    objective = Doubled(NextTokenConfig().build(DecoderConfig.from_dict(fields).build()))
    cpu = torch.device("cpu")
    tables: list[Tensor] = []

    def validated(shares: bool, max_rows: int = 9) -> Validation:
        def add(table: Tensor) -> None:
            tables.append(table.clone())
            table += 0 if shares else tables[0]

        world: Any = SimpleNamespace(
            passes=lambda count: ((number, True) for number in range(count if shares else 0)),
            most=lambda _: 3,
            add_=add,
        )
        validator = Validator(
            objective,
            split,
            cpu,
            precision=Precision(cpu, torch.float32),
            batches=partial(
                ValidationBatches, split, seq_len=16, batch_size=2, packing="documents"
            ),
            world=world,
        )
        return validator(max_rows)

    first, second = validated(True), validated(False)
    batches = ValidationBatches(split, seq_len=16, batch_size=2, packing="documents", max_rows=9)
    outcomes = [objective(batch) for batch in batches]
    count = sum(float(one.count) for one in outcomes)
    loss = sum(one.loss.item() for one in outcomes) / count
    assert first.loss == pytest.approx(loss)
    assert (first.whole, validated(True, 10**6).whole) == (False, True)
    assert first.figures == {"double": pytest.approx(2 * loss)}
    assert (second.loss, second.tokens) == (first.loss, first.tokens) == (first.loss, count)
