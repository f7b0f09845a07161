"""For tests of commands: processes that have imported torch and transformers."""

import os
from collections.abc import Iterator
from contextlib import closing

import pytest

from tests.warm import TORCH, Warm


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Where processes begin that a test claims no more of than what they do."""
    with closing(Warm(TORCH, os.environ)) as warm:
        yield warm
