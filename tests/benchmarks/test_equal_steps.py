"""The settings of `benchmarks.equal_steps` are chosen on the training split."""

from pathlib import Path

import pytest

from benchmarks import equal_steps
from workhorse.config.base import read_yaml


def test_the_rates_are_multiples_of_the_recipes() -> None:
    optimizer = read_yaml(equal_steps.RECIPE)["train"]["optimizer"]
    both = optimizer["learning_rate"], optimizer["adamw"]["learning_rate"]
    written = [float(setting.partition("=")[2]) for setting in equal_steps.rates(2)]
    assert written == [2 * rate for rate in both]


def test_the_best_rate_is_chosen_first_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def loss(data: Path, settings: tuple[str, ...], seed: int) -> float:
        assert (data.name, seed) == ("training.txt", equal_steps.SEED)
        return 2.0 - ("0.01" in settings[0]) - 0.5 * any("convolution" in one for one in settings)

    monkeypatch.setattr(equal_steps, "loss", loss)
    tried, settings = equal_steps.choose(Path("training.txt"))
    assert settings == (*equal_steps.rates(2), "model.blocks.main.convolution=null")
    assert list(tried) == [*equal_steps.RATES, *equal_steps.PARTS]
