"""Finds, reads and atomically writes the files of a tokenizer."""

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import to_path
from workhorse.files.writing import (
    discard,
    is_temporary,
    one_process_at_a_time,
    replacing,
    sync,
    write_atomically,
    writing,
)
from workhorse.tokenizers.huggingface.classes import DROP_LEADING_SPACE
from workhorse.tokenizers.huggingface.read import (
    DEFINITION,
    MERGES,
    SENTENCEPIECE,
    VOCABULARY,
    read_folder,
    read_json,
    read_sentencepiece,
)
from workhorse.tokenizers.huggingface.settings import (
    ADDED_TOKENS,
    SETTINGS,
    SPECIAL_TOKENS_MAP,
    TEMPLATE,
    TEMPLATES,
    TokenizerFolder,
    read_settings,
)

if TYPE_CHECKING:
    from workhorse.tokenizers.tokenizer import Tokenizer

_ALL_FILES = (
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
INSIDE = "tokenizer"
"""Name of the tokenizer's subfolder in run directories and in folders of Workhorse's own format."""
PENDING = ".workhorse-pending"
"""Subfolder that contains the complete new tokenizer while the files of the old are replaced."""


def load_tokenizer(path: str | Path, *, drop_leading_space: bool | None = None) -> "Tokenizer":
    """Load the tokenizer in a folder or a file.

    Args:
        path: a folder written by `Tokenizer.save` or transformers, a `tokenizer.json`, or a
            SentencePiece `.model`. Settings (bos, eos, chat template) are read from the same
            folder. If the folder has no tokenizer but a subfolder `tokenizer`, as in a run
            directory, the subfolder is read.
        drop_leading_space: for tokenizers that put a space before every input (LLaMA). True to put
            none if the input already begins with a space, as in transformers 5. None: the value in
            `tokenizer_config.json`, by default False.

    Raises:
        WorkhorseError: the path has no tokenizer, or the tokenizer is damaged, exceeds the limits
            for such files, or cannot be converted.
    """
    from workhorse.tokenizers.tokenizer import Source, Tokenizer

    if not isinstance(drop_leading_space, bool | None):
        raise WorkhorseError(
            f"drop_leading_space={shown(drop_leading_space)} is not True or False; omit it to use "
            "the value in the file"
        )
    path = to_path(path, "a tokenizer is a path")
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise WorkhorseError(
            f"no tokenizer at {path}: no such file or folder; check the path"
        ) from None
    except OSError as error:  # the name is too long, or permission is denied
        raise WorkhorseError(f"no tokenizer at {shown(str(path))}: {error.strerror}") from None
    if path.is_dir() and (path / INSIDE).is_dir() and not _has_tokenizer(path):
        path /= INSIDE
    path = _pending(path)
    folder = TokenizerFolder(path if path.is_dir() else path.parent)
    settings = read_settings(folder)
    if drop_leading_space is not None:
        fields = {**settings.fields, DROP_LEADING_SPACE: drop_leading_space}
        settings = replace(settings, fields=fields)
        folder.read[SETTINGS] = json.dumps(fields, indent=2, ensure_ascii=False).encode()
    source = None
    if path.is_dir():
        reading = read_folder(folder, settings)
        for name in _ALL_FILES:  # files that were not needed, to write them back
            if name not in folder.read and folder.has(name):
                folder.bytes_of(name)
        source = Source(dict(folder.read), settings.model_type)
    else:
        read = read_sentencepiece if path.suffix == ".model" else read_json
        reading = read(folder, path.name, settings)
    roles = {name.removesuffix("_token"): token for name, token in reading.named.items()}
    try:
        return Tokenizer(reading.definition, roles, settings.templates, source)
    except WorkhorseError as error:
        raise WorkhorseError(f"{path}: {error}") from None


def _pending(path: Path) -> Path:
    """Return `path`, or the path of the new tokenizer if `write_folder` was interrupted."""
    new = path / PENDING if path.is_dir() else path.parent / PENDING / path.name
    home = new if path.is_dir() else new.parent
    return new if new.exists() and not home.is_symlink() else path


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in (DEFINITION, SENTENCEPIECE, VOCABULARY))


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
    old = [folder / name for name in _ALL_FILES] + list((folder / TEMPLATES).glob("*.jinja"))
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
