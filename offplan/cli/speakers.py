"""Who answers in ``offplan chat``: a session of this process, or a server of OpenAI's API."""

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import urlsplit

from offplan.errors import InputError, OffplanError
from offplan.units import format_seconds

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.runtime.joined import JoinedTexts
    from offplan.runtime.rendering import Renderer
    from offplan.runtime.rules import TokenRules
    from offplan.runtime.sampling import Sampling

Chat = Sequence[dict[str, str]]
_SILENCE_S = 600.0
"""Seconds without a byte after which a server counts as gone; offplan's own sends some sooner."""
_MOST_ERROR_BYTES = 2**16


class StoppedError(Exception):
    """The user has stopped an answer."""


class Thought(str):
    """A piece that a model thinks, and that is no part of its message."""

    __slots__ = ()


class Speaker(Protocol):
    """Answers chats, one at a time."""

    told: str
    """Figures of the last answer, for the user."""

    def answer(self, messages: Chat) -> Iterator[str]:
        """Yield the pieces of the next message, and thoughts, until it ends or is stopped.

        Raises InputError for a chat that cannot be answered, OffplanError, and StoppedError.
        """
        ...

    def stop(self) -> None:
        """Stop the answer that is being made; called by a signal's handler."""
        ...


class LocalSpeaker:
    """Answers by texts of a session, which goes on from what its cache holds."""

    def __init__(
        self,
        texts: "JoinedTexts",
        model: "Model",
        tokenizer: Any,
        rules: "TokenRules",
        context: int,
        num_tokens: int | None,
        sampling: "Sampling | None",
        renderer: "Renderer",
    ) -> None:
        """Answer by up to ``num_tokens`` tokens, or as many as the ``context`` has room for."""
        self._renderer = renderer
        self._texts, self._model, self._tokenizer, self._rules = texts, model, tokenizer, rules
        self._context, self._num_tokens, self._sampling = context, num_tokens, sampling
        self.told = ""
        self._is_stopped = self._is_reading = False

    def answer(self, messages: Chat) -> Iterator[str]:
        """Yield the pieces of the next message, until it ends or is stopped."""
        from time import perf_counter

        from offplan.runtime.joined import Added, Continued
        from offplan.runtime.prompts import read_chat
        from offplan.runtime.texts import Text

        self.told, self._is_reading = "", True
        try:
            tokens = read_chat(self._model, self._tokenizer, self._renderer, messages)
        finally:
            self._is_reading = False
        prompt: list[int] = tokens[0].tolist()
        room = self._context - len(prompt)
        if room < 1:
            raise InputError(
                f"the conversation has {len(prompt)} tokens and the plan's context is "
                f"{self._context}: /reset begins a new one"
            )
        num_tokens = min(self._num_tokens or room, room)
        text = Text(self._tokenizer, prompt, num_tokens=num_tokens, rules=self._rules)
        continued = Continued(text, self._sampling)
        self._is_stopped = False
        began = perf_counter()
        self._texts.join([continued])
        try:
            while len(self._texts) and not self._is_stopped:
                for _, added in self._texts.step():
                    if not isinstance(added, Added):
                        raise self._texts.explain_nan(continued)
                    yield added.piece
        finally:
            self._texts.leave(continued)
            took = format_seconds(perf_counter() - began)
            self.told = _tell(
                continued.num_read, len(prompt), text.num_made, took, is_cut=text.finish == "length"
            )

    def stop(self) -> None:
        """Stop before the next token, and the chat template at once."""
        if self._is_reading:
            raise StoppedError
        self._is_stopped = True


class RemoteSpeaker:
    """Answers by a server."""

    def __init__(self, url: str, api_key: str | None, name: str | None, options: Any) -> None:
        """Ask the server at ``url`` for the model ``name``, or for the first one that it has.

        ``options`` are fields of each request. Raises InputError for what is no address of a
        server, and OffplanError where none answers.
        """
        self._url = _read_url(url)
        self._api_key, self._options = api_key, options
        self._is_cut = False
        # a server that sends elsewhere would be given the key there
        self._opener = urllib.request.build_opener(_StaysHere)
        self.told = ""
        self.name = name or self._find_name()

    def answer(self, messages: Chat) -> Iterator[str]:
        """Yield the pieces of the next message, until it ends or is stopped."""
        asked = {
            "model": self.name,
            "messages": [*messages],
            "stream": True,
            "stream_options": {"include_usage": True},
            **self._options,
        }
        self.told, is_whole, self._is_cut = "", False, False
        with self._open("/chat/completions", json.dumps(asked).encode()) as response:
            for line in response:
                kind, _, data = line.decode("utf-8", "replace").strip().partition(":")
                if kind != "data":
                    continue
                if data.strip() == "[DONE]":
                    is_whole = True
                    break
                yield from self._read_chunk(data)
        if not is_whole:
            raise OffplanError("the server ended the answer early")

    def stop(self) -> None:
        """Stop by leaving: the server sees that nobody reads."""
        raise StoppedError

    def _read_chunk(self, data: str) -> Iterator[str]:
        chunk = _read_object(data)
        if "error" in chunk:
            raise OffplanError(f"the server says: {_find_message(chunk)}")
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            # the second is vLLM's and OpenRouter's name for the same
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            piece = delta.get("content")
            self._is_cut |= choice.get("finish_reason") == "length"
            if isinstance(thought, str):
                yield Thought(thought)
            if isinstance(piece, str):
                yield piece
        if isinstance(usage := chunk.get("usage"), dict):
            num_prompt = usage.get("prompt_tokens", 0)
            cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
            num_made = usage.get("completion_tokens", 0)
            self.told = _tell(num_prompt - cached, num_prompt, num_made, is_cut=self._is_cut)

    def _find_name(self) -> str:
        with self._open("/models") as response:
            models = _read_object(response.read().decode("utf-8", "replace")).get("data")
        if not isinstance(models, list) or not models or not isinstance(models[0].get("id"), str):
            raise OffplanError(f"{self._url} names no models: name one with --model")
        return str(models[0]["id"])

    def _open(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Content-Type": "application/json"}
        if self._api_key:
            headers["Authorization"] = f"Bearer {self._api_key}"
        request = urllib.request.Request(self._url + path, body, headers)
        try:
            return self._opener.open(request, timeout=_SILENCE_S)
        except urllib.error.HTTPError as error:
            with error:
                told = error.read(_MOST_ERROR_BYTES).decode("utf-8", "replace")
            try:
                message = _find_message(_read_object(told))
            except OffplanError:
                message = error.reason
            raise OffplanError(f"{self._url} answers {error.code}: {message}") from None
        except OSError as error:
            why = getattr(error, "reason", error)
            raise OffplanError(f"cannot reach {self._url} ({why}): is the server there?") from None


class _StaysHere(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **options: Any) -> None:
        """Follow no redirection."""


def _read_url(url: str) -> str:
    """Return where a server's paths begin: ``http://127.0.0.1:8000/v1``."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise InputError(f"--url {url}: expected an address such as http://127.0.0.1:8000/v1")
    return url.rstrip("/") if parts.path.strip("/") else f"{parts.scheme}://{parts.netloc}/v1"


def _read_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise OffplanError("the server's answer is none of OpenAI's API: is the address right?")
    return found


def _find_message(payload: dict[str, Any]) -> str:
    error = payload.get("error")
    return str(error.get("message") if isinstance(error, dict) else error)


def _tell(
    num_read: int, num_prompt: int, num_made: int, took: str = "", *, is_cut: bool = False
) -> str:
    within = f" in {took}" if took else ""
    cut = "; the answer was cut there: no more tokens were allowed or fit" if is_cut else ""
    return (
        f"read {num_read:,} of the prompt's {num_prompt:,} tokens, made {num_made:,}{within}{cut}"
    )
