"""Reads the files of a tokenizer folder, and the settings in them.

Most settings are in `tokenizer_config.json`. Older folders also have `special_tokens_map.json` and
`added_tokens.json`, and newer ones have the chat template in a separate file.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import decoded, parse_json, read_bytes
from workhorse.tokenizers.chat.limits import MAX_SOURCE
from workhorse.tokenizers.huggingface.classes import DROP_LEADING_SPACE

MAX_BYTES = 64 * 2**20
"""Size limit of a file. The largest `tokenizer.json` in use has 35 MB."""
MAX_SETTINGS_BYTES = 4 * 2**20
"""Size limit of a settings file. The largest in use has 1.2 MB."""
MAX_VALUES = 2_500_000
"""Limit of the number of JSON values in a vocabulary file. The largest in use has 1.9 million."""


class TokenizerFolder:
    """Reads the files of a tokenizer's folder, and stores their contents in `read`.

    Args:
        path: the folder.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.read: dict[str, bytes] = {}
        """Content of the files read so far, by name in the folder."""

    def has(self, name: str) -> bool:
        return (self.path / name).is_file()

    def bytes_of(self, name: str, limit: int = MAX_BYTES) -> bytes:
        """Return the content of a file.

        Raises:
            WorkhorseError: the file cannot be read, is larger than `limit` bytes, or is a link to
                outside the folder.
        """
        data = read_bytes(self.path / name, limit=limit, root=self.path)
        self.read[name] = data
        return data

    def text(self, name: str, limit: int = MAX_BYTES) -> str:
        """Return the content of a UTF-8 file as a string.

        Raises:
            WorkhorseError: the file cannot be read, is larger than `limit` bytes, is a link to
                outside the folder, or is not UTF-8.
        """
        return decoded(self.bytes_of(name, limit), str(self.path / name))

    def mapping(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a settings file; empty if there is no such file.

        Raises:
            WorkhorseError: the file cannot be read, is too large, or is not a JSON object.
        """
        if not self.has(name):
            return {}
        return parse_json(self.bytes_of(name, MAX_SETTINGS_BYTES), str(self.path / name))

    def vocabulary(self, name: str) -> dict[str, Any]:
        """Return the JSON object in a vocabulary file.

        Raises:
            WorkhorseError: the file does not exist, cannot be read, is too large, or is not a JSON
                object.
        """
        return parse_json(self.bytes_of(name), str(self.path / name), max_values=MAX_VALUES)


SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Roles of special tokens in every transformers tokenizer, in the order of transformers."""
FLAGS = ("add_bos_token", "add_eos_token", "add_prefix_space", DROP_LEADING_SPACE, "legacy")
"""Boolean settings; null stands for the default of the tokenizer class."""
MAX_TEMPLATES = 32
MAX_TEMPLATE_BYTES = 4 * MAX_SOURCE
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Settings:
    """The tokenizer settings of one folder."""

    fields: Mapping[str, Any]
    """All fields of `tokenizer_config.json`."""
    named: Mapping[str, AddedToken | str | None]
    """Special tokens by role (`bos_token`, `image_token`). None means that the tokenizer has no
    token with this role. For an absent role, the settings do not specify a token."""
    extra: tuple[AddedToken | str, ...] = ()
    """Special tokens that have no role such as `bos_token`."""
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    """Added tokens (outside the base vocabulary) by id."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; `default` is used unless another name is given."""
    model_type: str | None = None
    """`model_type` in the `config.json` of the same folder."""

    @property
    def lists_added(self) -> bool:
        """True if the settings list all added tokens. Then lists in other files are ignored."""
        return "added_tokens_decoder" in self.fields

    @property
    def lists_extra(self) -> bool:
        return not {"extra_special_tokens", "additional_special_tokens"}.isdisjoint(self.fields)

    @property
    def declared_class(self) -> str | None:
        """The tokenizer class of transformers that the folder declares."""
        return _text_or_none(self.fields.get("tokenizer_class"))


def read_settings(folder: TokenizerFolder) -> Settings:
    """Read the tokenizer settings of a folder; they are empty if it has no files with settings.

    Raises:
        WorkhorseError: a file exceeds its limits or has an invalid format.
    """
    fields = dict(folder.mapping(SETTINGS))
    model = folder.mapping(MODEL_CONFIG)
    folder.read.pop(MODEL_CONFIG, None)  # a file of the model, not of the tokenizer
    if fields.get("tokenizer_class") is None and model.get("tokenizer_class") is not None:
        fields["tokenizer_class"] = model["tokenizer_class"]
    try:
        named, extra, added = _special_tokens(folder, fields)
    except WorkhorseError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError):
        raise WorkhorseError(
            f"{folder.path / SETTINGS}: special tokens have an invalid format; "
            "write each as a string, or as an object with 'content'"
        ) from None
    for key in FLAGS:
        if (value := fields.get(key)) not in (None, True, False):
            raise WorkhorseError(
                f"{folder.path / SETTINGS}: {key}={shown(value)} is not true or false; "
                "write true or false"
            )
    return Settings(
        fields,
        named,
        tuple(extra),
        added,
        dict(_templates(folder, fields)),
        _text_or_none(model.get("model_type")),
    )


Tokens = list[AddedToken | str]


def _special_tokens(
    folder: TokenizerFolder, fields: dict[str, Any]
) -> tuple[dict[str, AddedToken | str | None], Tokens, dict[int, AddedToken]]:
    """Read special tokens with and without a role, and added tokens, like transformers 5."""
    named = {
        key: None if value is None else _token(value)
        for key, value in fields.items()
        if key in NAMED or (key.endswith("_token") and isinstance(value, str | dict))
    }
    listed = fields.get("extra_special_tokens") or fields.get("additional_special_tokens") or []
    extra: Tokens = []
    if isinstance(listed, dict):
        named.update({key: _token(value) for key, value in listed.items()})
    else:
        extra = [_token(value) for value in listed]
    if "added_tokens_decoder" in fields:
        decoder = fields["added_tokens_decoder"]
        added = {int(number): added_token(token) for number, token in decoder.items()}
    else:
        for key, value in folder.mapping(SPECIAL_TOKENS_MAP).items():
            if key in ("additional_special_tokens", "extra_special_tokens"):
                extra += [_token(item) for item in value if _token(item) not in extra]
            else:
                named[key] = None if value is None else _token(value, special=True)
        known = {str(token) for token in (*named.values(), *extra) if token is not None}
        added = {
            int(number): AddedToken(name, normalized=name not in known, special=name in known)
            for name, number in folder.mapping(ADDED_TOKENS).items()
        }
    by_name = {str(token): token for token in added.values()}
    return {key: by_name.get(str(token), token) for key, token in named.items()}, extra, added


def _token(value: Any, **flags: bool) -> AddedToken | str:
    return value if isinstance(value, str) else added_token({**value, **flags})


def added_token(value: Mapping[str, Any]) -> AddedToken:
    """Make an added token from its description in a file: an object with `content` and flags."""
    return AddedToken(value["content"], **{key: value[key] for key in _FLAGS if key in value})


def _templates(folder: TokenizerFolder, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the chat templates. If there are template files, those in the settings are ignored."""
    files = [TEMPLATE] if folder.has(TEMPLATE) else []
    if (folder.path / TEMPLATES).is_dir():
        names = sorted(path.name for path in (folder.path / TEMPLATES).glob("*.jinja"))
        files += [f"{TEMPLATES}/{name}" for name in names]
    if len(files) > MAX_TEMPLATES:
        raise WorkhorseError(
            f"{folder.path} has {len(files)} chat templates; keep {MAX_TEMPLATES} or fewer"
        )
    inline = fields.get("chat_template")
    if files:
        for file in files:
            name = file.rpartition("/")[2].removesuffix(".jinja")
            source = folder.text(file, MAX_TEMPLATE_BYTES)
            yield "default" if file == TEMPLATE else _checked_name(name, folder), source
    elif isinstance(inline, str):
        yield "default", inline
    elif isinstance(inline, list | dict):
        pairs = inline.items() if isinstance(inline, dict) else _pairs(inline)
        for name, source in list(pairs)[:MAX_TEMPLATES]:
            if isinstance(source, str):
                yield _checked_name(name, folder), source


def _pairs(entries: list[Any]) -> Iterator[tuple[Any, Any]]:
    for entry in entries:
        if isinstance(entry, dict):
            yield entry.get("name"), entry.get("template")


def _checked_name(name: Any, folder: TokenizerFolder) -> str:
    """Check the name of a template: it becomes a file name when the tokenizer is saved."""
    if isinstance(name, str) and _TEMPLATE_NAME.fullmatch(name):
        return name
    raise WorkhorseError(
        f"{folder.path}: chat template name {str(name)[:60]!r} is not a valid file name; "
        "use a plain word"
    )


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
