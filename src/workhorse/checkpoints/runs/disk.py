"""Operations on the disk, one method each, so that tests can make any of them fail or stop."""

import errno
import os
import shutil
from pathlib import Path

from workhorse.files.slices import Slices, fill, lay_out
from workhorse.files.writing import sync


class Disk:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; a link in its place is not followed."""
        if path.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        path.mkdir(parents=True, exist_ok=True)

    def lay_out(self, path: Path, slices: Slices) -> None:
        """Make the file of whole tensors, without their bytes."""
        lay_out(path, slices)

    def fill(self, path: Path, slices: Slices) -> None:
        """Write rows to their places in a file that was laid out."""
        fill(path, slices)

    def write_text(self, path: Path, text: str) -> None:
        """Write a new file. An existing one is removed first: a link is not followed."""
        path.unlink(missing_ok=True)
        with path.open("x", encoding="utf-8", newline="\n") as file:
            file.write(text)

    def sync(self, path: Path) -> None:
        """Wait until a file's content, or a folder's list of names, is on the disk."""
        sync(path)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def remove(self, path: Path) -> None:
        """Remove a folder and its content; if it is a link, only the link."""
        if path.is_symlink() or not path.is_dir():
            path.unlink()
        else:
            shutil.rmtree(path)
