"""What a chat template shows: tools, calls of tools, and variables that requests may set."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from offplan.checkpoint.model import Model
from offplan.errors import InputError
from offplan.runtime.prompts import render_chat
from offplan.runtime.rendering import Renderer
from offplan.serve.errors import ApiError
from offplan.serve.formats import read_chat_template
from offplan.serve.requests import ChatRequest

_TOOL, _CALLED, _RESULT = "offplan_tool", "offplan_called", "offplan_result"
"""Names that no chat template has."""
_CHAT: Sequence[Mapping[str, Any]] = (
    {"role": "user", "content": "a"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": "123456789",
                "type": "function",
                "function": {"name": _CALLED, "arguments": {"a": "b"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "123456789", "name": _CALLED, "content": _RESULT},
)
_TOOLS: Sequence[Mapping[str, Any]] = (
    {
        "type": "function",
        "function": {
            "name": _TOOL,
            "description": "",
            "parameters": {"type": "object", "properties": {}, "required": []},
        },
    },
)
_THINKS = ("enable_thinking", "thinking")
"""Variables by which chat templates have a model think or not."""
_RESERVED = frozenset(
    {"messages", "tools", "documents", "chat_template", "add_generation_prompt", "tokenize"}
)


@dataclass(frozen=True)
class Showing:
    """The chat template of a model, asked what it shows."""

    model: Model
    tokenizer: Any
    renderer: Renderer

    @property
    def template(self) -> str:
        """The chat template; empty if the model has none."""
        return read_chat_template(self.tokenizer)

    @cached_property
    def lacks(self) -> tuple[str, ...]:
        """What the template leaves out of a chat without a word, as requests have it.

        A template that refuses a chat says so itself, each time.
        """
        said = self._render(_CHAT[:1], _TOOLS)
        lacks = ["tools"] if said is not None and _TOOL not in said else []
        said = self._render(_CHAT, _TOOLS)
        if said is not None and _CALLED not in said:
            lacks.append("tool_calls")
        if said is not None and _RESULT not in said:
            lacks.append("messages of the role tool")
        return tuple(lacks)

    @property
    def has_tools(self) -> bool:
        """True if requests may have tools."""
        return bool(self.template) and "tools" not in self.lacks

    @property
    def thinks(self) -> bool:
        """True if the template has thoughts."""
        return any(mark in self.template for mark in ("think>", "[THINK]", "<|channel|>"))

    def check(self, request: ChatRequest) -> None:
        """Raise ApiError with 400 for what the template would leave out."""
        has = {
            "tools": request.shown_tools is not None,
            "tool_calls": any(message.tool_calls for message in request.messages),
            "messages of the role tool": any(each.role == "tool" for each in request.messages),
        }
        asked = [name for name, is_there in has.items() if is_there]
        lacking = [name for name in asked if name in self.lacks]
        if lacking:
            raise ApiError(
                400,
                f"the model's chat template does not show {' and '.join(lacking)}, so the model "
                "would not see them: leave them out, or give the model's folder another "
                "chat_template.jinja",
                param=lacking[0].split()[0],
            )

    def render(self, request: ChatRequest) -> str:
        """Return a chat as the template has it, by the variables that the request sets.

        Raises ApiError with 400 for what the template would leave out, and InputError for what it
        does not take.
        """
        variables, messages = self.list_variables(request), self.write(request)
        self.check(request)
        return render_chat(
            self.model, self.tokenizer, self.renderer, messages, request.shown_tools, variables
        )

    def list_variables(self, request: ChatRequest) -> dict[str, Any]:
        """Return the variables that a request sets in the template; raises ApiError with 400.

        A variable that the template does not have would change nothing. A model that always thinks
        may be asked to, and one that never does may be asked not to.
        """
        variables = dict(request.chat_template_kwargs or {})
        thinks = next((name for name in _THINKS if self._has(name)), None)
        if "enable_thinking" in variables and not self._has("enable_thinking"):
            value = variables.pop("enable_thinking")
            if thinks:
                variables[thinks] = value
            elif bool(value) != self.thinks:
                raise self._refuse("chat_template_kwargs", "enable_thinking")
        for name in variables:
            if name in _RESERVED or not self._has(name):
                raise self._refuse("chat_template_kwargs", name)
        effort = request.reasoning_effort
        if effort is None:
            return variables
        if self._has("reasoning_effort"):
            variables.setdefault("reasoning_effort", effort)
        elif thinks:
            variables.setdefault(thinks, effort != "none")
        elif effort != "none" or self.thinks:
            raise self._refuse("reasoning_effort", "reasoning_effort")
        return variables

    def write(self, request: ChatRequest) -> list[dict[str, Any]]:
        """Return the messages as the template knows them."""
        messages = [message.for_template() for message in request.messages]
        for message in messages:
            if message["role"] == "developer" and not self._has("developer"):
                message["role"] = "system"
            thought = message.get("reasoning_content")
            if thought is not None and not self._has("reasoning_content") and self._has("thinking"):
                del message["reasoning_content"]
                # gpt-oss' refuses calls with both
                if not (message["content"] and message.get("tool_calls")):
                    message["thinking"] = thought
        return messages

    def _has(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self.template) is not None

    def _refuse(self, field: str, name: str) -> ApiError:
        return ApiError(
            400, f"{field}: the model's chat template has no variable {name[:64]!r}", param=field
        )

    def _render(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
    ) -> str | None:
        try:
            return render_chat(self.model, self.tokenizer, self.renderer, messages, tools)
        except InputError:
            return None
