"""Overrides of a recipe: changes of kind, removals, and misplaced keys."""

import shlex
from typing import Any

import pytest

from workhorse.config.base import ConfigError
from workhorse.config.overrides import apply_overrides, written
from workhorse.train import Recipe, on_workers, override_recipe

ATTENTION = {"n_heads": 2, "window": 4, "position": {"kind": "rope", "theta": 500.0}}
BLOCK = {
    "kind": "pre_norm",
    "norm": {"kind": "rms_norm"},
    "attention": ATTENTION,
    "feed_forward": {"kind": "mlp", "d_ff": 32, "activation": "relu"},
}
WRITTEN = {
    "name": "tiny",
    "model": {
        "d_model": 16,
        "n_layers": 2,
        "blocks": {"local": BLOCK, "full": BLOCK},
        "pattern": ["local", "full"],
    },
    "tokenizer": {"kind": "bytes"},
    "data": {"corpus": {"kind": "text", "path": "corpus.txt"}},
    "train": {"steps": 6, "batch_size": 2, "seq_len": 16},
}
OF_PRESET = {
    **WRITTEN,
    "model": {"preset": "gpt2", "n_layers": 2, "blocks": {"main": {"feed_forward": {"d_ff": 80}}}},
}


def overridden(written: dict[str, Any], *settings: str) -> tuple[dict[str, Any], list[str]]:
    """Return the blocks of the model after overrides, and the notices."""
    told: list[str] = []
    recipe = Recipe.from_dict(override_recipe(written, settings, told.append))
    return recipe.decoder_config(257).to_dict()["blocks"], told


def test_another_kind_keeps_what_both_have() -> None:
    blocks, told = overridden(WRITTEN, "model.blocks.full.kind=parallel")
    assert blocks["full"]["kind"] == "parallel"
    assert blocks["full"]["attention"]["position"]["theta"] == 500
    assert blocks["full"]["attention"] == blocks["local"]["attention"]
    assert blocks["full"]["feed_forward"] == blocks["local"]["feed_forward"]
    assert blocks["local"]["kind"] == "pre_norm"
    assert told == []


def test_settings_of_the_new_kind_may_stand_before_it() -> None:
    place = "model.blocks.full.feed_forward"
    settings = [f"{place}.top_k=1", f"{place}.n_experts=2", f"{place}.kind=moe"]
    blocks, told = overridden(WRITTEN, *settings, "model.blocks.full.kind=sandwich_norm")
    experts = blocks["full"]["feed_forward"]
    assert (experts["kind"], experts["d_ff"], experts["activation"]) == ("moe", 32, "relu")
    assert told == []


def test_what_the_new_kind_has_not_is_left_out_and_told() -> None:
    blocks, told = overridden(WRITTEN, "model.blocks.full.attention.position.kind=alibi")
    assert blocks["full"]["attention"]["position"]["kind"] == "alibi"
    assert told == [
        "model.blocks.full.attention.position.kind=alibi drops theta=500.0 of kind rope"
    ]


def test_another_kind_over_a_preset_keeps_what_the_preset_says() -> None:
    before, _ = overridden(OF_PRESET)
    blocks, told = overridden(OF_PRESET, "model.blocks.main.feed_forward.kind=gated_mlp")
    after = blocks["main"]["feed_forward"]
    assert (after["kind"], after["d_ff"], after["bias"]) == ("gated_mlp", 80, True)
    assert after["activation"] == before["main"]["feed_forward"]["activation"]
    assert blocks["main"]["attention"] == before["main"]["attention"]
    assert told == []
    named = [*("model.preset=gpt2", "model.blocks.main.kind=parallel")]
    blocks, _ = overridden({**WRITTEN, "model": {}}, *named)
    assert blocks["main"]["attention"] == before["main"]["attention"]


def test_null_removes_a_block() -> None:
    settings = ["model.blocks.local=null", "model.pattern=[full]"]
    blocks, _ = overridden(WRITTEN, *settings)
    assert list(blocks) == ["full"]
    with pytest.raises(ConfigError) as refusal:
        overridden(WRITTEN, "model.blocks.local.x=null", settings[0])
    assert str(refusal.value) == (
        "model.blocks.local: model.pattern still uses the block that null removes; change it too, "
        "for example 'model.pattern=[full]'"
    )
    other = "model.blocks.mine={kind: parallel, attention: {n_heads: 4}, feed_forward: {d_ff: 8}}"
    with pytest.raises(ConfigError, match="feed_forward"):  # `mine` is invalid, `main` is removed
        overridden(OF_PRESET, "model.blocks.main=null", other)
    blocks, _ = overridden(WRITTEN, "model.blocks.full.attention.window=null")
    assert blocks["full"]["attention"]["window"] is None


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("steps=10", "unknown key 'steps'; did you mean train.steps?"),
        ("batchsize=10", "unknown key 'batchsize'; did you mean train.batch_size?"),
        (
            "model.n_heads=8",
            "model: unknown key 'n_heads'; did you mean model.blocks.full.attention.n_heads or "
            "model.blocks.local.attention.n_heads?",
        ),
        (
            "model.blocks.full.selection_bias=true",
            "model.blocks.full: unknown key 'selection_bias'; did you mean "
            "model.blocks.full.feed_forward.router.selection_bias?",
        ),
        (
            "train.lr=1",
            "train: unknown key 'lr'; did you mean train.optimizer.learning_rate or "
            "train.optimizer.adamw.learning_rate?",
        ),
        (
            "train.optimizer.beta1=0.5",
            "train.optimizer: unknown key 'beta1', which belongs to kind: adamw; choose that kind, "
            "or remove beta1",
        ),
        ("lora_r=8", "unknown key 'lora_r'; did you mean adapter.rank?"),
        ("train.max_steps=8", "train: unknown key 'max_steps'; did you mean train.steps?"),
        (
            "train.objective={kind: policy, beta: 0.1}",
            "train.objective: unknown key 'beta'; did you mean train.objective.kl_weight?",
        ),
        ("train.objective.kind=grpo", "train.objective: unknown kind 'grpo'; use kind: policy"),
        ("train.stepps=3", "train: unknown key 'stepps'; did you mean 'steps'?"),
        ("zzz=1", "unknown key 'zzz'; known: adapter, data, "),
    ],
)
def test_an_unknown_key_is_sought_in_the_whole_recipe(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        overridden(WRITTEN, setting)
    assert str(caught.value).startswith(message)


def test_a_kind_written_as_a_plain_word_is_a_section() -> None:
    block = {**BLOCK, "norm": "rms_norm", "attention": {"n_heads": 2, "position": "rope"}}
    written = {**WRITTEN, "model": {"d_model": 16, "n_layers": 2, "blocks": {"main": block}}}
    place = "model.blocks.main"
    settings = [f"{place}.attention.position.theta=5000", f"{place}.norm.eps=0.01"]
    blocks, told = overridden(written, *settings)
    assert blocks["main"]["attention"]["position"]["kind"] == "rope"
    assert blocks["main"]["attention"]["position"]["theta"] == 5000
    assert blocks["main"]["norm"]["kind"] == "rms_norm"
    assert blocks["main"]["norm"]["eps"] == 0.01
    assert told == []
    blocks, _ = overridden(written, f"{place}.attention.position.kind=alibi")
    assert blocks["main"]["attention"]["position"]["kind"] == "alibi"
    with pytest.raises(ConfigError, match="name holds 'tiny', not settings"):
        overridden(written, "name.kind=rope")


def test_a_misspelt_block_names_the_near_one() -> None:
    with pytest.raises(ConfigError, match=r"model\.blocks\.locla: .* did you mean 'local'\?"):
        overridden(WRITTEN, "model.blocks.locla.attention.window=5")
    with pytest.raises(ConfigError, match=r"model\.blocks\.mian: .* did you mean 'main'\?"):
        overridden(OF_PRESET, "model.blocks.mian.attention.window=5")
    with pytest.raises(ConfigError, match="'kind' is missing; known: parallel, post_norm"):
        overridden(WRITTEN, "model.blocks.zzz.attention.window=5")


def test_a_preset_does_not_go_under_a_model_that_is_written_out() -> None:
    with pytest.raises(ConfigError, match=r"replace the whole model: 'model=\{preset: gpt2\}'"):
        overridden(WRITTEN, "model.preset=gpt2")
    blocks, _ = overridden(WRITTEN, "model={preset: gpt2}")
    assert list(blocks) == ["main"]
    blocks, _ = overridden({**OF_PRESET, "model": {"preset": "gpt2"}}, "model.preset=pythia-70m")
    assert list(blocks) == ["main"]


def test_workers_make_what_data_is_left_and_contradict_none_that_is_given() -> None:
    shared = {**WRITTEN, "parallel": {"shard": 2, "data": 4}}
    assert on_workers(shared, 6)["parallel"]["data"] == 3
    assert on_workers(shared, 8, data_is_given=True)["parallel"]["data"] == 4
    with pytest.raises(ConfigError, match=r"parallel: data=4 does not give 6 processes, but 3"):
        on_workers(shared, 6, data_is_given=True)


@pytest.mark.parametrize(
    "value",
    [
        "**/*",
        "&a",
        "!x",
        "it's",
        "a: b",
        "a #b",
        "-",
        "@x",
        "%x",
        "",
        " a",
        "two\nlines",
        "1e3",
        "é",
    ],
)
def test_a_value_is_written_as_a_setting_reads_it(value: str) -> None:
    for given in (value, [value], {"path": value}, {"kind": "folder", "glob": value}):
        assert apply_overrides({}, [f"data={written(given)}"]) == {"data": given}


@pytest.mark.parametrize("value", ["[*", "[it's", '["', "[$HOME"])
def test_the_advised_quotes_make_a_setting_of_the_text(value: str) -> None:
    with pytest.raises(ConfigError, match="if it is a string, quote it: ") as refused:
        apply_overrides({}, [f"data.glob={value}"])
    (setting,) = shlex.split(str(refused.value).partition("quote it: ")[2])
    assert apply_overrides({}, [setting]) == {"data": {"glob": value}}
