"""Callbacks by which work that takes a while reports how far it is."""

from collections.abc import Callable

Progress = Callable[[int, int], None]
"""Called with what is done and what there is in all: shards, steps or bytes."""
Stages = Callable[[str], Progress]
"""Called as a stage of the work begins, with its name; returns what hears how far that stage is."""


def silent(stage: str) -> Progress:
    """Begin a stage that nobody watches."""
    return lambda done, total: None
