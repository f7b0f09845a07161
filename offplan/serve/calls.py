"""The calls of tools in a text, told from what the model says beside them."""

import json
import secrets
from typing import Any

from offplan.transformers_private import REASONING, ResponseParser

SAID = {"content": "content"} | dict.fromkeys(REASONING, "reasoning_content")
"""Fields of a template that are text, each with the message's field that it becomes."""


class CallParser:
    """Takes a chat's answer apart as it comes: into what is said, thought and called.

    A call whose arguments cannot be read is left in the text.
    """

    def __init__(self, template: Any, prompt: str, tools: list[dict[str, Any]]) -> None:
        """Parse by a response ``template`` what follows ``prompt``, which shows ``tools``."""
        self._parser: Any = ResponseParser(template, prefix=prompt, tools=tools)
        self._body = ""
        """Text so far of the call that is being made."""
        self.num_calls = 0

    def feed(self, piece: str, *, is_last: bool) -> dict[str, Any]:
        """Return what a piece of text adds to a message's fields, as a stream's delta has it."""
        delta: dict[str, Any] = {}
        if self._parser is None:
            return {"content": piece} if piece else {}
        try:
            events = self._parser.feed(piece)
            if is_last:
                events += self._parser.finalize()[1]
        except ValueError:
            self._parser = None
            return {"content": self._body + piece}
        for event in events:
            field, kind = event["field"], event["type"]
            if field in SAID and kind == "region_chunk":
                said = SAID[field]
                delta[said] = delta.get(said, "") + event["text"]
            elif field == "tool_calls" and kind == "region_chunk":
                self._body += event["text"]
            elif field == "tool_calls" and kind == "region_close":
                self._close(event["value"], delta)
        return delta

    def _close(self, value: Any, delta: dict[str, Any]) -> None:
        body, self._body = self._body, ""
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            delta["content"] = delta.get("content", "") + body
            return
        arguments = function.get("arguments")
        call = {
            "index": self.num_calls,
            "id": f"call_{secrets.token_hex(12)}",
            "type": "function",
            "function": {
                "name": name,
                "arguments": arguments
                if isinstance(arguments, str)
                else json.dumps(arguments if arguments is not None else {}, ensure_ascii=False),
            },
        }
        self.num_calls += 1
        delta.setdefault("tool_calls", []).append(call)
