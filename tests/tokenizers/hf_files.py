"""Writes folders of files that tests describe as mappings."""

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

Files = dict[str, Any]
"""File names and contents: bytes, a string, a tokenizer of the library, or JSON values."""


def token(content: str, **flags: bool) -> dict[str, Any]:
    usual = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **usual, **flags}


def write(files: Files, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(_bytes(content))
    return folder


def _bytes(content: Any) -> bytes:
    if isinstance(content, bytes):
        return content
    if isinstance(content, str):
        return content.encode()
    if isinstance(content, Tokenizer):
        return content.to_str(pretty=True).encode()
    return json.dumps(content, ensure_ascii=False).encode()
