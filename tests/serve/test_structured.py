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
from tests.serve.schemas import random_schema, shortest
from workhorse.errors import WorkhorseError
from workhorse.serve import grammar as grammar_module
from workhorse.serve.grammar import Grammar, GrammarChecker, Grammars, source_of
from workhorse.serve.messages import GrammarError, GrammarSource
from workhorse.serve.schema import StructuredOutputs
from workhorse.tokenizers import (
    BpeConfig,
    BytesConfig,
    SpecialTokensConfig,
    Tokenizer,
    train_tokenizer,
)

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


TOKENIZERS = {
    "bytes": BytesConfig(special=SpecialTokensConfig()),
    "bpe": BpeConfig(vocab_size=400, special=SpecialTokensConfig()),
}


def trained(kind: str) -> Tokenizer:
    values = [None, True, 12, "red", ["a", 1], {"b1": "a b"}, 2.5]
    return train_tokenizer(TOKENIZERS[kind], [json.dumps({"a1": one, "c3": 1}) for one in values])


def needed(grammars: Grammars, source: GrammarSource) -> int:
    """Return the number of tokens that the error of a request without tokens names."""
    with pytest.raises(GrammarError, match="shortest completion found for the grammar") as error:
        grammars.make(source, 0, 0)
    found = re.findall(r"max_tokens=(\d+) or more, and a prompt that leaves room", str(error.value))
    return int(found[0])


def drawn(tokenizer: Tokenizer, grammar: Grammar, most: int) -> str:
    """Return a completion of random logits."""
    end = tokenizer.special_tokens["<|eos|>"]
    tokens: list[int] = []
    while len(tokens) < most and not grammar.ends(tokens, ""):
        logits = grammar(3 * torch.randn(tokenizer.vocab_size), tokens)
        tokens.append(int(logits.softmax(-1).multinomial(1)))
        if tokens[-1] == end:
            break
    return tokenizer.decode([token for token in tokens if token != end])


@pytest.mark.parametrize("count", [15, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_no_value_of_a_generated_schema_is_cut(kind: str, count: int) -> None:
    """A value fits into the tokens that the error for fewer tokens names.

    A search has a maximum number of states, so the number is exact only for short values.
    """
    tokenizer, pick = trained(kind), random.Random(count)
    grammars = Grammars(tokenizer, [tokenizer.special_tokens["<|eos|>"]])
    for _ in range(count):
        schema = random_schema(pick)
        source = GrammarSource(source_of(StructuredOutputs.model_validate({"json": schema})))
        least, size = needed(grammars, source), shortest(schema)
        if size <= 60:
            assert least <= size
        if kind == "bytes":
            assert least >= size
        for most in (*range(least, least + 6), least + 300):
            text = drawn(tokenizer, grammars.make(source, 0, most), most)
            jsonschema.validate(json.loads(text), schema)


LINKED = {
    "type": "object",
    "properties": {"r": {"$ref": "#/$defs/n"}},
    "required": ["r"],
    "$defs": {
        "n": {
            "type": "object",
            "properties": {
                "v": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]},
            },
            "required": ["v", "next"],
        }
    },
}
NESTED = 'start: "(" start ")" | "[" start "]" | "ends"'
TAGGED = 'start: one "x"\none[suffix="</end>"]: /(?s:.*)/'


@pytest.mark.parametrize(
    ("asked", "least", "pattern"),
    [
        ({"regex": "[ab]{3}-[0-9]+"}, 5, "[ab]{3}-[0-9]+"),
        ({"regex": "(a{9}|b+)c"}, 2, "(a{9}|b+)c"),
        ({"choice": ["maybe", "yes", "no!!"]}, 3, "maybe|yes|no!!"),
        ({"choice": ["]]]]]", "b0xx", "b2x"]}, 3, "]]]]]|b0xx|b2x"),
        ({"grammar": NESTED}, 4, r"[(\[]*ends[)\]]*"),
        ({"grammar": TAGGED}, 7, "(?s:.*)</end>x"),
        ({"json": {"type": "string", "pattern": "^a+b$"}}, 4, '"a+b"'),
        ({"json": {"type": "string", "pattern": "b$"}}, 3, '".*b"'),
        ({"json": {"type": "string", "format": "email"}}, 5, '".+@.+"'),
        ({"json": LINKED}, 25, r"(?s:\{.*\})"),
        (
            {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 3}},
            7,
            r"(?s:\[.*\])",
        ),
    ],
)
def test_no_completion_of_another_form_is_cut(asked: dict, least: int, pattern: str) -> None:
    for kind in TOKENIZERS:
        tokenizer = trained(kind)
        grammars = Grammars(tokenizer, [tokenizer.special_tokens["<|eos|>"]])
        source = GrammarSource(source_of(StructuredOutputs.model_validate(asked)))
        found = needed(grammars, source)
        assert found == least if kind == "bytes" else found <= least
        for most in [*range(found, found + 6), found + 40] * 2:
            text = drawn(tokenizer, grammars.make(source, 0, most), most)
            assert re.fullmatch(pattern, text), (most, text)
            if "json" in asked:
                json.loads(text)


def test_too_few_tokens_are_an_error_before_the_first(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
    options: dict = {
        "model": MODEL,
        "prompt": "a",
        "extra_body": {"structured_outputs": {"json": schema}},
    }
    for stream in (False, True):
        with pytest.raises(
            BadRequestError, match=r"has 8 tokens, .* may have 7; choose max_tokens=8"
        ):
            client.completions.create(**options, max_tokens=7, stream=stream)
    for choice in client.completions.create(**options, max_tokens=8, n=3, seed=1).choices:
        assert choice.text == '{"a":""}'
    (cut,) = client.completions.create(**options, max_tokens=40, stop=":").choices
    assert (cut.text.split(), cut.finish_reason) == (["{", '"a"'], "stop")


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
