"""The model and the machine that a plan was made for, found again."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.checkpoint.weights import require_checkpoint
from offplan.drafts.acceptance import AcceptanceProfile, load_acceptance
from offplan.errors import CheckpointError, DriftError, HubError, InputError
from offplan.files import StrPath
from offplan.machine.name import parse_name
from offplan.machine.profile import MachineProfile, load_profile
from offplan.plan import Plan
from offplan.progress import Progress
from offplan.routing.profile import RoutingProfile, load_routing


def read_planned_model(
    plan: Plan,
    model: StrPath | None = None,
    on_progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> Model:
    """Read the headers of a plan's model as it is by now: where the plan says, or at ``model``.

    ``trust_remote_code`` and ``on_progress`` are those of ``open_model``; no plan grants the first.
    Raises CheckpointError and HubError.
    """
    revision = plan.model.revision if model is None else None
    source = _locate(plan) if model is None else os.fspath(model)
    # of a config alone the plan says what type its weights are stored in
    dtype = plan.model.dtype if revision is None and source.endswith(".json") else None
    try:
        found = open_model(
            source,
            revision=revision,
            dtype=dtype,
            trust_remote_code=trust_remote_code,
            on_progress=on_progress,
        )
        require_checkpoint(found)
        return found
    except (CheckpointError, HubError) as error:
        if dtype is None and model is None:
            raise type(error)(f"{error}; or name a copy of it as `model`") from error
        if dtype is None:
            raise
    return open_model(source, on_progress=on_progress)  # another type, which is drift


def find_planned_model(
    plan: Plan, model: StrPath | None = None, on_progress: Progress | None = None
) -> Model | None:
    """Read the headers of a plan's model where that takes no network, None where it takes one.

    ``model`` and ``on_progress`` are those of ``read_planned_model``. Raises CheckpointError for
    files that cannot be read.
    """
    if os.path.exists(model or _locate(plan)) and plan.model.revision is None:
        return read_planned_model(plan, model, on_progress)
    from offplan.checkpoint.failures import NoSuchFile
    from offplan.checkpoint.hub import offline  # it takes a while to import

    with offline(), suppress(NoSuchFile):
        return read_planned_model(plan, model, on_progress)
    return None


def describe_drift(plan: Plan, model: Model) -> Iterator[str]:
    """Yield what makes a model another one than the plan's, and what to do about it."""
    if model.headers_sha256 != plan.model.headers_sha256:
        yield (
            f"the plan was made for headers {plan.model.headers_sha256[:12]} of "
            f"{plan.model.source}; {model.source} has {model.headers_sha256[:12]}: plan it again "
            "(offplan replan --accept-drift), or name another copy as `model`"
        )
    if plan.model.config_sha256 not in (None, model.config_sha256):
        yield (
            f"the plan was made for config.json {plan.model.config_sha256[:12]}; "
            f"{model.source} has {model.config_sha256[:12]}, which may give other tokens: "
            "plan it again (offplan replan --accept-drift), or restore the file"
        )
    generation = plan.model.generation_config_sha256
    if generation is not None and model.generation not in (None, generation):
        yield (
            f"the plan was made for generation_config.json {generation[:12]}; {model.source} has "
            f"{model.generation[:12] or 'none'}, which may give other texts: "
            "plan it again (offplan replan --accept-drift), or restore the file"
        )
    if model.dtype != plan.model.dtype:
        yield (
            f"the plan was made for {plan.model.dtype}; {model.source} computes in {model.dtype}: "
            "plan it again (offplan replan --accept-drift)"
        )


def open_planned_model(
    plan: Plan,
    model: Model | StrPath | None = None,
    on_progress: Progress | None = None,
    *,
    trust_remote_code: bool = False,
) -> Model:
    """Read the headers of a plan's model, and check that they are those of the plan.

    ``model`` is where it is to be read, a folder, a ``config.json`` or a Hub id, instead of where
    the plan says. Or it is the model itself, open already. ``trust_remote_code`` and
    ``on_progress`` are those of ``open_model``.

    Raises CheckpointError, HubError, and DriftError if the headers, or the type that the model
    computes in, are not those of the plan.
    """
    if not isinstance(model, Model):
        model = read_planned_model(plan, model, on_progress, trust_remote_code=trust_remote_code)
    for drift in describe_drift(plan, model):
        raise DriftError(drift)
    return model


def open_planned_profile(plan: Plan) -> MachineProfile | None:
    """Read the profile that a plan was made from; None where it was measured and kept in none.

    Raises ProfileError where it is gone or not valid.
    """
    name = plan.machine.profile
    if name is None:
        return None
    return load_profile(parse_name(name).move(plan.locate))


def open_planned_machine(plan: Plan) -> MachineProfile | None:
    """Read the same profile, with the link that the plan's GPUs have to the plan's store.

    Raises ProfileError as ``open_planned_profile`` does, and where that link is not known.
    """
    profile = open_planned_profile(plan)
    if profile is None:
        return None
    return profile.with_link(plan.offload.store, plan.goal)


def find_planned_routing(plan: Plan) -> RoutingProfile | None:
    """Return the routing profile that a plan was made from; None where it is gone, or another."""
    if plan.routing is None:
        return None
    try:
        profile = load_routing(Path(plan.locate(plan.routing.file)))
    except InputError:
        return None
    return profile if profile.fingerprint == plan.routing.fingerprint else None


def find_planned_acceptance(plan: Plan) -> AcceptanceProfile | None:
    """Return a plan's acceptance profile as ``find_planned_routing`` does its routing profile."""
    if plan.acceptance is None:
        return None
    try:
        profile = load_acceptance(Path(plan.locate(plan.acceptance.file)))
    except InputError:
        return None
    return profile if profile.fingerprint == plan.acceptance.fingerprint else None


def _locate(plan: Plan) -> str:
    """Return what a plan's source is from here: a path, which starts at the plan's file, or an id.

    A file at that path from the current folder is never meant: from another one it would not be.
    """
    source = plan.model.source
    located = plan.locate(source)
    is_written_so = source.startswith((".", os.sep))
    is_there = is_written_so or os.path.exists(located) or os.path.exists(source)
    return located if plan.model.revision is None and is_there else source
