import math
import re
from pathlib import Path

import yaml

from tests.compare.conftest import FEED_FORWARD, GATED, PLAIN, MakeStudy
from workhorse.compare import Study, quick, read_study, with_settings
from workhorse.compare.plan import Plan, Trial, make_plan
from workhorse.optim.adamw import AdamWConfig
from workhorse.optim.muon import MuonConfig

BYTES = 263
ROOT = Path(__file__).parents[2]


def plan(study: Study) -> Plan:
    return make_plan(study, lambda recipe: BYTES, lambda name, recipe: 0.5)


def steps(study: Study) -> dict[str, int]:
    return {name: one.recipe.train.steps for name, one in plan(study).variants.items()}


def test_steps_by_each_kind_of_budget(make_study: MakeStudy):
    assert steps(make_study(budget={"steps": 7})) == {"gated": 7, "plain": 7}
    assert steps(make_study(budget={"tokens": 100})) == {
        "gated": 3,
        "plain": 3,
    }  # 32 tokens per step
    assert steps(make_study(budget={"seconds": 2.4})) == {"gated": 4, "plain": 4}


def test_equal_flops_give_a_smaller_variant_more_steps(make_study: MakeStudy):
    """Per token, a layer costs 6 · (4·16² + n·16·d_ff + 2·16·16) FLOPs and the head 6 · 16·V."""
    flops = {
        width: 6 * (4 * 16**2 + 3 * 16 * width + 2 * 16 * 16) + 6 * 16 * BYTES for width in (32, 64)
    }
    study = make_study(
        variants={"narrow": {}, "wide": {f"{FEED_FORWARD}.d_ff": 64}},
        baseline="narrow",
        budget={"flops": 1e7},
    )
    found = plan(study).variants
    assert [one.flops_per_token for one in found.values()] == list(flops.values())
    assert steps(study) == {
        "narrow": math.floor(1e7 / (flops[32] * 32)),
        "wide": math.floor(1e7 / (flops[64] * 32)),
    }
    assert all(0 <= 1e7 - one.flops < one.flops_per_token * 32 for one in found.values())


def test_a_grid_is_the_product_of_its_values(make_study: MakeStudy):
    study = make_study(
        variants={},
        grid={FEED_FORWARD: [GATED, PLAIN], "train.batch_size": [2, 4]},
        baseline=None,
    )
    assert list(study.all_variants()) == [
        "feed_forward=gated_mlp,batch_size=2",
        "feed_forward=gated_mlp,batch_size=4",
        "feed_forward=mlp,batch_size=2",
        "feed_forward=mlp,batch_size=4",
    ]
    assert study.compared_with == "feed_forward=gated_mlp,batch_size=2"
    last = plan(study).variants["feed_forward=mlp,batch_size=4"].recipe
    assert last.train.batch_size == 4
    assert last.model["blocks"]["main"]["feed_forward"] == PLAIN


def test_names_of_a_grid_tell_its_values_apart(make_study: MakeStudy):
    wide = {**PLAIN, "d_ff": 64}
    study = make_study(variants={}, grid={FEED_FORWARD: [PLAIN, wide, None]}, baseline=None)
    assert list(study.all_variants()) == [
        "feed_forward=mlp-1",
        "feed_forward=mlp-2",
        "feed_forward=null",
    ]
    alike = {"data.eos": ["a", "a ", "a-1"]}
    assert len(make_study(variants={}, grid=alike, baseline=None).all_variants()) == 3
    same = {"model.blocks.a.norm.eps": [1e-5], "model.blocks.b.norm.eps": [1e-5, 1e-6]}
    assert list(make_study(variants={}, grid=same, baseline=None).all_variants()) == [
        "a.norm.eps=1e-05,b.norm.eps=1e-05",
        "a.norm.eps=1e-05,b.norm.eps=1e-06",
    ]


def test_a_long_warmup_is_shortened_with_the_run_as_on_the_command_line(make_study, fields):
    base = fields["base"]
    train = {**base["train"], "schedule": {"kind": "linear", "warmup_steps": 20}}
    found = plan(make_study(base={**base, "train": train}))
    assert (
        found.variants["plain"].recipe.train.schedule.warmup_steps == 3
    )  # 20 of 40 steps, so 3 of 6
    assert any("warmup_steps is shortened to 3" in line for line in found.notices)


def test_the_recipe_of_a_trial(make_study: MakeStudy):
    found = plan(make_study(learning_rates=[0.5, 1]))
    trial = Trial("plain", 2, 0.5)
    recipe = found.recipe(trial, "somewhere", threads=3)
    assert recipe.train.seed == 2
    before = found.variants["plain"].recipe.train.optimizer
    assert recipe.train.optimizer.learning_rate == before.learning_rate / 2
    assert str(recipe.data.cache_dir) == "somewhere"
    assert recipe.train.threads == 1  # set in the base
    assert recipe.train.checkpoint_every == 2
    assert recipe.name == "gates-plain-seed-2"


def test_a_factor_scales_every_learning_rate():
    both = MuonConfig(learning_rate=0.02, adamw=AdamWConfig(learning_rate=0.004)).scaled(0.5)
    assert isinstance(both, MuonConfig)
    assert (both.learning_rate, both.adamw.learning_rate) == (0.01, 0.002)


def test_search_trials_come_first_on_a_seed_of_their_own(make_study: MakeStudy):
    found = plan(make_study(learning_rates=[0.5, 1], search_seed=7))
    assert {trial.seed for trial in found.searching} == {7}
    assert len(found.searching) == 4
    folders = [
        trial.folder for trial in [*found.searching, *found.trials({"gated": 1, "plain": 1})]
    ]
    assert len(set(folders)) == 8
    assert plan(make_study()).searching == []


def test_other_tokens_are_compared_in_bits_per_byte(make_study: MakeStudy):
    tokenizers = {"bytes": {}, "bpe": {"tokenizer": {"kind": "bpe", "vocab_size": 300}}}
    study = make_study(variants=tokenizers, baseline=None, budget={"steps": 2})
    assert plan(study).measure == "bits_per_byte"
    packed = {"windows": {}, "documents": {"data.packing": "documents"}}
    assert plan(make_study(variants=packed, baseline=None)).measure == "bits_per_byte"
    assert plan(make_study()).measure == "loss"


def test_quick_changes_seeds_budget_and_settings(make_study: MakeStudy):
    changes = {"budget": {"steps": 2}, "seeds": [5], "settings": {"train.batch_size": 3}}
    study = quick(make_study(quick=changes))
    assert (study.seeds, study.budget.steps) == ((5,), 2)
    assert study.question.startswith("This is a quick run")  # shown first in the reports
    assert plan(study).variants["plain"].recipe.train.batch_size == 3


def test_settings_of_the_command_line_go_to_all_variants(make_study: MakeStudy):
    found = plan(with_settings(make_study(), ["train.dtype=bfloat16"]))
    assert {one.recipe.train.dtype for one in found.variants.values()} == {"bfloat16"}


def test_a_base_is_found_beside_the_study(fields, tmp_path: Path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "studies").mkdir()
    (tmp_path / "recipes" / "base.yaml").write_text(yaml.safe_dump(fields["base"]))
    file = tmp_path / "studies" / "gates.yaml"
    file.write_text(yaml.safe_dump({**fields, "base": "../recipes/base.yaml"}))
    monkeypatch.chdir("/")
    assert read_study(file).base == fields["base"]


def test_the_study_of_the_documentation_can_be_planned(tmp_path: Path):
    text = (ROOT / "docs" / "compare.md").read_text("utf-8")
    found = re.search(r"```yaml\n(# depth.yaml.*?)```", text, re.DOTALL)
    assert found
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    file = tmp_path / "depth.yaml"
    file.write_text(found[1])
    assert len(make_plan(read_study(file), lambda recipe: 4096).variants) == 3
