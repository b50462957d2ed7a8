"""What the scheduler cannot do is told in one line, and changes nothing else."""

import re

import numpy as np
import pytest
import torch

from tests.generate.scheduling import alone, is_empty, run
from workhorse.errors import WorkhorseError
from workhorse.generate import GenerationConfig, Scheduler, generate, stream

pytestmark = pytest.mark.usefixtures("small_blocks")


def test_a_processor_that_forbids_everything_is_told(make_decoder):
    scheduler = Scheduler(make_decoder(), max_rows=1)
    scheduler.add([1], processors=[lambda logits, tokens: logits - torch.inf])
    with pytest.raises(WorkhorseError, match="a logit processor forbids every token"):
        scheduler.step()


@pytest.mark.parametrize(
    ("processor", "message"),
    [
        (lambda logits, tokens: None, "a logit processor returned None"),
        (lambda logits, tokens: logits[:5], r"returned \(5,\); return logits, \(17,\)"),
        (lambda logits, tokens: logits * torch.nan, "returned nan or inf"),
        (lambda logits, tokens: logits + torch.inf, "returned nan or inf"),
    ],
)
@pytest.mark.parametrize("temperature", [0, 1])
def test_processors_that_give_no_logits_are_told(make_decoder, processor, message, temperature):
    scheduler = Scheduler(make_decoder())
    scheduler.add([1], GenerationConfig(temperature=temperature), processors=[processor])
    with pytest.raises(WorkhorseError, match=message):
        scheduler.step()
    assert scheduler.is_idle
    assert is_empty(scheduler)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"beams": 2}, "beams=2 gives its text only at the end"),
        ({"speculate": 2, "temperature": 0}, "speculate=2 is more than this scheduler guesses, 0"),
        ({"n_samples": 3}, "n_samples=3 is more than the 2 rows of this scheduler"),
        ({"max_new_tokens": 20}, "1 × 22 tokens do not fit a cache of 8; ask for fewer"),
    ],
)
def test_what_can_never_be_done_is_refused_when_asked(make_decoder, options, message):
    scheduler = Scheduler(make_decoder(), max_rows=2, max_tokens=8)
    with pytest.raises(WorkhorseError, match=message):
        scheduler.add([1, 2, 3], GenerationConfig(**options))
    assert scheduler.is_idle


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *[(size, value) for size in ("max_rows", "max_tokens") for value in (0, True, 1.5, "3")],
        *[("prompt_chunk", value) for value in (0, -1, False, 2.0)],
        *[("speculate", value) for value in (-1, True, None)],
        *[("max_rows", 2**40), ("max_tokens", 2**70), ("remembers", 1)],
        *[("draft", "a model"), ("tokenizer", "a folder"), ("decoder", None)],
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(make_decoder, option, value):
    fact = (
        "does not fit into memory" if value in (2**40, 2**70) else rf"{option}=.* (is|are) .*; give"
    )
    with pytest.raises(WorkhorseError, match=fact):
        Scheduler(**{"decoder": make_decoder(), option: value})


@pytest.mark.parametrize("size", [np.int64(3), 3])
def test_sizes_may_be_of_numpy(make_decoder, size):
    decoder = make_decoder()
    config = GenerationConfig(temperature=0, max_new_tokens=3, stop_tokens=())
    scheduler = Scheduler(
        decoder, max_rows=size, max_tokens=size * 16, prompt_chunk=size, speculate=size
    )
    (result,) = scheduler.add(np.array([1, 2, 3, 4]), config)
    assert run(scheduler)[result] == alone(decoder, [1, 2, 3, 4], config)[0]


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
    scheduler = Scheduler(make_decoder())
    with pytest.raises(WorkhorseError, match=r"^[^\n]+; [^\n]+$"):
        scheduler.add(prompt, **options)
    assert scheduler.is_idle
    assert scheduler.add([1]) == range(1)


@pytest.mark.parametrize("result", [1, -1, None, True, "0", 0.0, range(1)])
def test_what_was_never_asked_for_cannot_be_cancelled(make_decoder, result):
    scheduler = Scheduler(make_decoder())
    scheduler.add([1])
    with pytest.raises(WorkhorseError, match="result="):
        scheduler.cancel(result)
    scheduler.cancel(0)
    scheduler.cancel(0)
    assert scheduler.is_idle


def test_a_decoder_without_weights_is_refused(make_decoder):
    with pytest.raises(WorkhorseError, match="a decoder on the device meta has no weights"):
        Scheduler(make_decoder().to("meta"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"config": {"temperature": 0}}, "config={'temperature': 0} is not a GenerationConfig"),
        ({"decoder": None}, "decoder=None is not a decoder; give a model's .decoder"),
        ({"tokenizer": 3}, "tokenizer=3 is not a tokenizer; give a model's .tokenizer"),
        ({"draft": "m"}, "draft='m' is not a decoder; give a model's .decoder"),
        ({"prompts": None}, "prompts=None is not a list; give a list of prompts"),
        ({"prompts": "ab"}, "prompts='ab' is not a list; give a list of prompts"),
    ],
)
@pytest.mark.parametrize("function", [generate, stream])
def test_what_cannot_generate(make_decoder, function, arguments, message):
    given = {"decoder": make_decoder(), "prompts": [[1]], **arguments}
    with pytest.raises(WorkhorseError, match=re.escape(message)):
        function(**given)
