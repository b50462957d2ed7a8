"""Messages between the HTTP process and the process that runs the model, and their transport."""

import contextlib
import json
import struct
from dataclasses import dataclass, field
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from workhorse.data import SequenceStart
from workhorse.errors import WorkhorseError
from workhorse.generate import Delta, GenerationConfig
from workhorse.generate.engine import Load
from workhorse.tokenizers import Tokenizer

LENGTH = struct.Struct("!Q")
"""Format of the length that precedes each message."""


Exact = Literal["auto", "always", "never"]
"""`auto`: if the decoder is invariant (`Backend.is_invariant`), which costs little. `always`: for
other decoders, prompts are processed one by one, and so are the sequences of a step."""


@dataclass(frozen=True)
class EngineSettings:
    """How the model is loaded, and the limits of its engine."""

    model: str
    device: str = "auto"
    dtype: str = "auto"
    kernel: str = "auto"
    quantize: str = "none"
    execution: str = "auto"
    adapter: str | None = None
    """Path of an adapter that the model has for all requests."""
    adapters: dict[str, str] = field(default_factory=dict[str, str])
    """Paths of adapters that requests may choose, by name."""
    threads: int = 0
    exact: Exact = "auto"
    """When results do not depend on other requests, bit by bit; see `Exact`."""
    max_sequences: int = 16
    """Maximum number of completions that advance together."""
    cache_tokens: int | None = None
    """Maximum number of tokens of all completions in the cache; None: as many as fit into half of
    the free memory, but no more than `max_sequences` full contexts."""
    prompt_share: float = 0.4
    """Fraction by which prompts may lengthen a step while other completions are generated."""
    template: str = "default"
    """Name of the chat template, if the tokenizer has several."""
    speculate: int = 0
    """Maximum number of tokens that are guessed per step and completion, by prompt lookup."""


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
    template: str
    stop_tokens: tuple[int, ...]
    """Ids that end a completion."""
    reply_stop_tokens: tuple[int, ...]
    """Ids that end a chat reply."""
    sampling: dict[str, Any]
    """Default sampling options, from `generation_config.json`."""
    context: int
    vocab: int
    cache_tokens: int
    max_sequences: int
    is_exact: bool
    """True if results do not depend on other requests, bit by bit."""
    announcement: str
    remarks: tuple[str, ...] = ()
    speculate: int = 0
    """See `EngineSettings`."""
    adapters: tuple[str, ...] = ()
    """Names of the adapters that requests may choose."""


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
