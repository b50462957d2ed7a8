"""What the small files beside a vocabulary say: special tokens, chat templates, how texts begin.

`tokenizer_config.json` says most of it; older folders have `special_tokens_map.json` and
`added_tokens.json` too, and newer ones the chat template in a file of its own.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tokenizers import AddedToken

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.chat.limits import MAX_SOURCE
from workhorse.tokenizers.huggingface.folder import TokenizerFolder

SETTINGS = "tokenizer_config.json"
SPECIAL_TOKENS_MAP = "special_tokens_map.json"
ADDED_TOKENS = "added_tokens.json"
MODEL_CONFIG = "config.json"
TEMPLATE = "chat_template.jinja"
TEMPLATES = "additional_chat_templates"

NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""The special tokens that every tokenizer of the ecosystem may have, in its order."""
MAX_TEMPLATES = 32
MAX_TEMPLATE_BYTES = 4 * MAX_SOURCE
_TEMPLATE_NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,60}")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


@dataclass(frozen=True)
class Settings:
    """The settings of one folder."""

    fields: Mapping[str, Any]
    """All of `tokenizer_config.json`."""
    named: Mapping[str, AddedToken | str | None]
    """The special tokens that have a name of their own (`bos_token`, `image_token`); None says
    that there is none, an absent name that nothing is said."""
    extra: tuple[AddedToken | str, ...] = ()
    """Special tokens without a name."""
    added: Mapping[int, AddedToken] = field(default_factory=dict)
    """Tokens beside the vocabulary, by id."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Chat templates by name; the usual one is `default`."""
    model_type: str | None = None
    """Of the `config.json` in the same folder."""

    @property
    def lists_added(self) -> bool:
        """Whether the settings say, and they alone, which tokens are beside the vocabulary."""
        return "added_tokens_decoder" in self.fields

    @property
    def lists_extra(self) -> bool:
        return not {"extra_special_tokens", "additional_special_tokens"}.isdisjoint(self.fields)

    @property
    def declared_class(self) -> str | None:
        """The class of transformers that the folder names for its tokenizer."""
        return _text_or_none(self.fields.get("tokenizer_class"))


def read_settings(folder: TokenizerFolder) -> Settings:
    """The settings of a folder; an empty one where there are no such files.

    Raises:
        WorkhorseError: a file beyond its limits, or with other things than belong in it.
    """
    fields = dict(folder.mapping(SETTINGS))
    model = folder.mapping(MODEL_CONFIG)
    folder.read.pop(MODEL_CONFIG, None)  # the model's, not the tokenizer's
    if fields.get("tokenizer_class") is None and model.get("tokenizer_class") is not None:
        fields["tokenizer_class"] = model["tokenizer_class"]
    try:
        named, extra, added = _special_tokens(folder, fields)
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        raise WorkhorseError(
            f"{folder.path / SETTINGS}: special tokens of another form than expected ({error}); "
            "write each as its name, or as a mapping with 'content'"
        ) from None
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
    """Named, extra and added tokens, as transformers 5 reads them from these files."""
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
    """A token beside the vocabulary as the files describe it: `content` and its flags."""
    return AddedToken(value["content"], **{key: value[key] for key in _FLAGS if key in value})


def _templates(folder: TokenizerFolder, fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The chat templates; those in files of their own replace those in the settings."""
    files = [TEMPLATE] if folder.has(TEMPLATE) else []
    if (folder.path / TEMPLATES).is_dir():
        found = sorted(path.name for path in (folder.path / TEMPLATES).glob("*.jinja"))
        files += [f"{TEMPLATES}/{name}" for name in found]
    if len(files) > MAX_TEMPLATES:
        raise WorkhorseError(f"{folder.path} has {len(files)} chat templates; keep {MAX_TEMPLATES}")
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
    """A template's name, which becomes a file's when it is saved."""
    if isinstance(name, str) and _TEMPLATE_NAME.fullmatch(name):
        return name
    raise WorkhorseError(f"{folder.path}: chat template name {str(name)[:60]!r}; use a plain word")


def _text_or_none(value: Any) -> str | None:
    return value if isinstance(value, str) else None
