"""Transformers' own passes as a runner; what they take is counted once, and kept on disk."""

import json
import pickle
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from offplan.checkpoint.model import Model
from offplan.disk_cache import KeptAnswers, installed_packages, installed_versions
from offplan.errors import CheckpointError
from offplan.held.counted import CountedPasses
from offplan.held.runner import Counter, OwnRuntime
from offplan.held.stage import Stage
from offplan.plan import Plan

_PATIENCE_S = 600
"""Seconds after which counting is given up."""
_MAX_BYTES = 2**24


class StockRuntime(OwnRuntime):
    """offplan's own runtime where it runs transformers' own passes: it moves weights, no more."""

    holds_packed = False

    def count(self, model: Model, here: Counter | None = None) -> CountedPasses:
        """Return what the passes take; raises CheckpointError where that cannot be counted."""
        return find_passes(model, here)

    def note_memory(self, plan: Plan, stages: Sequence[Stage]) -> list[str]:
        """Say by which passes the model runs, and what is not priced of them."""
        notes = ["transformers' own passes run this model, uncaptured; offplan moves its weights"]
        passes = stages[0].passes
        if passes is not None and (calls := passes.describe_calls()) is not None:
            notes.append(calls)
        return notes


def encode_passes(answer: CountedPasses | str) -> bytes:
    """Encode what passes take, or why that cannot be counted, as JSON."""
    return json.dumps(answer if isinstance(answer, str) else asdict(answer)).encode()


def _decode(content: bytes) -> CountedPasses | str:
    told = json.loads(content)
    return told if isinstance(told, str) else CountedPasses(**told)


_PASSES = KeptAnswers("stock", _MAX_BYTES, encode_passes, _decode)


def find_passes(model: Model, here: Counter | None = None) -> CountedPasses:
    """Find what transformers' own passes of a model take.

    No weight is read. ``here`` counts in this process; left out, a process of its own does. The
    answer is kept on disk: a refusal under all that is installed, as a package may be missing.
    Raises CheckpointError where the passes cannot be counted.
    """
    key = {"model": model.key, **installed_versions()}
    refusal_key = {**key, "source": model.source, "packages": installed_packages()}
    found = _PASSES.find(key) or _PASSES.find(refusal_key)
    if found is None:
        found = _ask_process(model) if here is None else _decode(encode_passes(here(model)))
        is_refusal = isinstance(found, str)
        if not is_refusal or model.code is None:  # a checkpoint's own code may change its mind
            _PASSES.keep(refusal_key if is_refusal else key, found)
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


def _ask_process(model: Model) -> CountedPasses | str:
    command = (
        "from offplan.lean import import_less; import_less(); "
        "from offplan.runtime.stock.passes import answer; answer()"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", command],
            input=pickle.dumps(replace(model)),
            capture_output=True,
            timeout=_PATIENCE_S,
            check=True,
        )
        return _decode(done.stdout)
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        raise CheckpointError(
            f"{model.source}: what transformers' own passes take could not be counted "
            f"({type(error).__name__})"
        ) from None
