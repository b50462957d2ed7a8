"""Operations on the disk, one method each, so that tests can make any of them fail or stop."""

import errno
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from workhorse.writing import sync


class Disk:
    """The real file system."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; a link in its place is not followed."""
        if path.is_symlink():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path))
        path.mkdir(parents=True, exist_ok=True)

    def write_tensors(self, path: Path, tensors: Mapping[str, Tensor]) -> None:
        path.touch()
        mode = path.stat().st_mode
        try:
            save_file(dict(tensors), path)
        except SafetensorError as error:
            raise _system_error(error) from error
        path.chmod(mode)  # safetensors makes a file that only its owner may read

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


def _system_error(error: SafetensorError) -> OSError:
    """The OSError whose number safetensors gives in its message, `… (os error 28)`."""
    found = re.search(r"\(os error (\d+)\)", str(error))
    if found is None:
        return OSError(errno.EIO, str(error))
    return OSError(int(found[1]), os.strerror(int(found[1])))
