"""A server from its socket to its end: it listens, is served by uvicorn, drained by a signal.

Nothing here imports torch, which takes seconds: the socket listens before.
"""

import asyncio
import contextlib
import contextvars
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import uvicorn
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from typing_extensions import Self

from offplan.errors import OffplanError
from offplan.serve.connections import Connection, Idle
from offplan.serve.errors import ApiError

if TYPE_CHECKING:
    from offplan.serve.app import Service

_LAST_ANSWERS_S = 1
"""Seconds for the last answers to be read, once all texts have ended."""
_END_S = 0.5
"""Seconds that the end leaves to the pass at hand, and to what threads are at."""
_LOADING_END_S = 2.0
"""Seconds that loading has to end by its KeyboardInterrupt."""
_POLL_S = 0.05
_BACKLOG = 2048
"""Connections that the kernel keeps until they are accepted."""
_MOST_ACCEPTED = 8
"""Connections that the event loop accepts at a time. In between it reads what they send and closes
old ones: so it runs out of no files, and closes none whose request has come."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens, and that no other has beside it; port 0 takes a free one.

    Raises OffplanError for an address that cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as unless_listening:
            found = unless_listening.enter_context(socket.socket(family, kind))
            # the port of a server that has just ended; two that listen are refused all the same
            found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            found.bind(address)
            found.listen(_BACKLOG)
            unless_listening.pop_all()
            return found
    except OSError as error:
        raise OffplanError(
            f"cannot listen on {host} port {port} ({error.strerror}): name another --host or --port"
        ) from None


class Serving:
    """A server, from the first request to the last.

    Inside of ``with`` it answers on a thread of its own: that the model is being loaded, until
    ``serve`` has a service.
    """

    def __init__(
        self,
        listening: socket.socket,
        *,
        max_connections: int = 128,
        drain_s: float,
        on_end: Callable[[str], None],
        leave: Callable[[BaseException], None],
    ) -> None:
        """Answer whoever connects to ``listening``, which is closed in the end.

        ``max_connections`` of one address may wait for a request. A signal lets the requests that
        are there be answered for ``drain_s`` seconds; a second one ends them. ``on_end`` hears of
        each signal what it does. ``leave`` ends the process if a pass, a thread's work or loading
        does not end. It receives the error that says so.
        """
        self._listening, self._drain_s = listening, drain_s
        self.port: int = listening.getsockname()[1]
        self._on_end, self._leave = on_end, leave
        self._service: Service | None = None
        self._app: ASGIApp = _answer_loading
        http: Any = partial(Connection, Idle(max_connections))
        config = uvicorn.Config(
            self._answer,
            interface="asgi3",
            http=http,
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=_MOST_ACCEPTED,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._server = _Server(config)
        self._tasks: list[asyncio.Task[None]] = []
        self._is_up = threading.Event()
        context = contextvars.copy_context()  # which has whether a command is to be quiet
        self._thread = threading.Thread(
            target=lambda: context.run(asyncio.run, self._run()), name="offplan-server", daemon=True
        )
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Begin to answer."""
        self._thread.start()
        self._is_up.wait()
        return self

    def __exit__(self, *_: object) -> None:
        """End what is left."""
        self._call(self._stop)
        self._thread.join()
        self._stack.close()

    @contextlib.contextmanager
    def hearing_signals(self) -> Iterator[None]:
        """End by Ctrl-C and SIGTERM; for the main thread.

        The server's thread hears of a signal at once, whatever the main thread is in. While there
        is no service, the main thread gets a KeyboardInterrupt.
        """
        # the loop selects by its socket, which stays open until the loop has ended
        hears, told = map(self._stack.enter_context, socket.socketpair())
        told.setblocking(False)
        self._call(self._loop.add_reader, hears, lambda: self._hear(hears))
        wakes = signal.set_wakeup_fd(told.fileno(), warn_on_full_buffer=False)
        before = [signal.signal(each, self._interrupt) for each in _SIGNALS]
        try:
            yield
        finally:
            for each, handler in zip(_SIGNALS, before, strict=True):
                signal.signal(each, handler)
            signal.set_wakeup_fd(wakes)

    def serve(self, service: "Service", app: ASGIApp, *, on_ready: Callable[[], None]) -> None:
        """Serve until a signal comes, and drain; a second one ends what is being made.

        ``app`` is the service's application. ``on_ready`` is called once it takes requests.
        """
        service.worker.start()
        self._app, self._service = app, service
        on_ready()
        try:
            self._thread.join()
        finally:
            left = service.stop(_END_S)
        if left is not None:
            self._leave(OffplanError(f"{left} did not end in time, and the process ends in it"))

    def end(self) -> None:
        """Begin to end, as a signal does; for any thread."""
        self._call(self._end)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks.append(asyncio.create_task(self._tell_up()))
        try:
            await self._server.serve(sockets=[self._listening])
        finally:
            self._is_up.set()

    async def _tell_up(self) -> None:
        while not self._server.started:
            await asyncio.sleep(0)
        self._listening.listen(_BACKLOG)  # asyncio has the kernel keep as many as it accepts
        self._is_up.set()

    def _call(self, function: Callable[..., object], *arguments: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(function, *arguments)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        # while it serves, its own thread does what there is to do
        if self._service is None or not self._thread.is_alive():
            raise KeyboardInterrupt

    def _hear(self, hears: socket.socket) -> None:
        for number in hears.recv(64):
            if number in _SIGNALS:
                self._end()

    def _end(self) -> None:
        service = self._service
        if service is None:
            # the main thread may be in a call that hears of no signal
            self._loop.call_later(_LOADING_END_S, self._leave, KeyboardInterrupt())
        elif service.is_draining:
            self._on_end("ending what is being made")
            self._stop()
        else:
            self._on_end(
                "no more requests are taken, and those here are finished for up to "
                f"{self._drain_s:g} s; once more ends them"
            )
            service.drain()
            self._tasks.append(asyncio.create_task(self._drain(service)))

    async def _drain(self, service: "Service") -> None:
        until = self._loop.time() + self._drain_s
        while service.num_open and self._loop.time() < until:
            await asyncio.sleep(_POLL_S)
        if service.num_open and not self._server.should_exit:
            self._on_end(f"{service.num_open} requests are not finished, and end")
        self._stop()

    def _stop(self) -> None:
        if self._service is not None:
            self._service.end()
        self._server.should_exit = True


async def _answer_loading(scope: Scope, receive: Receive, send: Send) -> None:
    error = ApiError(503, "the model is being loaded: ask again later", code="loading")
    payload = {"status": "loading"} if scope["path"] == "/health" else error.payload
    await JSONResponse(payload, error.status, {"retry-after": "1"})(scope, receive, send)


class _Server(uvicorn.Server):
    """Leaves signals to others: uvicorn's own handlers end the process without a clean-up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
