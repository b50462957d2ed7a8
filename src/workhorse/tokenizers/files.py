"""A tokenizer's files: found, read, and written whole or not at all."""

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
"""The files that may be read as part of a folder's tokenizer."""
INSIDE = "tokenizer"
"""Where a run directory, and a folder in our own format, keeps its tokenizer."""
PENDING = ".workhorse-pending"
"""In a folder whose tokenizer is being replaced: the new one, whole."""


def load_tokenizer(path: str | Path, *, drop_leading_space: bool | None = None) -> "Tokenizer":
    """The tokenizer in a folder or a file.

    Args:
        path: a folder as `Tokenizer.save` or transformers write it, a `tokenizer.json`, or a
            SentencePiece `.model`. Settings (bos, eos, chat template) are read from beside it. A
            folder with such a one under the name of `tokenizer`, as a run directory, stands for it.
        drop_leading_space: of the classes that put a space before every text (LLaMA's), whether a
            text that begins with a space loses it, as in transformers 5; None: as
            `drop_leading_space` in `tokenizer_config.json` says, and else not.

    Raises:
        WorkhorseError: there is none, or it is damaged, beyond the limits for such files, or of a
            kind that cannot be converted.
    """
    from workhorse.tokenizers.tokenizer import Source, Tokenizer

    if not isinstance(drop_leading_space, bool | None):
        raise WorkhorseError(
            f"drop_leading_space={shown(drop_leading_space)} is not True or False; leave it out to "
            "read the file's own"
        )
    path = to_path(path, "a tokenizer is a path")
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise WorkhorseError(f"no tokenizer at {path}: there is no such file or folder") from None
    except OSError as error:  # a name that is too long, a folder that is closed to us
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
        for name in _ALL_FILES:  # also what says nothing new, to be written back
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
    """What takes the place of a tokenizer's folder or file, where that was interrupted."""
    new = path / PENDING if path.is_dir() else path.parent / PENDING / path.name
    home = new if path.is_dir() else new.parent
    return new if new.exists() and not home.is_symlink() else path


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in (DEFINITION, SENTENCEPIECE, VOCABULARY))


def folder_texts(
    definition: str, roles: Mapping[str, str], templates: Mapping[str, str]
) -> dict[str, str]:
    """The files that define a tokenizer, by name."""
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
    """Refuse a folder, before the work begins, that holds anything but a tokenizer.

    Raises:
        WorkhorseError: the path is a file, or a folder with other things than a tokenizer in it.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise WorkhorseError(f"{folder} is a file; name a folder that is new or empty")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DEFINITION).is_file():
        raise WorkhorseError(f"{folder} holds something else; name a folder that is new or empty")


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the files of a tokenizer, all or none.

    In a folder that is not empty, they are first written into `PENDING`, and `load_tokenizer` reads
    them there until each has taken its place; the next call completes what was interrupted. Other
    programs may see some of them new and some old meanwhile. Files of another tokenizer that would
    be read as part of this one are removed.

    Raises:
        WorkhorseError: the disk is full or refuses.
    """
    with writing(folder):
        if is_temporary(folder):  # of a model, which appears whole and is locked until then
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
    """Replace a folder's tokenizer by the pending one, if there is one."""
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
    """The files in a folder and below. `Path.rglob` would leave out what may not be listed."""

    def refuse(error: OSError) -> None:
        raise error

    walked = os.walk(folder, onerror=refuse)
    return [(Path(at) / name).relative_to(folder) for at, _, names in walked for name in names]
