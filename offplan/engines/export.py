"""Plan in, an engine's command out, or a refusal."""

import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from offplan.checkpoint.model import Model
from offplan.choices import ExportFormat
from offplan.costs.memory import MARGIN, kv_cache_bytes
from offplan.engines.engine import (
    Engine,
    EngineDemand,
    Flags,
    Version,
    format_version,
    join_flags,
    note_more_memory,
    note_page_locked,
    require_stored_weights,
)
from offplan.engines.registry import find_engine
from offplan.engines.runner import EngineRunner, lower
from offplan.errors import ExportError
from offplan.files import StrPath
from offplan.held.held import find_largest
from offplan.held.stage import Stage
from offplan.plan import PRINTED_TO, Goal, Plan, load_plan
from offplan.units import format_budget, format_bytes

DTYPES = ("bfloat16", "float16", "float32")
"""Types that engines compute in."""


@dataclass(frozen=True)
class Export:
    """A plan as an engine's command."""

    engine: Engine
    version: Version
    source: str
    """The model that the engine is to load: a Hub id or a folder."""
    revision: str | None
    demand: EngineDemand
    """The flags that make it offload."""
    serve: Flags
    """The flags that hold it to the plan's type, workload and budget."""
    notes: tuple[str, ...]

    @property
    def flags(self) -> list[str]:
        """The options that make it offload, as words; none for a plan that offloads nothing."""
        return join_flags(self.demand.flags)

    @property
    def options(self) -> Flags:
        """All options."""
        revision: Flags = {} if self.revision is None else {"revision": (self.revision,)}
        return {**revision, **self.serve, **self.demand.flags}

    @property
    def command(self) -> list[str]:
        """The whole command, as words."""
        return [*self.engine.command, self.source, *join_flags(self.options)]


def export_plan(
    plan: Plan | StrPath,
    model: Model,
    engine: str,
    *,
    file: StrPath | None = None,
    gpu_bytes: int | None = None,
    numa_nodes: int | None = None,
) -> Export:
    """Write the plan as a command of an engine, ``vllm`` or with a version, ``vllm==0.31``.

    ``plan`` is the plan or its file. ``file`` is the plan's own, which a worker is to read.
    ``gpu_bytes`` is the memory of the GPU it is to run on. ``numa_nodes`` is the number of NUMA
    nodes of its host. Both are None if they are not known. Raises ExportError, naming what would be
    lost, and PlanError for a plan that is not this model's.
    """
    if not isinstance(plan, Plan):
        file = plan if file is None else file
        plan = load_plan(plan)
    chosen, version = find_engine(engine)
    if not (way := plan.goal.way).is_own:
        raise ExportError(
            f"the plan is for {way.whose} passes ({way.name}: true), which no engine runs: plan "
            f"with `engine={engine}`"
        )
    if plan.model.dtype not in DTYPES:
        raise ExportError(
            f"{chosen.title} computes in none but {', '.join(DTYPES)}; the plan's "
            f"model computes in {plan.model.dtype}"
        )
    chosen.require_served(model, plan.workload.context)
    require_stored_weights(plan.offload, chosen)
    goal = plan.goal.model_copy(update={"engine": engine})
    stages = lower(model, goal, plan.offload.recoding)
    demand = EngineRunner(engine, chosen, version).demand(plan.offload, stages)
    host = plan.budget.host_memory
    if host is not None and demand.pinned_bytes > host:
        raise ExportError(
            f"{chosen.title} page-locks {format_bytes(demand.pinned_bytes)}, each parameter "
            f"rounded up to a power of two, of a budget of {format_budget(host)}"
        )
    planned = lower(model, plan.goal, plan.offload.recoding)
    more = demand.more_gpu_bytes + _held_beyond(plan, planned, stages)
    total = plan.prediction.gpu_memory.total_bytes + more
    if more > 0 and total > plan.budget.gpu_memory * (1 + PRINTED_TO):
        raise ExportError(
            f"{chosen.title} takes {format_bytes(more)} more of GPU memory for it than offplan's "
            f"own runtime: {format_bytes(total)} of a budget of "
            f"{format_budget(plan.budget.gpu_memory)}"
        )
    if chosen.is_worker and demand.flags and file is not None:
        named = {"additional-config": (json.dumps({"offplan": os.path.abspath(file)}),)}
        demand = replace(demand, flags={**demand.flags, **named})
    binds = demand.flags and plan.goal.num_gpus > 1 and numa_nodes != 1
    bound = chosen.bind if binds and numa_nodes is not None else {}
    return Export(
        engine=chosen,
        version=version,
        source=_locate(plan),
        revision=plan.model.revision,
        demand=demand,
        serve={
            **chosen.serve(plan, stages, gpu_bytes),
            **chosen.choose_cache(goal.kv_cache_dtype),
            **chosen.divide(plan.goal.ranks),
            **bound,
        },
        notes=(
            *demand.notes,
            *_sequence_notes(chosen, plan),
            *_cache_notes(chosen, goal),
            *_version_notes(chosen, version, demand),
            *_memory_notes(chosen, demand, more, gpu_bytes),
            *_first_start_notes(chosen, stages),
            *(_binding_notes(chosen, numa_nodes) if binds else ()),
        ),
    )


def _held_beyond(plan: Plan, of_plan: Sequence[Stage], of_engine: Sequence[Stage]) -> int:
    """Bytes of weights and cache that a rank of the engine holds beyond the rank planned for."""
    work, chunk = plan.workload, plan.offload.prefill_chunk
    planned, loaded = (find_largest(stages, work) for stages in (of_plan, of_engine))
    cached = kv_cache_bytes(loaded, work, chunk) - kv_cache_bytes(planned, work, chunk)
    if cached <= MARGIN * plan.budget.gpu_memory:
        cached = 0  # a block or so, which the margin has room for
    return loaded.loaded_bytes - planned.loaded_bytes + cached


def _locate(plan: Plan) -> str:
    """Return what an engine is to load: the folder of a local model, or an id on the Hub."""
    source = plan.model.source
    local = Path(os.path.normpath(plan.locate(source)))
    if plan.model.revision is not None or not local.exists():
        return source
    return str(local.parent if local.is_file() else local)


def _sequence_notes(engine: Engine, plan: Plan) -> list[str]:
    if plan.workload.batch > 1:
        return []
    return [
        f"{engine.title} serves one sequence at a time by this plan, and further requests wait: "
        "`offplan plan --batch 16` plans for 16 together"
    ]


def _cache_notes(engine: Engine, goal: Goal) -> list[str]:
    if goal.kv_cache_dtype == "auto":
        return []
    return [
        f"{engine.title} scales all tokens of a cache in FP8 alike, by the checkpoint's scales or "
        "1: offplan's own runtime has a scale for each token and head"
    ]


def _version_notes(engine: Engine, version: Version, demand: EngineDemand) -> list[str]:
    if version[:2] == engine.newest[:2] or not demand.moved:
        return []
    return [
        f"the names of parameters are from {engine.title} {format_version(engine.newest)}: "
        f"offplan check --engine {engine.name} --log FILE says whether the weights moved"
    ]


def _memory_notes(
    engine: Engine, demand: EngineDemand, more: int, gpu_bytes: int | None
) -> list[str]:
    notes = []
    if demand.flags:
        notes.append(note_page_locked(engine, demand))
    else:
        notes.append("the plan offloads nothing: no flag for that is needed")
    notes += note_more_memory(engine, more)
    if gpu_bytes is None:
        notes.append(
            "how much memory the GPU has is not known here: the flags say how large the KV cache "
            "is, and not how much may be taken in all"
        )
    return notes


def _first_start_notes(engine: Engine, stages: Sequence[Stage]) -> list[str]:
    """Say what vLLM takes where it compiles layers; offplan's worker gives that back.

    Source: Qwen3-8B with vLLM 0.33.0 on an H200, as large as its input embedding less the KV cache.
    """
    if engine.name != "vllm":
        return []
    found = [table for stage in stages for table in stage.tables if table.is_input]
    # of a pipeline not every stage has one, and none has one of its own that the head shares
    size = format_bytes(found[0].nbytes) if found else "as much as its embedding"
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


CACHE = "/root/.cache/huggingface"
"""Folder in which the engines' images keep what they load from the Hub."""


_WORKERS_PLAN = "additional-config"
"""The option that names the plan to a worker."""


def render_export(export: Export, form: ExportFormat) -> str:
    """Write an export in one of the forms; each ends with a line break."""
    return {"command": _command, "yaml": _yaml, "env": _env, "docker": _docker}[form](export)


def _command(export: Export) -> str:
    """Write what a shell runs, an option a line."""
    environment = export.demand.environment
    variables = [f"{name}={shlex.quote(value)}" for name, value in environment.items()]
    start = [*variables, *map(shlex.quote, (*export.engine.command, export.source))]
    return _lines(" ".join(start), export)


def _docker(export: Export) -> str:
    """Write what a shell runs to start the engine in a container of its own image."""
    engine, source = export.engine, Path(export.source)
    if engine.is_worker and _WORKERS_PLAN in export.options:
        return _dockerfile(export)
    mount = f'"$HOME/.cache/huggingface:{CACHE}"'
    served = export.source
    if source.exists():
        served = "/model"
        mount = shlex.quote(f"{source.resolve()}:{served}:ro")
    first, *rest = engine.command
    variables = [
        f"-e {name}={shlex.quote(value)}" for name, value in export.demand.environment.items()
    ]
    # page-locked memory counts as locked, and workers share memory
    lines = [
        "docker run --gpus all --ipc=host --ulimit memlock=-1",
        f"-p {engine.port}:{engine.port} -v {mount}",
        *variables,
        f"--entrypoint {first} {engine.image}:v{format_version(export.version)}",
        shlex.join([*rest, served]),
    ]
    hosted = join_flags({"host": ("0.0.0.0",), "port": (str(engine.port),)})
    return _lines(" \\\n  ".join(lines), export, shlex.join(hosted))


def _dockerfile(export: Export) -> str:
    """Write what builds an image with a worker and its plan: the engine's own has no offplan.

    The packages of the engine's image keep their versions, and offplan comes from a clone of it.
    """
    ((given,),) = [export.options[_WORKERS_PLAN]]
    plan = Path(json.loads(given)["offplan"])
    source = Path(export.source)
    # a build's context is a folder, and so is what is mounted
    served, mount = export.source, f'"$HOME/.cache/huggingface:{CACHE}"'
    if source.exists():
        served, mount = "/model", shlex.quote(f"{source.resolve()}:/model:ro")
    inside = f"/offplan/{plan.name}"
    options = {**export.options, _WORKERS_PLAN: (json.dumps({"offplan": inside}),)}
    port = str(export.engine.port)
    hosted = {"host": ("0.0.0.0",), "port": (port,)}
    command = [*export.engine.command, served, *join_flags(options), *join_flags(hosted)]
    variables = [
        f"ENV {name}={json.dumps(value)}" for name, value in export.demand.environment.items()
    ]
    lines = [
        "# docker build --build-context offplan=CLONE_OF_OFFPLAN -t offplan-worker \\",
        f"#   -f DOCKERFILE {shlex.quote(str(plan.parent))}",
        "# docker run --gpus all --ipc=host --ulimit memlock=-1 \\",
        f"#   -p {port}:{port} -v {mount} offplan-worker",
        f"FROM {export.engine.image}:v{format_version(export.version)}",
        "RUN --mount=type=bind,from=offplan,target=/tmp/offplan,rw \\",
        "    pip list --format=freeze > /tmp/held.txt && \\",
        "    pip install --no-cache-dir -c /tmp/held.txt /tmp/offplan && rm /tmp/held.txt",
        f"COPY {json.dumps([plan.name, inside])}",
        *variables,
        f"ENTRYPOINT {json.dumps(command)}",
    ]
    return "\n".join(lines) + "\n"


def _lines(start: str, export: Export, *last: str) -> str:
    options = [shlex.join(join_flags({name: each})) for name, each in export.options.items()]
    return " \\\n  ".join((start, *options, *last)) + "\n"


def _yaml(export: Export) -> str:
    """Write a file for the engine's ``--config``."""
    variables = [f"# needs {name}={value}\n" for name, value in export.demand.environment.items()]
    model = "model" if export.engine.family == "vllm" else "model-path"
    entries: dict[str, object] = {model: export.source}
    for name, values in export.options.items():
        # what is JSON stays a word
        each = [value if value[:1] == "{" else yaml.safe_load(value) for value in values]
        entries[name] = True if not each else each[0] if len(each) == 1 else each
    # vLLM reads a list where an option takes several values, also of one
    for name in ("offload-params", "cpu-offload-params"):
        if name in entries:
            entries[name] = list(export.options[name])
    title = f"# {export.engine.title} {format_version(export.version)}\n"
    return title + "".join(variables) + yaml.safe_dump(entries, sort_keys=False)


def _env(export: Export) -> str:
    """Write variables, one a line: those the engine reads, the model, and its options as one."""
    variables = {
        **export.demand.environment,
        "MODEL": export.source,
        f"{export.engine.family.upper()}_ARGS": shlex.join(join_flags(export.options)),
    }
    return "".join(f"{name}={value}\n" for name, value in variables.items())
