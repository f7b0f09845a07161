"""Costs of a model's passes by transformers: counted once, in a process, and kept on disk."""

import json
import pickle
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil

from offplan.checkpoint.model import Model
from offplan.errors import CheckpointError
from offplan.kept import KeptAnswers, installed_packages, installed_versions

_PATIENCE_S = 600
"""Seconds after which counting is given up."""
_MAX_BYTES = 2**24


@dataclass(frozen=True)
class StockPasses:
    """The costs of a model's passes, for one sequence unless they say otherwise."""

    is_estimated: bool
    """True if small passes were measured, as passes without values fail."""
    calls: Mapping[str, Sequence[int]]
    """The layers in the order in which a pass of each phase calls them."""
    caches: Sequence[tuple[int, int | None, int]]
    """Of each layer the bytes of a token, the tokens kept at most, and the bytes of a state."""
    prompt_bytes: tuple[float, float, float]
    """Temporaries of a prompt: bytes for any, for each token, and for each pair of tokens."""
    step_bytes: tuple[float, float]
    """Temporaries of a decode step: bytes for any, and for each token of its context."""
    pinned: Sequence[str]
    """Stored tensors of layers that loading splits or joins, or that several layers read: no rule
    takes them."""
    borrowed: Sequence[int]
    """Elements of the matrices of other layers that each layer reads, too."""
    operators: Mapping[str, Sequence[int]]
    """Operators that a pass launches in each layer, by phase; then those outside the layers."""
    prompt_moved: Sequence[tuple[float, float, float]]
    """Bytes that operators read and write beside weights, in each layer and outside the layers.
    They are for any prompt, for each token, and for each pair of tokens."""
    step_moved: Sequence[tuple[float, float]]
    """The same of a decode step: for any, and for each token of its context."""

    def moved_bytes(self, index: int, phase: str, batch: int, tokens: int, context: int) -> float:
        """Bytes that operators of a pass read and write in a layer; -1 is what lies outside."""
        if phase == "decode":
            fixed, of_token = self.step_moved[index]
            return fixed + batch * of_token * context
        fixed, of_token, of_pair = self.prompt_moved[index]
        return fixed + batch * (of_token * tokens + of_pair * tokens * tokens)

    def activation_bytes(self, batch: int, chunk: int, context: int) -> tuple[int, int]:
        """Bytes of the temporaries of a prompt of ``chunk`` tokens, and of a decode step."""
        fixed, of_token, of_pair = self.prompt_bytes
        prompt = fixed + batch * (of_token * chunk + of_pair * chunk * chunk)
        fixed, of_token = self.step_bytes
        return ceil(prompt), ceil(batch * (fixed + of_token * context))

    def describe_calls(self) -> str | None:
        """Say that a pass calls layers several times, if it does."""
        called = self.calls["decode"]
        if len(called) == len({*called}):
            return None
        return f"a pass makes {len(called)} calls of {len({*called})} layers, each with its weights"


def encode_passes(answer: StockPasses | str) -> bytes:
    """Encode what passes take, or why that cannot be counted, as JSON."""
    return json.dumps(answer if isinstance(answer, str) else asdict(answer)).encode()


def _decode(content: bytes) -> StockPasses | str:
    told = json.loads(content)
    return told if isinstance(told, str) else StockPasses(**told)


_PASSES = KeptAnswers("stock", _MAX_BYTES, encode_passes, _decode)


def find_passes(
    model: Model, count: Callable[[Model], StockPasses | str] | None = None
) -> StockPasses:
    """Find what transformers' own passes of a model take.

    No weight is read. ``count`` counts them in this process, or returns why it cannot; left out, a
    process of its own does. The answer is kept on disk: a refusal under all that is installed, as a
    package may be missing. Raises CheckpointError where the passes cannot be counted.
    """
    key = {"model": model.key, **installed_versions()}
    refusal_key = {**key, "source": model.source, "packages": installed_packages()}
    found = _PASSES.find(key) or _PASSES.find(refusal_key)
    if found is None:
        found = _ask_process(model) if count is None else _decode(encode_passes(count(model)))
        is_refusal = isinstance(found, str)
        if not is_refusal or model.code is None:  # a checkpoint's own code may change its mind
            _PASSES.keep(refusal_key if is_refusal else key, found)
    if isinstance(found, str):
        raise CheckpointError(found)
    return found


def _ask_process(model: Model) -> StockPasses | str:
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
