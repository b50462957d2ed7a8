"""The recipes in `recipes/`."""

import re
from pathlib import Path

import pytest

from workhorse.config.base import read_yaml
from workhorse.train import Recipe
from workhorse.train.recipe.recipe import written_over

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_read_and_says_what_it_reached(file):
    fields = read_yaml(file)
    if "init" in fields:  # the run of another recipe
        base = read_yaml(file.with_name(f"{Path(fields['init']).name}.yaml"))
        model = {**base["model"], "vocab_size": 4096, "max_seq_len": base["train"]["seq_len"]}
        fields = written_over(fields, model, base["tokenizer"])
    recipe = Recipe.from_dict(fields)
    assert recipe.name == file.stem
    assert re.search(r"\d", recipe.description), "no measured result"
