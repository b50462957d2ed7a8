"""The tokenizer classes of transformers 5 that replace parts of `tokenizer.json`.

Most classes follow `tokenizer.json`. A few build their own normalizer, pre-tokenizer, decoder and
special tokens, and use only the vocabulary and merges of the files. For example, a LLaMA file of
2023 that prepends a space to every segment is read as one that prepends it to the whole input.
These classes are listed here as data, in the form of `tokenizer.json`.

There is one intended difference from transformers 5. If a tokenizer puts a space before every
input, and the input itself begins with a space, Workhorse keeps both spaces, like SentencePiece and
GGUF readers. The classes of transformers 5 then add no space. Set `drop_leading_space` in the
settings for this behaviour.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workhorse.tokenizers.config import SPACE

Parts = dict[str, Any]
"""Some keys of a `tokenizer.json`, such as `normalizer`, and their values."""

UNK_PLACE = "unk_token"
"""Placeholder for the name of the unknown token in the options of a model."""
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?"
_SPACES = r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN2_WORDS = _WORDS + r"\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+" + _SPACES
QWEN3_5_WORDS = _WORDS + r"[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+" + _SPACES


@dataclass(frozen=True)
class TokenizerClass:
    """A tokenizer class of transformers that replaces parts of `tokenizer.json`."""

    parts: Callable[[Mapping[str, Any]], Parts]
    """Function that makes normalizer, pre-tokenizer, decoder and model options from settings."""
    named: Mapping[str, str]
    """Default special tokens by role, such as `bos_token`; the settings can replace them."""
    extra: tuple[str, ...] = ()
    """Special tokens that have no role such as `bos_token`."""
    model: str = "BPE"
    bos_by_default: bool = False
    """True if sequences begin with bos by default."""
    keeps_post_processor: bool = True
    """True to keep the tokens that `tokenizer.json` adds before and after a sequence."""
    begins_with_eos: bool = False
    resets_flags: bool = False
    """True to clear the flags `lstrip` and `rstrip` of special tokens with a role. These flags
    strip the spaces around a token."""


def _byte_level(prefix_space: bool, use_regex: bool = True) -> Parts:
    return {
        "type": "ByteLevel",
        "add_prefix_space": prefix_space,
        "trim_offsets": True,
        "use_regex": use_regex,
    }


def _prefix_space(settings: Mapping[str, Any], default: bool) -> bool:
    value = settings.get("add_prefix_space")
    return default if value is None else bool(value)


def _model(**options: Any) -> Parts:
    plain = {"continuing_subword_prefix": "", "end_of_word_suffix": "", "unk_token": None}
    return {**plain, "fuse_unk": False, "byte_fallback": False, **options}


def _split_words(pattern: str, settings: Mapping[str, Any]) -> Parts:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    level = _byte_level(_prefix_space(settings, False), use_regex=False)
    return {
        "model": _model(),
        "normalizer": {"type": "NFC"},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, level]},
        "decoder": _byte_level(True),
    }


def _gpt2(settings: Mapping[str, Any]) -> Parts:
    return {
        "model": _model(),
        "normalizer": None,
        "pre_tokenizer": _byte_level(_prefix_space(settings, False)),
        "decoder": _byte_level(True),
    }


def _gpt_neox(settings: Mapping[str, Any]) -> Parts:
    return {**_gpt2(settings), "normalizer": {"type": "NFC"}}


def _cohere(settings: Mapping[str, Any]) -> Parts:
    level = _byte_level(_prefix_space(settings, False))
    digits = {"type": "Digits", "individual_digits": True}
    split = {"type": "Sequence", "pretokenizers": [digits, level]}
    return {**_gpt2(settings), "normalizer": {"type": "NFC"}, "pre_tokenizer": split}


DROP_LEADING_SPACE = "drop_leading_space"
"""Workhorse's own key in `tokenizer_config.json`; the module's docstring describes it."""


def _marks(replacement: str, prefix: str) -> Parts:
    scheme = {"prepend_scheme": prefix, "split": False}
    return {"type": "Metaspace", "replacement": replacement, **scheme}


def _metaspace(settings: Mapping[str, Any], prefix: str, unknown: str | None, strip: bool) -> Parts:
    steps: list[Parts] = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    if strip:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    normalizer, marks = None, _marks(SPACE, prefix)
    if prefix != "never" and not settings.get(DROP_LEADING_SPACE):
        # Metaspace adds no space before an input that begins with its mark. So the input's own
        # spaces become marks first; the step that adds the space then looks for another character.
        normalizer = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
        steps_before = [_marks(" ", prefix), _marks(SPACE, "never")]
        marks = {"type": "Sequence", "pretokenizers": steps_before}
    # Here the model has None for "no prefix"; the byte-level classes have "".
    none = {"continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "model": _model(**none, fuse_unk=True, byte_fallback=True, unk_token=unknown),
        "normalizer": normalizer,
        "pre_tokenizer": marks,
        "decoder": {"type": "Sequence", "decoders": steps},
    }


def _llama(settings: Mapping[str, Any]) -> Parts:
    has_prefix = _prefix_space(settings, True)
    scheme = "always" if settings.get("legacy", False) else "first"
    return _metaspace(settings, scheme if has_prefix else "never", None, strip=has_prefix)


def _code_llama(settings: Mapping[str, Any]) -> Parts:
    scheme = "first" if _prefix_space(settings, True) else "never"
    return _metaspace(settings, scheme, UNK_PLACE, strip=True)


def _gemma(settings: Mapping[str, Any]) -> Parts:
    split = {
        "type": "Split",
        "pattern": {"String": " "},
        "behavior": "MergedWithPrevious",
        "invert": False,
    }
    return {
        **_metaspace(settings, "never", UNK_PLACE, strip=False),
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
        "pre_tokenizer": split,
    }


def _openai_gpt(settings: Mapping[str, Any]) -> Parts:
    return {
        "model": _model(end_of_word_suffix="</w>", unk_token=UNK_PLACE),
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": True,
            "strip_accents": None,
            "lowercase": True,
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "decoder": {"type": "BPEDecoder", "suffix": "</w>"},
    }


def _xglm(settings: Mapping[str, Any]) -> Parts:
    scheme = "always" if _prefix_space(settings, True) else "never"
    marks = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": scheme, "split": True}
    spaces = {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "}
    return {
        "model": {"unk_id": 3, "byte_fallback": False},
        "normalizer": {"type": "Sequence", "normalizers": [spaces]},
        "pre_tokenizer": marks,
        "decoder": marks,
    }


_SENTENCEPIECE = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
_END_OF_TEXT = {
    "unk_token": "<|endoftext|>",
    "bos_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
}
_QWEN = {
    "unk_token": "<|endoftext|>",
    "eos_token": "<|endoftext|>",
    "pad_token": "<|endoftext|>",
}
_FILL_IN = {
    "prefix_token": f"{SPACE}<PRE>",
    "middle_token": f"{SPACE}<MID>",
    "suffix_token": f"{SPACE}<SUF>",
    "eot_token": f"{SPACE}<EOT>",
    "fill_token": "<FILL_ME>",
}

CLASSES: dict[str, TokenizerClass] = {
    "CodeGenTokenizer": TokenizerClass(_gpt2, _END_OF_TEXT),
    "CodeLlamaTokenizer": TokenizerClass(
        _code_llama, {**_SENTENCEPIECE, **_FILL_IN}, bos_by_default=True
    ),
    "CohereTokenizer": TokenizerClass(
        _cohere,
        {
            "unk_token": "<UNK>",
            "bos_token": "<BOS_TOKEN>",
            "eos_token": "<|END_OF_TURN_TOKEN|>",
            "pad_token": "<PAD>",
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
    ),
    "GPT2Tokenizer": TokenizerClass(_gpt2, _END_OF_TEXT),
    "GPTNeoXTokenizer": TokenizerClass(
        _gpt_neox, {**_END_OF_TEXT, "pad_token": "<|padding|>"}, keeps_post_processor=False
    ),
    "GemmaTokenizer": TokenizerClass(
        _gemma,
        {
            "unk_token": "<unk>",
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "mask_token": "<mask>",
        },
    ),
    "LlamaTokenizer": TokenizerClass(_llama, _SENTENCEPIECE),
    "OpenAIGPTTokenizer": TokenizerClass(_openai_gpt, {"unk_token": "<unk>"}),
    "Qwen2Tokenizer": TokenizerClass(
        lambda settings: _split_words(QWEN2_WORDS, settings), _QWEN, resets_flags=True
    ),
    "Qwen3_5Tokenizer": TokenizerClass(
        lambda settings: _split_words(QWEN3_5_WORDS, settings), _QWEN
    ),
    "XGLMTokenizer": TokenizerClass(
        _xglm,
        {
            "bos_token": "<s>",
            "eos_token": "</s>",
            "sep_token": "</s>",
            "cls_token": "<s>",
            "unk_token": "<unk>",
            "pad_token": "<pad>",
        },
        extra=tuple(f"<madeupword{number}>" for number in range(7)),
        model="Unigram",
        keeps_post_processor=False,
        begins_with_eos=True,
    ),
}
"""Tokenizer classes by name. All other classes use `tokenizer.json` unchanged."""

_OWN_CLASS: dict[str, str] = {
    "GPT2Tokenizer": "codegen dbrx gpt2 gpt_neo gptj hyperclovax_vision_v2 jais2 opt phi "
    "starcoder2",
    "GPTNeoXTokenizer": "falcon_mamba gpt_neox mamba mamba2 mpt olmo olmoe rwkv xlstm",
    "GemmaTokenizer": "diffusion_gemma gemma gemma2 gemma3 gemma3_text gemma3n gemma3n_text "
    "recurrent_gemma shieldgemma2 zaya",
    "Qwen2Tokenizer": "dots3_note internvl qwen2 qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_next "
    "qwen3_omni_moe qwen3_vl qwen3_vl_moe qwen2_5_omni qwen2_5_vl",
    "Qwen3_5Tokenizer": "qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen4_exp",
    "CohereTokenizer": "aya_vision cohere cohere2",
    "OpenAIGPTTokenizer": "openai-gpt",
    "XGLMTokenizer": "xglm",
}
_CLASS_OF_TYPE = {kind: name for name, kinds in _OWN_CLASS.items() for kind in kinds.split()}
"""Model type -> default class of its tokenizers; their files can declare another."""

_READ_AS_WRITTEN = """
arctic aria beam chatlm ernie4_5 ernie4_5_moe flex_olmo fuyu glm glm4 glm4_moe glm4_moe_lite
glm4v glm4v_moe gpt_bigcode granite granitemoe granitemoehybrid granitemoeshared h2ovl_chat
hyperclovax hyperclovax_vlm internlm2 internlm3 iquestcoder jamba kimi_k25 kimi_linear llava
llava_next mimo_v2_flash minicpm3 minicpmv minimax_m2 ministral ministral3 mistral mistral3
mistral_large4 mixtral modernbert modernbert-decoder molmo molmo2 nemotron olmo2 olmo3
olmo_hybrid opencua openvla paddleocr_vl persimmon phi3 phi3_v phimoe pixtral smolvlm stablelm
step3_vl vipllava voxtral
"""
_AS_WRITTEN = frozenset(_READ_AS_WRITTEN.split())
"""Model types whose tokenizer files are used unchanged, even if they declare a class."""
_OVERRULED = frozenset(("qwen2", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen4_exp"))
"""Model types that always use their default class, even if their files declare another."""


def tokenizer_class(
    model_type: str | None, declared: str | None, is_byte_level: bool
) -> TokenizerClass | None:
    """Return the class with which transformers 5 reads the tokenizer of a folder.

    Args:
        model_type: type of the model in the folder.
        declared: `tokenizer_class` in the folder's settings.
        is_byte_level: True if the folder's tokenizer is byte-level. Many such folders declare a
            LLaMA class, which is not byte-level.

    Returns:
        The class; None if the files are used unchanged.
    """
    name = None if declared is None else declared.removesuffix("Fast")
    own = _CLASS_OF_TYPE.get(model_type or "")
    if model_type in _AS_WRITTEN:
        return None
    if own is not None and (name is None or model_type in _OVERRULED):
        return CLASSES[own]
    if name == "LlamaTokenizer" and is_byte_level:
        return None
    return CLASSES.get(name or "")
