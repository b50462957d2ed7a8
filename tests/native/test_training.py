"""The native operators of training compute what PyTorch's own do."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.train.conftest import MODEL
from workhorse.native import training
from workhorse.nn import DecoderConfig
from workhorse.nn.kernels import Scoring, Sdpa
from workhorse.train.adamw import AdamW, AdamWConfig
from workhorse.train.cpu_attention import TrainingSdpa, speed_up_attention
from workhorse.train.masters import Masters


@pytest.fixture(autouse=True)
def _operators() -> None:
    if reason := training.why_not():
        pytest.skip(reason)


@pytest.mark.skipif(not training.multiplies_tiles(), reason="no matrix instructions")
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64, 32), (1, 2, 70, 64), (1, 1, 1030, 16), (1, 2, 2, 8)])
def test_attention_has_the_gradients_of_pytorchs(shape: tuple[int, ...], causal: bool) -> None:
    """No further from those of float32 than PyTorch's own in bfloat16, or 1 %."""
    given = [torch.randn(shape).bfloat16() for _ in range(3)]
    above = torch.randn(shape).bfloat16()
    kernel = TrainingSdpa(Scoring(scale=1 / math.sqrt(shape[3])), n_heads=0)
    results = []
    for dtype, native in ((torch.float32, False), (torch.bfloat16, True)):
        q, k, v = (x.to(dtype).requires_grad_() for x in given)
        if native:
            y = kernel(q, k, v, (None, causal))
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        results.append((y, *torch.autograd.grad(y, (q, k, v), above.to(dtype))))
    for expected, ours in zip(*results, strict=True):
        assert (ours.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("change", ["mask", "groups", "odd", "float32", "dropout"])
def test_what_the_operator_cannot_do_pytorch_does(change: str) -> None:
    seq = 7 if change == "odd" else 8
    dtype = torch.float32 if change == "float32" else torch.bfloat16
    q, k, v = (torch.randn(2, 4, seq, 16, dtype=dtype) for _ in range(3))
    if change == "groups":
        k, v = k[:, :2], v[:, :2]
    mask = torch.ones(seq, seq, dtype=torch.bool).tril() if change == "mask" else None
    scoring = Scoring(scale=0.3, dropout=0.5 if change == "dropout" else 0.0)
    results = []
    for kernel in (Sdpa(scoring, 4), TrainingSdpa(scoring, 0)):
        torch.manual_seed(0)
        given = [x.clone().requires_grad_() for x in (q, k, v)]
        y = kernel(*given, (mask, mask is None))
        results.append((y, *torch.autograd.grad(y.sum(), given)))
    assert all(map(torch.equal, *results))


def test_kernels_are_replaced_from_outside_and_weights_stay() -> None:
    decoder = DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 8}).build()
    names = [name for name, _ in decoder.named_parameters()]
    tokens = torch.randint(11, (2, 8))
    before = decoder(tokens)
    speed_up_attention(decoder)
    assert all(type(layer.attention.kernel) is TrainingSdpa for layer in decoder.layers)
    assert [name for name, _ in decoder.named_parameters()] == names
    assert torch.equal(decoder(tokens), before)


@pytest.mark.parametrize("gathered", [False, True])
def test_adamw_in_one_pass_is_adamw(monkeypatch: pytest.MonkeyPatch, gathered: bool) -> None:
    start, gradients = torch.randn(300, 111), torch.randn(4, 300, 111).bfloat16()
    results = []
    for native in (True, False):
        monkeypatch.setattr(training, "loaded", lambda native=native: native)
        module = torch.nn.Linear(111, 300, bias=False)
        module.weight.data = start.clone()
        masters = Masters(module)
        adamw = AdamW({"w": module.weight}, AdamWConfig(), weight_decay=0.1, masters=masters)
        for gradient in gradients:
            module.weight.grad = gradient.clone()
            if gathered:
                masters.gather([module.weight])
            adamw.step(0.9, 0.3)
            masters.sums.clear()
        results.append((masters.read(module.weight), *adamw.tensors().values()))
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
