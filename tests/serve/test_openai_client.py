"""The server answers OpenAI's Python client as OpenAI's API does."""

import math
from collections import Counter
from typing import Any

import openai
import pytest
from openai import OpenAI

from tests.serve.conftest import CONTEXT, END, MODEL, PADDING, Served
from workhorse.checkpoints import RunDirectory
from workhorse.tokenizers import Tokenizer

HELLO: Any = [{"role": "user", "content": "Hello, who are you?"}]


@pytest.fixture(scope="module")
def tokenizer(served: Served) -> Tokenizer:
    return RunDirectory(served.folder).tokenizer()


def reply(client: OpenAI, **options: Any) -> Any:
    """Chat; replies have exactly 24 tokens by default."""
    options = {"messages": HELLO, "seed": 0, "max_tokens": 24, **LONG, **options}
    return client.chat.completions.create(model=MODEL, **options)


def complete(client: OpenAI, **options: Any) -> Any:
    options = {"prompt": "Once upon", "seed": 0, "max_tokens": 24, **LONG, **options}
    return client.completions.create(model=MODEL, **options)


LONG: Any = {"logit_bias": {str(END): -100}}
"""Options of completions that do not end early."""
SHORT: Any = {"max_tokens": None, "logit_bias": None}


def text(found: Any) -> str:
    return found.choices[0].message.content


def test_a_chat(client):
    found = reply(client, **SHORT)
    assert found.id.startswith("chatcmpl-")
    assert (found.object, found.model) == ("chat.completion", MODEL)
    choice = found.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "stop", None)
    assert (choice.message.role, choice.message.refusal) == ("assistant", None)
    assert choice.message.content
    assert "<|end|>" not in choice.message.content
    usage = found.usage
    assert usage.prompt_tokens == len("Hello, who are you?") + 3  # <|user|> <|end|> <|assistant|>
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert reply(client).choices[0].finish_reason == "length"
    assert reply(client).usage.completion_tokens == 24


def test_roles_and_parts(client):
    """A developer message is a system message, and text parts are joined."""
    parts = [{"type": "text", "text": "Hello, "}, {"type": "text", "text": "who are you?"}]
    replies = {
        text(reply(client, messages=[{"role": role, "content": "Be short."}, question]))
        for role in ("system", "developer")
        for question in (HELLO[0], {"role": "user", "content": parts})
    }
    assert len(replies) == 1
    assert replies != {text(reply(client))}


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0}, {"n": 3}, {"logprobs": True, "top_logprobs": 2}, {"stop": "e"}],
    ids=str,
)
def test_a_streamed_chat_is_the_same(client, options):
    options = {"messages": HELLO, "seed": 0, **options}
    whole = client.chat.completions.create(model=MODEL, **options)
    events = client.chat.completions.stream(model=MODEL, **options)
    with events as stream:
        streamed = stream.get_final_completion()
    for one, other in zip(whole.choices, streamed.choices, strict=True):
        assert one.message.content == other.message.content
        assert one.finish_reason == other.finish_reason
        assert (one.logprobs and one.logprobs.content) == (
            other.logprobs and other.logprobs.content
        )


@pytest.mark.parametrize("options", [{}, {"n": 2, "logprobs": 2, "echo": True}], ids=str)
def test_a_streamed_completion_is_the_same(client, options):
    prompts = ["Once upon", "Zwölf Äpfel"]
    whole = complete(client, prompt=prompts, **options)
    texts: Counter[int] = Counter()
    pieces = {choice.index: "" for choice in whole.choices}
    tokens: dict[int, list[str]] = {index: [] for index in pieces}
    offsets: dict[int, list[int]] = {index: [] for index in pieces}
    reasons = {}
    for event in complete(client, prompt=prompts, stream=True, **options):
        (choice,) = event.choices
        texts[choice.index] += 1
        pieces[choice.index] += choice.text
        if choice.logprobs:
            tokens[choice.index] += choice.logprobs.tokens
            offsets[choice.index] += choice.logprobs.text_offset
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    assert min(texts.values()) > 1
    for choice in whole.choices:
        assert pieces[choice.index] == choice.text
        assert reasons[choice.index] == choice.finish_reason
        if choice.logprobs:
            assert tokens[choice.index] == choice.logprobs.tokens
            assert offsets[choice.index] == choice.logprobs.text_offset


def test_usage_in_a_stream(client):
    whole = reply(client).usage
    *events, last = reply(client, stream=True, stream_options={"include_usage": True})
    assert all(event.usage is None and event.choices for event in events)
    assert last.choices == []
    assert last.usage.completion_tokens == whole.completion_tokens
    assert last.usage.prompt_tokens == whole.prompt_tokens
    assert len({event.id for event in (*events, last)}) == 1
    assert all(event.usage is None for event in reply(client, stream=True))


@pytest.mark.parametrize("temperature", [0, 1])
def test_several_choices(client, temperature):
    found = reply(client, n=3, temperature=temperature)
    assert [choice.index for choice in found.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in found.choices]
    assert len(set(texts)) == (1 if temperature == 0 else 3)
    assert texts[0] == text(reply(client, temperature=temperature))
    one = reply(client, temperature=temperature).usage
    assert found.usage.completion_tokens == 3 * one.completion_tokens == 3 * 24
    assert found.usage.prompt_tokens == one.prompt_tokens


def test_several_prompts_and_choices(client, tokenizer):
    prompts = ["Once", "upon"]
    found = complete(client, prompt=prompts, n=2, echo=True)
    assert [choice.index for choice in found.choices] == [0, 1, 2, 3]
    assert [choice.text[:4] for choice in found.choices] == ["Once", "Once", "upon", "upon"]
    as_ids = complete(client, prompt=[*map(tokenizer.encode, prompts)], n=2, echo=True)
    assert [one.text for one in as_ids.choices] == [one.text for one in found.choices]
    one = complete(client, prompt=tokenizer.encode("Once"), echo=True)
    assert one.choices[0].text == found.choices[0].text


def test_the_seed_decides(client):
    assert text(reply(client, seed=7)) == text(reply(client, seed=7))
    assert text(reply(client, seed=7)) != text(reply(client, seed=8))
    assert text(reply(client, seed=None)) != text(reply(client, seed=None))


def test_stop_strings(client):
    whole = text(reply(client, temperature=0))
    middle = whole[8:10]
    at = whole.index(middle)
    for stop in (middle, ["never there", middle]):
        found = reply(client, temperature=0, stop=stop).choices[0]
        assert (found.message.content, found.finish_reason) == (whole[:at], "stop")
    found = complete(client, temperature=0, logit_bias={str(ord("k")): 100}, stop="kkk")
    assert found.choices[0].text == ""


def joined(entries: Any) -> str:
    """Join the bytes of tokens."""
    return bytes(value for one in entries for value in one.bytes).decode("utf-8", "replace")


def test_log_probabilities_of_a_chat(client):
    found = reply(client, logprobs=True, top_logprobs=3, temperature=0).choices[0]
    entries = found.logprobs.content
    assert joined(entries) == found.message.content
    for one in entries:
        values = [top.logprob for top in one.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert len(values) == 3
        best = next(top for top in one.top_logprobs if top.token != "<|end|>")
        assert (best.token, best.logprob) == (one.token, one.logprob)
    none = reply(client, logprobs=True, temperature=0).choices[0].logprobs.content
    assert [one.logprob for one in none] == [one.logprob for one in entries]
    assert all(one.top_logprobs == [] for one in none)


def test_log_probabilities_cover_the_text(client):
    """The tokens after a stop string and the end of a reply are not part of the text."""
    for options in ({"stop": "e", "max_tokens": 200}, SHORT):
        found = reply(client, logprobs=True, seed=3, **options).choices[0]
        assert found.finish_reason == "stop"
        assert joined(found.logprobs.content).startswith(found.message.content)


def test_log_probabilities_of_a_completion(client):
    logprobs = complete(client, logprobs=2, seed=1).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.top_logprobs) == 24
    assert logprobs.text_offset == [*range(24)]
    chosen = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    for token, value, top in chosen:
        assert [*top.values()] == sorted(top.values(), reverse=True)
        assert top[token] == value
    assert {len(top) for top in logprobs.top_logprobs} == {2, 3}  # also the token itself


def test_echo_scores_the_prompt(client):
    whole = complete(client, temperature=0, logprobs=1, max_tokens=4).choices[0]
    prompt = "Once upon" + whole.text
    found = complete(client, prompt=prompt, echo=True, logprobs=1, max_tokens=0)
    scored = found.choices[0]
    assert (scored.text, scored.finish_reason) == (prompt, "length")
    assert found.usage.completion_tokens == 0
    assert scored.logprobs.token_logprobs[0] is None
    assert scored.logprobs.token_logprobs[-4:] == whole.logprobs.token_logprobs
    assert scored.logprobs.top_logprobs[-4:] == whole.logprobs.top_logprobs
    assert scored.logprobs.text_offset == [*range(len(prompt))]


def test_rows_without_a_token_have_a_name(client, tokenizer):
    extra = [*range(tokenizer.vocab_size, tokenizer.vocab_size + PADDING)]
    names = {f"token_id:{token}" for token in extra}
    scored = complete(client, logprobs=20, echo=True, extra_body={"chat_logprobs": True})
    found = scored.choices[0].logprobs
    assert names.isdisjoint(found.tokens)
    assert names <= {name for top in found.top_logprobs[1:] for name in top}
    (chat,) = reply(client, logprobs=True, top_logprobs=20).choices
    for entries in (chat.logprobs.model_dump()["content"], found.content):
        tops = [top for entry in entries for top in entry["top_logprobs"]]
        assert {top["token"] for top in tops if not top["bytes"]} == names
        assert {top["token_id"] for top in tops if not top["bytes"]} == {*extra}


def test_logit_bias(client, tokenizer):
    (letter,) = tokenizer.encode("Q")
    found = reply(client, logit_bias={str(letter): 100}, max_tokens=5)
    assert text(found) == "QQQQQ"
    banned = {str(id): -100 for id in range(tokenizer.vocab_size) if id != letter}
    assert text(reply(client, logit_bias=banned, max_tokens=5)) == "QQQQQ"


def test_the_context_limits_a_reply(client):
    found = complete(client, prompt="a" * (CONTEXT - 4), max_tokens=100)
    assert found.choices[0].finish_reason == "length"
    assert found.usage.completion_tokens == 5  # the last one is not processed


def fails(error: type[openai.APIStatusError], *words: str):
    return pytest.raises(error, match=".*".join(words))


def test_errors(client):
    with fails(openai.BadRequestError, "temperature") as caught:
        reply(client, temperature=-1)
    assert (caught.value.param, caught.value.type) == ("temperature", "invalid_request_error")
    with fails(openai.BadRequestError, "maximum context length is 512", "600 tokens") as caught:
        complete(client, prompt="a" * 600)
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with fails(openai.BadRequestError, "maximum context length is 512", "603 tokens") as caught:
        reply(client, messages=[{"role": "user", "content": "a" * 600}])
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    with fails(openai.BadRequestError, "maximum context length"):
        complete(client, prompt="a" * 600, stream=True)
    with fails(openai.NotFoundError, "'gpt-5'.*'chatty'") as caught:
        client.chat.completions.create(model="gpt-5", messages=HELLO)
    assert caught.value.code == "model_not_found"
    with fails(openai.NotFoundError, "'gpt-5'"):
        client.models.retrieve("gpt-5")
    with fails(openai.AuthenticationError, "API key") as caught:
        client.with_options(api_key="another key").models.list()
    assert caught.value.code == "invalid_api_key"
    with fails(openai.NotFoundError, "/v1/embeddings"):
        client.embeddings.create(model=MODEL, input="Hello")


def test_the_model_is_listed(client):
    (model,) = client.models.list()
    assert (model.id, model.object) == (MODEL, "model")
    assert client.models.retrieve(MODEL) == model
    assert math.isclose(model.max_model_len, CONTEXT)
