"""Chat templates, rendered in a process of its own, with a limit of time and memory.

A template is a program that came with a model. It may loop, or ask for all memory, in calls that no
signal of Python interrupts: what can be ended for certain is a process.
"""

import json
import subprocess
import sys
import weakref
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from offplan.checkpoint.jsontext import describe
from offplan.errors import OffplanError

MOST_S = 10
"""Seconds that a template may take for a chat; those of published models take milliseconds."""
MOST_BYTES = 2**29
"""Bytes of memory that a template may take beyond what the process begins with."""
_START_S = 60
"""Seconds in which the process must be ready: it imports transformers, which takes one."""
_MOST_GROWTH = 4
_MOST_FRAME = 2**20
"""Characters of a text: so many times those of the chat as JSON, and so many more. A longer text
would keep the tokenizer busy for long, and no context holds it."""
_CODE = (
    "import sys; sys.path[:] = sys.argv[2:]; "
    "from offplan.runtime.rendering import answer; answer(int(sys.argv[1]))"
)
"""The process imports what this one would, whatever stands in the folder that it starts in."""


class TemplateError(Exception):
    """The reason that a template gives no text, as what is said of the template."""


class Renderer:
    """Renders chat templates as transformers does; one thread may use it.

    Its process starts with the first chat, or by ``start``, and anew after one that was ended. It
    ends when the renderer is no longer used, and when this process ends, in whatever way.
    """

    def __init__(self) -> None:
        """Render, once asked."""
        self._process: _Process | None = None

    def start(self) -> None:
        """Have the process start unless there is one, and do not wait for it."""
        if self._process is None or self._process.has_ended:
            self._process = _Process()

    def render(
        self,
        tokenizer: Any,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the text of a chat by a tokenizer's template; the answer is to follow.

        ``variables`` are the template's own.
        Raises TemplateError if the template fails or exceeds a limit, and OffplanError if
        there is no process to render it. Whatever else is raised meanwhile ends the process.
        """
        try:
            asked = {
                "template": tokenizer.get_chat_template(tools=tools),
                "messages": [*map(dict, messages)],
                "tools": None if tools is None else [*tools],
                "variables": {**(variables or {}), **tokenizer.special_tokens_map},
            }
            question = json.dumps(asked).encode()
        except Exception as error:  # a tokenizer's files may hold anything
            raise _refuse(describe(error)) from None
        self.start()
        assert self._process is not None, "it has just been started"
        try:
            answer = self._process.ask(question)
        except BaseException:
            self._process.end()
            self._process = None
            raise
        if "text" not in answer:
            raise TemplateError(answer["refused"])
        return str(answer["text"])


class _Process:
    """The process that renders."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        with theirs:
            self._child = subprocess.Popen(
                [sys.executable, "-I", "-c", _CODE, str(theirs.fileno()), *sys.path],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # a Ctrl-C is for this process, which ends that one
            )
        self._is_ready = False
        self.end = weakref.finalize(self, _end, self._child, self._connection)

    @property
    def has_ended(self) -> bool:
        """True if something else has ended it, as a system does that is short of memory."""
        return self._child.poll() is not None

    def ask(self, question: bytes) -> dict[str, Any]:
        """Have a question answered within the limits; raises TemplateError and OffplanError."""
        try:
            if not self._is_ready:
                begun = json.loads(self._receive(_START_S))
                if "error" in begun:
                    raise OffplanError(f"chat templates cannot be rendered: {begun['error']}")
                self._is_ready = True
            self._connection.send_bytes(question)
            answer: dict[str, Any] = json.loads(self._receive(MOST_S))
            return answer
        except TimeoutError:
            if self._is_ready:
                raise TemplateError(f"takes more than {MOST_S} s for the messages") from None
            why = f"did not start within {_START_S} s"
        except (EOFError, OSError):
            if self._is_ready:
                why = f"ended the process that rendered it (exit code {self._child.wait()})"
                raise TemplateError(why) from None
            why = f"ended before it had begun (exit code {self._child.wait()})"
        raise OffplanError(
            f"the process that renders chat templates {why}: is there memory for one more?"
        )

    def _receive(self, most_s: float) -> bytes:
        if not self._connection.poll(most_s):
            raise TimeoutError
        return self._connection.recv_bytes()


def _end(child: "subprocess.Popen[bytes]", connection: Connection) -> None:
    connection.close()
    child.kill()
    child.wait()


def answer(descriptor: int) -> None:
    """Be the process that renders: answer what comes by a connection until it is closed."""
    connection = Connection(descriptor)
    try:
        # it imports no torch, and so is there in a second
        from transformers import PreTrainedTokenizerBase

        tokenizer = PreTrainedTokenizerBase()
        _limit_memory()
    except BaseException as error:
        connection.send_bytes(json.dumps({"error": describe(error)}).encode())
        raise
    connection.send_bytes(b"{}")
    while True:
        try:
            question = connection.recv_bytes()
        except EOFError:
            return
        _limit_time()
        connection.send_bytes(_answer(tokenizer, question))


def _answer(tokenizer: Any, question: bytes) -> bytes:
    """Render what a question asks for, in JSON as the question is."""
    try:
        asked = json.loads(question)
        text = tokenizer.apply_chat_template(
            asked["messages"],
            tools=asked["tools"],
            chat_template=asked["template"],
            tokenize=False,
            add_generation_prompt=True,
            **asked["variables"],
        )
        most = _MOST_GROWTH * len(question) + _MOST_FRAME
        if len(text) > most:
            raise TemplateError(f"makes {len(text)} characters of the messages, more than {most}")
        return json.dumps({"text": text}).encode()
    except MemoryError:
        why = f"takes more than {MOST_BYTES >> 20} MiB of memory for the messages"
    except TemplateError as error:
        why = str(error)
    except Exception as error:  # a template is a program of its own
        why = str(_refuse(describe(error)))
    return json.dumps({"refused": why}).encode()


def _refuse(why: str) -> TemplateError:
    return TemplateError(f"does not take the messages: {why}")


def _limit_memory() -> None:
    """Have the process take so much memory beyond what it has; Linux alone says what that is."""
    import resource

    proc = Path("/proc/self/statm")
    if not proc.exists():
        return
    taken = int(proc.read_text().split()[0]) * resource.getpagesize()
    _lower(resource.RLIMIT_AS, taken + MOST_BYTES)


def _limit_time() -> None:
    """Have the system end the process by itself, should there be no other any more to do it."""
    import resource

    used = resource.getrusage(resource.RUSAGE_SELF)
    _lower(resource.RLIMIT_CPU, int(used.ru_utime + used.ru_stime) + MOST_S + 2)


def _lower(limit: int, value: int) -> None:
    import resource

    hard = resource.getrlimit(limit)[1]
    resource.setrlimit(limit, (value if hard == resource.RLIM_INFINITY else min(value, hard), hard))
