"""Every field of a request has an effect, is refused by name, or is listed as ignored."""

import json
import math
from collections.abc import Callable, Collection
from functools import cache
from importlib.resources import files
from typing import Any, get_type_hints

import pytest
from httpx2 import Client, Response
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as responses_params
from pydantic import ValidationError

from tests.serve.conftest import END, MODEL
from workhorse.serve.responses_schema import LOGPROBS, ResponsesRequest
from workhorse.serve.schema import ChatRequest, CompletionRequest, Message, Sampling, StreamOptions

SCHEMAS = {
    name: schema
    for spec in ("openresponses.json", "openai_chat.json")
    for name, schema in json.loads((files("llm_comply") / "specs" / spec).read_text())[
        "components"
    ]["schemas"].items()
}
"""The schemas of OpenAI's published API, and of the Open Responses specification."""
DEFAULTS = {"model": MODEL, "seed": 0, "logit_bias": {str(END): -100}}
CHAT = {**DEFAULTS, "max_tokens": 12, "messages": [{"role": "user", "content": "Hello"}]}
COMPLETION = {**DEFAULTS, "max_tokens": 12, "prompt": "Hello"}
RESPONSE = {**DEFAULTS, "max_output_tokens": 12, "input": "Hello"}
ROUTES = {
    "/v1/chat/completions": CHAT,
    "/v1/completions": COMPLETION,
    "/v1/responses": RESPONSE,
}


def properties(schema: dict[str, Any]) -> set[str]:
    """Return the names of an object's properties, also of the schemas that it is composed of."""
    if "$ref" in schema:
        return properties(SCHEMAS[schema["$ref"].split("/")[-1]])
    parts = [one for kind in ("allOf", "anyOf", "oneOf") for one in schema.get(kind, ())]
    return {*schema.get("properties", ()), *(name for one in parts for name in properties(one))}


def of_client(module: Any) -> set[str]:
    """Return the names of the arguments of OpenAI's Python client."""
    kinds = [kind for name, kind in vars(module).items() if name.endswith("Streaming")]
    return {name for kind in kinds for name in get_type_hints(kind)}


FIELDS = {
    ChatRequest: properties(SCHEMAS["CreateChatCompletionRequest"]) | of_client(chat_params),
    CompletionRequest: properties(SCHEMAS["CreateCompletionRequest"])
    | of_client(completion_params),
    ResponsesRequest: properties(SCHEMAS["CreateResponse"])
    | properties(SCHEMAS["CreateResponseBody"])
    | of_client(responses_params),
}
OUR_ROUTE: dict[type[Sampling], str] = dict(zip(FIELDS, ROUTES, strict=True))


def cases(group: Callable[[type[Sampling]], Collection[str]]) -> list[Any]:
    """Return a test case for each field in one of the groups."""
    return [
        pytest.param(kind, name, id=f"{kind.__name__}-{name}")
        for kind in FIELDS
        for name in sorted(group(kind))
    ]


def test_all_fields_are_known():
    for kind, names in FIELDS.items():
        assert names <= kind.model_fields.keys() | kind.not_served.keys() | kind.without_effect
    assert of_client(chat_params) - {"stream"} > {
        "messages",
        "model",
    }  # the client's types are read


def test_all_fields_of_messages_are_known():
    roles = SCHEMAS["ChatCompletionRequestMessage"]
    assert properties(roles) <= Message.model_fields.keys() | Message.not_served.keys()
    assert properties(SCHEMAS["ChatCompletionStreamOptions"]) <= StreamOptions.model_fields.keys()


def post(http: Client, kind: type[Sampling], **fields: Any) -> Response:
    route = OUR_ROUTE[kind]
    return http.post(route, json={**ROUTES[route], **fields})


@cache
def default(http: Client, kind: type[Sampling]) -> Any:
    return post(http, kind).json()


def texts(answer: Any) -> list[str]:
    if "output" in answer:
        return [item["content"][0]["text"] for item in answer["output"]]
    return [
        one["text"] if "text" in one else one["message"]["content"] for one in answer["choices"]
    ]


Check = Callable[[Any, Any], bool]


def other_text(answer: Any, plain: Any) -> bool:
    return texts(answer) != texts(plain)


def new_tokens(count: int) -> Check:
    names = {"completion_tokens", "output_tokens"}
    return lambda answer, plain: {answer["usage"].get(name) for name in names} == {count, None}


def logprobs(answer: Any) -> list[Any]:
    """Return the tokens with log-probabilities."""
    if "output" in answer:
        return answer["output"][0]["content"][0]["logprobs"]
    found = answer["choices"][0]["logprobs"] or {}
    return found.get("content", found.get("tokens", []))


def certain(answer: Any) -> bool:
    """True if all tokens have a log-probability of 0: with `top_k: 1`, processed ones."""
    found = answer["choices"][0]["logprobs"] or {}
    values = found.get("token_logprobs") or [one["logprob"] for one in found.get("content", [])]
    return len(values) == 12 and not any(values)


IN_OTHER_TESTS = {
    "chat_template_kwargs",
    "parallel_tool_calls",
    "reasoning",
    "reasoning_effort",
    "tool_choice",
    "tools",
}
"""Fields that test_tools.py and test_responses.py test."""
EFFECTS: dict[str, tuple[dict[str, Any], Check]] = {
    "chat_logprobs": (
        {"logprobs": 0, "chat_logprobs": True},
        lambda answer, plain: (
            len((answer["choices"][0]["logprobs"] or {}).get("content", [])) == 12
        ),
    ),
    "echo": ({"echo": True}, lambda answer, plain: texts(answer) == ["Hello" + texts(plain)[0]]),
    "frequency_penalty": ({"frequency_penalty": -2}, other_text),
    "ignore_eos": (
        {"ignore_eos": True, "logit_bias": {str(END): 100}},
        lambda answer, plain: texts(answer) == [""] and new_tokens(12)(answer, plain),
    ),
    "logit_bias": (
        {"logit_bias": {"33": 100}},
        lambda answer, plain: texts(answer)[0] == 12 * "!",
    ),
    "logprobs": ({"logprobs": True}, lambda answer, plain: len(logprobs(answer)) == 12),
    "include": ({"include": [LOGPROBS]}, lambda answer, plain: len(logprobs(answer)) == 12),
    "input": ({"input": "Bye"}, other_text),
    "instructions": ({"instructions": "Be short."}, other_text),
    "max_completion_tokens": ({"max_completion_tokens": 3, "max_tokens": None}, new_tokens(3)),
    "max_output_tokens": ({"max_output_tokens": 3}, new_tokens(3)),
    "max_tokens": ({"max_tokens": 3}, new_tokens(3)),
    "messages": ({"messages": [{"role": "user", "content": "Bye"}]}, other_text),
    "metadata": ({"metadata": {"a": "b"}}, lambda answer, plain: answer["metadata"] == {"a": "b"}),
    "min_p": ({"min_p": 1}, other_text),
    "n": ({"n": 2}, lambda answer, plain: len(answer["choices"]) == 2),
    "presence_penalty": ({"presence_penalty": -2}, other_text),
    "processed_logprobs": (
        {"logprobs": True, "processed_logprobs": True, "top_k": 1},
        lambda answer, plain: certain(answer),
    ),
    "prompt": ({"prompt": "Bye"}, other_text),
    "repetition_penalty": ({"repetition_penalty": 0.1}, other_text),
    "reply_tokens": ({"reply_tokens": [72, 105]}, other_text),
    "response_format": (
        {"response_format": {"type": "json_object"}},
        lambda answer, plain: texts(answer)[0].startswith("{"),
    ),
    "seed": ({"seed": 1}, other_text),
    "structured_outputs": (
        {"structured_outputs": {"regex": "a{5}"}},
        lambda answer, plain: texts(answer) == ["aaaaa"],
    ),
    "temperature": ({"temperature": 0}, other_text),
    "text": (
        {"text": {"format": {"type": "json_object"}}},
        lambda answer, plain: texts(answer)[0].startswith("{"),
    ),
    "timings": ({"timings": True}, lambda answer, plain: "timings" in answer),
    "top_k": ({"top_k": 1}, other_text),
    "top_logprobs": (
        {"logprobs": True, "top_logprobs": 2},
        lambda answer, plain: [len(one["top_logprobs"]) for one in logprobs(answer)] == 12 * [2],
    ),
    "top_p": ({"top_p": 0.1}, other_text),
}
"""A value of each field, and its effect on an answer, compared with the default answer."""
SPECIAL = {
    CompletionRequest: {
        "logprobs": ({"logprobs": 2}, EFFECTS["logprobs"][1]),
        "processed_logprobs": (
            {"logprobs": 0, "processed_logprobs": True, "top_k": 1},
            EFFECTS["processed_logprobs"][1],
        ),
    },
    ResponsesRequest: {
        "top_logprobs": ({"include": [LOGPROBS], "top_logprobs": 2}, EFFECTS["top_logprobs"][1])
    },
}
"""The same for fields that have another meaning in one route."""


@pytest.mark.parametrize(
    ("kind", "name"), cases(lambda kind: kind.model_fields.keys() - IN_OTHER_TESTS)
)
def test_a_field_that_is_served(http, kind, name):
    plain = default(http, kind)
    match name:
        case "model":
            answer = post(http, kind, model="other")
            assert (answer.status_code, answer.json()["error"]["param"]) == (404, "model")
        case "stop":
            (text,) = texts(plain)
            assert texts(post(http, kind, stop=text[5:7]).json()) == [text.split(text[5:7])[0]]
        case "stream":
            answer = post(http, kind, stream=True)
            assert answer.headers["content-type"].startswith("text/event-stream")
            if kind is not ResponsesRequest:
                assert answer.text.endswith("data: [DONE]\n\n")
                assert '"usage"' not in answer.text
        case "stream_options" if kind is ResponsesRequest:
            answer = post(http, kind, stream=True, stream_options={"include_obfuscation": True})
            assert answer.text.startswith("event: response.created\n")
        case "stream_options":
            answer = post(http, kind, stream=True, stream_options={"include_usage": True})
            assert '"completion_tokens": 12' in answer.text
        case _:
            fields, has_effect = SPECIAL.get(kind, {}).get(name) or EFFECTS[name]
            assert has_effect(post(http, kind, **fields).json(), plain)
            assert not has_effect(plain, plain)


@pytest.mark.parametrize(("kind", "name"), cases(lambda kind: kind.not_served))
def test_a_field_that_is_refused(http, kind, name):
    error = post(http, kind, **{name: {"another": "value"}})
    assert error.status_code == 400
    assert error.json()["error"] == {
        "message": f"{name} is not served; omit it",
        "type": "invalid_request_error",
        "param": name,
        "code": "not_served",
    }
    for value in (None, *kind.not_served[name]):  # these change nothing
        assert texts(post(http, kind, **{name: value}).json()) == texts(default(http, kind))


@pytest.mark.parametrize(("kind", "name"), cases(lambda kind: kind.without_effect))
def test_a_field_that_is_ignored(http, kind, name):
    assert texts(post(http, kind, **{name: "some"}).json()) == texts(default(http, kind))


@pytest.mark.parametrize("kind", FIELDS)
def test_null_is_the_default(http, kind):
    """OpenAI's optional fields may be null."""
    nothing = dict.fromkeys(FIELDS[kind] - ROUTES[OUR_ROUTE[kind]].keys())
    assert texts(post(http, kind, **nothing).json()) == texts(default(http, kind))


@pytest.mark.parametrize("kind", FIELDS)
def test_an_unknown_field(http, kind):
    error = post(http, kind, temprature=1).json()["error"]
    assert error["param"] == "temprature"
    assert "not a field" in error["message"]


def nested(depth: int) -> dict[str, Any]:
    return {"a": nested(depth - 1)} if depth > 1 else {}


def responses_with(value: Any, text: str = "a") -> dict[str, dict[str, Any]]:
    """Return a field with a value or a text for each name of a field in errors."""
    function = {"type": "function", "name": "f"}
    form = {"type": "json_schema", "name": "n", "schema": {}}
    return {
        "tools.0.parameters": {"tools": [function | {"parameters": value}]},
        "tools.0.description": {"tools": [function | {"description": text}]},
        "text.format.schema": {"text": {"format": form | {"schema": value}}},
        "text.format.name": {"text": {"format": form | {"name": text}}},
        "structured_outputs.json": {"structured_outputs": {"json": value}},
        "chat_template_kwargs": {"chat_template_kwargs": value},
        "metadata": {"metadata": value},
        "instructions": {"instructions": text},
    }


@pytest.mark.parametrize("param", responses_with({}))
def test_values_that_an_answer_cannot_repeat(http, param):
    for value in ({"x": "\ud800"}, {"\ud800": "x"}, {"x": [math.nan]}, {"x": math.inf}, nested(61)):
        fields = responses_with(value, "\ud800")[param]
        body = json.dumps({"model": MODEL, "input": "Hello", **fields})
        headers = {"Content-Type": "application/json"}
        answer = http.post("/v1/responses", content=body, headers=headers)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


def errors(kind: type[Sampling], fields: dict[str, Any]) -> int:
    """Return the number of errors in a body."""
    try:
        kind.model_validate({**ROUTES[OUR_ROUTE[kind]], **fields})
    except ValidationError as error:
        return error.error_count()
    return 0


@pytest.mark.parametrize("kind", FIELDS)
def test_many_wrong_values_are_few_errors(kind):
    """A million errors would take seconds and gigabytes."""
    wrong, pairs = [0.5] * 1000, dict.fromkeys(map(str, range(20_000)))
    given = [{name: many} for name in kind.model_fields for many in (wrong, pairs)]
    given += [pairs, {"structured_outputs": {"choice": wrong}}]
    given += [{"input": [{"type": "reasoning", name: wrong}]} for name in ("summary", "content")]
    given += [{"input": [{"role": "user", "content": wrong}]}]
    given += [{"messages": [{"role": "user", name: wrong}]} for name in ("content", "tool_calls")]
    for fields in given:
        assert errors(kind, fields) < 300, str(fields)[:80]


@pytest.mark.parametrize("part", ["image_url", "input_audio", "file", "refusal"])
def test_a_part_that_is_not_text(http, part):
    content = [{"type": "text", "text": "Hello"}, {"type": part, part: "some"}]
    answer = post(http, ChatRequest, messages=[{"role": "user", "content": content}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.0.content.1.type"
    assert "'text'" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"stream_options": {}}, "stream_options", "no effect without stream"),
        ({"top_logprobs": 2}, "top_logprobs", "no effect without logprobs"),
        ({"processed_logprobs": True}, "processed_logprobs", "no effect without logprobs"),
        ({"max_completion_tokens": 2}, "max_completion_tokens", "max_tokens differ"),
        ({"messages": [{"role": "user"}]}, "messages.0.content", "content is missing"),
        ({"messages": [{"role": "bot", "content": ""}]}, "messages.0.role", "'user'"),
        ({"stop": 17 * ["a"]}, "stop", "up to 16 strings"),
        ({"temperature": "0"}, "temperature", "valid number"),
        ({"temperature": 1e-40}, "temperature", "too small"),
        ({"logit_bias": {"0" * 5000: 1}}, "logit_bias", "not a token id; choose 0 to"),
        ({"logit_bias": {"0" * 20 + "9999": 1}}, "logit_bias", "not a token id; choose 0 to"),
    ],
    ids=str,
)
def test_wrong_values(http, fields, param, message):
    answer = post(http, ChatRequest, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert message in answer.json()["error"]["message"]
