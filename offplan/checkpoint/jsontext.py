"""JSON from strangers: read strictly, and quoted so that a terminal survives it."""

import json
from collections import Counter
from collections.abc import Callable
from typing import Any

from offplan.errors import CheckpointError

_MAX_VALUES = 2_000_000
"""Most values that a text may hold: those of a quarter of a million tensors in one file.
DeepSeek-R1 has a third of these in all of its 163 files. Each becomes an object of some hundred
bytes, so that a header as long as the format allows could otherwise fill tens of GB."""
_MAX_DEPTH = 100
"""Most values within one another in a config, past any model's: its readers recurse into them."""


def load_object(data: bytes, where: str, parse_int: Callable[[str], Any] = int) -> dict[str, Any]:
    """Read one JSON object without duplicate keys from UTF-8 bytes.

    ``parse_int`` reads numbers that are written without fraction and exponent.

    Raises CheckpointError, naming ``where``, for anything else.
    """
    # What stands in strings is counted too, which no model's names come near.
    num_values = data.count(b",") + data.count(b"[") + data.count(b"{")
    if num_values > _MAX_VALUES:
        raise CheckpointError(
            f"{where}: found {num_values} JSON values, expected {_MAX_VALUES} at most; "
            "do not trust this checkpoint"
        )
    try:
        value = json.loads(data.decode("utf-8"), object_pairs_hook=unique_keys, parse_int=parse_int)
    # RecursionError: lists nested thousands deep. ValueError covers bad UTF-8, bad JSON, keys that
    # stand twice and numbers of more digits than Python converts.
    except (ValueError, RecursionError) as error:
        reason = str(error).partition("\n")[0]
        raise CheckpointError(
            f"{where}: not valid JSON ({shorten(reason)}); the file is damaged: fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{where}: found a JSON {type(value).__name__}, expected an object; "
            "the file is damaged or not what its name says"
        )
    return value


def load_config(data: bytes, where: str) -> dict[str, Any]:
    """Read the JSON object of a config, whose keys may hold anything.

    Raises CheckpointError as ``load_object`` does, and for values nested deeply.
    """
    level: list[Any] = [config := load_object(data, where)]
    for _ in range(_MAX_DEPTH):
        within = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in within for each in values if isinstance(each, (dict, list))]
    if level:
        deep = f"{where}: found JSON values nested more than {_MAX_DEPTH} deep"
        raise CheckpointError(f"{deep}, expected fewer; do not trust this checkpoint")
    return config


def quote(value: object) -> str:
    """Show a value from a file in an error: control characters escaped, never long."""
    try:
        return shorten(ascii(value))
    except RecursionError:
        return f"a deeply nested {type(value).__name__}"


def shorten(text: str, limit: int = 120) -> str:
    """Cut a text for an error message."""
    return text if len(text) <= limit else f"{text[:limit]}..."


def describe(error: BaseException, limit: int = 120) -> str:
    """Return an error's kind and its text, on one line, for another error's message."""
    text = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(":")
    return shorten("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text), limit)


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make an object of its pairs, for ``json.loads``; raises ValueError for a key twice."""
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = Counter(key for key, _ in pairs)
        twice, _ = counts.most_common(1)[0]
        raise ValueError(f"the key {quote(twice)} stands twice")
    return value
