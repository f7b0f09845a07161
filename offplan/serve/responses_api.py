"""OpenAI's responses, translated to its chats; nothing is kept between two of them.

Source: the types of the package ``openai`` 3.54, ``types/responses``.
"""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from offplan.runtime.joined import Added
from offplan.serve.answers import Answer
from offplan.serve.api import (
    CappedChat,
    Fields,
    Part,
    Parts,
    Step,
    Translation,
    join_texts,
    make_call,
    make_id,
    write_event,
)
from offplan.serve.errors import ApiError
from offplan.serve.requests import Short, parse_request

NO_STATE = "this server keeps no answers: send the whole conversation in input"
_LOGPROBS = "message.output_text.logprobs"


def _list_parts(content: Any) -> Any:
    return [{"type": "input_text", "text": content}] if isinstance(content, str) else content


def _list_items(said: Any) -> Any:
    return [{"role": "user", "content": said}] if isinstance(said, str) else said


class _Text(Fields):
    ignored = frozenset({"annotations", "logprobs", "prompt_cache_breakpoint"})

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: str


_Texts = Annotated[list[_Text], Field(fail_fast=True), BeforeValidator(_list_parts)]


class _Item(Fields):
    ignored = frozenset({"id", "status", "phase", "encrypted_content", "namespace", "caller"})


class _Message(_Item):
    type: Literal["message"] = "message"
    role: Short
    content: _Texts


class _Call(_Item):
    type: Literal["function_call"]
    call_id: Short
    name: Short
    arguments: str


class _Output(_Item):
    type: Literal["function_call_output"]
    call_id: Short
    output: _Texts


class _Reasoning(_Item):
    type: Literal["reasoning"]
    summary: _Texts = Field(default_factory=list)
    content: _Texts | None = None


class _Reference(_Item):
    refused: ClassVar = {
        "type": "this server keeps no answers: send the item, as clients do with store: false"
    }


def _name_kind(item: Any) -> str:
    """Return the kind of an item, which a message need not name."""
    kind = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return kind if isinstance(kind, str) else "message"


_AnyItem = Annotated[
    Annotated[_Message, Tag("message")]
    | Annotated[_Call, Tag("function_call")]
    | Annotated[_Output, Tag("function_call_output")]
    | Annotated[_Reasoning, Tag("reasoning")]
    | Annotated[_Reference, Tag("item_reference")],
    Discriminator(_name_kind),
]


class _Tool(Fields):
    ignored = frozenset({"defer_loading"})

    type: Literal["function"]
    name: Short
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Named(Fields):
    type: Literal["function"]
    name: Short


class _Format(Fields):
    type: Literal["text", "json_object", "json_schema"]
    name: Short | None = None
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class _Shape(Fields):
    ignored = frozenset({"verbosity"})

    format: _Format | None = None


class _Thinks(Fields):
    ignored = frozenset({"summary", "generate_summary", "context"})

    effort: Short | None = None


class _Asked(Fields):
    """A request for a response."""

    ignored = frozenset(
        {
            "metadata",
            "service_tier",
            "prompt_cache_retention",
            "prompt_cache_options",
            "max_tool_calls",
            "stream_options",
            # the answer says that nothing is stored
            "store",
        }
    )
    refused: ClassVar = {
        "previous_response_id": NO_STATE,
        "conversation": NO_STATE,
        "prompt": "this server keeps no prompts: send input",
        "background": "this server answers while the client waits",
        "context_management": NO_STATE,
        "moderation": "this server moderates nothing",
    }

    model: Short | None = None
    input: Annotated[
        list[_AnyItem],
        Field(min_length=1, fail_fast=True),
        BeforeValidator(_list_items),
    ]
    instructions: str | None = None
    include: list[Short] | None = None
    max_output_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: _Thinks | None = None
    stream: bool | None = None
    temperature: float | None = None
    text: _Shape | None = None
    tool_choice: Literal["auto", "none", "required"] | _Named | None = None
    tools: Annotated[list[_Tool], Field(fail_fast=True)] | None = None
    top_logprobs: int | None = None
    top_p: float | None = None
    truncation: Literal["disabled"] | None = None
    user: Short | None = None
    safety_identifier: Short | None = None
    prompt_cache_key: Short | None = None

    def translate(self) -> dict[str, Any]:
        """Return the request in the words of a chat."""
        same = (
            *("model", "stream", "temperature", "top_p", "parallel_tool_calls"),
            *("user", "safety_identifier", "prompt_cache_key"),
        )
        asked: dict[str, Any] = {key: getattr(self, key) for key in same}
        asked |= {
            "max_tokens": self.max_output_tokens,
            "reasoning_effort": self.reasoning and self.reasoning.effort,
            "messages": _translate_items(self.instructions, self.input),
            "top_logprobs": self.top_logprobs or None,
        }
        if self.top_logprobs or _LOGPROBS in (self.include or ()):
            asked["logprobs"] = True
        if self.tools:
            asked["tools"] = [_translate_tool(tool) for tool in self.tools]
            choice = self.tool_choice
            if isinstance(choice, _Named):
                asked["tool_choice"] = {"type": "function", "function": {"name": choice.name}}
            else:
                asked["tool_choice"] = choice
        form = self.text and self.text.format
        if form and form.type == "json_schema":
            schema = {"name": form.name, "schema": form.schema_, "strict": form.strict}
            asked["response_format"] = {"type": form.type, "json_schema": schema}
        elif form:
            asked["response_format"] = {"type": form.type}
        return {key: value for key, value in asked.items() if value is not None}


def _translate_items(instructions: str | None, items: Iterable[Any]) -> list[dict[str, Any]]:
    """Return items as messages: an assistant's thoughts, text and calls become one."""
    messages = list[dict[str, Any]]()
    if instructions:
        messages.append({"role": "system", "content": instructions})
    for item in items:
        if isinstance(item, _Output):
            output = join_texts(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": output})
            continue
        if isinstance(item, _Message):
            said: dict[str, Any] = {"role": item.role, "content": join_texts(item.content)}
        elif isinstance(item, _Call):
            call = make_call(item.call_id, item.name, item.arguments)
            said = {"role": "assistant", "tool_calls": [call]}
        else:
            assert isinstance(item, _Reasoning), "a reference is refused"
            thought = join_texts(item.content or item.summary)
            said = {"role": "assistant", **({"reasoning_content": thought} if thought else {})}
        last = messages[-1] if messages else {}
        if said["role"] == "assistant" == last.get("role") and _joins(last, said):
            calls = [*last.get("tool_calls", ()), *said.get("tool_calls", ())]
            last |= said | ({"tool_calls": calls} if calls else {})
        else:
            messages.append(said)
    for message in messages:
        if message["role"] == "assistant" and "tool_calls" not in message:
            message.setdefault("content", "")
    return messages


def _joins(last: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Return True if an assistant's item goes on with the message before it."""
    return not any(key in last for key in said.keys() & {"content", "reasoning_content"})


def _translate_tool(tool: _Tool) -> dict[str, Any]:
    function = tool.model_dump(exclude_none=True, exclude={"type"})
    return {"type": "function", "function": function}


class Responses(Translation):
    """A request for a response, and its answer."""

    def __init__(self, asked: CappedChat, said: _Asked) -> None:
        """Answer ``asked``, which ``said`` in its own words."""
        super().__init__(asked)
        self._said, self._parts, self._number = said, Parts(), 0
        self._id, self._created_s = make_id("resp_"), int(time.time())
        self._logprobs = list[dict[str, Any]]()

    @classmethod
    def read(cls, body: bytes) -> "Responses":
        """Read a request; raises ApiError."""
        said = parse_request(_Asked, body)
        return cls(parse_request(CappedChat, said.translate()), said)

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the response when it has ended."""
        (choice,) = answer.whole()["choices"]
        self._logprobs = (choice["logprobs"] or {}).get("content") or []
        for _ in self._parts.feed(choice["message"]):
            pass
        return self._describe(answer, choice["finish_reason"])

    def opening(self, answer: Answer) -> str:
        """Return the events that begin a stream."""
        kinds = ("response.created", "response.in_progress")
        response = self._describe(answer, None)
        return "".join(self._write(kind, response=response) for kind in kinds)

    def chunk(self, answer: Answer, index: int, added: Added) -> str:
        """Return the events of a token."""
        (choice,) = answer.chunk(index, added)["choices"]
        logprobs = (choice["logprobs"] or {}).get("content") or []
        self._logprobs += logprobs
        steps = self._parts.feed(choice["delta"])
        return "".join(text for step in steps for text in self._write_step(step, logprobs))

    def closing(self, answer: Answer) -> str:
        """Return the events that end a stream."""
        steps = self._parts.close()
        ended = "".join(text for step in steps for text in self._write_step(step, []))
        response = self._describe(answer, answer.choices[0].reason)
        return ended + self._write(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> str:
        """Return the event of an error."""
        said = error.payload["error"]
        return self._write(
            "error", code=said["code"] or said["type"], message=said["message"], param=said["param"]
        )

    def _write(self, kind: str, **fields: Any) -> str:
        number, self._number = self._number, self._number + 1
        return write_event({"type": kind, "sequence_number": number, **fields})

    def _write_step(self, step: Step, logprobs: list[dict[str, Any]]) -> Iterator[str]:
        part, verb = step.part, step.verb
        status = {"close": "completed"}.get(verb, "in_progress")
        item = _write_item(part, status, self._logprobs)
        within = {"item_id": item["id"], "output_index": part.index}
        if part.kind == "call":
            if verb == "add":
                kind = "response.function_call_arguments"
                yield self._write(f"{kind}.delta", **within, delta=step.piece)
                yield self._write(f"{kind}.done", **within, name=part.name, arguments=part.text)
                return
            yield self._write(_ITEM[verb], output_index=part.index, item=item)
            return
        is_text = part.kind == "text"
        kind = f"response.{'output' if is_text else 'reasoning'}_text"
        within["content_index"] = 0
        shown = {"logprobs": logprobs} if is_text else {}
        if verb == "open":
            empty = {**item, "content": []}
            yield self._write(_ITEM[verb], output_index=part.index, item=empty)
            begun = {**item["content"][0], "text": ""}
            yield self._write("response.content_part.added", **within, part=begun)
        elif verb == "add":
            yield self._write(f"{kind}.delta", **within, delta=step.piece, **shown)
        else:
            shown = {"logprobs": self._logprobs} if is_text else {}
            yield self._write(f"{kind}.done", **within, text=part.text, **shown)
            yield self._write("response.content_part.done", **within, part=item["content"][0])
            yield self._write(_ITEM[verb], output_index=part.index, item=item)

    def _describe(self, answer: Answer, reason: str | None) -> dict[str, Any]:
        said = self._said
        status = {None: "in_progress", "length": "incomplete"}.get(reason, "completed")
        why = {"reason": "max_output_tokens"} if status == "incomplete" else None
        tools = [tool.model_dump() for tool in said.tools or ()]
        choice = said.tool_choice or "auto"
        output = []
        if reason is not None:
            output = [_write_item(part, "completed", self._logprobs) for part in self._parts]
            if why and output:
                output[-1]["status"] = "incomplete"
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created_s,
            "status": status,
            "error": None,
            "incomplete_details": why,
            "instructions": said.instructions,
            "max_output_tokens": said.max_output_tokens,
            "metadata": {},
            "model": answer.model,
            "output": output,
            "parallel_tool_calls": said.parallel_tool_calls is not False,
            "previous_response_id": None,
            "reasoning": {"effort": said.reasoning and said.reasoning.effort, "summary": None},
            "store": False,
            "temperature": said.temperature,
            "text": {"format": _describe_format(said.text.format if said.text else None)},
            "tool_choice": choice if isinstance(choice, str) else choice.model_dump(),
            "tools": tools,
            "top_p": said.top_p,
            "truncation": "disabled",
            "usage": None if reason is None else _count(answer),
            "user": said.user,
        }


def _describe_format(form: _Format | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    return form.model_dump(by_alias=True, exclude_unset=True)


_ITEM = {"open": "response.output_item.added", "close": "response.output_item.done"}


def _write_item(part: Part, status: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    if part.kind == "call":
        return {
            "id": f"fc_{part.id}",
            "type": "function_call",
            "status": status,
            "call_id": part.id,
            "name": part.name,
            "arguments": part.text,
        }
    if part.kind == "thought":
        content = {"type": "reasoning_text", "text": part.text}
        item = {"id": f"rs_{part.id}", "type": "reasoning", "summary": [], "status": status}
        return {**item, "content": [content]}
    text = {"type": "output_text", "text": part.text, "annotations": [], "logprobs": logprobs}
    message = {"id": f"msg_{part.id}", "type": "message", "role": "assistant", "status": status}
    return {**message, "content": [text]}


def _count(answer: Answer) -> dict[str, Any]:
    (choice,) = answer.choices
    made = len(choice.made)
    return {
        "input_tokens": choice.num_prompt,
        "input_tokens_details": {
            "cached_tokens": choice.num_cached,
            "cache_write_tokens": 0,
        },
        "output_tokens": made,
        "output_tokens_details": {"reasoning_tokens": choice.num_thought},
        "total_tokens": choice.num_prompt + made,
    }
