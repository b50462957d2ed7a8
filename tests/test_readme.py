"""What the README and the recipes tell a new user to do can be done."""

import re
import shlex
from pathlib import Path

import click
import pytest

from workhorse.cli.main import command
from workhorse.config import read_yaml
from workhorse.train import Recipe

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text("utf-8")
COMMANDS = re.findall(r"^workhorse (.+)$", README, flags=re.MULTILINE)
RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_of_the_readme_is_understood(line):
    verb, *arguments = shlex.split(line, comments=True)
    with click.Context(command) as context:
        found: click.Command | None = command.get_command(context, verb)
        while isinstance(found, click.Group):
            found = found.get_command(context, arguments.pop(0))
        assert found is not None, f"no verb {verb}"
        found.make_context(verb, arguments)


def test_there_are_commands_to_check():
    assert len(COMMANDS) >= 5


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_recipe_can_be_read_and_says_what_it_reached(file):
    recipe = Recipe.from_dict(read_yaml(file))
    assert recipe.name == file.stem
    assert re.search(r"\d", recipe.description), "no measured result"


def test_the_python_of_the_readme_runs(tmp_path, monkeypatch, run_folder):
    (block,) = re.findall(r"```python\n(.+?)```", README, flags=re.DOTALL)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "first").symlink_to(run_folder, target_is_directory=True)
    names: dict[str, object] = {}
    exec(block.replace('preset("gpt2").build(', 'preset("gpt2").build(device="meta", '), names)
    assert names["logits"].shape[:2] == names["tokens"].shape
