"""A recipe that tests can train, and its corpus."""

from pathlib import Path

import pytest

from tests.cli.tiny import RECIPE


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("corpus.txt").write_text("some words to learn " * 100)
    Path("tiny.yaml").write_text(RECIPE)
    return "tiny.yaml"
