"""The studies in `studies/`, and the programs next to them."""

import json
import math
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest

from studies import coordinates, depth, ladder, publish, reward_lengths
from workhorse.compare import quick, read_study
from workhorse.compare.plan import make_plan
from workhorse.scaling import fit_laws

LADDER = (
    "tokenizer.vocab_size=280; train.seq_len=256; train.eval_every=null; model.d_model=64;"
    " model.blocks.main.attention.n_heads=1; model.blocks.main.feed_forward.d_ff=64;"
    " data.corpus={{kind: folder, path: {texts}}}"
)
"""Settings that make the models of the scaling ladder small."""
SEARCHES = ("width",)
"""Studies with one seed: their result is the table of the learning rate search."""
CHARACTERS = 67
"""Vocabulary size assumed for a character tokenizer, whose size depends on its corpus."""
STUDIES = sorted((Path(__file__).parent.parent / "studies").glob("*.yaml"))


@pytest.mark.parametrize("file", STUDIES, ids=lambda file: file.stem)
def test_every_study_can_be_planned_whole_and_quick(file: Path):
    study = read_study(file)
    assert study.name == file.stem
    assert len(study.seeds) >= 5 or study.name in SEARCHES
    for asked in (study, quick(study)):
        plan = make_plan(asked, lambda recipe: recipe.tokenizer.vocab_size or CHARACTERS)
        assert plan.measure == "loss"


def test_the_page_about_depth(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The page has all charts, and its curves support the sentences next to them."""
    monkeypatch.setattr("sys.argv", ["depth", "--out", str(tmp_path / "depth.html")])
    depth.main()
    page = (tmp_path / "depth.html").read_text()
    assert page.count("<svg") == 7
    assert "http" not in page
    plain = {
        (name, activation): depth.through_plain(fill, activation)[-1]
        for name, fill in depth.INITS.items()
        for activation in ("tanh", "relu")
    }
    assert abs(math.log2(plain["He", "relu"])) < 6
    assert math.log2(plain["Xavier", "relu"]) == pytest.approx(-depth.LAYERS / 2, abs=6)
    assert plain["Xavier", "tanh"] > 0.05
    assert max(plain["normal, 0.02", one] for one in ("tanh", "relu")) < 1e-40
    differences = {
        activation: depth.through_plain(depth.INITS[init], activation, centred=True)
        for activation, init in depth.SUITED.items()
    }
    assert differences["sigmoid"][9] < 1e-5
    assert min(differences["tanh"][9], differences["relu"][9]) > 0.1
    norms = {row[0]: row[1:] for row in depth.what_norms_see()[1:]}
    assert norms["LayerNorm"] == norms["RMSNorm"] == ["0", "0", "0"]
    assert "0" not in norms["BatchNorm"]


def test_coordinates_grow_with_the_width_by_the_usual_rules_and_not_by_mup():
    """The coordinate check of muP: the change of activations after a few steps, by width."""
    slopes = {
        rules: coordinates.slopes(coordinates.changes(rules, widths=(32, 256)))
        for rules in coordinates.RULES
    }
    assert max(slopes["usual"].values()) > 0.4
    for rules in ("muP", "Muon"):
        assert max(map(abs, slopes[rules].values())) < 0.25


def test_a_ladder_predicts_its_next_rung_and_then_trains_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    texts = tmp_path / "texts"
    texts.mkdir()
    for number in range(12):
        (texts / f"{number}.txt").write_text(f"def f{number}(x):\n    return {number}\n" * 20)
    monkeypatch.setattr(ladder, "SAME", LADDER.format(texts=texts).split("; "))
    monkeypatch.setattr(ladder, "STEP_TOKENS", 256)
    out = tmp_path / "out"
    monkeypatch.setattr(ladder, "TOKENS_PER_PARAMETER", 0.02)
    monkeypatch.setattr(ladder, "fit_laws", partial(fit_laws, draws=5))
    tokens = ["256", "512", "768", "1024", "1280"]
    words = ["--depths", "1", "--tokens", *tokens, "--next", "2", "--notches", "1"]
    monkeypatch.setattr("sys.argv", ["ladder", *words, "--out", str(out)])
    ladder.main()
    text = (out / "ladder.md").read_text()
    assert text.count("power law of compute") == 3
    (predicted,) = out.glob("depth-2-*.json")
    assert len(json.loads(predicted.read_text())["runs"]) == 5  # without the predicted run itself
    assert predicted.stat().st_mtime < (out / predicted.stem / "metrics.jsonl").stat().st_mtime


def test_lengths_are_compared_at_equal_steps_and_at_equal_reward():
    """The second run reaches the same reward 10 steps later; wrong answers grow by 1 per step."""

    def run(first: int) -> reward_lengths.Steps:
        steps = [{"reward": (step + first) / 100, "right_tokens": 5.0} for step in range(40)]
        return [{**step, "wrong_tokens": 10.0 + at} for at, step in enumerate(steps)]

    runs = dict(zip(reward_lengths.LOSSES, (run(10), run(0)), strict=True))
    matched = reward_lengths.at_equal_reward(runs)
    levels = [reward_lengths.mean_of(steps, "reward") for steps in matched.values()]
    assert levels == [pytest.approx(0.345)] * 2
    lengths = [reward_lengths.mean_of(steps, "wrong_tokens") for steps in matched.values()]
    assert lengths == [34.5, 44.5]
    text = reward_lengths.report({1: runs, 2: runs})
    assert "| at equal reward | wrong answers | 34.50 (34.50 to 34.50) | 44.50" in text
    assert "| last | wrong, minus right | 39.50 (39.50 to 39.50) | 39.50" in text
    assert "| last, minus first | wrong answers | 30.00 (30.00 to 30.00)" in text


@pytest.mark.slow
def test_a_study_of_lengths_trains_its_runs_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(reward_lengths, "QUESTIONS", 400)
    words = ["--seeds", "1", "2", "--steps", "10", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", ["reward_lengths", *words])
    reward_lengths.main()
    table = (tmp_path / "lengths.md").read_text()
    assert table.count("wrong answers") == 4
    trained = sorted(path.parent.name for path in tmp_path.glob("*/ended"))
    losses = ("by-a-constant", "by-length", "prime")
    assert trained == [f"{name}-{seed}" for name in losses for seed in (1, 2)]
    capsys.readouterr()
    reward_lengths.main()
    assert capsys.readouterr().out == table


@pytest.mark.parametrize(
    ("program", "words", "told"),
    [
        (ladder, ["--next", "99"], "depth-99 is not a recipe; choose depth-1 to depth-64"),
        (ladder, ["--tokens", "10"], "train.steps: 0 is too small"),
        (ladder, ["--depths", "1"], "no law can be fitted to these runs: at least 5 runs are need"),
        (publish, ["nowhere"], "nowhere"),
        (reward_lengths, ["--seeds", "1"], "1 seed has no interval; give --seeds two or more"),
        (reward_lengths, ["--steps", "9"], "--steps 9 is too small; choose 10 or more"),
        (depth, ["--out", "file/depth.html"], "cannot write file"),
    ],
)
def test_what_cannot_be_is_said_in_one_line_before_anything_is_done(
    *,
    program: ModuleType,
    words: list[str],
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    monkeypatch.setattr("sys.argv", ["study", *words])
    with pytest.raises(SystemExit) as end:
        program.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert told in said.err
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
