"""The reference of the recipe contains every key, and its examples can be built."""

from copy import deepcopy
from itertools import pairwise
from pathlib import Path

import pytest

from workhorse.config.base import Config, OnResume, parse_yaml
from workhorse.errors import WorkhorseError
from workhorse.nn import DecoderConfig
from workhorse.train import Recipe
from workhorse.train.recipe.keys import Group, examples, recipe_configs
from workhorse.train.recipe.reference import sections, sections_at

GROUPS, PLACES = recipe_configs(Recipe)
CONFIGS = [config for group in GROUPS for config in group.configs]
BLOCK = {
    "kind": "pre_norm",
    "norm": {"kind": "rms_norm"},
    "attention": {"n_heads": 2, "head_dim": 8},
    "feed_forward": {"kind": "gated_mlp", "d_ff": 8},
}
"""The block around a part of a model in an example, so that the part is built and not only read."""
MIXTURE = {"kind": "moe", "n_experts": 8, "top_k": 2, "d_ff": 8}
PARENTS = {"scaling": {"kind": "rope"}, "clamped": MIXTURE, "router": MIXTURE}
"""The parents of parts that need another parent than the one in `BLOCK`."""


CASES = [(config, text) for config in CONFIGS for text in examples()[config.__name__]]


@pytest.mark.parametrize(("config", "text"), CASES)
def test_every_example_is_built(config: type[Config], text: str, monkeypatch, tmp_path):
    fields = parse_yaml(text)
    if "init" in fields:  # tests/test_documents.py trains the model that this example starts from
        assert set(fields) <= set(config.model_fields)
        return
    if config is Recipe:
        monkeypatch.chdir(tmp_path)
        assert Recipe.from_dict(fields).decoder_config(1024).build(device="meta").layers
        return
    made = config.from_dict(fields)
    assert {key for key in fields if key != "kind"} <= set(made.to_dict())
    place = PLACES[config][0]
    if place.startswith("model"):
        decoder_of(place, fields).build(device="meta")


def decoder_of(place: str, fields: dict) -> DecoderConfig:
    """Return the config of a small decoder with these fields at their place."""
    path = place.replace("NAME", "main").split(".")[1:]
    if not path:
        return DecoderConfig.from_dict(fields)
    inner: dict = {"d_model": 64, "n_layers": 1, "vocab_size": 11, "max_seq_len": 16}
    inner["blocks"] = {"main": deepcopy(BLOCK)}
    target = inner
    for above, key in pairwise(path):
        target = target.setdefault(above, {})
        target |= PARENTS.get(key, {})
    target[path[-1]] = fields
    return DecoderConfig.from_dict(inner)


@pytest.mark.parametrize("config", CONFIGS)
def test_the_examples_of_a_config_hold_every_key(config: type[Config]):
    given = {key for text in examples()[config.__name__] for key in parse_yaml(text)}
    assert given >= set(config.model_fields) - {"kind"}


def test_no_example_is_of_a_config_that_is_gone():
    assert set(examples()) == {config.__name__ for config in CONFIGS}


def test_every_key_has_a_meaning():
    for section in sections():
        for keys in (section.shared, *(kind.keys for kind in section.kinds)):
            assert [key.name for key in keys if not key.meaning] == [], section.title


def test_every_config_of_a_recipe_is_there():
    assert GROUPS[0] == Group("", (Recipe,), OnResume.NEW_RUN)
    assert {"MoEConfig", "YarnScalingConfig", "MixtureConfig", "HeInitConfig"} <= {
        config.__name__ for config in CONFIGS
    }


def test_a_key_is_found_by_its_place():
    (section,) = sections_at("model.blocks.anything.attention.n_heads")
    assert [key.name for key in section.shared] == ["n_heads"]
    kinds = [kind for section in sections_at("train.optimizer") for kind in section.kinds]
    assert [kind.name for kind in kinds] == ["adamw", "muon"]


def test_only_what_may_stand_at_a_place_is_told():
    (section,) = sections_at("train.optimizer.adamw")
    assert [kind.name for kind in section.kinds] == ["adamw"]
    kinds = [
        kind for part in sections_at("model.blocks.x.attention.position") for kind in part.kinds
    ]
    assert [kind.name for kind in kinds] == ["none", "rope", "alibi"]


def test_an_unknown_key_names_the_nearest():
    with pytest.raises(
        WorkhorseError, match=r"'train\.optimiser'; did you mean 'train\.optimizer'"
    ):
        sections_at("train.optimiser")


def test_types_and_defaults_are_the_configs_own():
    by_name = {key.name: key for key in sections_at("train")[0].kinds[0].keys}
    assert by_name["batch_size"].default is None
    assert by_name["batch_size"].type == "whole number ≥ 1"
    assert by_name["grad_clip"].type == "number > 0 or null"
    assert by_name["optimizer"].default == "{kind: muon}"
    assert by_name["dtype"].type == "`auto`, `float32`, `bfloat16`, `float16`"


def test_what_may_change_on_resuming_is_told():
    def rule(key: str) -> str:
        (section,) = sections_at(key)
        return (section.shared or section.kinds[0].keys)[0].on_resume

    assert rule("train.steps") == OnResume.CONTINUES.value
    assert rule("train.schedule.warmup_steps") == OnResume.CONTINUES.value  # from `schedule`
    assert rule("train.seq_len") == rule("model.d_model") == OnResume.NEW_RUN.value


def test_the_page_is_as_the_generator_writes_it(capsys):
    from workhorse.cli.main import main

    assert main(["recipe", "--markdown"]) == 0
    page = Path(__file__).parents[3] / "docs" / "recipe.md"
    assert page.read_text("utf-8") == capsys.readouterr().out, (
        "run `make reference`, and describe the changed option in CHANGELOG.md"
    )
