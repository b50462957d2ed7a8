"""`Decoding.attend` against attention in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from tests.native.machine import DECODING, needs

pytestmark = needs("decoding")
BLOCK = 16
SHAPES = [  # batch, heads, key heads, queries, slots, width, width of values
    (1, 12, 12, 1, 192, 64, 64),
    (1, 32, 4, 1, 45, 64, 64),
    (3, 6, 2, 4, 37, 40, 24),
    (2, 4, 1, 1, 1, 7, 5),
    (2, 2, 2, 3, 300, 80, 80),
    (4, 3, 3, 1, 17, 128, 16),
]
TOLERANCE = {torch.float32: 5e-6, torch.bfloat16: 2e-2}
Arguments = dict[str, Tensor]


def made(shape: tuple[int, ...], dtype: torch.dtype, hidden: bool) -> Arguments:
    """Queries, and keys and values in blocks in random order."""
    batch, heads, kv_heads, seq, slots, width, value_width = shape
    each = -(-slots // BLOCK)
    blocks = batch * each + 2
    last = torch.full((batch, seq), slots)
    first = torch.zeros_like(last)
    if hidden:
        last -= torch.randint(slots, last.shape)
        first = torch.minimum(torch.randint(slots, last.shape), last - 1)
    return {
        "q": torch.randn(batch, seq, heads, width, dtype=dtype).transpose(1, 2),
        "k": torch.randn(kv_heads, blocks, BLOCK, width, dtype=dtype),
        "v": torch.randn(kv_heads, blocks, BLOCK, value_width, dtype=dtype),
        "table": torch.randperm(blocks)[: batch * each].view(batch, each),
        "first": first,
        "last": last,
    }


def expected(given: Arguments, scale: float) -> Tensor:
    """Attention in float64, with the blocks concatenated."""
    k, v = (given[name][:, given["table"]].transpose(0, 1).flatten(2, 3) for name in ("k", "v"))
    slots = torch.arange(k.shape[2])
    last = given["last"][..., None]
    seen = ((slots >= given["first"][..., None]) & (slots < last))[:, None]
    slopes = given.get("slopes", torch.zeros(1)).double()
    bias = slopes[:, None, None] * (slots - (last - 1))[:, None]
    return scaled_dot_product_attention(
        *(given["q"].double(), k.double(), v.double()),
        attn_mask=bias.masked_fill(~seen, -torch.inf),
        scale=scale,
        enable_gqa=True,
    )


def attend(given: Arguments, scale: float = 1.0) -> Tensor:
    return DECODING.attend(**given, scale=scale)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_attention(
    shape: tuple[int, ...], hidden: bool, biased: bool, dtype: torch.dtype
) -> None:
    given = made(shape, dtype, hidden)
    if biased:
        given["slopes"] = torch.rand(shape[1])
    found = attend(given, 0.3)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected(given, 0.3), atol=TOLERANCE[dtype], rtol=0)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_query_has_the_same_bits_whatever_is_beside_it(dtype: torch.dtype) -> None:
    """Other rows, other queries, other blocks, other threads."""
    given = made((3, 8, 2, 4, 70, 64, 64), dtype, hidden=True) | {"slopes": torch.rand(8)}
    together = attend(given)
    k, v = given["k"], given["v"]
    for row in range(3):
        for place in range(4):
            alone = dict(given, table=torch.arange(5)[None])
            alone["k"], alone["v"] = (stored[:, given["table"][row]] for stored in (k, v))
            alone["q"] = given["q"][row : row + 1, :, place : place + 1]
            for bound in ("first", "last"):
                alone[bound] = given[bound][row : row + 1, place : place + 1].contiguous()
            assert torch.equal(attend(alone), together[row : row + 1, :, place : place + 1])


@pytest.mark.parametrize(("heads", "kv_heads"), [(14, 2), (5, 1), (71, 1)])
@pytest.mark.parametrize("threads", [4, 10, 13])
def test_heads_are_shared_out_among_any_threads(heads: int, kv_heads: int, threads: int) -> None:
    given = made((1, heads, kv_heads, 1, 45, 8, 8), torch.float32, hidden=False)
    before, threads_before = attend(given), torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        assert torch.equal(attend(given), before)
    finally:
        torch.set_num_threads(threads_before)


@pytest.mark.parametrize("shape", [(0, 4, 2, 1, 45, 8, 8), (2, 4, 2, 0, 45, 8, 8)])
def test_nothing_may_ask(shape: tuple[int, ...]) -> None:
    given = made(shape, torch.float32, hidden=False)
    assert attend(given).shape == given["q"].shape


def test_slots_that_are_not_seen_change_nothing() -> None:
    given = made((2, 4, 2, 1, 40, 16, 16), torch.float32, hidden=False)
    given["first"], given["last"] = torch.tensor([[3], [17]]), torch.tensor([[30], [40]])
    before = attend(given)
    k, v, table = given["k"], given["v"], given["table"]
    for stored in (k, v):
        stored[:, table[0, 0], :3] = torch.nan
        stored[:, table[0, 1], 14:] = torch.inf
        stored[:, table[0, 2]] = torch.nan
        stored[:, table[1, 0]] = torch.nan
        stored[:, table[1, 1], 0] = torch.inf
    assert torch.equal(attend(given), before)


def test_a_query_that_sees_nothing_gets_zeros() -> None:
    given = made((2, 2, 2, 2, 20, 16, 16), torch.float32, hidden=False)
    given["last"][1, 0] = 0
    found = attend(given)
    assert not found[1, :, 0].any()
    assert found[1, :, 1].any()
    assert found[0].all()


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_numbers_that_are_not_finite_show(where: str) -> None:
    given = made((1, 2, 2, 1, 33, 32, 32), torch.float32, hidden=False)
    if where == "q":
        given["q"][0, 1, 0, 3] = torch.nan
    else:
        given[where][1, given["table"][0, 1], 0, 3] = torch.nan
    found = attend(given)
    assert found[0, 0].isfinite().all()
    assert found[0, 1].isnan().any()


def test_large_scores_do_not_overflow() -> None:
    given = made((1, 1, 1, 1, 50, 16, 16), torch.float32, hidden=False)
    given["q"] *= 1e3
    torch.testing.assert_close(attend(given).double(), expected(given, 1.0), atol=1e-3, rtol=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("another width", {"k": torch.zeros(2, 5, BLOCK, 16)}),
        ("another type", {"v": torch.zeros(2, 5, BLOCK, 8, dtype=torch.float64)}),
        ("heads that do not divide", {"q": torch.zeros(1, 3, 1, 8)}),
        ("a block of 15", {"k": torch.zeros(2, 5, 15, 8), "v": torch.zeros(2, 5, 15, 8)}),
        ("a table of other rows", {"table": torch.zeros(2, 3, dtype=torch.int64)}),
        ("a table of small numbers", {"table": torch.zeros(1, 3, dtype=torch.int32)}),
        ("bounds of other queries", {"last": torch.zeros(1, 2, dtype=torch.int64)}),
        ("slopes of other heads", {"slopes": torch.zeros(3)}),
    ],
)
def test_what_does_not_fit_is_refused(name: str, change: Arguments) -> None:
    del name
    given = {
        "q": torch.zeros(1, 2, 1, 8),
        "k": torch.zeros(2, 5, BLOCK, 8),
        "v": torch.zeros(2, 5, BLOCK, 8),
        "table": torch.zeros(1, 3, dtype=torch.int64),
        "first": torch.zeros(1, 1, dtype=torch.int64),
        "last": torch.ones(1, 1, dtype=torch.int64),
    }
    with pytest.raises(RuntimeError, match="workhorse: "):
        attend({**given, **change})
