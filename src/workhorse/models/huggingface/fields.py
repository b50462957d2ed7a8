"""Fields of a Hugging Face config, including alternative names of keys.

Some transformers classes have their own names for some keys, such as `n_embd`, and also accept the
usual names, such as `hidden_size` (`attribute_map`). If a config has both, the usual name wins, as
in transformers. Older files use further names that no class lists.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar, cast

from workhorse.config.base import ConfigError
from workhorse.errors import shown

_GPT = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
}
_MPT = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
}
_ROUTED = {"num_local_experts": "n_routed_experts"}
_LOCAL = {"num_experts": "num_local_experts"}
_PLAIN = {"num_local_experts": "num_experts"}

ALIASES: Mapping[str, Mapping[str, str]] = {
    **dict.fromkeys(("codegen", "ctrl", "gpt2", "gpt_bigcode", "gptj", "openai-gpt"), _GPT),
    **dict.fromkeys(("axk1", "deepseek_v3", "dots1", "glm4_moe", "solar_open"), _ROUTED),
    **dict.fromkeys(
        ("gpt_oss", "kolibri1", "mellum", "minimax_m2", "mixtral", "qwen3_moe"), _LOCAL
    ),
    **dict.fromkeys(("flex_olmo", "hy_v3", "olmoe"), _PLAIN),
    "bloom": {"num_hidden_layers": "n_layer", "num_attention_heads": "n_head"},
    "dbrx": {**_MPT, "max_position_embeddings": "max_seq_len"},
    "deepseek_v2": {"num_experts": "n_routed_experts"},
    "ernie4_5_moe": {"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    "glm4_moe_lite": {**_ROUTED, "head_dim": "qk_rope_head_dim"},
    "gpt_neo": {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"},
    "hunyuan_v1_moe": {**_PLAIN, "num_experts_per_tok": "moe_topk"},
    "internlm3": {"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    "mpt": _MPT,
    "xglm": {
        "hidden_size": "d_model",
        "num_hidden_layers": "num_layers",
        "num_attention_heads": "attention_heads",
    },
}
"""By model type: usual key names, mapped to the names of the transformers class."""
OLDER: Mapping[str, Mapping[str, str]] = {
    "bloom": {"n_embed": "hidden_size"},
    "falcon": {"n_embed": "hidden_size"},
}
"""By model type: older key names, mapped to the names of the transformers class. If both are
given, the older name wins."""
OF_ALL = {"torch_dtype": "dtype"}
"""For all model types: older key names, mapped to newer names. If a config has both, the newer name
wins."""
OWN_COUNTS = ("kolibri1", "mellum", "qwen3_moe")
"""Model types for which the key name of the transformers class wins if a config also has the usual
name."""


def with_own_names(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Rename the keys of a config to the names of its transformers class.

    Args:
        values: config parsed from JSON, with a `model_type`.

    Returns:
        The renamed config, and a warning for each key that is given under two names with different
        values.
    """
    found, remarks = dict(values), list[str]()
    model_type = values["model_type"]
    names = {**ALIASES.get(model_type, {}), **OLDER.get(model_type, {}), **OF_ALL}
    for usual, own in names.items():
        value = found.pop(usual, None)
        if value is None:
            continue
        given = found.get(own)
        own_counts = given is not None and (model_type in OWN_COUNTS or usual in OF_ALL)
        if not own_counts:
            found[own] = value
        if given is not None and given != value:
            counts = f"{own}={given}" if own_counts else f"{usual}={value}"
            passed = f"{usual}={value}" if own_counts else f"{own}={given}"
            remarks.append(f"{counts} is used and {passed} is ignored, as in transformers")
    return found, remarks


Value = TypeVar("Value", int, float, bool, str)

TYPES = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "a mapping",
}
SILENT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _from_model_config _name_or_path
    add_cross_attention architectures attn_implementation auto_map bad_words_ids
    begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample dtype
    early_stopping encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label
    initializer_range is_decoder is_encoder_decoder label2id length_penalty max_length
    min_length model_type no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_router_logits
    output_scores pad_token_id prefix pretraining_tp problem_type pruned_heads
    quantization_config remove_invalid_values repetition_penalty return_dict
    return_dict_in_generate router_aux_loss_coef sep_token_id suppress_tokens
    task_specific_params temperature tf_legacy_loss tie_encoder_decoder tie_word_embeddings
    tokenizer_class top_k top_p torch_dtype torchscript transformers_version typical_p
    unsloth_fixed unsloth_version use_bfloat16 use_cache
    """.split()  # noqa: SIM905 the list is long
)
"""Keys that do not affect the forward pass, or that the reader handles itself."""


class Fields:
    """The keys and values of one config.

    Args:
        values: config parsed from JSON.
        where: name of the config in error messages.
        names: usual key names, mapped to the config's own names.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str = "config.json",
        names: Mapping[str, str] = {},
    ) -> None:
        self.values = values
        self.where = where
        self.names = names
        self.seen: set[str] = set()
        self.sections: dict[str, Fields] = {}
        """Nested mappings that were read, by key."""

    def renamed(self, names: Mapping[str, str]) -> "Fields":
        """Return the same fields, accessed by the usual key names.

        Args:
            names: usual key names, mapped to the config's own names.
        """
        again = Fields(self.values, self.where, names)
        again.seen, again.sections = self.seen, self.sections
        return again

    def get(self, key: str, default: Value) -> Value:
        """The value of a key, of the default's type; the default if it is missing or null.

        Raises:
            ConfigError: the value has another type, or is NaN.
        """
        value = self.optional(key, type(default))
        return default if value is None else value

    def positive(self, key: str, default: Value) -> Value:
        """The value of a key that must be above zero; the default if it is missing or null.

        Raises:
            ConfigError: the value has another type, is NaN, or is not above zero.
        """
        value = self.get(key, default)
        if not isinstance(value, int | float) or value <= 0:
            raise ConfigError(f"{self.where}: {key}={value!r} is not above zero; correct the file")
        return value

    def need(self, key: str, kind: type[Value]) -> Value:
        """The value of a required key. Numbers must be above 0, because they are sizes.

        Raises:
            ConfigError: the key is missing, or the value has another type, is NaN or not above 0.
        """
        value = self.optional(key, kind)
        name = self.names.get(key, key)
        if value is None:
            raise ConfigError(f"{self.where} has no {name!r}; set it to {TYPES[kind]}")
        if not isinstance(value, bool | str) and value <= 0:
            raise ConfigError(f"{self.where}: {name}={value} is not above 0; correct the file")
        return value

    def optional(self, key: str, kind: type[Value], default: Value | None = None) -> Value | None:
        """The value of a key: None if it is null, the default if it is missing."""
        key = self._called(key)
        value = self.values.get(key, default)
        return None if value is None else self._checked(key, value, kind)

    def truth(self, key: str, default: bool) -> bool:
        """A Boolean value, which some published files write as 0 or 1."""
        self.seen.add(key)
        value = self.values.get(key, default)
        return bool(value) if isinstance(value, int) else self.get(key, default)

    def sequence(self, key: str, kind: type[Value]) -> list[Value] | None:
        """A list of values of one type; None if the key is missing or null."""
        key = self._called(key)
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self._wrong(key, value, list)
        return [self._checked(key, item, kind) for item in cast(Sequence[Any], value)]

    def ids(self, key: str) -> list[int]:
        """Token ids of a key that holds a list, a single id or nothing.

        Raises:
            ConfigError: the value is anything else; transformers also raises an error.
        """
        if isinstance(self.values.get(self._called(key)), list):
            return self.sequence(key, int) or []
        one = self.optional(key, int)
        return [] if one is None else [one]

    def section(self, key: str) -> "Fields | None":
        """A nested mapping; None if the key is missing or null."""
        key = self._called(key)
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, dict)
        inside = Fields(cast(Mapping[str, Any], value), f"{self.where}: {key}")
        return self.sections.setdefault(key, inside)

    def refuse(self, key: str, allowed: object, reason: str) -> None:
        """Raise an error if a key has any value except `allowed` and null.

        Raises:
            ConfigError: the key has another value.
        """
        key = self._called(key)
        value = self.values.get(key, allowed)
        if value is not None and value != allowed:
            raise ConfigError(f"{self.where}: {key}={value!r} is not supported: {reason}")

    def ignore(self, *keys: str) -> None:
        """Mark keys as known not to affect the computation."""
        self.seen.update(keys)

    def unused(self) -> list[str]:
        """Keys that were not read and may affect the model; a nested key is a dotted path."""
        known = self.seen | SILENT
        unused = [
            key for key, value in self.values.items() if key not in known and value is not None
        ]
        inside = [f"{name}.{key}" for name, one in self.sections.items() for key in one.unused()]
        return sorted(unused + inside)

    def _called(self, key: str) -> str:
        """Mark a key as read, and return its name in this config."""
        name = self.names.get(key, key)
        self.seen.add(name)
        return name

    def _checked(self, key: str, value: object, kind: type[Value]) -> Value:
        if kind is float and type(value) is int:
            try:
                value = float(value)
            except OverflowError:
                raise ConfigError(
                    f"{self.where}: {key}={shown(value)} is too large; correct the file"
                ) from None
        if kind is int and type(value) is float and value.is_integer():
            value = int(value)
        if type(value) is not kind or value != value:  # noqa: PLR0124 nan is not equal to itself
            raise self._wrong(key, value, kind)
        return cast(Value, value)

    def _wrong(self, key: str, value: object, kind: type) -> ConfigError:
        return ConfigError(
            f"{self.where}: {key}={shown(value)} is not {TYPES[kind]}; correct the file"
        )
