"""Checks of the arguments of a generation, and streaming of its tokens as text."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, cast

from workhorse.config.arguments import token_ids
from workhorse.errors import WorkhorseError, shown
from workhorse.execute.backend import Backend, backend_of
from workhorse.generate.config import GenerationConfig
from workhorse.nn import Decoder


class TokenStream(Protocol):
    """Decodes token ids one by one; only complete characters are returned."""

    def push(self, token: int, /) -> str: ...

    def finish(self) -> str: ...


class StopScanner:
    """Cuts streamed text before the first stop string.

    Text that may be the beginning of a stop string is held back until more text shows if it is. The
    first stop string is the one that *ends* first, or the longest of several that end there. So the
    result does not depend on how the text is split over calls.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Add text; returns the text that is now certain to precede any stop string."""
        if self.stopped:
            return ""
        text = self._held + text
        ends = [(text.index(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            self.stopped = True
            self._held = ""
            end, negative_length = min(ends)
            return text[: end + negative_length]
        certain = len(text) - self._undecided(text)
        self._held = text[certain:]
        return text[:certain]

    def finish(self) -> str:
        """Return the text that is still held back; call it at the end of the completion."""
        held, self._held = self._held, ""
        return held

    def _undecided(self, text: str) -> int:
        """Length of the longest suffix of `text` that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class TextStream:
    """Decodes the tokens of one completion, up to a stop string. Returned text is final."""

    def __init__(self, tokens: TokenStream, stops: Sequence[str]) -> None:
        self._tokens = tokens
        self._scanner = StopScanner(stops)

    @property
    def stopped(self) -> bool:
        """True if a stop string is complete; no text is returned after it."""
        return self._scanner.stopped

    def push(self, token: int) -> str:
        return self._scanner.push(self._tokens.push(token))

    def finish(self) -> str:
        """Return the text still held back. An incomplete character becomes U+FFFD."""
        return self._scanner.push(self._tokens.finish()) + self._scanner.finish()


class StreamingTokenizer(Protocol):
    """The interface of a tokenizer for generation, such as `workhorse.tokenizers.Tokenizer`."""

    vocab_size: int
    eos_id: int | None

    def stream(
        self,
        *,
        skip_special: bool = False,
        shown: Collection[int] = (),
        after: Sequence[int] = (),
    ) -> TokenStream: ...


def checked_models(
    decoder: object, draft: object, tokenizer: object
) -> tuple[Backend, Backend | None]:
    """Check the types of a model, a draft model and a tokenizer; return the models' backends.

    Raises:
        WorkhorseError: an argument has the wrong type.
    """
    for name, model in {"decoder": decoder, "draft": draft}.items():
        if not isinstance(model, Decoder | Backend) and (model is not None or name == "decoder"):
            raise WorkhorseError(f"{name}={shown(model)} is not a decoder; give a model's .backend")
    if tokenizer is not None and not hasattr(tokenizer, "stream"):
        raise WorkhorseError(
            f"tokenizer={shown(tokenizer)} is not a tokenizer; give a model's .tokenizer, or omit "
            "it"
        )
    model, guesser = cast(Decoder | Backend, decoder), cast(Decoder | Backend | None, draft)
    return backend_of(model), None if guesser is None else backend_of(guesser)


def checked_adapters(
    backend: Backend, adapters: Mapping[str, Decoder | Backend]
) -> dict[str, Backend]:
    """Check that decoders with adapters can use the cache of the decoder without.

    Returns:
        Their backends.

    Raises:
        WorkhorseError: one is not a decoder, or of another model, device or dtype.
    """

    def kind(one: Backend) -> object:
        decoder = one.decoder
        return decoder.config, decoder.device, next(decoder.parameters()).dtype

    checked = {name: checked_models(one, None, None)[0] for name, one in adapters.items()}
    for name, one in checked.items():
        if kind(one) != kind(backend):
            raise WorkhorseError(
                f"adapter {shown(name)} is not a decoder of the engine's model, device and dtype; "
                "give the decoder that Model.with_adapter makes"
            )
    return checked


def checked_config(config: object) -> GenerationConfig:
    """Return `config`, or the default options if it is None.

    Raises:
        WorkhorseError: `config` is neither a GenerationConfig nor None.
    """
    if not isinstance(config, GenerationConfig | None):
        raise WorkhorseError(
            f"config={shown(config)} is not a GenerationConfig; give one, or omit it"
        )
    return config or GenerationConfig()


def prompt_list(prompts: object) -> list[Any]:
    """Convert an iterable of prompts to a list.

    Raises:
        WorkhorseError: `prompts` is a string, or not an iterable.
    """
    if isinstance(prompts, str | bytes) or not isinstance(prompts, Iterable):
        raise WorkhorseError(f"prompts={shown(prompts)} is not a list; give a list of prompts")
    return list(cast(Iterable[Any], prompts))


def check_prompts(
    decoder: Decoder,
    prompts: Sequence[Sequence[int]],
    config: GenerationConfig,
    tokenizer: StreamingTokenizer | None,
) -> list[list[int]]:
    """Convert prompts to lists of token ids; `truncate="left"` drops tokens that do not fit.

    Raises:
        WorkhorseError: a prompt is empty or longer than the context (unless `truncate="left"`), an
            id is outside the vocabulary, or there are stop strings without a tokenizer.
    """
    if config.stop and tokenizer is None:
        raise WorkhorseError("stop strings need a tokenizer; pass one, or use stop_tokens")
    size, usable = decoder.config.vocab_size, usable_vocab(decoder, tokenizer)
    # Published configs have stop tokens without a string; such tokens are never generated.
    for option, most in (("logit_bias", usable), ("stop_tokens", size)):
        for token in getattr(config, option) or ():
            _check_id(token, most, f"of {option} ", f"choose 0 to {most - 1}")
    fix = "use the model's own tokenizer"
    if tokenizer is not None and tokenizer.vocab_size > size:
        fix = f"the tokenizer has {tokenizer.vocab_size} tokens, more than the embedding: {fix}"
    for token in stop_tokens(config, tokenizer):
        _check_id(token, size, "", fix)
    rule, remedy = "a prompt is a sequence of token ids", "give one list of integers per prompt"
    ids = (token_ids(prompt, rule, remedy) for prompt in prompts)
    return [_fit(prompt, decoder.max_seq_len, usable, config, fix) for prompt in ids]


def check_functions(name: str, functions: object) -> tuple[Any, ...]:
    """Check a list of functions, and return it as a tuple. `name` is its name in error messages.

    Raises:
        WorkhorseError: `functions` is not a list, or one of its items is not callable.
    """
    if not isinstance(functions, Iterable) or isinstance(functions, str):
        raise WorkhorseError(f"{name}={shown(functions)} is not a list of functions; give a list")
    checked = tuple(cast(Iterable[object], functions))
    for function in checked:
        if not callable(function):
            raise WorkhorseError(
                f"{name} contains {shown(function)}, which is not a function; remove it"
            )
    return checked


def check_draft(
    backend: Backend,
    draft: Backend | None,
    speculate: int,
    tokenizer: StreamingTokenizer | None,
) -> None:
    """Check that a draft model can guess tokens for a decoder (speculative decoding).

    Raises:
        WorkhorseError: `speculate` is 0, or the vocabularies differ.
    """
    if draft is None:
        return
    if speculate == 0:
        raise WorkhorseError(
            "a draft has no effect with speculate=0; set speculate=4, or omit the draft"
        )
    # With a tokenizer the number of ids in use is known, so embeddings may be padded differently.
    ours, theirs = backend.decoder.config, draft.decoder.config
    vocab = usable_vocab(backend.decoder, tokenizer)
    if theirs.vocab_size != ours.vocab_size and (tokenizer is None or theirs.vocab_size < vocab):
        raise WorkhorseError(
            f"the draft has a vocabulary of {theirs.vocab_size} and the model one of {vocab}; "
            "choose a draft with the model's own tokenizer"
        )


def check_exact(
    backend: Backend, config: GenerationConfig, speculate: int, *, has_draft: bool
) -> None:
    """Check that guesses change no bit of an exact completion.

    Args:
        backend: the model.
        config: the options of the completion.
        speculate: the number of guesses that a pass may have.
        has_draft: True if a draft model guesses.

    Raises:
        WorkhorseError: they can change it.
    """
    if config.exact and speculate and not backend.is_invariant:
        raise WorkhorseError(
            f"exact is not possible with speculate={speculate}: the bits of this decoder's logits "
            "depend on the length of a pass (Backend.is_invariant is False); set speculate=0"
        )
    if config.exact and config.speculate and has_draft and config.samples:
        raise WorkhorseError(
            f"exact is not possible with a draft at temperature={config.temperature:g}: its random "
            "guesses change which tokens are drawn; omit the draft"
        )


def _fit(
    prompt: list[int], context: int, vocab: int, config: GenerationConfig, fix: str
) -> list[int]:
    if not prompt:
        raise WorkhorseError(
            "the prompt is empty, and this model has no start token; give at least one token"
        )
    for token in (min(prompt), max(prompt)):
        _check_id(token, vocab, "", fix)
    if len(prompt) > context and config.truncate == "refuse":
        raise WorkhorseError(
            f"the prompt has {len(prompt)} tokens and the context is {context}; shorten it, or "
            "set truncate to left, which keeps its end"
        )
    if config.beams == 1:
        return prompt[-context:]
    # Beam search cannot drop tokens while it runs, so they are dropped beforehand.
    keep = context + 1 - config.max_new_tokens
    if config.truncate == "left" and keep < 1:
        raise WorkhorseError(
            f"max_new_tokens={config.max_new_tokens} does not fit into the context of {context}, "
            "and beam search cannot exceed it; reduce max_new_tokens"
        )
    return prompt[-keep:] if config.truncate == "left" else prompt


def _check_id(token: int, vocab: int, whose: str, remedy: str) -> None:
    if not 0 <= token < vocab:
        raise WorkhorseError(
            f"token id {shown(token)} {whose}is not in the vocabulary of {vocab}; {remedy}"
        )


def usable_vocab(decoder: Decoder, tokenizer: StreamingTokenizer | None) -> int:
    """Return the number of token ids that may be generated.

    It is less than the vocabulary size if the embedding has more rows than the tokenizer has ids.
    """
    size = decoder.config.vocab_size
    return size if tokenizer is None else min(size, tokenizer.vocab_size)


def stop_tokens(config: GenerationConfig, tokenizer: StreamingTokenizer | None) -> frozenset[int]:
    """Return the ids that end a completion: `config.stop_tokens`, or eos if that is None."""
    if config.stop_tokens is not None:
        return frozenset(config.stop_tokens)
    eos = tokenizer.eos_id if tokenizer is not None else None
    return frozenset() if eos is None else frozenset({eos})
