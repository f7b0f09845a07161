"""How much a body may hold, counted before anything is made of it."""

from offplan.serve.errors import ApiError

MAX_FIELDS = 100
"""Fields of one object of the API; those of tools' parameters are the client's own."""
MAX_CONTAINERS = 2**15
"""Objects and lists in one body. One takes 3 bytes there, and 1,000 once it is a message."""


def check_shape(body: bytes) -> None:
    """Raise ApiError with 400 for JSON with too many objects and lists; parses none of it."""
    if _count(body) <= MAX_CONTAINERS:  # those in texts included
        return
    unescaped = body.replace(rb"\\", b"").replace(rb"\"", b"")
    outside = b"".join(unescaped.split(b'"')[::2])
    if (found := _count(outside)) > MAX_CONTAINERS:
        raise ApiError(
            400, f"the body has {found} objects and lists; this server reads {MAX_CONTAINERS}"
        )


def _count(text: bytes) -> int:
    return text.count(b"{") + text.count(b"[")
