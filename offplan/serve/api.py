"""Other APIs in the words of OpenAI's chats: what each one's module translates.

A request becomes the record that ``/v1/chat/completions`` has, and so means what it means there.
What the record's answer says becomes the API's own objects.
"""

import json
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from pydantic import ConfigDict, model_validator

from offplan.runtime.joined import Added
from offplan.serve.answers import Answer
from offplan.serve.errors import ApiError, FieldError
from offplan.serve.requests import ApiObject, ChatRequest, CompletionRequest, Request, parse_request

SSE = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}


class Fields(ApiObject):
    """An object of an API: frozen, strict, and an unknown field is an error."""

    model_config = ConfigDict(extra="forbid")

    ignored: ClassVar[frozenset[str]] = frozenset()
    """Fields that change nothing in a text, and that clients send as a matter of course."""
    refused: ClassVar[Mapping[str, str]] = {}
    """Fields that are refused unless they are null, false or empty, each with the reason."""

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for key in cls.refused.keys() & data.keys():
            if data[key]:
                raise FieldError(key, f"it is not supported: {cls.refused[key]}")
        return {
            key: value
            for key, value in data.items()
            if key not in cls.ignored and key not in cls.refused
        }


class CappedChat(ChatRequest):
    """A chat whose number of tokens is a bound: the context may end the answer before."""

    caps_tokens = True


class Translation(ABC):
    """A request of an API, and the writer of its answer."""

    headers: Mapping[str, str] = SSE
    """Headers of a stream."""
    at_once: dict[str, Any] | None = None
    """The answer of a request that asks for no text."""

    def __init__(self, asked: Request) -> None:
        """Answer ``asked``, the request in the words of OpenAI's API."""
        self.asked = asked

    @abstractmethod
    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer when all texts have ended."""

    @abstractmethod
    def opening(self, answer: Answer) -> str:
        """Return what begins a stream."""

    @abstractmethod
    def chunk(self, answer: Answer, index: int, added: Added) -> str:
        """Return what a stream has of a token that a choice got."""

    @abstractmethod
    def closing(self, answer: Answer) -> str:
        """Return what ends a stream."""

    @abstractmethod
    def failed(self, error: ApiError) -> str:
        """Return what ends a stream that has begun, and fails."""

    def waiting(self) -> str:
        """Return what a stream has while no token comes."""
        return ": waiting\n\n"


Translate = Callable[[bytes], Translation]
"""Reads a request of an API from a body; raises ApiError."""


def write_event(payload: Mapping[str, Any]) -> str:
    """Write an event of a stream that is named by its type."""
    return f"event: {payload['type']}\ndata: {json.dumps(payload)}\n\n"


def make_id(prefix: str) -> str:
    """Make the identifier of an object."""
    return prefix + secrets.token_hex(12)


def join_texts(parts: Iterable[Any]) -> str:
    """Return the ``text`` of all parts of a message as one."""
    return "\n".join(each.text for each in parts)


def make_call(identifier: str, name: str, arguments: str | Mapping[str, Any]) -> dict[str, Any]:
    """Return a call of a tool as a chat's message has it."""
    if not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    function = {"name": name, "arguments": arguments}
    return {"id": identifier, "type": "function", "function": function}


def read_arguments(text: str) -> dict[str, Any]:
    """Return a call's arguments; what is no object is an argument of its own."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = text
    return found if isinstance(found, dict) else {"arguments": found}


def ask_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the ``response_format`` of a chat whose answer is to be JSON of a schema."""
    named = {"name": "output", "schema": schema}
    return {"type": "json_schema", "json_schema": named}


@dataclass
class Part:
    """A part of an answer: what is thought, said or called."""

    kind: Literal["thought", "text", "call"]
    index: int
    id: str
    name: str = ""
    """Name of the function that is called."""
    text: str = ""
    """What it says, or a call's arguments."""


class Step(NamedTuple):
    """A step by which a part comes into being."""

    verb: Literal["open", "add", "close"]
    part: Part
    piece: str = ""
    """What is added."""


class Parts(list[Part]):
    """The parts of an answer, divided as the deltas of a chat come.

    Space before a call or between calls is nothing that was said.
    """

    _is_open = False
    _space = ""

    def feed(self, delta: Mapping[str, Any]) -> Iterator[Step]:
        """Yield what a delta, or a whole message, adds."""
        if thought := delta.get("reasoning_content"):
            yield from self._add("thought", thought)
        if text := delta.get("content"):
            yield from self._add("text", text)
        for call in delta.get("tool_calls") or ():
            function = call["function"]
            yield from self.close()
            part = Part("call", len(self), call["id"], function["name"])
            yield from self._open(part)
            part.text = function["arguments"]
            yield Step("add", part, part.text)
            yield from self.close()

    def close(self) -> Iterator[Step]:
        """Yield the end of the part that is open."""
        self._space = ""
        if self._is_open:
            self._is_open = False
            yield Step("close", self[-1])

    def _open(self, part: Part) -> Iterator[Step]:
        self.append(part)
        self._is_open = True
        yield Step("open", part)

    def _add(self, kind: Literal["thought", "text"], piece: str) -> Iterator[Step]:
        if not self._is_open or self[-1].kind != kind:
            piece = self._space + piece if kind == "text" else piece
            if not piece.strip():
                self._space = piece
                return
            yield from self.close()
            yield from self._open(Part(kind, len(self), make_id("")))
        self[-1].text += piece
        yield Step("add", self[-1], piece)


class OpenAi(Translation):
    """A request of OpenAI's API, as it is."""

    @classmethod
    def read_chat(cls, body: bytes) -> "OpenAi":
        """Read a request for a chat's next message; raises ApiError."""
        return cls(parse_request(ChatRequest, body))

    @classmethod
    def read_completion(cls, body: bytes) -> "OpenAi":
        """Read a request for what follows texts; raises ApiError."""
        return cls(parse_request(CompletionRequest, body))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer when all texts have ended."""
        return answer.whole()

    def opening(self, answer: Answer) -> str:
        """Return the chunks that begin a stream."""
        return "".join(map(_write, answer.opening()))

    def chunk(self, answer: Answer, index: int, added: Added) -> str:
        """Return the chunk of a token; none for a token that says nothing yet."""
        if not answer.shows(index, added):
            return ""
        return "".join(map(_write, _part_end(answer.chunk(index, added))))

    def closing(self, answer: Answer) -> str:
        """Return the chunks that end a stream."""
        return "".join(map(_write, answer.closing())) + "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        """Return an event with the error's object."""
        return _write(error.payload)


def _part_end(chunk: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield a chunk; what ends a chat's message comes behind it, with an empty delta.

    OpenAI's stream helpers end a call before they read the delta beside a ``finish_reason``.
    """
    (choice,) = chunk["choices"]
    if choice["finish_reason"] is not None and choice.get("delta"):
        yield {**chunk, "choices": [{**choice, "finish_reason": None}]}
        choice = {**choice, "delta": {}, "logprobs": None}
    yield {**chunk, "choices": [choice]}


def _write(payload: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"
