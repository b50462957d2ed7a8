"""The studies that come with the project."""

from pathlib import Path

import pytest

from workhorse.compare import quick, read_study
from workhorse.compare.plan import make_plan

STUDIES = sorted((Path(__file__).parent.parent / "studies").glob("*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_study_can_be_planned_whole_and_quick(file: Path):
    study = read_study(file)
    assert study.name == file.stem
    assert len(study.seeds) >= 4
    for asked in (study, quick(study)):
        plan = make_plan(asked, lambda recipe: recipe.tokenizer.vocab_size)
        assert plan.measure == "loss"
