"""`workhorse.load`: a model by the name of what holds it, with its tokenizer."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from workhorse.checkpoints import (
    Places,
    RunDirectory,
    mapped_weights,
    weights_in_large_pages,
)
from workhorse.checkpoints.room import check_random, check_stored
from workhorse.checkpoints.run_directory import DAMAGED_RECIPE
from workhorse.checkpoints.stored import (
    StoredModel,
    is_stored,
    model_name,
    no_such_model,
    open_stored,
)
from workhorse.config import ConfigError
from workhorse.data import Beginning, DataConfig, beginning
from workhorse.devices import resolve_device, resolve_dtype
from workhorse.errors import WorkhorseError, warn_caller
from workhorse.generate import Completion, Delta, GenerationConfig, PrefixCache, generate, stream
from workhorse.generate.conversation import (
    ChatFormat,
    Conversation,
    TemplateFormat,
    TranscriptFormat,
)
from workhorse.generate.requests import token_ids
from workhorse.models import preset, preset_names
from workhorse.models.huggingface import Family
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.kernels import KernelName
from workhorse.tokenizers import BytesConfig, ChatTemplate, Tokenizer, train_tokenizer
from workhorse.transforms.codes import FORMATS, FormatName
from workhorse.transforms.inference import prepare_for_inference
from workhorse.transforms.quantize import place_codes
from workhorse.transforms.quantize import quantize as quantize_weights
from workhorse.untrusted import shown

Quantization = Literal["none", FormatName]


@dataclass(frozen=True)
class Model:
    """A decoder and what is needed to use it with text."""

    name: str
    """What it was loaded from."""
    decoder: Decoder
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
        trained, none. See `workhorse.data.beginning`.
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
        prefix: PrefixCache | None = None,
        **options: Any,
    ) -> Iterator[Delta]:
        """Continue one prompt, giving each token as it is chosen."""
        return stream(
            self.decoder,
            [self._tokens(prompt)],
            self._config(config, options),
            tokenizer=self.tokenizer,
            draft=self.guesser(draft),
            prefix=prefix,
        )

    def chat(
        self,
        config: GenerationConfig | None = None,
        *,
        system: str = "",
        draft: "Model | None" = None,
        **options: Any,
    ) -> Conversation:
        """A conversation, in the form of its chat template if it was trained to chat.

        A model that was not trained to chat continues a written dialogue.

        Args:
            config: how replies are chosen; or give `options`.
            system: what the model is told beforehand.
            draft: see `generate`.
            options: the fields of `GenerationConfig`.

        Raises:
            WorkhorseError: there is no tokenizer, or its template cannot be used.
        """
        form: ChatFormat = TranscriptFormat(self.text, self.prefix)
        if self.trained_to_chat:
            form = TemplateFormat(ChatTemplate.of(self.text), self.text)
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

    def _config(self, config: GenerationConfig | None, options: dict[str, Any]) -> GenerationConfig:
        """The request in full: a model with several tokens that end a text stops at each."""
        if config is None:
            config = GenerationConfig(**options)
        elif not isinstance(config, GenerationConfig):
            raise WorkhorseError(
                f"{shown(config)} is no GenerationConfig; give options by name, as max_new_tokens=9"
            )
        elif options:
            config = config.replace(**options)
        if config.stop_tokens is None and self.stop_tokens:
            return config.replace(stop_tokens=self.stop_tokens)
        return config

    def _tokens(self, prompt: str | Sequence[int]) -> list[int]:
        if isinstance(prompt, str):
            return self.encode(prompt)
        rule = "a prompt is a text or a sequence of token ids"
        return token_ids(prompt, rule, "give several texts to generate_batch")


def load(
    model: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kernel: KernelName = "auto",
    quantize: Quantization = "none",
    compile: bool = False,
    as_stored: bool = False,
    tell: Callable[[str], object] = warn_caller,
) -> Model:
    """A model from disk or the Hugging Face hub, or a preset with random weights.

    It is made ready to generate: linear layers and attention use native operators on a CPU that
    has them, and the environment variable WORKHORSE_NATIVE=0 does without.

    Args:
        model: a run directory, a folder that `convert` wrote, a Hugging Face directory, a GGUF
            file, an id of the hub (`ORG/NAME` or `ORG/NAME@REVISION`), or a preset's name.
        device: a PyTorch device; `auto` is CUDA where there is a device and else the CPU.
        dtype: a PyTorch floating-point type; `auto` is float32, and for a directory or id of
            Hugging Face the type that it was saved in.
        kernel: how attention is computed.
        quantize: hold the weights of linear layers in 8 or 4 bits, each from when it is read.
        compile: decode by steps compiled as a whole. The first step on a machine then waits for
            the compiler (tens of seconds), later ones for the program to be read (seconds).
        as_stored: leave all modules as the config builds them: to write the model out, or to train.
        tell: called with what must not go unnoticed: that weights are random, or that something of
            a directory was not used.

    Raises:
        WorkhorseError: there is no such model, it cannot be read, or the device or type is not
            there; its weights do not fit into memory; or `quantize` or `compile` with `as_stored`.
    """
    name = model_name(model)
    for option, value, known in (
        ("kernel", kernel, get_args(KernelName)),
        ("quantize", quantize, get_args(Quantization)),
        ("compile", compile, (True, False)),
        ("as_stored", as_stored, (True, False)),
    ):
        if not isinstance(value, str | int) or value not in known:
            choices = ", ".join(map(str, known))
            raise WorkhorseError(f"{option}={shown(value)} is unknown; choose {choices}")
    check_tell(tell)
    if as_stored and quantize != "none":
        raise WorkhorseError(f"quantize={quantize} changes what as_stored keeps; leave one out")
    if as_stored and compile:
        raise WorkhorseError("compile=True changes what as_stored keeps; leave one out")
    where, type_of_weights = resolve_device(device), resolve_dtype(dtype)
    if is_stored(name):
        places: Places = weights_in_large_pages if compile else mapped_weights
        if quantize != "none":
            places = partial(place_codes, format=quantize)
        stored = open_stored(model, tell)
        check_stored(
            stored,
            where,
            type_of_weights,
            mapped=not compile,
            codes_per_byte=None if quantize == "none" else FORMATS[quantize].per_byte,
        )
        decoder = stored.load_decoder(where, type_of_weights, kernel, places)
        loaded = _with_text(stored, decoder, tell)
    elif name in preset_names():
        tell(f"{name} is a preset: its weights are random and its tokens are bytes")
        loaded = _random(name, where, type_of_weights or torch.float32, kernel, quantize)
    else:
        raise no_such_model(name)
    if not as_stored:
        quick = prepare_for_inference(loaded.decoder, compile=compile)
        loaded = replace(loaded, decoder=quick)
    return loaded


def check_tell(tell: object) -> None:
    """Refuse what cannot be called with a line."""
    if not callable(tell):
        raise WorkhorseError(
            f"tell={shown(tell)} is no function; give one that takes a line, such as print"
        )


def _with_text(stored: StoredModel, decoder: Decoder, tell: Callable[[str], object]) -> Model:
    """A decoder from disk with what lies beside it."""
    for remark in stored.remarks:
        tell(f"{stored.path}: {remark}")
    tokenizer = stored.tokenizer() if stored.has_tokenizer else None
    if tokenizer is None:
        tell(f"{stored.path} has no tokenizer: give and take token ids")
    is_run = isinstance(stored, RunDirectory)
    return Model(
        str(stored.path),
        decoder,
        tokenizer,
        trained=True,
        data=_data_of(stored) if is_run else None,
        stop_tokens=stored.stop_tokens,
        trained_to_chat=tokenizer is not None
        and bool(tokenizer.chat_template)
        and (not is_run or stored.recipe().get("init") is not None),
        family=stored.family,
    )


def _data_of(run: RunDirectory) -> DataConfig:
    """What a run was trained on."""
    fields = run.recipe()["data"]
    try:
        return DataConfig.from_dict(fields)
    except ConfigError as error:
        raise WorkhorseError(f"{run.recipe_file}: {error}; {DAMAGED_RECIPE}") from None


def _random(
    name: str,
    device: torch.device,
    dtype: torch.dtype,
    kernel: KernelName,
    quantize: Quantization,
) -> Model:
    config = preset(name)
    check_random(name, config, device, dtype)
    with torch.random.fork_rng():  # the same "random" weights every time, and nobody else's draws
        torch.manual_seed(0)
        decoder = config.build(kernel=kernel, device=device, dtype=dtype)
    if quantize != "none":
        quantize_weights(decoder, quantize)
    tokenizer = train_tokenizer(BytesConfig(), [])
    return Model(name, decoder.eval(), tokenizer, trained=False)
