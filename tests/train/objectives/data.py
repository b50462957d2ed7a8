"""Small batches for objectives, and log-probabilities computed in the plainest way."""

import torch
from torch import Tensor

from tests.train.conftest import MODEL
from workhorse.data import Batch
from workhorse.nn import IGNORE, Decoder, DecoderConfig
from workhorse.train.objectives.objective import Objective
from workhorse.train.objectives.policy import PolicyBatch

VOCAB, SEQ = 11, 8


def model(seed: int = 0, **changes: object) -> Decoder:
    """A decoder in float64 whose predictions are far from uniform."""
    torch.manual_seed(seed)
    fields = {**MODEL, "vocab_size": VOCAB, "max_seq_len": SEQ, **changes}
    decoder = DecoderConfig.from_dict(fields).build(dtype=torch.float64)
    with torch.no_grad():
        for weight in decoder.parameters():
            weight.add_(torch.randn_like(weight), alpha=0.5)
    return decoder


def rows(n: int = 8, seed: int = 1, group: int = 2) -> Batch:
    """Rows with prompts and answers of different lengths, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (n, SEQ + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    for row in range(n):
        targets[row, : row % 3] = IGNORE
        targets[row, SEQ - row % 4 :] = IGNORE
    order = torch.arange(n)
    return Batch(
        tokens[:, :-1],
        targets,
        None,
        torch.zeros(n, dtype=torch.int64),
        group=order // group,
        values=(order % 3 == 0).float(),
        reference=torch.randn(n, generator=generator) - 12,
    )


def logprobs(decoder: Decoder, batch: Batch) -> Tensor:
    """The log-probability of each target from all logits, 0 for `IGNORE`; (rows, seq)."""
    of_all = decoder(batch.tokens).log_softmax(dim=-1)
    counted = batch.targets != IGNORE
    return of_all.gather(2, batch.targets.where(counted, 0)[..., None])[..., 0] * counted


def rollouts(decoder: Decoder) -> PolicyBatch:
    """Completions that were sampled by a slightly different model; garbage in their padding."""
    batch, generator = rows(group=4), torch.Generator().manual_seed(5)
    noise = torch.randn(2, 8, SEQ, generator=generator, dtype=torch.float64) / 2
    values, gains = torch.randn(2, 8, SEQ, generator=generator, dtype=torch.float64)
    now = logprobs(decoder, batch).detach()
    old, reference = (torch.where(batch.targets != IGNORE, now + one, -999.0) for one in noise)
    advantages = torch.randn(8, generator=generator, dtype=torch.float64)
    return PolicyBatch(
        **vars(batch),
        old_logprobs=old,
        advantages=advantages,
        reference_tokens=reference,
        old_values=values,
        returns=values + gains,
    )


def gradients(decoder: Decoder, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(decoder.parameters()), retain_graph=True))


def assert_same(objective: Objective, batch: Batch, expected: Tensor) -> None:
    """Assert that mean loss and gradient of an objective are those of an expected mean loss."""
    loss, count, _ = objective(batch)
    assert objective.count(batch) == count
    torch.testing.assert_close(loss / count, expected, atol=1e-7, rtol=1e-7)
    ours, theirs = (gradients(objective.decoder, one) for one in (loss / count, expected))
    assert any(gradient.abs().max() > 1e-3 for gradient in theirs)
    torch.testing.assert_close(ours, theirs, atol=1e-7, rtol=1e-6)
