"""A server in the test's own process, behind a real socket."""

import contextlib
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import openai
import torch
from safetensors.torch import load_file, save_file

from offplan.checkpoint.model import Model
from offplan.plan import load_plan
from offplan.runtime.joined import JoinedTexts
from offplan.runtime.rendering import Renderer
from offplan.runtime.rows import Joined
from offplan.runtime.rules import TokenRules
from offplan.serve.app import Service, make_app
from offplan.serve.guard import Guard
from offplan.serve.metrics import Metrics
from offplan.serve.reading import Reader
from offplan.serve.serving import Serving, listen
from offplan.serve.worker import Worker
from tests.cli import ROOT

NAME = "tiny"
END = 256
"""The token that ends texts of the tiny checkpoint; each other one is a byte."""
NAN = -1
CONTEXT = 256
TEMPLATE = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }}){% endfor %}{% endfor %}"
)
"""A chat is what was said and called, behind the names of tools."""
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "%s"}}\n</tool_call>'
WEIGHTS = (
    "Weights that do not fit the GPU wait in host memory and cross the link before their layer."
)
REST = WEIGHTS.removeprefix("Weights")
"""What the tiny checkpoint says behind ``Weights``."""
KEY = "sk-secret"
RENDERER = Renderer()
"""One for all servers of a test run: its process takes a second to start."""
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
TIMEOUT_S = 60.0
"""Seconds after which a test takes silence for a hang."""


def save_float32(source: Path, folder: Path) -> Path:
    """Copy a checkpoint with float32 weights, and a chat template."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            save_file({name: t.float() for name, t in load_file(path).items()}, folder / path.name)
        else:
            text = path.read_text().replace('"bfloat16"', '"float32"')
            (folder / path.name).write_text(text)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


class ScriptedRows:
    """Rows that make the tokens of a script, whatever they are asked, and then end the text."""

    make_drafter = None

    def __init__(self, script: Sequence[int], num_rows: int = 2) -> None:
        self.script, self.num_rows = [*script, END], num_rows
        self.session = SimpleNamespace(
            device=torch.device("cpu"),
            stream=contextlib.nullcontext,
            link_bytes=0,
            check=lambda: None,
            draft=None,
        )
        self._made: dict[int, int] = {}
        self.joined: list[list[int]] = []
        """The prompts so far."""
        self.faults: dict[int, Exception] = {}
        """What passes raise: the next one what 0 has, and so on."""
        self.gate = threading.Event()
        """Passes wait for it."""
        self.gate.set()

    @property
    def in_use(self) -> frozenset[int]:
        return frozenset(self._made)

    @property
    def num_free(self) -> int:
        return self.num_rows - len(self._made)

    def join_all(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[Hashable]
    ) -> list[Joined]:
        self._pass()
        self.joined += map(list, prompts)
        joined = []
        for prompt in prompts:
            row = min(set(range(self.num_rows)) - set(self._made))
            self._made[row] = 0
            joined.append(Joined(row, self._logits(row), len(prompt)))
        return joined

    def extend(self, rows: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        self._pass()
        logits = torch.zeros(self.num_rows, END + 1)
        for row in rows:
            self._made[row] += 1
            logits[row] = self._logits(row)
        return logits

    def find_nan(self, tokens: Sequence[int]) -> str:
        return f"layer 3 gave it behind {len(tokens)} tokens"

    def leave(self, row: int) -> None:
        del self._made[row]

    def _pass(self) -> None:
        assert self.gate.wait(TIMEOUT_S)
        fault = self.faults.pop(0, None)
        self.faults = {number - 1: each for number, each in self.faults.items()}
        if fault is not None:
            raise fault

    def _logits(self, row: int) -> torch.Tensor:
        """Logits that leave no doubt, or NaN where the script has ``NAN``."""
        token = self.script[min(self._made[row], len(self.script) - 1)]
        logits = torch.full((END + 1,), -100.0)
        logits[token] = float("nan") if token == NAN else 100.0
        return logits


def scripted_texts(rows: ScriptedRows) -> JoinedTexts:
    script: Any = rows
    return JoinedTexts(script)


class Answered(NamedTuple):
    status: int
    data: Any


class Served(NamedTuple):
    """A server that runs, and its parts."""

    port: int
    service: Service
    serving: Serving
    faults: list[BaseException]
    """What the server's log would have."""
    stack: contextlib.ExitStack
    """What is closed when the server ends."""

    def __repr__(self) -> str:
        return f"Served(port={self.port})"  # Hypothesis prints it

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    def client(self, **options: Any) -> Any:
        """OpenAI's client, which does not ask a second time; its overloads hide what is sent."""
        options = {"api_key": "none", "max_retries": 0, "timeout": TIMEOUT_S, **options}
        return self.stack.enter_context(openai.OpenAI(base_url=self.url, **options))

    def connect(self, begins: bytes = b"") -> socket.socket:
        """Connect, and begin a request."""
        found = socket.create_connection(("127.0.0.1", self.port), timeout=TIMEOUT_S)
        self.stack.enter_context(found)
        found.sendall(begins)
        return found

    def ask(
        self,
        path: str,
        body: Any = None,
        headers: Mapping[str, str] | None = None,
        method: str | None = None,
    ) -> Answered:
        """Send one request; bodies that are no bytes become JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        all_headers = {"Content-Type": "application/json", **(headers or {})}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        with contextlib.closing(connection):
            connection.request(
                method or ("GET" if body is None else "POST"), path, body, all_headers
            )
            response = connection.getresponse()
            text = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return Answered(
                response.status, json.loads(text) if is_json and text else text.decode()
            )


def wait_for(is_so: Callable[[], object]) -> None:
    """Wait until something is so, which takes as long as it takes."""
    deadline = time.monotonic() + TIMEOUT_S
    while not is_so():
        assert time.monotonic() < deadline, "it does not come"
        time.sleep(0.01)


def read(connection: socket.socket) -> bytes:
    """Read until the server closes a connection."""
    said = b""
    with contextlib.suppress(ConnectionResetError):
        while part := connection.recv(4096):
            said += part
    return said


@contextlib.contextmanager
def serving(
    texts: JoinedTexts,
    model: Model,
    tokenizer: Any,
    *,
    most_waiting: int = 64,
    most_of_client: int | None = None,
    shares_prefixes: bool = False,
    guard: Guard | None = None,
    origins: Sequence[str] = (),
    drain_s: float = TIMEOUT_S,
) -> Iterator[Served]:
    """Serve texts of a model on a free port, until the context is left."""
    faults: list[BaseException] = []
    guard = guard or Guard()
    metrics = Metrics(load_plan(ROOT / "plans" / "tiny-moe.yaml").prediction)
    rules = TokenRules(end_tokens=frozenset([END]))
    service = Service(
        name=NAME,
        created_s=0,
        reader=Reader.of(model, tokenizer, rules, CONTEXT, NAME, RENDERER),
        worker=Worker(
            texts,
            metrics,
            most_waiting=most_waiting,
            most_of_client=most_of_client,
            on_fault=faults.append,
        ),
        metrics=metrics,
        guard=guard,
        on_fault=faults.append,
        shares_prefixes=shares_prefixes,
    )
    is_ready = threading.Event()

    with Serving(
        listen("127.0.0.1", 0),
        max_connections=guard.max_connections,
        drain_s=drain_s,
        on_end=lambda what: None,
        leave=faults.append,
    ) as server:
        thread = threading.Thread(
            target=server.serve,
            args=[service, make_app(service, origins)],
            kwargs={"on_ready": is_ready.set},
        )
        thread.start()
        assert is_ready.wait(TIMEOUT_S)
        try:
            with contextlib.ExitStack() as stack:
                yield Served(server.port, service, server, faults, stack)
        finally:
            for _ in range(2):  # the second one does not wait for what a test left behind
                server.end()
            thread.join(TIMEOUT_S)
    assert not thread.is_alive(), "the server has ended"


def count_texts(served: Served) -> float:
    """Texts that are being continued, or wait for that."""
    metrics = served.service.metrics
    return float(metrics.running._value.get() + metrics.waiting._value.get())
