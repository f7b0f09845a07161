"""Answers of the Hub, checked before huggingface_hub makes paths, waits or requests of them."""

import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from threading import Event, Lock
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_session, hf_raise_for_status

# The HTTP client's base error: httpx's in huggingface_hub 1, httpx2's in 2.
from huggingface_hub.errors import HTTPError as HTTPError  # type: ignore[attr-defined]
from huggingface_hub.errors import OfflineModeIsEnabled
from huggingface_hub.utils import (  # type: ignore[attr-defined]
    _http,
    build_hf_headers,
)

from offplan.checkpoint.jsontext import quote
from offplan.errors import CheckpointError

AGENT = "offplan"
"""How requests of offplan's begin to name their sender."""
_ASIDE_BYTES = 2**20
"""Most bytes of an answer that is no file, which huggingface_hub reads whole: it sends some kB."""
_ASIDE_S = 10.0
"""Seconds in which such an answer has to end."""
_FILED_UNDER = ("X-Repo-Commit", "X-Linked-ETag", "ETag")
"""Headers whose values become names of files in the Hub's cache."""
_NAME = re.compile(r"[\w+=:-][\w.+=:-]{0,199}", re.ASCII)
_TOLD = ("X-Error-Code", "X-Error-Message", "X-Repo-Commit", "Retry-After")
"""Headers of an error answer that say what is wrong."""
_MAX_BYTES: ContextVar[float | None] = ContextVar("max_bytes", default=None)
"""Most bytes of an answer to this thread; None outside ``checked_session``: others' are let be."""
_INSTALLING = Lock()
_HAS_ANSWERED = Event()
"""Set once a server has answered this process."""
CLIENT = import_module(HTTPError.__module__)
"""The HTTP client's module, which has its errors."""


@contextmanager
def checked_session(*, is_aside: bool = False) -> Iterator[Any]:
    """Yield huggingface_hub's HTTP client; what it is answered in this thread is checked meanwhile.

    Files are to be read as they come, by a reader who counts their bytes. All else that
    huggingface_hub asks for is bounded here, in bytes and in time, and with ``is_aside`` whatever
    is asked for.
    """
    _install()
    before = _MAX_BYTES.set(_ASIDE_BYTES)
    try:
        # huggingface_hub 2 asks the Hub by which agents it may be run, and for a new token where
        # one has ended. It does so where it makes headers, and remembers what it was answered.
        build_hf_headers(library_name=AGENT)
        _MAX_BYTES.set(_ASIDE_BYTES if is_aside else math.inf)
        yield get_session()
    finally:
        _MAX_BYTES.reset(before)


def _install() -> None:
    """Have the checks in huggingface_hub's client, and in all that it makes after this one.

    It makes another when a connection fails. A user's factory of clients stays in use.
    """
    with _INSTALLING:
        session = get_session()
        if _check in session.event_hooks["response"]:
            return
        _add_checks(session)
        make = _http._GLOBAL_CLIENT_FACTORY
        # not by set_client_factory, which closes a client that others may be using
        _http._GLOBAL_CLIENT_FACTORY = lambda: _add_checks(make())


def _add_checks(client: Any) -> Any:
    hooks = client.event_hooks
    client.event_hooks = {
        "request": [*hooks["request"], _ask_plainly],
        "response": [*hooks["response"], _check],
    }
    client.send = partial(_send, client.send)
    return client


def _send(send: Callable[..., Any], request: Any, **options: Any) -> Any:
    """Send a request; where nothing has answered yet, have huggingface_hub see that it is offline.

    It asks six times whether a file has changed, for 23 seconds, before it takes the one in its
    cache or fails. Source: huggingface_hub 2, ``http_backoff``, which does not repeat this error.
    """
    try:
        return send(request, **options)
    except (CLIENT.ConnectError, CLIENT.ConnectTimeout) as error:
        if request.method != "HEAD" or _MAX_BYTES.get() is None or _HAS_ANSWERED.is_set():
            raise
        raise OfflineModeIsEnabled(f"cannot reach {request.url.host}") from error


def _ask_plainly(request: Any) -> None:
    """Ask for bytes as they are: a compressed answer may unfold to any size."""
    if _MAX_BYTES.get() is not None:
        request.headers["Accept-Encoding"] = "identity"


def _check(response: Any) -> None:
    """Refuse an answer, or take out of it what must not be followed, once its headers have come.

    Raises what ``hf_raise_for_status`` does, for every error answer. huggingface_hub is left no
    waits of its own, which a server could make as long as it likes.
    """
    max_bytes, request = _MAX_BYTES.get(), response.request
    if max_bytes is None:
        return
    _HAS_ANSWERED.set()
    if request.method == "HEAD":
        for name in _FILED_UNDER:
            _check_name(name, response.headers.get(name))
    if response.is_error:
        told = {name: response.headers.get(name, "") for name in _TOLD}
        told = {name: value for name, value in told.items() if value and value.isascii()}
        # Without its body, which may be of any kind and never end.
        hf_raise_for_status(type(response)(response.status_code, headers=told, request=request))
    encoding = response.headers.get("Content-Encoding", "identity")
    if encoding.lower() != "identity" and request.method != "HEAD":
        raise _distrust(f"{quote(encoding)} as Content-Encoding, expected bytes as they are")
    if response.has_redirect_location or max_bytes == _ASIDE_BYTES:
        response.stream = _Bounded(response.stream)
    if not _is_home(response):
        del response.headers[constants.HUGGINGFACE_HEADER_X_XET_HASH]


class _Bounded(CLIENT.SyncByteStream):  # type: ignore[misc, name-defined]
    """A body that is read whole: it fails once it is too long, or takes too long."""

    def __init__(self, body: Any) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        num_bytes, ends_at = 0, time.monotonic() + _ASIDE_S
        for chunk in self._body:
            num_bytes += len(chunk)
            if num_bytes > _ASIDE_BYTES:
                raise _distrust(f"more than {_ASIDE_BYTES} bytes, expected a short answer")
            if time.monotonic() > ends_at:
                raise TimeoutError(f"{num_bytes} bytes came in {_ASIDE_S:.3g} s, and no end")
            yield chunk

    def close(self) -> None:
        self._body.close()


def _check_name(header: str, value: str | None) -> None:
    if value is not None and not _NAME.fullmatch(value.removeprefix("W/").strip('"')):
        raise _distrust(f"{quote(value)} as {header}, expected the plain name of a version")


def _distrust(found: str) -> CheckpointError:
    return CheckpointError(
        f"{constants.ENDPOINT}: found {found}; the server is not to be trusted: check HF_ENDPOINT"
    )


def _is_home(response: Any) -> bool:
    """Return True if what the answer says of Xet, if anything, leads from the Hub itself to no
    other host.

    Xet's client is sent the token, and nothing here bounds what it reads: from any other server
    than the Hub files come by plain HTTP.
    """
    headers, links = response.headers, response.links
    home = urlsplit(constants.HUGGINGFACE_CO_URL_HOME)[:2]
    if constants.HUGGINGFACE_HEADER_X_XET_HASH not in headers:
        return True
    if urlsplit(constants.ENDPOINT)[:2] != home or urlsplit(str(response.url))[:2] != home:
        return False
    link = links.get(constants.HUGGINGFACE_HEADER_LINK_XET_AUTH_KEY, {}).get("url")
    route = link or headers.get(constants.HUGGINGFACE_HEADER_X_XET_REFRESH_ROUTE, "")
    return bool(urlsplit(urljoin(constants.ENDPOINT, route))[:2] == home)
