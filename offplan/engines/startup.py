"""Reports of an engine on its offloading when it starts: in its log, or asked as a server.

Source: ``offplan.vllm``; vLLM 0.25.0 to 0.33.0, ``offloader`` and ``gpu_model_runner``; SGLang
0.5.23, ``utils/offloader`` and ``model_runner``.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offplan.engines.engine import Flags
from offplan.engines.taken import IN_FORCE

GIB = 2**30
MOST_GIB = 2**30
"""Beyond any GPU's memory."""


@dataclass(frozen=True)
class Startup:
    """The engine's report; None or empty is what it left out."""

    version: str | None = None
    loaded_bytes: float | None = None
    """GPU memory that loading the weights took."""
    offloaded_bytes: float | None = None
    num_layers: int | None = None
    """Layers that something is offloaded of."""
    flags: Flags = field(default_factory=dict)
    """Options that it says to have, of those that offload: a switch that is on has no values, and
    one that is off ``OFF``."""
    environment: Mapping[str, str] = field(default_factory=dict)
    in_force: tuple[str, ...] = ()
    """Weights that each rank of offplan's worker reports, compared with the plan by then."""
    stages: Mapping[int, "Startup"] = field(default_factory=dict)
    """Reports of the ranks of each stage of a pipeline, by its number; none if there is one
    stage."""


OFF = ("off",)
"""The value of a switch that is off."""
SGLANG_FLAGS = (
    *("cpu_offload_gb", "offload_group_size", "offload_num_in_group", "offload_prefetch_step"),
    *("disable_shared_experts_fusion", "disable_prefill_cuda_graph"),
)
"""Fields of SGLang's server arguments that an export sets."""
_STAGE = {
    "vllm": re.compile(r"\(Worker\w*_PP(\d+)\w* pid="),
    "sglang": re.compile(r"\[[^\[\]]* PP(\d+)\b[^\[\]]*\]"),
}
"""Pattern of lines that name the stage of the rank that wrote them.

Source: vLLM's ``setup_proc_title_and_log_prefix``; SGLang's ``configure_scheduler_process``.
"""
_VLLM_VERSION = re.compile(r"Initializing a V1 LLM engine \(v([\w.+]+)\)")
_VLLM_LOADED = re.compile(r"Model loading took (\d+(?:\.\d+)?) GiB")
_VLLM_IN_PLACE = re.compile(r"Total CPU offloaded parameters: (\d+(?:\.\d+)?)")
_VLLM_PREFETCH = re.compile(
    r"\[PrefetchOffloader\] Initialized (\d+) modules\. "
    r"Total GPU memory saved: (\d+(?:\.\d+)?) GB, "
    r".*?\(group_size=(\d+), num_in_group=(\d+), prefetch_step=(\d+),"
)
_WORKER = re.compile(re.escape(IN_FORCE) + r"(.*\S)")
_SGLANG_LOADED = re.compile(r"Load weight end\..*? mem usage=(\d+(?:\.\d+)?) GB")
_SGLANG_LAYER = re.compile(r"\[offloader\] offload module_index=(\d+) ")


def read_log(engine: str, text: str) -> Startup:
    """Read the log of ``vllm`` or ``sglang``, from its start on."""
    read = _read_vllm_log if engine == "vllm" else _read_sglang_log
    lines: defaultdict[int, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if (found := _STAGE[engine].search(line)) is not None:
            lines[int(found[1])].append(line)
    return replace(read(text), stages={stage: read("\n".join(of)) for stage, of in lines.items()})


def read_server(engine: str, text: str) -> Startup:
    """Read what a server answers to ``/server_info``; raises ValueError for anything else."""
    try:
        data = json.loads(text)
        return _read_vllm_server(data) if engine == "vllm" else _read_sglang_server(data)
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"no {error} in what the server says of itself") from None
    except RecursionError:
        raise ValueError("what the server says of itself is nested too deeply") from None


def _read_vllm_log(text: str) -> Startup:
    version = _VLLM_VERSION.search(text)
    named = None if version is None else version[1]
    loaded_bytes = _last_gib(_VLLM_LOADED, text)
    if told := tuple(found[1] for found in _WORKER.finditer(text)):
        return Startup(named, loaded_bytes, in_force=told)
    if (ring := _last(_VLLM_PREFETCH, text)) is not None:
        names = ("offload-group-size", "offload-num-in-group", "offload-prefetch-step")
        flags = {name: (value,) for name, value in zip(names, ring.groups()[2:], strict=True)}
        return Startup(named, loaded_bytes, float(ring[2]) * 1e9, int(ring[1]), flags)
    # said once for all layers, and again for each tower: the last one counts all
    return Startup(named, loaded_bytes, _last_gib(_VLLM_IN_PLACE, text))


def _read_sglang_log(text: str) -> Startup:
    layers = {found[1] for found in _SGLANG_LAYER.finditer(text)}
    return Startup(loaded_bytes=_last_gib(_SGLANG_LOADED, text), num_layers=len(layers) or None)


def _read_vllm_server(data: Mapping[str, Any]) -> Startup:
    config, environment = data["vllm_config"], data["vllm_env"]
    options = {**config["offload_config"]["prefetch"], **config["offload_config"]["uva"]}
    return Startup(
        flags={name.replace("_", "-"): _words(value) for name, value in options.items()},
        environment={name: str(value) for name, value in environment.items()},
    )


def _read_sglang_server(data: Mapping[str, Any]) -> Startup:
    usage = data["internal_states"][0].get("memory_usage", {}).get("weight")
    if usage is not None and not 0 <= float(usage) < MOST_GIB:
        raise ValueError(f"{usage} GiB of weights in what the server says of itself")
    return Startup(
        version=data["version"] if isinstance(data["version"], str) else None,
        loaded_bytes=None if usage is None else float(usage) * GIB,
        flags={name.replace("_", "-"): _words(data[name]) for name in SGLANG_FLAGS},
    )


def _words(value: Any) -> tuple[str, ...]:
    if isinstance(value, bool):
        return () if value else OFF
    return tuple(map(str, value)) if isinstance(value, list) else (str(value),)


def _last_gib(pattern: re.Pattern[str], text: str) -> float | None:
    """Return the last figure that a pattern finds, in bytes."""
    found = _last(pattern, text)
    return None if found is None else float(found[1]) * GIB


def _last(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    found = [*pattern.finditer(text)]
    return found[-1] if found else None
