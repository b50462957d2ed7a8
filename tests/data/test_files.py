"""Files that a pattern matches, errors for folders that cannot be searched, and zstd files."""

import os
from pathlib import Path

import pytest

from workhorse.data import DataConfig
from workhorse.data.documents import iterate_documents
from workhorse.data.files import Advice, open_bytes, read_text, visible_files
from workhorse.errors import WorkhorseError

zstandard = pytest.importorskip("zstandard")


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
    """The error is simulated, because root can read any folder."""
    able = os.access
    monkeypatch.setattr(
        os, "access", lambda path, mode: Path(path) != folder / closed and able(path, mode)
    )
    with pytest.raises(
        WorkhorseError, match=rf"cannot read the folder {folder / closed}: perm.*; change"
    ):
        visible_files(folder, "**/*")
    assert visible_files(folder, "*.txt") == [folder / "top.txt"]


def test_a_hidden_folder_may_be_closed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: ".hidden" not in str(path))
    names = [file.name for file in visible_files(folder, "**/*.txt")]
    assert names == ["deep.txt", "near.txt", "top.txt"]


def test_folders_too_deep_to_search_are_not_blamed_on_the_pattern(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error is simulated, because newer versions of Python can search such folders."""

    def too_deep(path: Path, pattern: str) -> list[Path]:
        raise RecursionError("maximum recursion depth exceeded")

    monkeypatch.setattr(Path, "glob", too_deep)
    with pytest.raises(
        WorkhorseError, match=rf"folders in {folder} are nested too deeply .*; name a fol"
    ):
        visible_files(folder, "**/*")


ZSTD_FRAMES = [zstandard.compress(text) for text in (b"one line\n" * 9000, b"", b"two\n")]


def test_zstd_frames_laid_end_to_end_are_one_file(tmp_path: Path) -> None:
    (tmp_path / "a.zst").write_bytes(b"".join(ZSTD_FRAMES))
    with open_bytes(tmp_path / "a.zst") as file:
        assert file.read() == b"one line\n" * 9000 + b"two\n"


@pytest.mark.parametrize("size", [4, 10, len(ZSTD_FRAMES[0]) - 1, len(b"".join(ZSTD_FRAMES)) - 1])
def test_a_zstd_file_cut_short_is_damaged_and_no_shorter_text(tmp_path: Path, size: int) -> None:
    (tmp_path / "a.zst").write_bytes(b"".join(ZSTD_FRAMES)[:size])
    with (
        pytest.raises(
            WorkhorseError, match=r"a\.zst is damaged: the file ends inside .*; download"
        ),
        open_bytes(tmp_path / "a.zst") as file,
    ):
        file.read()


def test_a_large_zstd_text_cut_in_the_middle_is_damaged(tmp_path: Path) -> None:
    whole = zstandard.compress("\n".join(map(str, range(60_000))).encode())
    (tmp_path / "a.zst").write_bytes(whole[: len(whole) // 2])
    with (
        pytest.raises(WorkhorseError, match="is damaged: the file ends inside a zstd frame"),
        open_bytes(tmp_path / "a.zst") as file,
    ):
        file.read()


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfab\xef\xbb\xbf")
    assert list(read_text(file, "strict", Advice())) == ["ab\ufeff"]
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf{"text": "ab"}\n')
    source = DataConfig.from_dict(
        {"corpus": {"kind": "jsonl", "path": str(lines), "validation_fraction": 0}}
    )
    assert list(iterate_documents(source)) == ["ab"]
