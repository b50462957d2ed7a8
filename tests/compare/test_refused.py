"""Invalid studies fail with a one-line error before anything is trained or written."""

from pathlib import Path
from typing import Any

import pytest

from tests.compare.conftest import FEED_FORWARD, MakeStudy
from workhorse.compare import Study, compare, dry_run, quick, read_study
from workhorse.errors import WorkhorseError

NARROW = {"model.d_model": 8}
FAST = {"train.optimizer.learning_rate": 1e9}
CASES: list[tuple[dict[str, Any], str]] = [
    ({"seedz": [1]}, "unknown key 'seedz'; did you mean 'seeds'?"),
    ({"variants": {"a": {}}}, "'a' is the only variant; a comparison needs two"),
    ({"variants": {}}, "neither is given"),
    ({"grid": {"model.d_model": [8, 16]}}, "both are given"),
    ({"variants": {}, "grid": {"model.d_model": []}}, "grid.model.d_model: the list is empty"),
    (
        {"variants": {}, "grid": {"model.d_model": list(range(1001))}},
        "1,001 combinations, more than 1,000",
    ),
    ({"baseline": "plian"}, "'plian' is not a variant; did you mean 'plain'?"),
    ({"budget": {}}, "one of steps, tokens, flops or seconds; none is set"),
    ({"budget": {"steps": 1, "flops": 1e9}}, "steps and flops are set"),
    ({"budget": {"tokens": 31}}, "budget.tokens=31 is less than one step of 'gated'"),
    ({"budget": {"flops": 1000}}, "budget.flops=1000 is less than one step of 'gated'"),
    ({"seeds": [1, 2, 1]}, "seeds: 1 is listed 2 times"),
    ({"seeds": []}, "seeds: the list is empty"),
    ({"learning_rates": [1, 1.0]}, "learning_rates: 1 is listed 2 times"),
    ({"search_seed": 2}, "search_seed: 2 is also in seeds"),
    ({"variants": {"a": {}, "b": {"train.steps": 3}}}, "the study's budget determines the steps"),
    ({"variants": {"a": {}, "b": {"train.seed": 3}}}, "the study's seeds determine it"),
    ({"quick": {"settings": {"train.steps": 3}}}, "quick.settings: train.steps cannot be set here"),
    ({"variants": {"a": {}, "b/c": NARROW}}, "'b/c' is not a valid folder name"),
    ({"variants": {"a": {}, "b": {"model.d_modle": 8}}}, "did you mean 'd_model'?"),
    (
        {"variants": {"a": {}, "b": {"model.d_model": 16}}},
        "'a' and 'b' are the same after defaults",
    ),
    ({"variants": {"a": {}, "b": {"description": "x"}}}, "'a' and 'b' are the same"),
    ({"variants": {"a": {"data.cache_dir": "x"}, "b": {}}}, "'a' and 'b' are the same"),
    ({"variants": {"a" * 101: {}, "b": NARROW}}, "has 101 characters, too many for a folder name"),
    (
        {"variants": {}, "grid": {"model.blocks." + "x" * 99: [1, 2]}},
        "grid: '" + "x" * 99 + "='… has 101 characters",
    ),
    (
        {"learning_rates": [1, 1e308], "variants": {"fast": FAST, "plain": {}}},
        "learning_rates: 1e+308 times the learning rate of 'fast' is not valid",
    ),
    (
        {"variants": {"a": {}, "b": NARROW}},
        "'b' has 3,104 parameters, -53.81% relative to the 6,720",
    ),
    (
        {"variants": {"a": {}, "b": {"data.corpus": "stdlib"}}},
        "'b' has a different data.corpus than",
    ),
    ({"variants": {"a": {}, "b": {"data.eos": False}}}, "'b' has a different data.eos than 'a'"),
    ({"contexts": [8, 32]}, "contexts: 32 is larger than max_seq_len=16 of 'gated'"),
    ({"contexts": [16, 8]}, "contexts: the lengths are not in ascending order"),
    ({"variants": {"a": {}, "b": {"model.d_model": 8 * 10**6}}}, "variants.b: the model with its"),
    ({"base": {"name": "x"}}, "base: 'model' is missing"),
    (
        {"variants": {"a": {"train.minutes": 1}}},
        "train.minutes cannot be set here: the study's budget",
    ),
    ({"variants": {1: {}, "1": NARROW}}, "variants: two variants have the same name"),
    (
        {"budget": {"flops": 1e300}},
        "budget.flops: 1e+300 is enough for 2^63 steps of 'gated' or more",
    ),
    (
        {"variants": {"a": {}, "b": {"train.batch_size": 10**12}}, "budget": {"steps": 1}},
        "variants.b: a micro-batch of 1,000,000,000,000 sequences of 16 tokens needs",
    ),
]


@pytest.mark.parametrize(("changes", "said"), CASES, ids=[said for _, said in CASES])
def test_what_cannot_be_is_refused_before_anything_is_written(
    fields: dict[str, Any], tmp_path: Path, changes: dict[str, Any], said: str
):
    if "baseline" not in changes and ("variants" in changes or "grid" in changes):
        changes = {"baseline": None, **changes}
    with pytest.raises(WorkhorseError) as refused:
        compare(Study.from_dict({**fields, **changes}), tmp_path / "out")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_tolerance_for_parameters(make_study: MakeStudy, tmp_path: Path):
    close = {"narrow": {f"{FEED_FORWARD}.d_ff": 31}, "wide": {}}
    study = make_study(variants=close, baseline=None, budget={"steps": 1, "parameters": 0.01})
    assert dry_run(study, tmp_path / "out")["variants"]["wide"]["steps"] == 1
    with pytest.raises(WorkhorseError, match=r"allows 0.10%"):
        dry_run(study.replace(budget={"steps": 1, "parameters": 0.001}), tmp_path / "out")


def test_text_of_which_nothing_is_held_out(make_study, fields, tmp_path: Path):
    corpus = {**fields["base"]["data"]["corpus"], "validation_fraction": 0}
    study = make_study(base={**fields["base"], "data": {"corpus": corpus}})
    with pytest.raises(WorkhorseError, match=r"base.data.corpus has no validation split"):
        compare(study, tmp_path / "out")


def test_a_base_of_minutes(make_study, fields, tmp_path: Path):
    base = {**fields["base"], "train": {"minutes": 1, "batch_size": 2, "seq_len": 16}}
    with pytest.raises(
        WorkhorseError, match=r"base.train.minutes: 1 conflicts with the study's budget"
    ):
        compare(make_study(base=base), tmp_path / "out")


def test_a_base_that_is_not_there(tmp_path: Path):
    file = tmp_path / "study.yaml"
    file.write_text(
        "name: x\nbase: no.yaml\nvariants: {a: {}, b: {train.batch_size: 3}}\n"
        "budget: {steps: 2}\nseeds: [1]\n"
    )
    with pytest.raises(
        WorkhorseError, match=r"base: 'no.yaml' is not a file; give a recipe's path relative to"
    ):
        read_study(file)


def test_quick_without_a_quick_section(make_study: MakeStudy):
    with pytest.raises(WorkhorseError, match="the study has no quick section"):
        quick(make_study())


def test_a_folder_of_something_else(make_study: MakeStudy, tmp_path: Path):
    with pytest.raises(WorkhorseError, match="is not empty and has no study"):
        compare(make_study(), tmp_path)


def test_a_folder_inside_the_corpus(make_study, fields, tmp_path: Path):
    texts = tmp_path / "texts"
    texts.mkdir()
    for name in "abc":
        (texts / f"{name}.txt").write_text(f"text {name} of some words\n" * 20)
    data = {"corpus": {"kind": "folder", "path": str(texts)}}
    study = make_study(base={**fields["base"], "data": data})
    with pytest.raises(WorkhorseError, match="is inside the corpus"):
        compare(study, texts / "out")
    assert len(list(texts.iterdir())) == 3


def test_what_is_no_study(tmp_path: Path):
    with pytest.raises(WorkhorseError, match="read_study"):
        compare({}, tmp_path / "out")  # pyright: ignore[reportArgumentType]
