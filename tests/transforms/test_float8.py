"""Float8 matmuls: one-line errors if not possible; torchao's emulation runs on a CPU."""

import sys

import pytest
import torch
from torch import nn

from tests.train.conftest import MODEL
from workhorse.errors import WorkhorseError
from workhorse.nn import DecoderConfig
from workhorse.transforms.float8 import check_float8, multiply_in_float8

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))


def test_an_older_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A100")
    with pytest.raises(WorkhorseError, match=r"needs compute capability 8.9, and A100 has 8.0"):
        check_float8(CUDA, torch.bfloat16, 16)


@pytest.mark.usefixtures("hopper")
def test_other_types_and_lengths_and_no_torchao_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(WorkhorseError, match=r"needs train.dtype=bfloat16"):
        check_float8(CUDA, torch.float32, 16)
    with pytest.raises(WorkhorseError, match=r"divisible by 16, and it is 24"):
        check_float8(CUDA, torch.bfloat16, 24)
    monkeypatch.setitem(sys.modules, "torchao", None)
    with pytest.raises(
        WorkhorseError, match=r"needs torchao, which is not installed; .*pip install"
    ):
        check_float8(CUDA, torch.bfloat16, 32)


def test_layers_are_converted_and_stay_near() -> None:
    pytest.importorskip("torchao.float8")
    decoder = DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 16}).build()
    decoder.bfloat16()
    names, tokens = list(decoder.state_dict()), torch.randint(11, (2, 16))
    parameters = list(decoder.parameters())
    results = []
    for emulate in (False, True):
        if emulate:
            multiply_in_float8(decoder, emulate=True)
        decoder.zero_grad()
        logits = decoder(tokens).float()
        logits.logsumexp(-1).sum().backward()
        results.append((logits, *(weight.grad.float() for weight in parameters)))
    assert list(decoder.state_dict()) == names
    assert all(map(lambda a, b: a is b, decoder.parameters(), parameters))
    kinds = {type(m).__name__ for m in decoder.modules() if isinstance(m, nn.Linear)}
    assert kinds == {"Float8Linear", "Linear"}  # the head
    for plain, low in zip(*results, strict=True):
        assert (plain - low).norm() < 0.15 * plain.norm()
        assert not torch.equal(plain, low)
