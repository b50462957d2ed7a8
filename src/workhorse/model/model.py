"""A loaded model: decoder, tokenizer and defaults, and its description."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.stored import (
    StoredModel,
    is_stored,
    model_name,
    no_such_model,
    open_stored,
    weights_on_disk,
)
from workhorse.data import Beginning, DataConfig, beginning
from workhorse.devices.memory import size
from workhorse.errors import WorkhorseError, shown
from workhorse.execute.body import Execution
from workhorse.execute.choose import DecodingBody, decoding_body
from workhorse.generate import Completion, Delta, GenerationConfig, generate, stream
from workhorse.generate.checks import token_ids
from workhorse.generate.conversation import (
    ChatFormat,
    Conversation,
    TemplateFormat,
    TranscriptFormat,
)
from workhorse.models import find_preset, preset_names
from workhorse.models.describe import details, facts
from workhorse.models.huggingface import Family
from workhorse.nn import Decoder, DecoderConfig
from workhorse.tokenizers import ChatTemplate, Tokenizer


def describe(
    model: str | Path, *, tell: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """A model's shape, parameters, weights on disk, tokenizer and config, in plain data.

    Args:
        model: what `load` takes. Of a model on the hub all but the weights is fetched.
        tell: called with the commit that a name on the hub stands for.

    Returns:
        As `workhorse.models.describe.details` for a preset. For a stored model, beside what its
        config tells: `weights` (`bytes`, and `types`, bytes of each; None where there are none),
        `step` (of a run's newest checkpoint), `tokenizer` (None where there is none), `notes`, and
        `stored`, the same in sentences.

    Raises:
        WorkhorseError: there is no such model, or its files cannot be read.
    """
    name = model_name(model)
    if not is_stored(name):
        if name in preset_names():
            return details(find_preset(name))
        raise no_such_model(name)
    stored = open_stored(model, tell, weights=False)
    config = stored.config
    found = facts(name, stored.kind, config)
    if stored.family is not None:
        found["exports_as"] = stored.family.architecture
    found |= {"step": None, "weights": None, "notes": list(stored.remarks)}
    if isinstance(stored, RunDirectory):
        found["step"] = next(iter(stored.store().steps()), None)
    if held := weights_on_disk(stored):
        types = {name: of_type.bytes for name, of_type in held.items()}
        found["weights"] = {"bytes": sum(types.values()), "types": types}
    found["tokenizer"] = _tokenizer(stored)
    return found | {"stored": list(_sentences(found)), "config": config.to_dict()}


def _tokenizer(stored: StoredModel) -> dict[str, Any] | None:
    if not stored.has_tokenizer:
        return None
    try:
        tokenizer: Tokenizer = stored.tokenizer()
    except WorkhorseError as error:  # the model is there all the same
        return {"error": str(error)}
    return {
        "vocab_size": tokenizer.vocab_size,
        "special_tokens": len(tokenizer.special_tokens),
        "chat_template": bool(tokenizer.chat_templates),
        "fingerprint": tokenizer.fingerprint,
    }


def _sentences(found: dict[str, Any]) -> Iterator[str]:
    step = f", step {found['step']:,}" if found["step"] is not None else ""
    yield f"Stored as: {found['kind']}{step}."
    if found["weights"] is None:
        yield "Weights: none here."
    else:
        types = " and ".join(found["weights"]["types"])
        yield f"Weights: {size(found['weights']['bytes'])} in {types}."
    match found["tokenizer"]:
        case None:
            yield "Tokenizer: none."
        case {"error": reason}:
            yield f"Tokenizer: cannot be read: {reason}."
        case tokenizer:
            template = "with" if tokenizer["chat_template"] else "without"
            yield (
                f"Tokenizer: {tokenizer['vocab_size']:,} tokens, {tokenizer['special_tokens']} of "
                f"them special, {template} a chat template, {tokenizer['fingerprint'][:16]}."
            )


@dataclass(frozen=True)
class Model:
    """A decoder and what is needed to use it with text."""

    name: str
    """What it was loaded from."""
    decoder: Decoder
    """As it is executed: a body of `reference`, or that itself."""
    tokenizer: Tokenizer | None
    """None where a directory holds none: such a model reads and writes token ids."""
    trained: bool
    """Whether the weights were learned; those of a preset are random."""
    data: DataConfig | None = None
    """What a run was trained on."""
    stop_tokens: tuple[int, ...] = ()
    """What ends a text; empty: the tokenizer's eos."""
    trained_to_chat: bool = False
    """Whether it knows its tokenizer's chat template: a run does if it began with a model whose
    tokenizer has one, not if it began with fresh weights."""
    family: Family | None = None
    """The model type of the Hugging Face directory or GGUF file it was loaded from."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Options of `generation_config.json` for sampling: the defaults of options given by name."""
    body: DecodingBody | None = None
    """What `executed` made; None: `decoder` is as its config builds it."""
    built: Decoder | None = None
    """What it was made from."""

    @property
    def reference(self) -> Decoder:
        """The decoder as its config builds it, with the same parameters: every hook fires."""
        return self.decoder if self.built is None else self.built

    @property
    def announcement(self) -> str:
        """One line: by what the decoder runs; see `DecodingBody.announcement`."""
        body = self.body or decoding_body(self.decoder, "reference")
        return body.announcement

    def executed(self, execution: Execution = "auto") -> "Model":
        """The same model, run by other means.

        Args:
            execution: see `Execution`.

        Raises:
            WorkhorseError: it cannot be executed so.
        """
        body = decoding_body(self.reference, execution)
        return replace(self, decoder=body.decoder, body=body, built=self.reference)

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def text(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            WorkhorseError: there is none.
        """
        if self.tokenizer is None:
            raise WorkhorseError(f"{self.name} has no tokenizer; put its files beside the weights")
        return self.tokenizer

    @property
    def prefix(self) -> tuple[int, ...]:
        """The tokens that began every text of the training."""
        return () if self.tokenizer is None else self._beginning.prefix

    @property
    def start(self) -> int | None:
        """The token before a text: the last of `prefix`, or what ended the text before.

        Of a model from elsewhere that has no prefix, bos or else eos; of one that was never
        trained, none. See `workhorse.data.config`.
        """
        return self._beginning.start

    @property
    def _beginning(self) -> Beginning:
        found = beginning(self.text, self.data)
        return found if self.trained or found.prefix else Beginning((), None)

    def encode(self, prompt: str) -> list[int]:
        """A prompt's tokens as training would have begun them.

        A text begins with `prefix`. An empty prompt asks for a text from its beginning, which
        after training without a prefix is the eos of the one before.

        Raises:
            WorkhorseError: there is no tokenizer, or this is no text.
        """
        if not isinstance(prompt, str):
            raise WorkhorseError(f"a prompt to encode is a text, not {shown(prompt)}; give a str")
        return self._beginning.encode(self.text, prompt)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of token ids: of what `encode` gives, the prompt.

        Args:
            tokens: a list, or a tensor of one dimension.
            skip_special: leave out special tokens, such as `prefix`; else their names are written.

        Raises:
            WorkhorseError: there is no tokenizer, or these are no ids of it.
        """
        ids = token_ids(tokens, "tokens are a sequence of token ids", "give those of one text")
        return self.text.decode(ids, skip_special=skip_special)

    def generate(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        draft: "Model | None" = None,
        **options: Any,
    ) -> Completion:
        """Continue one prompt: a text, or token ids.

        Args:
            prompt: what to continue.
            config: how; or give `options`, the fields of `GenerationConfig`.
            draft: a smaller model with the same tokenizer, to guess `speculate` tokens at a time.
            options: see `config`.

        Raises:
            WorkhorseError: as `workhorse.generate.generate`; or `n_samples` above 1.
        """
        config = self._config(config, options)
        if config.n_samples > 1:
            raise WorkhorseError(
                f"n_samples={config.n_samples} gives several texts; use generate_batch([prompt])"
            )
        return self.generate_batch([prompt], config, draft=draft)[0]

    def generate_batch(
        self,
        prompts: Sequence[str | Sequence[int]],
        config: GenerationConfig | None = None,
        *,
        draft: "Model | None" = None,
        batch_size: int = 32,
        **options: Any,
    ) -> list[Completion]:
        """Continue several prompts, see `workhorse.generate.generate`."""
        if isinstance(prompts, str):
            raise WorkhorseError(f"{shown(prompts)} is one prompt; give a list, or use generate")
        if not isinstance(prompts, Iterable):
            raise WorkhorseError(f"prompts are a list of texts or token ids, not {shown(prompts)}")
        return generate(
            self.decoder,
            [self._tokens(prompt) for prompt in prompts],
            self._config(config, options),
            tokenizer=self.tokenizer,
            draft=self.guesser(draft),
            batch_size=batch_size,
        )

    def stream(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        draft: "Model | None" = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Continue one prompt, giving each token as it is chosen."""
        return stream(
            self.decoder,
            [self._tokens(prompt)],
            self._config(config, options),
            tokenizer=self.tokenizer,
            draft=self.guesser(draft),
        )

    def chat(
        self,
        config: GenerationConfig | None = None,
        *,
        system: str = "",
        template: str = "default",
        draft: "Model | None" = None,
        **options: Any,
    ) -> Conversation:
        """A conversation, in the form of its chat template if it was trained to chat.

        A model that was not trained to chat continues a written dialogue.

        Args:
            config: how replies are chosen; or give `options`.
            system: what the model is told beforehand.
            template: the name of the chat template, if the tokenizer has several.
            draft: see `generate`.
            options: the fields of `GenerationConfig`.

        Raises:
            WorkhorseError: there is no tokenizer, or its template cannot be used.
        """
        form: ChatFormat = TranscriptFormat(self.text, self.prefix)
        if self.trained_to_chat:
            form = TemplateFormat(ChatTemplate.of(self.text, template), self.text)
        return Conversation(
            self.decoder,
            self.text,
            form,
            self._config(config, options),
            system=system,
            draft=self.guesser(draft),
        )

    def guesser(self, draft: "Model | None") -> Decoder | None:
        """The decoder of a draft for this model.

        Raises:
            WorkhorseError: its tokenizer has another vocabulary.
        """
        if draft is None:
            return None
        if not isinstance(draft, Model):
            raise WorkhorseError(f"a draft is a Model, as load gives it, not {shown(draft)}")
        ours, theirs = self.tokenizer, draft.tokenizer
        if ours is not None and theirs is not None and ours.vocabulary != theirs.vocabulary:
            raise WorkhorseError(
                f"the tokenizers of {draft.name} and {self.name} have different vocabularies; "
                "choose a draft with the model's own tokenizer"
            )
        return draft.decoder

    def with_sampling(self, config: GenerationConfig, given: Collection[str]) -> GenerationConfig:
        """A config that samples, with the model's own options except those in `given`."""
        own = {name: value for name, value in self.sampling.items() if name not in given}
        return config.replace(**own) if config.samples and own else config

    def _config(self, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
        """The request in full: with every token that ends a text.

        They are the model's, and special tokens that `stop` names: those never are in a text.
        """
        if config is None:
            config = self.with_sampling(GenerationConfig(**options), options)
        elif not isinstance(config, GenerationConfig):
            raise WorkhorseError(
                f"{shown(config)} is no GenerationConfig; give options by name, as max_new_tokens=9"
            )
        elif options:
            config = config.replace(**options)
        special = {} if self.tokenizer is None else self.tokenizer.special_tokens
        named = [special[stop] for stop in config.stop if stop in special]
        ends = config.stop_tokens
        if ends is None and (self.stop_tokens or named):
            eos = None if self.tokenizer is None else self.tokenizer.eos_id
            ends = self.stop_tokens or (() if eos is None else (eos,))
        return config if ends is None else config.replace(stop_tokens=(*ends, *named))

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        rule = "a prompt is a text or a sequence of token ids"
        return token_ids(prompt, rule, "give several texts to generate_batch")
