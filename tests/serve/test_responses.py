"""POST /v1/responses answers OpenAI's Python client as OpenAI's API does."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel

from tests.serve.conftest import END, EVENT, KEY, MODEL, serving_here, write_chat_run
from tests.tokenizers.test_replies import TEMPLATES
from workhorse.serve.responses import Output
from workhorse.serve.responses_schema import LOGPROBS, ResponsesRequest, messages_of
from workhorse.tokenizers.chat.reply_reader import Call, Piece

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
    assert usage.output_tokens_details.reasoning_tokens == 0


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


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A client of a model with tools that reasons before it replies."""
    source = (TEMPLATES / "sections.jinja").read_text()
    source += "{%- if add_generation_prompt and enable_thinking != false %}[THINK]{%- endif %}"
    folder = tmp_path_factory.mktemp("responses") / MODEL
    write_chat_run(folder, source)
    with serving_here(folder) as url, OpenAI(base_url=url, api_key=KEY, max_retries=0) as client:
        yield client


SCHEMA = {
    "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["c", "f"]}, "days": {"type": "integer"}},
    "required": ["unit"],
    "additionalProperties": False,
}
WEATHER = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
TOOLS: Any = [{"type": "function", "name": "now"}, {"type": "function", **WEATHER}]
TOOLS_OF_CHATS: Any = [
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": WEATHER},
]


def parts(found: Any) -> list[tuple[str, ...]]:
    """Return the kinds and the contents of an output's items."""
    return [
        ("call", item.name, item.arguments)
        if item.type == "function_call"
        else (item.type, item.content[0].text)
        for item in found.output
    ]


def test_calls_are_those_of_a_chat(caller):
    asked: Any = {"max_output_tokens": 160, "tools": TOOLS, "tool_choice": "required"}
    found = respond(caller, input="Hello", **asked)
    options: Any = {"tools": TOOLS_OF_CHATS, "tool_choice": "required", "max_tokens": 160}
    (choice,) = chat(caller, [message("user", "Hello")], **options).choices
    called = [one.function for one in choice.message.tool_calls]
    thought = [("reasoning", choice.message.reasoning_content)]
    rest = [("message", choice.message.content)] if choice.message.content else []
    assert parts(found) == thought + [("call", one.name, one.arguments) for one in called] + rest
    ids = {item.call_id for item in found.output if item.type == "function_call"}
    assert len(ids) == len(called) > 0
    assert (found.status, found.tool_choice) == (
        "incomplete" if choice.finish_reason == "length" else "completed",
        "required",
    )
    assert [tool.name for tool in found.tools] == ["now", "get_weather"]
    options = {"model": MODEL, "input": "Hello", "extra_body": {"seed": 0}, **asked}
    with caller.responses.stream(**options) as stream:
        events = [*stream]
    assert parts(events[-1].response) == parts(found)
    names = [event.type.removeprefix("response.") for event in events]
    text = ["content_part.added", "reasoning_text.done", "content_part.done"]
    reasoning = ["output_item.added", *text, "output_item.done"]
    call = ["output_item.added", *(f"function_call_arguments.{n}" for n in ("delta", "done"))]
    each = len(called) * [*call, "output_item.done"]
    expected = ["created", "in_progress", *reasoning, *each]
    without_deltas = [name for name in names if name != "reasoning_text.delta"]
    assert without_deltas[: len(expected)] == expected
    assert names[-1] == found.status


def test_reasoning_is_that_of_a_chat(caller):
    found = respond(caller, max_output_tokens=20, extra=LONG)
    asked = [message("user", "Hello, who are you?")]
    (choice,) = chat(caller, asked, max_tokens=20, **LONG).choices
    assert parts(found) == [("reasoning", choice.message.reasoning_content)]
    usage = found.usage
    assert usage.output_tokens_details.reasoning_tokens == usage.output_tokens == 20
    events = [*respond(caller, max_output_tokens=20, extra=LONG, stream=True)]
    deltas = [one.delta for one in events if one.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == choice.message.reasoning_content
    assert parts(events[-1].response) == parts(found)
    without = chat(caller, asked, max_tokens=20, reasoning_effort="none", **LONG)
    expected = [("message", without.choices[0].message.content)]
    thinking = {"chat_template_kwargs": {"enable_thinking": False}}
    for fields in ({"reasoning": {"effort": "none"}}, thinking):
        found = respond(caller, max_output_tokens=20, extra={**LONG, **fields})
        assert parts(found) == expected


def test_items_of_all_kinds_follow_each_other():
    call = Call("now", '{"a": 1}', "123456789")
    pieces = [Piece("reasoning", "Hm"), Piece("reasoning", "m."), Piece("text", "Yes.")]
    pieces += [Piece("call", call=call), Piece("call", call=call), Piece("text", "Done.")]
    output = Output()
    events = [deepcopy(one) for piece in pieces for one in output.add(piece, [])]
    events += [deepcopy(one) for one in output.end("incomplete")]
    for number, fields in enumerate(events):
        EVENT.validate_python({**fields, "sequence_number": number})
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    assert done == output.items
    assert [item["type"] for item in done] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
        "message",
    ]
    assert [item["status"] for item in done] == [*4 * ["completed"], "incomplete"]
    places = [one["output_index"] for one in events]
    assert places == sorted(places)
    assert len({item["id"] for item in done}) == len(done)


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "name": "now"},
        {
            "type": "allowed_tools",
            "mode": "required",
            "tools": [{"type": "function", "name": "now"}],
        },
    ],
    ids=str,
)
def test_a_function_is_chosen(caller, choice):
    options = {"max_output_tokens": 150, "tools": TOOLS, "parallel_tool_calls": False}
    found = respond(caller, tool_choice=choice, **options)
    (call,) = [item for item in found.output if item.type == "function_call"]
    assert call.name == "now"
    assert found.tool_choice.to_dict() == choice
    assert found.parallel_tool_calls is False


def test_items_of_the_assistant_become_messages():
    """Reasoning, text and calls that follow each other are one message."""

    def of(*items: dict[str, Any]) -> list[dict[str, Any]]:
        body = ResponsesRequest.model_validate({"model": MODEL, "input": [*items]})
        return [one.model_dump(exclude_none=True) for one in messages_of(body)]

    def call(id: str) -> dict[str, Any]:
        return {
            "type": "function_call",
            "call_id": id,
            "name": "now",
            "arguments": "{}",
            "id": "fc",
        }

    def called(id: str) -> dict[str, Any]:
        return {"id": id, "type": "function", "function": {"name": "now", "arguments": "{}"}}

    def output(id: str, value: Any) -> dict[str, Any]:
        return {"type": "function_call_output", "call_id": id, "output": value}

    summary = [{"type": "summary_text", "text": "short"}]
    content = [{"type": "reasoning_text", "text": "lo"}, {"type": "reasoning_text", "text": "ng"}]
    reasoning = {"type": "reasoning", "id": "rs_1", "summary": summary}
    thought = {**reasoning, "content": content}
    reply = message("assistant", "Yes.")
    assert of(reasoning, reply, reply) == [{**reply, "reasoning_content": "short"}, reply]
    assert of(thought, message("user", "Go.")) == [
        message("assistant", "", reasoning_content="long"),
        message("user", "Go."),
    ]
    text = [{"type": "input_text", "text": "12"}, {"type": "input_text", "text": ":00"}]
    assert of(thought, reply, call("a"), call("b"), output("b", "1"), output("a", text), reply) == [
        {**reply, "reasoning_content": "long", "tool_calls": [called("a"), called("b")]},
        message("tool", "1", tool_call_id="b"),
        message("tool", "12:00", tool_call_id="a"),
        reply,
    ]
    assert of(call("a"), thought, call("b")) == [
        {"role": "assistant", "tool_calls": [called("a")]},
        {"role": "assistant", "reasoning_content": "long", "tool_calls": [called("b")]},
    ]


def test_an_output_is_sent_back_with_results(caller):
    options: Any = {"temperature": 0, "tools": TOOLS}
    first = respond(caller, tool_choice="required", max_output_tokens=120, **options)
    calls = [item for item in first.output if item.type == "function_call"]
    thought = {"type": "reasoning", "id": "a", "summary": [{"type": "summary_text", "text": "Hm"}]}
    results = [
        {"type": "function_call_output", "call_id": item.call_id, "output": "noon"}
        for item in calls
    ]
    given = [message("user", "Hello"), thought, *calls, *results]
    again = respond(caller, input=given, max_output_tokens=20, extra=LONG, **options)
    made = [
        {
            "id": item.call_id,
            "type": "function",
            "function": {"name": item.name, "arguments": item.arguments},
        }
        for item in calls
    ]
    messages = [
        message("user", "Hello"),
        {"role": "assistant", "reasoning_content": "Hm", "tool_calls": made},
        *(message("tool", "noon", tool_call_id=item.call_id) for item in calls),
    ]
    reply = chat(caller, messages, temperature=0, tools=TOOLS_OF_CHATS, max_tokens=20, **LONG)
    assert again.usage.input_tokens == reply.usage.prompt_tokens
    assert parts(again) == [("reasoning", reply.choices[0].message.reasoning_content)]
    assert again.status == "incomplete"


CALL_ITEM = {"type": "function_call", "call_id": "a", "name": "f", "arguments": "{}"}


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
        ({"reasoning": {"effort": "high"}}, "reasoning.effort", "no variable for the amount"),
        ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not served"),
        ({"tools": [{"type": "web_search"}]}, "tools.0", "only tools of type 'function'"),
        ({"tools": TOOLS}, "tools", "no format for tools"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        (
            {"tool_choice": {"type": "web_search"}},
            "tool_choice",
            "tools of this type are not served",
        ),
        (
            {"input": [{"type": "function_call_output", "call_id": "a", "output": "b"}]},
            "input",
            "no earlier message calls",
        ),
        ({"input": [CALL_ITEM] * 129}, "input", "129 calls in a row"),
        ({"input": "a" * 600}, "input", "maximum context length is 512"),
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
    ids=lambda value: str(value)[:60],
)
def test_wrong_values(client, fields, param, text):
    with pytest.raises(openai.BadRequestError, match=text) as caught:
        respond(client, **fields)
    assert caught.value.param == param
