"""`workhorse report`: the report page of one or several runs."""

import json
from pathlib import Path

import pytest

from workhorse.cli.main import main


def test_the_report_of_two_runs(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        assert main(["train", recipe, "--out", f"runs/{name}"]) == 0
    Path("runs/one/report.html").unlink()
    capsys.readouterr()
    assert main(["report", "runs/one", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["report"].endswith("runs/one/report.html")
    assert "data-values" in Path("runs/one/report.html").read_text("utf-8")
    assert main(["report", "runs/one", "runs/two", "--out", "both.html"]) == 0
    assert capsys.readouterr().out == "report both.html\n"
    assert 'data-name="two"' in Path("both.html").read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere"),
        (["tiny.yaml"], "tiny.yaml"),
        ([], "Missing argument 'RUN...'"),
    ],
)
def test_a_folder_without_a_run(
    recipe: str, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    assert main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
