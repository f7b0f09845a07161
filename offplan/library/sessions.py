"""``open_session``: from a plan to a loaded model that runs by it."""

import torch

from offplan.checkpoint.model import Model
from offplan.checkpoint.weights import find_weights
from offplan.errors import InputError
from offplan.files import StrPath
from offplan.library.held_memory import check_held
from offplan.library.planned import open_planned_model
from offplan.library.runnable import check_before_fetching
from offplan.library.settled import Settle, leave_as_stored, load_settled, settle_sampled
from offplan.plan import Plan, take_plan
from offplan.progress import Stages, silent
from offplan.runtime.device import find_device
from offplan.runtime.session import Session


def open_session(
    plan: Plan | StrPath,
    *,
    model: Model | StrPath | None = None,
    device: str | torch.device | None = None,
    dummy_weights: bool = False,
    on_stage: Stages = silent,
) -> Session:
    """Load a plan's model as the plan says, ready to ``generate``; close it, or use ``with``.

    ``plan`` is the plan or its file. ``model`` is the plan's model, opened already or where it is
    to be read instead of where the plan says. ``device`` is ``cuda``, ``cuda:1`` or ``cpu``; left
    out, it is a GPU if there is one. ``dummy_weights`` are random, and none are read. ``on_stage``
    hears what begins.

    offplan prices nothing: it checks the bytes of weights, ring, store and KV cache by the plan's
    decision and workload against its budget. Activations and overhead are those that the plan
    records.

    Raises CheckpointError, HubError and DriftError if the model is not the plan's. Raises PlanError
    if the decision does not fit the model or exceeds the budget. Raises UnpackableError for weights
    that the plan packs and that do not pack, unless they are resident and fit the budget as stored.
    Raises InputError for a device that is not here and a model without weights. Raises
    MemoryLimitError, and what Session raises. Whatever was taken until then is given back.
    """
    plan = take_plan(plan)
    plan.require_one_gpu()
    found = open_planned_model(plan, model, on_stage("reading headers"))
    check_held(plan, found)
    chosen = find_device(device)
    return load_session(plan, found, chosen, dummy_weights=dummy_weights, on_stage=on_stage)[1]


def load_session(
    plan: Plan,
    model: Model,
    device: torch.device,
    *,
    dummy_weights: bool = False,
    record_routing: bool = False,
    host_threads: int | None = None,
    on_stage: Stages = silent,
    settle: Settle | None = None,
) -> tuple[Plan, Session]:
    """Do what ``open_session`` does, once plan and model are checked and the device is found.

    Returns the plan that was loaded by, too: the one that ``settle`` returns if weights turn out
    not to pack. Weights are also checked before they are loaded. Without ``settle``, they are held
    as they are stored if the plan has room for them. ``record_routing`` and ``host_threads``, the
    plan's if left out, are Session's.
    """
    if not dummy_weights:
        asked = plan.offload, plan.workload.context, device, plan.goal.way
        check_before_fetching(model, *asked)
        if settle is not None:
            plan = settle_sampled(plan, model, settle)

    def load(plan: Plan) -> Session:
        return Session(
            model,
            plan.offload,
            context=plan.workload.context,
            device=device,
            folder=None
            if dummy_weights
            else find_weights(model, on_stage("fetching weights, MiB")),
            record_routing=record_routing,
            way=plan.goal.way,
            host_threads=host_threads or plan.goal.host_threads,
            on_progress=on_stage("loading"),
        )

    return load_settled(plan, model, device, load, settle or leave_as_stored)


def check_context(plan: Plan, prompt_tokens: int, num_tokens: int) -> None:
    """Raise InputError unless a prompt and so many new tokens fit the context of a plan."""
    context = plan.workload.context
    if prompt_tokens + num_tokens > context:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {num_tokens} new ones exceed the plan's context "
            f"of {context}: lower `num_tokens`, or plan with a larger `context`"
        )
