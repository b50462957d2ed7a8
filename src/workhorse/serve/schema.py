"""The bodies of requests: fields of OpenAI's API, our extensions, and the fields not served."""

import json
from collections.abc import Mapping
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    create_model,
    model_validator,
)
from pydantic_core import PydanticCustomError

from workhorse.generate.options import Served, served, table

MOST_STOPS = 16
MOST_CHOICES = 128
"""Maximum number of completions of a request."""
MOST_TOOLS = 128
"""Maximum number of tools of a request, and of calls of a message."""
MOST_BIASES = 10_000
MOST_DEPTH = 60
"""Maximum nesting depth of a JSON value. Chat templates allow few levels more."""
LARGEST_SEED = 2**63
MOST_GRAMMAR = 100_000
"""Maximum number of characters of a grammar."""
TOO_LONG = f"it has more than {MOST_GRAMMAR:,} characters"

FIELD = "field"
"""Key of the context of an error: the name of the wrong field."""

Values = Mapping[str, tuple[Any, ...]]
"""Values of fields."""
Number = Annotated[float, Field(allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1, max_length=1024)]
Bias = Annotated[Number, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0)]
Prompt = Annotated[list[Token], Field(min_length=1, fail_fast=True)]
"""Token ids. Without `fail_fast`, a million wrong ones would be a million errors."""


def problem(kind: str, message: str, field: str) -> PydanticCustomError:
    """Return an error of the field `field`, which the message names as `{field}`."""
    return PydanticCustomError(kind, message, {FIELD: field})  # pyright: ignore[reportArgumentType]


def _needs_logprobs(field: str) -> PydanticCustomError:
    message = "{field} has no effect without logprobs; set logprobs"
    return problem("needs_logprobs", message, field)


def few(most: int) -> BeforeValidator:
    """Limit the number of pairs before they are checked, since each wrong one is an error."""

    def checked(pairs: Any) -> Any:
        if isinstance(pairs, dict) and len(pairs) > most:
            message = "there are {count} pairs; give up to {most}"
            raise PydanticCustomError("many", message, {"count": len(pairs), "most": most})
        return pairs

    return BeforeValidator(checked)


def _as_json(value: Any) -> Any:
    """Check that a value can be written as JSON, and is not nested too deeply."""
    nested = [value] if isinstance(value, (dict, list)) else []
    for _ in range(MOST_DEPTH):
        parts = chain.from_iterable(
            one.values() if isinstance(one, dict) else one for one in nested
        )
        nested = [one for one in parts if isinstance(one, (dict, list))]
    if nested:
        message = "the value is nested more than {most} levels deep; flatten it"
        raise PydanticCustomError("deep", message, {"most": MOST_DEPTH})
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except UnicodeEncodeError:
        message = "a string has a lone surrogate, which is not a character; remove it"
        raise PydanticCustomError("surrogate", message) from None
    except ValueError:
        raise PydanticCustomError("number", "a number is not finite; replace it") from None
    return value


AS_JSON = BeforeValidator(_as_json)
Json = Annotated[dict[str, Any], AS_JSON]
"""A JSON object with any values, which an answer may repeat."""
Text = Annotated[str, AS_JSON]
"""A string that an answer may repeat."""


class Body(BaseModel):
    """A request's body. Unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, use_attribute_docstrings=True)

    not_served: ClassVar[Values] = {}
    """Fields of OpenAI's API that are not served, and the values that change nothing."""
    without_effect: ClassVar[frozenset[str]] = frozenset()
    """Fields of OpenAI's API that have no effect on an answer, with any value."""

    @model_validator(mode="before")
    @classmethod
    def _only_served(cls, fields: Any) -> Any:
        if not isinstance(fields, dict):
            return fields
        known = {field.alias or name for name, field in cls.model_fields.items()}
        kept: dict[str, Any] = {}
        unknown: dict[str, Any] = {}
        for name, value in fields.items():
            if name in cls.without_effect:
                continue
            if name in cls.not_served:
                if value is not None and value not in cls.not_served[name]:
                    raise problem("not_served", "{field} is not served; omit it", name)
            elif name in known:
                if value is not None or name in REQUIRED:
                    kept[name] = value
            elif not unknown:
                unknown = {name: value}  # only the first: each would be an error
        return kept | unknown


REQUIRED = ("model", "messages", "prompt", "tokens", "input")
"""Fields for which null is not the same as absence."""


class ObfuscationOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool = False
    """Without effect: nothing is padded."""


class StreamOptions(ObfuscationOptions):
    """Options of a stream of choices."""

    include_usage: bool = False
    """True to send the number of tokens in a last event."""


class NamedSchema(Body):
    """A JSON schema."""

    name: Text
    description: Text | None = None
    schema_: Annotated[Json | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Without effect: the schema is always enforced."""


class ResponseFormat(Body):
    """The form of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError(
                "json_schema", "json_schema and type 'json_schema' need each other; give both"
            )
        return self


class StructuredOutputs(Body):
    """The form of a completion: one of these."""

    json_: Annotated[Json | None, Field(alias="json")] = None
    """A JSON schema."""
    regex: str | None = None
    """A regular expression, in the syntax of Rust's crate regex."""
    choice: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    """The completions that are allowed."""
    grammar: str | None = None
    """A grammar in llguidance's variant of Lark."""

    @model_validator(mode="after")
    def _one(self) -> "StructuredOutputs":
        given = [
            one for one in (self.json_, self.regex, self.choice, self.grammar) if one is not None
        ]
        if len(given) != 1:
            raise PydanticCustomError(
                "one_form", "give one of json, regex, choice and grammar, and not several"
            )
        return self


def _field(name: str, served: Served) -> tuple[Any, Any]:
    """Return the type and the default of the field for an option of the generation."""
    row = table()[name]
    kind = int if int in (row.type, *get_args(row.type)) else Number
    bounds: dict[str, Any] = {"gt" if served.is_above else "ge": served.least, "le": served.most}
    about = f"Extension: {row.help}" if served.extension else row.help
    given: Any = Annotated[kind, Field(**bounds)]
    return given | None, Field(default=None, description=about)


_FIELDS: dict[str, Any] = {name: _field(name, one) for name, one in served().items()}
if TYPE_CHECKING:

    class Numbers(Body):
        """The numbers of `workhorse.generate.options` that requests can have."""
else:
    Numbers = create_model("Numbers", __base__=Body, **_FIELDS)


class Sampling(Numbers, Body):
    """The fields that all requests for text share."""

    model: str
    """Name of the model, as in /v1/models."""
    stop: StopText | Annotated[list[StopText], Field(max_length=MOST_STOPS)] | None = None
    """Strings that end a completion. The completion ends before the string."""
    logit_bias: Annotated[dict[str, Bias], few(MOST_BIASES)] | None = None
    """Added to the logit, by token id."""
    seed: Annotated[int, Field(ge=-LARGEST_SEED, lt=LARGEST_SEED)] | None = None
    """Seed of the random generator. The same request with the same seed gives the same answer."""
    stream: bool = False
    """True to send the answer as server-sent events."""
    stream_options: ObfuscationOptions | None = None
    ignore_eos: bool = False
    """Extension: True to continue after an end-of-sequence token."""
    structured_outputs: StructuredOutputs | None = None
    """Extension: the form of the completion."""
    timings: bool = False
    """Extension: True to add `timings` to the answer."""

    without_effect = frozenset({"user", "safety_identifier", "prompt_cache_key"})

    def numbers(self) -> dict[str, float]:
        """Return the options of the generation that this request gives."""
        given = {name: getattr(self, name) for name in served()}
        return {name: value for name, value in given.items() if value is not None}

    @model_validator(mode="after")
    def _streams(self) -> "Sampling":
        if self.stream_options is not None and not self.stream:
            message = "{field} has no effect without stream; set stream"
            raise problem("needs_stream", message, "stream_options")
        return self


class ChoicesRequest(Sampling):
    """The fields that chat completions and completions share."""

    n: Annotated[int, Field(ge=1, le=MOST_CHOICES)] = 1
    """Number of completions of each prompt."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of new tokens."""
    stream_options: StreamOptions | None = None
    processed_logprobs: bool = False
    """Extension: True for log-probabilities of new tokens after grammar, bias, penalties,
    temperature and filters, which is the distribution of the draw. Needs `logprobs`."""


class TextPart(Body):
    """A part of a message's content."""

    type: Literal["text"]
    text: str


class FunctionCall(Body):
    """A call of a function."""

    name: str
    arguments: str
    """The arguments as JSON."""

    without_effect = frozenset({"parsed_arguments"})  # added by openai-python's `parse`


class ToolCall(Body):
    """A call of a tool in an earlier reply."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Function(Body):
    """A function that a reply may call."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: Text | None = None
    parameters: Json | None = None
    """JSON schema of the arguments, an object."""
    strict: bool | None = None
    """True to make arguments always fit the schema."""

    @model_validator(mode="after")
    def _has_a_schema(self) -> "Function":
        schema = self.parameters or {}
        required = schema.get("required", [])
        names = isinstance(required, list) and all(isinstance(one, str) for one in required)
        properties = isinstance(schema.get("properties", {}), dict)
        for name, is_valid in (("properties", properties), ("required", names)):
            if not is_valid:
                message = "{field} is not a JSON schema; correct it"
                raise problem("schema", message, f"parameters.{name}")
        return self


class FunctionTool(Body):
    """A tool."""

    type: Literal["function"]
    function: Function


class FunctionName(Body):
    """A reference to a function."""

    name: str


class NamedTool(Body):
    """A reference to a tool. As `tool_choice`: the reply must call it."""

    type: Literal["function"]
    function: FunctionName


class SomeTools(Body):
    """Tools that a reply may call, or must call if `mode` is `required`."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Body):
    """The value of `tool_choice` that allows only some tools."""

    type: Literal["allowed_tools"]
    allowed_tools: SomeTools


Tools = Annotated[list[FunctionTool], Field(max_length=MOST_TOOLS, fail_fast=True)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
ToolChoice = Literal["none", "auto", "required"] | NamedTool | AllowedTools


class Message(Body):
    """A message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    """Extension: the reasoning before an assistant's content, if the template reads it."""
    tool_calls: Annotated[list[ToolCall], Field(max_length=MOST_TOOLS, fail_fast=True)] | None = (
        None
    )
    """The calls in an assistant's message."""
    tool_call_id: str | None = None
    """The call that a tool's message answers."""

    not_served = {"refusal": (), "audio": (), "function_call": (), "annotations": ([],)}
    without_effect = frozenset({"parsed"})  # added by openai-python's `parse`

    @model_validator(mode="after")
    def _is_whole(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise problem("missing_content", "{field} is missing; give a string", "content")
        if self.tool_calls and self.role != "assistant":
            message = "{field} is only for the role assistant; omit it"
            raise problem("role", message, "tool_calls")
        if (self.tool_call_id is not None) != (self.role == "tool"):
            message = "{field} and the role tool need each other; give both"
            raise problem("role", message, "tool_call_id")
        return self


class ChatRequest(ChoicesRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=20_000, fail_fast=True)]
    """The chat so far."""
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    """Maximum number of new tokens."""
    response_format: ResponseFormat | None = None
    """The form of the reply."""
    logprobs: bool = False
    """True to return the log-probability of each token: the model's own, before penalties,
    temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Number of likeliest tokens to return at each position; needs `logprobs`. Extension: each
    token also has its `token_id`, since several tokens may have the same bytes."""
    reply_tokens: list[Token] = Field(default_factory=list[Token], fail_fast=True)
    """Extension: the first tokens of the reply. The answer is the rest of the reply."""
    tools: Tools = Field(default_factory=list[FunctionTool])
    """The functions that the reply may call."""
    reasoning_effort: Effort | None = None
    """How much the model should reason before the content, if the chat template reads it; `none`:
    not at all."""
    chat_template_kwargs: Json = Field(default_factory=dict[str, Any])
    """Extension: variables for the chat template, such as `enable_thinking`."""
    tool_choice: ToolChoice | None = None
    """Whether the reply may or must call tools, or which ones; by default it may."""
    parallel_tool_calls: bool = True
    """False to allow one call at most."""

    not_served = {
        "audio": (),
        "function_call": ("none",),
        "functions": ([],),
        "metadata": ({},),
        "modalities": (["text"],),
        "moderation": (),
        "prediction": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory", "in-memory"),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "verbosity": (),
        "web_search_options": (),
    }

    @property
    def content_schema(self) -> dict[str, Any] | None:
        """JSON schema of the reply's content; None if any text is allowed."""
        form = self.response_format
        if form is None or form.type == "text":
            return None
        return (form.json_schema and form.json_schema.schema_) or {"type": "object"}

    @model_validator(mode="after")
    def _consistent(self) -> "ChatRequest":
        if self.top_logprobs is not None and not self.logprobs:
            raise _needs_logprobs("top_logprobs")
        if self.processed_logprobs and not self.logprobs:
            raise _needs_logprobs("processed_logprobs")
        both = (self.max_tokens, self.max_completion_tokens)
        if None not in both and both[0] != both[1]:
            message = "{field} and max_tokens differ; give one of them"
            raise problem("two_limits", message, "max_completion_tokens")
        return self


class CompletionRequest(ChoicesRequest):
    """POST /v1/completions."""

    prompt: (
        str
        | Prompt
        | Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]
        | Annotated[list[Prompt], Field(min_length=1, max_length=MOST_CHOICES)]
    )
    """A prompt or several, each a string or a list of token ids."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """Return the log-probability of each token and of this number of likeliest ones at its
    position: the model's own, before penalties, temperature and filters."""
    echo: bool = False
    """True to return the prompt before each completion, with `logprobs` also its tokens."""
    chat_logprobs: bool = False
    """Extension: True to add `content` to `logprobs`: the new tokens as in a chat completion."""

    not_served = {"best_of": (1,), "suffix": ("",)}

    @model_validator(mode="after")
    def _has_logprobs(self) -> "CompletionRequest":
        for name in ("processed_logprobs", "chat_logprobs"):
            if getattr(self, name) and self.logprobs is None:
                raise _needs_logprobs(name)
        return self


class TokenizeRequest(Body):
    """POST /tokenize. One of `content`, `prompt` and `messages` is needed."""

    model: str | None = None
    content: str | None = None
    """A text, to which nothing is added."""
    prompt: str | None = None
    """A text, as /v1/completions reads it: with the tokens that begin a sequence."""
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    """A chat, as /v1/chat/completions reads it."""
    tools: Tools = Field(default_factory=list[FunctionTool])
    """The tools of the chat."""
    add_special_tokens: bool = True
    """False to encode `prompt` without the tokens that begin a sequence, and names of special
    tokens as special tokens, as lm-eval's remote tokenizer needs."""

    @model_validator(mode="after")
    def _one(self) -> "TokenizeRequest":
        given = [one for one in (self.content, self.prompt, self.messages) if one is not None]
        if len(given) != 1:
            raise PydanticCustomError(
                "one_text", "give one of content, prompt and messages, and not several"
            )
        return self


class DetokenizeRequest(Body):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]
    """Token ids."""
