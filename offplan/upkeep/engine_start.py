"""A running engine held against a plan: whether what was exported is in force there."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from offplan.checkpoint.model import Model
from offplan.engines.engine import Engine, format_version
from offplan.engines.export import Export, export_plan
from offplan.engines.registry import find_engine
from offplan.engines.runner import EngineRunner, lower
from offplan.engines.startup import OFF, Startup, read_log, read_server
from offplan.engines.taken import StageTaken
from offplan.errors import InputError
from offplan.held.stage import Stage
from offplan.plan import Plan, Rule
from offplan.records import read_text
from offplan.units import format_bytes
from offplan.upkeep.figures import Finding

MOST_LOG_BYTES = 2**28
"""Beyond any log's start; a server's answer is shorter."""
PATIENCE_S = 10
"""Seconds that a server has to answer."""
ROUNDED_TO = 2**24
"""Bytes by which an engine's figure, in GiB of two decimals, may be off."""
BYTES_TO = 0.01
"""Part of what is offloaded by which an engine may have laid it out larger or smaller."""
WEIGHTS_TO = 0.05
"""Part of all weights by which loading them may take more GPU memory than they have bytes.

Source: chosen, above what allocators round up to; half of what is offloaded where that is less.
"""

_NUMBER = re.compile(r"[+-]?\d+(\.\d*)?(e[+-]?\d+)?")


def read_start(engine: str, log: Path | None, url: str | None) -> Startup:
    """Read what an engine says of its start, in a log or asked as a server.

    Raises InputError for what is no such log, and for a server that does not say.
    """
    chosen, _ = find_engine(engine)
    if chosen.is_worker and log is None:
        raise InputError(
            f"{chosen.title} writes what is in force into its log, and no server is asked for it: "
            "name the log (--log)"
        )
    if log is not None:
        startup = read_log(chosen.family, read_text(log, "log", MOST_LOG_BYTES, InputError))
        if startup.loaded_bytes is None:
            raise InputError(
                f"{log} does not say what loading the weights took: it is no log of {chosen.title} "
                "from its start until it serves"
            )
        return startup
    assert url is not None, "a log or a server is named"
    return _ask_server(chosen, url.rstrip("/"))


def check_start(plan: Plan, model: Model, engine: str, startup: Startup) -> tuple[Finding, ...]:
    """Check that an engine that has started does what was exported to it.

    If ``engine`` names no version, it is the one that the engine reports. Raises ExportError for a
    plan that cannot be exported to it.
    """
    chosen, _ = find_engine(engine)
    version = re.match(r"\d+\.\d+(\.\d+)?", startup.version or "")
    if version is not None and "==" not in engine:
        engine = f"{engine}=={version[0]}"
    export = export_plan(plan, model, engine)
    findings = [*_check_version(export, startup), *_check_flags(export, startup)]
    if startup.loaded_bytes is None:
        text = f"the server says its flags, not what they did: {chosen.title}'s log does (--log)"
        return (*findings, Finding("offload", "unknown", text))
    goal = plan.goal.model_copy(update={"engine": engine})
    stages = lower(model, goal, plan.offload.recoding)
    if startup.stages and max(startup.stages) >= len(stages):
        text = f"a stage {max(startup.stages)} of a pipeline writes; the plan has {len(stages)}"
        findings.append(Finding("stages", "drift", text))
    if len(stages) == 1:
        return (*findings, *_check_stage(plan, stages[0], export, startup))
    runner = EngineRunner(engine, export.engine, export.version)
    for number, stage in enumerate(stages):
        told = startup.stages.get(number, Startup())
        demand = replace(runner.demand_of(plan.offload, stage), flags=export.demand.flags)
        for each in _check_stage(plan, stage, replace(export, demand=demand), told):
            findings.append(replace(each, subject=f"{each.subject}, stage {number}"))
    return tuple(findings)


def _ask_server(engine: Engine, url: str) -> Startup:
    if not url.startswith(("http://", "https://")):
        raise InputError(f"--url {url}: write it with http:// or https://")
    try:
        startup = read_server(engine.name, _get(f"{url}/server_info?config_format=json"))
        if engine.name == "vllm":
            version = re.search(r'"version":\s*"([^"]+)"', _get(f"{url}/version"))
            startup = replace(startup, version=version[1] if version else None)
    except (OSError, HTTPException) as error:  # HTTPException: it speaks otherwise, or stops
        helps = " (vLLM answers only with VLLM_SERVER_DEV_MODE=1)" if engine.name == "vllm" else ""
        told = str(error).strip()
        raise InputError(
            f"{url}/server_info: {told}{helps}; --log reads what it wrote when it started"
        ) from None
    except ValueError as error:
        raise InputError(f"{url} is no server of {engine.title}: {error}") from None
    return startup


def _get(url: str) -> str:
    with urlopen(url, timeout=PATIENCE_S) as answer:
        return str(answer.read(MOST_LOG_BYTES).decode("utf-8", "replace"))


def _check_version(export: Export, startup: Startup) -> Iterator[Finding]:
    expected = format_version(export.version)
    if startup.version is None:
        yield Finding("version", "unknown", f"it does not say its version; checked as {expected}")
    else:
        minor = expected.rpartition(".")[0]
        same = startup.version.startswith(f"{minor}.")
        text = f"{export.engine.title} {startup.version}"
        told = text if same else f"{text}; the plan was exported for {expected}"
        yield _judge("version", same, told)
    for name, value in export.demand.environment.items() if startup.environment else ():
        found = startup.environment.get(name)
        same = found in (value, str(bool(int(value))))
        text = f"{name} is {found}; without {value} offloading is ignored"
        yield _judge("environment", same, text)


def _check_flags(export: Export, startup: Startup) -> Iterator[Finding]:
    """Compare options where the engine says them; one that is not set is 0, empty or off."""
    for name, found in startup.flags.items():
        expected = export.demand.flags.get(name)
        if found == expected or (expected != () and _normal(found) == _normal(expected)):
            continue
        if expected is None and not name.endswith(("group-size", "offload-gb")):
            continue  # which mean nothing while these two are not set
        told = "not set" if expected is None else " ".join(expected) or "on"
        text = f"--{name} is {' '.join(found)}; the plan has it {told}"
        yield Finding("flags", "drift", text)
        return
    if startup.flags:
        yield Finding("flags", "holds", "the flags in the log are the plan's flags")


def _normal(values: tuple[str, ...] | None) -> list[float | str]:
    """Return values in an order, numbers as such; what is not set, SGLang's -1 too, is nothing."""
    numbers = [float(v) if _NUMBER.fullmatch(v) else v for v in values or ()]
    return sorted((each for each in numbers if each not in (-1, 0, *OFF)), key=str)


def _check_stage(plan: Plan, stage: Stage, export: Export, startup: Startup) -> Iterator[Finding]:
    """Check what the ranks of a stage, or of all, say that they did."""
    if startup == Startup():
        yield Finding("offload", "unknown", "what the plan moves names no rank of this stage")
        return
    if export.engine.is_worker and export.demand.flags:
        yield from _check_worker(plan, stage, export, startup)
        return
    # vLLM has only the first rank of a host say its ring
    is_later = stage.number > 0
    has_ring = "offload-group-size" in export.demand.flags
    if not (is_later and has_ring and startup.num_layers is None):
        yield from _check_offload(plan.offload.rules, stage, export, startup)
    yield _check_memory(stage, export, startup)


def _check_worker(plan: Plan, stage: Stage, export: Export, startup: Startup) -> Iterator[Finding]:
    """Check that each rank of a stage says to hold what the plan has: it starts with no other."""
    taken = StageTaken.find(plan.offload, stage, export.version).taken
    expected, told = taken.describe(), startup.in_force
    unlike = [each for each in told if each != expected]
    if told and not unlike:
        ranks = f"{len(told)} ranks say" if len(told) > 1 else "the log says"
        yield Finding("plan", "holds", f"{ranks} that the plan is in force: {expected}")
    else:
        found = f"the plan is in force with: {unlike[0]}" if told else "no plan is in force"
        yield Finding("plan", "drift", f"the log says that {found}; the plan has: {expected}")
    # the embedding moves only after vLLM has written what loading took
    yield _check_memory(stage, export, startup, taken.ring_bytes)


def _check_offload(
    rules: Sequence[Rule], stage: Stage, export: Export, startup: Startup
) -> Iterator[Finding]:
    """Check the layers and the bytes that the engine says to have offloaded."""
    moved = {each.layer for each in export.demand.moved}
    if startup.num_layers is not None and rules:
        expected = len(moved)
        if export.engine.name == "sglang":  # which counts dense layers, and moves nothing of them
            expected = sum(rules[0].selects_layer(layer.index) for layer in stage.layers)
        text = f"{startup.num_layers} layers are offloaded; the plan has {expected}"
        yield _judge("layers", startup.num_layers == expected, text)
    least, most = _moved_bytes(export)
    told = "nothing"
    same = not moved
    if startup.offloaded_bytes is not None:
        told = format_bytes(round(startup.offloaded_bytes))
        slack = BYTES_TO * most + ROUNDED_TO
        same = least - slack <= startup.offloaded_bytes <= most + slack
    elif export.engine.name == "sglang":
        return  # whose log names no bytes
    text = f"the log has {told} offloaded; the plan has {format_bytes(least)}"
    yield _judge("offload", same, text)


def _check_memory(stage: Stage, export: Export, startup: Startup, more: int = 0) -> Finding:
    """Check that what was offloaded has left the GPU: loading may have brought it back.

    ``more`` are bytes that a worker may hold beyond the weights that stay.
    """
    if startup.loaded_bytes is None:
        text = "its ranks do not say what loading the weights took"
        return Finding("GPU memory", "unknown", text)
    offloaded, _ = _moved_bytes(export)
    slack = WEIGHTS_TO * stage.loaded_bytes
    if offloaded:
        slack = min(slack, offloaded / 2)
    # experts may be laid out larger than they are stored
    slack += export.engine.demand_resident(stage, export.version).more_gpu_bytes
    expected = stage.loaded_bytes - offloaded + more
    text = (
        f"loading took {format_bytes(round(startup.loaded_bytes))}; the weights that stay have "
        f"{format_bytes(expected)}"
    )
    if startup.loaded_bytes <= expected + slack + ROUNDED_TO:
        return Finding("GPU memory", "holds", text)
    return Finding("GPU memory", "drift", f"{text}: what was to be offloaded is on the GPU")


def _judge(subject: str, same: bool, text: str) -> Finding:
    return Finding(subject, "holds" if same else "drift", text)


def _moved_bytes(export: Export) -> tuple[int, int]:
    """Bytes that the engine moves at least, and at most."""
    most = sum(each.nbytes for each in export.demand.moved)
    limits = (int(float(gib) * 2**30) for gib in export.demand.flags.get("cpu-offload-gb", ()))
    return min((most, *limits)), most
