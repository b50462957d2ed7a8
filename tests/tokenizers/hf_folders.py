"""Folders with the same files as published models, each with a small tokenizer trained here."""

import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    normalizers,
    pre_tokenizers,
    processors,
)

from tests.tokenizers.hf_files import Files, token
from tests.tokenizers.hf_trainers import (
    LLAMA3_WORDS,
    QWEN2_WORDS,
    byte_fallback,
    byte_level,
    sentencepiece_model,
    template_bos,
    unigram_after_eos,
    with_bos,
    words_with_ends,
)


def gpt2() -> Files:
    return {
        "tokenizer.json": byte_level(["<|endoftext|>"]),
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "model_max_length": 1024},
        "config.json": {"model_type": "gpt2"},
    }


def gpt2_vocab() -> Files:
    fields = json.loads(byte_level(["<|endoftext|>"]).to_str())
    merges = [
        pair if isinstance(pair, str) else " ".join(pair) for pair in fields["model"]["merges"]
    ]
    return {
        "vocab.json": fields["model"]["vocab"],
        "merges.txt": "#version: 0.2\n" + "\n".join(merges) + "\n",
        "tokenizer_config.json": {"tokenizer_class": "GPT2Tokenizer", "add_prefix_space": False},
        "config.json": {"model_type": "gpt2"},
    }


def opt_vocab() -> Files:
    """OPT: the files of GPT-2, but sequences begin with </s>."""
    files = gpt2_vocab()
    files["vocab.json"] = {**files["vocab.json"], "</s>": 420, "<pad>": 421}
    files["tokenizer_config.json"] = {
        "tokenizer_class": "GPT2Tokenizer",
        "add_bos_token": True,
        "bos_token": {"__type": "AddedToken", **token("</s>", normalized=True)},
        "eos_token": {"__type": "AddedToken", **token("</s>", normalized=True)},
        "unk_token": {"__type": "AddedToken", **token("</s>", normalized=True)},
        "pad_token": {"__type": "AddedToken", **token("<pad>", normalized=True)},
    }
    files["special_tokens_map.json"] = {
        "bos_token": token("</s>", normalized=True),
        "eos_token": token("</s>", normalized=True),
        "unk_token": token("</s>", normalized=True),
        "pad_token": token("<pad>", normalized=True),
    }
    files["config.json"] = {"model_type": "opt"}
    return files


def llama2(legacy: bool | None) -> Files:
    """LLaMA as published in 2023: the file prepends a space to every segment."""
    tokenizer = template_bos(byte_fallback(["<unk>", "<s>", "</s>"], legacy=True), "<s>")
    settings: dict[str, Any] = {
        "tokenizer_class": "LlamaTokenizerFast",
        "drop_leading_space": True,
        "add_bos_token": True,
        "add_eos_token": False,
        "bos_token": {"__type": "AddedToken", **token("<s>")},
        "eos_token": {"__type": "AddedToken", **token("</s>")},
        "unk_token": {"__type": "AddedToken", **token("<unk>")},
        "pad_token": None,
    }
    if legacy is not None:
        settings["legacy"] = legacy
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": settings,
        "special_tokens_map.json": {
            name: token(text) for name, text in (("bos_token", "<s>"), ("eos_token", "</s>"))
        },
        "config.json": {"model_type": "llama"},
    }


def llama_model() -> Files:
    return {
        "tokenizer.model": sentencepiece_model(),
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "drop_leading_space": True,
            "add_bos_token": True,
            "add_eos_token": False,
            "legacy": False,
        },
        "added_tokens.json": {"<pad>": 420},
        "special_tokens_map.json": {"pad_token": "<pad>"},
        "config.json": {"model_type": "llama"},
    }


def llama3() -> Files:
    reserved = [f"<|reserved_special_token_{number}|>" for number in range(250)]
    named = ["<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    tokenizer = byte_level(
        [*named, "<|eot_id|>", "<|finetune_right_pad_id|>", *reserved],
        LLAMA3_WORDS,
        first=False,
        ignore_merges=True,
    )
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        "tokenizer.json": with_bos(tokenizer, "<|begin_of_text|>"),
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "added_tokens_decoder": {
                str(number): token(entry.content, special=True) for number, entry in added
            },
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "clean_up_tokenization_spaces": True,
            "model_max_length": 131072,
        },
        "special_tokens_map.json": {
            "bos_token": token("<|begin_of_text|>"),
            "eos_token": token("<|eot_id|>"),
        },
        "config.json": {"model_type": "llama"},
    }


def qwen(model_type: str) -> Files:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = byte_level(special, QWEN2_WORDS, normalizers.NFC(), first=False)
    plain = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>"]
    tokenizer.add_tokens([AddedToken(name, normalized=False) for name in plain])
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "Qwen2Tokenizer",
            "add_bos_token": False,
            "add_prefix_space": False,
            "added_tokens_decoder": {
                str(number): token(entry.content, special=entry.special) for number, entry in added
            },
            "additional_special_tokens": special[1:],
            "bos_token": None,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "unk_token": None,
            "errors": "replace",
        },
        "config.json": {"model_type": model_type},
    }


def gemma() -> Files:
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    turns = ["<start_of_turn>", "<end_of_turn>"]
    tokenizer = byte_fallback([*special, *turns], prefix=False)
    fields = json.loads(tokenizer.to_str())
    fields["model"]["unk_token"] = "<unk>"
    tokenizer = Tokenizer.from_str(json.dumps(fields))
    tokenizer.add_tokens([AddedToken("\n\n", normalized=False)])
    return {
        "tokenizer.json": template_bos(tokenizer, "<bos>"),
        "tokenizer_config.json": {
            "tokenizer_class": "GemmaTokenizer",
            "add_bos_token": True,
            "bos_token": "<bos>",
            "eos_token": "<eos>",
            "pad_token": "<pad>",
            "unk_token": "<unk>",
            "boi_token": "<start_of_turn>",
            "additional_special_tokens": turns,
        },
        "config.json": {"model_type": "gemma2"},
    }


def gpt_neox() -> Files:
    tokenizer = byte_level(["<|endoftext|>", "<|padding|>"], normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken(" " * width, normalized=True) for width in range(24, 1, -1)])
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "GPTNeoXTokenizer",
            "bos_token": "<|endoftext|>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<|endoftext|>",
        },
        "config.json": {"model_type": "gpt_neox"},
    }


def mistral() -> Files:
    special = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]"]
    return {
        "tokenizer.json": template_bos(byte_fallback(special), "<s>"),
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": True,
            "add_prefix_space": None,
            "legacy": False,
            "bos_token": "<s>",
            "eos_token": "</s>",
            "unk_token": "<unk>",
        },
        "config.json": {"model_type": "mistral"},
    }


def falcon() -> Files:
    tokenizer = byte_level([">>TITLE<<", ">>QUESTION<<", "<|endoftext|>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Punctuation("contiguous"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        ]
    )
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|endoftext|>",
        },
        "special_tokens_map.json": {
            "additional_special_tokens": [">>TITLE<<", ">>QUESTION<<"],
            "eos_token": "<|endoftext|>",
        },
        "config.json": {"model_type": "falcon"},
    }


def bloom() -> Files:
    tokenizer = byte_level(["<unk>", "<s>", "</s>", "<pad>"])
    words = r" ?[^(\s|[.,!?…。、।،])]+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(words), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.post_processor = processors.ByteLevel()
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "BloomTokenizerFast",
            "unk_token": "<unk>",
            "eos_token": "</s>",
            "bos_token": "<s>",
            "pad_token": "<pad>",
        },
        "config.json": {"model_type": "bloom"},
    }


def phi3() -> Files:
    tokenizer = byte_fallback(["<unk>", "<s>", "</s>"], legacy=True)
    names = ["<|endoftext|>", "<|assistant|>", "<|system|>", "<|end|>", "<|user|>"]
    tokenizer.add_special_tokens([AddedToken(name, rstrip=True) for name in names])
    tokenizer.add_special_tokens(
        [AddedToken("<|left|>", lstrip=True), AddedToken("<|word|>", single_word=True)]
    )
    added = tokenizer.get_added_tokens_decoder().items()
    return {
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {
            "tokenizer_class": "LlamaTokenizer",
            "add_bos_token": False,
            "added_tokens_decoder": {
                str(number): {key: getattr(entry, key) for key in token("")}
                for number, entry in added
            },
            "bos_token": "<s>",
            "eos_token": "<|endoftext|>",
            "unk_token": "<unk>",
            "pad_token": "<|endoftext|>",
            "legacy": False,
        },
        "config.json": {"model_type": "phi3"},
    }


def gpt1() -> Files:
    return {
        "tokenizer.json": words_with_ends(),
        "tokenizer_config.json": {"tokenizer_class": "OpenAIGPTTokenizer", "unk_token": "<unk>"},
        "config.json": {"model_type": "openai-gpt"},
    }


def cohere() -> Files:
    names = ["<PAD>", "<UNK>", "<CLS>", "<SEP>", "<MASK_TOKEN>", "<BOS_TOKEN>", "<EOS_TOKEN>"]
    turns = ["<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"]
    tokenizer = byte_level([*names, *turns], normalizer=normalizers.NFC())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    return {
        "tokenizer.json": template_bos(tokenizer, "<BOS_TOKEN>"),
        "tokenizer_config.json": {
            "tokenizer_class": "CohereTokenizer",
            "add_bos_token": True,
            "bos_token": "<BOS_TOKEN>",
            "eos_token": turns[1],
            "pad_token": "<PAD>",
            "unk_token": None,
            "cls_token": "<CLS>",
            "sep_token": "<SEP>",
            "mask_token": "<MASK_TOKEN>",
        },
        "config.json": {"model_type": "cohere"},
    }


def xglm() -> Files:
    return {
        "tokenizer.json": unigram_after_eos(),
        "tokenizer_config.json": {"tokenizer_class": "XGLMTokenizer"},
        "config.json": {"model_type": "xglm"},
    }


def bare() -> Files:
    """Only a `tokenizer.json`, as in many small models."""
    files = gpt2()
    return {
        "tokenizer.json": template_bos(files["tokenizer.json"], "<|endoftext|>", "<|endoftext|>"),
        "config.json": {"model_type": "llama"},
    }


def grown() -> Files:
    """Settings with tokens that are not in the vocabulary: they get new ids."""
    files = llama3()
    settings = files["tokenizer_config.json"]
    del settings["added_tokens_decoder"]
    settings["pad_token"] = "[PAD]"
    settings["extra_special_tokens"] = {"image_token": "<image>"}
    files["special_tokens_map.json"] = {
        "bos_token": token("<|begin_of_text|>", rstrip=True),
        "pad_token": token("[PAD]", lstrip=True),
        "additional_special_tokens": ["<extra>"],
    }
    return files


FOLDERS: dict[str, Callable[[], Files]] = {
    "gpt2": gpt2,
    "gpt2 in two files": gpt2_vocab,
    "opt in two files": opt_vocab,
    "llama 2": lambda: llama2(None),
    "llama 2 legacy": lambda: llama2(True),
    "llama 2 not legacy": lambda: llama2(False),
    "llama sentencepiece": llama_model,
    "llama 3": llama3,
    "qwen 2": lambda: qwen("qwen2"),
    "qwen 3": lambda: qwen("qwen3"),
    "gemma": gemma,
    "gpt-neox": gpt_neox,
    "mistral": mistral,
    "falcon": falcon,
    "bloom": bloom,
    "phi 3": phi3,
    "gpt": gpt1,
    "cohere": cohere,
    "xglm": xglm,
    "bare": bare,
    "grown": grown,
}
