"""Reads a config from the metadata of a GGUF file, with the tables that are used for writing.

The names of a layer's tensors determine its kind, and the keys fill in its values. To check the
result, the keys of the config are computed and compared with the keys of the file. If the file
contains Workhorse's own config, and it passes this check, it is used instead.
"""

import copy
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property
from typing import Any

from workhorse.checkpoints.gguf.architecture import (
    FRACTION,
    MEANINGLESS,
    SCALING,
    THETA,
    WINDOW,
    Architecture,
    Data,
    put,
)
from workhorse.checkpoints.gguf.metadata import (
    EPSILON,
    EVERYWHERE,
    OWN_CONFIG,
    model_metadata,
    read_scaling,
    shortest,
)
from workhorse.checkpoints.gguf.tensors import EMBEDDING, HEAD, tensor_parts
from workhorse.checkpoints.gguf.write import readable
from workhorse.config.base import Config, ConfigError
from workhorse.errors import WorkhorseError, shown
from workhorse.files.text_formats import parse_json
from workhorse.models.huggingface import Family, family
from workhorse.models.huggingface.family import MISSING, compare_plain, look_up, plain
from workhorse.models.huggingface.llama_like import pattern_of
from workhorse.nn import DecoderConfig
from workhorse.nn.blocks import BlockConfig

Shapes = Mapping[str, tuple[int, ...]]

MAX_LAYERS = 10_000
SWITCHES = (
    "attention.qkv_bias",
    "attention.out_bias",
    "feed_forward.bias",
    "feed_forward.router.selection_bias",
)
"""Boolean fields without a metadata key: the tensor names show whether they are True."""
PATTERN = "attention.sliding_window_pattern"
USUAL = (*EVERYWHERE, PATTERN)
"""Metadata keys that a file may omit, without the architecture's name."""


READ_KEYS = (
    PATTERN,
    "attention.sliding_window",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.freq_base_swa",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.attn_factor",
    "rope.scaling.finetuned",
)
"""Metadata keys that `ConfigReader` reads, and that are not in the architecture's tables.

`rope.scaling.finetuned` is ignored, because it does not affect the computation.
"""


class _Holder(Config):
    """A config with one block. It parses plain data into a block config of any kind."""

    block: BlockConfig


class ConfigReader:
    """Reads the config of the model in a GGUF file.

    Args:
        architecture: the file's architecture.
        keys: metadata keys that begin with the architecture's name, without that prefix; floats are
            rounded by `shortest`.
        shapes: shapes of the tensors, by name.
        factors: tensors that RoPE frequencies are divided by, by name.
        own: JSON text of Workhorse's own config in the file, or None.
    """

    def __init__(
        self,
        architecture: Architecture,
        keys: Data,
        shapes: Shapes,
        factors: Mapping[str, Any],
        own: object = None,
    ) -> None:
        self.architecture = architecture
        self.keys = keys
        self.shapes = shapes
        self.factors = factors
        self.own = own

    def config(self) -> tuple[DecoderConfig, Family | None]:
        """Return the decoder's config, and the equivalent Hugging Face model type or None.

        Raises:
            WorkhorseError: the keys and tensors do not describe a model that can be computed.
        """
        if (config := self._own_config()) is not None:
            types = map(family, self.architecture.model_types)
            return config, next((one for one in types if not one.difference(config)), None)
        try:
            config, found = self._as_family(self._config())
            self._check(config)
        except KeyError as error:
            raise WorkhorseError(
                f"key {self._named(error.args[0])} is missing; fetch the file again"
            ) from None
        except ConfigError as error:
            raise WorkhorseError(
                f"its metadata is not valid: {error}; fetch the file again"
            ) from None
        except (TypeError, ValueError, ArithmeticError, LookupError) as error:
            raise WorkhorseError(
                f"its metadata is not valid: {shown(str(error))}; fetch the file again"
            ) from None
        return config, found

    def _own_config(self) -> DecoderConfig | None:
        """Return Workhorse's own config; None if it is missing or contradicts the other keys."""
        if not isinstance(self.own, str):
            return None
        try:
            config = DecoderConfig.from_dict(parse_json(self.own.encode(), OWN_CONFIG))
            self._check(config)
        except (WorkhorseError, TypeError, ValueError, ArithmeticError, LookupError):
            return None  # written by another version of Workhorse, or changed since
        return config

    def _config(self) -> DecoderConfig:
        keys = self.keys
        if not 0 < (n_layers := keys["block_count"]) <= MAX_LAYERS:
            raise ValueError(f"block_count={n_layers} is not in [1, {MAX_LAYERS}]")
        top: Data = {
            "vocab_size": keys.get("vocab_size", self.shapes[EMBEDDING][0]),
            "d_model": keys["embedding_length"],
            "n_layers": n_layers,
            "max_seq_len": keys["context_length"],
            "embedding": self.architecture.embedding.to_dict(),
            "head": self.architecture.head.to_dict(),
        }
        if HEAD in self.shapes:
            top["head"]["tied"] = False
        elif "head.tied" in self.architecture.optional:
            top["head"]["tied"] = True
        if "head.bias" in self.architecture.optional:
            top["head"]["bias"] = "output.bias" in self.shapes
        if self.architecture.embedding_by_width:
            top["embedding"]["multiplier"] = math.sqrt(top["d_model"])
        for path, value in self._carried():
            put(top, path, value)
        layers = [self._layer(number, top) for number in range(n_layers)]
        final = self.architecture.final_norm or self.architecture.layers[0].norm
        top["final_norm"] = final.to_dict()
        for norm in (top["final_norm"], top["embedding"]["norm"]):
            self._set_eps(norm)
        blocks = [_block(layer) for layer in layers]
        top |= pattern_of(self._block_names(layers), blocks)
        top["blocks"] = {name: block.to_dict() for name, block in top["blocks"].items()}
        config = DecoderConfig.from_dict(top)
        return self._scaled(config)

    def _carried(self) -> Iterator[tuple[str, Any]]:
        """Yield the paths of config fields that the metadata keys store, with their values."""
        for key, path in {**EVERYWHERE, **self.architecture.keys}.items():
            if isinstance(path, str) and key in self.keys:
                yield path, self.keys[key]
        yield from self.architecture.solved(self.keys).items()

    def _layer(self, number: int, top: Data) -> Data:
        """Return the block config of a layer: tensor names give its kind, metadata its values."""
        prefix = f"blk.{number}."
        names = frozenset(name.removeprefix(prefix) for name in self._by_layer.get(number, ()))
        local = self._has_window(number)
        for kind, expected in self._kinds:
            window = look_up(kind.to_dict(), WINDOW)
            if self.architecture.windows and (window not in (None, MISSING)) != local:
                continue
            if names == expected and self.architecture.may_be(kind, number, self.keys):
                return self._filled(kind.to_dict(), number, top)
        closest = min(self._kinds, key=lambda one: len(one[1] ^ names))[1]
        name = min(closest ^ names, default=None)
        state = "missing" if name in closest else "unexpected"
        raise WorkhorseError(
            f"tensor {prefix}{name} is {state} for llama.cpp's architecture "
            f"{self.architecture.name}; fetch the model's safetensors files"
        )

    @cached_property
    def _by_layer(self) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name in self.shapes:
            first, _, rest = name.partition(".")
            number = rest.partition(".")[0]
            if first == "blk" and number.isascii() and number.isdigit() and len(number) < 6:  # noqa: PLR2004
                found.setdefault(int(number), []).append(name)
        return found

    @cached_property
    def _kinds(self) -> list[tuple[BlockConfig, frozenset[str]]]:
        """Every kind of layer with every combination of `SWITCHES`, and its tensor names."""
        found: list[tuple[BlockConfig, frozenset[str]]] = []
        choices = [path for path in SWITCHES if path in self.architecture.optional]
        solved = {path: value for path, value in self._carried() if path.endswith("q_rank")}
        for kind in self.architecture.layers:
            for switches in itertools.product((False, True), repeat=len(choices)):
                data = kind.to_dict()
                for path, switch in zip(choices, switches, strict=True):
                    put(data, path, switch)
                for path, value in solved.items():
                    put(data, path.removeprefix("block."), value and 1)
                block = _block(data)
                if not any(block == other for other, _ in found):
                    found.append((block, self._tensors(block)))
        return found

    def _tensors(self, block: BlockConfig) -> frozenset[str]:
        tiny = DecoderConfig(
            vocab_size=1,
            d_model=2,
            n_layers=1,
            max_seq_len=1,
            blocks={"main": block},
            final_norm=block.norm,
        )
        names = tensor_parts(self.architecture, tiny.build("eager", device="meta"))
        return frozenset(name.removeprefix("blk.0.") for name in names if name.startswith("blk."))

    def _has_window(self, number: int) -> bool:
        if "attention.sliding_window" not in self.keys:
            return False
        pattern = self.keys.get(PATTERN)
        if isinstance(pattern, list):
            return bool(pattern[number])
        every = pattern if isinstance(pattern, int) else self.architecture.window_every
        return every == 1 or number % every < every - 1

    def _filled(self, block: Data, number: int, top: Data) -> Data:
        """Set the sizes, RoPE fields and norm epsilons of a layer from the metadata keys."""
        for start in ("block.", "mixture."):
            if start == "mixture." and block["feed_forward"]["kind"] != "moe":
                continue
            for path, value in self._carried():
                own = value[number] if isinstance(value, list) else value
                if path.startswith(start):
                    put(block, path.removeprefix(start), own)
        attention = block["attention"]
        local = look_up(block, WINDOW) not in (None, MISSING)
        if local:
            attention["window"] = self.keys["attention.sliding_window"]
        if (look_up(attention, "position.kind")) == "rope":
            self._set_rotation(block, local, top)
        for norm in (block["norm"], attention.get("norm"), look_up(attention, "qk_norm.norm")):
            if isinstance(norm, dict):
                self._set_eps(norm)
        return block

    def _set_rotation(self, block: Data, local: bool, top: Data) -> None:
        attention, keys = block["attention"], self.keys
        theta = keys.get("rope.freq_base", 10_000.0)
        put(block, THETA, keys.get("rope.freq_base_swa", theta) if local else theta)
        width = attention.get("head_dim") or top["d_model"] // attention["n_heads"]
        turning = keys.get("rope.dimension_count", width)
        if FRACTION in self.architecture.carried:
            put(block, FRACTION, shortest(turning / width))
        if local and SCALING in self.architecture.varying:
            return
        rope = dict(attention["position"])
        length = keys["context_length"]
        put(block, SCALING, read_scaling(keys, self.factors, rope, turning, length))
        for path, value in self.architecture.solved(keys).items():
            if SCALING in path:
                put(block, path.removeprefix("block."), value)

    def _set_eps(self, norm: Data) -> None:
        if norm["kind"] in EPSILON:
            norm["eps"] = self.keys[EPSILON[norm["kind"]]]

    def _block_names(self, layers: list[Data]) -> list[str]:
        """Choose a name for each layer's block in our config, such as `main` or `local`."""
        kinds: list[Data] = []
        for layer in layers:
            if layer not in kinds:
                kinds.append(layer)
        words = [_described(kind, kinds) for kind in kinds]
        names = [
            word if words.count(word) == 1 else f"{word}_{n}" for n, word in enumerate(words, 1)
        ]
        return [names[kinds.index(layer)] for layer in layers]

    def _scaled(self, config: DecoderConfig) -> DecoderConfig:
        """Set the attention scale to the architecture's value, unless the file stores it."""
        data = plain(config)
        attention = data["layers"][0]["attention"]
        if "attention.scale" in (*self.architecture.carried, *self.architecture.optional):
            return config
        scale = self.architecture.scale(data)
        if attention["kind"] != "attention" or math.isclose(scale, attention["scale"]):
            return config
        whole = config.to_dict()
        for block in whole["blocks"].values():
            block["attention"]["scale"] = scale
        return DecoderConfig.from_dict(whole)

    def _as_family(self, config: DecoderConfig) -> tuple[DecoderConfig, Family | None]:
        """Find the Hugging Face model type of a config, or None.

        The config that is returned has that type's values in the fields `MEANINGLESS`, which a GGUF
        file does not store.
        """
        for model_type in self.architecture.model_types:
            one = family(model_type)
            try:
                again = one.again(config)
            except ConfigError:
                continue
            found = compare_plain(plain(config), plain(again))
            if all(_left_open(one.path) for one in found):
                return again, one
        return config, None

    def _check(self, config: DecoderConfig) -> None:
        """Raise an error unless writing this config would give the metadata keys of the file."""
        data, _ = readable(config, windows=self.architecture.windows)
        if reason := self.architecture.difference(copy.deepcopy(data)):
            raise ValueError(reason)
        for key, value in model_metadata(self.architecture, data).items():
            short = key.removeprefix(f"{self.architecture.name}.")
            if short not in self.keys:
                if short in USUAL or short.startswith("rope.") or value in (0, 1):
                    continue
                raise KeyError(short)
            if not _agree(self.keys[short], value):
                raise ValueError(f"{key} is {shown(self.keys[short])}, not {shown(value)}")

    @property
    def unread(self) -> list[str]:
        """Metadata keys of the file that are not read and may affect the computation."""
        known = {*EVERYWHERE, *EPSILON.values(), *self.architecture.keys, *READ_KEYS}
        return sorted(self._named(key) for key in self.keys.keys() - known)

    def _named(self, key: str) -> str:
        return f"{self.architecture.name}.{key}"


def _block(data: Data) -> BlockConfig:
    return _Holder.from_dict({"block": data}).block


def _described(block: Data, kinds: Iterable[Data]) -> str:
    """Name a kind of layer: `main` if there is only one kind, else `local` or `global`.

    Dense layers of a model that also has mixtures get the suffix `_dense`.
    """
    kinds = list(kinds)
    if len(kinds) == 1:
        return "main"
    windowed = look_up(block, WINDOW) not in (None, MISSING)
    mixed = any(kind["feed_forward"]["kind"] == "moe" for kind in kinds)
    dense = mixed and block["feed_forward"]["kind"] != "moe"
    return ("local" if windowed else "global") + ("_dense" if dense else "")


def _left_open(path: str) -> bool:
    """Return True if a GGUF file does not store the field at a path."""
    return path.endswith((*MEANINGLESS, "final_norm.offset", "final_norm.multiply"))


def _agree(stored: object, written: object) -> bool:
    if isinstance(stored, list) and not isinstance(written, list):  # one value per layer
        return all(_agree(one, written) for one in stored)
    if isinstance(stored, int | float) and isinstance(written, int | float):
        return math.isclose(stored, written, rel_tol=1e-6)
    return stored == written
