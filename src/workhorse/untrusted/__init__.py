"""Files that strangers made, read within limits: soon, in little memory, or refused in one line."""

from workhorse.untrusted.files import decoded, open_contained, read_bytes, shown
from workhorse.untrusted.json_file import collector_paused, parse_json, read_json

__all__ = [
    "collector_paused",
    "decoded",
    "open_contained",
    "parse_json",
    "read_bytes",
    "read_json",
    "shown",
]
