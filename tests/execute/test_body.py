"""Bodies share the parameters of the reference, and never change it."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from tests.native.machine import OPERATORS, needs
from tests.nn.grid import COVERING, make, name, random_tokens
from workhorse.data import Batch
from workhorse.execute.body import body_of
from workhorse.execute.choose import decoding_backend
from workhorse.generate import GenerationConfig, generate
from workhorse.models.families.llama import llama
from workhorse.nn import Decoder, DecoderConfig
from workhorse.train import TrainConfig
from workhorse.train.step.build import build_step
from workhorse.transforms.record import is_body

CPU = torch.device("cpu")


def small(**fields: object) -> Decoder:
    config = llama(d_model=64, n_layers=2, n_heads=2, d_ff=128, vocab_size=64, max_seq_len=64)
    return config.replace(**fields).build().eval()


@contextmanager
def unchanged(decoder: Decoder) -> Iterator[None]:
    """Check that the block changes no module, parameter, hook or class of a decoder."""

    def facts() -> list[object]:
        return [
            (path, module, type(module), dict(module._parameters), list(module._forward_hooks))
            for path, module in decoder.named_modules(remove_duplicate=False)
        ]

    before, shown = facts(), repr(decoder)
    yield
    assert [one[:3] for one in facts()] == [one[:3] for one in before]
    for one, other in zip(facts(), before, strict=True):
        assert one[4] == other[4]
        assert all(one[3][name] is weight for name, weight in other[3].items())
    assert repr(decoder) == shown


@pytest.mark.parametrize("config", COVERING, ids=map(name, range(len(COVERING))))
def test_a_body_has_the_same_parameters_and_computes_the_same(config: DecoderConfig) -> None:
    reference = make(config).eval()
    with unchanged(reference):
        body = body_of(reference)
        assert is_body(body)
        assert not is_body(reference)
        assert repr(body) == repr(reference)
        for (path, weight), (same, other) in zip(
            body.named_parameters(remove_duplicate=False),
            reference.named_parameters(remove_duplicate=False),
            strict=True,
        ):
            assert path == same
            assert weight is other
        assert not set(body.modules()) & set(reference.modules())
        assert len(list(body.modules())) == len(list(reference.modules()))
        tokens = random_tokens(config, 2, 6)
        with torch.no_grad():
            assert torch.equal(body(tokens), reference(tokens))


def test_hooks_of_one_are_not_those_of_the_other() -> None:
    reference = small()
    called: list[str] = []
    reference.layers[0].register_forward_hook(lambda *_: called.append("reference"))
    body = body_of(reference)
    tokens = torch.zeros(1, 4, dtype=torch.int64)
    body(tokens)
    assert not called
    body.layers[1].register_forward_pre_hook(lambda *_: called.append("body"))
    reference(tokens)
    assert called == ["reference"]
    body(tokens)
    assert called == ["reference", "body"]


@needs("steps")
def test_a_hook_on_the_reference_leaves_native_decoding_as_it_is() -> None:
    reference = small()
    backend = decoding_backend(reference, wait=True)
    for module in reference.modules():
        module.register_forward_hook(lambda *_: pytest.fail("the reference was called"))
    generate(backend, [[1, 2]], GenerationConfig(max_new_tokens=3, temperature=0))
    assert backend.announcement.endswith("whole steps")


def test_what_is_done_to_a_body_leaves_the_reference() -> None:
    reference = small()
    with unchanged(reference):
        decoding_backend(reference, wait=True)
        build_step(reference, TrainConfig(steps=1, batch_size=2, seq_len=8), CPU)
        body = body_of(reference)
        body.layers[0].attention.out_proj.weight = nn.Parameter(torch.zeros(64, 64))
        body.train()
    assert not reference.training


def batch(seed: int, seq: int = 16) -> Batch:
    rows = torch.randint(64, (4, seq + 1), generator=torch.Generator().manual_seed(seed))
    return Batch(rows[:, :-1], rows[:, 1:], None, torch.zeros(4, dtype=torch.int64))


def train_and_generate(
    dtype: str, steps: int, texts: int, max_new_tokens: int
) -> tuple[list[float], dict[str, Tensor], list[list[int]]]:
    """Losses, final weights, and completions after each step; no completions if `texts` is 0."""
    torch.manual_seed(0)
    reference = small()
    config = TrainConfig(steps=steps, batch_size=4, seq_len=16, dtype=dtype)
    step = build_step(reference, config, CPU)
    backend = decoding_backend(reference, wait=True)
    losses: list[float] = []
    found: list[list[int]] = []
    for number in range(steps):
        losses.append(step.update(*step.backward(batch(number)), schedule=1.0).loss)
        if texts:
            prompts = [[n % 64, 1] for n in range(texts)]
            options = GenerationConfig(max_new_tokens=max_new_tokens, temperature=0)
            found += [list(text.tokens) for text in generate(backend, prompts, options)]
    if texts and OPERATORS.steps is not None:
        assert backend.announcement.endswith("whole steps")
    kept = {
        name: weight.clone() for name, weight in step.optimizer.masters.weights(reference).items()
    }
    if texts:  # a separate model with these weights writes the last completions as well
        alone = decoding_backend(copy.deepcopy(reference), wait=True)
        last = generate(alone, prompts, options)
        assert [list(text.tokens) for text in last] == found[-texts:]
    return losses, kept, found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generating_between_steps_changes_no_bit_of_training(dtype: str) -> None:
    """The completions belong to the weights of their step."""
    check_one_set_of_weights(dtype, steps=3, texts=8, max_new_tokens=6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_generating_64_texts_after_each_of_50_steps(dtype: str) -> None:
    check_one_set_of_weights(dtype, steps=50, texts=64, max_new_tokens=16)


def check_one_set_of_weights(dtype: str, steps: int, texts: int, max_new_tokens: int) -> None:
    losses, weights, found = train_and_generate(dtype, steps, texts, max_new_tokens)
    alone, expected, _ = train_and_generate(dtype, steps, 0, max_new_tokens)
    assert losses == alone
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    assert len({tuple(map(tuple, found[n::texts])) for n in range(texts)}) > 1


def test_an_empty_container_is_copied_too() -> None:
    decoder = small()
    decoder.layers[0].extra = nn.ModuleList()
    body = body_of(decoder)
    body.layers[0].extra.append(nn.Identity())
    assert len(decoder.layers[0].extra) == 0
