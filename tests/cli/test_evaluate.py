import gzip
import json
import math
from pathlib import Path

import pytest

from workhorse.cli.main import main


def evaluate(capsys, *arguments: str) -> dict:
    assert main(["evaluate", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_a_folder(run_folder, capsys):
    result = evaluate(capsys, str(run_folder), "--data", str(run_folder.parent / "texts"))
    assert result["bytes"] == result["tokens"] == 3 * 63
    assert result["documents"] == 3
    assert result["perplexity"] == pytest.approx(math.exp(result["loss"]))
    assert result["bits_per_byte"] == pytest.approx(result["loss"] / math.log(2))


def test_a_file_is_evaluated_whole(run_folder, capsys):
    result = evaluate(capsys, str(run_folder), "--data", str(run_folder.parent / "texts/a.txt"))
    assert (result["tokens"], result["documents"]) == (63, 1)


def test_jsonl_is_read_as_such(run_folder, capsys, tmp_path):
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "abc"}\n{"text": "defg"}\n'))
    result = evaluate(capsys, str(run_folder), "--data", str(path))
    assert (result["tokens"], result["documents"]) == (7, 2)


def test_without_data_it_is_the_validation_split_of_the_run(run_folder, capsys):
    folder = str(run_folder.parent / "texts")
    expected = evaluate(capsys, str(run_folder), "--data", folder)
    assert evaluate(capsys, str(run_folder)) == expected


def test_stride_and_batch_size(run_folder, capsys):
    plain = evaluate(capsys, str(run_folder))
    overlapping = evaluate(capsys, str(run_folder), "--stride", "8", "--batch-size", "2")
    assert overlapping["tokens"] == plain["tokens"]
    assert overlapping["loss"] != plain["loss"]


def test_compressors_beside_it(run_folder, capsys):
    folder = run_folder.parent / "texts"
    result = evaluate(capsys, str(run_folder), "--compare-gzip")
    joined = b"".join((folder / f"{name}.txt").read_bytes() for name in "abc")
    assert result["compressors"]["gzip"] == 8 * len(gzip.compress(joined, 9)) / len(joined)
    assert main(["evaluate", str(run_folder), "--compare-gzip"]) == 0
    out, _ = capsys.readouterr()
    lines = dict(line.rsplit(maxsplit=1) for line in out.splitlines()[2:5])
    assert float(lines["  gzip -9"]) == pytest.approx(result["compressors"]["gzip"], abs=1e-4)
    assert float(lines["bits per byte"]) == pytest.approx(result["bits_per_byte"], abs=1e-4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "missing.txt"], "missing.txt"),
        (["--data", "empty.txt"], "0 bytes of text hold no token to predict"),
        (["--data", "latin.txt"], "UTF-8"),
        (["--stride", "33"], "stride=33 is not within the context; choose 1 to 32"),
    ],
)
def test_wrong_usage_is_one_line(run_folder, capsys, monkeypatch, arguments, message):
    monkeypatch.chdir(run_folder.parent)
    Path("empty.txt").write_text("")
    Path("latin.txt").write_bytes(b"caf\xe9 au lait")
    assert main(["evaluate", str(run_folder), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err
