"""Reads the tokenizer of a folder as transformers 5 does: the same ids for the same input.

A tokenizer is in one of three kinds of files: `tokenizer.json`, which is complete; a SentencePiece
`tokenizer.model`; or `vocab.json` with `merges.txt`, as for GPT-2. The settings in the same folder
are applied to it by the rules of `AutoTokenizer` in transformers.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken

from workhorse.errors import WorkhorseError
from workhorse.files.text_formats import parse_json
from workhorse.tokenizers.backend import add_tokens, library_tokenizer
from workhorse.tokenizers.control import set_affixes
from workhorse.tokenizers.growth import check_growth
from workhorse.tokenizers.huggingface import sentencepiece
from workhorse.tokenizers.huggingface.classes import (
    CLASSES,
    UNK_PLACE,
    TokenizerClass,
    tokenizer_class,
)
from workhorse.tokenizers.huggingface.settings import (
    MAX_VALUES,
    NAMED,
    Settings,
    TokenizerFolder,
    added_token,
)

DEFINITION = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
VOCABULARY, MERGES = "vocab.json", "merges.txt"

Named = Mapping[str, AddedToken | str | None]
Affixes = tuple[bool | None, bool | None]
"""Two values: True if sequences begin with bos, True if they end with eos. None: not specified."""


@dataclass(frozen=True)
class Reading:
    """A tokenizer as read from files."""

    definition: str
    """The content of a complete `tokenizer.json`."""
    named: Mapping[str, str]
    """Special tokens by role, such as `bos_token`."""


def read_folder(folder: TokenizerFolder, settings: Settings) -> Reading:
    """Read the tokenizer of a folder.

    Raises:
        WorkhorseError: the folder has no tokenizer, or the tokenizer is damaged, exceeds the
            limits, or has an unsupported type.
    """
    for file, read in ((DEFINITION, read_json), (SENTENCEPIECE, read_sentencepiece)):
        if folder.has(file):
            return read(folder, file, settings)
    if folder.has(VOCABULARY) and folder.has(MERGES):
        return _read_merges(folder, settings)
    raise WorkhorseError(
        f"no tokenizer in {folder.path}: it has no {DEFINITION}, no {SENTENCEPIECE}, and no "
        f"{VOCABULARY} with {MERGES}; choose a folder with such files"
    )


def read_json(folder: TokenizerFolder, file: str, settings: Settings) -> Reading:
    """Read a `tokenizer.json`, and replace the same parts of it as transformers does.

    These parts depend on the tokenizer class that the folder declares, and on its model type.
    """
    written = folder.vocabulary(file)
    text = folder.read[file].decode()
    kind = tokenizer_class(settings.model_type, settings.declared_class, '"ByteLevel"' in text)
    with _blaming(folder.path / file):
        return _read_written(text, written, kind, settings)


def as_read_beside(definition: str, model_type: str) -> str:
    """Return a `tokenizer.json` as transformers reads it in a folder with a model.

    Args:
        definition: the content of the `tokenizer.json`.
        model_type: type of the model in the same folder.
    """
    kind = tokenizer_class(model_type, "PreTrainedTokenizerFast", '"ByteLevel"' in definition)
    written = parse_json(definition.encode(), DEFINITION, max_values=MAX_VALUES)
    return _read_written(definition, written, kind, Settings({}, {})).definition


def read_sentencepiece(folder: TokenizerFolder, file: str, settings: Settings) -> Reading:
    """Read a SentencePiece model as transformers does with the folder's tokenizer class.

    If there is no such class, the model is read as by the SentencePiece library.
    """
    data = folder.bytes_of(file)
    kind = tokenizer_class(settings.model_type, settings.declared_class, False)
    affixes = _affixes(settings, kind)
    with _blaming(folder.path / file):
        found = sentencepiece.bpe_vocabulary(data) if kind and kind.model == "BPE" else None
        if kind is None or found is None:
            definition, roles = sentencepiece.convert(data)
            named = {**{f"{role}_token": token for role, token in roles.items()}, **settings.named}
            backend = library_tokenizer(definition)
            _add_tokens(backend, named, settings.added, settings.extra)
            return _finished(backend, named, None, affixes)
        named = {**kind.named, **settings.named}
        backend = _built(kind, {"vocab": found.vocab, "merges": found.merges}, settings, named)
        extra = settings.extra if settings.lists_extra else found.controls
        _add_tokens(backend, named, settings.added, extra)
        return _finished(backend, named, kind, affixes)


def _read_merges(folder: TokenizerFolder, settings: Settings) -> Reading:
    kind = tokenizer_class(settings.model_type, settings.declared_class, True)
    kind = CLASSES["GPT2Tokenizer"] if kind is None or kind.model != "BPE" else kind
    named = {**kind.named, **settings.named}
    lines = folder.text(MERGES).split("\n")
    merges = [line.rstrip("\r").split(" ") for line in lines if line and line[:8] != "#version"]
    vocab = folder.vocabulary(VOCABULARY)
    with _blaming(f"{folder.path / VOCABULARY} with {MERGES}"):
        backend = _built(kind, {"vocab": vocab, "merges": merges}, settings, named)
        _add_tokens(backend, named, settings.added, settings.extra)
        return _finished(backend, named, kind, _affixes(settings, kind))


def _read_written(
    text: str, written: Mapping[str, Any], kind: TokenizerClass | None, settings: Settings
) -> Reading:
    """Read a `tokenizer.json` (`text`, parsed as `written`) with the parts that `kind` replaces.

    Nothing is replaced if the class `kind` is None or for another algorithm.
    """
    if kind is None or written["model"].get("type", kind.model) != kind.model:
        check_growth(written)
        backend = library_tokenizer(text)
        is_changed = _add_tokens(backend, settings.named, settings.added, settings.extra)
        return _reading(backend.to_str() if is_changed else text, settings.named)
    added = dict(settings.added)
    if not settings.lists_added:
        for token in written["added_tokens"]:
            added[token["id"]] = added_token(token)
    learned = {key: written["model"][key] for key in ("vocab", "merges") if key in written["model"]}
    named = {**kind.named, **settings.named}
    backend = _built(kind, learned, settings, named, written.get("post_processor"))
    _add_tokens(backend, named, added, settings.extra or kind.extra)
    affixes = (kind.bos_by_default or None, None)  # as in transformers, the settings are ignored
    return _finished(backend, named, kind, affixes)


def _built(
    kind: TokenizerClass,
    learned: Mapping[str, Any],
    settings: Settings,
    named: Named,
    post_processor: Any = None,
) -> tokenizers.Tokenizer:
    """Build a tokenizer without added tokens from its vocabulary and merges (`learned`)."""
    parts = kind.parts(settings.fields)
    options = dict(parts["model"])
    if options.get("unk_token") == UNK_PLACE:
        options["unk_token"] = str(named["unk_token"])
    definition = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": parts["normalizer"],
        "pre_tokenizer": parts["pre_tokenizer"],
        "post_processor": post_processor,
        "decoder": parts["decoder"],
        "model": {"type": kind.model, **options, **learned},
    }
    return library_tokenizer(json.dumps(definition))


def _add_tokens(
    backend: tokenizers.Tokenizer,
    named: Named,
    added: Mapping[int, AddedToken],
    extra: Sequence[AddedToken | str],
) -> bool:
    """Add the added and special tokens of a folder; return True if the tokenizer was changed.

    New tokens get ids at the end of the vocabulary.
    """
    before = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    tokens = [added[number] for number in sorted(added)]
    known = {*before, *(token.content for token in tokens)}
    in_order = [named.get(key) for key in dict.fromkeys((*NAMED, *named))]
    for token in (*in_order, *extra):
        if token is not None and str(token) not in known:
            known.add(str(token))
            is_plain = isinstance(token, str)
            tokens.append(AddedToken(token, special=True) if is_plain else token)
    names = {str(token) for token in in_order if token is not None}
    for token in tokens:
        token.special = token.special or token.content in names
    tokens = [token for token in tokens if not _is_same(token, before.get(token.content))]
    add_tokens(backend, tokens)
    return bool(tokens)


def _is_same(token: AddedToken, other: AddedToken | None) -> bool:
    return other is not None and token.__getstate__() == other.__getstate__()


def _affixes(settings: Settings, kind: TokenizerClass | None) -> Affixes:
    """Return whether sequences begin with bos and end with eos, according to the settings.

    This applies only to folders without a `tokenizer.json`.
    """
    add_bos, add_eos = (settings.fields.get(f"add_{role}_token") for role in ("bos", "eos"))
    if add_bos is None and kind is not None and kind.bos_by_default:
        add_bos = True
    return add_bos, add_eos


def _finished(
    backend: tokenizers.Tokenizer, named: Named, kind: TokenizerClass | None, affixes: Affixes
) -> Reading:
    """Mark the special tokens, and set the added bos and eos, as transformers' class does."""
    bos, eos = ([] if named.get(key) is None else [str(named[key])] for key in NAMED[:2])
    if kind is not None and kind.resets_flags:
        add_tokens(backend, [AddedToken(str(t), special=True) for t in named.values() if t])
    if kind is not None and kind.begins_with_eos:
        set_affixes(backend, before=eos)
    elif affixes != (None, None) or (kind is not None and not kind.keeps_post_processor):
        set_affixes(backend, bos if affixes[0] else [], eos if affixes[1] else [])
    return _reading(backend.to_str(), named)


def _reading(definition: str, named: Named) -> Reading:
    return Reading(definition, {key: str(token) for key, token in named.items() if token})


@contextmanager
def _blaming(what: object) -> Iterator[None]:
    """Turn errors about a file's content in a `with` block into errors that name the file."""
    try:
        yield
    except WorkhorseError as error:
        raise WorkhorseError(f"{what}: {error}") from None
    except (TypeError, LookupError, AttributeError, ValueError, OverflowError) as error:
        # Python's message for a wrong type describes our code, not the file.
        of_type = isinstance(error, TypeError | AttributeError)
        reason = "a value has the wrong type" if of_type else " ".join(str(error).split())[:200]
        raise WorkhorseError(
            f"{what}: not in the format of the tokenizers library ({reason}); use the original file"
        ) from None
