"""Small random-weight models and tokenizers, saved by transformers."""

import random
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers as hf
from tokenizers import decoders, pre_tokenizers, processors, trainers

from tests.evaluate.local_tasks import sentence

CONTEXT = 40
BEGIN, END = "<begin>", "<end>"
CHAT = (
    "{{ bos_token }}{% for message in messages %}<role>{{ message.role }}: {{ message.content }}"
    "<end>{% endfor %}{% if add_generation_prompt %}<role>assistant:{% endif %}"
)


def write_model(folder: Path, model_type: str, begins: bool) -> Path:
    """Save a small random-weight model and its tokenizer with transformers.

    Args:
        folder: the folder to write.
        model_type: the model type, `gpt2` or `llama`.
        begins: True if every encoded string starts with bos, as for LLaMA.
    """
    tokenizer = train_tokenizer(begins)
    tokenizer.save_pretrained(folder)
    options: dict[str, Any] = {
        "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": CONTEXT},
        "llama": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
        },
    }[model_type]
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = hf.AutoConfig.for_model(model_type, vocab_size=len(tokenizer), **special, **options)
    torch.manual_seed(0)
    model = hf.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():  # otherwise all tokens would be about equally likely
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder


def train_tokenizer(begins: bool) -> hf.PreTrainedTokenizerFast:
    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    draw = random.Random(1)
    names = [BEGIN, END, "<role>"]
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator((sentence(draw, 5, 20) for _ in range(200)), trainer)
    if begins:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{BEGIN} $A", special_tokens=[(BEGIN, backend.token_to_id(BEGIN))]
        )
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token=BEGIN if begins else END,
        eos_token=END,
        extra_special_tokens=["<role>"],
        chat_template=CHAT,
    )
