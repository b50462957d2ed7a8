"""Messages between the HTTP process and the process that runs the model, and their transport."""

import contextlib
import json
import struct
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, NamedTuple

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from workhorse.data import SequenceStart
from workhorse.errors import WorkhorseError
from workhorse.generate import Delta, GenerationConfig
from workhorse.generate.limits import Load
from workhorse.serve.settings import EngineSettings
from workhorse.tokenizers import Tokenizer

LENGTH = struct.Struct("!Q")
"""Format of the length that precedes each message."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts about the model that the HTTP process needs."""

    name: str
    tokenizer: Annotated[
        Tokenizer,
        PlainValidator(lambda parts: Tokenizer(*parts)),
        PlainSerializer(lambda one: (one.definition, one.roles, one.chat_templates)),
    ]
    beginning: SequenceStart
    trained_to_chat: bool
    settings: EngineSettings
    """The settings, with the size of the cache."""
    stop_tokens: tuple[int, ...]
    """Ids that end a completion."""
    reply_stop_tokens: tuple[int, ...]
    """Ids that end a chat reply."""
    sampling: dict[str, Any]
    """Default sampling options, from `generation_config.json`."""
    context: int
    vocab: int
    is_exact: bool
    """True if results do not depend on other requests, bit by bit."""
    announcement: str
    remarks: tuple[str, ...] = ()

    @property
    def cache_tokens(self) -> int:
        """Number of tokens in the cache."""
        assert self.settings.cache_tokens is not None
        return self.settings.cache_tokens


class GrammarError(WorkhorseError):
    """The grammar of a completion cannot be used, or exceeds a limit."""


class GrammarSource(NamedTuple):
    """The grammar of a completion."""

    text: str
    """The grammar in llguidance's format."""
    end_of_reasoning: tuple[int, ...] = ()
    """Tokens that end reasoning, if the completion may begin with it."""


@dataclass(frozen=True)
class Job:
    """A prompt to complete; the completions are numbered from 0."""

    id: int
    prompt: list[int]
    config: GenerationConfig
    client: str
    """Name of the client; see `Engine.add`."""
    grammar: "GrammarSource | None" = None
    """Grammar of the completion."""
    adapter: str | None = None
    """Name of the adapter; None: the model itself."""


@dataclass(frozen=True)
class Cancel:
    """The completions of this job are not needed any more."""

    id: int


@dataclass(frozen=True)
class Failed:
    """A job ended because of an error, or, if `id` is None, the model cannot be loaded."""

    id: int | None
    message: str
    is_input: bool
    """True if the input was wrong, False for a failure of the server."""


@dataclass(frozen=True)
class Stepped:
    """The new tokens of a step: for each job, the deltas with `Delta.index` from 0."""

    tokens: dict[int, list[Delta]]
    load: Load
    seconds: float


KINDS: dict[str, TypeAdapter[Any]] = {
    kind.__name__: TypeAdapter(kind)
    for kind in (EngineSettings, ModelFacts, Job, Cancel, Failed, Stepped)
}


def packed(message: object) -> bytes:
    """Return a message as bytes: its length, its kind, and its fields as JSON."""
    kind = type(message).__name__
    # `json` writes infinite log-probabilities as numbers; pydantic would write null.
    data = f"{kind} {json.dumps(KINDS[kind].dump_python(message, mode='json'))}".encode()
    return LENGTH.pack(len(data)) + data


def unpacked(data: bytes) -> Any:
    """Return the message of `packed` from its bytes after the length."""
    kind, _, fields = data.partition(b" ")
    return KINDS[kind.decode()].validate_json(fields)


def read(stream: BinaryIO) -> Any:
    """Wait for a message and return it; None if the other process has closed the connection."""
    with contextlib.suppress(OSError):
        header = stream.read(LENGTH.size)
        if len(header) == LENGTH.size:
            (length,) = LENGTH.unpack(header)
            data = stream.read(length)
            if len(data) == length:
                return unpacked(data)
    return None
