"""The files of a tokenizer: their names and contents, and their atomic replacement."""

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

from workhorse.errors import WorkhorseError
from workhorse.files.writing import (
    discard,
    is_temporary,
    one_process_at_a_time,
    replacing,
    sync,
    write_atomically,
    writing,
)
from workhorse.tokenizers.huggingface.read import DEFINITION, MERGES, SENTENCEPIECE, VOCABULARY
from workhorse.tokenizers.huggingface.settings import (
    ADDED_TOKENS,
    SETTINGS,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TEMPLATES,
)

ALL_FILES = (
    DEFINITION,
    SENTENCEPIECE,
    VOCABULARY,
    MERGES,
    SETTINGS,
    SPECIAL_TOKENS_MAP,
    ADDED_TOKENS,
    TEMPLATE,
)
"""Names of all files that can be part of a tokenizer."""
PENDING = ".workhorse-pending"
"""Subfolder that contains the complete new tokenizer while the files of the old are replaced."""


def current_path(path: Path) -> Path:
    """Return `path`, or the path of the new tokenizer if `write_folder` was interrupted."""
    new = path / PENDING if path.is_dir() else path.parent / PENDING / path.name
    home = new if path.is_dir() else new.parent
    return new if new.exists() and not home.is_symlink() else path


def folder_texts(
    definition: str, roles: Mapping[str, str], templates: Mapping[str, str]
) -> dict[str, str]:
    """Return the contents of the files that define a tokenizer, by file name."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        **{f"{role}_token": name for role, name in roles.items()},
    }
    texts = {SETTINGS: json.dumps(settings, indent=2, ensure_ascii=False), DEFINITION: definition}
    for name, source in templates.items():
        texts[TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja"] = source
    return texts


def check_output_folder(folder: str | Path) -> None:
    """Check, before any work, that a tokenizer can be saved to a folder.

    Raises:
        WorkhorseError: the path is a file, or a folder with other files and no tokenizer.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise WorkhorseError(f"{folder} is a file; choose a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DEFINITION).is_file():
        raise WorkhorseError(
            f"{folder} has other files and no tokenizer; choose a new or empty folder"
        )


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a tokenizer atomically, and remove the previous tokenizer's files.

    If the folder is not empty, the files are first written to the subfolder `PENDING` and then
    moved. If the move is interrupted, `load_tokenizer` reads the subfolder, and the next call
    completes the move. Until then, other programs may see a mixture of new and old files.

    Raises:
        WorkhorseError: the files cannot be written, for example because the disk is full.
    """
    with writing(folder):
        if is_temporary(folder):  # part of a model, which `replacing` renames when it is complete
            _write(folder, files)
            return
        if not folder.is_dir() or not any(folder.iterdir()):
            _write_new(folder, files)
            return
        with contextlib.ExitStack() as held:
            with contextlib.suppress(OSError):  # the file system has no locks
                held.enter_context(one_process_at_a_time(folder, patience=10))
            _put_in_place(folder)
            _write_new(folder / PENDING, files)
            _put_in_place(folder)


def _write_new(folder: Path, files: Mapping[str, bytes]) -> None:
    with replacing(folder, folder=True) as stage:
        _write(stage, files)


def _write(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)


def _put_in_place(folder: Path) -> None:
    """Move the new tokenizer from the subfolder `PENDING`, if it exists, to the folder itself."""
    pending = folder / PENDING
    if not pending.is_dir():
        return
    new = _names_in(pending)
    old = [folder / name for name in ALL_FILES] + list((folder / TEMPLATES).glob("*.jinja"))
    for name in new:
        (folder / name).parent.mkdir(exist_ok=True)
        write_atomically(folder / name, (pending / name).read_bytes())
    for path in old:
        if path.relative_to(folder) not in new:
            path.unlink(missing_ok=True)
    sync(folder)
    discard(pending)


def _names_in(folder: Path) -> list[Path]:
    """List the files in a folder tree, as relative paths.

    Unreadable folders raise an OSError; `Path.rglob` would silently skip them.
    """

    def refuse(error: OSError) -> None:
        raise error

    walked = os.walk(folder, onerror=refuse)
    return [(Path(at) / name).relative_to(folder) for at, _, names in walked for name in names]
