"""The text and the bytes of a single token."""

import re
from functools import cached_property
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>\Z")


class TokenNames:
    """Names tokens of a tokenizer, as answers with logprobs do."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def find_bytes(self, token: int) -> bytes:
        """Return a token's bytes, which may be part of a character; none for an unknown token.

        Source: the byte-level alphabet of GPT-2's tokenizer, and SentencePiece's byte fallback.
        """
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if not isinstance(piece, str):
            return b""
        if found := _BYTE.match(piece):
            return bytes([int(found[1], 16)])
        if self._alphabet and all(letter in self._alphabet for letter in piece):
            return bytes(self._alphabet[letter] for letter in piece)
        return piece.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()

    def name(self, token: int) -> str:
        """Return a token's text; bytes that are no whole character are written as ``\\xe2``."""
        return self.find_bytes(token).decode(errors="backslashreplace")

    @cached_property
    def _alphabet(self) -> dict[str, int]:
        """Which byte each letter stands for; empty for a tokenizer that has no such letters."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if "ByteLevel" not in repr(getattr(backend, "decoder", None)):
            return {}
        from offplan.transformers_private import bytes_to_unicode

        return {letter: byte for byte, letter in bytes_to_unicode().items()}
