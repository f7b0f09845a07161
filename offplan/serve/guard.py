"""Who may ask, and how much: checked before a request is read."""

import asyncio
import contextlib
import hmac
import ipaddress
from collections import Counter
from collections.abc import Awaitable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

from starlette.requests import Request

from offplan.errors import InputError
from offplan.serve.connections import name_client
from offplan.serve.errors import ApiError, refuse_ending

_OPEN_PATHS = ("/health",)
"""Paths that need no key: they say nothing but that the server is there."""
_BODY_S = 10.0
_BODY_BYTES_PER_S = 16 * 2**10
"""Bytes a second that a body must come at, behind the first ``_BODY_S`` seconds.

Source: the directive RequestReadTimeout of Apache's mod_reqtimeout, which has a MinRate."""
_UNNAMED = frozenset({"", "application/x-www-form-urlencoded"})
"""Kinds of a body that programs send where nobody names one, as with ``curl -d``."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")

T = TypeVar("T")


@dataclass(frozen=True)
class Guard:
    """The limits of a server."""

    api_key: str | None = None
    """Bearer token that clients must send; None lets everybody in."""
    host: str = "127.0.0.1"
    """Address that the server binds to."""
    max_body_bytes: int = 2**20
    max_connections: int = 128
    """Requests of one address that are answered at a time; of all, twice as many."""
    ending: asyncio.Event = field(default_factory=asyncio.Event, compare=False)
    """Event that is set once the server reads no more bodies."""
    _open: Counter[str] = field(default_factory=Counter, compare=False)
    """Requests that are being answered, by client."""

    @property
    def is_local(self) -> bool:
        """True if only this machine reaches the server."""
        return is_loopback(self.host)

    @contextlib.contextmanager
    def admit(self, request: Request) -> Iterator[None]:
        """Count a request while it is answered; raises ApiError with 503 for one too many."""
        client, most = name_client(request.client and request.client.host), self.max_connections
        if self._open[client] >= most or sum(self._open.values()) >= 2 * most:
            raise ApiError(
                503,
                f"{self._open[client]} requests of this address are being answered, and this "
                f"server takes {most} of one address and {2 * most} of all: ask later",
                code="too_many_requests",
            )
        self._open[client] += 1
        try:
            yield
        finally:
            self._open[client] -= 1
            if not self._open[client]:
                del self._open[client]

    def check(self, request: Request) -> None:
        """Raise ApiError for a request without the key, and for one by a foreign name.

        Without a key, a server on loopback answers only to this machine's own names. A page that
        has its own name resolve to 127.0.0.1 gets no answer.
        """
        if self.api_key is None:
            host = request.headers.get("host", "")
            if self.is_local and not _is_local_name(host, self.host):
                raise ApiError(
                    403,
                    "this server answers to localhost alone; start it with a key to be called by "
                    "another name",
                )
            return
        if request.scope["path"] in _OPEN_PATHS:
            return
        kind, _, found = request.headers.get("authorization", "").partition(" ")
        if kind.lower() != "bearer":
            found = request.headers.get("x-api-key", "")  # Anthropic's
        # as bytes, for compare_digest takes no letters beyond ASCII
        if not hmac.compare_digest(found.strip().encode("latin-1"), self.api_key.encode()):
            raise ApiError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def read_body(self, request: Request) -> bytes:
        """Read a body of JSON; raises ApiError if it is none, too large, too slow or too late.

        A page of another origin cannot send JSON without asking first, and is refused then. A
        program may leave the header out: browsers name the page's origin with each POST.
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        is_page = any(name in request.headers for name in ("origin", "sec-fetch-site"))
        if media != "application/json" and (is_page or media not in _UNNAMED):
            raise ApiError(
                415, "the body is no JSON: send the header Content-Type: application/json"
            )
        named = request.headers.get("content-length", "0")
        if named.isdecimal() and int(named) > self.max_body_bytes:
            raise self._refuse_body()
        return await finish_before(self.ending, self._collect(request))

    async def _collect(self, request: Request) -> bytes:
        body, loop = bytearray(), asyncio.get_running_loop()
        began_s = loop.time()
        while True:
            most_s = _BODY_S + len(body) / _BODY_BYTES_PER_S
            try:
                message = await asyncio.wait_for(request.receive(), began_s + most_s - loop.time())
            except asyncio.TimeoutError:
                raise ApiError(
                    408,
                    f"{len(body)} bytes of the body came in {most_s:.0f} s: send it at 16 KiB a "
                    "second",
                ) from None
            if message["type"] == "http.disconnect":
                raise ApiError(400, "the body ended early")
            body += message.get("body", b"")
            if len(body) > self.max_body_bytes:
                raise self._refuse_body()
            if not message.get("more_body", False):
                return bytes(body)

    def _refuse_body(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes, the most here")


async def finish_before(ending: asyncio.Event, doing: Awaitable[T]) -> T:
    """Await what is being done; raises ApiError with 503 where the server's end comes first."""
    done, ended = asyncio.ensure_future(doing), asyncio.ensure_future(ending.wait())
    try:
        await asyncio.wait({done, ended}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise refuse_ending()
        return await done
    finally:
        done.cancel()
        ended.cancel()


def check_exposure(host: str, api_key: str | None, *, insecure: bool) -> None:
    """Raise InputError for a server that others could reach without a key, and for a bad key."""
    if api_key is not None and not (
        api_key.isascii() and api_key.isprintable() and api_key.split()
    ):
        raise InputError("the API key should be printable letters of ASCII: a header carries it")
    if is_loopback(host) or api_key or insecure:
        return
    raise InputError(
        f"--host {host} lets other machines in, and no key keeps them out: name one with --api-key "
        "or OFFPLAN_API_KEY, or add --insecure where the network is yours alone"
    )


def is_loopback(host: str) -> bool:
    """Return True if only this machine is reached by a host's address or name."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _is_local_name(header: str, host: str) -> bool:
    name, _, port = header.rpartition(":")
    if not name or not port.isdecimal():
        name = header  # no port is named
    own = f"[{host}]" if ":" in host else host
    return name.lower() in (*LOCAL_NAMES, own)
