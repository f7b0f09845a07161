"""Names all that a model's layer times depend on, so that they can be kept and found again."""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

import offplan
from offplan.held.stage import Stage
from offplan.hostmem.cgroups import read_text
from offplan.plan import Workload

_RUNTIME = Path(__file__).parents[1]
_OF_WHOLE_PLANS = (
    *("generate", "prompts", "texts"),
    *("accelerated", "bench", "timed_link", "versus"),
)
"""Files of the runtime that no layer's time depends on."""
_BESIDE = (
    *("capabilities", "forms", "held", "backends.py", "kernel_sizes.py"),
    *("placement.py", "routed_experts.py", "schedule.py"),
)
"""Files beside the runtime's that it computes by."""


def layer_times_key(stage: Stage, workload: Workload, chunks: Sequence[int]) -> dict[str, Any]:
    """Name all that ``measure_layer_times`` depends on, as plain JSON, for the current CUDA device.

    The runtime counts by its source: a checkout changes more often than its version.
    """
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": [gpu.name, gpu.total_memory, gpu.multi_processor_count],
        # its version and build, as Linux tells them; empty elsewhere
        "driver": read_text(Path("/proc/driver/nvidia/version")).strip(),
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "offplan": offplan.__version__,
        "runtime_sha256": _sha256(b"".join(path.read_bytes() for path in timed_sources())),
        "layers": [stage.time_key(layer.key) for layer in stage.layers],
        "outside": stage.time_key(stage.outside_key),
        # heads, positions and activations show in no parameter's shape
        "model": stage.model.key,
        "phases": ["prefill", "decode"],
        "batch": workload.batch,
        "context": workload.context,
        "prompt_tokens": workload.prompt_tokens,
        "prefill_tokens": list(chunks),
        "decode_context": workload.decode_context,
    }


def timed_sources() -> list[Path]:
    """Files of what runs a layer and of what times it, in a fixed order."""
    files = (path.relative_to(_RUNTIME) for path in _RUNTIME.rglob("*.py"))
    timed = [_RUNTIME / path for path in sorted(files) if path.stem not in _OF_WHOLE_PLANS]
    beside = (_RUNTIME.with_name(name) for name in _BESIDE)
    shared = [each for path in beside for each in sorted(path.rglob("*.py")) or [path]]
    return [*timed, *shared]


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
