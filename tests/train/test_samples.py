"""Samples during training begin as the training documents do."""

import pytest

from workhorse.data import DataConfig, sequence_start
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder
from workhorse.tokenizers import BytesConfig, Tokenizer, train_tokenizer
from workhorse.tokenizers.config import SpecialTokensConfig
from workhorse.train.recipe.training import SamplesConfig
from workhorse.train.validation import Sampler

BOS, EOS = 256, 257


@pytest.fixture
def tokenizer() -> Tokenizer:
    return train_tokenizer(BytesConfig(special=SpecialTokensConfig(pad=None, chat=())), [])


@pytest.mark.parametrize(
    ("bos", "eos", "empty", "text"),
    [
        (False, True, [EOS], [97]),  # the eos of the previous document, although there is a bos
        (True, True, [BOS], [BOS, 97]),
        (True, False, [BOS], [BOS, 97]),
    ],
)
def test_a_sample_begins_as_training_did(  # noqa: PLR0917
    decoder: Decoder, tokenizer: Tokenizer, bos: bool, eos: bool, empty: list[int], text: list[int]
) -> None:
    data = DataConfig(corpus="stdlib", bos=bos, eos=eos)
    config = SamplesConfig(prompts=("", "a"))
    sampler = Sampler(tokenizer, config, sequence_start(tokenizer, data), decoder.max_seq_len)
    assert sampler.tokens == [empty, text]


def test_where_nothing_begins_a_text_an_empty_prompt_is_refused(
    decoder: Decoder, tokenizer: Tokenizer
) -> None:
    begin = sequence_start(tokenizer, DataConfig(corpus="stdlib", eos=False))
    with pytest.raises(WorkhorseError, match="empty prompt, but training puts neither"):
        Sampler(tokenizer, SamplesConfig(prompts=("a", "")), begin, decoder.max_seq_len)
    assert Sampler(tokenizer, SamplesConfig(prompts=("a",)), begin, 32).tokens == [[97]]
