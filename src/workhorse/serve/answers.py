"""From the engine's tokens to answers of OpenAI's API, whole or as events."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from workhorse.generate import Delta, TokenLogprob
from workhorse.tokenizers import StreamDecoder, Tokenizer

FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
"""`finish_reason` of the API for each of ours."""


@dataclass
class Timings:
    """When the tokens of a request were generated, and how many there are."""

    prompt: int = 0
    """Number of prompt tokens."""
    cached: int = 0
    """Number of prompt tokens that were in the prefix cache."""
    new: int = 0
    sent: int = 0
    """Number of new tokens of all choices. Equal choices are generated once."""
    proposed: int = 0
    """Number of guessed tokens; see `GenerationConfig.speculate`."""
    accepted: int = 0
    """Number of guessed tokens that became new tokens."""
    started: float = field(default_factory=time.perf_counter)
    first: float | None = None
    last: float = 0.0

    def count(self, deltas: Sequence[Delta], *, repeated: bool = False) -> None:
        """Count the new tokens of a step. `repeated`: see `generating.Job`."""
        self.last = time.perf_counter()
        if self.first is None:
            self.first = self.last
        if not repeated:
            self.cached += sum(delta.cached_tokens for delta in deltas if delta.index == 0)
        self.new += len(deltas)
        self.proposed += sum(delta.proposed for delta in deltas)
        self.accepted += sum(delta.accepted for delta in deltas)

    @property
    def usage(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.sent,
            "total_tokens": self.prompt + self.sent,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        }

    @property
    def milliseconds(self) -> dict[str, Any]:
        """The extension `timings`."""
        first = self.first or self.started
        generating = self.last - first
        return {
            "first_token_ms": 1000 * (first - self.started),
            "generation_ms": 1000 * generating,
            "tokens_per_second": (self.new - 1) / generating if generating > 0 else None,
            "proposed_tokens": self.proposed,
            "accepted_tokens": self.accepted,
        }


class TokenText:
    """Formats tokens and their log-probabilities."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._bytes_of = tokenizer.display_bytes

    def name(self, token: int) -> str:
        r"""The text of a token; `bytes:\xe2\x82` if it is a part of a character.

        `token_id:410` if no token has the id: the model's vocabulary is padded.
        """
        data = self._bytes_of(token)
        if data is None:
            return f"token_id:{token}"
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{value:02x}" for value in data)

    def chat_logprobs(self, deltas: Sequence[Delta]) -> dict[str, Any]:
        """Format the log-probabilities of new tokens as a chat completion has them."""
        content = [
            {
                **self._entry(one.token, one.logprob),
                "top_logprobs": [self._entry(token, value) for token, value in one.top],
            }
            for one in (delta.logprob for delta in deltas)
            if one is not None
        ]
        return {"content": content, "refusal": None}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        data = self._bytes_of(token)
        return {
            "token": self.name(token) if data is None else data.decode("utf-8", "replace"),
            "token_id": token,
            "logprob": _finite(logprob),
            "bytes": list(data or b""),
        }

    def completion_logprobs(
        self, logprobs: Sequence[TokenLogprob | int], offsets: "Offsets"
    ) -> dict[str, list[Any]]:
        """Format log-probabilities as a completion has them.

        Args:
            logprobs: the tokens; one without a log-probability is an id. `top_logprobs` also
                has the token itself.
            offsets: counts the characters before them.
        """
        fields: dict[str, list[Any]] = {
            "tokens": [],
            "token_logprobs": [],
            "top_logprobs": [],
            "text_offset": [],
        }
        for one in logprobs:
            if isinstance(one, int):
                token, logprob, top = one, None, None
            else:
                token, logprob, top = one.token, _finite(one.logprob), dict[str, float]()
                for id, value in (*one.top, (token, one.logprob)):
                    top.setdefault(self.name(id), _finite(value))
            fields["tokens"].append(self.name(token))
            fields["token_logprobs"].append(logprob)
            fields["top_logprobs"].append(top)
            fields["text_offset"].append(offsets.before(token))
        return fields


class Offsets:
    """Counts the characters of a text before each of its tokens.

    A token inside a character has the offset of the character.

    Args:
        stream: decodes the tokens of the text.
        start: number of characters before the first token.
    """

    def __init__(self, stream: StreamDecoder, start: int = 0) -> None:
        self._stream = stream
        self._offset = start

    def before(self, token: int) -> int:
        """Return the number of characters before the next token."""
        offset = self._offset
        self._offset += len(self._stream.push(token))
        return offset


def _finite(logprob: float) -> float:
    """Return a number that JSON has: -9999 for a token that is impossible, as OpenAI does."""
    return max(logprob, -9999.0)


def event(fields: object) -> bytes:
    """Format a server-sent event."""
    return b"data: " + json.dumps(fields, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


DONE = b"data: [DONE]\n\n"


async def merged(
    streams: Sequence[AsyncIterator[list[Delta]]],
) -> AsyncGenerator[tuple[int, list[Delta]]]:
    """Yield the items of several iterators as they arrive, with the number of their iterator.

    If it is closed early, all iterators are closed.
    """
    arrived: asyncio.Queue[tuple[int, list[Delta] | BaseException | None]] = asyncio.Queue()

    async def pump(number: int, stream: AsyncIterator[list[Delta]]) -> None:
        end: BaseException | None = None
        try:
            async for item in stream:
                arrived.put_nowait((number, item))
        except Exception as error:
            end = error
        arrived.put_nowait((number, end))

    tasks = [asyncio.create_task(pump(*one)) for one in enumerate(streams)]
    left = len(tasks)
    try:
        while left:
            number, item = await arrived.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield number, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
