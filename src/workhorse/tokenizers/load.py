"""Finds and reads the files of a tokenizer."""

import json
from dataclasses import replace
from pathlib import Path

from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import to_path
from workhorse.tokenizers.files import ALL_FILES, current_path
from workhorse.tokenizers.huggingface.classes import DROP_LEADING_SPACE
from workhorse.tokenizers.huggingface.read import (
    DEFINITION,
    SENTENCEPIECE,
    VOCABULARY,
    read_folder,
    read_json,
    read_sentencepiece,
)
from workhorse.tokenizers.huggingface.settings import SETTINGS, TokenizerFolder, read_settings
from workhorse.tokenizers.tokenizer import Source, Tokenizer

INSIDE = "tokenizer"
"""Name of the tokenizer's subfolder in run directories and in folders of Workhorse's own format."""


def load_tokenizer(path: str | Path, *, drop_leading_space: bool | None = None) -> Tokenizer:
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
    path = current_path(path)
    folder = TokenizerFolder(path if path.is_dir() else path.parent)
    settings = read_settings(folder)
    if drop_leading_space is not None:
        fields = {**settings.fields, DROP_LEADING_SPACE: drop_leading_space}
        settings = replace(settings, fields=fields)
        folder.read[SETTINGS] = json.dumps(fields, indent=2, ensure_ascii=False).encode()
    source = None
    if path.is_dir():
        reading = read_folder(folder, settings)
        for name in ALL_FILES:  # files that were not needed, to write them back
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


def _has_tokenizer(folder: Path) -> bool:
    return any((folder / name).exists() for name in (DEFINITION, SENTENCEPIECE, VOCABULARY))
