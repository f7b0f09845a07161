"""The model that a plan was made for, found again and held against the plan."""

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.errors import DriftError
from offplan.plan import Plan
from offplan.progress import Progress


def open_planned_model(
    plan: Plan, model: Model | str | None = None, on_progress: Progress | None = None
) -> Model:
    """Read the headers of a plan's model, and check that they are those of the plan.

    ``model`` is where it is to be read (a folder, a ``config.json`` or a Hub id) instead of where
    the plan says, or the model itself where it is open already. ``on_progress`` hears (shards read,
    shards in all).

    Raises CheckpointError, HubError, and DriftError if the headers, or the type that the model
    computes in, are not those of the plan.
    """
    if model is None:
        model = open_model(plan.model.source, revision=plan.model.revision, on_progress=on_progress)
    elif isinstance(model, str):
        model = open_model(model, on_progress=on_progress)
    if model.headers_sha256 != plan.model.headers_sha256:
        raise DriftError(
            f"the plan was made for headers {plan.model.headers_sha256[:12]} of "
            f"{plan.model.source}; {model.source} has {model.headers_sha256[:12]}: plan it again, "
            "or name another copy with --model"
        )
    if model.dtype != plan.model.dtype:
        raise DriftError(
            f"the plan was made for {plan.model.dtype}; {model.source} computes in {model.dtype}: "
            "plan it again"
        )
    return model
