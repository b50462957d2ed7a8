"""Exact completions: no bit depends on other requests, the schedule or the prefix cache."""

import random
from collections.abc import Mapping

import pytest
import torch
from torch import nn

from tests.native.machine import decode_natively
from workhorse.errors import WorkhorseError
from workhorse.execute.backend import Backend, backend_of
from workhorse.execute.body import sharing_copy
from workhorse.generate import Engine, GenerationConfig, generate, stream
from workhorse.generate.beam import beam_search
from workhorse.generate.sequence import PIECE
from workhorse.nn import Decoder, DecoderConfig
from workhorse.nn.cache.paged import BLOCK
from workhorse.nn.convolution import ShortConvolution
from workhorse.transforms.adapters import adapter_parameters, add_adapter
from workhorse.transforms.lora import LoraConfig
from workhorse.transforms.quantization import FormatName, quantize

VOCAB = 48
GREEDY = GenerationConfig(temperature=0, max_new_tokens=6, logprobs=VOCAB, exact=True)
SAMPLED = GenerationConfig(top_k=20, max_new_tokens=9, logprobs=VOCAB, exact=True, seed=3)
NUCLEUS = SAMPLED.replace(top_p=0.9, repetition_penalty=1.2)
REPEATING = NUCLEUS.replace(frequency_penalty=-1.0, repetition_penalty=1.0, max_new_tokens=30)
MIXTURE = {"kind": "moe", "n_experts": 4, "top_k": 2, "d_ff": 40}
MLP = {"kind": "gated_mlp", "d_ff": 96, "activation": "silu"}


def make(
    dtype: torch.dtype,
    *,
    native: bool = False,
    mixture: bool = False,
    invariant: bool = False,
    convolution: bool = False,
    format: FormatName | None = None,
) -> Backend:
    def block(window: int | None) -> dict[str, object]:
        attention = {"n_heads": 4, "n_kv_heads": 2, "position": {"kind": "rope"}, "window": window}
        return {
            "kind": "pre_norm",
            "norm": {"kind": "rms_norm"},
            "attention": attention,
            "feed_forward": MIXTURE if mixture else MLP,
            "convolution": {"width": 4} if convolution else None,
        }

    config = DecoderConfig.from_dict(
        {
            "vocab_size": VOCAB,
            "d_model": 64,
            "n_layers": 2,
            "max_seq_len": 360,
            "blocks": {"whole": block(None), "window": block(50)},
            "pattern": ["whole", "window"],
            "final_norm": {"kind": "rms_norm"},
            "init": {"kind": "normal", "std": 0.3},
        }
    )
    torch.manual_seed(0)
    decoder = config.build(dtype=dtype).eval()
    for part in decoder.modules():
        if isinstance(part, ShortConvolution):
            nn.init.normal_(part.weight, std=0.3)
    if format is not None:
        quantize(decoder, format)
    if native or invariant:
        return decode_natively(decoder, exact=invariant)
    return backend_of(decoder)


def prompts() -> list[list[int]]:
    """Prompts, some with a shared prefix that ends before or after the end of a piece."""
    pick = random.Random(0)
    text = [pick.randrange(VOCAB) for _ in range(300)]
    begun = [text[:length] for length in (1, 40, PIECE, PIECE + 1, 200, 2 * PIECE, 300)]
    return begun + [[*tokens[:-1], 1, 2, 3] for tokens in begun]


REQUESTS = 18, 56
"""Number of requests: the default suite has the first one."""
KINDS = {
    "mixture": (torch.bfloat16, {"mixture": True}),
    "float32": (torch.float32, {}),
    "bfloat16": (torch.bfloat16, {}),
    "native float32": (torch.float32, {"native": True}),
    "native bfloat16": (torch.bfloat16, {"native": True}),
}
INVARIANT = {
    "float32": (torch.float32, {"convolution": True}),
    "bfloat16": (torch.bfloat16, {"mixture": True}),
    "int8": (torch.bfloat16, {"format": "int8"}),
    "int4": (torch.float32, {"format": "int4"}),
}


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_bit_is_that_of_the_text_alone(kind, requests):
    dtype, options = KINDS[kind]
    check_every_bit(make(dtype, **options), requests)


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("kind", INVARIANT)
def test_an_invariant_decoder_needs_no_passes_of_its_own(kind, requests, monkeypatch):
    dtype, options = INVARIANT[kind]
    backend = make(dtype, invariant=True, **options)
    if not backend.is_invariant:
        pytest.skip("there are no native steps here")
    monkeypatch.setattr(Decoder, "hidden", None)  # so every pass is a native step
    check_every_bit(backend, requests, speculate=3)


ADAPTERS = {
    "lora": LoraConfig(rank=4),
    "embedding": LoraConfig(rank=2, targets=("q_proj",), also_train=("embedding", "final_norm")),
}
DORA = {"dora": LoraConfig(rank=2, targets=("down_proj",), dora=True)}
"""No native step computes it, so it has passes of its own and no guesses."""


@torch.no_grad()
def with_adapter(base: Decoder, config: LoraConfig) -> Decoder:
    """The base with random values of an adapter; they share the other weights."""
    decoder = add_adapter(sharing_copy(base), config)
    for parameter in adapter_parameters(decoder).values():
        parameter.add_(0.1 * torch.randn_like(parameter))
    return decoder


@pytest.mark.parametrize("requests", REQUESTS)
@pytest.mark.parametrize("kind", ["reference", "native", "native int8"])
def test_adapters_share_weights_and_cache_and_change_no_bit_of_each_other(kind, requests):
    base = make(torch.bfloat16, format="int8" if "int8" in kind else None).decoder
    configs = ADAPTERS if "int8" in kind else ADAPTERS | DORA
    decoders = {name: with_adapter(base, config) for name, config in configs.items()}
    weights = set(base.parameters())
    for decoder in decoders.values():
        own = [one for one in decoder.parameters() if one not in weights]
        assert len(own) == len(adapter_parameters(decoder))
    if kind == "reference":
        check_every_bit(base, requests, decoders)
        return
    backend = decode_natively(base, exact=True)
    adapters = {name: decode_natively(one, exact=True) for name, one in decoders.items()}
    if not backend.is_invariant:
        pytest.skip("there are no native steps here")
    assert [name for name, one in adapters.items() if one.is_invariant] == list(ADAPTERS)
    check_every_bit(backend, requests, adapters, speculate=3 if "int8" in kind else 0)


def check_every_bit(
    model: Decoder | Backend,
    requests: int,
    adapters: Mapping[str, Decoder | Backend] | None = None,
    speculate: int = 0,
) -> None:
    """Requests arrive and are cancelled at random; the cache has room for three long ones.

    Each is compared with the completion of its prompt alone, without guesses.
    """
    pick = random.Random(1)
    names = [None, *(adapters or {})]
    configs = (GREEDY, SAMPLED, NUCLEUS, REPEATING)
    asked = [(prompt, config) for prompt in prompts() for config in configs]
    waiting = pick.sample(asked, requests)
    engine = Engine(
        model,
        adapters=adapters,
        max_sequences=5,
        max_tokens=900,
        token_budget=140,
        prefix_caching=True,
        speculate=speculate,
    )
    texts, found, cancelled, proposed, accepted = {}, {}, set(), 0, 0
    while waiting or not engine.is_idle:
        for prompt, config in [waiting.pop() for _ in waiting[: pick.choice([0, 0, 1, 3])]]:
            adapter, other = pick.choice(names), pick.choice(names)
            guesses = pick.choice((0, 1, speculate)) if speculate else 0
            several = config.replace(n_samples=1 if config is GREEDY else 2, speculate=guesses)
            for number, index in enumerate(engine.add(prompt, several, adapter=adapter)):
                texts[index] = (adapter, prompt, config.replace(seed=3 + number))
            inexact = config.replace(exact=False, max_new_tokens=4)
            engine.add(prompt[:-1] or prompt, inexact, adapter=other)
        for delta in engine.step():
            found.setdefault(delta.index, []).append((delta.token, delta.logprob))
            proposed, accepted = proposed + delta.proposed, accepted + delta.accepted
        if texts and pick.random() < 0.05:
            engine.cancel(gone := pick.choice(list(texts)))
            cancelled.add(gone)
    for index, (adapter, prompt, config) in texts.items():
        alone = Engine(model, adapters=adapters, max_sequences=1)
        alone.add(prompt, config, adapter=adapter)
        own, whole = found.get(index, []), []
        while not alone.is_idle:
            whole += [(delta.token, delta.logprob) for delta in alone.step()]
        assert own == whole[: len(own)]
        assert len(own) == len(whole) or index in cancelled
    assert bool(speculate) == (0 < accepted < proposed)


def test_exact_texts_share_whole_pieces_with_each_other_alone(consumed):
    backend = make(torch.float32)
    engine = Engine(backend, max_sequences=3, prefix_caching=True)
    prompt = prompts()[6]
    shapes = consumed(backend.decoder)

    def read(config: GenerationConfig) -> list[int]:
        shapes.clear()
        engine.add(prompt, config.replace(max_new_tokens=1))
        while not engine.is_idle:
            engine.step()
        return [seq for _, seq in shapes]

    assert read(GREEDY.replace(exact=False)) == [300]
    assert read(GREEDY) == [PIECE, PIECE, 300 - 2 * PIECE]
    assert read(GREEDY) == [300 - 2 * PIECE]
    assert read(GREEDY.replace(exact=False)) == [300 % BLOCK]


def test_a_text_that_forgets_its_beginning_stays_exact():
    backend = make(torch.bfloat16)
    config = SAMPLED.replace(truncate="left", max_new_tokens=80)
    texts = [tokens * 3 for tokens in prompts()[3:6]]
    for text, found in zip(texts, generate(backend, texts, config), strict=True):
        (alone,) = generate(backend, [text], config)
        assert found.tokens == alone.tokens
        assert found.logprobs == alone.logprobs


def test_after_a_step_that_was_broken_off_every_bit_is_the_same():
    backend = make(torch.bfloat16)
    decoder, prompt = backend.decoder, prompts()[4]
    (alone,) = generate(backend, [prompt], SAMPLED)
    engine = Engine(backend, max_sequences=2)
    engine.add(prompt, SAMPLED)
    hidden, calls, deltas = decoder.hidden, [], []

    def breaks(tokens, **arguments):
        calls.append(tokens.shape)
        x = hidden(tokens, **arguments)
        if len(calls) in (2, 6):
            raise KeyboardInterrupt
        return x

    decoder.hidden = breaks
    while not engine.is_idle:
        try:
            deltas += engine.step()
        except KeyboardInterrupt:
            deltas += []
    assert len(calls) > 6
    assert [delta.token for delta in deltas] == list(alone.tokens)
    assert [delta.logprob for delta in deltas] == list(alone.logprobs)


def test_beams_of_several_prompts_are_those_of_each():
    backend = make(torch.bfloat16)
    config = GenerationConfig(beams=3, max_new_tokens=8, exact=True)
    texts = prompts()[2:6]
    found = beam_search(backend, texts, config)
    for text, beams in zip(texts, found, strict=True):
        (alone,) = beam_search(backend, [text], config)
        assert [(beam.tokens, beam.score) for beam in beams] == [
            (beam.tokens, beam.score) for beam in alone
        ]


def test_guesses_that_could_change_a_bit_are_refused():
    backend, guessing = make(torch.float32), SAMPLED.replace(speculate=2)
    engine = Engine(backend, max_sequences=1, speculate=2)
    for refused in (
        lambda: engine.add([1], GREEDY),
        lambda: generate(backend, [[1]], guessing),
        lambda: stream(backend, [[1]], guessing),
    ):
        with pytest.raises(WorkhorseError, match="exact is not possible with speculate=2"):
            refused()
    invariant = make(torch.float32, invariant=True)
    if not invariant.is_invariant:
        pytest.skip("there are no native steps here")
    with pytest.raises(WorkhorseError, match="exact is not possible with a draft at temperature=1"):
        generate(invariant, [[1]], guessing, draft=backend)
    greedy = GREEDY.replace(speculate=2)
    (plain,) = generate(invariant, [[1]], GREEDY)
    (guessed,) = generate(invariant, [[1]], greedy, draft=backend)
    assert (guessed.tokens, guessed.logprobs) == (plain.tokens, plain.logprobs)
    assert guessed.accepted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_exact_texts_take_their_steps_together_where_that_changes_no_bit(dtype, monkeypatch):
    backend = make(dtype, native=True)
    passes = []
    read = type(backend).logits

    def counting(backend, tokens, views, wanted):
        passes.append([(len(view.sequences), seq) for view, seq in views])
        return read(backend, tokens, views, wanted)

    monkeypatch.setattr(type(backend), "logits", counting)
    some = [[1, 2, 3], [4, 5, 6, 7], [8] * 40]
    together = generate(backend, some, GREEDY)
    steps = passes[len(some) :]
    assert steps == [[(min(3, backend.invariant_batch), 1)]] * len(steps)
    assert [generate(backend, [prompt], GREEDY)[0] for prompt in some] == together
