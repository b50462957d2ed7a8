"""POST /v1/responses answers OpenAI's Python client as OpenAI's API does."""

from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.serve.conftest import END, MODEL
from workhorse.serve.responses_schema import LOGPROBS, ResponsesRequest, messages_of

LONG: Any = {"logit_bias": {str(END): -100}}
"""Options of replies that do not end early."""


def respond(client: OpenAI, *, input: Any = "Hello, who are you?", **options: Any) -> Any:
    extra = {"seed": options.pop("seed", 0), **options.pop("extra", {})}
    return client.responses.create(model=MODEL, input=input, extra_body=extra, **options)


def chat(client: OpenAI, messages: Any, **options: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=messages, seed=0, **options)


def test_a_reply_is_that_of_a_chat(client):
    found = respond(client, metadata={"a": "b"})
    (choice,) = chat(client, [{"role": "user", "content": "Hello, who are you?"}]).choices
    assert found.output_text == choice.message.content
    (item,) = found.output
    assert (item.type, item.role, item.status) == ("message", "assistant", "completed")
    assert (found.status, found.error, found.incomplete_details) == ("completed", None, None)
    assert (found.metadata, found.store, found.previous_response_id) == ({"a": "b"}, False, None)
    usage = found.usage
    assert usage.input_tokens == len("Hello, who are you?") + 3
    assert usage.total_tokens == usage.input_tokens + usage.output_tokens


def test_a_reply_that_is_too_long_is_incomplete(client):
    found = respond(client, max_output_tokens=4, extra=LONG)
    assert (found.status, found.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (found.output[0].status, found.usage.output_tokens) == ("incomplete", 4)
    assert found.completed_at is None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"include": [LOGPROBS], "top_logprobs": 2},
        {"max_output_tokens": 4, "extra": LONG},
        {"extra": {"stop": "e", "timings": True}},
    ],
    ids=str,
)
def test_a_stream_has_the_same_answer(client, options):
    """The deltas, the done events, and the last event agree with the answer without a stream."""
    whole = respond(client, **options)
    events = [*respond(client, stream=True, **options)]
    assert [event.sequence_number for event in events] == [*range(len(events))]
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    *deltas, text, part, item, last = events[4:]
    assert [event.type for event in (text, part, item, last)] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        f"response.{whole.status}",
    ]
    (content,) = whole.output[0].content
    assert len(deltas) > 1
    assert "".join(delta.delta for delta in deltas) == text.text == part.part.text == content.text
    found = [entry.to_dict() for delta in deltas for entry in delta.logprobs]
    assert found == [entry.to_dict() for entry in text.logprobs]
    assert found == [entry.to_dict() for entry in content.logprobs]
    assert bool(found) == ("include" in options)
    assert last.response.output == [item.item]
    assert last.response.to_dict().keys() == whole.to_dict().keys()
    assert last.response.usage.output_tokens == whole.usage.output_tokens


class Person(BaseModel):
    name: str
    age: int


def test_the_client_collects_and_parses_a_stream(client):
    asked = {"model": MODEL, "input": "Hello", "text_format": Person, "extra_body": {"seed": 1}}
    parsed = client.responses.parse(**asked).output_parsed
    assert isinstance(parsed, Person)
    with client.responses.stream(**asked) as stream:
        snapshots = [event.snapshot for event in stream if hasattr(event, "snapshot")]
        final = stream.get_final_response()
    assert final.output_parsed == parsed
    assert final.output_text == snapshots[-1]


def test_log_probabilities_are_those_of_a_chat(client):
    options = {"temperature": 0, "top_logprobs": 2}
    (part,) = respond(client, include=[LOGPROBS], **options).output[0].content
    asked = [{"role": "user", "content": "Hello, who are you?"}]
    (choice,) = chat(client, asked, logprobs=True, **options).choices
    assert [entry.to_dict() for entry in part.logprobs] == [
        entry.to_dict() for entry in choice.logprobs.content
    ]


def message(role: str, content: str, **fields: str) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def test_items_are_the_messages_of_a_chat(client):
    """An output can be sent back as input."""
    first = respond(client, instructions="Be short.", temperature=0)
    given = [message("user", "Hello, who are you?"), *first.output, message("developer", "Stop.")]
    again = respond(client, input=given, instructions="Be short.", temperature=0)
    messages = [
        message("system", "Be short."),
        message("user", "Hello, who are you?"),
        message("assistant", first.output_text),
        message("developer", "Stop."),
    ]
    assert again.output_text == chat(client, messages, temperature=0).choices[0].message.content


def test_reasoning_belongs_to_the_next_message():
    def of(*items: dict[str, Any]) -> list[dict[str, Any]]:
        body = ResponsesRequest.model_validate({"model": MODEL, "input": [*items]})
        return [one.model_dump(exclude_none=True) for one in messages_of(body)]

    summary = [{"type": "summary_text", "text": "short"}]
    content = [{"type": "reasoning_text", "text": "lo"}, {"type": "reasoning_text", "text": "ng"}]
    reply = message("assistant", "Yes.")
    for fields, text in (({}, "short"), ({"content": content}, "long")):
        reasoning = {"type": "reasoning", "id": "rs_1", "summary": summary, **fields}
        assert of(reasoning, reply) == [{**reply, "reasoning_content": text}]


@pytest.mark.parametrize(
    ("fields", "param", "text"),
    [
        ({"input": 5}, "input", "not a string or a list of 1 to 20,000 items"),
        ({"input": []}, "input", "not a string or a list of 1 to 20,000 items"),
        ({"input": [{"type": "item_reference", "id": "a"}]}, "input.0", "not served; use message"),
        ({"input": [message("tool", "a")]}, "input.0.role", "'user'"),
        (
            {"input": [message("user", [{"type": "input_image", "image_url": "a"}])]},
            "input.0.content.0.type",
            "'input_text'",
        ),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input.0", "without a message"),
        ({"input": "a" * 300}, "input", "maximum context length is 256"),
        ({"include": ["reasoning.encrypted_content"]}, "include", "only message.output_text"),
        ({"top_logprobs": 2}, "top_logprobs", "no effect without message.output_text.logprobs"),
        ({"text": {"verbosity": "low"}}, "text.verbosity", "not served"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name", "need each other"),
        (
            {"text": {"format": {"type": "json_object"}}, "extra": {"ignore_eos": True}},
            "ignore_eos",
            "ignore_eos and text.format conflict",
        ),
        ({"metadata": {"a": 513 * "a"}}, "metadata.a", "at most 512"),
        ({"store": True}, "store", "not served"),
        ({"extra": {"stream_options": {}}}, "stream_options", "no effect without stream"),
    ],
    ids=str,
)
def test_wrong_values(client, fields, param, text):
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        respond(client, **fields)
    assert caught.value.param == param
