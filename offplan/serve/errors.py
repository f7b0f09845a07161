"""The errors of OpenAI's API: a status, and an object that says what was wrong."""

import re
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from offplan.checkpoint.jsontext import shorten

_MOST_TOLD = 5
"""Fields of one request whose mistakes are told; the others are counted."""
_MOST_SHOWN = 200
"""Characters of a request's own text, or of a library's, in an error."""
_IS_BRANCH = re.compile(r"^str$|[\[(]|^constrained-|^_?Named")
_TYPES = {401: "authentication_error", 429: "rate_limit_error"} | dict.fromkeys(
    (500, 503), "server_error"
)


class ApiError(Exception):
    """Ends a request with a status and an error object of OpenAI's API."""

    def __init__(
        self, status: int, message: str, *, param: str | None = None, code: str | None = None
    ) -> None:
        """Say ``message``, which names no path of the machine, and the field ``param``."""
        super().__init__(message)
        self.status, self.message = status, message
        self.param, self.code = param, code

    @property
    def payload(self) -> dict[str, Any]:
        """The object that the client gets."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        return {
            "error": {
                "message": self.message,
                "type": kind,
                "param": self.param,
                "code": self.code,
            }
        }


class FieldError(ValueError):
    """Says what is wrong with a field, where a check of the whole object finds it."""

    def __init__(self, name: str, why: str) -> None:
        """Say ``why`` the field ``name`` is wrong."""
        super().__init__(why)
        self.name = name


def refuse_fields(error: ValidationError) -> ApiError:
    """Say with status 400 which fields of a request are wrong, and why."""
    told, first = [], None
    found = _leave_out_unread(error.errors(include_url=False))
    for each in found[:_MOST_TOLD]:
        # unions and validators have a place in the path: a client knows fields and indices alone
        path = [str(part) for part in each["loc"] if not _IS_BRANCH.search(str(part))]
        if isinstance(cause := each.get("ctx", {}).get("error"), FieldError):
            path.append(cause.name)
        where = shorten(".".join(path), _MOST_SHOWN)
        first = first or where or None
        why = _describe(each)
        told.append(f"{where or 'the body'}: {shorten(why, _MOST_SHOWN)}")
    if more := len(found) - len(told):
        told.append(f"and {more} more")
    return ApiError(400, "; ".join(told), param=first)


_IN_REQUESTS = {
    "missing": "it is missing",
    "extra_forbidden": "there is no such field: leave it out",
}
"""pydantic's errors in the words of who writes the request."""


def _leave_out_unread(errors: list[ErrorDetails]) -> list[ErrorDetails]:
    """Leave out the mistakes of objects of another ``type``: their fields have other names."""
    foreign = {
        each["loc"][:-1]
        for each in errors
        if each["type"] == "literal_error" and each["loc"][-1:] == ("type",)
    }
    return [
        each for each in errors if each["loc"][-1:] == ("type",) or each["loc"][:-1] not in foreign
    ]


def _describe(error: ErrorDetails) -> str:
    """Return what is wrong with a field; where it may have few values, what it has as well."""
    expected, found = error.get("ctx", {}), error["input"]
    if error["type"] == "union_tag_invalid":
        return f"found '{shorten(expected['tag'], 64)}', expected {expected['expected_tags']}"
    if error["type"] == "literal_error" and isinstance(found, str):
        return f"found '{shorten(found, 64)}', expected {expected['expected']}"
    if error["type"] == "literal_error":
        return f"expected {expected['expected']}"
    return _IN_REQUESTS.get(error["type"], error["msg"].removeprefix("Value error, "))


def refuse_ending() -> ApiError:
    """Refuse what a server that ends does no more."""
    return ApiError(503, "the server is shutting down", code="shutting_down")


def refuse_token(token: int, vocabulary: int, param: str, place: str = "") -> ApiError:
    """Refuse a token beyond the vocabulary, in a field and at a ``place`` that it may have."""
    where = f"{place}: " if place else ""
    return ApiError(
        400,
        f"{where}there is no token {token}: the model's last one is {vocabulary - 1}",
        param=param,
    )


def refuse_length(context: int, num_prompt: int, num_tokens: int | None = None) -> ApiError:
    """Refuse a prompt of so many tokens, with so many to be made, that exceeds the context."""
    asked = f"the prompt has {num_prompt} tokens"
    if num_tokens is not None:
        asked += f" and the request asks for {num_tokens} more"
    return ApiError(
        400,
        f"{asked}; this model's maximum context length is {context} tokens: shorten the prompt, "
        "ask for less, or serve a plan with a larger context",
        code="context_length_exceeded",
    )
