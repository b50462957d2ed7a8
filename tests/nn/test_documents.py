"""Packed documents: each document gives the same results as in a separate row."""

import pytest
import torch
from hypothesis import given, settings

from tests.nn.grid import COVERING, configs, error, make, mixes_experts, name, random_tokens
from workhorse.errors import WorkhorseError
from workhorse.nn import Context, DecoderConfig
from workhorse.nn.context import number_runs

SEQ = 12
LENGTHS = [[5, 1, 4, 2], [SEQ]]
every_config = pytest.mark.parametrize("config", COVERING, ids=map(name, range(len(COVERING))))


def assert_documents_stand_alone(config: DecoderConfig) -> None:
    decoder = make(config)
    tokens = random_tokens(config, 2, SEQ)
    documents = torch.tensor(
        [[n for n, length in enumerate(row) for _ in range(length)] for row in LENGTHS]
    )
    with torch.no_grad():
        packed = decoder(tokens, documents=documents)
        for row, lengths in enumerate(LENGTHS):
            start = 0
            for length in lengths:
                end = start + length
                alone = decoder(tokens[row : row + 1, start:end])
                assert error(packed[row : row + 1, start:end], alone) <= 1e-5
                start = end


@every_config
def test_packed_documents_equal_each_document_alone(config: DecoderConfig) -> None:
    assert_documents_stand_alone(config)


@settings(max_examples=20)
@given(configs)
def test_packed_documents_equal_each_alone_in_any_combination(config: DecoderConfig) -> None:
    assert_documents_stand_alone(config)


def test_a_number_that_comes_back_is_another_document() -> None:
    """Otherwise a token would see a later one: both would have position 0 of the same document."""
    config = next(config for config in COVERING if not mixes_experts(config))
    decoder = make(config)
    tokens = random_tokens(config, 1, 9)
    changed = tokens.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % config.vocab_size
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 0, 0, 0]])
    logits = decoder(tokens, documents=documents)
    assert torch.equal(logits[:, :6], decoder(changed, documents=documents)[:, :6])
    distinct = decoder(tokens, documents=torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2]]))
    assert torch.equal(logits, distinct)


def test_positions_count_from_0_in_each_document() -> None:
    documents = torch.tensor([[7, 7, 7, 3, 4, 4], [1, 1, 1, 1, 1, 1]])
    runs, starts = number_runs(documents)
    assert runs.tolist() == [[1, 1, 1, 2, 3, 3], [1, 1, 1, 1, 1, 1]]
    assert starts.tolist() == [[0, 0, 0, 3, 4, 4], [0, 0, 0, 0, 0, 0]]
    context = Context(2, 6, torch.device("cpu"), documents=documents)
    assert context.positions.tolist() == [[0, 1, 2, 0, 0, 1], [0, 1, 2, 3, 4, 5]]


def test_documents_and_a_cache_exclude_each_other() -> None:
    decoder = make(COVERING[0])
    tokens = random_tokens(COVERING[0], 1, 4)
    with pytest.raises(WorkhorseError, match=r"^documents cannot be used with a cache; give each"):
        decoder(tokens, documents=torch.zeros_like(tokens), cache=decoder.new_cache(1, 8))


@pytest.mark.parametrize("given_as", ["positions", "documents"])
def test_one_number_for_each_token(given_as: str) -> None:
    numbers = torch.zeros(2, 3, dtype=torch.int64)
    with pytest.raises(
        WorkhorseError,
        match=rf"^{given_as} has shape \(2, 3\) for tokens of shape \(2, 4\); give one elemen",
    ):
        Context(2, 4, torch.device("cpu"), **{given_as: numbers})
