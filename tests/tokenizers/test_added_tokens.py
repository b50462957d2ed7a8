"""Tokenizers with the role tokens of the default chat template, or with added tokens."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers

from tests.tokenizers.conftest import CONFIGS, CORPUS
from tests.tokenizers.hf_files import write
from tests.tokenizers.hf_folders import FOLDERS
from workhorse.errors import WorkhorseError
from workhorse.tokenizers import (
    ChatTemplate,
    FileConfig,
    Tokenizer,
    load_tokenizer,
    tokenizer_config,
    train_tokenizer,
)
from workhorse.tokenizers.chat.template import DEFAULT_TEMPLATE
from workhorse.tokenizers.config import WITH_TOOLS

Trained = Callable[[str], Tokenizer]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "The dog <|end|>?"},
    {"role": "assistant", "content": "jump"},
    {"role": "tool", "content": "12345"},
]


@pytest.mark.parametrize("name", CONFIGS)
def test_role_tokens_exist_from_the_start(name: str, trained: Trained, tmp_path: Path) -> None:
    tokenizer = train_tokenizer(tokenizer_config({**CONFIGS[name], "chat": True}), CORPUS)
    size = CONFIGS[name].get("vocab_size")
    assert size is None or tokenizer.vocab_size <= size
    assert {*WITH_TOOLS} <= tokenizer.special_tokens.keys()
    assert tokenizer.chat_template is not None
    assert trained(name).chat_template is None
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    ids = ChatTemplate.of(loaded).encode(loaded, CHAT)
    assert ids == ChatTemplate.of(tokenizer).encode(tokenizer, CHAT)
    written = [token for token in ids if token in {*map(loaded.token_id, WITH_TOOLS)}]
    assert [loaded.decode([token]).strip() for token in written] == [
        *("<|system|>", "<|end|>", "<|user|>", "<|end|>", "<|assistant|>", "<|end|>"),
        *("<|tool|>", "<|end|>", "<|assistant|>"),
    ]


@pytest.mark.parametrize("name", ["gpt2", "llama 2 legacy", "llama sentencepiece", "qwen 2"])
def test_a_published_tokenizer_with_role_tokens(name: str, tmp_path: Path) -> None:
    """The result renders and encodes chats in transformers as here."""
    base = write(FOLDERS[name](), tmp_path / "base")
    plain = load_tokenizer(base)
    tokenizer = train_tokenizer(FileConfig(path=str(base), chat=True), ())
    assert tokenizer.vocab_size == plain.vocab_size + 5
    assert tokenizer.vocabulary.items() > plain.vocabulary.items()
    text = "<|user|> def jump(self)"
    assert tokenizer.encode(text) == plain.encode(text)
    kind = json.loads((base / "config.json").read_text())["model_type"]
    tokenizer.save(tmp_path / "saved", model_type=kind)
    (tmp_path / "saved" / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs: Any = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    chat = [{**one, "content": one["content"].replace("<|end|>", "")} for one in CHAT]
    ids = theirs.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
    assert ids == ChatTemplate.of(tokenizer).encode(tokenizer, chat)


def test_added_tokens_are_matched_in_text(trained: Trained, tmp_path: Path) -> None:
    trained("bpe").save(tmp_path)
    config = FileConfig(path=str(tmp_path), add_tokens=("lazy dog", "東京"))
    tokenizer = train_tokenizer(config, ())
    ids = tokenizer.encode("the lazy dog in 東京.")
    new = [tokenizer.vocab_size - 2, tokenizer.vocab_size - 1]
    assert [token for token in ids if token in new] == new
    assert tokenizer.decode(ids) == "the lazy dog in 東京."
    assert not {*new} & {*tokenizer.special_tokens.values()}
    assert tokenizer.encode("jump over") == trained("bpe").encode("jump over")


@pytest.mark.parametrize(
    ("name", "token", "message"),
    [
        ("bpe", "für", "would decode 'afürb' as 'af\ufffdrb' with the added token 'für'; remove"),
        ("unigram", "lazy dog", "would decode 'alazy dogb' as 'alazy dog b' with the added"),
        ("bpe", " jump", "added token ' jump' is in the vocabulary already"),
        ("bpe", "<|eos|>", "added token '<|eos|>' is in the vocabulary already"),
        ("bytes", "", "added token '' is empty; remove it"),
    ],
)
def test_tokens_that_cannot_be_added(
    name: str, token: str, message: str, trained: Trained, tmp_path: Path
) -> None:
    trained(name).save(tmp_path)
    with pytest.raises(WorkhorseError, match=message.replace("|", r"\|")):
        train_tokenizer(FileConfig(path=str(tmp_path), add_tokens=(token,)), ())


def test_ids_in_use_are_not_taken(trained: Trained) -> None:
    definition = json.loads(trained("characters").definition)
    vocab = definition["model"]["vocab"]
    last = max(vocab, key=vocab.__getitem__)
    vocab[last] += 5
    with pytest.raises(WorkhorseError, match="has unused ids, so 'xx' gets the id"):
        Tokenizer(json.dumps(definition)).with_tokens(["xx"])


def test_a_template_without_a_tool_token_has_no_tools() -> None:
    template = ChatTemplate(DEFAULT_TEMPLATE)
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    with pytest.raises(WorkhorseError, match="has no format for tool_calls; write them as content"):
        template.render([CHAT[1], call])
    with pytest.raises(WorkhorseError, match="has no format for tools"):
        template.render(CHAT[:2], tools=[{"name": "f"}])
    with pytest.raises(WorkhorseError, match="role must be system, user or assistant, not tool"):
        template.render(CHAT)
