"""Anthropic's messages, translated to OpenAI's chats.

Source: the types of the package ``anthropic`` 2.14, ``message_create_params`` and the events of
``raw_message_stream_event``.
"""

import json
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from offplan.runtime.joined import Added
from offplan.serve.answers import Answer
from offplan.serve.api import (
    CappedChat,
    Fields,
    Part,
    Parts,
    Step,
    Translation,
    ask_schema,
    join_texts,
    make_call,
    make_id,
    read_arguments,
    write_event,
)
from offplan.serve.errors import ApiError
from offplan.serve.requests import MAX_STOP_STRINGS, Short, StopString, list_parts, parse_request

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
_SIGNATURE = "offplan"
"""Signature of thoughts, which signs nothing: clients send thoughts without one back as a text."""
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class _Block(Fields):
    ignored = frozenset({"cache_control", "citations", "signature", "caller", "is_error"})


class _Text(_Block):
    type: Literal["text"]
    text: str


_Texts = Annotated[list[_Text], Field(fail_fast=True), BeforeValidator(list_parts)]


class _Thinking(_Block):
    type: Literal["thinking"]
    thinking: str


class _Redacted(_Block):
    type: Literal["redacted_thinking"]
    data: str


class _ToolUse(_Block):
    type: Literal["tool_use"]
    id: Short
    name: Short
    input: dict[str, Any]


class _ToolResult(_Block):
    type: Literal["tool_result"]
    tool_use_id: Short
    content: _Texts = Field(default_factory=list)


_AnyBlock = Annotated[
    _Text | _Thinking | _Redacted | _ToolUse | _ToolResult, Field(discriminator="type")
]


class _Message(Fields):
    role: Literal["user", "assistant", "system"]
    content: Annotated[list[_AnyBlock], Field(fail_fast=True), BeforeValidator(list_parts)]


class _Tool(Fields):
    ignored = frozenset(
        {"cache_control", "strict", "eager_input_streaming", "defer_loading", "allowed_callers"}
    )
    refused: ClassVar = {"input_examples": "write them into the tool's description"}

    type: Literal["custom"] | None = None
    name: Short
    description: str | None = None
    input_schema: dict[str, Any]


class _Choice(Fields):
    type: Literal["auto", "any", "tool", "none"]
    name: Short | None = None
    disable_parallel_tool_use: bool | None = None


class _Thinks(Fields):
    ignored = frozenset({"budget_tokens", "display"})

    type: Literal["enabled", "disabled", "adaptive"]


class _Format(Fields):
    type: Literal["json_schema"]
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class _Output(Fields):
    effort: Short | None = None
    format: _Format | None = None


class _Metadata(Fields):
    user_id: Short | None = None


class _Counted(Fields):
    """A request to count the tokens of messages."""

    ignored = frozenset(
        {"service_tier", "cache_control", "inference_geo", "context_management", "speed"}
    )
    refused: ClassVar = {
        "container": "no code runs here",
        "mcp_servers": "this server calls no tools",
        "prefill": "offplan answers with a new message",
    }

    model: Short
    messages: Annotated[list[_Message], Field(min_length=1, fail_fast=True)]
    system: _Texts | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    tool_choice: _Choice | None = None
    thinking: _Thinks | None = None
    output_config: _Output | None = None

    def translate(self) -> dict[str, Any]:
        """Return the request in the words of OpenAI's API."""
        if self.messages[-1].role == "assistant":
            raise ApiError(
                400,
                "messages ends with the assistant, whose text this server does not continue: end "
                "with the user",
                param="messages",
            )
        asked: dict[str, Any] = {"model": self.model, "messages": [*self._list_messages()]}
        if self.tools:
            asked["tools"] = [_translate_tool(tool) for tool in self.tools]
        if self.tool_choice is not None:
            asked["tool_choice"] = _translate_choice(self.tool_choice)
            if self.tool_choice.disable_parallel_tool_use:
                asked["parallel_tool_calls"] = False
        if self.thinking is not None and self.thinking.type != "adaptive":
            thinks = self.thinking.type == "enabled"
            asked["chat_template_kwargs"] = {"enable_thinking": thinks}
        if self.output_config is not None and self.output_config.effort:
            asked["reasoning_effort"] = self.output_config.effort
        if self.output_config is not None and self.output_config.format:
            asked["response_format"] = ask_schema(self.output_config.format.schema_)
        return asked

    def _list_messages(self) -> Iterator[dict[str, Any]]:
        if self.system:
            yield {"role": "system", "content": join_texts(self.system)}
        for message in self.messages:
            yield from _translate_message(message)


class _Asked(_Counted):
    """A request for the next message."""

    max_tokens: Annotated[int, Field(ge=1, lt=2**31)]
    metadata: _Metadata | None = None
    stop_sequences: Annotated[list[StopString], Field(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def translate(self) -> dict[str, Any]:
        """Return the request in the words of OpenAI's API."""
        asked = {
            "max_tokens": self.max_tokens,
            "user": self.metadata and self.metadata.user_id,
            "stop": self.stop_sequences or None,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
        }
        said = {key: value for key, value in asked.items() if value is not None}
        return {**super().translate(), **said}


def _translate_message(message: _Message) -> Iterator[dict[str, Any]]:
    """Yield a message's texts and calls as one message, and each result as one before it."""
    texts, thoughts, calls = list[_Text](), list[str](), list[dict[str, Any]]()
    for block in message.content:
        if isinstance(block, _Text):
            texts.append(block)
        elif isinstance(block, _Thinking):
            thoughts.append(block.thinking)
        elif isinstance(block, _ToolUse):
            calls.append(make_call(block.id, block.name, block.input))
        elif isinstance(block, _ToolResult):
            content = join_texts(block.content)
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content}
    said: dict[str, Any] = {"role": message.role}
    if texts or not calls:
        said["content"] = join_texts(texts)
    if thoughts:
        said["reasoning_content"] = "\n".join(thoughts)
    if calls:
        said["tool_calls"] = calls
    if texts or calls or thoughts or not message.content:
        yield said


def _translate_tool(tool: _Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    return {"type": "function", "function": function}


def _translate_choice(choice: _Choice) -> Any:
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return "required" if choice.type == "any" else choice.type


def read_counted(body: bytes) -> CappedChat:
    """Read a request to count the tokens of messages as a chat; raises ApiError."""
    return parse_request(CappedChat, parse_request(_Counted, body).translate())


def make_error(error: ApiError) -> dict[str, Any]:
    """Return the object that the client gets for an error."""
    kind = _TYPES.get(error.status, "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


class Messages(Translation):
    """A request for the next message, and its answer."""

    def __init__(self, asked: CappedChat) -> None:
        """Answer ``asked``."""
        super().__init__(asked)
        self._parts = Parts()

    @classmethod
    def read(cls, body: bytes) -> "Messages":
        """Read a request; raises ApiError."""
        return cls(parse_request(CappedChat, parse_request(_Asked, body).translate()))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the message when it has ended."""
        (choice,) = answer.whole()["choices"]
        for _ in self._parts.feed(choice["message"]):
            pass
        content = [_write_block(part) for part in self._parts]
        return {**self._begin(answer), "content": content, **self._end(answer)} | {
            "usage": self._count(answer)
        }

    def opening(self, answer: Answer) -> str:
        """Return the event that begins a stream."""
        return write_event({"type": "message_start", "message": self._begin(answer)})

    def chunk(self, answer: Answer, index: int, added: Added) -> str:
        """Return the events of a token."""
        (choice,) = answer.chunk(index, added)["choices"]
        return "".join(map(_write_step, self._parts.feed(choice["delta"])))

    def closing(self, answer: Answer) -> str:
        """Return the events that end a stream."""
        ended = {"type": "message_delta", "delta": self._end(answer), "usage": self._count(answer)}
        steps = "".join(map(_write_step, self._parts.close()))
        return steps + write_event(ended) + write_event({"type": "message_stop"})

    def failed(self, error: ApiError) -> str:
        """Return the event of an error."""
        return write_event(make_error(error))

    def waiting(self) -> str:
        """Return an event that clients pass over."""
        return write_event({"type": "ping"})

    def _begin(self, answer: Answer) -> dict[str, Any]:
        return {
            "id": make_id("msg_"),
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.choices[0].num_prompt, "output_tokens": 0},
        }

    def _end(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        reason, ended_by = _REASONS.get(choice.reason or "", "end_turn"), choice.stop_string
        if reason == "end_turn" and ended_by is not None:
            reason = "stop_sequence"
        is_short = len(choice.made) < (self.asked.num_tokens or 0)
        if reason == "max_tokens" and is_short:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": ended_by}

    def _count(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        return {
            "input_tokens": choice.num_read,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": choice.num_cached,
            "output_tokens": len(choice.made),
        }


def _write_block(part: Part) -> dict[str, Any]:
    if part.kind == "thought":
        return {"type": "thinking", "thinking": part.text, "signature": _SIGNATURE}
    if part.kind == "text":
        return {"type": "text", "text": part.text}
    return {
        "type": "tool_use",
        "id": part.id,
        "name": part.name,
        "input": read_arguments(part.text),
    }


_DELTAS = {
    "thought": ("thinking_delta", "thinking"),
    "text": ("text_delta", "text"),
    "call": ("input_json_delta", "partial_json"),
}


def _write_step(step: Step) -> str:
    index = step.part.index
    if step.verb == "open":
        block = _write_block(Part(step.part.kind, index, step.part.id, step.part.name))
        if step.part.kind == "call":
            block["input"] = {}
        elif step.part.kind == "thought":
            block["signature"] = ""
        return write_event({"type": "content_block_start", "index": index, "content_block": block})
    if step.verb == "close":
        signed = ""
        if step.part.kind == "thought":
            signed = _write_delta(index, "signature_delta", "signature", _SIGNATURE)
        return signed + write_event({"type": "content_block_stop", "index": index})
    piece = step.piece
    if step.part.kind == "call":
        piece = json.dumps(read_arguments(piece), ensure_ascii=False)
    return _write_delta(index, *_DELTAS[step.part.kind], piece)


def _write_delta(index: int, kind: str, key: str, piece: str) -> str:
    delta = {"type": kind, key: piece}
    return write_event({"type": "content_block_delta", "index": index, "delta": delta})
