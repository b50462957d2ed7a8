"""A native step returns the same logits as the modules, and changes the cache in the same way."""

from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.execute.native_decoding.stepping import along, built, quick, without_steps
from tests.execute.passes import all_logits, last_logits
from tests.execute.windowed import local_and_global, texts
from tests.native.machine import needs
from tests.nn.grid import CAUSAL, COVERING, error, fixed_length, make, name, random_tokens
from tests.nn.paged import paged
from tests.parity.all_cases import ALL
from tests.parity.reference import quiet, randomised, their_config
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend, backend_of
from workhorse.generate import GenerationConfig, generate
from workhorse.models.huggingface import Fields, family
from workhorse.native import Steps
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.paged_view import PagedView
from workhorse.transforms.adapters import (
    adapter_parameters,
    add_adapter,
    disabled,
    set_adapter,
)
from workhorse.transforms.lora import LoraConfig
from workhorse.transforms.quantization import FormatName, quantize

pytestmark = [needs("steps"), needs("decoding")]
CONFIGS = [config for config in CAUSAL if fixed_length(config) is None]
LATENT = {"axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu"}
"""The model types with latent attention, which has no instruction."""
WIDE = 256
"""A width at which the weights are divided among threads."""


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The number of new tokens of each sequence, for every call of the operator."""
    seen: list[tuple[int, ...]] = []
    run = Steps.run

    def counting(steps: Steps, *program: Any, counts: Tensor, **rest: Any) -> Tensor:
        seen.append(tuple(counts.tolist()))
        return run(steps, *program, counts=counts, **rest)

    monkeypatch.setattr(Steps, "run", counting)
    return seen


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: name(COVERING.index(config)))
def test_whatever_a_decoder_has_its_logits_are_the_same(config: DecoderConfig) -> None:
    prompts, tokens = random_tokens(config, 2, 4), random_tokens(config, 2, 8)
    expected = along(make(config), prompts, tokens)
    assert error(along(quick(make(config)), prompts, tokens), expected) <= 1e-5


@pytest.mark.parametrize("model_type", ALL)
def test_steps_of_model_types(model_type: str) -> None:
    with quiet():
        fields = their_config(model_type, ALL[model_type][0]).to_dict()
    config = family(model_type).read(Fields(fields))
    plain, stepping = (randomised(config.build()) for _ in range(2))
    assert isinstance(plain, Decoder)
    assert isinstance(stepping, Decoder)
    backend = quick(stepping)
    prompts, tokens = torch.randint(3, 60, (2, 5)), torch.randint(3, 60, (2, 6))
    assert error(along(backend, prompts, tokens), along(plain, prompts, tokens)) <= 1e-5
    along(backend, prompts, tokens[:1])  # with the matrix unit, native steps have one row
    assert backend.translated is not None
    assert (backend.translated.kept is None) == (model_type in LATENT)


@pytest.mark.parametrize("length", [40, 300])  # the second exceeds the initial angle tables
def test_windows_and_whole_contexts_along_a_text(length: int, calls: list[tuple[int, ...]]) -> None:
    tokens = torch.randint(0, 61, (1, length))
    expected = along(built(), tokens[:, :3], tokens)
    assert error(along(quick(built()), tokens[:, :3], tokens), expected) <= 1e-5
    assert calls == [(1,)] * length


def with_alibi(dtype: torch.dtype = torch.float32) -> Decoder:
    """Windows and whole contexts, with slopes that are not one geometric sequence."""
    config, alibi = local_and_global(128).to_dict(), {"kind": "alibi", "max_bias": 4}
    for block in config["blocks"].values():
        block["attention"] |= {"n_heads": 6, "head_dim": 16, "position": alibi}
    torch.manual_seed(0)
    return DecoderConfig.from_dict(config).build(dtype=dtype).eval()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_alibi_counts_from_the_position_in_each_sequence(
    dtype: torch.dtype, calls: list[tuple[int, ...]]
) -> None:
    """Sequences of unequal lengths; each has the same bits as alone."""
    backend, tokens = quick(with_alibi(dtype)), torch.randint(0, 61, (3, 40))
    found, close = along(backend, tokens[:, :5], tokens), {4: 1e-5, 2: 0.05}[dtype.itemsize]
    assert error(found.float(), along(with_alibi(), tokens[:, :5], tokens)) <= close
    if backend.invariant_batch > 1:  # a matrix unit computes several rows in another way
        assert calls == [(1, 1, 1)] * 40
        whole = _whole(backend, tokens[:, :5], tokens)
        for row in range(3):
            alone = _whole(backend, tokens[row : row + 1, :5], tokens[row : row + 1])
            assert torch.equal(alone[0], whole[row])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [None, "int8", "int4"])
def test_bits_depend_on_neither_rows_nor_threads(
    format: FormatName | None, dtype: torch.dtype
) -> None:
    backend = quick(built(dtype=dtype, width=WIDE), format)
    if backend.invariant_batch == 1:
        pytest.skip("several rows take the matrix unit's operators here")
    tokens = torch.randint(0, 61, (5, 12))
    prompts = tokens[:, :4].roll(1, dims=1)
    alone = torch.cat([_whole(backend, prompts[r : r + 1], tokens[r : r + 1]) for r in range(5)])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            assert torch.equal(_whole(backend, prompts, tokens), alone)
    finally:
        torch.set_num_threads(before)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_bits_of_an_exact_step_depend_on_no_number_of_rows(dtype: torch.dtype) -> None:
    """The sums of the feed-forward are cut into parts that do not fill vectors."""
    config = local_and_global(96).to_dict()
    for block in config["blocks"].values():
        block["feed_forward"]["d_ff"] = 1610
        block["attention"]["window"] = None
    backend = quick(
        randomised(DecoderConfig.from_dict(config).build(dtype=dtype).eval()), exact=True
    )
    assert backend.is_invariant
    tokens, decoder = torch.randint(0, 61, (40, 2)), backend.decoder
    rows = tokens.split(1)
    alone = torch.cat([all_logits(backend, row, paged(decoder, 1, 2)) for row in rows])
    for rows in (*range(2, 18), 40):
        cache = paged(decoder, rows, 2)
        found = [all_logits(backend, tokens[:rows, n : n + 1], cache) for n in range(2)]
        assert torch.equal(torch.cat(found, dim=1), alone[:rows])


@torch.no_grad()
def _whole(backend: Backend, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Logits of each further token, after prompts that are read token by token."""
    cache = paged(backend.decoder, len(tokens), prompts.shape[1] + tokens.shape[1])
    backend.decoder.next_logits(prompts[:, :1], cache=cache)
    further = torch.cat((prompts[:, 1:], tokens), dim=1)
    columns = further.split(1, dim=1)
    return torch.stack([last_logits(backend, each, cache) for each in columns], dim=1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_many_rows_are_multiplied_by_gemms(
    dtype: torch.dtype, calls: list[tuple[int, ...]]
) -> None:
    backend = quick(built(dtype=dtype))
    rows = backend.most
    if rows == backend.few:
        pytest.skip("many rows are left to PyTorch's or the matrix unit's gemms here")
    prompts, tokens = torch.randint(0, 61, (rows, 3)), torch.randint(0, 61, (rows, 2))
    exact = _rows_along(built(dtype=dtype).double(), prompts, tokens)
    found = _rows_along(backend, prompts, tokens)
    assert calls == [(1,) * rows] * 2
    expected = _rows_along(built(dtype=dtype), prompts, tokens)
    assert (found - exact).norm() <= 2 * (expected - exact).norm()


@torch.no_grad()
def _rows_along(model: Decoder | Backend, prompts: Tensor, tokens: Tensor) -> Tensor:
    """Logits of each further token, after prompts of one length."""
    decoder = backend_of(model).decoder
    cache = paged(decoder, len(prompts), prompts.shape[1] + tokens.shape[1])
    decoder(prompts, cache=cache)
    columns = tokens.split(1, dim=1)
    return torch.stack([last_logits(model, each, cache) for each in columns], dim=1).double()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_packed_weights_are_multiplied_as_by_their_modules(format: FormatName) -> None:
    tokens = torch.randint(0, 61, (3, 12))
    stepping = along(quick(built(), format), tokens[:, :4], tokens)
    assert error(stepping, along(without_steps(built(), format), tokens[:, :4], tokens)) <= 1e-5


@torch.no_grad()
@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: name(COVERING.index(config)))
def test_a_packed_step_is_one_call_with_the_logits_of_the_modules(
    config: DecoderConfig, calls: list[tuple[int, ...]]
) -> None:
    """Sequences of several lengths, with one to three new tokens each."""
    found = []
    for one in (backend_of(make(config)), quick(make(config))):
        cache = one.decoder.new_paged_cache(tokens=200, sequences=4, slack=2)
        sequences = [cache.new_sequence() for _ in range(4)]
        tokens = random_tokens(config, 1, 60)
        for n, sequence in enumerate(sequences):
            one.decoder(tokens[:, : 2 + n], cache=PagedView(cache, [sequence]))
        calls.clear()
        parts = [
            (PagedView(cache, sequences[begin:end]), seq)
            for begin, end, seq in ((0, 2, 1), (2, 3, 3), (3, 4, 2))
        ]
        found.append(one.logits(tokens[0, 20:27], parts, [1, 0, 2, 1]))
        assert [sequence.length for sequence in sequences] == [3, 4, 7, 7]
    assert error(found[1], found[0]) <= 1e-5
    assert calls in ([], [(1, 1, 3, 2)])
    assert bool(calls) == (quick(make(config)).why_not_whole() == "")


@torch.no_grad()
@pytest.mark.parametrize("format", [None, "int4"])
def test_an_adapter_is_part_of_a_step(format: FormatName | None) -> None:
    """Also after another adapter, or none, is set."""
    tokens = torch.randint(0, 61, (3, 12))
    plain = built()
    if format is not None:
        quantize(plain, format)
    for adapter, rank in (("one", 8), ("two", 3)):
        add_adapter(plain, LoraConfig(rank=rank), name=adapter)
        for weight in adapter_parameters(plain, adapter).values():
            weight.normal_(0, 0.05)
    backend = quick(deepcopy(plain))
    decoder = backend.decoder
    assert backend.why_not_whole() == ""
    found = []
    for adapter in ("one", "two"):
        set_adapter(plain, adapter)
        set_adapter(decoder, adapter)
        found.append(along(backend, tokens[:, :4], tokens))
        assert error(found[-1], along(plain, tokens[:, :4], tokens)) <= 1e-5
    with disabled(plain), disabled(decoder):
        found.append(along(backend, tokens[:, :4], tokens))
        assert error(found[-1], along(plain, tokens[:, :4], tokens)) <= 1e-5
    assert all(error(one, other) > 1e-3 for one, other in combinations(found, 2))


def test_guesses_are_checked_in_one_call(calls: list[tuple[int, ...]]) -> None:
    backend = quick(built())
    if backend.most == 1:
        pytest.skip("several rows take the matrix unit's operators here")
    for rows in (1, 3):
        assert texts(backend, rows, 30, guesses=3) == texts(built(), rows, 30)
    assert any(max(counts) > 1 for counts in calls)


def test_a_head_is_normalised_alone_also_without_weights() -> None:
    config = local_and_global().to_dict()
    for block in config["blocks"].values():
        block["attention"]["qk_norm"] = {"norm": {"kind": "rms_norm", "weight": False}}
    plain, decoder = (make(DecoderConfig.from_dict(config)) for _ in range(2))
    tokens = torch.randint(0, 61, (2, 8))
    stepping = along(quick(decoder), tokens[:, :3], tokens)
    assert error(stepping, along(plain, tokens[:, :3], tokens)) <= 1e-5


def test_windows_no_shorter_than_the_cache_share_its_tables() -> None:
    config = local_and_global().to_dict() | {"max_seq_len": 40}
    config["blocks"]["local"]["attention"]["window"] = 40
    plain, decoder = (make(DecoderConfig.from_dict(config)) for _ in range(2))
    tokens = torch.randint(0, 61, (2, 8))
    stepping = along(quick(decoder), tokens[:, :3], tokens)
    assert error(stepping, along(plain, tokens[:, :3], tokens)) <= 1e-5


def test_several_threads_may_be_the_first(calls: list[tuple[int, ...]]) -> None:
    backend = quick(built())
    expected = texts(quick(built()), 1, 6)
    calls.clear()
    with ThreadPoolExecutor(4) as threads:
        futures = [threads.submit(texts, backend, 1, 6) for _ in range(4)]
        assert [one.result() for one in futures] == [expected] * 4
    assert backend.translated is not None
    assert backend.translated.kept is not None
    assert calls


def test_asking_how_rows_are_computed_calls_no_hook() -> None:
    backend = quick(built())
    exact = quick(built(), exact=True)
    assert exact.is_invariant
    for one in (backend, exact):
        one.decoder.layers[0].register_forward_hook(lambda *_: pytest.fail("it was called"))
        assert one.invariant_batch == 1
        assert not one.is_invariant


@pytest.mark.parametrize("tokens", [torch.zeros(1, 1), torch.zeros(2, 0)], ids=["rows", "none"])
def test_what_does_not_fit_the_cache_is_refused_as_by_modules(tokens: Tensor) -> None:
    backend, refusals = quick(built()), list[str]()
    for one in (built(), backend.decoder):
        cache = paged(one, 2, 8)
        last_logits(one, torch.ones(2, 3, dtype=torch.int64), cache)
        with torch.no_grad(), pytest.raises(WorkhorseError) as refused:
            one.next_logits(tokens.long(), cache=cache)
        refusals.append(str(refused.value))
    assert refusals[0] == refusals[1]


def test_a_decoder_with_hooks_calls_its_modules(calls: list[tuple[int, ...]]) -> None:
    backend = quick(built())
    tokens = torch.randint(0, 61, (1, 8))
    seen: list[torch.Size] = []

    def see(_module: object, _inputs: object, output: Tensor) -> None:
        seen.append(output.shape)

    hook = backend.decoder.layers[1].register_forward_hook(see)
    expected = along(backend, tokens[:, :3], tokens)
    assert len(seen) == 1 + tokens.shape[1]
    assert not calls
    hook.remove()
    assert error(along(backend, tokens[:, :3], tokens), expected) <= 1e-5
    assert len(calls) == tokens.shape[1]


def test_autocast_decides_as_without_native_steps(calls: list[tuple[int, ...]]) -> None:
    tokens = torch.randint(0, 61, (1, 8))
    with torch.autocast("cpu", torch.bfloat16):
        logits = along(quick(built()), tokens[:, :3], tokens)
        assert torch.equal(logits, along(without_steps(built()), tokens[:, :3], tokens))
    assert not calls


@torch.no_grad()
def test_tokens_may_be_of_32_bits() -> None:
    backend, token = quick(built()), torch.tensor([[7]])
    caches = [paged(backend.decoder, 1, 4) for _ in range(2)]
    logits = [
        last_logits(backend, *both) for both in zip((token, token.int()), caches, strict=True)
    ]
    assert torch.equal(*logits)


def test_a_token_outside_of_the_vocabulary_is_refused() -> None:
    backend = quick(built())
    for token in (61, -1):
        tokens = torch.tensor([[1, 2, 3, token]])
        with pytest.raises(WorkhorseError, match=f"token ids range from {token} to {token}"):
            along(backend, tokens[:, :3], tokens[:, 3:])


def test_exact_texts_do_not_depend_on_how_much_of_a_prompt_is_known() -> None:
    """Prefixes shared between prompts are read once, so the rest has other lengths."""
    config = local_and_global().to_dict()
    config["blocks"]["local"]["attention"]["window"] = None
    backend = quick(randomised(DecoderConfig.from_dict(config).build(dtype=torch.bfloat16).eval()))
    shared = torch.randint(0, 61, (300,)).tolist()
    prompts = [shared[:known] + [known % 61] * more for known, more in ((100, 90), (128, 99))]
    prompts += [shared, shared[:257]]
    how = GenerationConfig(max_new_tokens=4, temperature=0, exact=True, logprobs=1)
    alone = [next(iter(generate(backend, [prompt], how))) for prompt in prompts]
    for given in (prompts, prompts[::-1]):
        found = generate(backend, given, how)
        expected = [alone[prompts.index(prompt)] for prompt in given]
        assert [text.tokens for text in found] == [text.tokens for text in expected]
        assert [text.logprobs for text in found] == [text.logprobs for text in expected]


def test_a_cache_made_in_inference_mode_is_used_outside_of_it() -> None:
    backend, tokens = quick(built()), torch.randint(0, 61, (1, 6))
    with torch.inference_mode():
        cache = paged(backend.decoder, 1, 6)
        backend.decoder(tokens[:, :4], cache=cache)
        last_logits(backend, tokens[:, 4:5], cache)
    with torch.no_grad():
        found = last_logits(backend, tokens[:, 5:], cache)
    assert error(found, along(built(), tokens[:, :5], tokens[:, 5:])[:, 0]) <= 1e-5
