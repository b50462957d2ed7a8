"""The body of POST /v1/responses, and the messages that its items are."""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Discriminator, Field, Tag, model_validator

from workhorse.serve.errors import bad_request
from workhorse.serve.schema import (
    Body,
    Message,
    ResponseFormat,
    Sampling,
    Values,
    needs_stream,
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


class Item(Body):
    """A part of the input. Answers have items with the same fields, so they can be sent back."""

    without_effect = frozenset({"id", "status"})


class MessageItem(Item):
    """A message."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content

    without_effect = Item.without_effect | {"phase"}


class ReasoningPart(Body):
    """A part of the reasoning before a reply."""

    type: Literal["summary_text", "reasoning_text"]
    text: str


class ReasoningItem(Item):
    """The reasoning before a message of the assistant, if the template reads it."""

    type: Literal["reasoning"]
    summary: list[ReasoningPart] = Field(default_factory=list[ReasoningPart])
    """Used if there is no content."""
    content: list[ReasoningPart] | None = None

    not_served: ClassVar[Values] = {"encrypted_content": ()}


ITEMS = {"message": MessageItem, "reasoning": ReasoningItem}


def _tag(item: Any) -> str:
    """Return the tag of an item's type. The brackets mark it as a branch in locations of errors."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return f"[{kind or 'message'}]"


AnyItem = Annotated[
    Annotated[MessageItem, Tag("[message]")] | Annotated[ReasoningItem, Tag("[reasoning]")],
    Discriminator(
        _tag,
        custom_error_type="not_served",
        custom_error_message=f"items of this type are not served; use {', '.join(ITEMS)}",
    ),
]


class TextFormat(Body):
    """The form of a reply."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    description: str | None = None
    strict: bool | None = None
    """Without effect: the schema is always enforced."""

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
        schema = self.model_dump(exclude={"type"}, by_alias=True)
        fields: dict[str, Any] = {"json_schema": schema} if self.type == "json_schema" else {}
        return ResponseFormat.model_validate({"type": self.type} | fields)


class TextOptions(Body):
    """Options of the text of a reply."""

    format: TextFormat | None = None

    not_served: ClassVar[Values] = {"verbosity": ()}


class ObfuscationOptions(Body):
    """Options of a stream."""

    include_obfuscation: bool = False
    """Without effect: nothing is padded."""


class ResponsesRequest(Sampling):
    """POST /v1/responses."""

    input: str | Annotated[list[AnyItem], Field(min_length=1, max_length=20_000, fail_fast=True)]
    """A message of the user, or items: the chat so far."""
    instructions: str | None = None
    """A system message before the input."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Maximum number of new tokens, also of reasoning and of calls."""
    text: TextOptions | None = None
    include: list[str] = Field(default_factory=list[str])
    """`message.output_text.logprobs` adds the log-probability of each token of a message: the
    model's own, before penalties, temperature and filters."""
    top_logprobs: Annotated[int, Field(ge=0, le=20)] = 0
    """Number of likeliest tokens to return at each position; needs the log-probabilities."""
    metadata: Annotated[
        dict[
            Annotated[str, Field(max_length=64)],
            Annotated[str, Field(max_length=512)],
        ],
        Field(max_length=16, default_factory=dict[str, str]),
    ]
    """Pairs that the answer repeats."""
    stream_options: ObfuscationOptions | None = None

    not_served: ClassVar[Values] = {
        "access_programs": (),
        "background": (False,),
        "background_options": (),
        "context_management": ([],),
        "conversation": (),
        "image": (),
        "max_tool_calls": (),
        "moderation": (),
        "parallel_tool_calls": (True,),
        "previous_response_id": (),
        "prompt": (),
        "prompt_cache_options": (),
        "prompt_cache_retention": ("in_memory",),
        "reasoning": ({}, {"effort": "none"}),
        "service_tier": ("auto", "default"),
        "store": (False,),
        "tool_choice": ("none", "auto"),
        "tools": ([],),
        "truncation": ("disabled",),
    }

    @property
    def has_logprobs(self) -> bool:
        return LOGPROBS in self.include

    @model_validator(mode="after")
    def _consistent(self) -> "ResponsesRequest":
        for one in self.include:
            if one != LOGPROBS:
                raise problem("not_served", "{field}: only " + LOGPROBS + " is served", "include")
        if self.top_logprobs and not self.has_logprobs:
            message = "{field} has no effect without " + LOGPROBS + "; add it to include"
            raise problem("needs_logprobs", message, "top_logprobs")
        needs_stream(self.stream, self.stream_options)
        return self


def messages_of(body: ResponsesRequest) -> list[Message]:
    """Return the chat of a request.

    Raises:
        ApiError: no reply follows a reasoning item.
    """
    found: list[Message] = []
    if body.instructions is not None:
        found.append(Message(role="system", content=body.instructions))
    if isinstance(body.input, str):
        return [*found, Message(role="user", content=body.input)]
    reasoning: str | None = None
    for number, item in enumerate(body.input):
        if isinstance(item, ReasoningItem):
            reasoning = "".join(part.text for part in item.content or item.summary)
            follows = body.input[number + 1 : number + 2]
            if not follows or getattr(follows[0], "role", "") != "assistant":
                raise bad_request(
                    f"input.{number} is reasoning without a message of the assistant after it; "
                    "add the message, or omit the reasoning",
                    f"input.{number}",
                )
            continue
        content = _text(item.content)
        found.append(Message(role=item.role, content=content, reasoning_content=reasoning))
        reasoning = None
    return found
