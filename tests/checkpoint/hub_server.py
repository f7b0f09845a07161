"""A small Hub on 127.0.0.1: what huggingface_hub asks of the real one, and its bad days."""

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.warm import Warm

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REPO = "org/tiny"
PREFIX = f"/{REPO}/resolve/"
LISTS = f"/api/models/{REPO}"

_IMPORTED = """
import huggingface_hub.file_download
import offplan.held.held
huggingface_hub.get_session()
"""
"""What the processes begin with: above all what huggingface_hub imports of others."""
_CHILD = """
import json, os, resource, sys, time
# huggingface_hub reads the environment where it is imported
for name in [name for name in sys.modules if name.startswith("huggingface_hub")]:
    del sys.modules[name]
assert "offplan.checkpoint.answers" not in sys.modules
from offplan.checkpoint import answers, download, ranges
sleep = time.sleep
waits = [0]
def short_sleep(seconds):
    waits.append(seconds)
    sleep(min(seconds, 0.01))
time.sleep = short_sleep
from offplan.checkpoint.open import open_model
from offplan.checkpoint.weights import find_small_files, find_weights
from offplan.errors import OffplanError
from offplan.held.held import hold
ranges.RETRY_WAITS_S = (0.01, 0.01, 0.01)
ranges._PATIENCE_S = 0.3
answers._ASIDE_S = 0.5
if "THIS_IS_HOME" in os.environ:
    answers.constants.HUGGINGFACE_CO_URL_HOME = answers.constants.ENDPOINT + "/"
download.PATIENCE_S = float(sys.argv[3])
download.MAX_JSON_BYTES = 2**20
heard = []
files = {}
try:
    model = open_model(
        sys.argv[1], revision=sys.argv[2] or None, on_progress=lambda *seen: heard.append(seen)
    )
    if sys.argv[4]:
        names = tuple(sys.argv[4].split(","))
        for folder in (find_weights(model), find_small_files(model, names)):
            files |= {path.name: path.stat().st_size for path in folder.iterdir()}
except OffplanError as error:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(json.dumps({
        "error": str(error), "exit_code": error.exit_code, "wait": max(waits), "peak_bytes": peak,
    }))
else:
    print(json.dumps({
        "sha": model.headers_sha256, "revision": model.revision, "heard": heard,
        "num_tensors": model.num_tensors, "loaded_bytes": hold(model).loaded_bytes,
        "offsets": sorted(t.offset for t in model.outside), "files": files,
        "config_sha": model.config_sha256, "generation": model.generation,
        "gguf": model.gguf and vars(model.gguf),
    }))
"""


@dataclass
class Hub:
    """What the server holds, how it behaves, and what it was asked."""

    files: dict[str, bytes]
    ignore_range: bool = False
    tails: dict[str, int] = field(default_factory=dict)
    """Zeros served after a file's content, never held in memory."""
    drops: dict[str, int] = field(default_factory=dict)
    """How often yet to cut the connection in the middle of a file."""
    statuses: dict[str, list[int]] = field(default_factory=dict)
    """Statuses to answer with for a file, one a request; the last one stays."""
    error_code: str = ""
    requests: list[tuple[str, str, str]] = field(default_factory=list)
    """Method, file and Range of each."""
    tokens: set[str] = field(default_factory=set)
    sent_bytes: int = 0
    delay_s: float = 0.0
    """Before each answer."""
    url: str = ""
    old_name: str = ""
    """A name that the server answers with a redirect to the repository."""
    elsewhere: bool = False
    """Send on requests for shards to another host's name, as the Hub does for large files."""
    tokens_elsewhere: set[str] = field(default_factory=set)
    stall: str = ""
    """A file of which three bytes are sent, and then nothing."""
    drip: str = ""
    """A file of which a byte is sent now and then."""
    answers: dict[str, Callable[["_Handler"], None]] = field(default_factory=dict)
    """What answers all requests for a file, or for a path, in place of the server."""
    everywhere: Callable[["_Handler"], None] | None = None
    """What answers all requests."""
    lists_files: bool = True
    """Whether the server says what files it has."""
    released: threading.Event = field(default_factory=threading.Event)
    """Ends the stall, at the latest with the test."""

    def shard_gets(self) -> list[tuple[str, str, str]]:
        return [r for r in self.requests if r[0] == "GET" and r[1].endswith(".safetensors")]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        hub, path = self.hub, self.path
        time.sleep(hub.delay_s)
        if (answer := hub.everywhere or hub.answers.get(path)) is not None:
            hub.requests.append((self.command, path, ""))
            return self.answer_by(answer)
        if hub.old_name and path.startswith(f"/{hub.old_name}/resolve/"):
            return self.redirect(path.replace(f"/{hub.old_name}", f"/{REPO}", 1))
        if path.startswith("/elsewhere/"):
            hub.tokens_elsewhere.add(self.headers.get("Authorization", ""))
            return self.serve(path.removeprefix("/elsewhere/"), body)
        if path.startswith(LISTS) and hub.lists_files:
            return self.list_files()
        if not path.startswith(PREFIX):
            return self.fail(404, "RepoNotFound")
        revision, _, name = path.removeprefix(PREFIX).partition("/")
        hub.requests.append((self.command, name, self.headers.get("Range", "")))
        hub.tokens.add(self.headers.get("Authorization", ""))
        if name in hub.answers:
            return self.answer_by(hub.answers[name])
        planned = hub.statuses.get(name)
        if planned:
            status = planned.pop(0) if len(planned) > 1 else planned[0]
            if status != 200:
                return self.fail(status, hub.error_code)
        if revision not in ("main", "v1", COMMIT):
            return self.fail(404, "RevisionNotFound")
        if name not in hub.files:
            return self.fail(404, "EntryNotFound")
        if hub.elsewhere and name.endswith(".safetensors"):
            return self.redirect(f"{hub.url.replace('127.0.0.1', 'localhost')}/elsewhere/{name}")
        return self.serve(name, body)

    def answer_by(self, answer: Callable[["_Handler"], None]) -> None:
        self.close_connection = True
        with suppress(OSError):
            answer(self)

    def list_files(self) -> None:
        files = [{"rfilename": name} for name in self.hub.files]
        content = json.dumps({"id": REPO, "sha": COMMIT, "siblings": files}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def redirect(self, location: str) -> None:
        self.send_response(307)
        self.send_header("Location", location)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def fail(self, status: int, code: str) -> None:
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        if code == "EntryNotFound":
            self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def serve(self, name: str, body: bool) -> None:
        hub = self.hub
        content = hub.files[name]
        size = len(content) + hub.tails.get(name, 0)
        first, last, asked = 0, size - 1, self.headers.get("Range")
        ranged = bool(asked) and not hub.ignore_range
        if asked and ranged:
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            if first >= size:
                return self.fail(416, "")
            last = min(last, size - 1)
        self.send_response(206 if ranged else 200)
        if ranged:
            self.send_header("Content-Range", f"bytes {first}-{last}/{size}")
        self.send_header("Content-Length", str(last + 1 - first))
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hash(content) & 0xFFFFFFFF:x}"')
        self.end_headers()
        if not body:
            return None
        if name == hub.drip:
            return self.send_drops(content[first : last + 1])
        if name == hub.stall:
            self.wfile.write(content[first : first + 3])
            self.wfile.flush()
            hub.released.wait(30)
            self.close_connection = True
            return None
        num_bytes = last + 1 - first
        if hub.drops.get(name, 0):
            hub.drops[name] -= 1
            num_bytes //= 2
            self.close_connection = True
        return self.send(content[first : first + num_bytes], num_bytes)

    def send_head(self, status: int, **headers: str) -> None:
        """Send a status and headers; an underscore in a name stands for a hyphen."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def send_on(self, data: bytes) -> None:
        """Send the same bytes for as long as the client listens."""
        while not self.hub.released.is_set():
            self.wfile.write(data)
            self.hub.sent_bytes += len(data)

    def send_slowly(self, data: bytes) -> None:
        """Send a byte now and then, for as long as the client listens."""
        while not self.hub.released.wait(0.05):
            self.wfile.write(data)
            self.wfile.flush()

    def send_drops(self, data: bytes) -> None:
        self.close_connection = True
        for position in range(len(data)):
            try:
                self.wfile.write(data[position : position + 1])
                self.wfile.flush()
            except OSError:
                return
            self.hub.released.wait(0.01)

    def send(self, start: bytes, num_bytes: int) -> None:
        """Send ``start``, then zeros up to ``num_bytes``, as far as the client listens."""
        chunk = bytes(64 * 1024)
        try:
            self.wfile.write(start)
            self.hub.sent_bytes += len(start)
            left = num_bytes - len(start)
            while left > 0:
                self.wfile.write(chunk[:left])
                self.hub.sent_bytes += min(left, len(chunk))
                left -= len(chunk)
        except OSError:
            self.close_connection = True


def start(hub: Hub) -> ThreadingHTTPServer:
    handler = type("Handler", (_Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    return server


def open_from(
    url: str,
    home: Path,
    repo: str = REPO,
    revision: str = "",
    patience_s: float = 20,
    files: str = "",
    **env: str,
) -> Any:
    """Open a model in a process of its own, as huggingface_hub reads the environment at import.

    With ``files``, names with commas between, its weights and those files are fetched too.
    """
    environment = {"HF_ENDPOINT": url, "HF_HOME": str(home), "HF_HUB_ETAG_TIMEOUT": "2"}
    # a folder without certificates: those of the system take 40 ms to read, for each client anew
    environment |= {"SSL_CERT_DIR": str(home)}
    environment |= {"NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_TELEMETRY": "1", **env}
    asked = repo, revision, patience_s, files
    child = _start_openers().run(_CHILD, *asked, environment=environment, timeout=60)
    assert child.returncode == 0, child.stderr
    # Errors are told by what is raised: nothing else speaks.
    assert child.stderr == ""
    return json.loads(child.stdout)


@cache
def _start_openers() -> Warm:
    """Start the process that has imported what opens a model; it ends with the tests."""
    environment = {key: v for key, v in os.environ.items() if not key.startswith("HF_")}
    return Warm(_IMPORTED, environment)
