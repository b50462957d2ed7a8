"""`Model`: a decoder with its tokenizer. `describe`: facts about a model on disk or the hub."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workhorse.checkpoints import RunDirectory
from workhorse.checkpoints.huggingface.export import huggingface_tensors
from workhorse.checkpoints.sizes import weights_on_disk
from workhorse.checkpoints.stored import (
    StoredModel,
    add_stored_adapter,
    is_stored,
    model_name,
    no_such_model,
    open_stored,
)
from workhorse.config.arguments import token_ids
from workhorse.data import DataConfig, SequenceStart, sequence_start
from workhorse.data.documents import Document
from workhorse.devices.memory import size
from workhorse.errors import WorkhorseError, shown
from workhorse.evaluate import Evaluation, evaluate
from workhorse.execute.backend import Backend
from workhorse.execute.body import Execution, sharing_copy
from workhorse.execute.choose import decoding_backend
from workhorse.files.text_formats import to_path
from workhorse.generate import Completion, Delta, GenerationConfig, generate, stream
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
from workhorse.nn.attention.kernels import KernelName
from workhorse.tokenizers import ChatTemplate, Tokenizer
from workhorse.transforms.adapters import adapters_of, merge_adapter


def describe(
    model: str | Path, *, notify: Callable[[str], object] = lambda line: None
) -> dict[str, Any]:
    """Describe a model's shape, parameters, weights on disk, tokenizer and config, in plain data.

    Args:
        model: path, hub id or preset name; see `load`. For a model on the hub, all files but the
            weights are downloaded.
        notify: called with the commit that a name on the hub refers to.

    Returns:
        For a preset, the result of `workhorse.models.describe.details`. For a stored model, the
        result of `facts` in the same module, `config`, `weights` (`bytes`, and `types`, the bytes
        of each dtype), `step` of a run's newest checkpoint, `tokenizer`, `notes` about the files,
        and `stored`: step, weights and tokenizer in sentences. A missing item is None.

    Raises:
        WorkhorseError: there is no such model, or its files cannot be read.
    """
    name = model_name(model)
    if not is_stored(name):
        if name in preset_names():
            return details(find_preset(name))
        raise no_such_model(name)
    stored = open_stored(model, notify, weights=False)
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
    except WorkhorseError as error:  # the model can be described without it
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
    """A decoder with its tokenizer and its default generation options."""

    name: str
    """Path or name that the model was loaded from."""
    reference: Decoder
    """The decoder with the modules that its config builds; PyTorch hooks work on all of them."""
    tokenizer: Tokenizer | None
    """The tokenizer; None if there is none. Prompts and completions are then token ids."""
    trained: bool
    """True if the weights were trained; a preset's weights are random."""
    data: DataConfig | None = None
    """Data config of the training run that the model was loaded from; None for other sources."""
    stop_tokens: tuple[int, ...] = ()
    """Token ids that end a completion. If empty, the tokenizer's eos ends it."""
    trained_to_chat: bool = False
    """True if the model was trained with its tokenizer's chat template. False for a training run
    that started from random weights, even if its tokenizer has a template."""
    family: Family | None = None
    """The model type of the Hugging Face directory or GGUF file that the model was loaded from."""
    sampling: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Sampling options of `generation_config.json`, used if a call gives no `GenerationConfig`."""
    executed: Backend | None = None
    """The result of `with_execution`; None: the modules of `reference` are called."""

    @property
    def backend(self) -> Backend:
        """The way in which the model generates; it executes `decoder`."""
        return self.executed or decoding_backend(self.reference, "reference")

    @property
    def decoder(self) -> Decoder:
        """The decoder that is executed: `reference`, or a copy of it with faster modules.

        The copy has the parameters of `reference`, but not its hooks. Its own hooks are called.
        """
        return self.reference if self.executed is None else self.executed.decoder

    @property
    def announcement(self) -> str:
        """One line that describes how the decoder is executed; see `Backend.announcement`."""
        return self.backend.announcement

    def with_execution(self, execution: Execution = "auto", *, exact: bool = False) -> "Model":
        """Return the same model, executed in another way.

        Args:
            execution: see `Execution`.
            exact: True to compute logits that are bitwise independent of the batch, if native
                operators can; see `Backend.is_invariant`.

        Raises:
            WorkhorseError: the model cannot be executed this way.
        """
        executed = decoding_backend(self.reference, execution, exact=exact)
        return replace(self, executed=executed)

    def with_adapter(
        self, adapter: str | Path, execution: Execution = "auto", *, exact: bool = False
    ) -> "Model":
        """Return a model with an adapter. It shares the weights of this one, which has none.

        Args:
            adapter: a PEFT directory, or a run that trained an adapter on this model.
            execution: see `with_execution`.
            exact: see `with_execution`.

        Raises:
            WorkhorseError: there is no such adapter, it belongs to another model, or this model has
                an adapter or random weights.
        """
        if not is_stored(self.name):
            raise WorkhorseError(
                f"{self.name} is a preset, which has no weights to adapt; give a model"
            )
        if adapters_of(self.reference):
            raise WorkhorseError(f"{self.name} has an adapter; add {adapter} to its base")
        stored, decoder = open_stored(self.name, weights=False), sharing_copy(self.reference)
        add_stored_adapter(decoder, stored, to_path(adapter, "an adapter is a path"), "default")
        return replace(self, reference=decoder).with_execution(execution, exact=exact)

    def merged(self, kernel: KernelName = "auto") -> "Model":
        """Return the same model with its active adapter added to the weights, as a reference.

        Args:
            kernel: the implementation of attention.

        Raises:
            WorkhorseError: the adapter cannot be merged; see `merge_adapter`.
        """
        return replace(self, reference=merge_adapter(self.reference, kernel), executed=None)

    def huggingface_tensors(self, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield the current weights by their names in a Hugging Face directory, for another engine.

        Names, values and order are the same as in `convert(..., to="hf")`. An adapter is added to
        the weights. A tensor may share memory with the model: copy it if training continues before
        it is used.

        Args:
            dtype: dtype of the tensors, except those that are always float32; None: the model's.

        Raises:
            WorkhorseError: no transformers class can represent the model, or it is quantised.
        """
        model = self.merged() if adapters_of(self.reference) else self
        return huggingface_tensors(model.reference, self.family, dtype)

    @property
    def config(self) -> DecoderConfig:
        return self.decoder.config

    @property
    def text(self) -> Tokenizer:
        """The tokenizer.

        Raises:
            WorkhorseError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise WorkhorseError(
                f"{self.name} has no tokenizer; put tokenizer files beside the weights"
            )
        return self.tokenizer

    @property
    def prefix(self) -> tuple[int, ...]:
        """Token ids with which every training document begins."""
        return () if self.tokenizer is None else self.beginning.prefix

    @property
    def start(self) -> int | None:
        """Id of the token before a document's text in the training data; None if there is none.

        It is the last token of `prefix`. If `prefix` is empty, it is the eos of the previous
        document. If the training data is unknown, as for a downloaded model, it is bos, or eos if
        there is no bos.
        """
        return self.beginning.start

    @property
    def beginning(self) -> SequenceStart:
        found = sequence_start(self.text, self.data)
        return found if self.trained or found.prefix else SequenceStart((), None)

    def encode(self, prompt: str) -> list[int]:
        """Encode a prompt as the beginning of a training document.

        The result begins with `prefix`. For an empty prompt without a prefix, it is `start`.

        Raises:
            WorkhorseError: the model has no tokenizer, or the prompt is not a string.
        """
        if not isinstance(prompt, str):
            raise WorkhorseError(f"prompt={shown(prompt)} is not a string; give a str")
        return self.beginning.encode(self.text, prompt)

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Decode token ids to a string; the inverse of `encode`.

        Ids of the decoder that have no token (a padded vocabulary) add nothing.

        Args:
            tokens: a list, or a tensor of one dimension.
            skip_special: True to omit special tokens, such as `prefix`; False to write their names.

        Raises:
            WorkhorseError: the model has no tokenizer, or an id is not in the vocabulary.
        """
        ids = token_ids(tokens, "tokens are a sequence of token ids", "give one list of integers")
        extra = range(self.text.vocab_size, self.decoder.config.vocab_size)
        return self.text.decode([one for one in ids if one not in extra], skip_special=skip_special)

    def generate(
        self,
        prompt: str | Sequence[int],
        config: GenerationConfig | None = None,
        *,
        draft: "Model | None" = None,
        **options: Any,
    ) -> Completion:
        """Continue one prompt: a string, or token ids.

        Args:
            prompt: the prompt.
            config: the generation options; None for the model's defaults.
            draft: a smaller model with the same tokenizer, for speculative decoding. It proposes
                `speculate` tokens at a time.
            options: fields of `GenerationConfig`, which override `config`.

        Raises:
            WorkhorseError: see `workhorse.generate.generate`; or `n_samples` is above 1.
        """
        config = self._config(config, options)
        if config.n_samples > 1:
            raise WorkhorseError(
                f"n_samples={config.n_samples} returns several completions; use "
                "generate_batch([prompt])"
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
        """Continue several prompts; see `workhorse.generate.generate`."""
        if isinstance(prompts, str):
            raise WorkhorseError(f"prompts={shown(prompts)} is one string; give a list of prompts")
        if not isinstance(prompts, Iterable):
            raise WorkhorseError(
                f"prompts={shown(prompts)} is not a list; give a list of strings or of token ids"
            )
        return generate(
            self.backend,
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
        """Continue one prompt; yields each token as it is chosen.

        For the arguments see `generate`.
        """
        return stream(
            self.backend,
            [self._tokens(prompt)],
            self._config(config, options),
            tokenizer=self.tokenizer,
            draft=self.guesser(draft),
        )

    def evaluate(self, texts: Iterable[str], **options: Any) -> Evaluation:
        """Measure loss, perplexity and bits per byte; each string is a document.

        For the options `context`, `stride`, `batch_size` and `progress`, and for errors, see
        `workhorse.evaluate.evaluate`.
        """
        documents = [] if isinstance(texts, str) else [Document("", text) for text in texts]
        if isinstance(texts, str) or not all(isinstance(one.text, str) for one in documents):
            raise WorkhorseError(f"texts={shown(texts)} is not a list of strings; pass one")
        return evaluate(self.decoder, self.text, documents, start=self.start, **options)

    def chat(
        self,
        config: GenerationConfig | None = None,
        *,
        system: str = "",
        template: str = "default",
        draft: "Model | None" = None,
        **options: Any,
    ) -> Conversation:
        """Start a conversation, with the chat template if the model was trained to chat.

        A model that was not trained to chat continues a plain-text dialogue.

        Args:
            config: the generation options for replies; None for the model's defaults.
            system: the system message.
            template: the name of the chat template, if the tokenizer has several.
            draft: see `generate`.
            options: fields of `GenerationConfig`, which override `config`.

        Raises:
            WorkhorseError: the model has no tokenizer, or the chat template cannot be used.
        """
        return Conversation(
            self.backend,
            self.text,
            self.chat_format(template),
            self._config(config, options),
            system=system,
            draft=self.guesser(draft),
        )

    def chat_format(self, template: str = "default") -> ChatFormat:
        """Return the format of messages: a chat template, or a plain dialogue; see `chat`."""
        if self.trained_to_chat:
            return TemplateFormat(ChatTemplate.of(self.text, template), self.text)
        if template != "default":
            raise WorkhorseError(
                f"chat template {template!r} has no effect: {self.name} was not trained to chat; "
                "omit it"
            )
        return TranscriptFormat(self.text, self.prefix)

    def guesser(self, draft: "Model | None") -> Backend | None:
        """Return the backend of a draft model for speculative decoding; None without a draft.

        Raises:
            WorkhorseError: `draft` is not a `Model`, or its tokenizer has another vocabulary.
        """
        if draft is None:
            return None
        if not isinstance(draft, Model):
            raise WorkhorseError(f"draft={shown(draft)} is not a Model; give one from load")
        ours, theirs = self.tokenizer, draft.tokenizer
        if ours is not None and theirs is not None and ours.vocabulary != theirs.vocabulary:
            raise WorkhorseError(
                f"the tokenizers of {draft.name} and {self.name} have different vocabularies; "
                "choose a draft with the model's own tokenizer"
            )
        return draft.backend

    def with_sampling(self, config: GenerationConfig, given: Collection[str]) -> GenerationConfig:
        """Return a config with the model's sampling options, except those named in `given`.

        Greedy decoding uses only their `repetition_penalty`, and beam search none.
        """
        own = {name: value for name, value in self.sampling.items() if name not in given}
        if not config.samples:
            used = own.keys() & {"repetition_penalty"} if config.beams == 1 else ()
            own = {name: own[name] for name in used}
        return config.replace(**own) if own else config

    def _config(self, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
        """The complete config, with all token ids that end a completion.

        These are the config's or the model's stop tokens, and special tokens named in `stop`. They
        are not searched as strings, because decoded text does not contain special tokens.
        """
        if config is None:
            config = self.with_sampling(GenerationConfig(**options), options)
        elif not isinstance(config, GenerationConfig):
            raise WorkhorseError(
                f"{shown(config)} is not a GenerationConfig; give options by name, such as "
                "max_new_tokens=9"
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
        rule = "a prompt is a string or a sequence of token ids"
        return token_ids(prompt, rule, "use generate_batch for several prompts")
