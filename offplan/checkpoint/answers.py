"""Answers of the Hub, checked before huggingface_hub makes paths, waits or requests of them."""

import re
from typing import Any
from urllib.parse import urljoin, urlsplit

from huggingface_hub import constants, get_session, hf_raise_for_status

from offplan.checkpoint.jsontext import quote
from offplan.errors import CheckpointError

AGENT = "offplan"
"""How requests of offplan's begin to name their sender: others' answers are left alone."""
_FILED_UNDER = ("X-Repo-Commit", "X-Linked-ETag", "ETag")
"""Headers whose values become names of files in the Hub's cache."""
_NAME = re.compile(r"[\w+=:-][\w.+=:-]{0,199}", re.ASCII)
_TOLD = ("X-Error-Code", "X-Error-Message", "X-Repo-Commit", "Retry-After")
"""Headers of an error answer that say what is wrong."""


def checked_session() -> Any:
    """Return huggingface_hub's HTTP client, which from now on checks the answers to offplan."""
    session = get_session()
    hooks = session.event_hooks
    if _check not in hooks["response"]:
        session.event_hooks = {**hooks, "response": [*hooks["response"], _check]}
    return session


def _check(response: Any) -> None:
    """Refuse an answer, or take out of it what must not be followed, once its headers have come.

    Raises what ``hf_raise_for_status`` does, for every error answer: huggingface_hub is left no
    waits of its own, which a server could make as long as it likes.
    """
    request = response.request
    if not request.headers.get("User-Agent", "").startswith(AGENT):
        return
    if request.method == "HEAD":
        for name in _FILED_UNDER:
            _check_name(name, response.headers.get(name))
    if response.is_error:
        told = {name: response.headers.get(name, "") for name in _TOLD}
        told = {name: value for name, value in told.items() if value and value.isascii()}
        # Without its body, which may be of any kind and never end.
        hf_raise_for_status(type(response)(response.status_code, headers=told, request=request))
    if not _is_home(response):
        del response.headers[constants.HUGGINGFACE_HEADER_X_XET_HASH]


def _check_name(header: str, value: str | None) -> None:
    if value is not None and not _NAME.fullmatch(value.removeprefix("W/").strip('"')):
        raise CheckpointError(
            f"{constants.ENDPOINT}: found {quote(value)} as {header}, expected the plain name of a "
            "version; the server is not to be trusted: check HF_ENDPOINT"
        )


def _is_home(response: Any) -> bool:
    """Whether what the answer says of Xet, if anything, would send the token to no other host."""
    headers, links = response.headers, response.links
    if constants.HUGGINGFACE_HEADER_X_XET_HASH not in headers:
        return True
    link = links.get(constants.HUGGINGFACE_HEADER_LINK_XET_AUTH_KEY, {}).get("url")
    route = link or headers.get(constants.HUGGINGFACE_HEADER_X_XET_REFRESH_ROUTE, "")
    at = urlsplit(urljoin(constants.ENDPOINT, route))
    homes = map(urlsplit, (constants.ENDPOINT, constants.HUGGINGFACE_CO_URL_HOME))
    return any((at.scheme, at.netloc) == (home.scheme, home.netloc) for home in homes)
