"""Tool calls: through openai-python, and the grammars of replies with calls."""

import json
from collections.abc import Iterator
from importlib.resources import files
from typing import Any

import jsonschema
import pytest
import torch
from httpx2 import Client
from llguidance import LLMatcher
from llm_comply.config import ComplianceConfig
from llm_comply.http import close_client
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS
from openai import OpenAI

from tests.serve.conftest import KEY, MODEL, serving_here, write_chat_run
from tests.serve.test_structured import drawn, needed
from tests.tokenizers.test_replies import (
    ARGUMENTS,
    TEMPLATES,
    WITH_CALLS,
    learned,
    template,
    written,
)
from workhorse.serve.grammar import Grammars, source_of
from workhorse.serve.messages import GrammarSource
from workhorse.serve.schema import (
    Function,
    FunctionName,
    FunctionTool,
    NamedTool,
    StructuredOutputs,
)
from workhorse.serve.tools import Tools, grammar_of, tools_of
from workhorse.tokenizers import (
    BytesConfig,
    ChatTemplate,
    SpecialTokensConfig,
    train_tokenizer,
)
from workhorse.tokenizers.chat.reply_format import HARMONY
from workhorse.tokenizers.chat.reply_learned import after_prompt
from workhorse.tokenizers.chat.reply_reader import ReplyReader

SCHEMA = {
    "type": "object",
    "properties": {"unit": {"type": "string", "enum": ["c", "f"]}, "days": {"type": "integer"}},
    "required": ["unit"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {"name": "get_weather", "description": "d", "parameters": SCHEMA}
NOTHING = {"type": "object", "properties": {}, "additionalProperties": False}
NOW: dict[str, Any] = {"name": "now", "description": "the time", "parameters": NOTHING}
TOOLS: list[Any] = [{"type": "function", "function": one} for one in (WEATHER, NOW)]
ASK: list[Any] = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of a model whose template writes tool calls."""
    source = (TEMPLATES / "sections.jinja").read_text()
    folder = write_chat_run(tmp_path_factory.mktemp("tools") / MODEL, source)
    with serving_here(folder) as found:
        yield found


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=url, api_key=KEY, max_retries=0, timeout=60) as found:
        yield found


def checked(calls: list[Any] | None) -> list[str]:
    """Check the calls of a message, and return their names."""
    assert calls
    for call in calls:
        assert call.type == "function"
        schema = {"get_weather": SCHEMA, "now": NOTHING}[call.function.name]
        jsonschema.validate(json.loads(call.function.arguments), schema)
    assert len({call.id for call in calls}) == len(calls)
    return [call.function.name for call in calls]


def test_a_reply_that_must_call_tools(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "messages": ASK, "tools": TOOLS, "seed": 3, "max_tokens": 120}
    (choice,) = client.chat.completions.create(**options, tool_choice="required").choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    names = checked(choice.message.tool_calls)
    with client.chat.completions.stream(**options, tool_choice="required") as stream:
        final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert checked(final.message.tool_calls) == names
    given, streamed = (one.message.tool_calls or () for one in (choice, final))
    assert [call.function.name for call in given] == names
    assert [one.function.arguments for one in given] == [one.function.arguments for one in streamed]
    named = {"type": "function", "function": {"name": "now"}}
    some = {"mode": "required", "tools": [named]}
    for choose in (named, {"type": "allowed_tools", "allowed_tools": some}):
        answer = client.chat.completions.create(**options, tool_choice=choose)
        assert {*checked(answer.choices[0].message.tool_calls)} == {"now"}
    one = client.chat.completions.create(
        **options, tool_choice="required", parallel_tool_calls=False, n=3
    )
    assert [len(checked(choice.message.tool_calls)) for choice in one.choices] == [1, 1, 1]


@pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")
def test_llm_comply(url: str) -> None:
    (case,) = [one for one in OPENAI_CHAT_TESTS if one.id == "chat-tool-calling"]
    schemas = SpecLoader(str(files("llm_comply") / "specs/openai_chat.json"))
    result = Runner(ComplianceConfig(url, KEY, MODEL), [case], schemas).run_one(case)
    close_client()
    assert (result.errors, result.warnings, result.status) == ([], [], Status.PASSED)


def test_a_conversation_with_results(client: OpenAI) -> None:
    options: Any = {"model": MODEL, "tools": TOOLS, "temperature": 0, "max_tokens": 120}
    reply = client.chat.completions.create(messages=ASK, tool_choice="required", **options)
    message = reply.choices[0].message
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": "15 degrees"}
        for call in message.tool_calls or ()
    ]
    given = message.model_dump(exclude_none=True) | {"parsed": None}
    given["tool_calls"][0]["function"]["parsed_arguments"] = {}  # as `parse` of openai-python
    history: list[Any] = [*ASK, given, *results]
    answer = client.chat.completions.create(messages=history, tool_choice="none", **options)
    assert answer.choices[0].message.tool_calls is None
    assert answer.usage is not None
    assert reply.usage is not None
    assert answer.usage.prompt_tokens > reply.usage.prompt_tokens


CALL = {"id": "a", "type": "function", "function": {"name": "now", "arguments": "{}"}}
WRONG = {"properties": 1}
UNNAMED = {"required": [{}]}
NO_SUCH = {"type": "function", "function": {"name": "x"}}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
    ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    ({"tool_choice": "required"}, "tool_choice"),
    ({"tools": TOOLS, "tool_choice": NO_SUCH}, "tool_choice"),
    (
        {"tools": TOOLS, "structured_outputs": {"regex": "a"}},
        "structured_outputs",
    ),
    ({"tools": TOOLS, "tool_choice": "required", "reply_tokens": [65]}, "reply_tokens"),
    ({"messages": [*ASK, {"role": "tool", "content": "x"}]}, "messages.1.tool_call_id"),
    (
        {"messages": [*ASK, {"role": "tool", "content": "x", "tool_call_id": "b"}]},
        "messages.1.tool_call_id",
    ),
    ({"messages": [{"role": "user", "tool_calls": [CALL]}]}, "messages.0.tool_calls"),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "x"}}}],
         "tool_choice": "required"},
        "tools",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": WRONG}}]},
        "tools.0.function.parameters.properties",
    ),
    (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": UNNAMED}}]},
        "tools.0.function.parameters.required",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "param"), BAD)
def test_wrong_fields_are_named(url: str, fields: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": ASK, **fields}
    headers = {"Authorization": f"Bearer {KEY}"}
    with Client(base_url=url, headers=headers, timeout=60) as http:
        answer = http.post("/chat/completions", json=body)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_arguments_of_earlier_calls_are_objects(http: Client) -> None:
    wrong = {**CALL, "function": {"name": "now", "arguments": "[1"}}
    history = [*ASK, {"role": "assistant", "tool_calls": [wrong]}]
    answer = http.post("/v1/chat/completions", json={"model": MODEL, "messages": history})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages.1.tool_calls.0.function.arguments"


def test_a_template_without_tools_refuses_them(http: Client) -> None:
    body = {"model": MODEL, "messages": ASK, "tools": TOOLS}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "tools"
    assert http.post("/v1/chat/completions", json={**body, "tool_choice": "none"}).is_success


def test_what_tagged_arguments_cannot_express_is_refused(thinker: Client) -> None:
    def param(schema: dict[str, Any], strict: bool = True) -> str | None:
        given = {"name": "f", "parameters": schema, "strict": strict}
        tools = [{"type": "function", "function": given}]
        body = {"model": MODEL, "messages": ASK, "tools": tools, "max_tokens": 1}
        answer = thinker.post("/chat/completions", json={**body, "parallel_tool_calls": False})
        return None if answer.is_success else answer.json()["error"]["param"]

    text = {"type": "string"}
    for schema in (
        {"properties": {"a": {**text, "pattern": "x"}}},
        {"properties": {"a": text}, "anyOf": [{"required": ["a"]}]},
        {"properties": {}, "required": ["a"]},
    ):
        assert param(schema) == "tools"
        assert param(schema, strict=False) is None
    assert param({"properties": {"a b": text}}, strict=False) == "tools"
    assert param({"properties": {"a": {**text, "enum": ["x"]}}, "required": ["a"]}) is None


SPECIAL = ("<|tool_call>", "<tool_call|>", '<|"|>', "<|calls|>", "<|call|>", "<|/call|>")
END = "<|eos|>"


def accepts(grammars: Grammars, source: str, ids: list[int], end: int) -> bool:
    """True if a grammar allows these tokens, and then the end."""
    grammar = grammars.make(GrammarSource(source), 0, 2000)
    for position, token in enumerate([*ids, end]):
        if grammar(torch.zeros(END_SIZE), ids[:position])[token] == -torch.inf:
            return position == len(ids) and grammar.ends(ids, "")
    return True


END_SIZE = 512


@pytest.mark.parametrize("name", WITH_CALLS)
def test_grammars_allow_what_templates_write(name: str) -> None:
    format = learned(template(name))
    assert format.calls is not None
    tokenizer = train_tokenizer(BytesConfig(special=SpecialTokensConfig(chat=SPECIAL)), [])
    end = tokenizer.special_tokens[END]
    grammars = Grammars(tokenizer, [end])
    properties = {
        "city": {"type": "string"},
        "days": {"type": "integer"},
        "flags": {"type": "object"},
        "list": {"type": "array"},
    }
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    functions = [Function(name=one, parameters=schema) for one in ("get_weather", "now")]
    asked = [FunctionTool(type="function", function=one) for one in functions]

    def allowed(text: str, content: dict[str, Any] | None = None, **choice: Any) -> bool:
        tools = tools_of(asked, **choice)
        assert isinstance(tools, Tools)
        source = source_of(
            StructuredOutputs(grammar=grammar_of(tools, format, tokenizer, [end], content))
        )
        return accepts(grammars, source, tokenizer.encode(text, allow_special=True), end)

    begun = format.reasoning[1] if format.reasoning and format.begins_in_reasoning else ""
    some = ARGUMENTS if name != "quoted" else ARGUMENTS[:3]  # nested values are not JSON there
    for arguments in some:
        one = begun + written(template(name), format, "", [("get_weather", arguments)]).lstrip()
        assert allowed(one, choice="required"), one
        assert not allowed(one.replace("get_weather", "got"), choice="required")
        assert not allowed("Hello", choice="required")
        if format.calls.between:
            calls = [("get_weather", arguments), ("now", {})]
            two = begun + written(template(name), format, "", calls).lstrip()
            named = NamedTool(type="function", function=FunctionName(name="get_weather"))
            assert allowed(two, choice="required"), two
            assert not allowed(two, choice="required", parallel=False)
            assert not allowed(two, choice=named)
        free = written(template(name), format, "", [("get_weather", arguments)]).lstrip()
        assert allowed(free, parallel=False), free
        assert allowed("Hello", parallel=False)
        assert not allowed(free[: len(free) // 2], parallel=False)
        if format.calls.is_tag:
            assert allowed(one, content={"type": "object"})
            assert allowed(begun + '{"a": 1}', content={"type": "object"})
            assert not allowed(begun + "Hello", content={"type": "object"})


@pytest.mark.parametrize("name", WITH_CALLS)
def test_required_calls_are_never_cut(name: str) -> None:
    """A reply has whole calls in the tokens that the error for fewer tokens names."""
    format, names = learned(template(name)), ["city", "days"]
    tokenizer = train_tokenizer(BytesConfig(special=SpecialTokensConfig(chat=SPECIAL)), [])
    end = tokenizer.special_tokens[END]
    properties = {"city": {"type": "string"}, "days": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": names}
    function = Function(name="now", parameters={**schema, "additionalProperties": False})
    tools = tools_of([FunctionTool(type="function", function=function)], choice="required")
    assert tools is not None
    text = grammar_of(tools, format, tokenizer, [end])
    reasoning = tokenizer.encode(format.reasoning[1]) if format.reasoning else []
    source = GrammarSource(source_of(StructuredOutputs(grammar=text)), tuple(reasoning))
    grammars = Grammars(tokenizer, [end])
    least = needed(grammars, source)
    for most in (least, least + 1, least + 5, least + 100):
        reply = drawn(tokenizer, grammars.make(source, 0, most), most)
        pieces = ReplyReader(format, {"now": schema}).read(reply, ended=True)
        calls = [json.loads(one.call.arguments) for one in pieces if one.call]
        assert calls, reply
        assert all([*one] == names for one in calls)
        assert not any(one.kind == "text" for one in pieces)


@pytest.mark.parametrize("name", ["quoted", "tagged"])
def test_grammars_grow_with_the_number_of_properties(name: str) -> None:
    tokenizer = train_tokenizer(BytesConfig(), [])

    def written(count: int) -> str:
        properties = {f"p{n}": {"type": "integer"} for n in range(count)}
        schema = {"properties": properties, "required": [f"p{count // 2}"]}
        return grammar_of(Tools({"f": schema}, []), learned(template(name)), tokenizer, ())

    assert len(written(200)) < 2.5 * len(written(100))
    assert LLMatcher.validate_grammar(written(200)) == ""
    with pytest.raises(ValueError, match="more than 100,000 characters"):
        written(10_000)


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A client of a model whose prompts begin the reasoning, unless it is switched off."""
    source = (TEMPLATES / "tagged.jinja").read_text()
    begin = "<think>\\n' }}"
    assert source.count(begin) == 1
    source = source.replace(
        begin, begin + "{%- if enable_thinking is false %}{{- '\\n</think>\\n\\n' }}{%- endif %}"
    )
    folder = write_chat_run(tmp_path_factory.mktemp("thinker") / MODEL, source, context=512)
    headers = {"Authorization": f"Bearer {KEY}"}
    with serving_here(folder) as url, Client(base_url=url, headers=headers, timeout=60) as found:
        yield found


def test_reasoning_is_separate_and_can_be_switched_off(thinker: Client) -> None:
    body = {"model": MODEL, "messages": ASK, "seed": 1, "max_tokens": 12, "logprobs": True}

    def parts(**fields: Any) -> tuple[str, str]:
        found = thinker.post("/chat/completions", json={**body, **fields})
        assert found.is_success, found.text
        message = found.json()["choices"][0]["message"]
        counted = found.json()["usage"]["completion_tokens_details"]["reasoning_tokens"]
        assert bool(counted) is bool(message.get("reasoning_content"))
        streamed = thinker.post("/chat/completions", json={**body, **fields, "stream": True})
        events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n")[:-2]]
        deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
        for name in ("content", "reasoning_content"):
            assert "".join(one.get(name, "") for one in deltas) == (message.get(name) or "")
        return message.get("reasoning_content", ""), message["content"] or ""

    thought, content = parts()
    assert thought
    assert not content
    for off in ({"reasoning_effort": "none"}, {"chat_template_kwargs": {"enable_thinking": False}}):
        thought, content = parts(**off)
        assert not thought
        assert content
    end = {str(token): 100 for token in b"</think>"}
    assert parts(logit_bias=end, max_tokens=1)[0] in "</think>"
    only_one: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False}
    thought, content = parts(tools=TOOLS, max_tokens=100, **only_one)
    assert thought
    assert not content
    for more in ({}, {"tools": TOOLS}, {"reasoning_effort": "none"}):
        form = {"response_format": {"type": "json_object"}, "max_tokens": 150}
        thought, content = parts(**form, **more)
        assert "tools" in more or isinstance(json.loads(content), dict)
        assert bool(thought) is ("reasoning_effort" not in more)


def test_names_of_parameters_are_not_variables() -> None:
    template = ChatTemplate(
        "{{ self }}{{ tokenizer }}{{ allow_special }}{{ format }}{{ template }}"
    )
    names = {"format", "template"}
    assert template.variables == names
    assert after_prompt(HARMONY, template, **dict.fromkeys(names, "")) == HARMONY


def test_variables_that_the_template_does_not_read(thinker: Client, http: Client) -> None:
    body = {"model": MODEL, "messages": ASK}
    for name in ("messages", "content", "thinking"):
        answer = thinker.post("/chat/completions", json={**body, "chat_template_kwargs": {name: 1}})
        assert answer.json()["error"]["param"] == "chat_template_kwargs"
    answer = http.post("/v1/chat/completions", json={**body, "reasoning_effort": "low"})
    assert answer.json()["error"]["param"] == "reasoning_effort"
    assert http.post("/v1/chat/completions", json={**body, "reasoning_effort": "none"}).is_success
