"""The recipes in `recipes/`."""

import re
from pathlib import Path

import pytest

from workhorse.config.base import read_yaml
from workhorse.train import Recipe

RECIPES = sorted((Path(__file__).parent.parent / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_read_and_says_what_it_reached(file):
    recipe = Recipe.from_dict(read_yaml(file))
    assert recipe.name == file.stem
    assert re.search(r"\d", recipe.description), "no measured result"
