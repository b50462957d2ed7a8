"""Structured output: completions have the form that a request asks for, and always end."""

import asyncio
import json
import os
import random
import re
import signal
from concurrent.futures import ThreadPoolExecutor

import jsonschema
import pytest
import torch
from openai import BadRequestError, OpenAI
from pydantic import BaseModel

from tests.serve.conftest import MODEL
from tests.serve.schemas import random_schema
from workhorse.errors import WorkhorseError
from workhorse.serve import grammar as grammar_module
from workhorse.serve.grammar import MARGIN, Grammars, source_of
from workhorse.serve.grammar_checker import GrammarChecker
from workhorse.serve.messages import GrammarSource
from workhorse.serve.schema import StructuredOutputs
from workhorse.tokenizers import BytesConfig, SpecialTokensConfig, train_tokenizer

ASK = [{"role": "user", "content": "hi"}]


class Person(BaseModel):
    name: str
    age: int
    tags: list[str]


def test_openais_client_parses_a_reply(client: OpenAI) -> None:
    for seed in range(3):
        reply = client.chat.completions.parse(
            model=MODEL, messages=ASK, response_format=Person, seed=seed, max_tokens=120
        )
        assert isinstance(reply.choices[0].message.parsed, Person)
        assert reply.choices[0].finish_reason == "stop"


def test_samples_and_streams_have_the_form(client: OpenAI) -> None:
    asked = {
        "model": MODEL,
        "messages": ASK,
        "response_format": {"type": "json_object"},
        "logit_bias": {str(ord('"')): 5},
        "n": 2,
        "seed": 7,
        "max_tokens": 60,
    }
    whole = client.chat.completions.create(**asked)
    texts = [choice.message.content or "" for choice in whole.choices]
    assert texts[0] != texts[1]
    assert all(isinstance(json.loads(text), dict) for text in texts)
    streamed = ["", ""]
    for event in client.chat.completions.create(**asked, stream=True):
        for choice in event.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    usage = whole.usage
    assert usage is not None
    one = client.chat.completions.create(**asked | {"n": 1}).usage
    assert one is not None
    assert usage.prompt_tokens == one.prompt_tokens >= usage.prompt_tokens_details.cached_tokens
    assert usage.completion_tokens > one.completion_tokens


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]+"}, "[ab]{3}-[0-9]+"),
        ({"choice": ["yes", 'n"o', "maybe"]}, 'yes|n"o|maybe'),
        ({"grammar": 'start: "a" /[xyz]{2}/ "b"'}, "a[xyz]{2}b"),
        ({"choice": ["é", "ß\\n"]}, r"é|ß\\n"),
        ({"json": {"enum": [1, "a b", None]}}, '1|"a b"|null'),
    ],
)
def test_other_forms(client: OpenAI, asked: dict, pattern: str) -> None:
    for temperature in (0, 1):
        reply = client.completions.create(
            model=MODEL,
            prompt="a",
            max_tokens=60,
            temperature=temperature,
            seed=1,
            extra_body={"structured_outputs": asked},
        )
        assert re.fullmatch(pattern, reply.choices[0].text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"structured_outputs": {"regex": "(a"}}, "the grammar cannot be used"),
        ({"structured_outputs": {"grammar": "junk"}}, "the grammar cannot be used"),
        ({"structured_outputs": {"json": {"type": "nonsense"}}}, "the grammar cannot be used"),
        ({"structured_outputs": {"json": {"$ref": "http://a/b"}}}, "the grammar cannot be used"),
        ({"structured_outputs": {"regex": "a" * 200_000}}, "has more than 100,000 characters"),
        ({"structured_outputs": {}}, "give one of json, regex, choice and grammar"),
        ({"structured_outputs": {"choice": ["a"]}, "ignore_eos": True}, "conflict"),
    ],
)
def test_wrong_forms_are_refused(client: OpenAI, fields: dict, message: str) -> None:
    with pytest.raises(BadRequestError, match=message):
        client.completions.create(model=MODEL, prompt="a", extra_body=fields)


def test_grammars_that_fail_after_a_token_fail_alone(client: OpenAI) -> None:
    """Their requests get an error at once, and more of them do not end the engine."""
    broken = {"structured_outputs": {"choice": [f"{n:05d}" + "x" * 30 for n in range(2000)]}}

    def reply(fields: dict) -> str:
        asked = {"model": MODEL, "prompt": "ab", "max_tokens": 60, "seed": 1, "timeout": 20}
        return client.completions.create(**asked, extra_body=fields).choices[0].text

    def failing() -> None:
        with pytest.raises(BadRequestError, match="the grammar cannot be used"):
            reply(broken)

    alone = reply({"ignore_eos": True})
    with ThreadPoolExecutor() as threads:
        failures = [threads.submit(failing) for _ in range(4)]
        assert threads.submit(reply, {"ignore_eos": True}).result() == alone
        for one in failures:
            one.result()


def test_values_of_generated_schemas_end_in_time() -> None:
    """With random logits, each value is valid and within the maximum number of tokens."""
    tokenizer = train_tokenizer(BytesConfig(special=SpecialTokensConfig()), [])
    (end,) = ends = [tokenizer.special_tokens["<|eos|>"]]
    grammars, pick = Grammars(tokenizer, ends), random.Random(4)
    torch.manual_seed(0)
    for _ in range(40):
        schema = random_schema(pick)
        source = source_of(StructuredOutputs.model_validate({"json": schema}))
        grammar = grammars.make(GrammarSource(source), 0, most := 400 + MARGIN)
        tokens: list[int] = []
        while len(tokens) < most and not grammar.ends(tokens, ""):
            logits = grammar(torch.randn(tokenizer.vocab_size), tokens)
            tokens.append(int(logits.softmax(-1).multinomial(1)))
            if tokens[-1] == end:
                break
        jsonschema.validate(json.loads(tokenizer.decode(tokens, skip_special=True)), schema)


@pytest.mark.parametrize("ends", [(), (260,)])
def test_a_model_without_an_end_token_ends_when_nothing_can_follow(ends: tuple[int, ...]) -> None:
    """Also if its end token is a row of a padded embedding, for which the tokenizer has none."""
    tokenizer = train_tokenizer(BytesConfig(), [])
    source = GrammarSource(source_of(StructuredOutputs(regex="ab?c")))
    grammar = Grammars(tokenizer, ends).make(source, 0, 9)
    tokens: list[int] = []
    while not grammar.ends(tokens, ""):
        tokens.append(int(grammar(torch.zeros(tokenizer.vocab_size + 9), tokens).argmax()))
    assert re.fullmatch("ab?c", tokenizer.decode(tokens))


def test_a_completion_whose_masks_take_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean also has a limit, so that a long completion may take longer in all."""
    tokenizer = train_tokenizer(BytesConfig(), [])
    source = GrammarSource(source_of(StructuredOutputs(grammar='start: e\ne: e e | "a"')))
    monkeypatch.setattr(grammar_module, "MOST_SECONDS", 0.0)
    logits = torch.zeros(tokenizer.vocab_size)
    Grammars(tokenizer, ()).make(source, 0, 500)(logits, [])
    monkeypatch.setattr(grammar_module, "MOST_MEAN_SECONDS", 0.0)
    with pytest.raises(WorkhorseError, match="per token, above the limit"):
        Grammars(tokenizer, ()).make(source, 0, 500)(logits, [])


def test_a_grammar_that_takes_too_long_is_refused() -> None:
    """Its process is killed, and the next grammar is checked by another one."""

    async def main() -> None:
        checker = GrammarChecker(1.0)
        assert await checker.check(source) == ""
        os.kill(checker._process.pid, signal.SIGSTOP)
        assert "did not answer within 1 seconds" in await checker.check(source)
        cancelled = asyncio.create_task(checker.check(source))
        await asyncio.sleep(0)
        cancelled.cancel()
        assert await checker.check(source) == ""

    source = source_of(StructuredOutputs(regex="[ab]+"))
    asyncio.run(main())
