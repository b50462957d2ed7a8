"""Paged cache: changes to other sequences never affect the logits of a sequence."""

import random

import pytest
import torch
from torch import Tensor

from tests.nn.grid import CAUSAL, COVERING, error, fixed_length, make, name, random_tokens
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.paged import CachedSequence, PagedCache
from workhorse.nn.cache.paged_view import PackedView, PagedView

TOLERANCE = 1e-5
SEQ = 20
ONE_TABLE = next(
    config
    for config in CAUSAL
    if not any(b.attention.reach().reach or b.convolution for b in config.blocks.values())
)
"""A config with layers that all share the tables of each sequence."""
every_config_of_fixed_angles = pytest.mark.parametrize(
    "config",
    [config for config in CAUSAL if fixed_length(config) is None],
    ids=lambda config: name(COVERING.index(config)),
)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of three tokens, so that a short sequence has several."""
    for module in ("paged", "paged_view"):
        monkeypatch.setattr(f"workhorse.nn.cache.{module}.BLOCK", 3)


def read(decoder: Decoder, cache: PagedCache, new: dict[CachedSequence, Tensor]) -> list[Tensor]:
    """Last logits of each sequence after consuming tokens, padded on the left."""
    if not new:
        return []
    longest = max(map(len, new.values()))
    tokens = torch.zeros(len(new), longest, dtype=torch.int64)
    positions = torch.full_like(tokens, -1)
    for row, (sequence, some) in enumerate(new.items()):
        tokens[row, longest - len(some) :] = some
        positions[row, longest - len(some) :] = sequence.length + torch.arange(len(some))
    alike = all(len(some) == longest for some in new.values())
    view = PagedView(cache, list(new))
    logits = decoder(tokens, positions=None if alike else positions, cache=view)
    return list(logits[:, -1:])


def read_packed(
    decoder: Decoder, cache: PagedCache, new: dict[CachedSequence, Tensor]
) -> list[Tensor]:
    """The same without padding: sequences with equal token counts form batches, packed in a row."""
    batches: dict[int, list[CachedSequence]] = {}
    for sequence, some in new.items():
        batches.setdefault(len(some), []).append(sequence)
    if not new:
        return []
    ordered = [one for batch in batches.values() for one in batch]
    view = PackedView([(PagedView(cache, batch), count) for count, batch in batches.items()])
    ends = torch.tensor([len(new[one]) for one in ordered]).cumsum(0) - 1
    tokens = torch.cat([new[one] for one in ordered])[None]
    logits = decoder.unembed(decoder.hidden(tokens, cache=view)[:, ends])[0]
    found = dict(zip(ordered, logits[:, None], strict=True))
    return [found[sequence] for sequence in new]


class Sequences:
    """The sequences of a cache, their tokens, and random operations that change them."""

    def __init__(self, decoder: Decoder, pick: random.Random) -> None:
        self.decoder = decoder
        self.cache = decoder.new_paged_cache(tokens=4 * SEQ, sequences=4, slack=2)
        self.held: dict[CachedSequence, list[int]] = {}
        self.furthest: dict[CachedSequence, int] = {}
        self.pick = pick

    def open(self) -> None:
        self.held[self.cache.new_sequence()] = []

    def clear(self) -> None:
        self.cache.clear(gone := self.pick.choice(list(self.held)))
        del self.held[gone]

    def fork(self) -> None:
        parent = self.pick.choice(list(self.held))
        child = self.cache.new_sequence()
        self.cache.adopt(child, parent.length, parent.tables)
        self.held[child] = list(self.held[parent])
        self.furthest[child] = self.furthest.get(parent, 0)

    def go_back(self) -> None:
        sequence = self.pick.choice(list(self.held))
        kept = max(0, sequence.length - self.pick.randint(1, 2))
        if kept >= self.furthest.get(sequence, 0) - self.cache.slack:
            self.cache.truncate(sequence, kept)
            del self.held[sequence][kept:]

    def read(self) -> None:
        new: dict[CachedSequence, Tensor] = {}
        for sequence in self.pick.sample(list(self.held), self.pick.randint(1, len(self.held))):
            count = min(self.pick.choice((1, 1, 2, 3, 8)), SEQ - sequence.length)
            if count:
                new[sequence] = torch.randint(self.decoder.config.vocab_size, (count,))
        by = self.pick.choice((read, read_packed))
        for sequence, logits in zip(new, by(self.decoder, self.cache, new), strict=True):
            self.held[sequence] += new[sequence].tolist()
            self.furthest[sequence] = max(self.furthest.get(sequence, 0), sequence.length)
            alone = self.decoder(torch.tensor([self.held[sequence]]))[:, -1:]
            assert error(logits[None], alone) <= TOLERANCE


@every_config_of_fixed_angles
@torch.no_grad()
def test_sequences_that_come_fork_go_back_and_leave(config: DecoderConfig) -> None:
    """Random operations, padded and packed, with windows that release blocks and split prompts."""
    pick = random.Random(COVERING.index(config))
    sequences = Sequences(make(config), pick)
    for _ in range(60):
        some = sequences.read, sequences.read, sequences.open, sequences.go_back, sequences.fork
        action = pick.choice(some)
        (action if sequences.held else sequences.open)()
        if len(sequences.held) == 4:
            sequences.clear()
    while sequences.held:
        sequences.clear()
    for pool in sequences.cache.pools.values():
        assert not any(pool.holders)
        assert pool.available == pool.capacity


@torch.no_grad()
def test_a_fork_shares_blocks_until_it_writes() -> None:
    decoder = make(ONE_TABLE)
    cache = decoder.new_paged_cache(tokens=40, sequences=2)
    first, second = cache.new_sequence(), cache.new_sequence()
    read(decoder, cache, {first: torch.arange(4)})
    cache.adopt(second, first.length, first.tables)
    assert second.tables == first.tables
    read(decoder, cache, {second: torch.arange(1)})
    (table,), (other,) = first.tables.values(), second.tables.values()
    assert table[0] == other[0]
    assert table[1] != other[1]


@torch.no_grad()
def test_what_a_broken_text_left_reaches_no_other() -> None:
    """Blocks are reused, and NaN times zero is not zero."""
    decoder = make(ONE_TABLE, kernel="eager")
    cache = decoder.new_paged_cache(tokens=12, sequences=2)
    broken = cache.new_sequence()
    read(decoder, cache, {broken: torch.arange(12)})
    for store in cache.stores:
        for stored in store.tensors(torch.empty(0), torch.empty(0)):
            stored[:, broken.tables[store.pool.reach]] = torch.nan
    cache.clear(broken)
    short, long = cache.new_sequence(), cache.new_sequence()
    read(decoder, cache, {short: torch.arange(1), long: torch.arange(4)})
    for logits in read(decoder, cache, {short: torch.arange(1), long: torch.arange(1)}):
        assert bool(logits.isfinite().all())


def test_a_full_cache_refuses_more_and_is_unchanged() -> None:
    cache = make(ONE_TABLE).new_paged_cache(tokens=12, sequences=1)
    sequence, other = cache.new_sequence(), cache.new_sequence()
    assert cache.holds(15)  # the last block of a sequence may be partly used
    assert not cache.holds(16)
    cache.extend(sequence, 12)
    sequence.length = 12
    with pytest.raises(WorkhorseError, match="a cache of 12 tokens has no room for 4 more"):
        PagedView(cache, [other]).reserve([4])
    assert not any(other.tables.values())
    cache.clear(sequence)
    cache.extend(other, 15)


@torch.no_grad()
def test_released_prefixes_are_found_until_their_blocks_are_needed() -> None:
    decoder = make(ONE_TABLE)
    cache = decoder.new_paged_cache(tokens=12, sequences=1)
    first, prefixes = cache.new_sequence(), [b"a", b"b", b"c"]
    read(decoder, cache, {first: torch.arange(9) % 5})
    cache.label(first, prefixes)
    (table,) = ([*table] for table in first.tables.values())
    cache.clear(first)
    again = cache.new_sequence()
    cache.adopt_prefix(again, [b"a", b"b", b"x"])
    assert list(again.tables.values()) == [table[:2]]
    cache.clear(again)
    cache.adopt_prefix(again, prefixes, multiple=2)
    assert again.length == 6
    read(decoder, cache, {again: torch.arange(1)})
    cache.clear(again)
    other = cache.new_sequence()
    read(decoder, cache, {other: torch.arange(12) % 5})  # takes the end of the prefix first
    cache.adopt_prefix(again, prefixes)
    assert again.length == 3
    cache.reset()
    cache.adopt_prefix(cleared := cache.new_sequence(), prefixes)
    assert cleared.length == 0


@pytest.mark.parametrize(
    ("tokens", "sequences", "message"),
    [
        (0, 1, "tokens=0 is not a whole"),
        (1, True, "sequences=True is not a whole"),
        (9, -1, "sequences=-1"),
    ],
)
def test_a_cache_of_nothing(tokens: int, sequences: int, message: str) -> None:
    with pytest.raises(WorkhorseError, match=message):
        make(ONE_TABLE).new_paged_cache(tokens, sequences)


@torch.no_grad()
def test_a_window_that_moved_on_is_not_read_again() -> None:
    config = next(c for c in CAUSAL if any(b.attention.reach().reach for b in c.blocks.values()))
    decoder = make(config)
    cache = decoder.new_paged_cache(tokens=2 * SEQ, sequences=2)
    one = cache.new_sequence()
    for token in random_tokens(config, 1, SEQ)[0]:
        read(decoder, cache, {one: token[None]})
    with pytest.raises(WorkhorseError, match="cannot truncate to 5 tokens: a window has released"):
        cache.truncate(one, 5)
    assert one.length == SEQ
    other = cache.new_sequence()
    read(decoder, cache, {other: torch.arange(4)})
    with pytest.raises(WorkhorseError, match="cannot truncate to 5 tokens: a window has released"):
        PagedView(cache, [other, one]).truncate([1, 5])
    assert (other.length, one.length) == (4, SEQ)


def test_a_view_has_different_sequences():
    cache = make(ONE_TABLE).new_paged_cache(tokens=12, sequences=2)
    one = cache.new_sequence()
    for sequences in ([], [one, one]):
        with pytest.raises(WorkhorseError, match="a view needs at least one sequence"):
            PagedView(cache, sequences)


@pytest.mark.parametrize("length", [-1, True, 1.5, None, "3"])
def test_lengths_that_mean_nothing_are_refused(length):
    cache = make(ONE_TABLE).new_paged_cache(tokens=12, sequences=2)
    with pytest.raises(WorkhorseError, match=f"length={length!r} is not a whole number"):
        cache.truncate(cache.new_sequence(), length)


@pytest.mark.parametrize("first_in_inference_mode", [False, True])
def test_a_cache_may_be_used_in_and_out_of_inference_mode(first_in_inference_mode):
    decoder = make(ONE_TABLE)
    cache = decoder.new_paged_cache(tokens=12, sequences=1)
    view = PagedView(cache, [cache.new_sequence()])
    tokens = torch.tensor([[1, 2, 3]])
    found = []
    for n in range(3):
        with torch.no_grad(), torch.inference_mode((n == 0) == first_in_inference_mode):
            found.append(decoder(tokens[:, n : n + 1], cache=view).clone())
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(found, dim=1), decoder(tokens))
