"""One class for every tokenizer: text or bytes to token ids, and back."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from workhorse.errors import WorkhorseError
from workhorse.tokenizers.files import DEFINITION, SETTINGS, write_folder
from workhorse.tokenizers.guard import guarded, reachable
from workhorse.tokenizers.pieces import (
    BYTE_ALPHABET,
    StreamDecoder,
    join_pieces,
    read_decoding,
)

ROLES = ("bos", "eos", "pad", "unk")


class Tokenizer:
    """Text to token ids and back, by any algorithm of the `tokenizers` library.

    Safe to share between threads and to send to other processes.

    Args:
        definition: the text of a `tokenizer.json`.
        roles: the names of the `bos`, `eos`, `pad` and `unk` tokens, where there are such.
        chat_template: jinja source, if the tokenizer came with one.

    Raises:
        WorkhorseError: not such a text, a role whose token is not in the vocabulary, or a decoder
            that cannot stream.
    """

    def __init__(
        self,
        definition: str,
        roles: Mapping[str, str | None] | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = _library_tokenizer(definition)
        self._backend.encode_special_tokens = True  # no special tokens in typed text
        self._definition: dict[str, Any] = json.loads(self._backend.to_str())
        names = reachable(self._definition)
        self._backend.pre_tokenizer = guarded(self._backend.pre_tokenizer, names)  # pyright: ignore
        self._decoding = read_decoding(self._definition["decoder"])
        self.chat_template = chat_template
        self.roles = {role: name for role, name in (roles or {}).items() if name is not None}
        self.special_tokens: dict[str, int] = {
            token["content"]: token["id"]
            for token in self._definition["added_tokens"]
            if token["special"]
        }
        """The control tokens that text becomes only with `allow_special`, and their ids."""
        self.vocab_size = 1 + max(self._backend.get_vocab().values(), default=-1)
        """Every id is less; a vocabulary with gaps counts them."""
        self.bos_id, self.eos_id, self.pad_id, self.unk_id = (self._role_id(r) for r in ROLES)

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        """The ids of a text.

        Args:
            text: any text; an empty one has no ids. No bos or eos is added.
            allow_special: whether the name of a special token in the text becomes that token.
                Never for text that somebody else typed.

        Raises:
            WorkhorseError: the text holds half a surrogate pair, which no UTF-8 can say.
        """
        return self.encode_batch([text], allow_special=allow_special)[0]

    def encode_batch(self, texts: Sequence[str], *, allow_special: bool = False) -> list[list[int]]:
        """The ids of several texts, in parallel where the machine allows."""
        backend = self._matching_special if allow_special else self._backend
        try:
            found = backend.encode_batch_fast(list(texts), add_special_tokens=False)
        except TypeError:
            _check_texts(texts)
            raise
        return [encoding.ids for encoding in found]

    def encode_bytes(self, data: bytes) -> list[int]:
        """The ids of any bytes; `decode_bytes` gives exactly them back.

        Bytes that are UTF-8 are encoded as text, the others one by one.

        Raises:
            WorkhorseError: bytes that are no UTF-8, and the tokenizer is not byte-level.
        """
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
        """The text of some ids; bytes that are no UTF-8 become U+FFFD.

        Args:
            ids: token ids, each in `[0, vocab_size)`.
            skip_special: leave special tokens out, instead of writing their names.

        Raises:
            WorkhorseError: an id outside the vocabulary.
        """
        return self.decode_bytes(ids, skip_special=skip_special).decode("utf-8", "replace")

    def decode_batch(
        self, batch: Sequence[Sequence[int]], *, skip_special: bool = False
    ) -> list[str]:
        return [self.decode(ids, skip_special=skip_special) for ids in batch]

    def decode_bytes(self, ids: Sequence[int], *, skip_special: bool = False) -> bytes:
        """The bytes of some ids, UTF-8 or not."""
        for token in (min(ids, default=0), max(ids, default=0)):
            self._check_id(token)
        if skip_special:
            ids = [token for token in ids if token not in self._special_ids]
        pieces = self._pieces
        return join_pieces([pieces[token] for token in ids], self._decoding.strip_space)

    def stream(self, *, skip_special: bool = False, after: Sequence[int] = ()) -> StreamDecoder:
        """A decoder of ids that come one by one.

        Args:
            skip_special: leave special tokens out.
            after: ids whose text is known already, such as a prompt; the stream goes on from there,
                in the middle of a character or with the space before its first word.
        """
        decoder = StreamDecoder(
            lambda token: self._piece(token, skip_special), self._decoding.strip_space
        )
        for token in after:
            decoder.push(token)
        return decoder

    def token_id(self, token: str) -> int:
        """The id of a token, special or not, by its string in the vocabulary.

        Raises:
            WorkhorseError: there is no such token.
        """
        found = self._backend.token_to_id(token)
        if found is None:
            known = ", ".join(self.special_tokens) or "none"
            raise WorkhorseError(f"no token {token!r} in the vocabulary; special tokens: {known}")
        return found

    def save(self, folder: str | Path) -> None:
        """Write `tokenizer.json` and `tokenizer_config.json`, readable by transformers too.

        A new folder appears whole; in an old one each file is replaced whole.
        """
        names = {f"{role}_token": name for role, name in self.roles.items()}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **names,
            **({"chat_template": self.chat_template} if self.chat_template is not None else {}),
        }
        settings = json.dumps(config, indent=2, ensure_ascii=False)
        write_folder(Path(folder), {SETTINGS: settings, DEFINITION: self.definition})

    @property
    def definition(self) -> str:
        """The text of this tokenizer's `tokenizer.json`."""
        return json.dumps(self._definition, indent=2, ensure_ascii=False)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the ids of a text, in hex."""
        facts = {"tokenizer": self._definition, "roles": self.roles}
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()

    def __repr__(self) -> str:
        model = self._definition["model"]["type"]
        return f"<Tokenizer {model}, {self.vocab_size:,} tokens, {self.fingerprint[:8]}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self.definition, self.roles, self.chat_template)

    @cached_property
    def _matching_special(self) -> tokenizers.Tokenizer:
        """A twin that finds special tokens in a text. The library's switch is per tokenizer."""
        return _library_tokenizer(self.definition)

    @cached_property
    def _pieces(self) -> list[bytes]:
        """What each id adds to a text; nothing for an id that no token has."""
        pieces = [b""] * self.vocab_size
        for token, number in self._backend.get_vocab().items():
            pieces[number] = self._decoding.piece(token)
        for token, number in self.special_tokens.items():
            pieces[number] = self._decoding.control_piece(token)
        return pieces

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

    def _piece(self, token: int, skip_special: bool) -> bytes:
        self._check_id(token)
        return b"" if skip_special and token in self._special_ids else self._pieces[token]

    def _check_id(self, token: int) -> None:
        if not 0 <= token < self.vocab_size:
            raise WorkhorseError(
                f"token id {token} is not in the vocabulary of {self.vocab_size}; "
                "decode with the tokenizer that made the ids"
            )

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


def _library_tokenizer(definition: str) -> tokenizers.Tokenizer:
    try:
        backend = tokenizers.Tokenizer.from_str(definition)
    except Exception as error:  # the library raises bare Exception
        raise WorkhorseError(
            f"not a tokenizer.json ({error}); give a file that the tokenizers library wrote"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def _check_texts(texts: Sequence[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise WorkhorseError(
                f"the text holds half a surrogate pair, {text[error.start]!r}, at character "
                f"{error.start}; read it with errors='replace', or encode its bytes"
            ) from None
