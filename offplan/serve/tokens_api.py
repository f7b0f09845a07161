"""Texts as tokens and back, in the shapes of vLLM and of llama.cpp.

Source: the documentation of vLLM's server, "Tokenizer API"; llama.cpp's ``tools/server/README.md``,
"POST /tokenize".
"""

from typing import Annotated, Any, ClassVar

from pydantic import Field, model_validator
from typing_extensions import Self

from offplan.serve.api import CappedChat, Fields
from offplan.serve.errors import refuse_token
from offplan.serve.requests import Short, Token, parse_request

_CHAT = ("messages", "tools", "chat_template_kwargs")


class Tokenize(Fields):
    """A request for a text's tokens, or for those of a chat."""

    ignored = frozenset({"parse_special"})
    """What a tokenizer does with special tokens is its own."""
    refused: ClassVar = {
        "continue_final_message": "offplan answers with a new message",
        "chat_template": "the model's own is used",
        "mm_processor_kwargs": "offplan reads texts alone",
    }

    model: Short | None = None
    prompt: str | None = None
    content: str | None = None
    """A text in llama.cpp's shape, which has no special tokens of its own."""
    messages: list[Any] | None = None
    tools: list[Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: bool = True
    add_special: bool = False
    add_generation_prompt: bool = True
    return_token_strs: bool | None = None
    with_pieces: bool = False

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        if sum(each is not None for each in (self.prompt, self.content, self.messages)) != 1:
            raise ValueError("name one of prompt, content and messages")
        if self.messages is None and (self.tools or self.chat_template_kwargs):
            raise ValueError("tools and chat_template_kwargs are for messages")
        if not self.add_generation_prompt:
            raise ValueError("add_generation_prompt other than true is not supported")
        return self

    @property
    def chat(self) -> CappedChat | None:
        """The chat whose tokens are asked for; raises ApiError."""
        if self.messages is None:
            return None
        found = {key: getattr(self, key) for key in _CHAT if getattr(self, key) is not None}
        return parse_request(CappedChat, found)

    @property
    def adds_special(self) -> bool:
        """True if the tokenizer adds the special tokens of a text's begin and end."""
        return self.add_special_tokens if self.content is None else self.add_special

    @property
    def names(self) -> bool:
        """True if the answer has the tokens' texts."""
        return bool(self.return_token_strs) or self.with_pieces

    def answer(self, tokens: list[int], names: list[bytes], context: int) -> dict[str, Any]:
        """Return the answer: tokens with their texts where the request asks for them."""
        if self.content is not None:
            return {"tokens": [*map(_write_piece, tokens, names)] if self.with_pieces else tokens}
        strings = [name.decode(errors="replace") for name in names]
        return {
            "count": len(tokens),
            "max_model_len": context,
            "tokens": tokens,
            "token_strs": strings if self.return_token_strs else None,
        }


def _write_piece(token: int, name: bytes) -> dict[str, Any]:
    """Return a token with its text, or with its bytes where these are no text."""
    try:
        return {"id": token, "piece": name.decode()}
    except UnicodeDecodeError:
        return {"id": token, "piece": [*name]}


class Detokenize(Fields):
    """A request for the text of tokens."""

    model: Short | None = None
    tokens: Annotated[list[Token], Field(fail_fast=True)]

    def check(self, vocabulary: int | None) -> None:
        """Raise ApiError with 400 for a token that the model does not have."""
        largest = max(self.tokens, default=0)
        if vocabulary is not None and largest >= vocabulary:
            raise refuse_token(largest, vocabulary, "tokens")
