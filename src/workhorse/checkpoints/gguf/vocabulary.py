"""Writes and reads a tokenizer as metadata of a GGUF file.

Two of llama.cpp's kinds of tokenizer are supported: byte-level BPE, which it calls gpt2, and
SentencePiece's BPE over characters with byte fallback, which it calls llama. A character tokenizer
is written as byte-level BPE with merges that build each character from its bytes. The complete
`tokenizer.json` is stored as well. llama.cpp ignores it; Workhorse reads the tokenizer from it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workhorse.checkpoints.gguf.splitting import (
    BEGINNING,
    DEFAULT_RULE,
    canonical_rule,
    pre_tokenizer,
    splitting_rule,
)
from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import parse_json
from workhorse.tokenizers.config import BYTE_TOKENS
from workhorse.tokenizers.pieces import BYTE_ALPHABET

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

Data = dict[str, Any]

NO_VOCABULARY: Mapping[str, Any] = {"tokenizer.ggml.model": "none"}
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
"""Token types, with the values of SentencePiece's enum."""
METASPACE = "\u2581"
NO_MERGE = f"{METASPACE} {METASPACE}"
"""A merge that never applies to byte-level text: llama.cpp requires at least one."""
UNLEARNED = (
    "llama.cpp merges any two tokens that form a third, but this tokenizer only merges learned "
    "pairs; a few words get different tokens"
)
RUNS_OF_SPACES = (
    "llama.cpp merges across words that this tokenizer separates; runs of spaces get different "
    "tokens"
)
ONE_PREFIX = (
    "llama.cpp adds a space after every special token, but this tokenizer only at the start of the "
    "input; chats get different tokens"
)
DROPS_SPACE = "llama.cpp keeps a space at the start of the input, but this tokenizer drops it"
LEFT_OUT = "llama.cpp drops characters for which the tokenizer has no token"
WHOLE = "tokenizer.huggingface.json"
ROLES = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
ENDS = ("eot", "eom")
"""Roles of stop tokens other than eos: end of a turn, and end of a message that calls a tool."""
NO_STOP_TOKEN = "workhorse.no_stop_token"
"""Workhorse's own metadata key: id of an eos token at which generation does not stop.

llama.cpp ignores the key and always stops at eos.
"""


def end_metadata(
    stop_tokens: Sequence[int], eos: int | None
) -> tuple[Mapping[str, Any], list[str]]:
    """Return metadata keys of the stop tokens other than eos, and warnings if some are lost.

    Args:
        stop_tokens: ids of all tokens that end generation; empty if only eos does.
        eos: id of the tokenizer's eos, or None.
    """
    others = [token for token in dict.fromkeys(stop_tokens) if token != eos]
    keys = {f"tokenizer.ggml.{role}_token_id": n for role, n in zip(ENDS, others, strict=False)}
    if eos is None and others:
        keys["tokenizer.ggml.eos_token_id"] = others[0]
    remarks: list[str] = []
    if lost := ", ".join(str(token) for token in others[len(ENDS) :]):
        remarks.append(f"GGUF has keys for 3 stop tokens; not written: {lost}")
    if eos is not None and others and eos not in stop_tokens:
        keys[NO_STOP_TOKEN] = eos
        remarks.append(
            f"llama.cpp also stops at token {eos}, the tokenizer's eos, which is not a stop "
            "token of the model"
        )
    return keys, remarks


def tokenizer_metadata(
    tokenizer: "Tokenizer", vocab_size: int, stop_tokens: Sequence[int] = ()
) -> tuple[Mapping[str, Any], list[str]]:
    """Return the tokenizer's metadata keys, and warnings if llama.cpp will give different tokens.

    Args:
        tokenizer: any tokenizer.
        vocab_size: number of rows of the embedding. Rows without a token get a placeholder name
            and the type `UNUSED`.
        stop_tokens: ids of the tokens that end generation; if empty, the tokenizer's eos.

    Raises:
        WorkhorseError: llama.cpp does not support this kind of tokenizer, or the tokenizer has more
            tokens than the embedding has rows.
    """
    whole: Data = json.loads(tokenizer.definition)
    of_characters = _is_of_characters(whole)
    definition = _in_bytes(whole) if of_characters else whole
    model = definition["model"]
    if tokenizer.vocab_size > vocab_size:
        raise WorkhorseError(
            f"the tokenizer has {tokenizer.vocab_size} tokens and the embedding {vocab_size} rows; "
            "use the tokenizer that the model was trained with"
        )
    byte_level = (definition["decoder"] or {}).get("type") == "ByteLevel"
    if model["type"] != "BPE" or not (byte_level or model.get("byte_fallback")):
        kind = "byte-level " if byte_level else ""
        raise WorkhorseError(
            f"llama.cpp does not support this kind of tokenizer ({kind}{model['type']}); write the "
            "model without the tokenizer (--no-tokenizer)"
        )
    words = _words(tokenizer, definition, vocab_size)
    keys, remarks = (_byte_level if byte_level else _characters)(definition, words)
    special, more = _special(tokenizer, stop_tokens)
    if of_characters:
        more.append(LEFT_OUT)
    special[WHOLE] = json.dumps(whole, ensure_ascii=False, separators=(",", ":"))
    common = {"tokenizer.ggml.tokens": words.texts, "tokenizer.ggml.token_type": words.types}
    return {**keys, **common, **special}, remarks + more


@dataclass(frozen=True)
class _Words:
    """Strings and types of the tokens, indexed by id."""

    texts: list[str]
    types: list[int]


def _words(tokenizer: "Tokenizer", definition: Data, vocab_size: int) -> _Words:
    texts = [f"[PAD{number}]" for number in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for text, number in definition["model"]["vocab"].items():
        texts[number] = text
        is_byte = definition["model"].get("byte_fallback") and text in BYTE_TOKENS
        types[number] = BYTE if is_byte else NORMAL
    for token in definition["added_tokens"]:
        texts[token["id"]] = token["content"]
        types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    unknown = tokenizer.unk_id
    if unknown is not None:
        types[unknown] = UNKNOWN
    return _Words(texts, types)


def _is_of_characters(definition: Data) -> bool:
    """Return True for a character tokenizer: each character of the input becomes one token."""
    model, added = definition["model"], {token["content"] for token in definition["added_tokens"]}
    return (
        model["type"] == "BPE"
        and not model["merges"]
        and not model.get("byte_fallback")
        and (definition["decoder"] or {}).get("type") == "Fuse"
        and definition["normalizer"] is None
        and definition["pre_tokenizer"] is None
        and all(len(text) == 1 or text in added for text in model["vocab"])
    )


def _in_bytes(definition: Data) -> Data:
    """Convert a character tokenizer to byte-level BPE, with merges that form each character."""
    model, added = definition["model"], {token["content"] for token in definition["added_tokens"]}
    merges: dict[tuple[str, str], None] = {}
    vocab: dict[str, int] = {}
    for text, number in model["vocab"].items():
        if text in added:
            vocab[text] = number
            continue
        spelled = "".join(BYTE_ALPHABET[value] for value in text.encode())
        vocab[spelled] = number
        merges |= {(spelled[:cut], spelled[cut]): None for cut in range(1, len(spelled))}
    learned = {"vocab": vocab, "merges": [list(pair) for pair in merges]}
    gpt2 = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}
    return definition | {"model": model | learned, "pre_tokenizer": gpt2, "decoder": gpt2}


def _byte_level(definition: Data, words: _Words) -> tuple[Data, list[str]]:
    model = definition["model"]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    rule, remarks = splitting_rule(definition)
    keys = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": rule,
        "tokenizer.ggml.merges": merges or [NO_MERGE],
    }
    return keys, remarks


def _characters(definition: Data, words: _Words) -> tuple[Data, list[str]]:
    """Return the metadata keys of a BPE over characters (SentencePiece), and warnings.

    SentencePiece merges the pair that forms the token with the best score. So the ranks of the
    merges are written as token scores.
    """
    model = definition["model"]
    scores = [0.0] * len(words.texts)
    pairs = [tuple(m.split(" ")) if isinstance(m, str) else tuple(m) for m in model["merges"]]
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(pairs):
        ranks.setdefault("".join(pair), rank)
    for text, rank in ranks.items():
        scores[model["vocab"][text]] = -float(rank + 1)
    parts = list(_parts(definition["normalizer"], "normalizers"))
    before = list(_parts(definition["pre_tokenizer"], "pretokenizers"))
    prefixed = any(
        part["type"] == "Prepend" or part.get("prepend_scheme") in ("first", "always")
        for part in (*parts, *before)
    )
    keys = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefixed,
    }
    remarks = [UNLEARNED] if _merges_more(model["vocab"], pairs) else []
    marks = [part for part in before if part.get("prepend_scheme") in ("first", "always")]
    if any(part["prepend_scheme"] == "first" for part in marks):
        remarks.append(ONE_PREFIX)
    # Metaspace adds nothing to a text that already begins with the mark.
    if any(part["replacement"] == METASPACE for part in marks):
        remarks.append(DROPS_SPACE)
    split = [part for part in before if part["type"] == "Split"]
    if any(part["pattern"] != {"String": METASPACE} for part in split):
        remarks.append(RUNS_OF_SPACES)
    return keys, remarks


def _merges_more(vocab: Data, pairs: list[tuple[str, ...]]) -> bool:
    """Return True if the tokenizer lacks a merge that llama.cpp would apply.

    llama.cpp merges any two tokens that concatenate to a third.
    """
    learned = set(pairs)
    return any(
        (text[:cut], text[cut:]) not in learned
        for text in {"".join(pair) for pair in pairs}
        for cut in range(1, len(text))
        if text[:cut] in vocab and text[cut:] in vocab
    )


def _parts(step: Data | None, inner: str) -> list[Data]:
    """List the steps of a normalizer or pre-tokenizer; nested sequences are flattened."""
    if step is None:
        return []
    return [part for one in step[inner] for part in _parts(one, inner)] if inner in step else [step]


def _special(tokenizer: "Tokenizer", stop_tokens: Sequence[int]) -> tuple[Data, list[str]]:
    """Return the metadata keys of special tokens and the chat template, and warnings."""
    roles = {role: getattr(tokenizer, f"{role}_id") for role in ROLES}
    ends, remarks = end_metadata(stop_tokens, roles["eos"])
    roles["eos"] = ends.get("tokenizer.ggml.eos_token_id", roles["eos"])
    if roles["eos"] is None:
        # otherwise llama.cpp would use an ordinary token as eos
        roles["eos"] = next((roles[role] for role in ("pad", "bos") if roles[role] is not None), 0)
        remarks.append(f"the tokenizer has no eos; llama.cpp stops at token {roles['eos']}")
    if roles["bos"] is None:
        roles["bos"] = roles["eos"]
    keys: Data = dict(ends) | {
        f"tokenizer.ggml.{ROLES[role]}_token_id": number
        for role, number in roles.items()
        if number is not None
    }
    keys["tokenizer.ggml.add_bos_token"] = list(tokenizer.prefix_ids) == [tokenizer.bos_id]
    keys["tokenizer.ggml.add_eos_token"] = list(tokenizer.suffix_ids) == [tokenizer.eos_id]
    if tokenizer.chat_template is not None:
        keys["tokenizer.chat_template"] = tokenizer.chat_template
    return keys, remarks


START = "tokenizer.ggml."
BYTE_LEVEL, CHARACTERS = "gpt2", "llama"
KINDS = (BYTE_LEVEL, CHARACTERS)
USUAL = {"bos_token_id": 1, "eos_token_id": 2}
"""llama.cpp's default token ids for tokenizers of its kind `llama`."""
SAYS = ("tokens", "token_type", "merges", "pre", "add_space_prefix")
"""Metadata keys, without `tokenizer.ggml.`, that the `tokenizer.json` in a file must agree with."""
SPECIAL = (CONTROL, UNKNOWN, USER_DEFINED)


def has_vocabulary(keys: Mapping[str, Any]) -> bool:
    """Return True if the metadata keys of a GGUF file contain a tokenizer."""
    return keys.get(f"{START}model", "none") != "none"


def vocabulary_remarks(keys: Mapping[str, Any]) -> list[str]:
    """Return warnings about the tokenizer in a GGUF file, one line each."""
    if keys.get(f"{START}model") != BYTE_LEVEL or keys.get(f"{START}pre"):
        return []
    return [
        "tokenizer.ggml.pre is missing; llama.cpp's default rule splits words, and tokens may "
        "differ from those in training"
    ]


def end_tokens(keys: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Read the ids of the tokens that end generation; empty if only the tokenizer's eos does."""
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
    """Read the tokenizer of a GGUF file.

    The file may contain a `tokenizer.json`. It is used if it agrees with the metadata keys.
    Otherwise the tokenizer is built from the keys.

    Raises:
        WorkhorseError: the tokenizer is of an unsupported kind, or damaged.
    """
    kind = keys[f"{START}model"]
    if kind not in KINDS:
        raise WorkhorseError(
            f"tokenizer kind {shown(kind)} is not supported (only {', '.join(KINDS)}); fetch the "
            "model as a Hugging Face directory"
        )
    fields = {key.removeprefix(START): value for key, value in keys.items()}
    if kind == CHARACTERS:
        fields = USUAL | fields
    rule = canonical_rule(str(fields.get("pre") or DEFAULT_RULE)) if kind == BYTE_LEVEL else ""
    try:
        if (whole := _whole(fields, vocab_size)) is not None:
            return whole
        definition = (
            _read_byte_level(fields, rule) if kind == BYTE_LEVEL else _read_characters(fields)
        )
        return _tokenizer(definition, fields)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
        raise WorkhorseError(
            f"its tokenizer is damaged ({shown(str(error))}); fetch the file again"
        ) from None


def _whole(fields: Mapping[str, Any], vocab_size: int) -> "Tokenizer | None":
    """Read the `tokenizer.json` in the file; None if it is missing or contradicts the keys."""
    from workhorse.tokenizers.huggingface.settings import MAX_VALUES

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
    """Build a tokenizer; its special tokens and chat template come from the metadata keys."""
    from workhorse.tokenizers import Tokenizer

    tokens, types = fields["tokens"], _types(fields)
    roles: dict[str, str] = {}
    for role, name in ROLES.items():
        number = fields.get(f"{name}_token_id")
        # llama.cpp needs an eos. An ordinary token in this key is only a stand-in.
        if type(number) is int and 0 <= number < len(tokens) and types[number] in SPECIAL:
            roles[role] = tokens[number]
    return Tokenizer(definition, roles, fields.get("tokenizer.chat_template"))


def _types(fields: Mapping[str, Any]) -> list[int]:
    return fields.get("token_type") or [NORMAL] * len(fields["tokens"])


def _read_byte_level(fields: Mapping[str, Any], rule: str) -> str:
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
    """Split merges into pairs. A merge is omitted if its parts or result are not in `known`."""
    pairs = [merge.split(" ", 1) for merge in merges]
    return [[left, right] for left, right in pairs if {left, right, left + right} <= known]


def _read_characters(fields: Mapping[str, Any]) -> str:
    from workhorse.tokenizers.huggingface.sentencepiece import BPE, convert_pieces

    pieces = list(zip(fields["tokens"], fields["scores"], _types(fields), strict=True))
    while pieces and pieces[-1][2] == UNUSED:  # rows of the embedding without a token
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
    """Make a tokenizer add bos and eos to complete sequences as the metadata keys say.

    Without these keys, bos is added if `begins` is True, and eos is not added.
    """
    from workhorse.tokenizers.backend import library_tokenizer
    from workhorse.tokenizers.control import set_affixes

    ends: dict[str, list[str]] = {}
    for role, usual in (("bos", begins), ("eos", False)):
        wanted = fields.get(f"add_{role}_token", usual) and f"{role}_token_id" in fields
        ends[role] = [fields["tokens"][fields[f"{role}_token_id"]]] if wanted else []
    if not any(ends.values()):
        return definition
    backend = library_tokenizer(definition)
    set_affixes(backend, ends["bos"], ends["eos"])
    return backend.to_str()
