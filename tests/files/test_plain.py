"""Untrusted files are opened only inside their folder, and read only up to a limit."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import open_contained, read_bytes, read_text, to_path


def content(folder: Path, name: str = "it", root: Path | None = None) -> bytes:
    with open_contained(folder, name, root=root) as file:
        return file.read()


def test_a_file_may_be_as_long_as_the_limit_and_no_longer(tmp_path: Path) -> None:
    (tmp_path / "it").write_bytes(b"12345678")
    assert read_bytes(tmp_path / "it", limit=8) == b"12345678"
    with pytest.raises(
        WorkhorseError, match=r"it is larger than 7 bytes, the limit for such a file$"
    ):
        read_bytes(tmp_path / "it", limit=7)


def test_a_file_of_another_size_than_it_says_is_read_within_the_limit() -> None:
    """Files in /proc report a size of 0."""
    with pytest.raises(WorkhorseError, match="is larger than 4 bytes"):
        read_bytes(Path("/proc/self/status"), limit=4)


@pytest.fixture
def cached(tmp_path: Path) -> tuple[Path, Callable[[str, str], None]]:
    """A snapshot in the Hub's cache, and a function that creates a link in it."""
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / ("c" * 40)
    shared = tmp_path / "blobs" / "bb"
    for folder in (snapshot / "sub", repository / "blobs", repository / "refs", shared):
        folder.mkdir(parents=True)
    (repository / "blobs" / ("a" * 64)).write_bytes(b"own")
    (repository / "blobs" / ("a" * 40)).write_bytes(b"small")
    (shared / ("b" * 64)).write_bytes(b"shared")
    (repository / "blobs" / ("b" * 64)).symlink_to(f"../../blobs/bb/{'b' * 64}")
    for other in ("secret", "models--org--name/blobs/secret", "models--org--name/refs/main"):
        (tmp_path / other).write_bytes(b"secret")

    def link(name: str, target: str) -> None:
        (snapshot / name).unlink(missing_ok=True)
        (snapshot / name).symlink_to(target)

    return snapshot, link


@pytest.mark.parametrize(
    ("blob", "held"), [("a" * 64, b"own"), ("a" * 40, b"small"), ("b" * 64, b"shared")]
)
def test_the_hubs_cache_is_read_through_its_links(cached, blob: str, held: bytes) -> None:
    """Newer versions of the cache store one copy for all repositories, behind a second link."""
    snapshot, link = cached
    link("it", f"../../blobs/{blob}")
    assert content(snapshot) == held
    link("sub/it", f"../../../blobs/{blob}")
    assert content(snapshot / "sub", root=snapshot) == held


@pytest.mark.parametrize("target", ["../../../secret", "../../blobs/secret", "../../refs/main"])
def test_nothing_else_of_the_cache_is_read(cached, target: str) -> None:
    snapshot, link = cached
    link("it", target)
    with pytest.raises(WorkhorseError, match="is a link out of its folder"):
        content(snapshot)


def test_only_a_cache_has_blobs(tmp_path: Path) -> None:
    """A folder with an unpacked archive must not give access to files next to it."""
    for folder in ("model", "blobs"):
        (tmp_path / folder).mkdir()
    (tmp_path / "blobs" / ("a" * 64)).touch()
    (tmp_path / "model" / "it").symlink_to(f"../blobs/{'a' * 64}")
    with pytest.raises(WorkhorseError, match="is a link out of its folder"):
        content(tmp_path / "model")


def test_a_link_within_the_folder_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    (folder / "other").write_bytes(b"x")
    (folder / "it").symlink_to("other")
    (folder / "sub" / "it").symlink_to("../other")
    (tmp_path / "link").symlink_to("model")
    assert content(tmp_path / "link") == b"x"
    assert content(tmp_path / "link" / "sub", root=tmp_path / "link") == b"x"
    with pytest.raises(WorkhorseError, match="is a link out of its folder"):
        content(tmp_path / "link" / "sub")


def test_a_subfolder_may_be_no_link_out_either(tmp_path: Path) -> None:
    for folder in ("model", "outside"):
        (tmp_path / folder).mkdir()
    (tmp_path / "outside" / "it").touch()
    (tmp_path / "model" / "sub").symlink_to("../outside")
    with pytest.raises(WorkhorseError, match="is a link out of its folder"):
        content(tmp_path / "model" / "sub", root=tmp_path / "model")


@pytest.mark.parametrize("name", ["", ".", "..", "../it", "/etc/hosts", "sub/it", "a\\b", "a\x00"])
def test_what_is_no_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkhorseError, match="is not the name of a file in the folder"):
        content(tmp_path, name)


def test_what_is_no_plain_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "it")  # reading it would wait forever
    with pytest.raises(WorkhorseError, match="is a special file, not a regular file"):
        content(tmp_path)
    (tmp_path / "it").unlink()
    (tmp_path / "it").mkdir()
    with pytest.raises(WorkhorseError, match="is a folder, not a regular file"):
        content(tmp_path)


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("/dev/zero", "link out of its folder"),
        ("nothing", "is missing; download the model again"),
        ("it", "Too many levels of symbolic links"),
    ],
)
def test_links_to_what_cannot_be_read(tmp_path: Path, target: str, message: str) -> None:
    (tmp_path / "it").symlink_to(target)
    with pytest.raises(WorkhorseError, match=message):
        content(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_an_unreadable_file(tmp_path: Path) -> None:
    (tmp_path / "it").touch(0)
    with pytest.raises(
        WorkhorseError, match=r"^cannot read .*: Permission denied; give yourself read"
    ):
        content(tmp_path)


def test_a_file_that_the_user_named(tmp_path: Path) -> None:
    """Links are followed anywhere; pipes and devices, which may never end, are refused."""
    (tmp_path / "it").write_text("text")
    (tmp_path / "link").symlink_to("it")
    assert read_text(tmp_path / "link", limit=4) == "text"
    with pytest.raises(WorkhorseError, match=r"it is larger than 3 bytes; give a smaller file$"):
        read_text(tmp_path / "it", limit=3)
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(WorkhorseError, match=r"it is a pipe or device; give a regular file$"):
            read_text(path, limit=4)
    with pytest.raises(WorkhorseError, match=r"it is a folder; give a regular file$"):
        read_text(tmp_path, limit=4)


def test_an_argument_that_can_name_no_file() -> None:
    assert to_path("a/b", "a folder is a path") == Path("a/b")
    with pytest.raises(WorkhorseError, match=r"^a folder is a path, not 3; give it as a string"):
        to_path(3, "a folder is a path")
    with pytest.raises(
        WorkhorseError, match=r"^a folder is a path, and 'a\\x00' is not a valid one; "
    ):
        to_path("a\0", "a folder is a path")
