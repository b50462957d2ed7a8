"""Files that strangers made, read within limits: soon, in little memory, or refused in one line."""

from workhorse.untrusted.files import (
    decoded,
    open_contained,
    open_plain,
    read_bytes,
    read_text,
    to_path,
    unreadable,
)
from workhorse.untrusted.gguf_file import GgufHeader, StoredTensor, read_gguf_header
from workhorse.untrusted.json_file import collector_paused, parse_json, read_json
from workhorse.untrusted.yaml_text import BadYaml, parse_yaml, write_yaml

__all__ = [
    "BadYaml",
    "GgufHeader",
    "StoredTensor",
    "collector_paused",
    "decoded",
    "open_contained",
    "open_plain",
    "parse_json",
    "parse_yaml",
    "read_bytes",
    "read_gguf_header",
    "read_json",
    "read_text",
    "to_path",
    "unreadable",
    "write_yaml",
]
