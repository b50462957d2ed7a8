"""Reads a Hugging Face directory, given by path or hub id: its config and the decoder's weights.

Downloads use the `huggingface_hub` library and honour its environment variables: `HF_HOME` (the
cache's location), `HF_TOKEN`, `HF_HUB_OFFLINE`, `HF_ENDPOINT`.

    config.json                the model's config
    model.safetensors          its weights, or an index and several such files
    generation_config.json     its stop tokens, and the publisher's sampling options
    tokenizer.json, …

Weights are copied from memory-mapped files into the decoder. Code in the directory is never run. A
link out of the directory raises an error, except in the hub's cache, which consists of links.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from workhorse.checkpoints.huggingface.quantized import dequantized
from workhorse.checkpoints.huggingface.tensor_folder import (
    TensorFolder,
    account,
    meta_decoder,
    shapes_of,
)
from workhorse.checkpoints.tensors import Places, allocate, weights_of
from workhorse.config.base import ConfigError
from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import read_json
from workhorse.models.huggingface import Family, Fields, family
from workhorse.models.huggingface.family import SPECIAL_IDS
from workhorse.models.huggingface.fields import with_own_names
from workhorse.models.huggingface.moves import read_tensors
from workhorse.models.huggingface.rotation import conflicting_settings
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.attention.kernels import KernelName

if TYPE_CHECKING:
    from workhorse.tokenizers import Tokenizer

WEIGHTS = "*.safetensors"
ALLOWED = (
    WEIGHTS,
    "*.json",
    "*.jinja",
    "tokenizer.model",
    "vocab.txt",
    "merges.txt",
)
"""Files that contain only data. Other files in the repository (code, pickles) are not fetched."""
IGNORED = ("*/*", "consolidated*.safetensors")
"""Files that are not fetched: subfolders, and a second copy of the weights (Mistral's models)."""

_ID = re.compile(r"(?P<name>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^@\s]+))?", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")


def resolve_model(
    name: str,
    *,
    revision: str | None = None,
    weights: bool = True,
    notify: Callable[[str], object] = lambda line: None,
) -> Path:
    """Return the local folder of a model on the hub; download it if it is not in the cache.

    Args:
        name: `org/name` or `org/name@revision`.
        revision: a branch, tag or commit; by default the one in `name`, or else `main`. Only a
            commit always gives the same files.
        weights: True to download the weights too, False for only the small files.
        notify: called with a message that names the commit of a branch or tag.

    Raises:
        WorkhorseError: there is no such model or revision, the user has no access to it, or it is
            not in the cache and the hub cannot be reached.
    """
    parts = _ID.fullmatch(name)
    if parts is None:
        raise WorkhorseError(f"{name!r} is not a hub id; write org/name or org/name@revision")
    if revision and parts["revision"] not in {None, revision}:
        raise WorkhorseError(f"{name!r} and revision={revision!r} disagree; give only one")
    wanted = str(revision or parts["revision"] or "main")
    folder = _snapshot(parts["name"], wanted, ALLOWED if weights else ALLOWED[1:])
    if not _COMMIT.fullmatch(wanted):
        commit = folder.name
        notify(f"{parts['name']} at {wanted} is commit {commit}; pin it with @{commit}")
    return folder


def _snapshot(name: str, revision: str, allowed: Sequence[str]) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    # The base of its errors is the base of all errors of its HTTP library (requests, later httpx).
    transport: tuple[type[Exception], ...] = errors.HfHubHTTPError.__bases__
    hub = constants.ENDPOINT
    try:
        folder = snapshot_download(
            name, revision=revision, allow_patterns=list(allowed), ignore_patterns=list(IGNORED)
        )
    except errors.HFValidationError as error:
        reason = str(error).splitlines()[0]
        raise WorkhorseError(f"{name!r} is not a hub id: {reason}") from None
    except errors.GatedRepoError:
        raise WorkhorseError(
            f"{name} is gated; accept its terms at {hub}/{name} and set HF_TOKEN to your token"
        ) from None
    except errors.RepositoryNotFoundError:
        raise WorkhorseError(
            f"there is no model {name} on {hub}, or it is private; check the name, or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise WorkhorseError(
            f"{name} has no revision {revision!r}; name one of its branches, tags or commits"
        ) from None
    except errors.LocalEntryNotFoundError:
        if constants.HF_HUB_OFFLINE:
            raise WorkhorseError(
                f"{name} at {revision} is not completely in the cache {constants.HF_HUB_CACHE} and "
                "HF_HUB_OFFLINE is set; unset it, or give a local folder"
            ) from None
        raise WorkhorseError(
            f"{name} at {revision} is not completely in the cache and {hub} does not answer; "
            "check the network, or give a local folder"
        ) from None
    except transport as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise WorkhorseError(f"cannot fetch {name} from {hub}: {reason}") from None
    return Path(folder)


CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
ADAPTER_FILE = "adapter_config.json"
"""PEFT's config file of an adapter (LoRA)."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
DEPTH_KEYS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
MAX_DEPTH = 10_000
"""Maximum number of layers. Without a limit, a damaged config could fill the memory."""
SAVED_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OUTER_KEYS = ("tie_word_embeddings", "quantization_config", "dtype", "torch_dtype")
"""Keys at the top of a multimodal model's config that override the text model's keys."""


class HuggingFaceDirectory:
    """A model directory in the format of transformers.

    Args:
        path: the directory; its config is read immediately, its weights when they are needed.

    Attributes:
        kind: description of the format, for messages.
        family: the family of its model type.
        config: the decoder's config.
        remarks: warnings for the user, one line each.

    Raises:
        WorkhorseError: `config.json` cannot be read, or its model is not supported.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        whole = read_json(self.path / CONFIG_FILE)
        text = whole.get("text_config")
        self.wrapped = isinstance(text, Mapping)
        """True if the directory contains a multimodal model; only its text model is loaded."""
        self.values = _text_part(whole, cast(Mapping[str, Any], text)) if self.wrapped else whole
        model_type = self.values.get("model_type")
        if not isinstance(model_type, str):
            raise WorkhorseError(
                f"{self.path / CONFIG_FILE} has no 'model_type'; it is not a model's config"
            )
        self.values, twice = with_own_names(self.values)
        fields = Fields(self.values)
        try:
            for key in DEPTH_KEYS:
                if (depth := Fields(self.values).get(key, 0)) > MAX_DEPTH:
                    raise ConfigError(f"{CONFIG_FILE}: {key}={depth} is above {MAX_DEPTH}")
            self.family: Family = family(model_type)
            self.config: DecoderConfig = self.family.read(fields)
            generation = self._generation()
            ids = _special_ids(fields, generation)
            self.sampling = _sampling(generation)
            """The publisher's sampling options, by Workhorse's names."""
        except WorkhorseError as error:
            of_ours = isinstance(error, ConfigError) and error.path  # not a key of config.json
            where = f"{self.path}: {CONFIG_FILE} sets" if of_ours else f"{self.path}:"
            raise WorkhorseError(f"{where} {error}") from None
        except ArithmeticError as error:  # a length of 0, a width of 10^400
            raise WorkhorseError(
                f"{self.path}: config.json has impossible sizes: {error}; correct the file"
            ) from None
        self.kind = f"Hugging Face directory, model type {model_type}"
        self.tokenizer_folder = self.path
        size = self.config.vocab_size
        self.stop_tokens = tuple(one for one in ids["eos_token_id"] if 0 <= one < size)
        """Ids of the tokens that end generation, from `generation_config.json` or `config.json`."""
        self.remarks = [*twice, *_remarks(whole, fields), *_outside(ids, size)]
        self.remarks += _ignored(generation)
        if (self.path / ADAPTER_FILE).exists():
            self.remarks.append(
                f"{ADAPTER_FILE} describes an adapter (LoRA), which is not applied; to apply "
                "it, give the folder also as the adapter"
            )

    @staticmethod
    def is_one(path: Path) -> bool:
        """Return True if a folder looks like a Hugging Face directory."""
        return (path / CONFIG_FILE).exists() and not (path / "recipe.yaml").exists()

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights according to the config; float32 if it does not name one."""
        name = str(self.values.get("dtype"))
        return SAVED_DTYPES.get(name.removeprefix("torch."), torch.float32)

    def load_decoder(
        self,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        kernel: KernelName = "auto",
        places: Places = weights_of,
    ) -> Decoder:
        """Build the decoder and load its weights; see `StoredModel.load_decoder`.

        Raises:
            WorkhorseError: a tensor is missing, unexpected or has a wrong shape, or a file is
                damaged.
        """
        dtype = dtype or self.dtype
        stored = TensorFolder(self.path)
        try:
            source = dequantized(stored, self.values.get("quantization_config"), dtype)
            decoder = meta_decoder(self.config, kernel, dtype, n_tensors=len(source.shapes))
            shapes = shapes_of(decoder)
            found = account(self.family, self.config, shapes, source, wrapped=self.wrapped)
            read_tensors(found.moves, places(allocate(decoder, device)), found.source)
        except WorkhorseError as error:
            raise WorkhorseError(f"{self.path}: {error}") from None
        if found.left_out:
            count = found.left_out
            belong = "1 tensor belongs" if count == 1 else f"{count} tensors belong"
            self.remarks.append(f"{belong} to other parts of the model: not loaded")
        if found.unwrapped:
            self.remarks.append(
                "tensor names have the prefix of a compiled or distributed model (_orig_mod. or "
                "module.); it is dropped"
            )
        return decoder.eval()

    @property
    def has_tokenizer(self) -> bool:
        """True if the directory contains a tokenizer."""
        return any((self.path / name).exists() for name in TOKENIZER_FILES)

    def tokenizer(self) -> "Tokenizer":
        """The tokenizer in the directory.

        Raises:
            WorkhorseError: there is none, or it cannot be read.
        """
        from workhorse.tokenizers import load_tokenizer

        return load_tokenizer(self.path)

    def _generation(self) -> Fields:
        """Read the fields of `generation_config.json`; empty if the file does not exist."""
        path = self.path / GENERATION_FILE
        return Fields(read_json(path) if path.exists() else {}, GENERATION_FILE)


def _special_ids(fields: Fields, generation: Fields) -> dict[str, list[int]]:
    """Read the ids of special tokens; `generation_config.json` may override the stop tokens."""
    ids = {key: fields.ids(key) for key in SPECIAL_IDS}
    if "eos_token_id" in generation.values:
        ids["eos_token_id"] = generation.ids("eos_token_id")
    return ids


_ONLY_SAMPLED = ("temperature", "top_p", "min_p", "top_k")
"""Options of `generation_config.json` that need `do_sample`, as in transformers."""
_SILENT = re.compile(
    "_from_model_config|(bos|decoder_start|eos|pad)_token_id|transformers_version|use_cache"
)
"""Keys of `generation_config.json` that are read elsewhere or change no token."""
_ONE_IS_OFF = re.compile(
    "num_(beams|beam_groups|return_sequences)|(encoder_repetition|length)_penalty|temperature|"
    "(top|typical)_p"
)
"""Options of `generation_config.json` for which 1 has no effect. For others, 0 has none."""


def _sampling(generation: Fields) -> dict[str, Any]:
    """Read the sampling options of `generation_config.json` that transformers would use."""
    names = _ONLY_SAMPLED if generation.get("do_sample", False) else ()
    found = {
        key: generation.optional(key, int if key == "top_k" else float)
        for key in (*names, "repetition_penalty")
    }
    found["top_k"] = found.get("top_k") or None  # 0: all tokens
    return {key: value for key, value in found.items() if value is not None}


def _ignored(generation: Fields) -> list[str]:
    """Return warnings about options of `generation_config.json` that are not used."""
    found: dict[str, list[str]] = {}
    for key, value in generation.values.items():
        is_off = value in (None, 0, [], {}) or (value == 1 and _ONE_IS_OFF.fullmatch(key))
        if not is_off and key not in generation.seen and not _SILENT.fullmatch(key):
            reason = "without do_sample" if key in _ONLY_SAMPLED else "(not supported)"
            found.setdefault(reason, []).append(key)
    return [f"{GENERATION_FILE}: ignored {why}: {', '.join(keys)}" for why, keys in found.items()]


def _text_part(whole: Mapping[str, Any], text: Mapping[str, Any]) -> dict[str, Any]:
    return dict(text) | {key: whole[key] for key in OUTER_KEYS if key in whole}


def _outside(ids: Mapping[str, list[int]], size: int) -> list[str]:
    """Return warnings about special token ids outside the vocabulary.

    A padding id of -1 is accepted, because many files have it instead of null.
    """
    return [
        f"{key}={shown(one)} is outside the vocabulary of {size} tokens and is ignored"
        for key, listed in ids.items()
        for one in listed
        if not 0 <= one < size and (one, key) != (-1, "pad_token_id")
    ]


def _remarks(whole: Mapping[str, Any], fields: Fields) -> list[str]:
    remarks = conflicting_settings(fields.values)
    if "auto_map" in whole:
        remarks.append("config.json refers to custom code (auto_map), which is never run")
    if unused := fields.unused():
        remarks.append(f"unknown keys of config.json are ignored: {', '.join(unused)}")
    return remarks
