"""Names all that a model's layer times depend on, so that they can be kept and found again."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import transformers
from pydantic import Field, TypeAdapter

import offplan
from offplan.disk_cache import KeptAnswers
from offplan.held.stage import Stage
from offplan.hostmem.limits import read_text
from offplan.machine.profile import LayerTime
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


LayerTimes = Annotated[tuple[LayerTime, ...], Field(min_length=1)]
"""The layer times of one model at one workload on one machine."""
_ADAPTER: TypeAdapter[LayerTimes] = TypeAdapter(LayerTimes)


def _encode(times: LayerTimes) -> bytes:
    return json.dumps([time.model_dump() for time in times], indent=1).encode()


def _decode(content: bytes) -> LayerTimes:
    return _ADAPTER.validate_python(json.loads(content))


LAYER_TIMES = KeptAnswers("layer-times", 2**26, _encode, _decode)
"""One time takes some 200 bytes: no model's are as long as that."""
