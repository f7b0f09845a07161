"""Libraries' own log lines, kept from the user."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def quietly(logging: Any) -> Iterator[None]:
    """Show errors alone of a Hugging Face library, whose ``logging`` module this is."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)
