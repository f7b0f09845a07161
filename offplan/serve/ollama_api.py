"""Ollama's chats and generations, translated to OpenAI's chats; streams are lines of JSON.

Source: the types of the package ``ollama`` 0.6.3, and https://docs.ollama.com/api.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from offplan.runtime.joined import Added
from offplan.serve.answers import Answer
from offplan.serve.api import (
    CappedChat,
    Fields,
    Translation,
    ask_schema,
    make_call,
    make_id,
    read_arguments,
)
from offplan.serve.errors import ApiError
from offplan.serve.requests import CompletionRequest, Request, Short, StopStrings, parse_request

VERSION = "0.6.3"
"""Version of Ollama's API: clients ask for it before they ask for more."""
_TEXT_ALONE = "offplan reads texts alone"
_LATEST = ":latest"


class CappedCompletion(CompletionRequest):
    """A completion whose number of tokens is a bound, and fills the context if left open."""

    usual_tokens = None
    caps_tokens = True


class _Options(Fields):
    ignored = frozenset(
        {
            *("num_ctx", "num_batch", "num_gpu", "main_gpu", "low_vram", "num_thread", "numa"),
            *("use_mmap", "use_mlock", "num_keep", "repeat_last_n", "f16_kv", "vocab_only"),
            *("logits_all", "embedding_only", "penalize_newline", "mirostat_tau", "mirostat_eta"),
        }
    )
    """Fields of memory and of Ollama's caches, and those of penalties and of mirostat, which are
    refused themselves."""
    refused: ClassVar = {"mirostat": "name temperature, top_k or top_p"}

    seed: int | None = None
    num_predict: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: StopStrings | None = None

    def translate(self) -> dict[str, Any]:
        """Return the options in the words of a chat.

        Those that are off are among them: they turn off what the server draws by else.
        """
        names = {"repeat_penalty": "repetition_penalty"}
        asked = {
            names.get(key, key): value
            for key, value in self
            if value is not None and key != "num_predict" and (key, value) != ("seed", -1)
        }
        # negative: as many as there are
        if self.num_predict is not None and self.num_predict > 0:
            asked["max_tokens"] = self.num_predict
        return asked


class _Function(Fields):
    ignored = frozenset({"index"})

    name: Short
    arguments: dict[str, Any]


class _Call(Fields):
    ignored = frozenset({"type"})

    id: Short | None = None
    function: _Function


class _Message(Fields):
    refused: ClassVar = {"images": _TEXT_ALONE}

    role: Short
    content: str | None = None
    thinking: str | None = None
    tool_calls: Annotated[list[_Call], Field(fail_fast=True)] | None = None
    tool_name: Short | None = None
    tool_call_id: Short | None = None


class _ToolFunction(Fields):
    name: Short
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(Fields):
    type: Literal["function"] = "function"
    function: _ToolFunction


class _Asked(Fields):
    ignored = frozenset({"keep_alive", "truncate", "shift"})

    model: Short
    stream: bool | None = None
    options: _Options | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    think: bool | Short | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def _translate(self) -> dict[str, Any]:
        asked: dict[str, Any] = {
            **(self.options or _Options()).translate(),
            "model": self.model.removesuffix(_LATEST),
            "stream": self.stream is not False,
        }
        if self.logprobs:
            asked |= {"logprobs": True, "top_logprobs": self.top_logprobs or 0}
        if isinstance(self.think, bool):
            asked["chat_template_kwargs"] = {"enable_thinking": self.think}
        elif self.think is not None:
            asked["reasoning_effort"] = self.think
        if self.format == "json":
            asked["response_format"] = {"type": "json_object"}
        elif self.format:
            asked["response_format"] = ask_schema(self.format)
        return asked


class _Chat(_Asked):
    messages: Annotated[list[_Message], Field(fail_fast=True, default_factory=list)]
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None

    def translate(self) -> dict[str, Any]:
        """Return the request in the words of OpenAI's API."""
        asked = {**self._translate(), "messages": _translate_messages(self.messages)}
        if self.tools:
            asked["tools"] = [tool.model_dump(exclude_none=True) for tool in self.tools]
        return asked


class _Generate(_Asked):
    refused: ClassVar = {
        "suffix": "offplan fills no gaps",
        "images": _TEXT_ALONE,
        "template": "the model's own chat template is used; raw: true uses none",
        "context": "this server keeps no conversations: use /api/chat",
        "width": _TEXT_ALONE,
        "height": _TEXT_ALONE,
        "steps": _TEXT_ALONE,
    }

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None

    def translate(self) -> dict[str, Any]:
        """Return the request in the words of OpenAI's API."""
        asked = self._translate()
        if self.raw:
            if self.logprobs:
                raise ApiError(
                    400,
                    "logprobs are not supported with raw: true; /v1/completions has them",
                    param="logprobs",
                )
            return {**asked, "prompt": self.prompt}
        messages = [{"role": "user", "content": self.prompt}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return {**asked, "messages": messages}


def _translate_messages(messages: Iterable[_Message]) -> list[dict[str, Any]]:
    """Return messages as OpenAI has them; a call gets an identifier, which its result names."""
    translated = list[dict[str, Any]]()
    open_calls = list[tuple[str, str]]()
    for message in messages:
        said: dict[str, Any] = {"role": message.role, "content": message.content or ""}
        if message.thinking:
            said["reasoning_content"] = message.thinking
        if message.tool_calls:
            said["tool_calls"] = []
            for call in message.tool_calls:
                found = call.id or make_id("call_")
                called = call.function
                open_calls.append((called.name, found))
                said["tool_calls"].append(make_call(found, called.name, called.arguments))
        if message.role == "tool":
            if message.tool_name:
                said["name"] = message.tool_name
            said["tool_call_id"] = message.tool_call_id or _take_call(open_calls, message.tool_name)
        translated.append(said)
    return translated


def _take_call(open_calls: list[tuple[str, str]], name: str | None) -> str:
    """Return the identifier of the first call that has no result yet, of a tool if one is named."""
    for each in open_calls:
        if name in (None, each[0]):
            open_calls.remove(each)
            return each[1]
    return ""


def make_error(error: ApiError) -> dict[str, Any]:
    """Return the object that the client gets for an error."""
    return {"error": error.message}


class Ollama(Translation):
    """A request of Ollama's, and its answer."""

    headers: Mapping[str, str] = {"content-type": "application/x-ndjson"}

    def __init__(self, asked: Request, model: str, *, is_chat: bool) -> None:
        """Answer ``asked`` in the name that the client has for the model."""
        super().__init__(asked)
        self._model, self._is_chat = model, is_chat
        self._began_ns = time.perf_counter_ns()
        self._first_ns: int | None = None

    @classmethod
    def read_chat(cls, body: bytes) -> "Ollama":
        """Read a request for a chat's next message; raises ApiError."""
        said = parse_request(_Chat, body)
        if not said.messages:
            return cls._load(said.model, is_chat=True)
        return cls(parse_request(CappedChat, said.translate()), said.model, is_chat=True)

    @classmethod
    def read_generate(cls, body: bytes) -> "Ollama":
        """Read a request for what follows a prompt; raises ApiError."""
        said = parse_request(_Generate, body)
        if not said.prompt:
            return cls._load(said.model, is_chat=False)
        kind: type[Request] = CappedCompletion if said.raw else CappedChat
        return cls(parse_request(kind, said.translate()), said.model, is_chat=False)

    @classmethod
    def _load(cls, model: str, *, is_chat: bool) -> "Ollama":
        """Answer a request that has a model loaded, which it is."""
        named = {"model": model.removesuffix(_LATEST), "prompt": "-"}
        found = cls(parse_request(CappedCompletion, named), model, is_chat=is_chat)
        found.at_once = found._describe("", done=True) | {"done_reason": "load"}
        return found

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer when it has ended."""
        (choice,) = answer.whole()["choices"]
        message = choice.get("message") or {"content": choice["text"]}
        return self._tell(message, choice["logprobs"]) | self._end(answer)

    def opening(self, answer: Answer) -> str:
        """Return nothing: each line has what a client needs."""
        return ""

    def chunk(self, answer: Answer, index: int, added: Added) -> str:
        """Return the line of a token; none for a token that says nothing yet."""
        self._first_ns = self._first_ns or time.perf_counter_ns()
        (choice,) = answer.chunk(index, added)["choices"]
        delta = choice.get("delta")
        delta = {"content": choice["text"]} if delta is None else delta
        if not any(delta.values()) and not choice["logprobs"]:
            return ""
        return _write(self._tell(delta, choice["logprobs"]))

    def closing(self, answer: Answer) -> str:
        """Return the line that ends a stream."""
        return _write(self._describe("", done=True) | self._end(answer))

    def failed(self, error: ApiError) -> str:
        """Return a line with the error's object."""
        return _write(make_error(error))

    def waiting(self) -> str:
        """Return a line that adds nothing."""
        return _write(self._describe("", done=False))

    def _tell(self, message: Mapping[str, Any], logprobs: Any) -> dict[str, Any]:
        """Return an answer's line of what a message or a delta has."""
        told = self._describe(message.get("content") or "", done=False)
        place = told["message"] if self._is_chat else told
        if thought := message.get("reasoning_content"):
            place["thinking"] = thought
        calls = [_write_call(call) for call in message.get("tool_calls") or ()]
        if calls and self._is_chat:
            place["tool_calls"] = calls
        if logprobs:
            told["logprobs"] = logprobs["content"]
        return told

    def _describe(self, text: str, *, done: bool) -> dict[str, Any]:
        said = {"message": {"role": "assistant", "content": text}}
        return {
            "model": self._model,
            "created_at": write_time(time.time()),
            **(said if self._is_chat else {"response": text}),
            "done": done,
        }

    def _end(self, answer: Answer) -> dict[str, Any]:
        (choice,) = answer.choices
        now_ns = time.perf_counter_ns()
        first_ns = self._first_ns or now_ns
        return {
            "done": True,
            "done_reason": "length" if choice.reason == "length" else "stop",
            "total_duration": now_ns - self._began_ns,
            "load_duration": 0,
            "prompt_eval_count": choice.num_prompt,
            "prompt_eval_duration": first_ns - self._began_ns,
            "eval_count": len(choice.made),
            "eval_duration": now_ns - first_ns,
        }


def _write(payload: Mapping[str, Any]) -> str:
    return f"{json.dumps(payload)}\n"


def _write_call(call: Mapping[str, Any]) -> dict[str, Any]:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return {"id": call["id"], "function": {"name": name, "arguments": read_arguments(arguments)}}


def write_time(seconds: float) -> str:
    """Return a time since 1970 as the API has it."""
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat().replace("+00:00", "Z")


class Shown(Fields):
    """A request to describe a model."""

    ignored = frozenset({"verbose"})

    model: Short | None = None
    name: Short | None = None
    """The model, in older clients."""

    @property
    def asked(self) -> str:
        """Name of the model."""
        return (self.model or self.name or "").removesuffix(_LATEST)


def describe_model(name: str, family: str, num_bytes: int, created_s: float) -> dict[str, Any]:
    """Return a model as the list of models has it; its digest is of its name alone."""
    return {
        "name": name,
        "model": name,
        "modified_at": write_time(created_s),
        "size": num_bytes,
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _describe_details(family),
    }


def show_model(
    family: str, template: str, context: int, created_s: float, capabilities: Iterable[str]
) -> dict[str, Any]:
    """Return what clients ask about one model: its context, its template, what it can do."""
    return {
        "modelfile": "",
        "parameters": "",
        "template": template,
        "details": _describe_details(family),
        "model_info": {
            "general.architecture": family,
            f"{family}.context_length": context,
        },
        "capabilities": [*capabilities],
        "modified_at": write_time(created_s),
    }


def _describe_details(family: str) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "safetensors",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }
