"""The cache folder, and the number of threads."""

import os
from pathlib import Path

import pytest

from workhorse.devices.names import cache_folder, use_threads
from workhorse.errors import WorkhorseError


def test_the_cache_is_in_the_home_directory_or_where_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/workhorse")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path("/home/somebody/.cache/workhorse")


@pytest.mark.parametrize("home", ["", "relative"])
def test_an_account_without_a_home(monkeypatch: pytest.MonkeyPatch, home: str) -> None:
    """Programs are loaded from the cache, so it is never a folder that others can write to."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", home)
    with pytest.raises(WorkhorseError, match=r"no home directory .*; set XDG_CACHE_HOME"):
        cache_folder()
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    with pytest.raises(WorkhorseError, match="no home directory"):
        cache_folder()


def test_more_threads_than_a_machine_can_use_are_refused() -> None:
    with pytest.raises(WorkhorseError, match=r"threads=100000 is more than 16 for each of this"):
        use_threads(100_000)
