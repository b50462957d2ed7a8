"""One class for every tokenizer: text or bytes to token ids, and back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from workhorse.errors import WorkhorseError, shown
from workhorse.tokenizers.backend import checked_ids, ids_of, library_tokenizer
from workhorse.tokenizers.control import ControlEncoder, affixes, guarded, reachable, set_affixes
from workhorse.tokenizers.files import folder_texts, write_folder
from workhorse.tokenizers.growth import check_growth
from workhorse.tokenizers.pieces import BYTE_ALPHABET, StreamDecoder, read_decoding

ROLES = ("bos", "eos", "pad", "unk")


@dataclass(frozen=True)
class Piece:
    """One token of a text."""

    id: int
    data: bytes
    """The bytes that it adds to the text; a part of a character that several tokens spell."""
    special: bool

    @property
    def text(self) -> str | None:
        """The same as text; None if it is part of a character."""
        try:
            return self.data.decode()
        except UnicodeDecodeError:
            return None


@dataclass(frozen=True)
class Source:
    """The files that a tokenizer was read from."""

    files: Mapping[str, bytes]
    model_type: str | None
    """Of the model beside them, by which transformers reads them."""


class Tokenizer:
    """Text to token ids and back, by any algorithm of the `tokenizers` library.

    Safe to share between threads and to send to other processes.

    Args:
        definition: the text of a `tokenizer.json`.
        roles: the names of the `bos`, `eos`, `pad` and `unk` tokens, if any, and of others that
            chat templates may use.
        chat_template: jinja source, if the tokenizer came with one; or several by name, of which
            `default` is the usual one.
        source: the files that it was read from, to write the same ones back.

    Raises:
        WorkhorseError: the definition is not a `tokenizer.json`, a role's token is not in the
            vocabulary, or the decoder cannot stream.
    """

    def __init__(
        self,
        definition: str,
        roles: Mapping[str, str | None] | None = None,
        chat_template: str | Mapping[str, str] | None = None,
        source: Source | None = None,
    ) -> None:
        self._backend = library_tokenizer(definition)
        self._backend.encode_special_tokens = True  # no special tokens in typed text
        self._definition: dict[str, Any] = json.loads(self._backend.to_str())
        check_growth(self._definition)
        names = reachable(self._definition)
        self._backend.pre_tokenizer = guarded(self._backend.pre_tokenizer, names)  # pyright: ignore
        self._decoding = read_decoding(self._definition["decoder"])
        is_one = isinstance(chat_template, str)
        self.chat_templates: dict[str, str] = (
            {"default": chat_template} if is_one else dict(chat_template or {})
        )
        self.source = source
        self.roles = {role: name for role, name in (roles or {}).items() if name is not None}
        self.special_tokens: dict[str, int] = {
            token["content"]: token["id"]
            for token in self._definition["added_tokens"]
            if token["special"]
        }
        """The control tokens that text becomes only with `allow_special`, and their ids."""
        self.vocab_size = 1 + max(self._backend.get_vocab().values(), default=-1)
        """Every id is less than this; gaps in the vocabulary count."""
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (self._role_id(r) for r in ROLES)
        self.prefix_ids, self.suffix_ids = affixes(self._definition["post_processor"])
        """The ids that stand before and after every whole text, as its maker declared."""
        self.plain_added_tokens = frozenset(
            token["content"] for token in self._definition["added_tokens"] if not token["special"]
        )
        """Tokens that are found whole in any text, and are no control tokens."""
        self._control_encoders: dict[frozenset[str], ControlEncoder] = {}

    @property
    def chat_template(self) -> str | None:
        """The jinja source of a chat."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text.

        Args:
            text: any text; an empty one has no ids. No bos or eos is added.
            allow_special: whether the name of a special token in the text becomes that token.
                Never for text that somebody else typed.

        Raises:
            WorkhorseError: this is not a str; it holds half a surrogate pair, which UTF-8 cannot
                encode; or the tokenizer fails at it.
        """
        return self.encode_batch([text], allow_special=allow_special)[0]

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        """The ids of several texts, in parallel where the machine allows."""
        backend = self._matching_special if allow_special else self._backend
        return ids_of(backend, texts)

    def count_unknown(self, ids: Sequence[int]) -> int:
        """How many ids of a text stand for characters that the vocabulary lacks."""
        return 0 if self.unk_id is None else ids.count(self.unk_id)

    def encode_text(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a whole text as in its model's training: with `prefix_ids`, `suffix_ids`.

        With `allow_special` they are those of `AutoTokenizer(text)`; without, of
        `AutoTokenizer(text, split_special_tokens=True)`.
        """
        ids = self.encode(text, allow_special=allow_special)
        return [*self.prefix_ids, *ids, *self.suffix_ids]

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes; `decode_bytes` returns exactly the same bytes.

        Bytes that are UTF-8 are encoded as text, others one by one.

        Raises:
            WorkhorseError: these are not bytes; or they are not UTF-8, and the tokenizer is not
                byte-level.
        """
        if not isinstance(data, bytes | bytearray):
            raise WorkhorseError(
                f"bytes to encode are bytes, not {shown(data)}; for a text: encode"
            )
        ids: list[int] = []
        while data:
            try:
                return ids + self.encode(data.decode())
            except UnicodeDecodeError as error:
                ids += self.encode(data[: error.start].decode())
                ids += (self._byte_ids[value] for value in data[error.start : error.end])
                data = data[error.end :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = False) -> str:
        """The text of these ids as the `tokenizers` library decodes them; invalid UTF-8 is U+FFFD.

        Args:
            ids: token ids, each in `[0, vocab_size)`.
            skip_special: leave special tokens out, instead of writing their names.

        Raises:
            WorkhorseError: an id outside the vocabulary, or what is no id.
        """
        ids = checked_ids(ids, self.vocab_size)
        stream = self.stream(skip_special=skip_special)
        return "".join(map(stream.push, ids)) + stream.finish()

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special=skip_special) for ids in batch]

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """The bytes of these ids, UTF-8 or not."""
        pieces = self.pieces(ids)
        kept = [piece.id for piece in pieces if not (skip_special and piece.special)]
        pieces = pieces if len(kept) == len(pieces) else self.pieces(kept)
        return b"".join(piece.data for piece in pieces)

    def pieces(self, ids: Sequence[int]) -> list[Piece]:
        """The tokens of a text with the bytes of each, which `decode_bytes` joins.

        Raises:
            WorkhorseError: an id outside the vocabulary, or what is no id.
        """
        ids = checked_ids(ids, self.vocab_size)
        pieces: list[Piece] = []
        begun, bare = False, self._decoding.strip_start
        for token in ids:
            data = self._pieces[token] if begun else self._first_piece(token)
            begun = begun or data is not None
            if data and bare:
                data, bare = data.removeprefix(b" "), False
            pieces.append(Piece(token, data or b"", token in self._special_ids))
        return pieces

    def stream(self, *, skip_special: bool = False, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder of ids that come one by one.

        Args:
            skip_special: leave special tokens out.
            after: ids whose text is known already, such as a prompt; the stream goes on from there,
                in the middle of a character or with the space before its first word.
        """
        skipped = self._special_ids if skip_special else frozenset[int]()
        pieces, vocab_size = self._pieces, self.vocab_size

        def piece(token: int, is_first: bool) -> bytes | None:
            if not 0 <= token < vocab_size:
                checked_ids((token,), vocab_size)
            if token in skipped:
                return None
            return self._first_piece(token) if is_first else pieces[token]

        decoding = self._decoding
        decoder = StreamDecoder(piece, decoding.strip_start, decoding.strip_end)
        for token in checked_ids(after, vocab_size):
            decoder.push(token)
        return decoder

    def control_encoder(self, also: frozenset[str] = frozenset()) -> ControlEncoder:
        """An encoder for texts in which some control tokens are meant, and others only typed.

        Args:
            also: tokens that count as control tokens beside the special ones.
        """
        if also not in self._control_encoders:
            self._control_encoders[also] = ControlEncoder(self._definition, also)
        return self._control_encoders[also]

    def token_id(self, token: str) -> int:
        """The id of a token, special or not, by its string in the vocabulary.

        Raises:
            WorkhorseError: there is no such token.
        """
        if not isinstance(token, str):
            raise WorkhorseError(f"a token's name is a text, not {shown(token)}; give a str")
        found = self._backend.token_to_id(token)
        if found is None:
            known = ", ".join(self.special_tokens) or "none"
            raise WorkhorseError(f"no token {token!r} in the vocabulary; special tokens: {known}")
        return found

    def save(self, folder: str | Path, *, model_type: str | None = None) -> None:
        """Write `tokenizer.json` and what belongs to it, as transformers reads it too.

        The folder holds this tokenizer, whole, or what it held before.

        Args:
            folder: where to.
            model_type: of the model that the folder is for. Where that is the type of the one that
                this tokenizer was read beside, its files are written back as they were.

        Raises:
            WorkhorseError: transformers reads the tokenizers of such a model by rules of its own,
                which would give other ids.
        """
        source = self.source
        if source is not None and model_type is not None and source.model_type == model_type:
            write_folder(Path(folder), source.files)
            return
        if model_type is not None:
            _check_readable(self.definition, model_type)
        texts = folder_texts(self.definition, self.roles, self.chat_templates)
        write_folder(Path(folder), {name: text.encode() for name, text in texts.items()})

    def beginning_with(self, *tokens: str) -> "Tokenizer":
        """A copy of this tokenizer whose whole texts begin with the tokens of these names.

        Raises:
            WorkhorseError: there is no such token.
        """
        for token in tokens:
            self.token_id(token)
        backend = library_tokenizer(self.definition)
        set_affixes(backend, before=tokens)
        return Tokenizer(backend.to_str(), self.roles, self.chat_templates)

    def with_role(self, role: str, token: str) -> "Tokenizer":
        """A copy of this tokenizer in which the token of this name has a role, such as `bos`.

        Raises:
            WorkhorseError: there is no such token.
        """
        self.token_id(token)
        return Tokenizer(self.definition, {**self.roles, role: token}, self.chat_templates)

    @property
    def vocabulary(self) -> dict[str, int]:
        """The id of every token."""
        return self._backend.get_vocab()

    @property
    def definition(self) -> str:
        """The text of this tokenizer's `tokenizer.json`."""
        return json.dumps(self._definition, indent=2, ensure_ascii=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256, in hex, of everything that determines the ids of a text."""
        facts = {"tokenizer": self._definition, "roles": self.roles}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        model = self._definition["model"]["type"]
        return f"<Tokenizer {model}, {self.vocab_size:,} tokens, {self.fingerprint[:8]}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.definition, self.roles, self.chat_templates)

    @cached_property
    def _matching_special(self) -> tokenizers.Tokenizer:
        """A copy that finds special tokens in a text; the library's switch is per tokenizer."""
        return library_tokenizer(self.definition)

    @cached_property
    def _pieces(self) -> list[bytes | None]:
        """The bytes that each id adds to a text; None for an id without a token."""
        pieces: list[bytes | None] = [None] * self.vocab_size
        for token, number in self._backend.get_vocab().items():
            pieces[number] = self._decoding.piece(token)
        return pieces

    def _first_piece(self, token: int) -> bytes | None:
        if self._decoding.first is None:
            return self._pieces[token]
        name = self._backend.id_to_token(token)
        return None if name is None else self._decoding.first_piece(name)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(self.special_tokens.values())

    @cached_property
    def _byte_ids(self) -> list[int]:
        """Byte value -> id, in a byte-level vocabulary."""
        ids = [self._backend.token_to_id(character) for character in BYTE_ALPHABET]
        decoder = self._definition["decoder"] or {}
        if decoder.get("type") != "ByteLevel" or None in ids:
            raise WorkhorseError(
                "the bytes are not UTF-8 and this tokenizer cannot spell single bytes; use a "
                "byte-level tokenizer (bpe or bytes)"
            )
        return ids  # pyright: ignore[reportReturnType]

    def _role_id(self, role: str) -> int | None:
        name = self.roles.get(role)
        if name is None:
            return None
        found = self._backend.token_to_id(name)
        if found is None:
            raise WorkhorseError(
                f"the {role} token {name!r} is not in the vocabulary; name one that is"
            )
        return found


def _check_readable(definition: str, model_type: str) -> None:
    from workhorse.tokenizers.huggingface.read import as_read_beside

    if json.loads(as_read_beside(definition, model_type)) != json.loads(definition):
        raise WorkhorseError(
            f"transformers gives tokenizers of model type {model_type!r} rules of its own, and "
            "this one would give other ids; write the model as another type"
        )
