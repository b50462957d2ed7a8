"""Invalid options of a benchmark raise an error before it begins."""

from pathlib import Path

import pytest

from benchmarks import train


@pytest.mark.parametrize("option", ["--rounds", "--threads"])
@pytest.mark.parametrize("number", ["0", "-1", "x"])
def test_numbers_begin_at_one(option: str, number: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        train.options().parse_args([f"{option}={number}"])
    assert refused.value.code == 2
    assert f"{number!r} is not a whole number of at least 1" in capsys.readouterr().err


def test_a_checkout_of_nanogpt_has_its_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train.options().parse_args(["--nanogpt", str(tmp_path)])
    assert "is not a nanoGPT checkout: it has no model.py" in capsys.readouterr().err
    (tmp_path / "model.py").touch()
    assert train.options().parse_args(["--nanogpt", str(tmp_path)]).nanogpt == tmp_path
