"""The native training operators compute the same results as PyTorch's."""

import math

import pytest
import torch
import torch.nn.functional as F

from tests.native.machine import TRAINING, needs
from tests.train.conftest import MODEL
from workhorse.execute.lower.train import train_natively
from workhorse.execute.native_training.attention import TrainingSdpa
from workhorse.native import Operators
from workhorse.nn import DecoderConfig
from workhorse.nn.attention.kernels import Scoring, Sdpa
from workhorse.nn.attention.masks import AttentionPattern, Placement
from workhorse.nn.positions.absolute import alibi_slopes
from workhorse.nn.surgery import as_subclass
from workhorse.optim.adamw import AdamW, AdamWConfig
from workhorse.optim.master_weights import MasterWeights, round_weights, split
from workhorse.optim.muon import Muon, MuonConfig

pytestmark = needs("training")


def native_sdpa(scoring: Scoring) -> TrainingSdpa:
    return as_subclass(Sdpa(scoring, 0), TrainingSdpa, operators=TRAINING)


BOTH = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
"""Both dtypes; use with `can_attend`."""


@pytest.fixture
def can_attend(dtype: torch.dtype) -> None:
    if dtype not in TRAINING.attention_types:
        pytest.skip(f"this CPU leaves attention of {dtype} to PyTorch")


@pytest.mark.usefixtures("can_attend")
@pytest.mark.parametrize("dtype", [torch.bfloat16])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("shape", [(2, 3, 64, 32), (1, 2, 70, 64), (1, 1, 1030, 16), (1, 2, 2, 8)])
def test_attention_of_bfloat16_has_the_gradients_of_pytorchs(
    shape: tuple[int, ...], causal: bool, dtype: torch.dtype
) -> None:
    """The distance from float32 is less than 1 %.

    Scores differ little and their gradients much. Otherwise bfloat16 leaves few correct bits of
    gradients of two keys, also in PyTorch.
    """
    q, k, v = (torch.randn(shape) for _ in range(3))
    given = [x.to(dtype) for x in (q / 4, k, v)]
    above = (torch.randn(shape) + 4 * (v[..., :1, :] - v[..., 1:2, :])).to(dtype)
    kernel = native_sdpa(Scoring(scale=1 / math.sqrt(shape[3])))
    results = []
    for computed, native in ((torch.float32, False), (dtype, True)):
        q, k, v = (x.to(computed).requires_grad_() for x in given)
        if native:
            y = kernel(q, k, v, (None, causal))
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        results.append((y, *torch.autograd.grad(y, (q, k, v), above.to(computed))))
    for expected, ours in zip(*results, strict=True):
        assert (ours.float() - expected).norm() < 0.01 * expected.norm()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 64, 32),
        (1, 2, 70, 48),
        (1, 2, 33, 80),
        (1, 1, 530, 128),
        (1, 2, 17, 5),
        (2, 1, 1, 8),
        (1, 2, 70, 1),
    ],
)
def test_attention_of_float32_is_exact_to_rounding(shape: tuple[int, ...], causal: bool) -> None:
    """Half units in the last place of the largest element; the error of n sums grows as √n."""
    memory = torch.randn(shape[0], shape[2], 4, shape[1], shape[3])  # as a projection leaves heads
    *given, above = memory.permute(2, 0, 3, 1, 4)
    scoring = Scoring(scale=1 / math.sqrt(shape[3]))
    results = []
    for kernel, computed in (
        (Sdpa(scoring, 0), torch.float64),
        (native_sdpa(scoring), torch.float32),
    ):
        leaves = [x.to(computed).requires_grad_() for x in given]
        y = kernel(*leaves, (None, causal))
        results.append((y, *torch.autograd.grad(y, leaves, above.to(computed))))
    units = 8 + 2 * math.sqrt(max(shape[2:]))
    for exact, ours in zip(*results, strict=True):
        largest = max(x.abs().max() for x in (exact, *given, above))
        assert (ours - exact).abs().max() <= units * 2.0**-24 * largest


@BOTH
@pytest.mark.usefixtures("can_attend")
@pytest.mark.parametrize("kv_heads", [1, 2])
def test_query_heads_may_share_keys_and_values(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kv_heads: int
) -> None:
    """As close to float64 as with heads that share nothing."""
    memory = torch.randn(2, 40, 4 + 2 * kv_heads, 16).to(dtype).transpose(1, 2)
    given = memory.split((4, kv_heads, kv_heads), dim=1)
    above, scoring, results = torch.randn(2, 4, 40, 16).to(dtype), Scoring(scale=0.25), []
    for computed, kernel in ((torch.float64, Sdpa(scoring, 0)), (dtype, native_sdpa(scoring))):
        leaves = [x.to(computed).requires_grad_() for x in given]
        y = kernel(*leaves, (None, True))
        results.append((y, *torch.autograd.grad(y, leaves, above.to(computed))))
        monkeypatch.setattr(Sdpa, "forward", None)  # the operator must do it
    for exact, ours in zip(*results, strict=True):
        assert ours.shape == exact.shape
        assert (ours - exact).norm() < {2: 0.01, 4: 2e-6}[dtype.itemsize] * exact.norm()


@BOTH
@pytest.mark.usefixtures("can_attend")
@pytest.mark.parametrize(("seq", "kv_heads", "max_bias"), [(2, 6, 8), (70, 6, 4), (530, 3, 16)])
def test_alibi_is_computed_from_positions(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, seq: int, kv_heads: int, max_bias: int
) -> None:
    """As close to float64 as without biases; six slopes are not one geometric sequence."""
    slopes = alibi_slopes(6, max_bias)
    pattern = AttentionPattern(alibi_slopes=slopes, alibi_scale=0.7)
    at = torch.arange(seq)[None]
    place, scoring, results = Placement(at, at, aligned=True), Scoring(scale=0.25), []
    memory = torch.randn(2, seq, 6 + 2 * kv_heads, 16).to(dtype).transpose(1, 2)
    given = memory.split((6, kv_heads, kv_heads), dim=1)
    above = torch.randn(2, 6, seq, 16).to(dtype)
    for computed, kernel in ((torch.float64, Sdpa(scoring, 0)), (dtype, native_sdpa(scoring))):
        leaves = [x.to(computed).requires_grad_() for x in given]
        y = kernel(*leaves, kernel.render(pattern, place, computed))
        results.append((y, *torch.autograd.grad(y, leaves, above.to(computed))))
        monkeypatch.setattr(Sdpa, "forward", None)  # the operator must do it
    for exact, ours in zip(*results, strict=True):
        assert (ours - exact).norm() < {2: 0.01, 4: 2e-6}[dtype.itemsize] * exact.norm()


@pytest.mark.parametrize("change", ["odd", "window", "documents", "padding", "bfloat16", "encoder"])
def test_alibi_that_the_operator_cannot_compute_pytorch_does(change: str) -> None:
    pattern = AttentionPattern(
        causal=change != "encoder",
        window=3 if change == "window" else None,
        alibi_slopes=(0.5, 0.25),
        alibi_bfloat16=change == "bfloat16",
    )
    at = torch.tensor([[0, 1, 2, 3, 4, 5, 6][: 7 if change == "odd" else 6]])
    documents = None
    if change == "documents":
        at, documents = torch.tensor([[0, 1, 0, 1, 2, 3]]), torch.tensor([[1, 1, 2, 2, 2, 2]])
    if change == "padding":
        at = torch.tensor([[-1, -1, 0, 1, 2, 3]])
    place = Placement(at, at, documents, aligned=change not in ("documents", "padding"))
    q, k, v = torch.randn(3, 1, 2, at.shape[1], 16, dtype=torch.bfloat16)
    plain, native = Sdpa(Scoring(scale=0.3), 2), native_sdpa(Scoring(scale=0.3))
    expected = plain(q, k, v, plain.render(pattern, place, q.dtype))
    assert torch.equal(native(q, k, v, native.render(pattern, place, q.dtype)), expected)


@BOTH
@pytest.mark.usefixtures("can_attend")
def test_a_later_token_changes_no_earlier_output(dtype: torch.dtype) -> None:
    q, k, v = torch.randn(3, 1, 2, 150, 16).to(dtype)
    before, _ = TRAINING.attention(q, k, v, scale=0.25, causal=True, slopes=None)
    k[:, :, 100:], v[:, :, 100:] = 50, torch.nan
    after, _ = TRAINING.attention(q, k, v, scale=0.25, causal=True, slopes=None)
    seen = 96 if dtype == torch.float32 else 64  # whole tiles of queries
    assert torch.equal(before[:, :, :seen], after[:, :, :seen])
    assert after[:, :, 100:].isnan().all()


def test_float32_output_does_not_depend_on_later_tokens() -> None:
    """Bitwise: a prefix has the same outputs and normalisers by itself as within the sequence."""
    q, k, v = torch.randn(3, 2, 2, 150, 20)
    whole = TRAINING.attention(q, k, v, scale=0.25, causal=True, slopes=None)
    for length in (1, 17, 64, 100):
        begun = TRAINING.attention(
            *(x[:, :, :length] for x in (q, k, v)), scale=0.25, causal=True, slopes=None
        )
        for alone, together in zip(begun, whole, strict=True):
            assert torch.equal(alone, together[:, :, :length])


@pytest.mark.parametrize("change", ["mask", "odd", "float64", "strided", "half words", "dropout"])
def test_what_the_operator_cannot_do_pytorch_does(change: str) -> None:
    seq = 7 if change == "odd" else 8
    dtype = torch.float64 if change == "float64" else torch.bfloat16
    q, k, v = (torch.randn(2, 4, seq, 16, dtype=dtype) for _ in range(3))
    if change == "strided":
        v = v.mT.contiguous().mT
    if change == "half words":
        v = torch.randn(2, 4, seq, 17, dtype=dtype)[..., :16]
    mask = torch.ones(seq, seq, dtype=torch.bool).tril() if change == "mask" else None
    scoring = Scoring(scale=0.3, dropout=0.5 if change == "dropout" else 0.0)
    results = []
    for kernel in (Sdpa(scoring, 4), native_sdpa(scoring)):
        torch.manual_seed(0)
        given = [x.detach().requires_grad_() for x in (q, k, v)]
        y = kernel(*given, (mask, mask is None))
        results.append((y, *torch.autograd.grad(y.sum(), given)))
    assert all(map(torch.equal, *results))


@pytest.mark.usefixtures("can_attend")
@pytest.mark.parametrize("dtype", [torch.bfloat16])
def test_gradients_from_above_may_have_rows_of_half_words(dtype: torch.dtype) -> None:
    above = torch.randn(1, 2, 8, 17).to(dtype)[..., :16]
    given = [torch.randn(1, 2, 8, 16).to(dtype).requires_grad_() for _ in range(3)]
    y = native_sdpa(Scoring(scale=0.3))(*given, (None, True))
    strided, whole = (torch.autograd.grad(y, given, g, True) for g in (above, above.contiguous()))
    assert all(map(torch.equal, strided, whole))


def test_kernels_are_replaced_from_outside_and_weights_stay() -> None:
    decoder = DecoderConfig.from_dict({**MODEL, "vocab_size": 11, "max_seq_len": 8}).build()
    names = [name for name, _ in decoder.named_parameters()]
    tokens = torch.randint(11, (2, 8))
    before = decoder(tokens)
    train_natively(decoder, Operators(training=TRAINING))
    assert all(type(layer.attention.kernel) is TrainingSdpa for layer in decoder.layers)
    assert [name for name, _ in decoder.named_parameters()] == names
    torch.testing.assert_close(decoder(tokens), before)
    with torch.no_grad():  # as in validation
        torch.testing.assert_close(decoder(tokens), before)


@pytest.mark.parametrize("mean_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("gathered", [False, True])
def test_adamw_in_one_pass_is_adamw(gathered: bool, mean_dtype: str) -> None:
    start, gradients = torch.randn(300, 111), torch.randn(4, 300, 111).bfloat16()
    results = []
    for native in (True, False):
        module = torch.nn.Linear(111, 300, bias=False)
        module.weight.data = start.clone()
        low_bits = round_weights(module)
        masters = MasterWeights(
            dict(module.named_parameters()), low_bits, operators=TRAINING if native else None
        )
        config = AdamWConfig.from_dict({"mean_dtype": mean_dtype})
        adamw = AdamW({"weight": module.weight}, config, weight_decay=0.1, masters=masters)
        for gradient in gradients:
            module.weight.grad = gradient.clone()
            if gathered:
                masters.accumulate()
            adamw.step(0.9, 0.3)
            masters.zero_grad()
        results.append((masters.read("weight"), *adamw.tensors().values()))
    weights, means, *others = zip(*results, strict=True)
    for ours, plain in (weights, *others):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    # A mean may be rounded the other way if its float32 values differ in their last bit.
    torch.testing.assert_close(
        *means, **({} if mean_dtype == "bfloat16" else {"atol": 1e-6, "rtol": 1e-5})
    )


def test_adamw_of_float32_in_one_pass_is_pytorchs() -> None:
    """Several weights: one is larger than a piece, and one was updated before."""
    shapes = [(300, 111), (7,), (5, 3)]
    starts = [torch.randn(shape) for shape in shapes]
    gradients = [[torch.randn(shape) for shape in shapes] for _ in range(3)]
    results = []
    for native in (True, False):
        weights = {str(i): torch.nn.Parameter(start.clone()) for i, start in enumerate(starts)}
        masters = MasterWeights(weights, operators=TRAINING if native else None)
        adamw = AdamW(weights, AdamWConfig(), weight_decay=0.1, masters=masters)
        adamw.updates[1].fill_(4)
        for given in gradients:
            for weight, gradient in zip(weights.values(), given, strict=True):
                weight.grad = gradient.clone()
            adamw.step(0.9, 0.3)
        results.append([*weights.values(), *adamw.tensors().values()])
    for ours, plain in zip(*results, strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("updates", "message"),
    [
        ([], "weights and their optimizer states differ in number"),
        ([torch.zeros(2)], "one float32 element"),
    ],
)
def test_adamw_counts_the_updates_of_each_weight(updates: list[torch.Tensor], message: str) -> None:
    numbers = [torch.ones(3)]
    rates = {
        "grad_scale": 1.0,
        "rate": 0.1,
        "beta1": 0.9,
        "beta2": 0.9,
        "eps": 0.1,
        "weight_decay": 0.0,
    }
    with pytest.raises(RuntimeError, match=message):
        TRAINING.adamw_(numbers, [], numbers, numbers, numbers, updates, **rates)


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("shape", [(40, 50), (50, 40), (3, 37, 20), (5, 7)])
@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_in_two_passes_is_muon(
    monkeypatch: pytest.MonkeyPatch, *, shape: tuple[int, ...], nesterov: bool, gathered: bool
) -> None:
    """Within the rounding of directions to bfloat16."""
    monkeypatch.setattr("workhorse.optim.muon.iteration_dtype", lambda _: torch.bfloat16)
    starts, gradients = torch.randn(2, *shape), torch.randn(3, 2, *shape).bfloat16()
    results = []
    for native in (True, False):
        holder = torch.nn.ParameterList(list(starts.clone()))
        low_bits = round_weights(holder)
        weights = dict(holder.named_parameters())
        masters = MasterWeights(weights, low_bits, operators=TRAINING if native else None)
        config = MuonConfig(learning_rate=0.1, nesterov=nesterov)
        muon = Muon(weights, config, masters=masters)
        for pair in gradients:
            for weight, gradient in zip(holder, pair, strict=True):
                weight.grad = gradient.clone()
            if gathered:
                masters.accumulate()
            muon.step(0.9, 0.3)
            masters.zero_grad()
        wide = [masters.read(name) for name in weights]
        assert all(torch.equal(w, split(x)[0]) for w, x in zip(holder, wide, strict=True))
        results.append((wide, list(muon.tensors().values())))
    (ours, our_momenta), (plain, momenta) = results
    for one, other in zip(our_momenta, momenta, strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
    for one, other, start in zip(ours, plain, starts, strict=True):
        assert (one - other).norm() < 0.01 * (other - start).norm()
