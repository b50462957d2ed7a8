import json
from pathlib import Path

import pytest

from workhorse.cli.main import main

RECIPE = """
name: tiny
model:
  d_model: 16
  n_layers: 1
  blocks:
    main:
      kind: pre_norm
      norm: {kind: rms_norm}
      attention: {kind: attention, n_heads: 2, position: {kind: rope}}
      feed_forward: {kind: mlp, d_ff: 32}
tokenizer: {kind: bytes}
data:
  corpus: {kind: folder, path: texts, validation_fraction: 0.3}
train: {steps: 4, batch_size: 2, seq_len: 16}
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("recipe.yaml").write_text(RECIPE)
    Path("texts").mkdir()
    for index in range(20):
        Path(f"texts/{index}.txt").write_text(f"text number {index}")


def result_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    assert main(["data", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_prepare_keeps_the_data_in_the_run_directory(capsys) -> None:
    result = result_of(capsys, "prepare", "recipe.yaml")
    assert Path(result["folder"]).parent == Path("runs/tiny/data")
    splits = result["splits"]
    counted = [splits[split]["corpus"]["documents"] for split in ("train", "validation")]
    assert sum(counted) == 20
    again = result_of(capsys, "prepare", "recipe.yaml")
    assert again == result


def test_prepare_keeps_the_data_where_it_is_told(capsys) -> None:
    result = result_of(capsys, "prepare", "recipe.yaml", "--out", "elsewhere")
    assert Path(result["folder"]).parent == Path("elsewhere/data")
    result = result_of(capsys, "prepare", "recipe.yaml", "data.cache_dir=cache")
    assert Path(result["folder"]).parent == Path("cache")


def test_inspect_shows_what_a_model_will_see(capsys) -> None:
    result = result_of(
        capsys,
        "inspect",
        "recipe.yaml",
        "data.packing=documents",
        "train.seq_len=40",
        "--rows",
        "1",
    )
    (row,) = result["rows"]
    assert [segment["document"] for segment in row["segments"]] == [0, 1, 2]
    assert all(segment["text"].startswith("text number") for segment in row["segments"])
    assert row["padding"] == row["ignored"] == 40 - sum(s["tokens"] for s in row["segments"])


def test_the_help_of_inspect_tells_that_it_writes(capsys) -> None:
    assert main(["data", "inspect", "--help"]) == 0
    assert "written into the run directory" in " ".join(capsys.readouterr().out.split())


def test_inspect_for_a_person(capsys) -> None:
    assert main(["data", "inspect", "recipe.yaml", "--split", "validation"]) == 0
    page = capsys.readouterr().out
    assert "packing windows: rows of 16 tokens, 2 per step" in page
    assert "validation step 0 row 0: corpus, 0 padding, 0 without a target" in page
    assert "text number" in page


@pytest.mark.parametrize(
    ("rows", "answers"),
    [
        ("pairs", [{"chosen": "good", "rejected": "bad"}]),
        ("labels", [{"completion": "good", "label": True}, {"completion": "bad", "label": False}]),
    ],
)
def test_inspect_names_the_answers_of_pairs_and_labels(capsys, rows, answers) -> None:
    records = [{"prompt": f"{number} is ", **answer} for number in range(4) for answer in answers]
    Path("records.jsonl").write_text("\n".join(map(json.dumps, records)))
    corpus = f"data.corpus={{kind: conversations, path: records.jsonl, rows: {rows}}}"
    arguments = ["recipe.yaml", corpus, "train.batch_size=4", "--rows", "4"]
    names = ("chosen", "rejected") if rows == "pairs" else ("desirable", "undesirable")
    for row in result_of(capsys, "inspect", *arguments)["rows"]:
        (segment,) = row["segments"]
        assert row["answer"] == names["bad" in segment["text"]]
    assert main(["data", "inspect", *arguments]) == 0
    assert f": corpus, {names[0]}, " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["prepare", "missing.yaml"], "cannot read missing.yaml: No such file"),
        (["prepare", "recipe.yaml", "data.corpus.path=nowhere"], "the folder nowhere in "),
        (["prepare", "recipe.yaml", "data.corpsu=stdlib"], "did you mean 'corpus'?"),
        (["inspect", "recipe.yaml", "train.seq_len=5000"], "fewer than one window of"),
        (
            ["inspect", "recipe.yaml", "--split", "validation", "--step", "999"],
            "--step 999 is past the last validation batch; choose 0 to ",
        ),
        (
            [
                "inspect",
                "recipe.yaml",
                "data.corpus.validation_fraction=0",
                "--split",
                "validation",
            ],
            "the recipe's data has no validation split; show --split train",
        ),
    ],
)
def test_mistakes_are_one_line(capsys, arguments: list[str], line: str) -> None:
    assert main(["data", *arguments]) == 2
    said = capsys.readouterr()
    assert line in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_run_directory_is_a_recipe(capsys) -> None:
    assert main(["train", "recipe.yaml", "train.steps=1", "--out", "run"]) == 0
    capsys.readouterr()
    for verb in ("prepare", "inspect"):
        result = result_of(capsys, verb, "run")
        assert Path(result["folder"]).parent == Path("run/data")
    assert not Path("runs").exists()
    assert main(["data", "inspect", "texts"]) == 2
    assert "texts is not a run: it has no recipe.yaml" in capsys.readouterr().err


def test_unknown_characters_are_warned_of_and_counted(capsys) -> None:
    few = "tokenizer={kind: characters, vocab_size: 16}"
    result = result_of(capsys, "prepare", "recipe.yaml", few)
    unknown = {split: result["splits"][split]["corpus"]["unknown"] for split in result["splits"]}
    assert min(unknown.values()) > 0
    assert main(["data", "inspect", "recipe.yaml", few]) == 0
    said = capsys.readouterr()
    (warning,) = (line for line in said.err.splitlines() if "are unknown: the model" in line)
    assert warning.startswith(f"warning: {sum(unknown.values())} of ")
    head, train = said.out.splitlines()[:2]
    assert head.split()[4:] == ["unknown", "weight"]
    assert train.split()[-2:] == [str(unknown["train"]), "1"]
