"""What work that takes a while calls to say how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all: shards, steps or bytes."""
