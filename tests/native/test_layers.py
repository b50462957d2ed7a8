"""Norms, activations and the loss of a training step, against float64, with every tail length."""

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.native.machine import TRAINING, needs
from workhorse.execute.native_training.feedforward import activation_of
from workhorse.native.blocks import Activation
from workhorse.nn.feedforward import ReluSquared
from workhorse.nn.logprobs import Shaping, score

HALF_ULP = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
ACTIVATIONS = {
    "gelu": nn.GELU(),
    "gelu_tanh": nn.GELU(approximate="tanh"),
    "silu": nn.SiLU(),
    "relu": nn.ReLU(),
    "relu2": ReluSquared(),
    "sigmoid": nn.Sigmoid(),
}


pytestmark = needs("training")
can_attend = pytest.mark.skipif(
    TRAINING is None or torch.bfloat16 not in TRAINING.attention_types,
    reason="this CPU leaves attention of bfloat16 to PyTorch",
)


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def named(name: str) -> Activation:
    act = activation_of(ACTIVATIONS[name])
    assert act is not None
    return act


def exact_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    offset: float,
    eps: float,
    centred: bool,
) -> Tensor:
    if centred:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    y = y if weight is None else y * (weight + offset)
    return y if bias is None else y + bias


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 7, 16, 33, 384])
@pytest.mark.parametrize(
    ("centred", "weighted", "biased", "offset"),
    [
        (True, True, True, 0),
        (True, True, False, 1),
        (True, False, False, 0),
        (False, True, False, 1),
    ],
)
def test_norms(
    dtype: torch.dtype, width: int, *, centred: bool, weighted: bool, biased: bool, offset: float
) -> None:
    """Rounded once: float32's error grows with the cancellation in a row, by a factor below 64."""
    x = (torch.randn(130, width) * 2 + 1).to(dtype)
    weight = torch.randn(width).to(dtype) if weighted else None
    bias = torch.randn(width).to(dtype) if biased else None
    above = torch.randn(130, width).to(dtype)
    options = {"offset": offset, "centred": centred}
    y, moments = TRAINING.norm(x, weight, bias, eps=1e-3, **options)
    dx, sums = TRAINING.norm_backward(above, x, moments, weight, None, **options)

    given = [t if t is None else t.double().requires_grad_() for t in (x, weight, bias)]
    expected = exact_norm(*given, eps=1e-3, **options)
    expected.backward(above.double())
    slack = 64 * 2.0**-24
    scale = expected.abs().max()
    assert ((y - expected).abs() <= HALF_ULP[dtype] * expected.abs() + slack * scale).all()
    pairs = [(dx, given[0].grad, HALF_ULP[dtype])]
    if weighted:
        pairs.append((sums[0], given[1].grad, 0))
    if biased:
        pairs.append((sums[1], given[2].grad, 0))
    for ours, exact, rounding in pairs:
        largest = max(exact.abs().max(), above.abs().max())
        assert ((ours - exact).abs() <= rounding * exact.abs() + 20 * slack * largest).all()


@pytest.mark.parametrize("width", [7, 48])
def test_a_sum_is_normed_and_gradients_are_added_where_they_meet(width: int) -> None:
    x, branch, above, other = torch.randn(4, 100, width).bfloat16()
    options = {"offset": 0.0, "centred": True}
    total, y, moments = TRAINING.add_norm(x, branch, None, None, eps=1e-5, **options)
    assert torch.equal(total, x + branch)
    assert torch.equal(y, TRAINING.norm(total, None, None, eps=1e-5, **options)[0])
    alone, _ = TRAINING.norm_backward(above, total, moments, None, None, **options)
    joined, _ = TRAINING.norm_backward(above, total, moments, None, other, **options)
    assert torch.equal(joined, alone + other)


def test_a_norms_gradient_does_not_depend_on_threads(threads: Callable[[int], None]) -> None:
    x, above, weight = torch.randn(1000, 48), torch.randn(1000, 48), torch.randn(48)
    results = []
    for count in (1, 2, 3):
        threads(count)
        _, moments = TRAINING.norm(x, weight, None, offset=0, eps=1e-5, centred=True)
        results.append(
            TRAINING.norm_backward(above, x, moments, weight, None, offset=0, centred=True)
        )
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_number_has_its_image_and_slope(name: str) -> None:
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    act = named(name)
    x = numbers.double().requires_grad_()
    exact = ACTIVATIONS[name](x)
    (slope,) = torch.autograd.grad(exact.sum(), x)
    y = TRAINING.activation(numbers, None, act)
    again, dx = TRAINING.activation_backward(torch.ones_like(numbers), numbers, None, act)
    for ours, expected in ((y, exact), (again, exact), (dx, slope)):
        rounded = expected.detach().bfloat16().double()
        least = torch.finfo(torch.bfloat16).tiny  # smaller values may become 0
        torch.testing.assert_close(ours.double(), rounded, rtol=0, atol=least, equal_nan=True)


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 40_000])
def test_gated_activations(name: str, n: int) -> None:
    """Value or slope, and the product with two factors, are rounded: up to three times."""
    gate, up, above = torch.randn(3, n).bfloat16()
    act = named(name)
    y = TRAINING.activation(gate, up, act)
    results = [y, *TRAINING.activation_backward(above, gate, up, act)]
    g, u = (t.double().requires_grad_() for t in (gate, up))
    exact = ACTIVATIONS[name](g) * u
    expected = [exact, exact, *torch.autograd.grad(exact, (g, u), above.double())]
    for ours, wanted in zip(results, expected, strict=True):
        assert ((ours - wanted).abs() <= 3 * HALF_ULP[torch.bfloat16] * wanted.abs()).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_of_float32_are_exact_to_rounding(name: str) -> None:
    """Within 8 half units in the last place of the value, or of half of x if that is larger."""
    x = torch.cat((torch.linspace(-15, 15, 30_001), torch.randn(1001), torch.tensor([0.0, -0.0])))
    exact_x = x.double().requires_grad_()
    exact = ACTIVATIONS[name](exact_x)
    (slope,) = torch.autograd.grad(exact.sum(), exact_x)
    y = TRAINING.activation(x, None, named(name))
    again, dx = TRAINING.activation_backward(torch.ones_like(x), x, None, named(name))
    assert torch.equal(y, again)
    largest = exact.detach().abs()
    if name.startswith("gelu"):
        largest = torch.maximum(largest, x.abs() / 2)
    assert ((y - exact).abs() <= 8 * HALF_ULP[x.dtype] * largest + 1e-37).all()
    assert ((dx - slope).abs() <= 4 * HALF_ULP[x.dtype] * slope.abs().clamp(min=1)).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 33, 40_000])
def test_gated_activations_of_float32(name: str, n: int) -> None:
    gate, up, above = torch.randn(3, n)
    y = TRAINING.activation(gate, up, named(name))
    again, dgate, dup = TRAINING.activation_backward(above, gate, up, named(name))
    assert torch.equal(y, again)
    g, u = (t.double().requires_grad_() for t in (gate, up))
    exact = ACTIVATIONS[name](g) * u
    of_gate, of_up = torch.autograd.grad(exact, (g, u), above.double())
    unit = 10 * HALF_ULP[torch.float32]
    assert ((y - exact).abs() <= unit * (exact.abs() + gate.abs() * up.abs())).all()
    assert ((dgate - of_gate).abs() <= unit * (above * up).abs() * (1 + gate.abs())).all()
    assert ((dup - of_up).abs() <= unit * (of_up.abs() + (above * gate).abs())).all()


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_what_is_not_a_number_stays_so(name: str) -> None:
    x = torch.tensor([float("nan"), 1.0] * 9)
    y = TRAINING.activation(x, None, named(name))
    assert torch.equal(y.isnan(), x.isnan())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [5, 16, 65, 1000])
@pytest.mark.parametrize("multiplier", [1.0, 0.5])
@pytest.mark.parametrize("entropy", [False, True])
def test_log_probabilities_and_their_gradient(
    dtype: torch.dtype, vocab: int, multiplier: float, entropy: bool
) -> None:
    logits = (torch.randn(40, vocab) * 5).to(dtype)
    logits[:, 1] = -torch.inf  # a logit bias can do this
    targets = torch.randint(2, vocab, (40,))
    targets[::7] = -100
    by = torch.randn(40, 4) * torch.tensor([1.0, 1.0, 0.01, 1.0])
    exact, options = logits.double(), {"multiplier": multiplier, "entropy": entropy}
    before = logits.clone()
    terms = TRAINING.score_(logits, targets, None, **options)
    assert torch.equal(logits, before)
    assert torch.equal(TRAINING.score_(logits, targets, by, **options), terms)
    expected = score(exact, targets, by.double(), shaping=Shaping(multiplier), entropy=entropy)
    torch.testing.assert_close(terms.double(), expected, rtol=1e-5, atol=1e-5)
    # The error of an exponential is proportional to its exponent, which is below 64. The factors
    # that multiply it, and differences of logits, are below 32.
    error = HALF_ULP[dtype] * exact.abs() + 32 * 64 * 2.0**-24
    assert ((logits - exact).abs() <= error).all()


def test_the_gradient_of_a_loss_is_exact_to_half_a_unit() -> None:
    logits, targets = torch.randn(40, 1000) * 5, torch.randint(1000, (40,))
    by = torch.tensor([-1.0, 0.0, 0.01, 0.0]).repeat(40, 1)
    exact = logits.double()
    score(exact, targets, by.double())
    TRAINING.score_(logits, targets, by, multiplier=1, entropy=False)
    assert ((logits - exact).abs() <= 2.0**-24 * exact.abs() + 64 * 2.0**-24).all()


def test_a_target_beyond_the_logits_is_refused() -> None:
    with pytest.raises(RuntimeError, match="target 5 is out of range for 5 logits"):
        TRAINING.score_(torch.zeros(2, 5), torch.tensor([0, 5]), None, multiplier=1, entropy=False)


def test_coefficients_of_another_type_are_refused() -> None:
    with pytest.raises(RuntimeError, match="four contiguous float32 coefficients"):
        TRAINING.score_(
            torch.zeros(2, 5),
            torch.tensor([0, 4]),
            torch.zeros(2, 4).double(),
            multiplier=1,
            entropy=False,
        )


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_logit_that_is_not_finite_shows(value: float) -> None:
    logits = torch.zeros(1, 20)
    logits[0, 3] = value
    terms = TRAINING.score_(logits, torch.tensor([0]), None, multiplier=1, entropy=True)
    assert not terms[0, :2].isfinite().all()


@can_attend
@pytest.mark.parametrize("causal", [True, False])
def test_attention_knows_its_normalisers(causal: bool) -> None:
    q, k, v = torch.randn(3, 2, 3, 70, 32).bfloat16()
    _, normaliser = TRAINING.attention(q, k, v, scale=0.2, causal=causal)
    scores = q.double() @ k.double().mT * 0.2
    if causal:
        scores = scores.masked_fill(~torch.ones(70, 70, dtype=torch.bool).tril(), -torch.inf)
    torch.testing.assert_close(normaliser, scores.logsumexp(-1).float(), rtol=1e-5, atol=1e-5)


@can_attend
def test_attention_reads_heads_where_the_projections_left_them() -> None:
    joined = torch.randn(2, 40, 3, 4, 16).bfloat16()  # (batch, seq, q k v, heads, head_dim)
    q, k, v = joined.permute(2, 0, 3, 1, 4)
    y, _ = TRAINING.attention(q, k, v, scale=0.25, causal=True)
    expected = F.scaled_dot_product_attention(q.float(), k.float(), v.float(), is_causal=True)
    assert (y.float() - expected).norm() < 0.01 * expected.norm()
    assert y.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize(
    "dtypes", [(torch.float32,), (torch.bfloat16,), (torch.float32, torch.bfloat16)]
)
def test_the_length_of_all_gradients(dtypes: tuple[torch.dtype, ...]) -> None:
    tensors = [torch.randn(n).to(dtype) for dtype in dtypes for n in (1, 17, 70_000)]
    exact = sum(x.double().square().sum() for x in tensors)
    ours = TRAINING.squared_length(tensors).double()
    torch.testing.assert_close(ours, exact, rtol=1024 * 2.0**-24, atol=0)  # 1024 sums in a lane


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("width", [1, 16, 37])
def test_sums_of_rows(width: int, dtype: torch.dtype, threads: Callable[[int], None]) -> None:
    """Each id occurs once and in order, for any number of threads."""
    ids, rows = torch.randint(40, (2000,)) * 2, torch.randn(2000, width).to(dtype)
    used, sums = TRAINING.sum_rows(ids, rows, 90)
    exact = torch.zeros(90, width, dtype=torch.float64).index_add_(0, ids, rows.double())
    assert torch.equal(used, ids.unique())
    assert sums.dtype == dtype
    allowed = exact[used].abs() * HALF_ULP[dtype] + 1e-4
    assert ((sums.double() - exact[used]).abs() <= allowed).all()
    for count in (1, 3):
        threads(count)
        assert torch.equal(TRAINING.sum_rows(ids, rows, 90)[1], sums)


@pytest.mark.parametrize("wrong", [-1, 5])
def test_sums_of_rows_of_ids_out_of_range_are_refused(wrong: int) -> None:
    with pytest.raises(RuntimeError, match=f"workhorse: id {wrong} is out of range for 5 rows"):
        TRAINING.sum_rows(torch.tensor([0, wrong]), torch.zeros(2, 3), 5)
