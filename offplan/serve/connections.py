"""Connections without a whole request: how many there may be, and for how long."""

import ipaddress
from collections import Counter
from typing import Any

import h11
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

_HEAD_S = 10.0
"""Seconds in which a connection must send the headers of its next request."""
_FREE_CHUNKS = 1024
_BYTES_PER_CHUNK = 256
"""Bytes that chunks of a body must have in the mean, beyond the first ``_FREE_CHUNKS``. h11 takes
some 10 us for each chunk on the event loop."""
_MANY_CHUNKS = (
    f"the body has more than {_FREE_CHUNKS} chunks of less than {_BYTES_PER_CHUNK} bytes in the "
    "mean: send larger ones, or the body with its Content-Length"
)


def name_client(host: str | None) -> str:
    """Return what a client is counted by: its address, or its network of IPv6.

    One IPv6 client has a whole /64. Source: RFC 6177.
    """
    try:
        address = ipaddress.ip_address((host or "").partition("%")[0])
    except ValueError:  # a Unix socket has none
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


class Idle:
    """The connections that have sent no whole request, the one that has waited longest first.

    A new connection always gets in: it closes the one that has waited longest. A client that sends
    its request at once is served beside any number of silent ones.
    """

    def __init__(self, most: int) -> None:
        """Keep up to ``most`` connections of one address, and twice as many of all."""
        self._most = most
        self._clients: dict[Connection, str] = {}
        self._counts = Counter[str]()

    def add(self, connection: "Connection", client: str) -> None:
        """Add a connection of a client behind the others, and make room for it.

        One that waits already stays where it is.
        """
        if connection in self._clients:
            return
        self._clients[connection] = client
        self._counts[client] += 1
        if self._counts[client] > self._most:
            next(each for each, of in self._clients.items() if of == client).end()
        elif len(self._clients) > 2 * self._most:
            next(iter(self._clients)).end()

    def remove(self, connection: "Connection") -> None:
        """Remove a connection, if it is one of these."""
        client = self._clients.pop(connection, None)
        if client is not None:
            self._counts[client] -= 1
            if not self._counts[client]:
                del self._counts[client]


class Connection(H11Protocol):
    """uvicorn's connection, with an end to waiting for requests and a bound for tiny chunks."""

    def __init__(self, idle: Idle, **of_uvicorn: Any) -> None:
        """Stand among ``idle`` connections until a whole request has come."""
        super().__init__(**of_uvicorn)
        self.conn: _Parser = _Parser(h11.SERVER)
        self._answer, self.app = self.app, self._count
        self._idle, self._client, self._is_lost = idle, "", False
        self._num_requests = 0
        self._timer = self.loop.call_later(_HEAD_S, self.end)

    def connection_made(self, transport: Any) -> None:
        """Wait for the first request."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # a part of an answer is sent once the last one is
        self._client = name_client(self.client[0] if self.client else None)
        self._idle.add(self, self._client)

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave room to others."""
        super().connection_lost(exc)
        self._is_lost = True
        self._stop_waiting()

    def handle_events(self) -> None:
        """Handle what has come, and wait no more once that is a whole request."""
        super().handle_events()
        if self._is_whole:
            self._idle.remove(self)

    @property
    def _is_whole(self) -> bool:
        return self.conn.their_state not in (h11.IDLE, h11.SEND_BODY)

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are no request, unless they come behind an answer."""
        if self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.end()
            return
        super().send_400_response(_MANY_CHUNKS if self.conn.has_many_chunks else msg)

    def end(self) -> None:
        """Close the connection, and drop what its client has not read of an answer."""
        self._stop_waiting()
        self.transport.abort()

    async def _count(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, and wait for the next one behind it."""
        self._timer.cancel()  # a body has a limit of its own
        if not self._is_lost and not self._is_whole:
            self._idle.add(self, self._client)  # behind another request on the same connection
        self._num_requests += 1

        async def send_out(message: Message) -> None:
            await send(message)
            if not message.get("more_body", True):
                await self.flow.drain()

        try:
            await self._answer(scope, receive, send_out)
        finally:
            self._num_requests -= 1
            # a client may have sent the next request already, and it is being answered
            if not self._num_requests and not self._is_lost:
                self._stop_waiting()
                self._timer = self.loop.call_later(_HEAD_S, self.end)
                self._idle.add(self, self._client)

    def _stop_waiting(self) -> None:
        self._timer.cancel()
        self._idle.remove(self)


class _Parser(h11.Connection):
    """h11's parser, which takes no body of tiny chunks."""

    _num_bytes = _num_chunks = 0

    @property
    def has_many_chunks(self) -> bool:
        """True if the body at hand has more chunks than its bytes need."""
        return self._num_chunks > _FREE_CHUNKS + self._num_bytes // _BYTES_PER_CHUNK

    def next_event(self) -> Any:
        """Return the next event; raises RemoteProtocolError for too many chunks."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._num_bytes = self._num_chunks = 0
        elif isinstance(event, h11.Data):
            self._num_bytes += len(event.data)
            self._num_chunks += event.chunk_start
            if self.has_many_chunks:
                raise h11.RemoteProtocolError(_MANY_CHUNKS)
        return event
