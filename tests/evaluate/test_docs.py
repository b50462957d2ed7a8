"""The task in `docs/evaluation.md`, run by the command and from Python exactly as documented."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from workhorse.cli.main import main

DOCUMENT = Path(__file__).parents[2] / "docs" / "evaluation.md"


@pytest.mark.skipif(find_spec("lm_eval") is None, reason="needs lm-eval")
def test_the_local_task(run_folder, tmp_path, monkeypatch, capsys):
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```(\w*)\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (rows,) = (text for kind, text in blocks if kind == "json")
    (task,) = (text for kind, text in blocks if kind == "yaml")
    Path("capitals.jsonl").write_text(rows)
    Path("tasks").mkdir()
    Path("tasks/capitals.yaml").write_text(task)
    (command,) = (
        line
        for kind, text in blocks
        for line in text.splitlines()
        if not kind and line.startswith("workhorse") and "--include-path" in line
    )
    arguments = command.replace("runs/stdlib-small", str(run_folder)).split()[1:]
    assert main([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result["results"]["capitals"]) >= {"acc,none", "acc_norm,none"}
    assert result["n-samples"]["capitals"]["effective"] == 2
    (program,) = (text for kind, text in blocks if kind == "python")
    names: dict[str, Any] = {}
    exec(program.replace("runs/stdlib-small", str(run_folder)), names)
    assert names["results"]["results"] == result["results"]
