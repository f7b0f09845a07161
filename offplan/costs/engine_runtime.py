"""How the runtimes of engines move what a plan offloads, where they differ from each other."""

from dataclasses import dataclass

from offplan.checkpoint.model import Model


@dataclass(frozen=True)
class EngineRuntime:
    """What an engine does with a plan's layers; what all engines do stands in ``engine_times``."""

    copies_in_place: bool
    """Whether it copies what it is told to read in place, each layer before it runs."""
    held_slots: int
    """Slots that hold layers which have run while the copies ahead of them are under way."""
    copies_first_again: bool
    """Whether a captured step copies again what the step before it has left in the ring."""


_VLLM = EngineRuntime(copies_in_place=False, held_slots=0, copies_first_again=False)
_SGLANG = EngineRuntime(copies_in_place=True, held_slots=1, copies_first_again=True)
"""It starts the next copy before it frees the layer that has run. While it captures, it does not
take what was copied outside the graph, and the last layers' copies are captured all the same.
Source: SGLang 0.5.23, ``_hook_module_forward_for_offloader``, ``_ModuleOffloader``."""
_RUNTIMES = {"vllm": _VLLM, "vllm-worker": _VLLM, "sglang": _SGLANG}


def engine_runtime(model: Model) -> EngineRuntime | None:
    """Return how the engine that loads a model runs it; None where offplan's own runtime does."""
    return None if model.loaded_by is None else _RUNTIMES[model.loaded_by]
