"""The one way to say that ``run`` cannot run a model."""

from offplan.errors import CheckpointError


def refuse(why: str) -> CheckpointError:
    """Make the error for a model that ``run`` cannot run, though it can be planned."""
    return CheckpointError(f"{why}; `run` cannot run it. Its plan can still be made and exported")
