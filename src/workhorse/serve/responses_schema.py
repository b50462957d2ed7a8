"""The body of POST /v1/responses, and the messages that its items are."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from workhorse.serve.errors import bad_request
from workhorse.serve.schema import (
    AS_JSON,
    MOST_TOOLS,
    AllowedTools,
    Body,
    ChatRequest,
    Effort,
    Function,
    FunctionName,
    FunctionTool,
    Json,
    Message,
    NamedSchema,
    NamedTool,
    ResponseFormat,
    Sampling,
    SomeTools,
    Text,
    Values,
    few,
    problem,
)

LOGPROBS = "message.output_text.logprobs"
"""The value of `include` that adds log-probabilities."""


class Part(Body):
    """A part of a message, or of the output of a function."""

    type: Literal["input_text", "output_text"]
    text: str

    without_effect = frozenset({"annotations", "logprobs"})
    not_served: ClassVar[Values] = {"prompt_cache_breakpoint": ()}


Content = str | Annotated[list[Part], Field(fail_fast=True)]


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


DIRECT = {"type": "direct"}
"""The value of `caller` for functions that the reply calls itself."""


class Item(Body):
    """A part of the input. Answers have items with the same fields, so they can be sent back.

    `fields` has the fields of the chat message that the item is, or is a part of.
    """

    without_effect = frozenset({"id", "status"})


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    without_effect = Item.without_effect | {"phase"}

    @property
    def fields(self) -> dict[str, Any]:
        return {"role": self.role, "content": _text(self.content)}


class ReasoningPart(Body):
    """A part of the reasoning before a reply."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(Item):
    """The reasoning before a message of the assistant, if the template reads it."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list[ReasoningPart], fail_fast=True)
    """Used if there is no content."""
    content: Annotated[list[ReasoningPart], Field(fail_fast=True)] | None = None

    not_served: ClassVar[Values] = {"encrypted_content": ()}

    @property
    def fields(self) -> dict[str, Any]:
        text = "".join(part.text for part in self.content or self.summary)
        return {"role": "assistant", "reasoning_content": text}


class CallItem(Item):
    """A call of a function by the assistant."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    """The arguments as JSON."""

    not_served: ClassVar[Values] = {"async": (False,), "caller": (DIRECT,), "namespace": ()}

    @property
    def fields(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "function": function}]}


class OutputItem(Item):
    """The output of a function."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content

    without_effect = Item.without_effect | {"name"}
    not_served: ClassVar[Values] = {"caller": (DIRECT,), "namespace": ()}

    @property
    def fields(self) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}


ITEMS = ("message", "reasoning", "function_call", "function_call_output")


NO_TYPE = "message"
"""Stands for the type of a value without a type."""


def _tag(item: Any) -> str:
    """Return the tag of a value: its type in brackets, which mark a branch in locations of errors.

    The type of an item may be missing.
    """
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"[{kind or NO_TYPE}]"


AnyItem = Annotated[
    Annotated[MessageItem, Tag(f"[{NO_TYPE}]")]
    | Annotated[ReasoningItem, Tag("[reasoning]")]
    | Annotated[CallItem, Tag("[function_call]")]
    | Annotated[OutputItem, Tag("[function_call_output]")],
    Discriminator(
        _tag,
        custom_error_type="not_served",
        custom_error_message=f"items of this type are not served; use {', '.join(ITEMS)}",
    ),
]


class Tool(Function):
    """A function that a reply may call."""

    type: Literal["function"]

    not_served: ClassVar[Values] = {
        "allowed_callers": (["direct"],),
        "async": (False,),
        "defer_loading": (False,),
        "output_schema": (),
    }

    @model_validator(mode="before")
    @classmethod
    def _is_a_function(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("type") != "function":
            raise PydanticCustomError("not_served", "only tools of type 'function' are served")
        return fields

    @property
    def as_in_chats(self) -> FunctionTool:
        fields = self.model_dump(exclude={"type"}, exclude_unset=True)
        return FunctionTool(type="function", function=Function(**fields))


class ChosenTool(Body):
    """A reference to a tool. As `tool_choice`: the reply must call it."""

    type: Literal["function"]
    name: str

    @property
    def as_in_chats(self) -> NamedTool:
        return NamedTool(type="function", function=FunctionName(name=self.name))


class ChosenTools(Body):
    """Tools that a reply may call, or must call if `mode` is `required`."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[ChosenTool], Field(min_length=1, max_length=MOST_TOOLS)]

    @property
    def as_in_chats(self) -> AllowedTools:
        some = SomeTools(mode=self.mode, tools=[tool.as_in_chats for tool in self.tools])
        return AllowedTools(type="allowed_tools", allowed_tools=some)


AnyChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag(f"[{NO_TYPE}]")]
    | Annotated[ChosenTool, Tag("[function]")]
    | Annotated[ChosenTools, Tag("[allowed_tools]")],
    Discriminator(
        _tag,
        custom_error_type="not_served",
        custom_error_message="tools of this type are not served; use function or allowed_tools",
    ),
]


class TextFormat(NamedSchema):
    """The form of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    name: Text | None = None

    @model_validator(mode="after")
    def _has_a_schema(self) -> "TextFormat":
        for field, value in (("name", self.name), ("schema", self.schema_)):
            if (self.type == "json_schema") != (value is not None):
                message = "{field} and type 'json_schema' need each other; give both"
                raise problem("json_schema", message, field)
        return self

    @property
    def as_in_chats(self) -> ResponseFormat:
        """The form as the field `response_format` of a chat."""
        return ResponseFormat.model_construct(type=self.type, json_schema=self)


class ReasoningOptions(Body):
    """Options of the reasoning before a reply."""

    effort: Effort | None = None

    not_served: ClassVar[Values] = {
        "context": (),
        "generate_summary": (),
        "mode": ("standard",),
        "summary": (),
    }


class TextOptions(Body):
    """Options of the text of a reply."""

    format: TextFormat | None = None

    not_served: ClassVar[Values] = {"verbosity": ()}


class ResponsesRequest(Sampling):
    """POST /v1/responses."""

    input: str | Annotated[list[AnyItem], Field(min_length=1, max_length=20_000, fail_fast=True)]
    """A message of the user, or items: the chat so far."""
    instructions: Text | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of new tokens, also of reasoning and of calls."""
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    """How much the model should reason, if the chat template reads it."""
    chat_template_kwargs: Json = Field(default_factory=dict[str, Any])
    """Extension: variables for the chat template, such as `enable_thinking`."""
    tools: Annotated[
        list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True, default_factory=list[Tool])
    ]
    """The functions that the reply may call."""
    tool_choice: AnyChoice = "auto"
    """Whether the reply may or must call tools, or which ones."""
    parallel_tool_calls: bool = True
    """False to allow one call at most."""
    include: list[str] = Field(default_factory=list[str], fail_fast=True)
    """`message.output_text.logprobs` adds the log-probability of each token of a message: the
    model's own, before penalties, temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Number of likeliest tokens to return at each position; needs the log-probabilities."""
    metadata: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=512)],
        ],
        AS_JSON,
        few(16),
        Field(default_factory=dict[str, str]),
    ]
    """Pairs that the answer repeats."""

    not_served: ClassVar[Values] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "truncation": ("disabled",),
    }

    @property
    def effort(self) -> Effort | None:
        return None if self.reasoning is None else self.reasoning.effort

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @property
    def as_chat(self) -> ChatRequest:
        """The same request for /v1/chat/completions. Its fields are already checked."""
        choice = self.tool_choice
        form = None if self.text is None else self.text.format
        return ChatRequest.model_construct(
            **{name: getattr(self, name) for name in Sampling.model_fields},
            messages=messages_of(self),
            max_tokens=self.max_output_tokens,
            response_format=None if form is None else form.as_in_chats,
            logprobs=self.has_logprobs,
            top_logprobs=self.top_logprobs,
            tools=[tool.as_in_chats for tool in self.tools],
            tool_choice=choice if isinstance(choice, str) else choice.as_in_chats,
            parallel_tool_calls=self.parallel_tool_calls,
            reasoning_effort=self.effort,
            chat_template_kwargs=self.chat_template_kwargs,
        )

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        for one in self.include:
            if one != LOGPROBS:
                raise problem("not_served", "{field}: only " + LOGPROBS + " is served", "include")
        if self.top_logprobs and not self.has_logprobs:
            message = "{field} has no effect without " + LOGPROBS + "; add it to include"
            raise problem("needs_logprobs", message, "top_logprobs")
        return self


PARTS = ("reasoning_content", "content", "tool_calls")
"""The parts of an assistant's message, in their order."""


def messages_of(body: ResponsesRequest) -> list[Message]:
    """Return the chat of a request. Successive items of the assistant are parts of one message.

    Raises:
        ApiError: a message has too many calls.
    """
    found: list[dict[str, Any]] = []
    if body.instructions is not None:
        found.append({"role": "system", "content": body.instructions})
    given = body.input
    items = [MessageItem(role="user", content=given)] if isinstance(given, str) else given
    for item in items:
        if not found or not _extends(found[-1], item.fields):
            found.append(item.fields)
        elif "tool_calls" in found[-1]:
            found[-1]["tool_calls"] += item.fields["tool_calls"]
        else:
            found[-1] |= item.fields
    most = max(len(one.get("tool_calls", ())) for one in found)
    if most > MOST_TOOLS:
        raise bad_request(f"input has {most} calls in a row; give up to {MOST_TOOLS}", "input")
    no_content = [one for one in found if "content" not in one and "tool_calls" not in one]
    for one in no_content:  # a reply that ended in its reasoning
        one["content"] = ""
    return [Message.model_validate(one) for one in found]


def _extends(message: dict[str, Any], new: dict[str, Any]) -> bool:
    """True if a part of an assistant's message belongs to the message before it."""
    if not message["role"] == new["role"] == "assistant":
        return False
    before, after = (
        max(PARTS.index(name) for name in one.keys() & PARTS) for one in (message, new)
    )
    return before < after or "tool_calls" in new
