"""A file is written whole or not at all, and the place that could not be written is named."""

import errno
import os
from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.writing import CannotWriteError, check_place, write_atomically, writing


def test_a_text_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.yaml"
    write_atomically(file, "old")
    with monkeypatch.context() as full:
        full.setattr("os.fsync", _refuse)
        with pytest.raises(WorkhorseError, match=r"recipe\.yaml: No space left.*; make room there"):
            write_atomically(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    write_atomically(file, "new")
    assert file.read_text() == "new"


def _refuse(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_link_by_the_name_of_a_temporary_file_is_not_followed(tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.write_text("mine")
    (tmp_path / ".tmp-recipe.yaml").symlink_to(mine)
    write_atomically(tmp_path / "recipe.yaml", "new")
    assert (tmp_path / "recipe.yaml").read_text() == "new"
    assert not (tmp_path / "recipe.yaml").is_symlink()
    assert mine.read_text() == "mine"


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.symlink_to(os.devnull)  # which a failure of this test leaves alone
    with pytest.raises(WorkhorseError, match=r"device: it is a device.*; name a file"):
        write_atomically(device, "new")
    assert device.is_symlink()


def test_the_outermost_place_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(WorkhorseError, match=r"cannot write out: Not a directory; choose another"),
        writing(Path("out")),
    ):
        write_atomically(Path("/dev/null/.tmp-out"), "new")


def test_a_place_is_refused_before_the_work_for_it(tmp_path: Path):
    check_place(tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
    for path in (tmp_path, tmp_path / "missing" / "page.html", Path("/dev/null")):
        with pytest.raises(CannotWriteError, match=f"cannot write {path}"):
            check_place(path)
