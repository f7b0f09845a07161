"""A rule as vLLM's command line.

Source: vLLM 0.25.0 to 0.33.0, ``config/offload.py``, ``model_executor/offloader`` and
``config/vllm.py``.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offplan.costs.engine_times import cache_bytes
from offplan.costs.work import step_tokens
from offplan.engines.engine import (
    Engine,
    EngineDemand,
    Flags,
    Version,
    first_layers,
    note_overshoot,
    relaid,
)
from offplan.engines.names import (
    EngineParameter,
    Kernels,
    engine_parameters,
    engine_segments,
    lay_out_experts,
)
from offplan.errors import ExportError
from offplan.files import load_facts
from offplan.forms.form import Kind
from offplan.held.layout import PassRules
from offplan.held.stage import Stage
from offplan.placement import Placement
from offplan.plan import Backend, Plan, Rule

FACTS: dict[str, Any] = load_facts(Path(__file__).with_suffix(".yaml"))

PLAIN_HEADS = frozenset(FACTS["plain_heads"])
"""Architectures whose output head stays as it is stored."""
WORKER_VERSIONS: dict[str, Version] = {"0.33.0": (0, 33, 0)}
"""Versions that offplan's worker and packed weights were tried with; both refuse any other."""
HEEDS_OFFLOADING: Version = (0, 28, 0)
"""Before it, the second model runner takes offload flags and does nothing with them."""
TOWERS_FIRST: Version = (0, 29, 0)
"""Since it, parameters of towers are read in place before those of layers."""
ANY_SLOTS: Version = (0, 30, 0)
"""Before it, a slot may be overwritten too early where layers do not divide into slots.

Source: vLLM pull request 54975.
"""
EXPERTS_ONCE: Version = (0, 33, 0)
"""Before it, experts in host memory are read once for each token that is sent to them."""

FORMS = {
    Backend.PREFETCH: {
        *(Kind.RAW, Kind.FP8_BLOCK, Kind.FP8_CHANNEL, Kind.FP8_TENSOR, Kind.PACKED),
        Kind.MXFP4,  # of experts alone, by MARLIN's kernels
    },
    Backend.UVA: {Kind.RAW, Kind.PACKED},
}
"""Stored forms that stay on the host. Loading lays others out anew, on the GPU, and a parameter
that is read in place is then no longer in host memory. Source: ``device_loading_context``."""
MARLIN: Version = (0, 33, 0)
"""Since it, as far as is known, experts of MXFP4 stay parameters with these kernels. Experts of
other kernels are taken out of the model, and an offloader lets them go."""
MARLIN_KERNELS = Kernels(gate_up=128, down=128, bias_growth=1)
"""Source: ``mxfp4_round_up_hidden_size_and_intermediate_size``."""
ANY_KERNELS = Kernels(gate_up=128)
"""The most that kernels which vLLM chooses by itself on NVIDIA GPUs make of experts.

Marlin's and TensorRT-LLM's round down by 128, Triton's for Blackwell by 256 (``blackwell_value``);
all but Marlin's widen biases.
"""


def demand_rule(rule: Rule, placement: Placement, stage: Stage, version: Version) -> EngineDemand:
    """Return flags for a rule with one backend; ``placement`` is what the rule resolves to.

    Raises ExportError for what the flags cannot say.
    """
    parameters = engine_parameters(stage, find_names(stage))
    require_forms(placement, version)
    segments = engine_segments(rule, parameters)
    resident = VLLM.demand_resident(stage, version)
    taken = [each for each in parameters if rule.matches(each.parameters[0].name)]
    environment = {"VLLM_USE_V2_MODEL_RUNNER": "0"} if version < HEEDS_OFFLOADING else {}
    if rule.decode is Backend.PREFETCH:
        _require_whole_graphs(stage)
        if version < ANY_SLOTS:
            _require_whole_turns(placement)
        # vLLM allocates as many slots as it is told, offplan no more than there are layers
        flags = _flags(
            offload_group_size=rule.group_size,
            offload_num_in_group=rule.num_in_group,
            offload_prefetch_step=placement.num_slots,
        )
        moved = [each for each in taken if rule.selects_layer(each.layer)]
        if segments:
            flags["offload-params"] = tuple(segments)
        laid_out = lay_out_experts(parameters, MARLIN_KERNELS)
        if laid_out.keys().isdisjoint(moved):
            more, notes = resident.more_gpu_bytes, resident.notes
        else:
            flags["moe-backend"] = ("marlin",)
            more = sum(laid_out[each].nbytes - each.nbytes for each in laid_out.keys() - set(moved))
            moved, notes = [laid_out.get(each, each) for each in moved], ()
        more += placement.num_slots * slot_bytes(moved) - placement.ring_bytes
        return EngineDemand(flags, environment, notes, tuple(moved), more)
    if stage.model.towers and version >= TOWERS_FIRST:
        raise ExportError(
            "vLLM reads parameters of towers in place before it reads parameters of layers: the "
            "bytes that the plan gives to layers would go to what reads images and sound"
        )
    num_bytes = _uva_bytes(rule, placement, stage)
    moved = first_layers(taken, num_bytes)
    # so many digits that vLLM's int(gb * 2**30) gives the bytes again
    flags = _flags(cpu_offload_gb=f"{num_bytes / 2**30:.15g}")
    if segments:
        flags["cpu-offload-params"] = tuple(segments)
    if any(each.parameters[0].is_expert for each in moved):
        if version < EXPERTS_ONCE:
            raise ExportError(
                "vLLM before 0.33 reads experts in host memory once for each token that is sent "
                "to them: a prompt would take many times longer"
            )
        # the kernels of other backends want weights laid out anew, or read them more than once
        flags["moe-backend"] = ("triton",)
    notes = (*note_overshoot("vLLM", moved, num_bytes), *resident.notes)
    return EngineDemand(flags, environment, notes, tuple(moved), resident.more_gpu_bytes)


def find_kernels(stage: Stage, version: Version) -> tuple[Kernels, Kernels]:
    """Return those of experts of which some move, than which none make less, and the largest."""
    return MARLIN_KERNELS, ANY_KERNELS if version >= MARLIN else Kernels()


def serve(plan: Plan, stages: Sequence[Stage], gpu_bytes: int | None) -> Flags:
    """Hold vLLM to the plan's type, workload and budget; its ranks hold ``stages``.

    It is given a KV cache for the plan's workload. By a share of the GPU's memory alone vLLM would
    size a cache itself and leave its context out. The context took 0.75 GiB beyond the budget on an
    H200. A start that compiles would then find no room for a cache. If the GPU's bytes are known,
    the share is what must be free once the context is there.
    """
    work, memory = plan.workload, plan.prediction.gpu_memory
    flags = _flags(
        dtype=plan.model.dtype,
        max_model_len=work.context,
        max_num_seqs=work.batch,
        max_num_batched_tokens=step_tokens(work, plan.offload.prefill_chunk),
    )
    # stages of fewer layers take of it what these need
    cached = max(cache_bytes(each, work, plan.offload.prefill_chunk) for each in stages)
    if cached:
        flags |= _flags(kv_cache_memory_bytes=cached)
    if gpu_bytes is None:
        return flags
    free = plan.budget.gpu_memory - memory.overhead_bytes
    share = max(1, min(10**4, -(-free * 10**4 // gpu_bytes))) / 10**4
    return flags | _flags(gpu_memory_utilization=f"{share:.4f}")


def _flags(**values: object) -> dict[str, tuple[str, ...]]:
    return {name.replace("_", "-"): (str(value),) for name, value in values.items()}


def find_names(stage: Stage) -> Mapping[str, str]:
    """Find what the architecture calls otherwise than the checkpoint; raises ExportError."""
    found = stage.architecture.class_names
    for name in found:
        if name in FACTS["renamed"]:
            renamed: dict[str, str] = FACTS["renamed"][name]
            return renamed
        if name in FACTS["usual"]:
            return {}
    raise ExportError(
        f"offplan does not know how vLLM builds {', '.join(found) or stage.model.model_type}, or "
        "vLLM builds it in a way that offloads nothing: no flag offloads it"
    )


def require_forms(placement: Placement, version: Version) -> None:
    """Raise ExportError for what does not stay in host memory while vLLM loads."""
    for entry in placement.entries:
        parameter = entry.unit.parameters[0]
        known = parameter.form.kind in FORMS[entry.decode]
        if parameter.form.kind is Kind.MXFP4:
            known = known and parameter.is_expert and version >= MARLIN
        if not known:
            raise relaid("vLLM", parameter, entry.unit.layer)


def _require_whole_graphs(stage: Stage) -> None:
    """Refuse copies that cross the end of a captured graph. Source: vLLM pull request 51710."""
    if (name := find_breakable(stage)) is not None:
        raise ExportError(
            f"vLLM captures {name} in graphs that end at each attention (breakable CUDA graphs), "
            "and copies that are under way then end the capture in an error: only reading in "
            "place (uva) works there"
        )


def find_breakable(stage: Stage) -> str | None:
    """Find the name by which vLLM captures a model in graphs that end at each attention."""
    names = stage.architecture.class_names
    return next((name for name in names if name in FACTS["breakable"]), None)


def _require_whole_turns(placement: Placement) -> None:
    """Refuse what makes vLLM generate wrong text."""
    num_layers, num_slots = len(placement.slabs), placement.num_slots
    if num_layers % num_slots:
        raise ExportError(
            f"vLLM before 0.30 may read a slot too early where the offloaded layers do not divide "
            f"into its slots: the plan has {num_layers} and {num_slots}; choose a prefetch_step "
            f"that divides {num_layers}, or a newer vLLM"
        )


def slot_bytes(moved: Iterable[EngineParameter]) -> int:
    """Bytes of one slot: a buffer for each parameter of another name or shape."""
    distinct = {
        (each.name, tuple(p.shape for p in each.parameters), each.nbytes): each.nbytes
        for each in moved
    }
    return sum(distinct.values())


def _uva_bytes(rule: Rule, placement: Placement, stage: Stage) -> int:
    """Bytes to give vLLM, which reads parameters in place from layer 0 on and skips none."""
    offloaded = {slab.layer for slab in placement.slabs}
    for layer in stage.layers[: max(offloaded)]:
        if layer.index not in offloaded and any(rule.matches(p.name) for p in layer.parameters):
            raise ExportError(
                f"vLLM reads parameters in place from layer 0 on, up to a number of bytes: it "
                f"cannot skip layer {layer.index} as group_size {rule.group_size}, num_in_group "
                f"{rule.num_in_group} does"
            )
    return placement.unit_bytes


VLLM_PASSES = PassRules(
    copies_in_place=False,
    allocates_copies=False,
    copies_first_again=False,
    shares_blocks=True,
    beside_percent=104,
    copy_gap_ps=15_000_000,
    layer_overhead_s=40e-6,
    routed_overhead_s=20e-6,
    all_reduce_s=5e-6,
)
"""Rules of decode steps, which vLLM captures.

Source: vLLM 0.33 with everything resident at batch 1, less the bytes read. A layer of Qwen3-8B took
39 us on an H100 and 49 in two ranks, one of DeepSeek-V2-Lite 74 and 70. How much of that are
all-reduces is estimated. Times of copies are fitted to the plans in
``tests/costs/test_engine_times.py``, and to two ranks of Qwen3-8B. There 12 short copies made a
step 0.18 ms longer on H200s, and 27 copies 0.59 ms on H100s.
"""

VLLM = Engine(
    name="vllm",
    title="vLLM",
    oldest=(0, 25, 0),
    newest=(0, 33, 0),
    pass_rules=VLLM_PASSES,
    demand_rule=demand_rule,
    kernels=find_kernels,
    serve=serve,
    # whole experts are divided among all ranks of a stage, if they are
    rank_flags=("tensor-parallel-size", "pipeline-parallel-size", "enable-expert-parallel"),
    command=("vllm", "serve"),
    image="vllm/vllm-openai",
    port=8000,
    bind={"numa-bind": ()},
    cache_types={"fp8": "fp8"},
    no_float16=FACTS["no_float16"],
)
