"""Decoding with a cache equals the full forward, in any split, ragged and with windows."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.nn.grid import CAUSAL, COVERING, configs, error, fixed_length, make, name, random_tokens
from workhorse.errors import WorkhorseError
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.paged_view import PagedView

SEQ = 12
TOLERANCE = 1e-5
SPLITS = [[12], [1] * 12, [5, 1, 1, 5], [1, 6, 5], [3, 4, 5], [7, 1, 1, 1, 1, 1]]
every_causal_config = pytest.mark.parametrize(
    "config", CAUSAL, ids=[name(COVERING.index(config)) for config in CAUSAL]
)


def seq_of(config: DecoderConfig) -> int:
    """Sequences stay within the length up to which angles do not depend on the length."""
    return min(SEQ, fixed_length(config) or SEQ)


def decode(decoder: Decoder, tokens: Tensor, split: list[int], cache: PagedView) -> Tensor:
    """Logits of the tokens, passed in pieces of these lengths (cut at the end of the sequence)."""
    logits, start = [], 0
    for length in split:
        piece = tokens[:, start : start + length]
        if piece.shape[1]:
            logits.append(decoder(piece, cache=cache))
        start += length
    return torch.cat(logits, dim=1)


def left_padded(tokens: Tensor, lengths: list[int]) -> tuple[Tensor, Tensor]:
    """The last `length` columns of each row hold its first tokens; positions, -1 for padding."""
    seq = tokens.shape[1]
    positions = torch.stack([torch.arange(seq) - (seq - n) for n in lengths]).clamp(min=-1)
    rolled = [row.roll(seq - n) for row, n in zip(tokens, lengths, strict=True)]
    return torch.stack(rolled), positions


@every_causal_config
@torch.no_grad()
def test_cached_equals_full_in_any_split(config: DecoderConfig) -> None:
    decoder = make(config)
    tokens = random_tokens(config, 2, seq_of(config))
    full = decoder(tokens)
    for split in SPLITS:
        cached = decode(decoder, tokens, split, decoder.new_cache(2, SEQ))
        assert error(cached, full) <= TOLERANCE, split


@settings(max_examples=25)
@given(
    configs,
    st.lists(st.integers(1, 6), min_size=1, max_size=12),
    st.sampled_from(["eager", "auto"]),
)
@torch.no_grad()
def test_cached_equals_full_in_any_combination(
    config: DecoderConfig, split: list[int], kernel: str
) -> None:
    assume(all(block.attention.causal for block in config.blocks.values()))
    decoder = make(config, kernel)
    tokens = random_tokens(config, 2, min(seq_of(config), sum(split)))
    cached = decode(decoder, tokens, split, decoder.new_cache(2, SEQ))
    assert error(cached, decoder(tokens)) <= TOLERANCE


@every_causal_config
@torch.no_grad()
def test_rows_of_a_ragged_batch_equal_each_row_alone(config: DecoderConfig) -> None:
    """Left-padded prompts in two pieces, then one token at a time."""
    decoder = make(config)
    prompt = min(6, seq_of(config) - 2)
    lengths = [prompt, 2, 1]
    tokens = random_tokens(config, 3, prompt + 2)
    padded, positions = left_padded(tokens[:, :prompt], lengths)
    cache = decoder.new_cache(3, SEQ)
    for piece in (slice(0, 2), slice(2, prompt)):
        logits = decoder(padded[:, piece], positions=positions[:, piece], cache=cache)
    assert cache.lengths.tolist() == lengths
    assert cache.length == prompt
    for step in range(2):
        for row, length in enumerate(lengths):
            alone = decoder(tokens[row : row + 1, : length + step])[:, -1]
            assert error(logits[row : row + 1, -1], alone) <= TOLERANCE, (row, step)
        following = torch.stack([tokens[row, n + step] for row, n in enumerate(lengths)])
        logits = decoder(following[:, None], cache=cache)


@every_causal_config
@torch.no_grad()
def test_padding_changes_nothing_without_a_cache(config: DecoderConfig) -> None:
    decoder = make(config)
    tokens = random_tokens(config, 2, SEQ)
    padded, positions = left_padded(tokens, [SEQ, SEQ - 3])
    logits = decoder(padded, positions=positions)
    assert error(logits[:1], decoder(tokens[:1])) <= TOLERANCE
    assert error(logits[1:, 3:], decoder(tokens[1:, : SEQ - 3])) <= TOLERANCE
    assert torch.isfinite(logits).all()


def windowed(**attention: object) -> DecoderConfig:
    local = {
        "kind": "pre_norm",
        "norm": {"kind": "rms_norm"},
        "attention": {"n_heads": 2, "position": {"kind": "rope"}, **attention},
        "feed_forward": {"kind": "gated_mlp", "d_ff": 16},
    }
    whole = {**local, "attention": {"n_heads": 2, "position": {"kind": "rope"}}}
    return DecoderConfig.from_dict(
        {
            "vocab_size": 29,
            "d_model": 16,
            "n_layers": 2,
            "max_seq_len": 64,
            "blocks": {"local": local, "global": whole},
            "pattern": ["local", "global"],
        }
    )


@pytest.mark.parametrize("limit", [{"window": 5}, {"chunk": 5}, {"window": 1}])
@pytest.mark.parametrize("split", [[1] * 100, [42, 1, 1, 56], [3, 7, 32, 31, 27], [100]])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@torch.no_grad()
def test_a_window_releases_blocks_many_times(
    limit: dict[str, int], split: list[int], kernel: str
) -> None:
    config = windowed(**limit)
    decoder = make(config, kernel)
    tokens = random_tokens(config, 2, 100)
    cache = decoder.new_cache(2, 100)
    cached = decode(decoder, tokens, split, cache)
    assert error(cached, decoder(tokens)) <= TOLERANCE


@torch.no_grad()
def test_a_ragged_batch_has_windows_of_different_ends() -> None:
    """Rows leave blocks at different steps; one finishes and remains as padding."""
    config = windowed(window=4)
    decoder = make(config)
    tokens = random_tokens(config, 3, 30)
    lengths = [7, 2, 5]
    padded, positions = left_padded(tokens[:, :7], lengths)
    cache = decoder.new_cache(3, 30)
    decoder(padded, positions=positions, cache=cache)
    for step in (1, 1, 3, 1, 6, 1, 1):
        before = cache.lengths.clone()
        at = before[:, None] + torch.arange(step)
        at[1] = -1  # this row is finished
        logits = decoder(tokens.gather(1, at.clamp(min=0)), positions=at, cache=cache)
        for row in (0, 2):
            end = int(before[row]) + step
            alone = decoder(tokens[row : row + 1, :end])[:, -step:]
            assert error(logits[row : row + 1], alone) <= TOLERANCE
    assert cache.lengths.tolist() == [21, 2, 19]


@torch.no_grad()
def test_past_the_original_length_cached_keys_keep_their_angles() -> None:
    """Beyond the original length, dynamic NTK and LongRoPE cannot equal the full forward pass.

    Keys that were rotated for a short sequence are not rotated again. `test_families.py` compares
    this with the reference.
    """
    for config in CAUSAL:
        limit = fixed_length(config)
        if limit is None:
            continue
        decoder = make(config)
        tokens = random_tokens(config, 1, limit + 1)
        cached = decode(decoder, tokens, [limit, 1], decoder.new_cache(1, SEQ))
        assert torch.isfinite(cached).all()
        assert error(cached[:, :limit], decoder(tokens[:, :limit])) <= TOLERANCE
        if all(b.attention.position.kind == "rope" for b in config.blocks.values()):
            assert error(cached, decoder(tokens)) > TOLERANCE


@every_causal_config
@torch.no_grad()
def test_forgotten_tokens_leave_nothing_behind(config: DecoderConfig) -> None:
    """Rows remove different numbers of tokens and continue with other tokens, twice."""
    decoder = make(config)
    seq = seq_of(config)
    tokens, others = random_tokens(config, 2, seq), random_tokens(config, 2, seq)
    others[:, :-4] = tokens[:, :-4]
    others[:, -4:] = (others[:, -4:] + 1) % config.vocab_size
    cache = decoder.new_cache(2, SEQ, slack=4)
    for kept in ([seq - 4, seq - 4], [seq - 4, seq - 2]):  # equal lengths, then ragged
        decoder(others[:, cache.length :], cache=cache)
        cache.truncate([seq - 4, seq - 4])
        decoder(tokens[:, seq - 4 : -1], cache=cache)
        cache.truncate(kept)
        assert (cache.length, cache.lengths.tolist()) == (max(kept), kept)
        following = torch.stack([row[at : at + 2] for row, at in zip(tokens, kept, strict=True)])
        logits = decoder(following, cache=cache)
        for row, length in enumerate(kept):
            alone = decoder(tokens[row : row + 1, : length + 2])[:, -2:]
            assert error(logits[row : row + 1], alone) <= TOLERANCE, (row, kept)
        cache.truncate([seq - 4, seq - 4])


@pytest.mark.parametrize("slack", [0, 40])
@torch.no_grad()
def test_a_window_goes_back_by_its_slack(slack: int) -> None:
    """Blocks are released as a whole, so a window may also go back further."""
    config = windowed(window=4)
    decoder = make(config)
    tokens = random_tokens(config, 1, 131)
    cache = decoder.new_cache(1, 131, slack=slack)
    decoder(tokens[:, :3], cache=cache)
    cache.truncate([1])  # nothing was released yet
    decoder(tokens[:, 1:129], cache=cache)
    decoder(tokens[:, 129:130], cache=cache)
    with pytest.raises(WorkhorseError, match=r"^cannot truncate to 40 tokens: a window has rel"):
        cache.truncate([40])
    assert cache.length == 130  # the cache is unchanged
    least = 130 - slack - 1  # one more than requested: a token sees one less than the window holds
    cache.truncate([least])
    logits = decoder(tokens[:, least:], cache=cache)
    assert error(logits, decoder(tokens)[:, least:]) <= TOLERANCE
    cache.truncate([0])
    again = decoder(tokens[:, :4], cache=cache)
    assert error(again, decoder(tokens[:, :4])) <= TOLERANCE


def test_more_tokens_than_there_is_room_for() -> None:
    decoder = windowed(window=4).build()
    cache = decoder.new_cache(1, 6)
    decoder(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
    with pytest.raises(WorkhorseError, match=r"^5 \+ 2 tokens do not fit a cache of 6; make one"):
        decoder(torch.zeros(1, 2, dtype=torch.int64), cache=cache)
    assert cache.length == 5  # the rejected tokens were not stored
    decoder(torch.zeros(1, 1, dtype=torch.int64), cache=cache)


@torch.no_grad()
def test_padding_takes_no_room() -> None:
    """A row starts again beside a row that is nearly full."""
    config = windowed(window=4)
    decoder = make(config)
    tokens = random_tokens(config, 2, 8)
    cache = decoder.new_cache(2, 8)
    decoder(tokens[:, :7], cache=cache)
    cache.truncate([7, 0])
    padded, positions = (
        torch.zeros_like(tokens[:, :4]),
        torch.tensor([[-1, -1, -1, 7], [0, 1, 2, 3]]),
    )
    padded[0, 3], padded[1] = tokens[0, 7], tokens[1, :4]
    logits = decoder(padded, positions=positions, cache=cache)
    assert error(logits[:1, -1:], decoder(tokens[:1])[:, -1:]) <= TOLERANCE
    assert error(logits[1:], decoder(tokens[1:, :4])) <= TOLERANCE
    assert (cache.length, cache.lengths.tolist()) == (8, [8, 4])
    with pytest.raises(WorkhorseError, match=r"^8 \+ 1 tokens do not fit a cache of 8; make one"):
        decoder(tokens[:, :1], cache=cache)


def test_a_cache_is_of_the_type_that_attention_computes_in() -> None:
    decoder = windowed(window=4).build(dtype=torch.bfloat16)
    cache = decoder.new_cache(1, 6)
    decoder(torch.zeros(1, 5, dtype=torch.int64), cache=cache)
    assert {store.k.dtype for store in cache.cache.stores} == {torch.bfloat16}


@pytest.mark.parametrize("limit", [{}, {"window": 4}])
@pytest.mark.parametrize("kernel", ["eager", "sdpa"])
@torch.no_grad()
def test_cached_decoding_under_autocast(limit: dict[str, int], kernel: str) -> None:
    """Samples are drawn during training in mixed precision, from float32 weights."""
    config = windowed(**limit)
    decoder = make(config, kernel)
    tokens = random_tokens(config, 2, 10)
    with torch.autocast("cpu", torch.bfloat16):
        full = decoder(tokens)
        cached = decode(decoder, tokens, [6, 1, 3], decoder.new_cache(2, 10))
    assert error(cached.float(), full.float()) <= 0.05  # bfloat16 has 8 bits


def test_learned_positions_run_out_in_one_row_of_a_ragged_batch() -> None:
    config = windowed().replace(
        max_seq_len=8, embedding={"position": {"kind": "learned"}, "dropout": 0.0}
    )
    decoder = config.build()
    cache = decoder.new_cache(2, 20)
    tokens = torch.zeros(2, 6, dtype=torch.int64)
    decoder(tokens, positions=left_padded(tokens, [6, 3])[1], cache=cache)
    for _ in range(2):
        decoder(tokens[:, :1], cache=cache)
    with pytest.raises(WorkhorseError, match="sequence of 9 tokens does not fit max_seq_len=8"):
        decoder(tokens[:, :1], cache=cache)


@pytest.mark.parametrize("lengths", [[9], [-1], [3.7], [True], [3, 3], [], None, torch.tensor([3])])
@torch.no_grad()
def test_a_cache_keeps_no_more_than_it_holds(lengths: object) -> None:
    config = windowed(window=4)
    decoder = make(config)
    tokens = random_tokens(config, 1, 8)
    cache = decoder.new_cache(1, 8)
    decoder(tokens[:, :6], cache=cache)
    with pytest.raises(
        WorkhorseError,
        match=r"^lengths=.* are out of range for rows of \[6\] tokens; give each row a",
    ):
        cache.truncate(lengths)
    assert error(decoder(tokens[:, 6:], cache=cache), decoder(tokens)[:, 6:]) <= TOLERANCE


@torch.no_grad()
def test_each_row_keeps_no_more_than_it_holds_itself() -> None:
    config = windowed(window=4)
    decoder = make(config)
    cache = decoder.new_cache(2, 8)
    padded, positions = left_padded(random_tokens(config, 2, 6), [6, 3])
    decoder(padded, positions=positions, cache=cache)
    with pytest.raises(
        WorkhorseError, match=r"^lengths=\[6, 4\] are out of range for rows of \[6, 3\] tok"
    ):
        cache.truncate([6, 4])
    cache.truncate([6, 3])
