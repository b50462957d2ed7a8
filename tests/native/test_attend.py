"""`Decoding.attend` against attention in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.native.machine import DECODING, needs

pytestmark = needs("decoding")
SHAPES = [  # batch, heads, key heads, slots, width, width of values
    (1, 12, 12, 192, 64, 64),
    (1, 32, 4, 45, 64, 64),
    (3, 6, 2, 37, 40, 24),
    (2, 4, 1, 1, 7, 5),
    (2, 2, 2, 300, 80, 80),
    (4, 3, 3, 17, 128, 16),
]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}


def made(
    shape: tuple[int, ...], dtype: torch.dtype, hidden: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values that are parts of a larger cache, and a mask."""
    batch, heads, kv_heads, slots, width, value_width = shape
    q = torch.randn(batch, 1, heads, width, dtype=dtype).transpose(1, 2)
    k = torch.randn(batch, kv_heads, slots + 9, width, dtype=dtype)[:, :, :slots]
    v = torch.randn(batch, kv_heads, slots + 9, value_width, dtype=dtype)[:, :, :slots]
    mask = torch.rand(batch, 1, 1, slots) >= hidden
    mask[..., torch.randint(slots, ())] = True
    return q, k, v, mask


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("hidden", [0.0, 0.3, 0.9])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention(shape: tuple[int, ...], hidden: float, dtype: torch.dtype) -> None:
    q, k, v, mask = made(shape, dtype, hidden)
    some = None if hidden == 0 else mask
    expected = scaled_dot_product_attention(
        q.double(), k.double(), v.double(), attn_mask=some, scale=0.3, enable_gqa=True
    )
    found = DECODING.attend(q, k, v, some, 0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=0)


def test_hidden_slots_are_not_even_read() -> None:
    q, k, v, mask = made((2, 4, 2, 40, 16, 16), torch.float32, 0.0)
    mask[:, :, :, 30:] = False
    mask[1, :, :, :7] = False
    expected = DECODING.attend(q, k, v, mask, 1.0)
    k[:, :, 30:], v[1, :, :7] = torch.nan, torch.inf
    v[:, :, 30:], k[1, :, :7] = torch.nan, torch.nan
    assert torch.equal(DECODING.attend(q, k, v, mask, 1.0), expected)


def test_one_mask_may_serve_all_rows() -> None:
    q, k, v, mask = made((3, 2, 2, 20, 16, 16), torch.float32, 0.5)
    one = mask[:1]
    assert torch.equal(
        DECODING.attend(q, k, v, one, 1.0),
        DECODING.attend(q, k, v, one.expand(3, 1, 1, 20).contiguous(), 1.0),
    )


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    q, k, v, mask = made((2, 2, 2, 20, 16, 16), torch.float32, 0.0)
    mask[1] = False
    found = DECODING.attend(q, k, v, mask, 1.0)
    assert not found[1].any()
    assert found[0].any()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_numbers_that_are_not_finite_show(where: str) -> None:
    q, k, v, _ = made((1, 2, 2, 33, 32, 32), torch.float32, 0.0)
    {"q": q, "k": k, "v": v}[where][0, 1, 0, 3] = torch.nan
    found = DECODING.attend(q, k, v, None, 1.0)
    assert found[0, 0].isfinite().all()
    assert found[0, 1].isnan().any()


def test_large_scores_do_not_overflow() -> None:
    q, k, v, _ = made((1, 1, 1, 50, 16, 16), torch.float32, 0.0)
    expected = scaled_dot_product_attention(q.double() * 1e3, k.double(), v.double(), scale=1.0)
    torch.testing.assert_close(
        DECODING.attend(q * 1e3, k, v, None, 1.0).double(), expected, atol=1e-3, rtol=0
    )


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("two queries", {"q": torch.zeros(1, 2, 2, 8)}),
        ("another width", {"k": torch.zeros(1, 2, 5, 16)}),
        ("another type", {"v": torch.zeros(1, 2, 5, 8, dtype=torch.float64)}),
        ("heads that do not divide", {"q": torch.zeros(1, 3, 1, 8)}),
        ("no slots", {"k": torch.zeros(1, 2, 0, 8), "v": torch.zeros(1, 2, 0, 8)}),
        ("a mask of numbers", {"mask": torch.zeros(1, 1, 1, 5)}),
        ("a short mask", {"mask": torch.ones(1, 1, 1, 4, dtype=torch.bool)}),
    ],
)
def test_what_does_not_fit_is_refused(name: str, change: dict[str, Tensor]) -> None:
    del name
    given: dict[str, Tensor | None] = {
        "q": torch.zeros(1, 2, 1, 8),
        "k": torch.zeros(1, 2, 5, 8),
        "v": torch.zeros(1, 2, 5, 8),
        "mask": None,
    }
    given.update(change)
    with pytest.raises(RuntimeError, match="workhorse: "):
        DECODING.attend(**given, scale=1.0)  # pyright: ignore[reportArgumentType]
