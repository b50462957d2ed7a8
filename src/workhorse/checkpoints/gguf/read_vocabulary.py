"""The tokenizer of a GGUF file: the reverse of `vocabulary.py`."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from workhorse.checkpoints.gguf.splitting import (
    BEGINNING,
    DEFAULT_RULE,
    canonical_rule,
    pre_tokenizer,
)
from workhorse.checkpoints.gguf.vocabulary import (
    CONTROL,
    ENDS,
    NO_STOP_TOKEN,
    NORMAL,
    ROLES,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    WHOLE,
    tokenizer_metadata,
)
from workhorse.errors import WorkhorseError, shown
from workhorse.files.json_file import parse_json

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

START = "tokenizer.ggml."
BYTE_LEVEL, CHARACTERS = "gpt2", "llama"
KINDS = (BYTE_LEVEL, CHARACTERS)
USUAL = {"bos_token_id": 1, "eos_token_id": 2}
"""llama.cpp's defaults for a vocabulary of characters."""
SAYS = ("tokens", "token_type", "merges", "pre", "add_space_prefix")
"""Keys that a `tokenizer.json` in the same file must agree with."""
SPECIAL = (CONTROL, UNKNOWN, USER_DEFINED)


def has_vocabulary(keys: Mapping[str, Any]) -> bool:
    """Whether a file's keys hold a tokenizer."""
    return keys.get(f"{START}model", "none") != "none"


def vocabulary_remarks(keys: Mapping[str, Any]) -> list[str]:
    """What the user should know about a file's tokenizer, one line each."""
    if keys.get(f"{START}model") != BYTE_LEVEL or keys.get(f"{START}pre"):
        return []
    return [
        "it does not name the rule that splits words (tokenizer.ggml.pre); llama.cpp's default is "
        "used, and tokens may differ from those of the training"
    ]


def end_tokens(keys: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The tokens that end a text, if there are more than the tokenizer's eos."""
    usual = USUAL if keys.get(f"{START}model") == CHARACTERS else {}
    names = [f"{role}_token_id" for role in ("eos", *ENDS)]
    found = [keys.get(START + name, usual.get(name)) for name in names]
    eos, *others = [one if type(one) is int and 0 <= one < vocab_size else None for one in found]
    more = [one for one in others if one is not None and one != eos]
    types = keys.get(f"{START}token_type")
    stopgap = isinstance(types, list) and eos is not None and types[eos : eos + 1] == [NORMAL]
    no_stop = stopgap or eos == keys.get(NO_STOP_TOKEN)
    first = [] if eos is None or no_stop else [eos]
    return tuple(dict.fromkeys((*first, *more))) if more else ()


def read_vocabulary(keys: Mapping[str, Any], vocab_size: int) -> "Tokenizer":
    """The tokenizer: the file's `tokenizer.json` if it agrees with the keys, else that of the keys.

    Raises:
        WorkhorseError: it is of an unsupported kind, or damaged.
    """
    kind = keys[f"{START}model"]
    if kind not in KINDS:
        raise WorkhorseError(
            f"its tokenizer is of kind {shown(kind)}, and read are {', '.join(KINDS)}; fetch the "
            "model as a Hugging Face directory"
        )
    fields = {key.removeprefix(START): value for key, value in keys.items()}
    if kind == CHARACTERS:
        fields = USUAL | fields
    rule = canonical_rule(str(fields.get("pre") or DEFAULT_RULE)) if kind == BYTE_LEVEL else ""
    try:
        if (whole := _whole(fields, vocab_size)) is not None:
            return whole
        definition = _byte_level(fields, rule) if kind == BYTE_LEVEL else _characters(fields)
        return _tokenizer(definition, fields)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise WorkhorseError(
            f"its tokenizer is damaged ({shown(str(error))}); fetch the file again"
        ) from None


def _whole(fields: Mapping[str, Any], vocab_size: int) -> "Tokenizer | None":
    """The tokenizer of the `tokenizer.json` in the file, if writing it gives the file's keys."""
    from workhorse.tokenizers.huggingface.folder import MAX_VALUES

    text = fields.get(WHOLE)
    if not isinstance(text, str):
        return None
    try:
        parse_json(text.encode(), WHOLE, max_values=MAX_VALUES)
        tokenizer = _tokenizer(text, fields)
        written, _ = tokenizer_metadata(tokenizer, vocab_size)
    except WorkhorseError:
        return None
    same = all(written.get(START + key) == fields.get(key) for key in SAYS)
    return tokenizer if same else None


def _tokenizer(definition: str, fields: Mapping[str, Any]) -> "Tokenizer":
    """A tokenizer with the special tokens and the chat template of the keys."""
    from workhorse.tokenizers import Tokenizer

    tokens, types = fields["tokens"], _types(fields)
    roles: dict[str, str] = {}
    for role, name in ROLES.items():
        number = fields.get(f"{name}_token_id")
        # A file must name some token that ends a text; an ordinary one is a stopgap.
        if type(number) is int and 0 <= number < len(tokens) and types[number] in SPECIAL:
            roles[role] = tokens[number]
    return Tokenizer(definition, roles, fields.get("tokenizer.chat_template"))


def _types(fields: Mapping[str, Any]) -> list[int]:
    return fields.get("token_type") or [NORMAL] * len(fields["tokens"])


def _byte_level(fields: Mapping[str, Any], rule: str) -> str:
    tokens: list[str] = fields["tokens"]
    types = _types(fields)
    splitting, ignore_merges = pre_tokenizer(rule)
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": _added(tokens, types),
        "normalizer": None,
        "pre_tokenizer": splitting,
        "post_processor": None,
        "decoder": {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": True,
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": ignore_merges,
            "vocab": {text: n for n, text in enumerate(tokens) if types[n] != UNUSED},
            "merges": _merges(fields["merges"], set(tokens)),
        },
    }
    return _with_affixes(json.dumps(definition), fields, begins=rule in BEGINNING)


def _merges(merges: list[str], known: set[str]) -> list[list[str]]:
    """The pairs; merges that need or make an unknown token are left out."""
    pairs = [merge.split(" ", 1) for merge in merges]
    return [[left, right] for left, right in pairs if {left, right, left + right} <= known]


def _characters(fields: Mapping[str, Any]) -> str:
    from workhorse.tokenizers.huggingface.sentencepiece import BPE, convert_pieces

    pieces = list(zip(fields["tokens"], fields["scores"], _types(fields), strict=True))
    while pieces and pieces[-1][2] == UNUSED:  # rows of the embedding that no token has
        pieces.pop()
    definition = convert_pieces(pieces, BPE, dummy_prefix=fields.get("add_space_prefix", True))
    return _with_affixes(definition, fields, begins=True)


def _added(tokens: list[str], types: list[int]) -> list[dict[str, Any]]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return [
        {"id": n, "content": text, **flags, "special": types[n] != USER_DEFINED}
        for n, text in enumerate(tokens)
        if types[n] in SPECIAL
    ]


def _with_affixes(definition: str, fields: Mapping[str, Any], *, begins: bool) -> str:
    """The tokens before and after a text; `begins` is the kind's default for bos."""
    from workhorse.tokenizers.affixes import set_affixes
    from workhorse.tokenizers.backend import library_tokenizer

    ends: dict[str, list[str]] = {}
    for role, usual in (("bos", begins), ("eos", False)):
        wanted = fields.get(f"add_{role}_token", usual) and f"{role}_token_id" in fields
        ends[role] = [fields["tokens"][fields[f"{role}_token_id"]]] if wanted else []
    if not any(ends.values()):
        return definition
    backend = library_tokenizer(definition)
    set_affixes(backend, ends["bos"], ends["eos"])
    return backend.to_str()
