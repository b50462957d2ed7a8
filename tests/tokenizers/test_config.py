"""Tokenizer configs: valid ones round-trip, and invalid ones give a one-line error."""

from typing import Any

import pytest

from workhorse.config.base import Config, ConfigError
from workhorse.tokenizers import (
    BpeConfig,
    ByteFallbackBpeConfig,
    TokenizerConfig,
    tokenizer_config,
)


class Recipe(Config):
    tokenizer: TokenizerConfig


def test_any_kind_fits_a_recipe_and_round_trips(configs: dict[str, dict[str, Any]]) -> None:
    for fields in configs.values():
        recipe = Recipe(tokenizer=fields)
        assert Recipe.from_yaml(recipe.to_yaml()) == recipe
        assert recipe.tokenizer == tokenizer_config(fields)


def test_names_are_in_the_order_of_their_ids() -> None:
    config = ByteFallbackBpeConfig.from_dict({"vocab_size": 1000, "special": {"chat": ["<|u|>"]}})
    # A partial mapping takes the other names from the defaults of SpecialTokensConfig.
    assert config.fixed_tokens[:5] == ("<|bos|>", "<|eos|>", "<|pad|>", "<|u|>", "<0x00>")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"kind": "bpe", "vocab_size": 255},
            "vocab_size: 255 is too small; give a whole number from 256 to 300000",
        ),
        ({"kind": "bpe", "vocab_size": 300_001}, "vocab_size: 300001 is too large; give"),
        ({"kind": "bpe", "vocab_size": 256}, "vocab_size=256 .* choose 263 or more"),
        ({"kind": "byte_fallback_bpe", "vocab_size": 263}, "choose 264 or more"),
        ({"kind": "unigram", "vocab_size": 264}, "choose 265 or more"),
        ({"kind": "characters", "vocab_size": 2}, "choose 3 or more"),
        ({"kind": "bpe"}, "'vocab_size' is missing"),
        ({"kind": "bep", "vocab_size": 300}, "unknown kind 'bep'; did you mean 'bpe'"),
        ({"kind": "bpe", "vocab_size": 300, "unk": "<unk>"}, "unknown key 'unk'"),
        (
            {"kind": "bpe", "vocab_size": 300, "digits": 0},
            "digits: 0 is too small; give a whole number from 1 to 3",
        ),
        (
            {"kind": "bpe", "vocab_size": 300, "special": {"bos": "<|eos|>"}},
            "special token '<|eos|>' is given twice",
        ),
        (
            {"kind": "wordpiece", "vocab_size": 300, "unk": "<|eos|>"},
            "special token '<|eos|>' is given twice",
        ),
        (
            {"kind": "bytes", "special": {"eos": "$"}},
            "special token '\\$' is shorter than 2 characters",
        ),
        ({"kind": "bytes", "special": {"eox": "</s>"}}, "unknown key 'eox'; did you mean 'eos'"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("|", r"\|")) as raised:
        tokenizer_config(fields)
    assert "\n" not in str(raised.value)


def test_a_changed_config_is_checked_again() -> None:
    with pytest.raises(ConfigError, match="choose 263 or more"):
        BpeConfig(vocab_size=300).replace(vocab_size=256)
