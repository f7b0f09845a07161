"""The one way to say that ``run`` cannot run a model."""

from offplan.checkpoint.jsontext import describe
from offplan.errors import CheckpointError


def refuse(why: str) -> CheckpointError:
    """Make the error for a model that ``run`` cannot run, though it can be planned."""
    return CheckpointError(f"{why}; `run` cannot run it. Its plan can still be made and exported")


def refuse_config(model: object, error: Exception) -> CheckpointError:
    """Make the error for what a model's class raises before any weight is there."""
    return refuse(
        f"{type(model).__name__} fails before it has weights ({describe(error, 200)}); correct "
        "config.json if it contradicts itself"
    )
