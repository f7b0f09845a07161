"""The ways to say that ``run`` cannot run a model, or not on such texts."""

from offplan.checkpoint.jsontext import describe
from offplan.checkpoint.model import Model
from offplan.checkpoint.own_code import name_packages
from offplan.errors import CheckpointError


def refuse(why: str) -> CheckpointError:
    """Make the error for a model that ``run`` cannot run, though it can be planned."""
    return CheckpointError(f"{why}; `run` cannot run it. Its plan can still be made and exported")


def is_long(model: Model, context: int) -> bool:
    """Return True if indexers choose what is seen of texts of so many tokens."""
    most = model.architecture.index_topk
    return most is not None and context > most


def refuse_long_texts(model: Model, context: int) -> None:
    """Raise CheckpointError if ``run`` cannot run texts of so many tokens."""
    most = model.architecture.index_topk
    if is_long(model, context):
        raise CheckpointError(
            f"{model.source} has sparse attention, whose indexers choose what is seen of texts of "
            f"more than {most} tokens; `run` knows no longer ones (found a context of {context}): "
            f"plan with `context={most}` or less"
        )


def refuse_config(model: object, error: Exception) -> CheckpointError:
    """Make the error for what a model's class raises before any weight is there."""
    missing = name_packages(error)
    if missing is not None:
        return refuse(f"{type(model).__name__} cannot be built: {missing}")
    return refuse(
        f"{type(model).__name__} fails before it has weights ({describe(error, 200)}); correct "
        "config.json if it contradicts itself"
    )
