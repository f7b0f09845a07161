"""The requests of OpenAI's API: which fields one has, and what they may hold.

Source: the reference of OpenAI's API, "Create chat completion" and "Create completion".
"""

import contextlib
import json
from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import Self

from offplan.checkpoint.jsontext import shorten
from offplan.serve.errors import ApiError, FieldError, refuse_fields
from offplan.serve.fields import IN_MESSAGES, MEANT, Path, find_meant, sift

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
MAX_BIASES = 1024
"""Tokens that one request may name one by one."""
MAX_TOP_LOGPROBS = 20
"""Likeliest tokens that a request may ask to see at each position, as in OpenAI's API."""

Short = Annotated[str, Field(max_length=1024)]
StopString = Annotated[str, Field(min_length=1, max_length=1024)]
StopStrings = Annotated[
    list[StopString],
    Field(fail_fast=True),
    BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
]
Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
TokenPrompt = Annotated[list[Token], Field(min_length=1, fail_fast=True)]


def list_parts(content: Any) -> Any:
    """Make a text one part of a message; what is no text stays as it is."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _list_prompts(prompt: Any) -> Any:
    """Put a single prompt, a text or a list of tokens, into a list."""
    is_tokens = isinstance(prompt, list) and prompt and not isinstance(prompt[0], (str, list))
    return [prompt] if isinstance(prompt, str) or is_tokens else prompt


class ApiObject(BaseModel):
    """Base of all objects in a request: frozen and strict; an unknown field is ignored.

    An unknown field that looks like a typo of a known one is an error.
    """

    model_config = ConfigDict(frozen=True, extra="allow", strict=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _has_few_fields_and_no_typo(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        if len(data) > MAX_FIELDS:
            raise ValueError(
                f"{len(data)} fields in one object; the API knows {MAX_FIELDS} at most"
            )
        known = {each.alias or name for name, each in cls.model_fields.items()}
        for name in data.keys() - known - IN_MESSAGES:
            if (meant := find_meant(name, cls._list_meant())) and meant not in data:
                raise FieldError(
                    shorten(name, 64), f"there is no such field: did you mean {meant}?"
                )
        return data

    @classmethod
    def _list_meant(cls) -> Iterable[str]:
        """List the fields that a typo may have meant."""
        return cls.model_fields

    def list_ignored(self, prefix: str = "") -> set[str]:
        """Return the names of unknown fields, of objects within too; they change nothing."""
        extra = (self.model_extra or {}).items()
        found = {f"{prefix}{name}" for name, value in extra if value is not None}
        found -= {f"{prefix}{name}" for name in IN_MESSAGES}
        for name in type(self).model_fields:
            value = getattr(self, name)
            each = value if isinstance(value, list) else [value]
            if each and isinstance(each[0], ApiObject):
                found.update(*(within.list_ignored(f"{prefix}{name}.") for within in each))
        return found


class TextPart(ApiObject):
    """A part of a message's content; offplan knows texts alone."""

    type: Literal["text"]
    text: str


class Function(ApiObject):
    """The function that an assistant called."""

    name: Short
    arguments: str


class ToolCall(ApiObject):
    """A call that an assistant made."""

    id: Short = ""
    type: Literal["function"] = "function"
    function: Function
    index: int | None = None


class Message(ApiObject):
    """A message of a chat."""

    role: Annotated[str, Field(min_length=1, max_length=64)]
    """Role of the author; the chat template knows which there are."""
    content: Annotated[
        Annotated[list[TextPart], Field(fail_fast=True)] | None, BeforeValidator(list_parts)
    ] = None
    name: Short | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """The same, as vLLM and OpenRouter call it."""
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
        has_other = self.tool_calls or self.thoughts is not None
        if self.content is None and not (self.role == "assistant" and has_other):
            raise ValueError(
                "content is missing: only an assistant that calls tools or thinks has none"
            )
        return self

    @property
    def thoughts(self) -> str | None:
        """Text that the assistant thought."""
        return self.reasoning if self.reasoning_content is None else self.reasoning_content

    def for_template(self) -> dict[str, Any]:
        """Return the message as chat templates know it: parts joined, arguments as an object."""
        content = "\n".join(part.text for part in self.content or ())
        message: dict[str, Any] = {"role": self.role, "content": content}
        told = {
            "name": self.name,
            "reasoning_content": self.thoughts,
            "tool_call_id": self.tool_call_id,
        }
        message |= {key: value for key, value in told.items() if value is not None}
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


class ToolFunction(ApiObject):
    """A function that the model may call."""

    name: Short
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(ApiObject):
    """A tool that the chat template shows to the model."""

    type: Literal["function"]
    function: ToolFunction


class StreamOptions(ApiObject):
    """The options of a stream."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """True if each chunk has the numbers of tokens so far. Source: vLLM's field."""
    include_obfuscation: bool | None = None


class JsonSchema(ApiObject):
    """A schema by its name."""

    name: Short | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | bool | None, Field(alias="schema")] = None
    strict: bool | None = None
    """Ignored: the answer always follows the schema."""


class ResponseFormat(ApiObject):
    """The form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    """The schema itself. Source: llama.cpp's server."""


class StructuredOutputs(ApiObject):
    """The form of an answer, as vLLM has it."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: None = None
    whitespace_pattern: None = None
    disable_any_whitespace: Literal[False] | None = None
    disable_additional_properties: Literal[False] | None = None


class NamedFunction(ApiObject):
    """The name of a function."""

    name: Short


class NamedTool(ApiObject):
    """The tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


class Request(ApiObject):
    """The fields that both kinds of requests have."""

    path: ClassVar[Path]
    """The path, as the table of fields has it."""
    usual_tokens: ClassVar[int | None] = None
    """Tokens that are made where the request leaves it open; None for all that fit the context."""
    caps_tokens: ClassVar[bool] = False
    """True if the number of tokens is a bound, and the context may end the text before."""

    model: Short | None = None
    max_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    n: Annotated[int, Field(ge=1, lt=2**16), BeforeValidator(lambda n: 1 if n is None else n)] = 1
    """Texts for each prompt."""
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    """Likeliest tokens that are drawn from; 0 and -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=MAX_BIASES)] | None = None
    """Numbers that are added to logits, by the token's number."""
    min_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Token], Field(max_length=MAX_BIASES, fail_fast=True)] | None = (
        None
    )
    do_sample: bool | None = None
    """True draws even where the model's files are greedy. Source: transformers' name."""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    """A schema, as llama.cpp's and SGLang's servers have it."""
    grammar: str | None = None
    regex: str | None = None
    ebnf: str | None = None
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
        return sift(data, cls.path) if isinstance(data, dict) else data

    @classmethod
    def _list_meant(cls) -> Iterable[str]:
        return MEANT

    @field_validator("logit_bias")
    @classmethod
    def _has_tokens(cls, biases: dict[str, float] | None) -> dict[str, float] | None:
        for name in biases or ():
            if not (name.isascii() and name.isdigit() and len(name) < 10):
                raise ValueError("a bias is of the number of a token")
        return biases

    @model_validator(mode="after")
    def _ends_behind_its_least(self) -> Self:
        least, most = self.min_tokens or 0, self.num_tokens
        if most is None and least > (self.usual_tokens or least):
            raise FieldError(
                "min_tokens", f"{least} are more than {self.usual_tokens}: name max_tokens"
            )
        if most is not None and least > most:
            raise FieldError("min_tokens", f"{least} are more than max_tokens")
        return self

    @model_validator(mode="after")
    def _streams_what_it_says(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "it is for stream: true")
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
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def wants_usage_always(self) -> bool:
        """True if each chunk of a stream has the numbers of tokens so far."""
        return self.wants_usage and bool(
            self.stream_options and self.stream_options.continuous_usage_stats
        )

    @property
    def echoes(self) -> bool:
        """True if the answer begins with the prompt."""
        return False


class ChatRequest(Request):
    """A request for the next message of a chat."""

    path = "chat"

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Short | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    """Variables of the chat template; not in OpenAI's API. Source: vLLM's field."""

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        if self.top_logprobs is not None and not self.logprobs:
            raise FieldError("top_logprobs", "it is for logprobs: true")
        named = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(named) > 1:
            raise FieldError("max_tokens", "max_completion_tokens means the same: name one")
        names = {tool.function.name for tool in self.tools or ()}
        choice = self.tool_choice
        if choice == "required" and not names:
            raise FieldError("tool_choice", "required needs tools")
        if isinstance(choice, NamedTool) and choice.function.name not in names:
            raise FieldError("tool_choice", "there is no tool of this name in tools")
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
        known = set(ToolFunction.model_fields)
        return [
            {
                "type": tool.type,
                "function": tool.function.model_dump(include=known, exclude_none=True),
            }
            for tool in self.tools
        ]


class CompletionRequest(Request):
    """A request for what follows texts."""

    path = "completions"
    usual_tokens: ClassVar[int | None] = 16

    max_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    prompt: Annotated[
        list[str | TokenPrompt],
        Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True),
        BeforeValidator(_list_prompts),
    ]
    """Prompts as texts or tokens; a single one becomes a list."""
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None,
        BeforeValidator(lambda asked: None if asked is False else asked),
    ] = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _makes_something(self) -> Self:
        if self.max_tokens == 0 and not self.echo:
            raise FieldError("max_tokens", "0 makes no text without echo: ask for 1 or more")
        return self

    @property
    def echoes(self) -> bool:
        """True if the answer begins with the prompt."""
        return bool(self.echo)

    @property
    def num_logprobs(self) -> int | None:
        """Likeliest tokens to be shown beside the one that was made; None for no logprobs."""
        return self.logprobs


R = TypeVar("R", bound=ApiObject)


def parse_request(kind: type[R], body: bytes | dict[str, Any]) -> R:
    """Read an object of a request from a body, or from plain data; raises ApiError with 400."""
    try:
        if isinstance(body, bytes):
            check_shape(body)
            return kind.model_validate_json(body)
        return kind.model_validate(body)
    except ValidationError as error:
        raise refuse_fields(error) from None
    except RecursionError:
        raise ApiError(400, "the body is nested too deeply") from None
