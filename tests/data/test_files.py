"""Which files a pattern finds, and what is said of those that it cannot look for."""

import os
from pathlib import Path

import pytest

from workhorse.data.files import visible_files
from workhorse.errors import WorkhorseError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a/b/deep.txt", "a/near.txt", "top.txt", ".hidden/in.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("text")
    return tmp_path


@pytest.mark.parametrize("closed", ["a", "a/b"])
def test_a_folder_that_cannot_be_read_is_not_passed_over(
    folder: Path, closed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Played, for root may read any folder."""
    able = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != folder / closed and able(path, mode)
    )
    with pytest.raises(WorkhorseError, match=rf"cannot read the folder {folder / closed}; give"):
        visible_files(folder, "**/*")
    assert visible_files(folder, "*.txt") == [folder / "top.txt"]


def test_a_hidden_folder_may_be_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: ".hidden" not in str(path))
    names = [file.name for file in visible_files(folder, "**/*.txt")]
    assert names == ["deep.txt", "near.txt", "top.txt"]
