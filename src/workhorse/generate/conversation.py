"""A conversation with a model: messages, replies, and the cache of earlier turns."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from workhorse.errors import WorkhorseError, shown
from workhorse.execute.backend import Backend
from workhorse.generate.checks import checked_models
from workhorse.generate.config import Delta, GenerationConfig
from workhorse.generate.engine import Engine
from workhorse.generate.limits import slack_of
from workhorse.nn import Decoder
from workhorse.tokenizers import ChatTemplate, Tokenizer

TextMessage = dict[str, str]
"""`role` (system, user or assistant) and `content`."""
REPLY_SHARE = 4
"""A prompt leaves room for a reply: `max_new_tokens`, up to the context divided by this number."""


class ChatFormat(Protocol):
    """Formats messages as the prompt of the next reply, and defines what ends the reply."""

    @property
    def stop(self) -> tuple[str, ...]: ...

    @property
    def stop_tokens(self) -> tuple[int, ...]: ...

    def encode(self, messages: Sequence[TextMessage]) -> list[int]: ...


@dataclass(frozen=True)
class TemplateFormat:
    """Formats messages with a chat template, for models trained with its control tokens."""

    template: ChatTemplate
    tokenizer: Tokenizer
    stop: tuple[str, ...] = ()

    def encode(self, messages: Sequence[TextMessage]) -> list[int]:
        return self.template.encode(self.tokenizer, messages)

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The control token that the template writes after a reply, and eos.

        If it writes none, the tokens that begin the turns of the user and of tools end a reply.
        """
        after = self._after_reply()
        for role in () if after else ("user", "tool"):
            with suppress(WorkhorseError):
                after += self._after_reply({"role": role, "content": "d", "tool_call_id": "call"})
        eos = self.tokenizer.eos_id
        return tuple(dict.fromkeys(after + ([] if eos is None else [eos])))

    def _after_reply(self, *more: TextMessage) -> list[int]:
        """Return the first control token after a reply; with more messages, directly after it."""
        control = self.tokenizer.special_tokens.values()
        one, other = (
            self.template.encode(
                self.tokenizer,
                [{"role": "user", "content": "a"}, {"role": "assistant", "content": reply}, *more],
                add_generation_prompt=False,
            )
            for reply in ("b", "c")
        )
        pairs = enumerate(zip(reversed(one), reversed(other), strict=False))
        same = next(n for n, (a, b) in pairs if a != b)
        after = one[len(one) - same :]
        at = next((n for n, token in enumerate(after) if token in control), len(after))
        directly = not more or not self.tokenizer.decode(after[:at]).strip()
        return after[at : at + 1] if directly else []


@dataclass(frozen=True)
class TranscriptFormat:
    """Formats messages as a plain-text dialogue, for models without chat training."""

    tokenizer: Tokenizer
    prefix: tuple[int, ...] = ()
    """Token ids with which every training document begins."""
    stop: tuple[str, ...] = ("\nUser:",)

    def encode(self, messages: Sequence[TextMessage]) -> list[int]:
        turns = {"system": "{}\n", "user": "User: {}\n", "assistant": "Assistant:{}\n"}
        text = "".join(turns[message["role"]].format(message["content"]) for message in messages)
        return [*self.prefix, *self.tokenizer.encode(text + "Assistant:")]

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        return () if self.tokenizer.eos_id is None else (self.tokenizer.eos_id,)


class Conversation:
    """A chat with one model.

    The cache is kept between turns, so a turn processes only the tokens after the longest common
    prefix with the previous turn. This prefix is shorter if the template renders an earlier reply
    differently, or if the text of a reply encodes to other tokens than were generated. When the
    context is full, the oldest messages are dropped, but not the system message. If a reply is
    interrupted or closed, the part generated so far is kept.

    Args:
        decoder: the model.
        tokenizer: the model's tokenizer.
        format: formats messages as prompts.
        config: options for replies; its `stop` and `stop_tokens` are added to the format's.
        system: the system message, if any.
        draft: a smaller decoder that guesses tokens; see `workhorse.generate.generate`.

    Attributes:
        messages: all messages so far, including those that the model no longer sees.
        forgotten: number of messages that did not fit into the prompt of the last reply.
    """

    def __init__(
        self,
        decoder: Decoder | Backend,
        tokenizer: Tokenizer,
        format: ChatFormat,
        config: GenerationConfig,
        *,
        system: str = "",
        draft: Decoder | Backend | None = None,
    ) -> None:
        if not isinstance(system, str):
            raise WorkhorseError(
                f"system={shown(system)} is not a string; give a string, or omit it"
            )
        for name in ("n_samples", "beams"):
            if (number := getattr(config, name)) > 1:
                raise WorkhorseError(f"{name}={number}: a chat has one reply; omit {name}")
        self._tokenizer = tokenizer
        self._format = format
        stop_tokens = dict.fromkeys((*format.stop_tokens, *(config.stop_tokens or ())))
        self._config = config.replace(
            stop=config.stop + format.stop, stop_tokens=tuple(stop_tokens)
        )
        self._system: list[TextMessage] = [{"role": "system", "content": system}] if system else []
        if self._system:  # fail now if the template does not allow a system message
            format.encode([*self._system, {"role": "user", "content": "a"}])
        self.messages = list(self._system)
        self.forgotten = 0
        backend, draft = checked_models(decoder, draft, tokenizer)
        self._engine = Engine(
            backend,
            tokenizer=tokenizer,
            draft=draft,
            max_sequences=1,
            speculate=slack_of(config, backend.decoder.max_seq_len),
            prefix_caching=True,
        )

    def reply(self, text: str) -> Iterator[Delta]:
        """Send a message, and yield the tokens of the reply as they are generated.

        At the end, the message and the reply are added to `messages`.

        Raises:
            WorkhorseError: the message is not a string, the last reply has not ended, or the
                message does not fit into the context even without earlier messages. The
                conversation is then unchanged. See also `workhorse.generate.stream`.
        """
        if not isinstance(text, str):
            raise WorkhorseError(f"the message {shown(text)} is not a string; give a str")
        if not self._engine.is_idle:
            raise WorkhorseError("the last reply has not ended; read it to its end, or close() it")
        asked: TextMessage = {"role": "user", "content": text}
        prompt = self._prompt([*self.messages, asked])
        (result,) = self._engine.add(prompt, self._config)
        answer = ""
        try:
            while not self._engine.is_idle:
                for delta in self._engine.step():
                    answer += delta.text
                    yield delta
        except (KeyboardInterrupt, GeneratorExit):
            if answer:
                self._remember(asked, answer)
            raise
        finally:
            self._engine.cancel(result)
        self._remember(asked, answer)

    def _remember(self, asked: TextMessage, answer: str) -> None:
        self.messages += [asked, {"role": "assistant", "content": answer}]

    def _prompt(self, messages: Sequence[TextMessage]) -> list[int]:
        """Encode the newest messages that leave room for a reply, after the system message.

        The last message is always included.
        """
        recent = list(messages[len(self._system) :])
        context = self._engine.decoder.max_seq_len
        room = context + 1 - min(self._config.max_new_tokens, context // REPLY_SHARE)
        tokens = self._format.encode([*self._system, *recent])
        while len(tokens) > room and len(recent) > 1:
            recent = recent[2:]
            tokens = self._format.encode([*self._system, *recent])
        if len(tokens) > context and self._config.truncate == "refuse":
            given = "system message and the message have" if self._system else "message has"
            raise WorkhorseError(
                f"the {given} {len(tokens)} tokens and the context is {context}; "
                "send a shorter message"
            )
        self.forgotten = len(messages) - len(self._system) - len(recent)
        return tokens
