"""`workhorse compare`: output, reports, and one-line errors."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.compare.conftest import study_fields
from workhorse.cli.main import main


@pytest.fixture
def fields(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(tmp_path)
    quick = {"budget": {"steps": 2}, "seeds": [1, 2]}
    return {**study_fields(tmp_path), "quick": quick}


def write(fields: dict[str, Any], name: str = "study.yaml") -> str:
    Path(name).write_text(yaml.safe_dump(fields))
    return name


def test_a_quick_study(fields, capsys):
    assert main(["compare", write(fields), "--quick", "--json"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert result["folder"] == "runs/gates-quick"
    assert (result["done"], result["trials"]) == (4, 4)
    assert result["variants"]["gated"]["steps"] == 2
    assert "4 of 4 trials: gated, seed 2" in err or "4 of 4 trials: plain, seed 2" in err
    assert main(["compare", "study.yaml", "--quick"]) == 0
    out, err = capsys.readouterr()
    assert "report runs/gates-quick/report.html" in out
    assert "This is a quick run" in err.splitlines()[0]
    assert "resuming: 4 of 4 trials are done" in err


def test_a_dry_run(fields, capsys):
    assert main(["compare", write(fields), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "6,720 parameters, 6 steps, 192 tokens" in out
    assert "4 trials in runs/gates" in out
    assert not Path("runs").exists()


def test_settings_of_the_command_line_make_another_study(fields, capsys):
    assert main(["compare", write(fields), "--quick"]) == 0
    assert main(["compare", "study.yaml", "--quick", "--dtype", "bfloat16"]) == 2
    assert "base.train.dtype changed from null to 'bfloat16'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"baseline": "x"}, "baseline: 'x' is not a variant; known: gated, plain"),
        (
            {"base": "no.yaml"},
            "base: 'no.yaml' is not a file; give a recipe's path relative to study.yaml",
        ),
    ],
)
def test_a_mistake_is_one_line(fields, capsys, change, said):
    assert main(["compare", write({**fields, **change})]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
    assert not Path("runs").exists()


MERGE = {"models": [{"model": "runs/a"}]}


@pytest.mark.parametrize(
    ("verb", "content", "said"),
    [
        (["compare"], None, "file.yaml: No such file or directory; check the path"),
        (["compare"], {"name": "a", "train": {}}, "is a recipe, not a study; run workhorse train"),
        (["compare"], MERGE, "is a merge recipe, not a study; run workhorse merge file.yaml"),
        (["compare"], {}, "is a folder, not a study; give the YAML file of a study"),
        (["merge", "--out", "out"], {}, "is a folder, not a merge recipe; give the YAML file"),
        (
            ["merge", "--out", "out"],
            {"budget": {}},
            "is a study, not a merge recipe; run workhorse",
        ),
        (["train"], {"budget": {}}, "file.yaml is a study, not a recipe; run workhorse compare f"),
        (["plan"], MERGE, "is a merge recipe, not a recipe; run workhorse merge file.yaml"),
    ],
)
def test_a_file_of_another_verb(tmp_path, monkeypatch, capsys, *, verb, content, said):
    """{} stands for a folder."""
    monkeypatch.chdir(tmp_path)
    if content == {}:
        Path("file.yaml").mkdir()
    elif content is not None:
        write(content, "file.yaml")
    assert main([*verb, "file.yaml"]) == 2
    err = capsys.readouterr().err
    assert said in err
    assert err.count("\n") == 1
