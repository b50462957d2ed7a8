"""The folder of a downloaded tokenizer: its files, read within limits."""

from pathlib import Path
from typing import Any

from workhorse.files.json_file import parse_json
from workhorse.files.plain import decoded, read_bytes

MAX_BYTES = 64 * 2**20
"""Of a file; the largest vocabularies in use take 35 MB as `tokenizer.json`."""
MAX_SETTINGS_BYTES = 4 * 2**20
"""Of a file of settings; the largest in use take 1.2 MB."""
MAX_VALUES = 2_500_000
"""Of a file with a vocabulary; the largest in use have 1.9 million."""


class TokenizerFolder:
    """A folder that keeps the files that were read.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: dict[str, bytes] = {}
        """Every file that was read, by its name in the folder."""

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def bytes_of(self, name: str, limit: int = MAX_BYTES) -> bytes:
        """A file's content.

        Raises:
            WorkhorseError: it cannot be read, is larger than `limit` bytes or lies elsewhere.
        """
        data = read_bytes(self.path / name, limit=limit, root=self.path)
        self.read[name] = data
        return data

    def text(self, name: str, limit: int = MAX_BYTES) -> str:
        """A file's text; raises WorkhorseError also if it is not UTF-8."""
        return decoded(self.bytes_of(name, limit), str(self.path / name))

    def mapping(self, name: str) -> dict[str, Any]:
        """The JSON object in a file of settings, empty if there is no such file.

        Raises:
            WorkhorseError: as `bytes_of`; or `parse_json` refuses.
        """
        if not self.has(name):
            return {}
        return parse_json(self.bytes_of(name, MAX_SETTINGS_BYTES), str(self.path / name))

    def vocabulary(self, name: str) -> dict[str, Any]:
        """The JSON object in a file that holds a vocabulary.

        Raises:
            WorkhorseError: as `mapping`; or there is no such file.
        """
        return parse_json(self.bytes_of(name), str(self.path / name), max_values=MAX_VALUES)
