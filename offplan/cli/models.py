"""How commands find the model they work on."""

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING

from offplan.cli.output import Progress
from offplan.errors import DriftError, InputError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.plan import Plan


def open_named_model(source: str, revision: str | None, name: str | None) -> "Model":
    """Read a model's headers; ``name`` is what it is called from here on.

    Raises CheckpointError and HubError.
    """
    from offplan.checkpoint.open import open_model

    model = open_model(source, revision=revision, on_progress=Progress("reading headers"))
    return model if name is None else dataclasses.replace(model, source=name)


def open_planned_model(plan: "Plan", local: str | None) -> "Model":
    """Read the headers of the plan's model, from ``local`` if given.

    Raises CheckpointError, HubError, and DriftError if the headers, or the type that the model
    computes in, are not those of the plan.
    """
    source, revision = (local, None) if local else (plan.model.source, plan.model.revision)
    model = open_named_model(source, revision, None)
    if model.headers_sha256 != plan.model.headers_sha256:
        raise DriftError(
            f"the plan was made for headers {plan.model.headers_sha256[:12]} of "
            f"{plan.model.source}; {source} has {model.headers_sha256[:12]}: plan it again, or "
            "name another copy with --model"
        )
    if model.dtype != plan.model.dtype:
        raise DriftError(
            f"the plan was made for {plan.model.dtype}; {source} computes in {model.dtype}: plan "
            "it again"
        )
    return model


def find_weights(model: "Model") -> Path:
    """Return the folder that holds the model's shards, fetched from the Hub if need be.

    Raises InputError for a model known from its config alone.
    """
    source = Path(model.source)
    if source.is_dir():
        return source
    shards = {t.shard for layer in model.layers for p in layer.parameters for t in p.tensors}
    shards |= {tensor.shard for tensor in model.outside}
    files = sorted(shard for shard in shards if shard is not None)
    if not files or source.exists():
        raise InputError(
            f"{model.source} has no weights: name a folder that has with --model, or run on "
            "random ones with --dummy-weights"
        )
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model.source, revision=model.revision, allow_patterns=[*files]))
