"""Programs are stored where only the user can write; files that others could write are not read."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from workhorse.execute.compiled.compiled_step import ProgramFolder


@pytest.fixture
def programs(tmp_path: Path) -> ProgramFolder:
    """A folder with one program, under any umask."""
    before = os.umask(0)
    try:
        made = ProgramFolder(tmp_path / "cache" / "programs")
        made.keep("one", lambda path: path.write_bytes(b"a program"))
    finally:
        os.umask(before)
    return made


def contents(programs: ProgramFolder) -> bytes | None:
    file = programs.open("one")
    if file is None:
        return None
    with file:
        return file.read()


def test_what_is_kept_is_for_the_user_alone(programs: ProgramFolder) -> None:
    assert programs.path.stat().st_mode & 0o777 == 0o700
    assert (programs.path / "one").stat().st_mode & 0o777 == 0o600
    assert contents(programs) == b"a program"


def test_a_folder_that_was_open_to_others_is_closed(programs: ProgramFolder) -> None:
    programs.path.chmod(0o775)
    assert contents(programs) == b"a program"
    assert programs.path.stat().st_mode & 0o777 == 0o700


def test_where_there_is_none_nothing_is_said(
    tmp_path: Path, programs: ProgramFolder, caplog: pytest.LogCaptureFixture
) -> None:
    assert programs.open("another") is None
    assert ProgramFolder(tmp_path / "none").open("one") is None
    assert not caplog.records


@pytest.mark.parametrize("mode", [0o660, 0o602, 0o644])
def test_a_file_that_others_may_use_is_not_read(
    programs: ProgramFolder, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    (programs.path / "one").chmod(mode)
    assert contents(programs) is None
    assert f"compiled again: other users can access it (mode {mode:04o})" in caplog.text
    programs.keep("one", lambda path: path.write_bytes(b"another"))
    assert contents(programs) == b"another"


def test_another_users_file_is_not_read(
    programs: ProgramFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = iter([os.geteuid(), os.geteuid() + 1])  # for the folder, then for the file
    monkeypatch.setattr(os, "geteuid", lambda: next(users))
    assert contents(programs) is None
    assert "compiled again: it belongs to another user" in caplog.text


def test_another_users_folder_is_neither_read_nor_written(
    programs: ProgramFolder, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    assert contents(programs) is None
    programs.keep("two", lambda path: path.write_bytes(b"a program"))
    assert [path.name for path in programs.path.iterdir()] == ["one"]
    assert caplog.text.count("is not a folder of this user; remove it, or set XDG_CACHE_HOME") == 2


@pytest.mark.parametrize("link", [Path.symlink_to, Path.mkdir])
def test_a_link_and_a_folder_are_no_program(
    programs: ProgramFolder, caplog: pytest.LogCaptureFixture, link: Callable[..., object]
) -> None:
    path = programs.path / "two"
    link(path, *([programs.path / "one"] if link is Path.symlink_to else []))
    assert programs.open("two") is None
    assert len(caplog.records) == 1


def test_what_cannot_be_written_leaves_nothing_behind(
    programs: ProgramFolder, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    programs.keep("two", fail)
    assert [path.name for path in programs.path.iterdir()] == ["one"]
    assert "cannot be saved: [Errno 28] No space left on device" in caplog.text
