"""Texts in blocks: whatever is done to the others, each text's logits are those it has alone."""

import random

import pytest
import torch
from torch import Tensor

from tests.nn.grid import CAUSAL, COVERING, error, fixed_length, make, name, random_tokens
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.blocks import CachedText
from workhorse.nn.cache.paged import PagedCache
from workhorse.nn.cache.paged_view import PagedView

TOLERANCE = 1e-5
SEQ = 20
ONE_TABLE = next(
    config
    for config in CAUSAL
    if not any(b.attention.reach().reach or b.convolution for b in config.blocks.values())
)
"""Its layers share the tables of each text."""
every_config_of_fixed_angles = pytest.mark.parametrize(
    "config",
    [config for config in CAUSAL if fixed_length(config) is None],
    ids=lambda config: name(COVERING.index(config)),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three tokens, so that a short text has several."""
    for module in ("blocks", "paged", "paged_view"):
        monkeypatch.setattr(f"workhorse.nn.cache.{module}.BLOCK", 3)


def read(decoder: Decoder, cache: PagedCache, new: dict[CachedText, Tensor]) -> list[Tensor]:
    """Let texts consume tokens, ends aligned; the last logits of each."""
    if not new:
        return []
    longest = max(map(len, new.values()))
    tokens = torch.zeros(len(new), longest, dtype=torch.int64)
    positions = torch.full_like(tokens, -1)
    for row, (text, some) in enumerate(new.items()):
        tokens[row, longest - len(some) :] = some
        positions[row, longest - len(some) :] = text.length + torch.arange(len(some))
    alike = all(len(some) == longest for some in new.values())
    view = PagedView(cache, list(new))
    logits = decoder(tokens, positions=None if alike else positions, cache=view)
    return list(logits[:, -1:])


class Texts:
    """Texts of a cache, what each holds, and one way after another to change them."""

    def __init__(self, decoder: Decoder, pick: random.Random) -> None:
        self.decoder = decoder
        self.cache = decoder.new_paged_cache(tokens=4 * SEQ, texts=4, slack=2)
        self.held: dict[CachedText, list[int]] = {}
        self.furthest: dict[CachedText, int] = {}
        self.pick = pick

    def open(self) -> None:
        if self.cache.fits(SEQ):
            self.held[self.cache.open(SEQ)] = []

    def close(self) -> None:
        self.cache.close(gone := self.pick.choice(list(self.held)))
        del self.held[gone]

    def fork(self) -> None:
        if self.cache.fits(SEQ):
            parent = self.pick.choice(list(self.held))
            child = self.cache.open(SEQ)
            self.cache.adopt(child, parent.length, parent.tables)
            self.held[child] = list(self.held[parent])
            self.furthest[child] = self.furthest.get(parent, 0)

    def go_back(self) -> None:
        text = self.pick.choice(list(self.held))
        kept = max(0, text.length - self.pick.randint(1, 2))
        if kept >= self.furthest.get(text, 0) - self.cache.slack:
            self.cache.truncate(text, kept)
            del self.held[text][kept:]

    def read(self) -> None:
        new: dict[CachedText, Tensor] = {}
        for text in self.pick.sample(list(self.held), self.pick.randint(1, len(self.held))):
            count = min(self.pick.choice((1, 1, 2, 3, 8)), SEQ - text.length)
            if count:
                new[text] = torch.randint(self.decoder.config.vocab_size, (count,))
        for text, logits in zip(new, read(self.decoder, self.cache, new), strict=True):
            self.held[text] += new[text].tolist()
            self.furthest[text] = max(self.furthest.get(text, 0), text.length)
            alone = self.decoder(torch.tensor([self.held[text]]))[:, -1:]
            assert error(logits[None], alone) <= TOLERANCE


@every_config_of_fixed_angles
@torch.no_grad()
def test_texts_that_come_go_fork_and_go_back(config: DecoderConfig) -> None:
    """At random, with windows that let blocks go and prompts in pieces."""
    pick = random.Random(COVERING.index(config))
    texts = Texts(make(config), pick)
    for _ in range(60):
        action = pick.choice((texts.read, texts.read, texts.open, texts.go_back, texts.fork))
        (action if texts.held else texts.open)()
        if len(texts.held) == 4:
            texts.close()
    while texts.held:
        texts.close()
    pools = texts.cache.pools.values()
    assert all(not any(pool.holders) and not pool.reserved for pool in pools)


@torch.no_grad()
def test_a_fork_shares_blocks_until_it_writes() -> None:
    decoder = make(ONE_TABLE)
    cache = decoder.new_paged_cache(tokens=40, texts=2)
    first, second = cache.open(12), cache.open(12)
    read(decoder, cache, {first: torch.arange(4)})
    cache.adopt(second, first.length, first.tables)
    assert second.tables == first.tables
    read(decoder, cache, {second: torch.arange(1)})
    (table,), (other,) = first.tables.values(), second.tables.values()
    assert table[0] == other[0]
    assert table[1] != other[1]


@torch.no_grad()
def test_what_a_broken_text_left_reaches_no_other() -> None:
    """Blocks are used again, and a number times zero is not zero if it is none."""
    decoder = make(ONE_TABLE, kernel="eager")
    cache = decoder.new_paged_cache(tokens=12, texts=2)
    broken = cache.open(12)
    read(decoder, cache, {broken: torch.arange(12)})
    for store in cache.stores:
        for stored in store.tensors(torch.empty(0), torch.empty(0)):
            stored[:, broken.tables[store.pool.reach]] = torch.nan
    cache.close(broken)
    short, long = cache.open(6), cache.open(6)
    read(decoder, cache, {short: torch.arange(1), long: torch.arange(4)})
    for logits in read(decoder, cache, {short: torch.arange(1), long: torch.arange(1)}):
        assert bool(logits.isfinite().all())


def test_room_is_kept_for_what_was_promised() -> None:
    cache = make(ONE_TABLE).new_paged_cache(tokens=12, texts=2)
    text = cache.open(9)
    assert cache.fits(3)
    with pytest.raises(
        WorkhorseError, match=r"a text of 12 tokens does not fit a cache of 12 with"
    ):
        cache.open(12)
    with pytest.raises(WorkhorseError, match=r"0 \+ 10 tokens do not fit a text of 9"):
        PagedView(cache, [text]).reserve([10])
    cache.close(text)
    cache.open(12)


@pytest.mark.parametrize(
    ("tokens", "texts", "message"),
    [
        (0, 1, "tokens=0 is not a whole"),
        (1, True, "texts=True is not a whole"),
        (9, -1, "texts=-1"),
    ],
)
def test_a_cache_of_nothing(tokens: int, texts: int, message: str) -> None:
    with pytest.raises(WorkhorseError, match=message):
        make(ONE_TABLE).new_paged_cache(tokens, texts)


@torch.no_grad()
def test_a_window_that_moved_on_is_not_read_again() -> None:
    config = next(c for c in CAUSAL if any(b.attention.reach().reach for b in c.blocks.values()))
    decoder = make(config)
    cache = decoder.new_paged_cache(tokens=2 * SEQ, texts=2)
    text = cache.open(SEQ)
    for token in random_tokens(config, 1, SEQ)[0]:
        read(decoder, cache, {text: token[None]})
    with pytest.raises(WorkhorseError, match="a window has moved past what it saw after 5 tokens"):
        cache.truncate(text, 5)
    assert text.length == SEQ
    other = cache.open(SEQ)
    read(decoder, cache, {other: torch.arange(4)})
    with pytest.raises(WorkhorseError, match="a window has moved past what it saw after 5 tokens"):
        PagedView(cache, [other, text]).truncate([1, 5])
    assert (other.length, text.length) == (4, SEQ)


def test_a_text_is_closed_once_and_not_read_again():
    cache = make(ONE_TABLE).new_paged_cache(tokens=12, texts=2)
    text, other = cache.open(5), cache.open(4)
    cache.close(text)
    cache.close(text)
    for texts in ([text], [], [other, other]):
        with pytest.raises(WorkhorseError, match="text"):
            PagedView(cache, texts)
    cache.close(other)
    assert not any(pool.reserved for pool in cache.pools.values())


@pytest.mark.parametrize("size", [0, -1, True, 1.5, None, "3"])
def test_lengths_of_a_text_that_mean_nothing_are_refused(size):
    cache = make(ONE_TABLE).new_paged_cache(tokens=12, texts=2)
    with pytest.raises(WorkhorseError, match=f"most={size!r} is not a number"):
        cache.open(size)
    assert not any(pool.reserved for pool in cache.pools.values())
    if size != 0:
        with pytest.raises(WorkhorseError, match=f"length={size!r} is not a number"):
            cache.truncate(cache.open(3), size)


@pytest.mark.parametrize("first_in_inference_mode", [False, True])
def test_a_cache_may_be_used_in_and_out_of_inference_mode(first_in_inference_mode):
    decoder = make(ONE_TABLE)
    cache = decoder.new_paged_cache(tokens=12, texts=1)
    view = PagedView(cache, [cache.open(4)])
    tokens = torch.tensor([[1, 2, 3]])
    found = []
    for n in range(3):
        with torch.no_grad(), torch.inference_mode((n == 0) == first_in_inference_mode):
            found.append(decoder(tokens[:, n : n + 1], cache=view).clone())
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, dim=1), decoder(tokens))
