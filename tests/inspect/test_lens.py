"""Labels of attention heads, the logit lens, and figures of the residual stream."""

from typing import Any

import pytest
import torch
from torch import Tensor

from workhorse.errors import WorkhorseError
from workhorse.inspect import (
    KINDS,
    Tracer,
    attribute,
    head_labels,
    head_scores,
    logit_lens,
    neighbours,
    repeated_tokens,
    statistics,
    stream_norms,
    trace,
)
from workhorse.inspect.heads import scores_of
from workhorse.nn import Decoder, DecoderConfig

LENGTH = 7


def small_decoder() -> Decoder:
    torch.manual_seed(0)
    return DecoderConfig.from_yaml("""
vocab_size: 20
d_model: 20
n_layers: 2
max_seq_len: 64
blocks:
  main:
    norm: {kind: rms_norm}
    attention: {n_heads: 5, position: {kind: rope}}
    feed_forward: {kind: mlp, d_ff: 12, activation: relu}
    kind: pre_norm
final_norm: {kind: rms_norm}
""").build()


def test_every_kind_of_head_is_recognised() -> None:
    seq = 2 * LENGTH
    previous, first, current = torch.eye(seq).roll(-1, 1), torch.zeros(seq, seq), torch.eye(seq)
    first[:, 0] = 1
    duplicate, induction = torch.eye(seq).roll(-LENGTH, 1), torch.eye(seq).roll(1 - LENGTH, 1)

    def attend(weights: Tensor) -> Tensor:
        heads = torch.stack([previous, first, current, duplicate, induction])
        return heads.expand_as(weights).clone()

    tracer = Tracer(small_decoder())
    tokens = repeated_tokens(20, LENGTH, 3)
    run = tracer(tokens, edits={"layers.1.attention.kernel.weights": attend})
    scores = scores_of(run)
    table = torch.stack([scores[kind][1] for kind in KINDS])
    assert torch.allclose(table.diagonal(), torch.ones(5))
    assert (table - torch.eye(5)).abs().max() < 0.15  # one key of 7 is also the first
    assert head_labels(scores)[1] == list(KINDS)
    assert head_labels(scores, 1.0)[0] == [None] * 5
    own = head_scores(small_decoder(), seed=3)  # 20 tokens: each once, then again
    expected = scores_of(tracer(repeated_tokens(20, 20, 8, seed=3)))
    assert all(torch.equal(own[kind], expected[kind]) for kind in KINDS)
    with pytest.raises(WorkhorseError, match="threshold=2 is not a score"):
        head_labels(scores, 2)


def test_the_lens_ends_with_the_decoders_own_prediction() -> None:
    decoder = small_decoder()
    run = trace(decoder, [1, 2, 3, 2])
    lens = logit_lens(decoder, run, top=20)
    assert torch.allclose(
        lens.logprobs[-1], run.logits.log_softmax(-1).sort(descending=True).values
    )
    assert torch.equal(lens.ids[-1, ..., 0], run.logits.argmax(-1))
    assert lens.ranks[-1].max() == 0
    assert lens.ranks[0].max() > 0
    alone = decoder.head(decoder.final_norm(run["layers.0"])).log_softmax(-1)
    assert torch.allclose(lens.entropies[1], -(alone.exp() * alone).sum(-1))
    assert torch.allclose(stream_norms(decoder, run)[1, 0, 3], run["layers.0"][0, 3].norm())


def test_statistics_and_neighbours() -> None:
    decoder = small_decoder()
    with torch.no_grad():
        decoder.get_parameter("layers.0.feed_forward.up_proj.weight")[:3] = 0
        decoder.embedding.tokens.weight[7] = 2 * decoder.embedding.tokens.weight[4]
    found = statistics(trace(decoder, [1, 2, 3]))
    assert found["layers.0.feed_forward.down_proj.x"].dead >= 3 / 12
    assert found["layers.0.attention.kernel.scores"].max_abs < 10  # without the hidden keys
    norm = found["layers.0.attention_norm"]
    assert norm.rms == pytest.approx((norm.mean**2 + norm.std**2) ** 0.5)
    ids, cosines = neighbours(decoder, 4, top=3)
    assert ids[0] == 7
    assert cosines[0] == pytest.approx(1)
    with pytest.raises(WorkhorseError, match="token=20 is not a token id"):
        neighbours(decoder, 20)
    with pytest.raises(WorkhorseError, match="top=-1 is out of range"):
        logit_lens(decoder, trace(decoder, [1]), top=-1)
    with pytest.raises(WorkhorseError, match="kept no attention weights"):
        scores_of(trace(decoder, [1], keep=()))


def test_a_target_is_one_token_or_two() -> None:
    decoder = small_decoder()
    logits = trace(decoder, [1, 2, 3]).logits[0, -1]
    best = logits.argmax()
    targets: list[Any] = [best, int(best), [best], best.numpy()[()]]
    for target in targets:
        assert attribute(decoder, [1, 2, 3], target).logit == pytest.approx(float(logits[best]))
    for wrong in (True, 20, -1, None, 1.5, [1, 2, 3]):
        with pytest.raises(WorkhorseError, match="a target is a token id from 0 to 19"):
            attribute(decoder, [1, 2, 3], wrong)  # pyright: ignore[reportArgumentType]
    with pytest.raises(WorkhorseError, match="position=True is not in tokens of shape"):
        attribute(decoder, [1, 2, 3], 4, position=True)
