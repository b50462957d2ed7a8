"""One small tokenizer of each kind, trained once on a mixed corpus."""

from collections.abc import Callable
from typing import Any

import pytest

from workhorse.tokenizers import Tokenizer, tokenizer_config, train_tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog, lazy as ever, did not jump.\n" * 20,
    "def jump(self, over=None):\n    if over is None:\n        return 12345\n    return over\n"
    * 20,
    "Größe, naïve café, 東京 and Москва; हिन्दी: 100 % «done» 🦊\n" * 5,
    "Some HTML: <s>gone</s> <s>gone</s> <unk> <0x41> <|eos|> [UNK]\n" * 30,
]

CONFIGS: dict[str, dict[str, Any]] = {
    "bpe": {"kind": "bpe", "vocab_size": 400},
    "byte_fallback_bpe": {"kind": "byte_fallback_bpe", "vocab_size": 450},
    "byte_fallback_bpe without prefix": {
        "kind": "byte_fallback_bpe",
        "vocab_size": 450,
        "prefix_space": False,
    },
    "unigram": {"kind": "unigram", "vocab_size": 450},
    "unigram without bytes": {"kind": "unigram", "vocab_size": 256, "byte_fallback": False},
    "wordpiece": {"kind": "wordpiece", "vocab_size": 300},
    "characters": {"kind": "characters"},
    "words": {"kind": "words"},
    "bytes": {"kind": "bytes"},
}

_trained: dict[str, Tokenizer] = {}


@pytest.fixture(scope="session")
def corpus() -> list[str]:
    return CORPUS


@pytest.fixture(scope="session")
def configs() -> dict[str, dict[str, Any]]:
    return CONFIGS


@pytest.fixture(scope="session")
def trained() -> Callable[[str], Tokenizer]:
    """Return a function that trains the tokenizer of a name in `CONFIGS` once."""

    def tokenizer(name: str) -> Tokenizer:
        if name not in _trained:
            _trained[name] = train_tokenizer(tokenizer_config(CONFIGS[name]), CORPUS)
        return _trained[name]

    return tokenizer


@pytest.fixture(scope="session", params=list(CONFIGS))
def tokenizer(request: pytest.FixtureRequest, trained: Callable[[str], Tokenizer]) -> Tokenizer:
    """The tokenizer of each kind, one after the other."""
    return trained(request.param)


@pytest.fixture(
    scope="session",
    params=["byte_fallback_bpe without prefix", "byte_fallback_bpe", "unigram"],
)
def lossless(request: pytest.FixtureRequest, trained: Callable[[str], Tokenizer]) -> Tokenizer:
    """Each SentencePiece-like tokenizer without unknown characters."""
    return trained(request.param)
