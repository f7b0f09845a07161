"""The requests of OpenAI's API: which fields one has, and what they may hold.

Source: the reference of OpenAI's API, "Create chat completion" and "Create completion".
"""

import contextlib
import json
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    model_validator,
)
from typing_extensions import Self

from offplan.serve.errors import ApiError, refuse_fields

MAX_FIELDS = 100
"""Fields of one object of the API; those of tools' parameters are the client's own."""
MAX_CONTAINERS = 2**15
"""Objects and lists in one body. One takes 3 bytes there, and 1,000 once it is a message."""


def check_shape(body: bytes) -> None:
    """Raise ApiError with 400 for JSON with too many objects and lists; parses none of it."""
    if _count(body) <= MAX_CONTAINERS:  # those in texts included
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    if (found := _count(outside)) > MAX_CONTAINERS:
        raise ApiError(
            400, f"the body has {found} objects and lists; this server reads {MAX_CONTAINERS}"
        )


def _count(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")


MAX_STOP_STRINGS = 16
"""Stop strings of one request; OpenAI's API takes four."""
MAX_PROMPTS = 64
"""Prompts of one completion request."""
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens that a request may ask to see at each position, as in OpenAI's API."""

_IGNORED = frozenset(
    {"metadata", "store", "service_tier", "prompt_cache_retention", "parallel_tool_calls"}
)
"""Fields that change nothing in a text, and that clients send as a matter of course."""
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "suffix": ("",),
    "functions": ([],),
    "function_call": (),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "verbosity": (),
    "web_search_options": (),
}
"""Fields that offplan does not support, with the values beside null that leave a text as it is."""

Short = Annotated[str, Field(max_length=1024)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[
    list[StopString],
    Field(fail_fast=True),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
Token = Annotated[int, Field(ge=0, lt=2**31)]
TokenPrompt = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


def _list_parts(content: Any) -> Any:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _list_prompts(prompt: Any) -> Any:
    """Put a single prompt, a text or a list of tokens, into a list."""
    is_tokens = isinstance(prompt, list) and prompt and not isinstance(prompt[0], (str, list))
    return [prompt] if isinstance(prompt, str) or is_tokens else prompt


class _Object(BaseModel):
    """Base of all objects in a request: frozen, strict, and an unknown field is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields(cls, data: Any) -> Any:
        if isinstance(data, dict) and len(data) > MAX_FIELDS:
            raise ValueError(
                f"{len(data)} fields in one object; the API knows {MAX_FIELDS} at most"
            )
        return data


class TextPart(_Object):
    """A part of a message's content; offplan knows texts alone."""

    type: Literal["text"]
    text: str


class Function(_Object):
    """The function that an assistant called."""

    name: Short
    arguments: str


class ToolCall(_Object):
    """A call that an assistant made."""

    id: Short = ""
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class Message(_Object):
    """A message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """Role of the author; the chat template knows which there are."""
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True)] | None, BeforeValidator(_list_parts)
    ] = None
    name: Short | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True)] | None = None
    tool_call_id: Short | None = None
    # clients send an answer back as they got it, with null in these
    refusal: None = None
    audio: None = None
    function_call: None = None
    annotations: list[Any] | None = None
    # gradio's chat keeps these in what was said, and sends all of it
    metadata: Any = None
    options: Any = None

    @model_validator(mode="after")
    def _has_content(self) -> Self:
        if self.content is None and not (self.role == "assistant" and self.tool_calls):
            raise ValueError("content is missing: only an assistant that calls tools has none")
        return self

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates know it: parts joined, arguments as an object."""
        content = "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": self.role, "content": content}
        for key in ("name", "reasoning_content", "tool_call_id"):
            if (value := getattr(self, key)) is not None:
                message[key] = value
        if self.tool_calls:
            message["tool_calls"] = [_call_for_template(call) for call in self.tool_calls]
        return message


def _call_for_template(call: ToolCall) -> dict[str, Any]:
    arguments: Any = call.function.arguments
    # a model may have called a tool with something else, and is shown what it was
    with contextlib.suppress(ValueError, RecursionError):
        arguments = json.loads(arguments)
    return {
        "id": call.id,
        "type": "function",
        "function": {"name": call.function.name, "arguments": arguments},
    }


class ToolFunction(_Object):
    """A function that the model may call."""

    name: Short
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Object):
    """A tool that the chat template shows to the model."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(_Object):
    """The options of a stream."""

    include_usage: bool = False
    include_obfuscation: bool | None = None


class Request(_Object):
    """The fields that both kinds of requests have."""

    usual_tokens: ClassVar[int | None] = None
    """Tokens that are made where the request leaves it open; None for all that fit the context."""
    caps_tokens: ClassVar[bool] = False
    """True if the number of tokens is a bound, and the context may end the text before."""

    model: Short | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    """Likeliest tokens that are drawn from; not in OpenAI's API."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Annotated[StopStrings, Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None
    cache_salt: Short | None = None
    """A secret that keeps prefixes apart; not in OpenAI's API. Source: vLLM's field."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out_what_changes_nothing(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        kept = {}
        for key, value in data.items():
            if key in _IGNORED:
                continue
            if key in _NEUTRAL:
                if value is not None and value not in _NEUTRAL[key]:
                    raise ValueError(
                        f"{key} other than {json.dumps((*_NEUTRAL[key], None)[0])} is not "
                        "supported: leave it out"
                    )
                continue
            kept[key] = value
        return kept

    @model_validator(mode="after")
    def _streams_what_it_says(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options is for stream: true")
        return self

    @property
    def identity(self) -> tuple[str | None, ...]:
        """Fields by which the request names who asks; empty if it has none."""
        said = (self.user, self.safety_identifier, self.prompt_cache_key, self.cache_salt)
        return said if any(said) else ()

    @property
    def num_tokens(self) -> int | None:
        """Tokens that may be made; None if the request leaves it open."""
        return self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to be shown beside the one that was made; None for no logprobs."""
        raise NotImplementedError

    @property
    def wants_usage(self) -> bool:
        """True if a stream ends with the numbers of tokens."""
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(Request):
    """A request for the next message of a chat."""

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    reasoning_effort: Short | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; not in OpenAI's API. Source: vLLM's field."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs is for logprobs: true")
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise ValueError("max_tokens and max_completion_tokens mean the same: name one")
        return self

    @property
    def num_tokens(self) -> int | None:
        """Tokens that may be made; None if the request leaves it open."""
        return self.max_tokens or self.max_completion_tokens

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to be shown beside the one that was made; None for no logprobs."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def shown_tools(self) -> list[dict[str, Any]] | None:
        """Tools as chat templates know them; None without any, or where none is to be called."""
        if not self.tools or self.tool_choice == "none":
            return None
        return [tool.model_dump(exclude_none=True) for tool in self.tools]


class CompletionRequest(Request):
    """A request for what follows texts."""

    usual_tokens: ClassVar[int | None] = 16

    prompt: Annotated[
        list[str | TokenPrompt],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        BeforeValidator(_list_prompts),
    ]
    """Prompts as texts or tokens; a single one becomes a list."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to be shown beside the one that was made; None for no logprobs."""
        return self.logprobs


R = TypeVar("R", bound=Request)


def parse_request(kind: type[R], body: bytes | dict[str, Any]) -> R:
    """Read a request of a kind from a body, or from an object; raises ApiError with 400."""
    try:
        if isinstance(body, bytes):
            check_shape(body)
            return kind.model_validate_json(body)
        return kind.model_validate(body)
    except ValidationError as error:
        raise refuse_fields(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
