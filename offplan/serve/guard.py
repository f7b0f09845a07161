"""Who may ask, and how much: checked before a request is read."""

import asyncio
import hmac
import ipaddress
from dataclasses import dataclass

from starlette.requests import ClientDisconnect, Request

from offplan.errors import InputError
from offplan.serve.errors import ApiError

_OPEN_PATHS = ("/health",)
"""Paths that need no key: they say nothing but that the server is there."""
_BODY_S = 60.0
"""Seconds in which a body must be there."""
LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")


@dataclass(frozen=True)
class Guard:
    """The limits of a server."""

    api_key: str | None = None
    """What clients must send as a bearer token; None lets everybody in."""
    host: str = "127.0.0.1"
    """Address that the server binds to."""
    max_body_bytes: int = 2**20

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the server."""
        return is_loopback(self.host)

    def check(self, request: Request) -> None:
        """Raise ApiError for a request without the key, and for one by a foreign name.

        Without a key a server on loopback is known by this machine's own names alone: a page that
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
        # as bytes, for compare_digest takes no letters beyond ASCII
        is_key = hmac.compare_digest(found.strip().encode("latin-1"), self.api_key.encode())
        if kind.lower() != "bearer" or not is_key:
            raise ApiError(
                401,
                "the API key is missing or wrong: send the header Authorization: Bearer KEY",
                code="invalid_api_key",
            )

    async def read_body(self, request: Request) -> bytes:
        """Read a body of JSON; raises ApiError where it is none, too large or too late.

        A page of another origin cannot send JSON without asking first, and is refused then.
        """
        media = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json":
            raise ApiError(
                415, "the body is no JSON: send the header Content-Type: application/json"
            )
        named = request.headers.get("content-length", "0")
        if named.isdecimal() and int(named) > self.max_body_bytes:
            raise self._refuse_body()
        try:
            return await asyncio.wait_for(self._collect(request), _BODY_S)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body was not there within {_BODY_S:.0f} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the body ended early") from None

    async def _collect(self, request: Request) -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > self.max_body_bytes:
                raise self._refuse_body()
            parts.append(part)
        return b"".join(parts)

    def _refuse_body(self) -> ApiError:
        return ApiError(413, f"the body is larger than {self.max_body_bytes} bytes, the most here")


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
    """Whether a host is an address, or the name, by which only this machine is reached."""
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
