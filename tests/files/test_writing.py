"""Files are written atomically, and errors name the path that could not be written."""

import errno
import os
import threading
from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.files.writing import (
    TEMPORARY,
    CannotWriteError,
    check_place,
    replacing,
    write_atomically,
    writing,
)


def test_a_text_file_is_replaced_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "recipe.yaml"
    write_atomically(file, "old")
    with monkeypatch.context() as full:
        full.setattr("os.fsync", _refuse)
        with pytest.raises(
            WorkhorseError, match=r"recipe\.yaml: No space left.*; free some disk space"
        ):
            write_atomically(file, "new")
    assert file.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]
    write_atomically(file, "new")
    assert file.read_text() == "new"


def _refuse(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_temporary_name_is_nobody_elses(tmp_path: Path) -> None:
    mine = [tmp_path / ".tmp-recipe.yaml", tmp_path / f"{TEMPORARY}mine"]
    for path in mine:
        path.write_text("mine")
        os.utime(path, (0, 0))
    write_atomically(tmp_path / "recipe.yaml", "new")
    with replacing(tmp_path / "folder", folder=True):
        pass
    assert [path.read_text() for path in mine] == ["mine", "mine"]
    assert len(list(tmp_path.iterdir())) == 4


@pytest.mark.parametrize("folder", [False, True])
def test_what_a_killed_process_left_is_deleted_and_what_is_in_use_is_not(
    tmp_path: Path, folder: bool
) -> None:
    left = tmp_path / f"{TEMPORARY}{'0' * 16}"
    left.mkdir() if folder else left.touch()
    write_atomically(tmp_path / "first", "")
    assert left.exists()  # it is too new to be stale
    os.utime(left, (0, 0))
    with replacing(tmp_path / "slow", folder=folder) as used:
        os.utime(used, (0, 0))
        write_atomically(tmp_path / "second", "")
        assert not left.exists()
        assert used.exists()


def test_of_two_writers_of_a_folder_one_succeeds_and_what_is_there_is_whole(tmp_path: Path) -> None:
    """Two `convert` commands with one target: one succeeds, and the other gets an error."""
    together, refused = threading.Barrier(2), list[CannotWriteError]()

    def write(name: str) -> None:
        try:
            with replacing(tmp_path / "out", folder=True) as out:
                (out / "a").write_text(name)
                together.wait()
                (out / "b").write_text(name)
        except CannotWriteError as error:
            refused.append(error)

    threads = [threading.Thread(target=write, args=(name,)) for name in ("one", "two")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    out = tmp_path / "out"
    assert [error.reason.partition(";")[0] for error in refused] == ["Directory not empty"]
    assert (out / "a").read_text() == (out / "b").read_text()
    assert list(tmp_path.iterdir()) == [out]


def test_a_device_is_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "device"
    device.symlink_to(os.devnull)  # a link: a failure of this test must not damage it
    with pytest.raises(WorkhorseError, match=r"device: it is a device.*; give a file"):
        write_atomically(device, "new")
    assert device.is_symlink()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/workhorse-test")):  # also any new file in /dev
        with pytest.raises(WorkhorseError, match=r"it is a (device|pipe), which would"):
            check_place(path)


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
