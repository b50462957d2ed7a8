"""Invalid requests raise a one-line error, and do not affect other requests."""

import re

import numpy as np
import pytest
import torch

from tests.generate.serving import alone, is_empty, run
from workhorse.errors import WorkhorseError
from workhorse.generate import Engine, GenerationConfig, generate, stream

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_a_processor_that_forbids_everything_is_told(make_decoder):
    engine = Engine(make_decoder(), max_sequences=1)
    engine.add([1], processors=[lambda logits, tokens: logits - torch.inf])
    with pytest.raises(WorkhorseError, match="a logit processor forbids every token"):
        engine.step()


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda logits, tokens: None, "a logit processor returned None"),
        (lambda logits, tokens: logits[:5], r"returned \(5,\); return logits of shape \(17,\)"),
        (lambda logits, tokens: logits * torch.nan, "returned nan or inf"),
        (lambda logits, tokens: logits + torch.inf, "returned nan or inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_processors_that_give_no_logits_are_told(make_decoder, processor, message, temperature):
    engine = Engine(make_decoder())
    engine.add([1], GenerationConfig(temperature=temperature), processors=[processor])
    with pytest.raises(WorkhorseError, match=message):
        engine.step()
    assert engine.is_idle
    assert is_empty(engine)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 2}, "beams=2: beam search returns no tokens"),
        ({"speculate": 2, "temperature": 0}, "speculate=2 is more than speculate=0 of this engine"),
        ({"n_samples": 3}, "n_samples=3 is more than max_sequences=2"),
        (
            {"max_new_tokens": 20},
            "the request needs 22 tokens of cache, and the engine has 8; reduce max_new_tokens",
        ),
    ],
)
def test_what_can_never_be_done_is_refused_when_asked(make_decoder, options, message):
    engine = Engine(make_decoder(), max_sequences=2, max_tokens=8)
    with pytest.raises(WorkhorseError, match=message):
        engine.add([1, 2, 3], GenerationConfig(**options))
    assert engine.is_idle


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[
            (size, value)
            for size in ("max_sequences", "max_tokens")
            for value in (0, True, 1.5, "3")
        ],
        *[("token_budget", value) for value in (0, -1, False, 2.0)],
        *[("speculate", value) for value in (-1, True, None)],
        *[("max_sequences", 2**40), ("max_tokens", 2**70), ("prefix_caching", 1)],
        *[("draft", "a model"), ("tokenizer", "a folder"), ("decoder", None)],
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(make_decoder, option, value):
    fact = (
        "does not fit into memory" if value in (2**40, 2**70) else rf"{option}=.* (is|are) .*; give"
    )
    with pytest.raises(WorkhorseError, match=fact):
        Engine(**{"decoder": make_decoder(), option: value})


@pytest.mark.parametrize("size", [np.int64(3), 3])
def test_sizes_may_be_of_numpy(make_decoder, size):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=3, stop_tokens=())
    engine = Engine(
        decoder, max_sequences=size, max_tokens=size * 16, token_budget=size * 4, speculate=size
    )
    (result,) = engine.add(np.array([1, 2, 3, 4]), config)
    assert run(engine)[result] == alone(decoder, [1, 2, 3, 4], config)[0]


@pytest.mark.parametrize(
    ("prompt", "options"),
    [
        *[(prompt, {}) for prompt in (None, 5, "abc", b"ab", [1.0], [True], ["a"], [[1]], {1, 2})],
        *[(torch.tensor(tokens), {}) for tokens in (1, [1.5], [[1, 2]])],
        *[([1], {"config": config}) for config in ({}, 0, {"max_new_tokens": 3})],
        *[([1], {"processors": processors}) for processors in (None, "f", [5], len)],
        *[([1], {"stop_conditions": conditions}) for conditions in (None, [None], len)],
    ],
)
def test_a_request_of_other_types_is_refused_and_changes_nothing(make_decoder, prompt, options):
    engine = Engine(make_decoder())
    with pytest.raises(WorkhorseError, match=r"^[^\n]+; [^\n]+$"):
        engine.add(prompt, **options)
    assert engine.is_idle
    assert engine.add([1]) == range(1)


@pytest.mark.parametrize("result", [1, -1, None, True, "0", 0.0, range(1)])
def test_what_was_never_asked_for_cannot_be_cancelled(make_decoder, result):
    engine = Engine(make_decoder())
    engine.add([1])
    with pytest.raises(WorkhorseError, match="index="):
        engine.cancel(result)
    engine.cancel(0)
    engine.cancel(0)
    assert engine.is_idle


def test_budgets_too_small_for_a_step_are_refused(make_decoder):
    with pytest.raises(WorkhorseError, match=r"token_budget=7 is too small .* give token_budget=8"):
        Engine(make_decoder(), max_sequences=4, token_budget=7, speculate=1)
    engine = Engine(make_decoder(), max_sequences=4, token_budget=8)
    with pytest.raises(WorkhorseError, match="token_budget=8 is too small for exact=True with"):
        engine.add([1], GenerationConfig(exact=True))


def test_a_decoder_without_weights_is_refused(make_decoder):
    with pytest.raises(WorkhorseError, match="a decoder on the device meta has no weights"):
        Engine(make_decoder().to("meta"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"temperature": 0}}, "config={'temperature': 0} is not a GenerationConfig"),
        ({"decoder": None}, "decoder=None is not a decoder; give a model's .backend"),
        ({"tokenizer": 3}, "tokenizer=3 is not a tokenizer; give a model's .tokenizer"),
        ({"draft": "m"}, "draft='m' is not a decoder; give a model's .backend"),
        ({"prompts": None}, "prompts=None is not a list; give a list of prompts"),
        ({"prompts": "ab"}, "prompts='ab' is not a list; give a list of prompts"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_what_cannot_generate(make_decoder, function, arguments, message):
    given = {"decoder": make_decoder(), "prompts": [[1]], **arguments}
    with pytest.raises(WorkhorseError, match=re.escape(message)):
        function(**given)


def test_adapters_of_another_model_and_unknown_ones_are_refused(make_decoder):
    decoder = make_decoder()
    with pytest.raises(WorkhorseError, match="adapter 'a' is not a decoder of the engine's model"):
        Engine(decoder, adapters={"a": make_decoder(vocab_size=18)})
    engine = Engine(decoder, adapters={"a": decoder})
    with pytest.raises(WorkhorseError, match="the engine has no adapter 'b'; known: a"):
        engine.add([1], adapter="b")
    assert engine.is_idle
