"""OpenAI's chats and completions: the API that the others are translated to."""

import json
from collections.abc import Mapping
from typing import Any

from offplan.runtime.joined import Added
from offplan.serve.answers import Answer
from offplan.serve.api import Translation
from offplan.serve.errors import ApiError
from offplan.serve.requests import ChatRequest, CompletionRequest, parse_request


class OpenAi(Translation):
    """A request of OpenAI's API, as it is."""

    @classmethod
    def read_chat(cls, body: bytes) -> "OpenAi":
        """Read a request for a chat's next message; raises ApiError."""
        return cls(parse_request(ChatRequest, body))

    @classmethod
    def read_completion(cls, body: bytes) -> "OpenAi":
        """Read a request for what follows texts; raises ApiError."""
        return cls(parse_request(CompletionRequest, body))

    def whole(self, answer: Answer) -> dict[str, Any]:
        """Return the answer when all texts have ended."""
        return answer.whole()

    def opening(self, answer: Answer) -> str:
        """Return the chunks that begin a stream."""
        return "".join(map(_write, answer.opening()))

    def chunk(self, answer: Answer, index: int, added: Added) -> str:
        """Return the chunk of a token; none for a token that says nothing yet."""
        return _write(answer.chunk(index, added)) if answer.shows(index, added) else ""

    def closing(self, answer: Answer) -> str:
        """Return the chunks that end a stream."""
        return "".join(map(_write, answer.closing())) + "data: [DONE]\n\n"

    def failed(self, error: ApiError) -> str:
        """Return an event with the error's object."""
        return _write(error.payload)


def _write(payload: Mapping[str, Any]) -> str:
    return f"data: {json.dumps(payload)}\n\n"
