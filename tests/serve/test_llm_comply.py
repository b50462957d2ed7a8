"""Answers fit OpenAI's published schemas, and llm-comply accepts them."""

import json
from dataclasses import replace
from importlib.resources import files
from typing import Any

import pytest
from httpx2 import Client
from llm_comply.config import ComplianceConfig
from llm_comply.http import close_client
from llm_comply.result import TestStatus as Status
from llm_comply.runner import TestRunner as Runner
from llm_comply.schema import SpecLoader
from llm_comply.tests.open_responses import OPEN_RESPONSES_TESTS
from llm_comply.tests.openai_chat import OPENAI_CHAT_TESTS
from openai.types.responses import Response

from tests.serve.conftest import EVENT, KEY, MODEL, Served

# llm-comply uses a deprecated class of jsonschema.
pytestmark = pytest.mark.filterwarnings("ignore:jsonschema.RefResolver:DeprecationWarning")

NOT_SERVED = ("chat-tool-calling", "chat-image-input", "tool-calling", "image-input")
"""Ids of the cases that need a template for tools (see test_tools.py), and image input."""
NEED_REASONING = ("chat-reasoning-summary", "reasoning-summary")
"""Ids of the cases that llm-comply skips, because the model has another name than OpenAI's."""
ADVISORY = "compact-response"
"""Id of a case for a route that OpenAI's API need not have."""
EMPTY = ["no streaming chunk contained delta.content"]
"""llm-comply's error about a reply without text."""
CASES = (*OPENAI_CHAT_TESTS, *OPEN_RESPONSES_TESTS)


def spec(name: str) -> SpecLoader:
    return SpecLoader(str(files("llm_comply") / f"specs/{name}.json"))


@pytest.fixture(scope="module")
def schemas() -> SpecLoader:
    return spec("openai_chat")


@pytest.fixture(scope="module")
def open_responses() -> SpecLoader:
    return spec("openresponses")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_llm_comply(
    served: Served, schemas: SpecLoader, open_responses: SpecLoader, case: Any
) -> None:
    config = ComplianceConfig(served.url, KEY, MODEL)
    specification = open_responses if case in OPEN_RESPONSES_TESTS else schemas

    def run(seed: int) -> Any:
        def request(config: ComplianceConfig) -> dict[str, Any]:
            return {**case.build_request(config), "seed": seed}

        return Runner(config, [replace(case, build_request=request)], specification).run_one(case)

    # A sampled reply in fifteen ends before its first character, which is valid.
    results = (run(seed) for seed in range(1, 5))
    result = next((one for one in results if one.errors != EMPTY), None) or run(5)
    close_client()
    if case.id in NOT_SERVED:
        assert result.errors[0].startswith("HTTP 400")
        return
    skipped = case.id in NEED_REASONING
    assert skipped or not result.errors
    assert not result.warnings or case.id == ADVISORY
    assert result.status is (Status.SKIPPED if skipped else Status.PASSED)


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True}
COMPLETION = {"prompt": "Hello", "logprobs": 2, "echo": True}
KINDS = {
    "/v1/chat/completions": (CHAT, "CreateChatCompletionResponse"),
    "/v1/completions": (COMPLETION, "CreateCompletionResponse"),
}


def problems(schemas: SpecLoader, answer: Any, name: str) -> list[str]:
    """Return the deviations from a schema. The schemas lack the nulls that OpenAI documents."""
    return [one for one in schemas.validate(answer, name) if ": None is not" not in one]


@pytest.mark.parametrize("route", KINDS)
def test_answers_fit_the_schemas(http: Client, schemas: SpecLoader, route: str) -> None:
    fields, whole = KINDS[route]
    body = {"model": MODEL, "n": 2, **fields}
    assert problems(schemas, http.post(route, json=body).json(), whole) == []
    options = {"stream": True, "stream_options": {"include_usage": True}}
    lines = http.post(route, json={**body, **options}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    part = whole.replace("ChatCompletionResponse", "ChatCompletionStreamResponse")
    for line in lines[:-2]:
        assert problems(schemas, json.loads(line.removeprefix("data: ")), part) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"max_output_tokens": 1, "metadata": {"a": "b"}, "timings": True},
        {"include": ["message.output_text.logprobs"], "top_logprobs": 2},
        {"text": {"format": {"type": "json_object"}}, "instructions": "Be short."},
    ],
    ids=str,
)
def test_responses_fit_the_schemas(http: Client, open_responses: SpecLoader, fields: Any) -> None:
    """They also fit the types of OpenAI's client."""
    body = {"model": MODEL, "input": "Hello", "seed": 0, **fields}
    whole = http.post("/v1/responses", json=body).json()
    assert open_responses.validate(whole, "ResponseResource") == []
    Response.model_validate(whole)
    lines = http.post("/v1/responses", json={**body, "stream": True}).text.split("\n\n")
    for number, line in enumerate(lines[:-1]):
        name, data = line.removeprefix("event: ").split("\ndata: ")
        fields = json.loads(data)
        assert (fields["type"], fields["sequence_number"]) == (name, number)
        assert open_responses.validate_sse_event(name, fields) == []
        EVENT.validate_python(fields)


def test_models_and_errors_fit_the_schemas(http: Client, schemas: SpecLoader) -> None:
    assert schemas.validate(http.get("/v1/models").json(), "ListModelsResponse") == []
    assert schemas.validate(http.get(f"/v1/models/{MODEL}").json(), "Model") == []
    for answer in (
        http.get("/v1/models/other"),
        http.get("/v1/nothing"),
        http.delete("/v1/models"),
        http.post("/v1/completions", json={}),
        http.post("/v1/completions", content=b"{"),
        http.get("/v1/models", headers={"Authorization": "Bearer none"}),
    ):
        assert 400 <= answer.status_code < 500
        assert schemas.validate(answer.json(), "ErrorResponse") == []
