"""A tokenizer's files: found, read, and written whole or not at all."""

import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workhorse.errors import WorkhorseError

if TYPE_CHECKING:
    from workhorse.tokenizers.tokenizer import Tokenizer

DEFINITION = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
SENTENCEPIECE = "tokenizer.model"


def load_tokenizer(path: str | Path) -> "Tokenizer":
    """The tokenizer in a folder or a file.

    Args:
        path: a folder as `Tokenizer.save` or transformers write it, a `tokenizer.json`, or a
            SentencePiece `.model`. Settings (bos, eos, chat template) are read from beside it.

    Raises:
        WorkhorseError: there is none, or it is damaged or of a kind that cannot be converted.
    """
    from workhorse.tokenizers.tokenizer import ROLES, Tokenizer

    file = _find(Path(path))
    settings = _read_settings(file.with_name(SETTINGS))
    roles = {role: _content(settings.get(f"{role}_token")) for role in ROLES}
    if file.suffix == ".model":
        from workhorse.tokenizers.sentencepiece import convert

        definition, found = convert(_read(file), str(file))
        roles = {role: roles[role] or found.get(role) for role in ROLES}
    else:
        definition = _text(file)
    template = settings.get("chat_template")
    try:
        return Tokenizer(definition, roles, template if isinstance(template, str) else None)
    except WorkhorseError as error:
        raise WorkhorseError(f"{file}: {error}") from None


def check_output_folder(folder: str | Path) -> None:
    """Refuse to save where something else would be lost, before the work and not after it.

    Raises:
        WorkhorseError: the path is a file, or a folder with other things than a tokenizer in it.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise WorkhorseError(f"{folder} is a file; name a folder that is new or empty")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / DEFINITION).is_file():
        raise WorkhorseError(f"{folder} holds something else; name a folder that is new or empty")


def write_folder(folder: Path, texts: Mapping[str, str]) -> None:
    """Write the files of a folder. A new folder appears whole; in an old one, each file does."""
    is_new = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
    if not is_new:
        for name, text in texts.items():
            temporary = folder / f".tmp-{name}"
            _write(temporary, text)
            temporary.replace(folder / name)
        _sync(folder)
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    stage = folder.with_name(f".tmp-{folder.name}-{secrets.token_hex(4)}")
    stage.mkdir()
    try:
        for name, text in texts.items():
            _write(stage / name, text)
        _sync(stage)
        stage.replace(folder)
    except BaseException:
        shutil.rmtree(stage, ignore_errors=True)
        raise
    _sync(folder.parent)


def _write(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    if os.name == "nt":
        return  # Windows keeps folders in order by itself and cannot open them
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name in (DEFINITION, SENTENCEPIECE):
        if (path / name).is_file():
            return path / name
    if not path.exists():
        raise WorkhorseError(f"no tokenizer at {path}: there is no such file or folder")
    raise WorkhorseError(f"no tokenizer in {path}: it holds no {DEFINITION} or {SENTENCEPIECE}")


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise WorkhorseError(f"cannot read {file}: {error.strerror}") from None


def _text(file: Path) -> str:
    try:
        return _read(file).decode()
    except UnicodeDecodeError as error:
        raise WorkhorseError(f"{file} is not UTF-8: bad byte at offset {error.start}") from None


def _read_settings(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        settings = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise WorkhorseError(f"{file} is not JSON: {error}") from None
    return settings if isinstance(settings, dict) else {}


def _content(token: Any) -> str | None:
    """Transformers writes a special token as its name, or as a mapping with its `content`."""
    return token.get("content") if isinstance(token, dict) else token
