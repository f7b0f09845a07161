"""Whether ``run`` can execute a model, told from its headers and config alone."""

import gc
import json
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from offplan.checkpoint.model import Model
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.kept import KeptAnswers, installed_versions
from offplan.plan import Offload
from offplan.runtime.refusal import is_long, refuse_long_texts

if TYPE_CHECKING:
    import torch

_PATIENCE_S = 120
"""Seconds after which a model that is still being built is given up."""
_RUNS = "runs"
"""What is kept of a model that can be run."""


def _decode(content: bytes) -> str:
    if content.decode() != _RUNS:
        raise ValueError("nothing else is kept")
    return _RUNS


_RUNNABLE = KeptAnswers("runnable", len(_RUNS), str.encode, _decode)
_NEEDS_STOCK = KeptAnswers("needs_stock", len(_RUNS), str.encode, _decode)


def why_not_run(stage: Stage, context: int = 1) -> str | None:
    """Return why ``run`` cannot execute a model on texts of so many tokens, None where it can.

    ``stage`` is what offplan's own runtime holds of it.

    No weight is read or fetched: transformers' class is built without them, what its attentions ask
    for is probed, and the stored tensors are mapped to its parameters. Where torch is not imported
    yet, which planning does not need, a process of its own does it. That it can is kept on disk,
    under all that it depends on.
    """
    model = stage.model
    is_stock = stage.runner.is_stock
    try:
        if not is_stock:
            refuse_long_texts(model, context)
    except CheckpointError as error:
        return str(error)
    key = {
        "stock": is_stock,
        "model": [model.source, model.headers_sha256, model.config_sha256, model.code],
        # a plan may have some of it packed
        "held": [stage.outside_key, *(layer.key for layer in stage.layers)],
        **installed_versions(),
    }
    if _RUNNABLE.find(key) is not None:
        return None
    reason = find_obstacle(stage) if "torch" in sys.modules else _ask_process(stage)
    if reason is None:  # an obstacle may pass: a package may be missing, the machine be busy
        _RUNNABLE.keep(key, _RUNS)
    return reason


def needs_stock(model: Model, context: int) -> bool:
    """Whether transformers' own passes alone can run a model on texts of so many tokens.

    That they can is kept on disk.
    """
    key = {
        "model": [model.source, model.headers_sha256, model.config_sha256, model.code],
        "is_long": is_long(model, context),
        **installed_versions(),
    }
    if _NEEDS_STOCK.find(key) is not None:
        return True
    if why_not_run(hold(model), context) is None:
        return False
    if why_not_run(hold(model, stock=True), context) is not None:
        return False
    _NEEDS_STOCK.keep(key, _RUNS)
    return True


def find_obstacle(stage: Stage) -> str | None:
    """Say what keeps ``run`` from executing a model, None if nothing does; imports torch."""
    from offplan.runtime.loading.checks import list_shared
    from offplan.runtime.loading.mapping import map_tensors
    from offplan.runtime.loading.skeleton import build_skeleton
    from offplan.runtime.loading.stock import build_stock

    is_stock = stage.runner.is_stock
    try:
        skeleton = (build_stock if is_stock else build_skeleton)(stage.model)
        targets = map_tensors(skeleton, stage)
        if is_stock:
            list_shared(skeleton, targets)
    except CheckpointError as error:
        return str(error)
    return None


def check_before_fetching(
    model: Model, offload: Offload, context: int, device: "torch.device", *, stock: bool = False
) -> None:
    """Raise what a session would, where weights may be on the Hub still: what needs none to tell.

    That is CheckpointError for a model that cannot run, or not on texts of ``context`` tokens,
    PlanError for a plan's decision that does not fit it, MemoryLimitError where the host's memory
    or a second GPU is lacking, and OffplanError where a GPU's compiler is.
    """
    if model.revision is None and Path(model.source).exists():  # loading says so itself
        return
    from offplan.runtime.loading.prepared import prepare
    from offplan.runtime.model.layers import require_triton

    if not stock:
        refuse_long_texts(model, context)
        if device.type == "cuda":
            require_triton()
    prepare(model, offload, device, stock=stock)


def _ask_process(stage: Stage) -> str | None:
    command = [sys.executable, "-c", "from offplan.library.runnable import answer; answer()"]
    # without what was worked out of its config, which may hold functions that cannot be pickled
    asked = pickle.dumps((replace(stage.model), stage.packing, stage.runner.is_stock))
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, timeout=_PATIENCE_S, check=True
        )
        reason: str | None = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        return f"that could not be told ({type(error).__name__} while it was built)"
    return reason


def answer() -> None:
    """Read a model of our own making from stdin, and print what keeps ``run`` from executing it."""
    gc.disable()  # a process of one question: there is no garbage worth the time
    model, packing, stock = pickle.load(sys.stdin.buffer)
    print(json.dumps(find_obstacle(hold(model, packing, stock=stock))))
    gc.freeze()
