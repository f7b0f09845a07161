"""Prompts as lines of JSON, and the file of results that grows by a line for each text that ends.

A line is written when its text ends, and not before. Whatever ends the process, a rerun finds what
was finished and goes on from there.
"""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from offplan.checkpoint.jsontext import quote, unique_keys
from offplan.cli.inputs import read_input
from offplan.cli.output import STANDARD, check_writable, print_note, writing
from offplan.errors import InputError, OffplanError
from offplan.serve.errors import ApiError
from offplan.serve.requests import ChatRequest, CompletionRequest, Request, parse_request


def open_locked(path: Path) -> IO[str]:
    """Open a file of ASCII to append to, or begin it, and lock it until it is closed.

    The lock is the system's, and ends with the process, however that ends. A file system without
    locks is told of on stderr, and the file is opened all the same.

    Raises InputError if another process has locked the file, and OSError.
    """
    file = path.open("a", encoding="ascii")
    try:
        _lock(file)
    except BlockingIOError:
        file.close()
        raise InputError(
            f"{path} is being written by another offplan run: wait until that ends, or name "
            "another file"
        ) from None
    except OSError as error:
        reason = os.strerror(error.errno or 0)
        print_note(f"{path} cannot be locked ({reason}): let no other run write it meanwhile")
    return file


def _lock(file: IO[str]) -> None:
    if sys.platform == "win32":
        import errno

        raise OSError(errno.ENOLCK, "no locks")
    import fcntl

    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


_BATCH_KEYS = {"custom_id", "method", "url", "body"}
"""Keys of a line of OpenAI's batch files."""
_OPTIONS = {"max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed", "stop"}
_OPTIONS |= {"min_p", "typical_p", "repetition_penalty", "presence_penalty", "frequency_penalty"}
_OPTIONS |= {"logit_bias", "min_tokens", "ignore_eos", "stop_token_ids"}
_OPTIONS |= {"logprobs", "top_logprobs", "tools", "tool_choice"}
"""Fields of OpenAI's API that a line may have beside its prompt."""
_KEYS = {"prompt", "messages", "id"} | _OPTIONS
_BEGINNING = b'{"line": '
"""Bytes that each line of results begins with."""
_SPARE_DEPTH = 50
"""Levels by which what stands around a line when it is read may differ from when it is written."""


@dataclass(frozen=True)
class Line:
    """A prompt of a file."""

    number: int
    """Its line, from 1 on."""
    record: Mapping[str, Any]
    """Fields of the line: ``prompt`` or ``messages``, fields of OpenAI's API, and ``id`` if it has
    one. A line of OpenAI's batch files has their fields."""
    request: Request
    """The line as a request of OpenAI's API, of one prompt."""

    @property
    def is_batch(self) -> bool:
        """True if it is a line of OpenAI's batch files, whose result is one, too."""
        return "body" in self.record

    @property
    def messages(self) -> Sequence[Mapping[str, Any]] | None:
        """Messages so far, as chat templates have them, if it is a chat."""
        if not isinstance(self.request, ChatRequest):
            return None
        return [message.for_template() for message in self.request.messages]

    @property
    def prompt(self) -> str:
        """The text to continue, where it is none."""
        assert isinstance(self.request, CompletionRequest), "chats have messages"
        return str(self.request.prompt[0])


def read_lines(path: Path) -> list[Line]:
    """Read a file of prompts, or standard input; empty lines are passed over.

    Raises InputError, which names the line, for one that is no prompt.
    """
    lines = []
    for number, text in enumerate(read_input(path, "file of prompts").split("\n"), start=1):
        if text.strip():
            where = f"{path}, line {number}"
            record = _read_json(text, where)
            lines.append(Line(number, record, _read_request(record, where)))
    if not lines:
        raise InputError(f'{path} has no prompts: write lines such as {{"prompt": "Once"}}')
    return lines


def _read_json(text: str, where: str) -> Any:
    try:
        record = json.loads(text, object_pairs_hook=unique_keys)
        written = record
        for _ in range(_SPARE_DEPTH):
            written = [written]
        json.dumps(written)  # what cannot be written as a result is told before one is made
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is no JSON ({error}): each line is one object") from None
    if halves := re.findall("[\ud800-\udfff]", json.dumps(record, ensure_ascii=False)):
        raise InputError(
            f"{where}: found {quote(halves[0])}, which is half of a character: write the character "
            "itself, or both of its halves"
        )
    return record


def _read_request(record: Any, where: str) -> Request:
    """Read what a line asks for, and refuse what offplan does not support."""
    if isinstance(record, dict) and "body" in record:
        body, kind = _open_batch(record, where)
    else:
        _check(record, where)
        body = {key: value for key, value in record.items() if key != "id"}
        kind = ChatRequest if "messages" in record else CompletionRequest
    try:
        request = parse_request(kind, body)
    except ApiError as error:
        raise InputError(f"{where}: {error.message}") from None
    if isinstance(request, CompletionRequest) and (
        len(request.prompt) > 1 or not isinstance(request.prompt[0], str)
    ):
        raise InputError(f"{where}: a line has one prompt, as a text")
    if request.stream:
        raise InputError(f"{where}: a file has no streams: leave stream out")
    if request.n > 1 or request.echoes:
        raise InputError(f"{where}: a line makes one text behind its prompt: leave n and echo out")
    if ignored := request.list_ignored():
        raise InputError(f"{where}: offplan reads no {quote(min(ignored))}: leave it out")
    return request


def _open_batch(record: Mapping[str, Any], where: str) -> tuple[Any, type[Request]]:
    """Return the body of a line of OpenAI's batch files, and the kind of its request."""
    if unknown := sorted(record.keys() - _BATCH_KEYS):
        raise InputError(
            f"{where}: offplan reads no {quote(unknown[0])}; a line with a body has custom_id, "
            "method and url beside the body"
        )
    kinds: dict[str, type[Request]] = {
        "/v1/chat/completions": ChatRequest,
        "/v1/completions": CompletionRequest,
    }
    found = record.get("method", "POST"), record.get("url")
    if found[0] != "POST" or not isinstance(found[1], str) or found[1] not in kinds:
        raise InputError(
            f"{where}: found {quote(found[0])} {quote(found[1])}, expected POST with one of "
            f"{', '.join(kinds)}"
        )
    return record["body"], kinds[found[1]]


def _check(record: Any, where: str) -> None:
    """Refuse a line of offplan's own that has no prompt, and keys that it does not know."""
    if not isinstance(record, dict) or ("prompt" in record) == ("messages" in record):
        raise InputError(f"{where}: expected an object with either prompt or messages")
    if unknown := sorted(record.keys() - _KEYS):
        raise InputError(
            f"{where}: offplan reads no {quote(unknown[0])}; a line has prompt or messages, an "
            f"id, and these fields of OpenAI's: {', '.join(sorted(_OPTIONS))}"
        )
    if not isinstance(record.get("prompt", ""), str):
        raise InputError(f"{where}: prompt should be a text")
    messages = record.get("messages", [{"role": "user", "content": ""}])
    if not (isinstance(messages, list) and messages and all(map(_is_message, messages))):
        raise InputError(f"{where}: messages should be objects with a role and a content")


def _is_message(message: Any) -> bool:
    return isinstance(message, dict) and {"content", "tool_calls"} & message.keys() != set()


class Results:
    """The results of a file of prompts, a line each: a file that reruns go on with, or stdout."""

    def __init__(self, path: Path, lines: Sequence[Line], settings: str, *, force: bool) -> None:
        """Go on with the file ``path``, or begin it; ``force`` begins it anew.

        No other process can until the results are closed. ``settings`` stands for all that the
        texts depend on beside their prompts. Raises InputError if another run writes the file,
        if there is another file, or results of other prompts or settings.
        """
        self.done: set[int] = set()
        """Lines whose results are there."""
        self.path = path
        """The file; STANDARD for standard output."""
        self._num_lines, self._settings = len(lines), settings
        self._file: IO[str] | None = None
        if path == STANDARD:
            return
        check_writable(path, force=True)
        # before it is read: what another run adds behind our back would be made a second time
        with writing(path):
            file = open_locked(path)
        try:
            whole = 0 if force else self._read(path, {line.number: line for line in lines})
            file.truncate(whole)  # a line that was being written when the process ended
        except BaseException:
            file.close()
            raise
        self._file = file

    def _read(self, path: Path, lines: Mapping[int, Line]) -> int:
        """Note what is done; return the bytes of the file's whole lines."""
        *texts, part = path.read_bytes().split(b"\n")
        num_doubled = 0
        for number, text in enumerate(texts, start=1):
            where = f"{path}, line {number}"
            try:
                found = json.loads(text)
                line, settings = lines.get(found["line"]), found["settings"]
            except (ValueError, TypeError, KeyError, RecursionError):
                raise InputError(
                    f"{where} is no result of offplan run: name another file, or replace it with "
                    "--force"
                ) from None
            is_of_line = line is not None and line.record.items() <= found.items()
            if line is None or not is_of_line or settings != self._settings:
                raise InputError(
                    f"{where} is the result of another prompt, model or option: name another file, "
                    "or replace it with --force"
                )
            num_doubled += line.number in self.done
            self.done.add(line.number)
        if num_doubled:
            print_note(
                f"{path}: found {num_doubled:,} more results than one a prompt, expected none (two "
                "runs may have written the file); they stay: take them out, or name --force"
            )
        if not texts and part[: len(_BEGINNING)] != _BEGINNING[: len(part)]:
            raise InputError(
                f"{path} is no result of offplan run: name another file, or replace it with --force"
            )
        return path.stat().st_size - len(part)

    def write(self, line: Line, result: Mapping[str, Any]) -> None:
        """Add a line's result, at once."""
        record = {"line": line.number, **line.record, **result, "settings": self._settings}
        with writing(self.path) if self._file is not None else nullcontext():
            print(json.dumps(record), file=self._file, flush=True)
        self.done.add(line.number)

    def __enter__(self) -> "Results":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is None:
            return
        try:
            with writing(self.path):
                self._file.close()
        except OffplanError:  # after a write that failed, closing fails once more
            if kind is None:
                raise
        if kind is not None:
            print_note(
                f"{len(self.done)} of {self._num_lines} texts are in {self.path}; the same "
                "command goes on from there"
            )
