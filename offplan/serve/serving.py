"""A server from its socket to its end: bound, served by uvicorn, drained by a signal."""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Callable, Iterator, Sequence

import uvicorn

from offplan.errors import OffplanError
from offplan.serve.app import Service, make_app

_MOST_CONNECTIONS = 1000
_LAST_ANSWERS_S = 5
"""Seconds for the last answers to be read, once all texts have ended."""
_END_S = 10.0
"""Seconds that a second signal leaves to the pass at hand."""
_POLL_S = 0.05
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def bind(host: str, port: int) -> socket.socket:
    """Bind a socket, which listens to nobody yet; port 0 takes a free one.

    Raises OffplanError for an address that cannot be had.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with contextlib.ExitStack() as unless_bound:
            bound = unless_bound.enter_context(socket.socket(family, kind))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.bind(address)
            unless_bound.pop_all()
            return bound
    except OSError as error:
        raise OffplanError(
            f"cannot listen on {host} port {port} ({error.strerror}): name another --host or --port"
        ) from None


class Serving:
    """A server, from the first request to the last."""

    def __init__(
        self,
        service: Service,
        bound: socket.socket,
        *,
        origins: Sequence[str] = (),
        on_ready: Callable[[], None],
        on_end: Callable[[bool], None],
    ) -> None:
        """Serve what clients ask at ``bound``; pages of ``origins`` are clients, too.

        ``on_ready`` is called once requests are taken. ``on_end`` hears each signal to end, and
        whether it is not the first.
        """
        self._service, self._bound = service, bound
        self._on_ready, self._on_end = on_ready, on_end
        config = uvicorn.Config(
            make_app(service, origins),
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=_MOST_CONNECTIONS,
            timeout_graceful_shutdown=_LAST_ANSWERS_S,
        )
        self._server = _Server(config)
        self._tasks: list[asyncio.Task[None]] = []
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        """Serve until a signal comes, and drain; a second one ends what is being made.

        Raises OffplanError where the pass at hand does not end behind that.
        """
        try:
            asyncio.run(self._run())
        finally:
            self._service.worker.stop()
            for thread in (self._service.tokenizing, self._service.rendering):
                thread.shutdown(wait=False, cancel_futures=True)
        if not self._service.worker.join(_END_S):
            raise OffplanError("the pass at hand did not end in time, and the process ends in it")

    def end(self) -> None:
        """Do what a signal does; for any thread."""
        assert self._loop is not None, "it runs"
        self._loop.call_soon_threadsafe(self._end)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        with contextlib.suppress(NotImplementedError, RuntimeError):  # no signals in this thread
            for each in _SIGNALS:
                self._loop.add_signal_handler(each, self._end)
        self._service.worker.start()
        self._tasks.append(asyncio.create_task(self._tell_ready()))
        await self._server.serve(sockets=[self._bound])

    def _end(self) -> None:
        service = self._service
        self._on_end(service.is_draining)
        if service.is_draining:
            service.worker.stop()
            self._server.should_exit = True
        else:
            service.is_draining = True
            service.worker.drain()
            self._tasks.append(asyncio.create_task(self._drain()))

    async def _drain(self) -> None:
        while self._service.num_open:
            await asyncio.sleep(_POLL_S)
        self._server.should_exit = True

    async def _tell_ready(self) -> None:
        while not self._server.started:
            await asyncio.sleep(_POLL_S)
        self._on_ready()


class _Server(uvicorn.Server):
    """Leaves signals to the loop: uvicorn's own handlers end the process without a clean-up."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Capture none."""
        yield
