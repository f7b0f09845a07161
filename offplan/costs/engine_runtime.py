"""How the runtimes of engines move what a plan offloads, where they differ from each other."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from offplan.held.stage import Stage


@dataclass(frozen=True)
class EngineRuntime:
    """What an engine does with a plan's layers; what all engines do stands in ``engine_times``."""

    copies_in_place: bool
    """Whether it copies what it is told to read in place, each layer before it runs."""
    allocates_copies: bool
    """Whether it allocates each copy anew, and only then frees the layer that has run, which holds
    one slot of the ring. After the last layers it then copies the first ones in their order;
    elsewhere each slot is filled again by the first of its own layers."""
    copies_first_again: bool
    """Whether a captured step copies again what the step before it has left in the ring."""
    shares_blocks: bool
    """Whether caches of all layers lie in blocks of one size (``vllm_cache``)."""

    def slots_ahead(self, num_slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return how many of a ring's slots are filled ahead of the layer that runs."""
        return np.maximum(1, num_slots - self.allocates_copies)


_VLLM = EngineRuntime(
    copies_in_place=False, allocates_copies=False, copies_first_again=False, shares_blocks=True
)
SGLANG = EngineRuntime(
    copies_in_place=True, allocates_copies=True, copies_first_again=True, shares_blocks=False
)
"""While it captures, it does not take what was copied outside the graph, and the last layers'
copies are captured all the same.
Source: SGLang 0.5.23, ``_hook_module_forward_for_offloader``, ``_ModuleOffloader``."""
NUM_POOLS = 2
"""Pools of GPU memory that hold SGLang's copies: that of prompts, and that of captured steps."""
_RUNTIMES = {"vllm": _VLLM, "vllm-worker": _VLLM, "sglang": SGLANG}


def engine_runtime(stage: Stage) -> EngineRuntime | None:
    """Return how the engine that loads a model runs it; None where offplan's own runtime does."""
    return None if stage.engine is None else _RUNTIMES[stage.engine]
