"""Plan in, an engine's command out, or a refusal."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from offplan.checkpoint.model import Model
from offplan.costs.memory import MARGIN, kv_cache_bytes
from offplan.engines.engine import (
    Engine,
    Flags,
    Said,
    SayRule,
    Version,
    format_version,
    join_flags,
    join_stages,
    require_stored_weights,
)
from offplan.engines.ranks import lower
from offplan.engines.served import require_served
from offplan.engines.sglang import (
    MAX_BYTES_UNIT,
    divide_sglang,
    grow_sglang,
    say_sglang,
    serve_sglang,
    stay_sglang,
)
from offplan.engines.taken import say_to_worker
from offplan.engines.vllm import divide_vllm, grow_vllm, say_vllm, serve_vllm, stay_vllm
from offplan.errors import ExportError
from offplan.held.held import Held
from offplan.held.stage import Stage
from offplan.placement import place
from offplan.plan import PRINTED_TO, Offload, Plan, Rule
from offplan.units import format_budget, format_bytes

_VLLM = Engine(
    name="vllm",
    title="vLLM",
    oldest=(0, 25, 0),
    newest=(0, 33, 0),
    say=say_vllm,
    stay=stay_vllm,
    grow=grow_vllm,
    serve=serve_vllm,
    divide=divide_vllm,
    command=("vllm", "serve"),
    image="vllm/vllm-openai",
    port=8000,
    bind={"numa-bind": ()},
)
ENGINES = {
    "vllm": _VLLM,
    "vllm-worker": replace(
        _VLLM, name="vllm-worker", title="offplan's worker in vLLM", oldest=(0, 33, 0), say=None
    ),
    "sglang": Engine(
        name="sglang",
        title="SGLang",
        oldest=(0, 5, 23),
        newest=(0, 5, 23),
        say=say_sglang,
        stay=stay_sglang,
        grow=grow_sglang,
        serve=serve_sglang,
        divide=divide_sglang,
        command=("python3", "-m", "sglang.launch_server", "--model-path"),
        image="lmsysorg/sglang",
        port=30000,
        bind={},
        max_bytes_unit=MAX_BYTES_UNIT,
    ),
}
DTYPES = ("bfloat16", "float16", "float32")
"""Types that engines compute in."""


@dataclass(frozen=True)
class Export:
    """A plan as an engine's command."""

    engine: Engine
    version: Version
    source: str
    """What the engine is to load: a Hub id or a folder."""
    revision: str | None
    said: Said
    """What makes it offload."""
    serve: Flags
    """What holds it to the plan's type, workload and budget."""
    notes: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The options that make it offload, as words; none for a plan that offloads nothing."""
        return join_flags(self.said.flags)

    @property
    def options(self) -> Flags:
        """All options."""
        revision: Flags = {} if self.revision is None else {"revision": (self.revision,)}
        return {**revision, **self.serve, **self.said.flags}

    @property
    def command(self) -> list[str]:
        """The whole command, as words."""
        return [*self.engine.command, self.source, *join_flags(self.options)]


def export_plan(
    plan: Plan,
    model: Model,
    engine: str,
    *,
    file: Path | None = None,
    gpu_bytes: int | None = None,
    numa_nodes: int | None = None,
) -> Export:
    """Say the plan to an engine, ``vllm`` or with a version, ``vllm==0.31``.

    ``file`` is the plan's own, which a worker is to read. ``gpu_bytes`` is the memory of the GPU
    it is to run on, and ``numa_nodes`` the number of NUMA nodes of its host, where they are known.
    Raises ExportError, naming what would be lost, and PlanError for a plan that is not this
    model's.
    """
    chosen, version = find_engine(engine)
    if plan.model.dtype not in DTYPES:
        raise ExportError(
            f"{chosen.title} computes in none but {', '.join(DTYPES)}; the plan's "
            f"model computes in {plan.model.dtype}"
        )
    require_served(model, plan.workload.context, chosen)
    goal = plan.goal.model_copy(update={"engine": engine})
    loaded = lower(model, goal, plan.workload)
    said = say_offload(plan.offload, loaded, engine)
    host = plan.budget.host_memory
    if host is not None and said.pinned_bytes > host:
        raise ExportError(
            f"{chosen.title} page-locks {format_bytes(said.pinned_bytes)}, each parameter rounded "
            f"up to a power of two, of a budget of {format_budget(host)}"
        )
    planned = lower(model, plan.goal, plan.workload)
    more = said.more_gpu_bytes + _held_beyond(plan, planned.stage, loaded.stage)
    total = plan.prediction.gpu_memory.total_bytes + more
    if more > 0 and total > plan.budget.gpu_memory * (1 + PRINTED_TO):
        raise ExportError(
            f"{chosen.title} takes {format_bytes(more)} more of GPU memory for it than offplan's "
            f"own runtime: {format_bytes(total)} of a budget of "
            f"{format_budget(plan.budget.gpu_memory)}"
        )
    if chosen.is_worker and said.flags and file is not None:
        named = {"additional-config": (json.dumps({"offplan": str(file.absolute())}),)}
        said = replace(said, flags={**said.flags, **named})
    binds = said.flags and plan.goal.ranks.num_gpus > 1 and numa_nodes != 1
    bound = chosen.bind if binds and numa_nodes is not None else {}
    return Export(
        engine=chosen,
        version=version,
        source=_locate(plan),
        revision=plan.model.revision,
        said=said,
        serve={**chosen.serve(plan, loaded, gpu_bytes), **chosen.divide(plan.goal.ranks), **bound},
        notes=(
            *said.notes,
            *_version_notes(chosen, version, said),
            *_memory_notes(chosen, said, more, gpu_bytes),
            *_first_start_notes(chosen, loaded),
            *(_binding_notes(chosen, numa_nodes) if binds else ()),
        ),
    )


def _held_beyond(plan: Plan, planned: Stage, loaded: Stage) -> int:
    """Bytes of weights and cache that a rank of the engine holds beyond the rank planned for."""
    work, chunk = plan.workload, plan.offload.prefill_chunk
    cached = kv_cache_bytes(loaded, work, chunk) - kv_cache_bytes(planned, work, chunk)
    if cached <= MARGIN * plan.budget.gpu_memory:
        cached = 0  # a block or so, which the margin has room for
    return loaded.loaded_bytes - planned.loaded_bytes + cached


def say_offload(offload: Offload, held: Held, engine: str) -> Said:
    """Say a plan's decision to an engine, as ``export_plan`` does, whatever its budget.

    ``held`` is what the engine's ranks hold.
    """
    chosen, version = find_engine(engine)
    require_stored_weights(offload, chosen.title)
    if not offload.rules and offload.embeddings == "device":
        return max(
            (chosen.stay(stage, version) for stage in held.stages),
            key=lambda said: said.more_gpu_bytes,
        )
    if chosen.say is None:
        return say_to_worker(offload, held, version)
    return _say_rule(offload, held, chosen, chosen.say, version)


def _say_rule(offload: Offload, held: Held, engine: Engine, say: SayRule, version: Version) -> Said:
    """Say a plan's only rule to an engine, and to all ranks of it."""
    rule = _only_rule(offload, engine)
    # each stage starts the pattern anew
    stages = [say(rule, place(stage, offload), stage, version) for stage in held.stages]
    said = join_stages(stages, held)
    if any(stage.flags != said.flags for stage in stages):
        told = "; ".join(" ".join(join_flags(stage.flags)) for stage in stages)
        raise ExportError(
            f"{held.ranks.label}: {engine.title} gives all stages of a pipeline the same "
            f"flags, and the plan needs others in each ({told})"
        )
    return said


def export_check(held: Held, engine: str) -> Callable[[Offload], Said | None]:
    """Return what says a decision, or None; what it was asked it remembers."""

    @cache
    def say(offload: Offload) -> Said | None:
        try:
            return say_offload(offload, held, engine)
        except ExportError:
            return None

    def check(offload: Offload) -> Said | None:
        # what an engine cannot move in every layer it cannot move in some: asked once for all
        everywhere = {"group_size": 1, "num_in_group": 1}
        of_all = tuple(
            rule if rule.max_bytes is not None else rule.model_copy(update=everywhere)
            for rule in offload.rules
        )
        asked = offload.model_copy(update={"prefill_chunk": 1})  # which is said elsewhere
        if say(asked.model_copy(update={"rules": of_all, "prefetch_step": 1})) is None:
            return None
        return say(asked)

    return check


def find_engine(text: str) -> tuple[Engine, Version]:
    """Find an engine and its version, the newest that is known unless the text names one.

    Raises ExportError for one that offplan does not export to.
    """
    name, _, version = text.partition("==")
    if name not in ENGINES:
        raise ExportError(f"no engine {name!r}: offplan exports to {', '.join(ENGINES)}")
    engine = ENGINES[name]
    return engine, engine.parse_version(version) if "==" in text else engine.newest


def _locate(plan: Plan) -> str:
    """Return what an engine is to load: the folder of a local model, or an id on the Hub."""
    source = plan.model.source
    local = Path(os.path.normpath(plan.locate(source)))
    if plan.model.revision is not None or not local.exists():
        return source
    return str(local.parent if local.is_file() else local)


def _version_notes(engine: Engine, version: Version, said: Said) -> list[str]:
    if version[:2] == engine.newest[:2] or not said.moved:
        return []
    return [
        f"names of parameters are those of {engine.title} {format_version(engine.newest)}: "
        f"offplan check --engine {engine.name} --log FILE says whether they moved"
    ]


def tell_more(engine: Engine, more: int) -> list[str]:
    """Say how many bytes of GPU memory more an engine takes than a plan predicts, if any."""
    if more <= 0:
        return []
    return [f"of GPU memory {engine.title} takes {format_bytes(more)} more than the plan predicts"]


def tell_page_locked(engine: Engine, said: Said) -> str:
    """Say how much host memory an engine page-locks for what is said to it."""
    return (
        f"of host memory {engine.title} page-locks up to {format_bytes(said.pinned_bytes)}: each "
        "parameter is rounded up to a power of two"
    )


def _memory_notes(engine: Engine, said: Said, more: int, gpu_bytes: int | None) -> list[str]:
    notes = []
    if said.flags:
        notes.append(tell_page_locked(engine, said))
    else:
        notes.append("the plan offloads nothing: no flag for that is needed")
    notes += tell_more(engine, more)
    if gpu_bytes is None:
        notes.append(
            "how much memory the GPU has is not known here: the flags say how large the KV cache "
            "is, and not how much may be taken in all"
        )
    return notes


def _first_start_notes(engine: Engine, held: Held) -> list[str]:
    """Say what vLLM takes where it compiles layers; offplan's worker gives that back.

    Source: Qwen3-8B with vLLM 0.33.0 on an H200, as large as its input embedding less the KV cache.
    """
    if engine.name != "vllm":
        return []
    found = [each.input_embedding for each in held.stages]
    # of a pipeline not every stage has one, and none has one of its own that the head shares
    embedding = next((each for each in found if each is not None), None)
    size = "as much as its embedding" if embedding is None else format_bytes(embedding.nbytes)
    return [
        f"a start at which vLLM compiles layers may keep {size} more; those after it find them "
        "compiled"
    ]


def _binding_notes(engine: Engine, numa_nodes: int | None) -> list[str]:
    """Say how ranks come to copy from host memory near their GPUs.

    Source: ``utils/numa_utils`` of vLLM 0.25.1 and 0.33 and of SGLang 0.5.23.
    """
    if not engine.bind:
        return [
            f"{engine.title} binds each rank to the NUMA node of its GPU by itself, where numactl "
            "is installed; --numa-node names other nodes"
        ]
    option = " ".join(join_flags(engine.bind))
    if numa_nodes is not None:
        return [
            f"{option} binds each rank to the NUMA node of its GPU: numactl must be installed, a "
            "container allowed to set memory policies (SYS_NICE) and to use all cores (else name "
            "the nodes with --numa-bind-nodes), and each node have room for what its ranks "
            "page-lock"
        ]
    return [
        f"how many NUMA nodes the host has is not known here: on one of several add {option}, so "
        f"that each rank copies from the memory of its own node; on a host of one {engine.title} "
        "does not start with it"
    ]


def _only_rule(offload: Offload, engine: Engine) -> Rule:
    rules = offload.rules
    if offload.embeddings == "host":
        raise ExportError(
            f"{engine.title} keeps the input embedding on the GPU; the plan has it on the host"
        )
    if len(rules) > 1:
        raise ExportError(f"{engine.title}'s flags say one rule; the plan has {len(rules)}")
    if rules[0].is_mixed:
        raise ExportError(
            f"{engine.title} has one backend for both phases; the plan has "
            f"{rules[0].prefill.value} in prefill and {rules[0].decode.value} in decode"
        )
    return rules[0]
