"""Answers whether ``run`` can execute a model, from its headers and config alone."""

import gc
import json
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offplan.capabilities.way import OWN, Way
from offplan.checkpoint.model import Model
from offplan.disk_cache import KeptAnswers, installed_packages, installed_versions
from offplan.errors import CheckpointError, OffplanError, PlanError
from offplan.held.held import hold
from offplan.held.runner import Counter
from offplan.held.runtimes import RUNTIMES
from offplan.held.stage import Stage
from offplan.lean import import_less, imports_less
from offplan.placement import Placement, place
from offplan.plan import Goal, Offload
from offplan.refusals import require_runnable
from offplan.runtime.refusal import is_long, refuse_long_texts

if TYPE_CHECKING:
    import torch

_PATIENCE_S = 120
"""Seconds after which a model that is still being built is given up."""
_RUNS = "runs"
"""The answer that is kept of a model that can be run."""


_MOST_BYTES = 10_000
"""Bytes of the longest reason that is kept."""


def _decode(content: bytes) -> str:
    if content.decode() != _RUNS:
        raise ValueError("nothing else is kept")
    return _RUNS


def _encode_obstacle(why: str) -> bytes:
    return json.dumps({"obstacle": why}).encode()


def _decode_obstacle(content: bytes) -> str:
    told = json.loads(content)
    why = told["obstacle"]
    if len(told) > 1 or not isinstance(why, str) or not why.replace("\n", " ").isprintable():
        raise ValueError("these are no words of ours")
    return why


_RUNNABLE = KeptAnswers("runnable", len(_RUNS), str.encode, _decode)
_OBSTACLES = KeptAnswers("obstacles", _MOST_BYTES, _encode_obstacle, _decode_obstacle)
_NEEDED = KeptAnswers(
    "needed_passes",
    _MOST_BYTES,
    lambda way: way.name.encode(),
    lambda name: {each.name.encode(): each for each in RUNTIMES}[name],
)


def why_not_run(
    stage: Stage, context: int = 1, offload: Offload | None = None, on_gpu: bool = False
) -> str | None:
    """Return why ``run`` cannot execute a model on texts of so many tokens, None where it can.

    ``stage`` is what offplan's own runtime holds of it, as ``offload`` says. That is the
    decision to run it by, ``on_gpu`` or on a CPU; None asks for one that offloads nothing.

    No weight is read or fetched. transformers' class is built without them, what its attentions ask
    for is probed, and the stored tensors are mapped to its parameters. A process of its own does it
    if torch is not imported yet, which planning does not need. The answer is kept on disk, under
    all that it depends on: an obstacle also under the packages that are installed.
    """
    model = stage.model
    try:
        if stage.way.is_own:
            refuse_long_texts(model, context)
    except CheckpointError as error:
        return str(error)
    offload = offload or _offload_nothing(stage)
    try:
        placement = place(stage, offload)
        require_runnable(stage, placement, offload, on_gpu=on_gpu)
    except PlanError as error:
        return str(error)
    # checked on the whole model, in which their layers are found: below some may be left out
    offload = offload.model_copy(update={"draft": None})
    # of anything else a GPU's answer is a CPU's
    on_gpu = on_gpu and (stage.dtype == "float32" or bool(placement.weight_caches))
    key = {
        "way": stage.way.name,
        "model": [model.source, model.key],
        # a plan may have some of it packed
        "held": [stage.outside_key, *(layer.key for layer in stage.layers)],
        "asked": [on_gpu, _describe_places(stage, placement)],
        **installed_versions(),
    }
    if _RUNNABLE.find(key) is not None:
        return None
    # an obstacle may pass: a package may be missing
    obstacle_key = {**key, "packages": installed_packages()}
    # a checkpoint's own code may change its mind
    reason = None if model.code else _OBSTACLES.find(obstacle_key)
    if reason is not None:
        return reason
    asked = stage, offload, on_gpu
    try:
        reason = find_obstacle(*asked) if "torch" in sys.modules else _ask_process(*asked)
    except (OSError, subprocess.SubprocessError) as error:
        return f"that could not be told ({type(error).__name__} while it was built)"
    if reason is None:
        _RUNNABLE.keep(key, _RUNS)
    elif model.code is None and len(_encode_obstacle(reason)) <= _MOST_BYTES:
        _OBSTACLES.keep(obstacle_key, reason)
    return reason


def _describe_places(stage: Stage, placement: Placement) -> list[Any]:
    """Describe what a decision does with each parameter of each kind of layer, for a key.

    How often a rule takes a layer of a kind, and by how large a ring, changes no answer.
    """
    ways = {
        (
            stage.layers[slab.layer].key,
            *(entry.unit.name, entry.unit.part.value),
            *(bool(entry.decode.why_no_kernel), entry.is_cached, entry.num_pieces > 1),
        )
        for slab in placement.slabs
        for entry in slab.entries
    }
    return [bool(placement.host_tables), *map(list, sorted(ways))]


def suit(goal: Goal, model: Model, context: int) -> Goal:
    """Return a goal with the passes that run a model on texts of so many tokens.

    Its own goal comes back but where other passes than offplan's own alone can run the model, and
    what they take can be counted. That they can is kept on disk.
    """
    if not goal.is_own:
        return goal
    key = {
        "model": [model.source, model.key],
        "is_long": is_long(model, context),
        **installed_versions(),
    }
    needed = _NEEDED.find(key)
    if needed is None:
        try:
            needed = find_way(model, goal, context)
            if needed.is_own:
                return goal
            # a process that plans alone does it itself, if it has imported torch
            counts_here = imports_less() and "torch" in sys.modules
            RUNTIMES[needed].count(model, _find_counter(needed) if counts_here else None)
        except CheckpointError:  # they fail on a config that their class does not take as it is
            return goal
        _NEEDED.keep(key, needed)
    return goal.model_copy(update={needed.name: True})


def _find_counter(way: Way) -> Counter | None:
    from offplan.runtime.executors import EXECUTORS
    from offplan.runtime.loading.capability import find_passes

    passes = find_passes(EXECUTORS, way)
    return None if passes is None else passes.count_model


def find_way(model: Model, goal: Goal, context: int) -> Way:
    """Find the passes that run a model on texts of so many tokens: a goal's, or any.

    Raises CheckpointError, which says why offplan's own or the goal's do not, where none do.
    """
    ways = [*RUNTIMES] if goal.way.is_own else [goal.way]
    obstacles = []
    for way in ways:
        why = why_not_run(hold(model, way=way), context)
        if why is None:
            return way
        obstacles.append(why)
    raise CheckpointError(obstacles[0])


def _offload_nothing(stage: Stage) -> Offload:
    return Offload(prefill_chunk=1).recoded_by(stage.recoding)


def find_obstacle(stage: Stage, offload: Offload | None = None, on_gpu: bool = False) -> str | None:
    """Say what ``why_not_run`` does, without the context; imports torch."""
    from offplan.runtime.executors import EXECUTORS
    from offplan.runtime.loading.prepared import fit, shorten

    asked, device = offload or _offload_nothing(stage), "cuda" if on_gpu else "cpu"
    try:
        if not asked.rules and stage.way.is_own:  # rules take layers by their number
            with suppress(CheckpointError):  # its words may count all layers
                fit(shorten(stage), asked, EXECUTORS, device)
                return None
        fit(stage, asked, EXECUTORS, device)
    except OffplanError as error:
        return str(error)
    return None


def check_before_fetching(
    model: Model, offload: Offload, context: int, device: "torch.device", way: Way = OWN
) -> None:
    """Raise what a session would, where weights may be on the Hub still: what needs none to tell.

    That is CheckpointError for a model that cannot run, or not on texts of ``context`` tokens. It
    is PlanError for a plan's decision that does not fit it. It is MemoryLimitError if the host's
    memory or a second GPU is lacking, and OffplanError if a GPU's compiler is.
    """
    if model.revision is None and Path(model.source).exists():  # loading says so itself
        return
    from offplan.runtime.executors import EXECUTORS
    from offplan.runtime.loading.prepared import prepare
    from offplan.runtime.model.layers import require_triton

    if way.is_own:
        refuse_long_texts(model, context)
        if device.type == "cuda":
            require_triton()
    prepare(model, offload, device, EXECUTORS, way=way)


def _ask_process(stage: Stage, offload: Offload, on_gpu: bool) -> str | None:
    command = [sys.executable, "-c", "from offplan.library.runnable import answer; answer()"]
    # without what was worked out of its config, which may hold functions that cannot be pickled
    asked = pickle.dumps((replace(stage.model), stage.way, offload, on_gpu))
    done = subprocess.run(
        command, input=asked, capture_output=True, timeout=_PATIENCE_S, check=True
    )
    reason: str | None = json.loads(done.stdout)
    return reason


def answer() -> None:
    """Read a model of our own making from stdin, and print what keeps ``run`` from executing it."""
    gc.disable()  # a process of one question: there is no garbage worth the time
    import_less()
    model, way, offload, on_gpu = pickle.load(sys.stdin.buffer)
    stage = hold(model, offload.recoding, way)
    print(json.dumps(find_obstacle(stage, offload, on_gpu)))
    gc.freeze()
