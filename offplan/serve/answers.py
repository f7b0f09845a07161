"""The answers of OpenAI's API: whole ones, and the chunks of a stream.

Source: the reference of OpenAI's API, "The chat completion object" and "The completion object".
"""

import json
import re
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from offplan.runtime.joined import Added, Scored
from offplan.serve.requests import ChatRequest, Request
from offplan.transformers_private import REASONING, ResponseParser

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


class TokenNames:
    """Names tokens of a tokenizer, as answers with logprobs do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def find_bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be part of a character; none for an unknown token.

        Source: the byte-level alphabet of GPT-2's tokenizer, and SentencePiece's byte fallback.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""
        if found := _BYTE.match(piece):
            return bytes([int(found[1], 16)])
        if self._alphabet and all(letter in self._alphabet for letter in piece):
            return bytes(self._alphabet[letter] for letter in piece)
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def name(self, token: int) -> str:
        """Return a token's text; bytes that are no whole character are written as ``\\xe2``."""
        return self.find_bytes(token).decode(errors="backslashreplace")

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Which byte each letter stands for; empty for a tokenizer that has no such letters."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if "ByteLevel" not in repr(getattr(backend, "decoder", None)):
            return {}
        from offplan.transformers_private import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}


SAID = {"content": "content"} | dict.fromkeys(REASONING, "reasoning_content")
"""Fields of a template that are text, each with the message's field that it becomes."""

_MOST_TAIL = 128
"""Characters at the end of an answer in which its last call ends."""

_UNREADABLE = (ValueError, KeyError, TypeError, AttributeError)
"""Errors of a call that may hold anything, and that the transform looks into."""


class CallParser:
    """Takes a chat's answer apart as it comes: into what is said, thought and called.

    A call whose arguments cannot be read is left in the text. Space around thoughts is left out.
    """

    def __init__(
        self,
        template: Any,
        prompt: str,
        tools: list[dict[str, Any]],
        *,
        has_short_ids: bool = False,
    ) -> None:
        """Parse by a response ``template`` what follows ``prompt``, which shows ``tools``.

        Without tools calls stay in the text. ``has_short_ids`` gives calls identifiers of nine
        letters and digits.
        """
        if not tools:
            fields = {name: template.fields[name] for name in template.fields.keys() & SAID.keys()}
            template = replace(template, fields=fields)
        # of a prompt without the anchor the parser would read all that was said before
        prefix = prompt if template.start_anchor_re.search(prompt) else ""
        self._parser: Any = ResponseParser(template, prefix=prefix, tools=tools)
        self._has_short_ids = has_short_ids
        calls = template.fields.get("tool_calls")
        self._opens = calls and calls.open_re
        is_json = calls is None or calls.content == "json"
        self._closes = None if is_json else calls.close_re
        """Pattern that ends a call whose arguments do not tell whether they are whole."""
        self._body = self._tail = ""
        """Text so far of the call that is being made, and the last of the answer."""
        self._space: str | None = None
        """Space at the end of thoughts so far; None before the first thought."""
        self._is_behind = False
        """True behind thoughts, until something is said."""
        self.num_calls = 0

    @property
    def is_thinking(self) -> bool:
        """True from the first thought on, until something else is said or called."""
        return self._space is not None and not self._body and not self.num_calls

    def feed(self, piece: str, *, is_last: bool) -> dict[str, Any]:
        """Return what a piece of text adds to a message's fields, as a stream's delta has it."""
        delta: dict[str, Any] = {}
        if self._parser is None:
            return {"content": piece} if piece else {}
        try:
            events = self._parser.feed(piece)
        except _UNREADABLE:
            self._parser = None
            return {"content": self._body + piece}
        is_readable = True
        try:
            events += self._finish(piece) if is_last else []
        except _UNREADABLE:
            is_readable = False
        self._tail = (self._tail + piece)[-_MOST_TAIL:]
        for event in events:
            field, kind = event["field"], event["type"]
            if field in SAID and kind == "region_chunk":
                said = SAID[field]
                if text := self._trim(said, event["text"]):
                    delta[said] = delta.get(said, "") + text
            elif field == "tool_calls" and kind == "region_chunk":
                self._body += event["text"]
            elif field == "tool_calls" and kind == "region_close":
                self._close(event["value"], delta)
        if not is_readable:  # the last call is cut off, those before it are whole
            delta["content"] = delta.get("content", "") + self._find_opening(piece) + self._body
        return delta

    def _find_opening(self, piece: str) -> str:
        """Return the mark before the call that is being made, where a piece has all of it."""
        end = len(piece) - len(self._body)
        found = self._opens.finditer(piece) if self._opens and self._body else ()
        return next((each[0] for each in found if each.end() == end), "")

    def _finish(self, piece: str) -> list[dict[str, Any]]:
        """Return the parser's last events; a call that is cut off becomes text."""
        events: list[dict[str, Any]] = self._parser.finalize()[1]
        if self._closes is not None and not self._closes.search(self._tail + piece):
            for event in events:
                if event["field"] == "tool_calls":
                    event |= {"value": None}
        return events

    def _trim(self, said: str, text: str) -> str:
        """Return a piece without space at the ends of thoughts, and in front of what follows."""
        if said == "content":
            if self._space is not None:
                self._space, self._is_behind = None, True
            if self._is_behind:
                text = text.lstrip()
                self._is_behind = not text
            return text
        text = text.lstrip() if self._space is None else self._space + text
        shown = text.rstrip()
        self._space = text[len(shown) :] if shown or self._space is not None else None
        return shown

    def _close(self, value: Any, delta: dict[str, Any]) -> None:
        body, self._body = self._body, ""
        calls = [self._read(each) for each in (value if isinstance(value, list) else [value])]
        if not all(calls):
            delta["content"] = delta.get("content", "") + body
            return
        for call in calls:
            delta.setdefault("tool_calls", []).append({"index": self.num_calls, **(call or {})})
            self.num_calls += 1

    def _read(self, value: Any) -> dict[str, Any] | None:
        """Return a call as the API has it; None for what is none."""
        function = value.get("function") if isinstance(value, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(function, dict) or not isinstance(name, str):
            return None
        arguments = function.get("arguments")
        if not isinstance(arguments, str):
            arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
        made = secrets.token_hex(5)[:9] if self._has_short_ids else f"call_{secrets.token_hex(12)}"
        return {
            "id": value.get("id") or made,
            "type": "function",
            "function": {"name": name.strip(), "arguments": arguments},
        }


@dataclass
class Choice:
    """The tokens of one text so far, and how it ended."""

    num_prompt: int
    """Tokens of its prompt."""
    num_read: int = 0
    """Tokens of its prompt that a pass read; the others were in the cache."""
    made: list[Added] = field(default_factory=list)
    finish: str | None = None
    makes_nothing: bool = False
    """True if its one token is not shown: the request asks for the prompt alone."""
    prompt: Sequence[int] = ()
    """Tokens of its prompt, where the answer begins with it."""
    echo: str | None = None
    """The prompt that the answer begins with; None if it does not."""
    calls: CallParser | None = None
    """The parser of tool calls; None leaves the text as it is."""
    offset: int = 0
    """Characters of the tokens whose logprobs a completion has told so far."""
    num_divided: int = 0
    """Tokens that ``calls`` has taken apart so far."""
    num_thought: int = 0
    """Tokens up to the end of its thoughts."""

    def divide(self, added: Added) -> dict[str, Any]:
        """Return what a token adds to a chat's message, behind those that are divided already."""
        if self.calls is None:
            return {"content": added.piece} if added.piece else {}
        while self.made[self.num_divided] is not added:  # tokens that say nothing are left out
            self.num_divided += 1
        self.num_divided += 1
        delta = self.calls.feed(added.piece, is_last=added.finish is not None)
        if self.calls.is_thinking:
            self.num_thought = self.num_divided
        return delta

    @property
    def num_cached(self) -> int:
        """Tokens of its prompt that no pass read."""
        return self.num_prompt - self.num_read

    @property
    def reason(self) -> str | None:
        """Why it ended, as the API has it; None while it goes on."""
        if self.finish and self.makes_nothing:
            return "length"
        return "tool_calls" if self.finish == "stop" and self._has_calls else self.finish

    @property
    def stop_string(self) -> str | None:
        """The string that ended it; None if none did."""
        return self.made[-1].text.ended_by if self.made else None

    @property
    def _has_calls(self) -> bool:
        return self.calls is not None and self.calls.num_calls > 0


class Answer:
    """Writes the answer to one request; a subclass knows each kind's objects."""

    kind: str
    chunk_kind: str
    prefix: str

    def __init__(
        self, request: Request, choices: Sequence[Choice], model: str, names: TokenNames
    ) -> None:
        """Answer ``request`` in the name of ``model``, with a choice for each of its texts."""
        self.request, self.choices, self._names = request, choices, names
        self.model = model
        self._head = {
            "id": self.prefix + secrets.token_hex(12),
            "created": int(time.time()),
            "model": model,
        }

    def whole(self) -> dict[str, Any]:
        """Return the answer when all texts have ended."""
        choices = [
            {
                "index": index,
                **self._tell_text(choice, "".join(each.piece for each in choice.made)),
                "logprobs": self._tell_logprobs(choice, choice.made),
                "finish_reason": choice.reason,
            }
            for index, choice in enumerate(self.choices)
        ]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    def chunk(self, index: int, added: Added) -> dict[str, Any]:
        """Return the chunk of what a token added to a choice; with its end, if it ended there."""
        choice = self.choices[index]
        told = {
            "index": index,
            **self._tell_piece(choice, added),
            "logprobs": self._tell_logprobs(choice, [added]),
            "finish_reason": choice.reason,
        }
        return self._chunk([told])

    def shows(self, index: int, added: Added) -> bool:
        """Return True if a stream has a chunk for a token."""
        choice = self.choices[index]
        begins = choice.echo is not None and choice.made[0] is added
        says = added.piece or added.scored or added.finish or begins
        return bool(says) or self.request.wants_usage_always

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that begin a stream."""
        return []

    def closing(self) -> list[dict[str, Any]]:
        """Return the chunks that end a stream."""
        return [{**self._chunk([]), "usage": self._usage()}] if self.request.wants_usage else []

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        usage: dict[str, Any] = {"usage": None} if self.request.wants_usage else {}
        if self.request.wants_usage_always:
            usage = {"usage": self._usage()}
        return {**self._head, "object": self.chunk_kind, "choices": choices, **usage}

    def _usage(self) -> dict[str, Any]:
        # the texts of one prompt count it once, as the first of them read it
        firsts = self.choices[:: self.request.n]
        prompt = sum(choice.num_prompt for choice in firsts)
        made = sum(len(choice.made) for choice in self.choices if not choice.makes_nothing)
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": made,
            "total_tokens": prompt + made,
            "prompt_tokens_details": {"cached_tokens": sum(each.num_cached for each in firsts)},
        }
        details = {}
        if thought := sum(choice.num_thought for choice in self.choices):
            details["reasoning_tokens"] = thought
        last = [choice.made[-1] for choice in self.choices if choice.made]
        if drafts := [each.drafts for each in last if each.drafts is not None]:
            details["accepted_prediction_tokens"] = sum(each.accepted for each in drafts)
            details["rejected_prediction_tokens"] = sum(each.rejected for each in drafts)
        return usage | ({"completion_tokens_details": details} if details else {})

    def _tell_text(self, choice: Choice, text: str) -> dict[str, Any]:
        raise NotImplementedError

    def _tell_piece(self, choice: Choice, added: Added) -> dict[str, Any]:
        raise NotImplementedError

    def _tell_logprobs(self, choice: Choice, made: Sequence[Added]) -> dict[str, Any] | None:
        raise NotImplementedError

    def _scored(self, made: Sequence[Added]) -> list[Added]:
        """Return the tokens that have logprobs, without the one that ends a text by itself."""
        return [
            each
            for each in made
            if each.scored is not None and each.token not in each.text.rules.end_tokens
        ]


class ChatAnswer(Answer):
    """The answer to a chat."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

    def opening(self) -> list[dict[str, Any]]:
        """Return the chunks that say who speaks, one for each choice."""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return [
            self._chunk([{"index": index, "delta": delta, "logprobs": None, "finish_reason": None}])
            for index in range(len(self.choices))
        ]

    def _tell_text(self, choice: Choice, text: str) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if choice.calls is not None:
            parts: dict[str, Any] = {}
            for added in choice.made:
                for key, value in choice.divide(added).items():
                    parts[key] = parts[key] + value if key in parts else value
            for call in parts.get("tool_calls", ()):
                del call["index"]  # a stream's alone
            # beside calls the space between them is nothing that was said
            said = parts.get("content", "")
            said = said.strip() or None if "tool_calls" in parts else said
            message |= {**parts, "content": said}
        return {"message": message}

    def _tell_piece(self, choice: Choice, added: Added) -> dict[str, Any]:
        return {"delta": choice.divide(added)}

    def _tell_logprobs(self, choice: Choice, made: Sequence[Added]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        content = []
        for each in self._scored(made):
            assert each.scored is not None, "others are left out"
            likeliest = [self._tell(other.token, other.logprob) for other in each.likeliest]
            told = self._tell(each.scored.token, each.scored.logprob)
            content.append({**told, "top_logprobs": likeliest})
        return {"content": content, "refusal": None}

    def _tell(self, token: int, logprob: float) -> dict[str, Any]:
        return {
            "token": self._names.name(token),
            "logprob": logprob,
            "bytes": [*self._names.find_bytes(token)],
        }


class CompletionAnswer(Answer):
    """The answer to a request for what follows texts."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def _tell_text(self, choice: Choice, text: str) -> dict[str, Any]:
        return {"text": (choice.echo or "") + ("" if choice.makes_nothing else text)}

    def _tell_piece(self, choice: Choice, added: Added) -> dict[str, Any]:
        if choice.made[0] is added:
            return self._tell_text(choice, added.piece)
        return {"text": "" if choice.makes_nothing else added.piece}

    def _tell_logprobs(self, choice: Choice, made: Sequence[Added]) -> dict[str, Any] | None:
        if self.request.num_logprobs is None:
            return None
        offset = choice.offset
        told: dict[str, list[Any]] = {
            key: [] for key in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        }
        for token, logprob, likeliest in self._list_entries(choice, made):
            name = self._names.name(token)
            told["tokens"].append(name)
            told["token_logprobs"].append(logprob)
            told["text_offset"].append(offset)
            told["top_logprobs"].append(
                None
                if likeliest is None
                else {self._names.name(other.token): other.logprob for other in likeliest}
            )
            offset += len(name)
        choice.offset = offset
        return told

    def _list_entries(
        self, choice: Choice, made: Sequence[Added]
    ) -> list[tuple[int, float | None, Sequence[Scored] | None]]:
        """List tokens with their logprobs and the likeliest: of the prompt, if shown, and made."""
        entries: list[tuple[int, float | None, Sequence[Scored] | None]] = []
        if choice.echo is None:
            shown = self._scored(made)
        else:
            # all of them, so that clients find each token by its place
            shown = [] if choice.makes_nothing else [each for each in made if each.scored]
            if made and made[0] is choice.made[0]:
                entries.append((choice.prompt[0], None, None))
                for scored, *likeliest in made[0].prompt_scores:
                    entries.append((scored.token, scored.logprob, likeliest))
        for each in shown:
            assert each.scored is not None, "others are left out"
            entries.append((each.token, each.scored.logprob, each.likeliest))
        return entries


def make_answer(
    request: Request, choices: Sequence[Choice], model: str, names: TokenNames
) -> Answer:
    """Return what writes the answer to a request of either kind."""
    kind = ChatAnswer if isinstance(request, ChatRequest) else CompletionAnswer
    return kind(request, choices, model, names)
