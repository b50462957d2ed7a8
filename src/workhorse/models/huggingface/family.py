"""A model type of Hugging Face transformers as data: reading and writing its config and tensors.

Reading: a function converts the fields of `config.json` to our config (`DecoderConfig`). Writing: a
table maps each key of `config.json` to a path in our config.

To check that a family can express a config, the config is written and read back; it must not
change. A family also fits if it only adds weights that have no effect when they are one or zero.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

from workhorse.config.base import ConfigError
from workhorse.config.errors import as_written
from workhorse.models.huggingface.fields import Fields
from workhorse.models.huggingface.moves import Rule
from workhorse.nn import DecoderConfig

Data = dict[str, Any]
FieldPath = str | Callable[[Data], object]
"""Place of a value in our config: a dotted path into `plain(config)`, or a function that computes
the value from it. In a path, `block` is the first of the `layers`."""

SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
TRAINING_ONLY = frozenset({"dropout", "init"})


@dataclass(frozen=True)
class Family:
    """One model type.

    Attributes:
        model_type: name in `config.json`.
        architecture: transformers' class for causal language modelling.
        read: function that converts the fields of `config.json` to our config.
        keys: keys of `config.json`, each with the path of its value in our config. A key whose
            field does not exist is omitted.
        rules: mapping between stored tensors and our parameters.
        ignored: regular expressions for full names of tensors that hold no weights, such as
            buffers saved by old versions.
    """

    model_type: str
    architecture: str
    read: Callable[[Fields], DecoderConfig]
    keys: Mapping[str, FieldPath]
    rules: tuple[Rule, ...]
    ignored: tuple[str, ...] = (r".*\.rotary_emb\.inv_freq",)

    @property
    def is_mixture(self) -> bool:
        """True if the family is made for models with mixtures of experts."""
        return any("expert" in key or key.startswith("moe_") for key in self.keys)

    def write(self, config: DecoderConfig) -> Data:
        """Convert our config to fields of `config.json`, as far as the family can express it."""
        data = plain(config)
        data["block"] = data["layers"][0]
        written: Data = {"architectures": [self.architecture], "model_type": self.model_type}
        written |= dict.fromkeys(SPECIAL_IDS)  # else the class sets the ids of its own tokenizer
        for key, path in self.keys.items():
            value = look_up(data, path)
            if value is not MISSING:
                written[key] = value
        return written

    def difference(self, config: DecoderConfig) -> str | None:
        """Return the first of `differences`; None if the family can express the whole config."""
        return next(iter(self.differences(config)), None)

    def differences(self, config: DecoderConfig) -> list[str]:
        """Describe each field of a config that this family cannot express.

        If the written config would be invalid, only that error is returned.
        """
        try:
            return [str(one) for one in compare_plain(plain(config), plain(self.again(config)))]
        except ConfigError as error:
            return [f"{IMPOSSIBLE}{error.reason}"]

    def equivalent(self, config: DecoderConfig) -> DecoderConfig | None:
        """Return an equivalent config that this family can express, or None.

        It is the same config, or one with extra weights that have no effect if they are set to
        `NEUTRAL`. For example, a model without a bias equals one with a zero bias.
        """
        try:
            again = self.again(config)
        except ConfigError:
            return None
        found = list(compare_plain(plain(config), plain(again)))
        if not found:
            return config
        if not all(one.is_neutral for one in found) or self.difference(again):
            return None
        return again

    def again(self, config: DecoderConfig) -> DecoderConfig:
        """Write a config and read it back; raises ConfigError if the written config is invalid."""
        return self.read(Fields(self.write(config)))


MISSING = object()
IMPOSSIBLE = "its config would be invalid: "
NEUTRAL = {
    "weight": 1.0,
    "bias": 0.0,
    "qkv_bias": 0.0,
    "out_bias": 0.0,
    "selection_bias": 0.0,
}
"""Boolean config fields that add a weight, and the value of the weight that has no effect."""


class Difference(NamedTuple):
    """One field that differs between two configs, `ours` and `theirs`, as plain data."""

    path: str
    ours: object
    theirs: object

    @property
    def is_neutral(self) -> bool:
        """True if `theirs` computes the same as `ours` when its extra weights are `NEUTRAL`."""
        if self.path == "head.tied":  # an untied head can hold a copy of the embedding
            return self.ours is True
        field = self.path.rpartition(".")[2]
        return self.ours is False and self.theirs is True and field in NEUTRAL

    def __str__(self) -> str:
        return f"{self.path} is {_shown(self.ours)}, not {_shown(self.theirs)}"


def plain(config: DecoderConfig) -> Data:
    """Convert a config to plain data that is equal for equal models.

    Defaults that depend on other fields are filled in. Blocks are listed layer by layer in
    `layers`. Fields that only matter in training are omitted.
    """
    data = cast(Data, _without(config.to_dict()))
    blocks = {name: _filled(block, config.d_model) for name, block in data.pop("blocks").items()}
    del data["pattern"]
    data["layers"] = [blocks[name] for name in config.layer_names()]
    data["embedding"]["width"] = data["embedding"]["width"] or config.d_model
    return data


def _filled(block: Data, d_model: int) -> Data:
    attention: Data = dict(block["attention"])
    if attention["kind"] == "attention":
        attention["n_kv_heads"] = attention["n_kv_heads"] or attention["n_heads"]
        attention["head_dim"] = attention["head_dim"] or d_model // attention["n_heads"]
        attention["value_dim"] = attention["value_dim"] or attention["head_dim"]
        attention["scale"] = attention["scale"] or 1 / math.sqrt(attention["head_dim"])
    elif not attention["scale"]:
        attention["scale"] = 1 / math.sqrt(attention["nope_dim"] + attention["rope_dim"])
    return {**block, "attention": attention}


def _without(data: Any) -> Any:
    if isinstance(data, dict):
        pairs = cast(Data, data).items()
        return {key: _without(value) for key, value in pairs if key not in TRAINING_ONLY}
    if isinstance(data, list):
        return [_without(item) for item in cast(list[Any], data)]
    return data


def look_up(data: Data, path: FieldPath) -> object:
    """Return the value at a path in a config from `plain`; `MISSING` if the path does not exist."""
    if callable(path):
        try:
            return path(data)
        except (KeyError, TypeError, IndexError, AttributeError, ZeroDivisionError):
            return MISSING  # the model lacks this field; `compare_plain` reports the difference
    value: Any = data
    for part in path.split("."):
        if not isinstance(value, dict) or part not in value:
            return MISSING
        value = cast(Any, value[part])
    return value


def always(value: object) -> FieldPath:
    """Return a function that gives the same value for every config."""
    return lambda data: value


def equals(path: str, value: object) -> FieldPath:
    """Return a function that gives True if a config has `value` at `path`."""

    def write(data: Data) -> object:
        found = look_up(data, path)
        return MISSING if found is MISSING else found == value

    return write


def differs(path: str, value: object) -> FieldPath:
    """Return a function that gives True if a config has a value other than `value` at `path`."""

    def write(data: Data) -> object:
        found = look_up(data, path)
        return MISSING if found is MISSING else found != value

    return write


def compare_plain(ours: Any, theirs: Any, path: str = "") -> Iterator[Difference]:
    """Yield the differences of two configs as plain data, except rounding errors of floats."""
    same = ours == theirs
    if isinstance(ours, dict) and isinstance(theirs, dict):
        mine, other = cast(Data, ours), cast(Data, theirs)
        keys = [*mine, *(key for key in other if key not in mine)]
        if mine.get("kind") != other.get("kind"):
            keys = ["kind"]  # a different kind explains all other differences
        for key in keys:
            where = f"{path}.{key}" if path else key
            yield from compare_plain(mine.get(key), other.get(key), where)
        return
    if isinstance(ours, list) and isinstance(theirs, list):
        first, second = cast(list[Any], ours), cast(list[Any], theirs)
        if len(first) == len(second):
            for n, pair in enumerate(zip(first, second, strict=True)):
                yield from compare_plain(*pair, f"{path}.{n}")
            return
    if isinstance(ours, float) and isinstance(theirs, int | float):
        # writing and reading convert values such as scales in both directions
        same = math.isclose(ours, theirs, rel_tol=1e-9)
    if not same:
        yield Difference(path, ours, theirs)


def _shown(value: object) -> str:
    """Format a config value for a message; a nested config is shortened to "given"."""
    if isinstance(value, dict):
        return "given"
    if isinstance(value, list):
        return f"a list of {len(cast(list[object], value))}"
    return as_written(value)


OTHER_KINDS = {
    "a state-space model": "mamba mamba2 falcon_mamba",
    "a recurrent or linear-attention model": "rwkv* recurrent_gemma xlstm minimax",
    "a hybrid of attention and state-space, linear-attention or convolution layers": (
        "bailing_hybrid bamba falcon_h1 granitemoehybrid inkling* jamba kimi_linear lfm2* lfm3* "
        "nemotron_h* olmo_hybrid qwen3_next qwen3_5* qwen4_exp* zamba zamba2 zaya"
    ),
    "a model with sparse attention that selects its keys": (
        "axk2 deepseek_v32 deepseek_v4 doge dots3_note* glm_moe_dsa hy_v4 minimax_m3*"
    ),
    "a model with shared, nested or repeated layers": ("gemma3n* gemma4* hrm_text longcat_flash"),
    "a diffusion language model": "diffusion_gemma dream llada* sdar*",
    "a model with bytes, hashes or segments instead of tokens": "blt cpmant reformer",
    "an image, audio or video model": (
        "*_vl *_vl_* *asr *audio* *flamingo* *llava* *ocr* *omni* *speech* *vision* *vlm* blip* "
        "chameleon cosmos3* emu3 evolla florence2 fuyu git glm46v* glm4v* idefics* "
        "instructblip* internvl janus kimi_k25 kosmos* mllama molmo* moshi moss_* musicgen* "
        "ovis2 paligemma perception_lm phi4_multimodal pi0 pix2struct smolvlm trocr udop "
        "voxtral* whisper"
    ),
    "an encoder": (
        "*bert *bert-* *bert_* *roberta* albert deberta* big_bird data2vec-text electra ernie "
        "esm esmc fnet funnel layoutlm* longformer luke mpnet mra nystromformer perceiver "
        "roformer squeezebert tapas xlm* xlnet xmod yoso"
    ),
    "an encoder-decoder": (
        "*bart bigbird_pegasus blenderbot* fsmt led longt5 m2m_100 marian mt5 mvp nllb-moe "
        "pegasus* prophetnet seamless* switch_transformers t5* umt5"
    ),
}
"""Kinds of unsupported models, each with glob patterns of model types."""


def other_kind(model_type: str) -> str | None:
    """Return the kind of an unsupported model type, or None if the type is unknown."""
    for kind, names in OTHER_KINDS.items():
        if any(fnmatchcase(model_type, name) for name in names.split()):
            return kind
    return None
