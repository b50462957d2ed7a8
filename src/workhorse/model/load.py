"""`workhorse.load`: load a model and its tokenizer from a path, hub id or preset name."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from workhorse.checkpoints import Places, RunDirectory, mapped_weights
from workhorse.checkpoints.huggingface.load import HuggingFaceDirectory
from workhorse.checkpoints.runs.run_directory import DAMAGED_RECIPE
from workhorse.checkpoints.stored import (
    StoredModel,
    add_stored_adapter,
    is_stored,
    model_name,
    no_such_model,
    open_stored,
)
from workhorse.config.arguments import check_choice
from workhorse.config.base import ConfigError
from workhorse.data import DataConfig
from workhorse.devices.names import resolve_device, resolve_dtype
from workhorse.errors import WorkhorseError, shown, warn_caller
from workhorse.execute.body import EXECUTIONS, Execution
from workhorse.files.text_formats import to_path
from workhorse.generate import GenerationConfig
from workhorse.generate.conversation import TemplateFormat
from workhorse.memory.model_memory import check_random, check_stored
from workhorse.model.model import Model
from workhorse.models import preset, preset_names
from workhorse.nn import Decoder
from workhorse.nn.attention.kernels import KernelName
from workhorse.tokenizers import BytesConfig, ChatTemplate, Tokenizer, train_tokenizer
from workhorse.transforms.adapters import set_adapter
from workhorse.transforms.quantization import FORMATS, FormatName, place_codes
from workhorse.transforms.quantization import quantize as quantize_weights

Quantization = Literal["none", FormatName]
NO_TOKENIZER = "has no tokenizer: prompts and completions are token ids"


def load(
    model: str | Path,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    kernel: KernelName = "auto",
    quantize: Quantization = "none",
    adapter: str | Path | Mapping[str, str | Path] | None = None,
    execution: Execution = "auto",
    exact: bool = False,
    notify: Callable[[str], object] = warn_caller,
) -> Model:
    """Load a model from disk or the Hugging Face hub, or build a preset with random weights.

    The model is prepared for generation: `Model.decoder` has faster modules, with the parameters of
    `Model.reference`. `Model.announcement` describes how the decoder is executed.

    Args:
        model: a run directory, a folder that `convert` wrote, a Hugging Face directory, a GGUF
            file, an id of the hub (`ORG/NAME` or `ORG/NAME@REVISION`), or a preset's name.
        device: a PyTorch device; `auto` is CUDA if it is available, else the CPU.
        dtype: a PyTorch floating-point dtype; `auto` is float32, and for a directory or id of
            Hugging Face the dtype of the saved weights.
        kernel: the implementation of attention.
        quantize: format of the weights of linear layers: `none` (unchanged), `int8` or `int4`. Each
            weight is quantised as it is read, to save memory.
        adapter: a PEFT directory, or a run that trained an adapter on this model; or several by
            name, of which the first is active (see `workhorse.transforms.adapters.set_adapter`).
        execution: how the decoder is executed; see `Execution`. Use `reference` for training,
            export or inspection. With `compiled`, the first step waits tens of seconds for the
            compiler; later processes on the same machine load the compiled program in seconds.
        exact: True to compute logits that are bitwise independent of the batch, if native operators
            can. Generation with `GenerationConfig.exact` is then faster.
        notify: called with each warning, such as that weights are random or a file is not used.

    Raises:
        WorkhorseError: there is no such model or adapter, it cannot be read, the device or dtype
            is not available, the weights do not fit into memory, an adapter belongs to another
            model, or the execution is not possible.
    """
    name = model_name(model)
    check_choice("kernel", kernel, get_args(KernelName))
    check_choice("quantize", quantize, get_args(Quantization))
    check_choice("execution", execution, EXECUTIONS)
    if not isinstance(exact, bool):
        raise WorkhorseError(f"exact={shown(exact)} is not a bool; give True or False")
    check_callback(notify)
    where, type_of_weights = resolve_device(device), resolve_dtype(dtype)
    if is_stored(name):
        places: Places = mapped_weights
        if quantize != "none":
            places = partial(place_codes, format=quantize)
        stored = open_stored(model, notify)
        check_stored(
            stored,
            where,
            type_of_weights,
            codes_per_byte=None if quantize == "none" else FORMATS[quantize].per_byte,
        )
        decoder = stored.load_decoder(where, type_of_weights, kernel, places)
        _add_adapters(decoder, stored, adapter)
        loaded = _with_text(stored, decoder, notify)
    elif name in preset_names():
        if adapter is not None:
            raise WorkhorseError(f"{name} is a preset, which has no weights to adapt; give a model")
        notify(f"{name} is a preset: its weights are random and its tokens are bytes")
        loaded = _random(name, where, type_of_weights or torch.float32, kernel, quantize)
    else:
        raise no_such_model(name)
    return loaded.with_execution(execution, exact=exact)


def _add_adapters(
    decoder: Decoder, stored: StoredModel, adapter: str | Path | Mapping[str, str | Path] | None
) -> None:
    if adapter is None:
        return
    named = adapter if isinstance(adapter, Mapping) else {"default": adapter}
    for name, one in named.items():
        add_stored_adapter(decoder, stored, to_path(one, "an adapter is a path"), name)
    for name in list(named)[:1]:
        set_adapter(decoder, name)


def check_callback(notify: object) -> None:
    """Raise a WorkhorseError if `notify` is not callable."""
    if not callable(notify):
        raise WorkhorseError(
            f"notify={shown(notify)} is not a function; give one that takes a string, such as print"
        )


def _with_text(stored: StoredModel, decoder: Decoder, notify: Callable[[str], object]) -> Model:
    """Combine a decoder from disk with the tokenizer and the options stored next to it."""
    for remark in stored.remarks:
        notify(f"{stored.path}: {remark}")
    tokenizer = stored.tokenizer() if stored.has_tokenizer else None
    if tokenizer is None:
        notify(f"{stored.path} {NO_TOKENIZER}")
    data = _data_of(stored) if isinstance(stored, RunDirectory) else None
    stop_tokens = stored.stop_tokens
    if data is not None and data.has_conversations and tokenizer is not None:
        with suppress(WorkhorseError):  # a template that needs more than a question: eos ends
            stop_tokens = TemplateFormat(ChatTemplate.of(tokenizer), tokenizer).stop_tokens
    return Model(
        str(stored.path),
        decoder,
        tokenizer,
        trained=True,
        data=data,
        stop_tokens=stop_tokens,
        trained_to_chat=is_trained_to_chat(stored, tokenizer),
        family=stored.family,
        sampling=_sampling_of(stored, notify),
    )


def is_trained_to_chat(stored: StoredModel | RunDirectory, tokenizer: Tokenizer | None) -> bool:
    """True if a model has a chat template that it was trained with.

    For a run, this is true if the run, or the model in its `init`, learned conversations.
    """
    if tokenizer is None or not tokenizer.chat_templates:
        return False
    if not isinstance(stored, RunDirectory):
        return True
    recipe, chats = stored.recipe(), _data_of(stored).has_conversations
    if chats or recipe.get("init") is None or recipe.get("tokenizer", {}).get("chat"):
        return chats
    base = RunDirectory(recipe["init"])
    return not base.exists or is_trained_to_chat(base, tokenizer)


def _sampling_of(stored: StoredModel, notify: Callable[[str], object]) -> dict[str, Any]:
    """The sampling options in `generation_config.json`; empty if they are missing or invalid."""
    if not isinstance(stored, HuggingFaceDirectory):
        return {}
    try:
        GenerationConfig(**stored.sampling)
    except ConfigError as error:
        notify(f"{stored.path}: generation_config.json is not used for sampling: {error}")
        return {}
    return stored.sampling


def _data_of(run: RunDirectory) -> DataConfig:
    """The data config in a run's recipe."""
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
    with torch.random.fork_rng():  # the same weights every time; the global generator is restored
        torch.manual_seed(0)
        decoder = config.build(kernel=kernel, device=device, dtype=dtype)
    if quantize != "none":
        quantize_weights(decoder, quantize)
    tokenizer = train_tokenizer(BytesConfig(), [])
    return Model(name, decoder.eval(), tokenizer, trained=False)
