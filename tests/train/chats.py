"""A tokenizer with a chat template, and files of conversations."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from workhorse.tokenizers import Tokenizer
from workhorse.tokenizers.chat.template import DEFAULT_TEMPLATE

SPECIAL = ("<|bos|>", "<|eos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")


def chat_tokenizer(template: str | None = DEFAULT_TEMPLATE) -> Tokenizer:
    """Make a tokenizer of bytes with the role tokens of the default template."""
    made: Any = tokenizers.Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        special_tokens=[*SPECIAL], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([], trainer)
    return Tokenizer(made.to_str(), {"bos": "<|bos|>", "eos": "<|eos|>"}, template)


def chat(*contents: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * len(contents)
    return [
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=False)
    ]


def write_lines(path: Path, records: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    """Conversations of one and two turns."""
    return [
        {"messages": chat(f"{n}+1?", str(n + 1), *(("sure?", "yes") if n % 2 else ()))}
        for n in range(count)
    ]
