"""Campaign: fast decoding gives the results of plain decoding, over the covering grid.

One compiled program serves any number of sequences, and one any number of speculated tokens.

    make campaign-fast    or    python -m pytest -m campaign tests/campaigns/test_fast.py

Each model decodes with streamed weights and native attention: without more, with native steps, with
compiled steps, and with both. It is compared with the same model without these transforms. In
float32 the greedy tokens are the same. In bfloat16 each way rounds in its own order. Along a
sequence, the logits differ from the float32 logits of the same weights by at most `BFLOAT16` of the
largest one. The most likely token is the same if its lead over the second is more than twice that.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.execute import windowed
from tests.execute.passes import compiled, last_logits
from tests.nn.grid import CAUSAL, COVERING, fixed_length, make, mixes_experts, name
from tests.nn.paged import paged
from workhorse.execute.backend import Backend, ModuleBackend, backend_of
from workhorse.execute.compiled.fixed_step import Variant
from workhorse.execute.native_decoding.layers import attend_natively, stream_weights
from workhorse.execute.native_decoding.native_step import NativeStepBackend
from workhorse.generate import GenerationConfig, generate
from workhorse.native import resolve
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.fixed import CacheTensors

pytestmark = [
    pytest.mark.campaign,
    # PyTorch's compiler imports what PyTorch itself calls deprecated.
    pytest.mark.filterwarnings("ignore:.torch.jit.*:DeprecationWarning"),
]
CONFIGS = [
    config
    for config in CAUSAL
    if fixed_length(config) is None and not mixes_experts(config)  # experts are chosen in Python
]
SEQ = 24
BFLOAT16 = 0.05
each_config = pytest.mark.parametrize(
    "config", CONFIGS, ids=lambda config: name(COVERING.index(config))
)


@pytest.fixture(params=["native", "native steps", "native and compiled", "steps over compiled"])
def quicken(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Decoder], Backend]:
    """A function that applies one of the four sets of transforms."""

    def apply(decoder: Decoder) -> Backend:
        operators = resolve("decoding", "steps", "matrix_unit", "vectors", wait=True)
        assert operators.decoding is not None
        stream_weights(decoder, operators)
        attend_natively(decoder, operators.decoding)
        backend: Backend = ModuleBackend(decoder, operators)
        if "compiled" in request.param:
            backend = compiled(decoder, tmp_path)
        return NativeStepBackend(backend, operators) if "steps" in request.param else backend

    return apply


@each_config
def test_the_greedy_tokens_are_the_same_in_float32(
    config: DecoderConfig, quicken: Callable[[Decoder], Backend]
) -> None:
    plain, quick = make(config), quicken(make(config))
    prompts = [[1, 2, 3, 4, 5], [6, 7]]
    request = GenerationConfig(max_new_tokens=SEQ, temperature=0, truncate="left")
    expected = [done.tokens for done in generate(plain, prompts, request)]
    assert [done.tokens for done in generate(quick, prompts, request)] == expected


@each_config
@torch.no_grad()
def test_logits_stay_within_the_bound_in_bfloat16(
    config: DecoderConfig, quicken: Callable[[Decoder], Backend]
) -> None:
    exact, quick = make(config).bfloat16().float(), quicken(make(config).bfloat16())
    length = min(SEQ, exact.max_seq_len)
    tokens = torch.randint(config.vocab_size, (2, length))
    expected, found = along(exact, tokens), along(quick, tokens)
    scale = expected.abs().max()
    assert (found - expected).abs().max() <= BFLOAT16 * scale
    first, second = expected.topk(2, dim=-1).values.unbind(-1)
    clear = first - second > 2 * BFLOAT16 * scale
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def test_one_program_serves_several_texts_whatever_their_number(tmp_path: Path) -> None:
    backend = compiled(windowed.make(), tmp_path)
    for rows in (2, 3):
        assert windowed.texts(backend, rows, 40) == windowed.texts(windowed.make(), rows, 40)
    assert len(list(tmp_path.iterdir())) == 1


def test_one_program_checks_guesses_whatever_their_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = compiled(windowed.make(), tmp_path)
    step = backend.step
    checked: list[int] = []

    def watched(variant: Variant, tokens: Tensor, tensors: CacheTensors) -> Tensor:
        checked.append(tokens.shape[1])
        return step(variant, tokens, tensors)

    monkeypatch.setattr(backend, "step", watched)
    assert windowed.texts(backend, 1, 60, guesses=5) == windowed.texts(windowed.make(), 1, 60)
    assert len(set(checked)) > 1
    assert len(list(tmp_path.iterdir())) == 2  # one program for a single token, one with guesses


def along(model: Decoder | Backend, tokens: Tensor) -> Tensor:
    """Logits after a prompt of four tokens and after each further one, in float32."""
    cache = paged(backend_of(model).decoder, *tokens.shape)
    logits = [last_logits(model, tokens[:, :4], cache)]
    for step in range(4, tokens.shape[1]):
        logits.append(last_logits(model, tokens[:, step : step + 1], cache))
    return torch.stack(logits).float()
