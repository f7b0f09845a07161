"""The JSON that scripts read: versioned, plain numbers, the same keys every time."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from offplan.capabilities.way import Way
from offplan.checkpoint.model import Model
from offplan.costs.capabilities import COUNTS
from offplan.costs.ranges import step_range
from offplan.drafts.counts import DraftCounts
from offplan.errors import InfeasibleError
from offplan.held.held import hold
from offplan.library.analysis import Analysis
from offplan.library.repricing import ComparedCounts
from offplan.placement import Phase
from offplan.plan import Plan, Prediction
from offplan.planner.find import PlanResult
from offplan.report.bench import PHASES, measured_phase
from offplan.report.bench_file import OWN_RUNTIME, Ran
from offplan.report.explain import explain_plan
from offplan.report.machine import machine_payload
from offplan.report.model import outside_segments
from offplan.report.run import RunResult
from offplan.report.wording import name_options

if TYPE_CHECKING:  # they import torch
    from offplan.library.benchmark import BenchResult
    from offplan.runtime.measuring.bench import PhaseCost
    from offplan.runtime.measuring.versus import Measurement
    from offplan.runtime.texts import Text

dump = TypeAdapter(Any).dump_python
"""Turns a record into a dictionary of its fields, less those excluded; None stays None."""


def analyze_payload(analysis: Analysis) -> dict[str, Any]:
    """Return what ``analyze --json`` prints; ``plan`` is null if nothing fits or was measured.

    ``model`` and ``layers`` are whole, ``ranks`` what each of several GPUs holds. A sample
    adds what it shows of the weights, and ``draft_advice`` is there where drafts would gain.
    """
    machine, result, infeasible = analysis.machine, analysis.result, analysis.infeasible
    advice, shorter = analysis.cache_advice, analysis.context_advice
    drafts = analysis.draft_advice
    plan = None if result is None else result.plan
    return {
        **model_payload(analysis.model),
        "ranks": dump([*analysis.shares]),
        **running_payload(analysis.why_not_run, analysis.stage.way),
        "machine": None if machine is None else machine_payload(machine),
        "plan": None if plan is None else file_payload(plan),
        **analysis.sample._asdict(),
        "alternatives": [vars(each) for each in analysis.alternatives],
        "cache_advice": None if advice is None else vars(advice),
        # only where there is some: the keys are newer than the others
        **({} if shorter is None else {"context_advice": vars(shorter)}),
        **({} if drafts is None else {"draft_advice": vars(drafts)}),
        "why": None if result is None else why_payload(result),
        "infeasible": None if infeasible is None else _infeasible_payload(infeasible, analysis),
        "unmeasured": analysis.unmeasured and name_options(analysis.unmeasured),
    }


def plan_payload(plan: Plan, why_not_run: str | None) -> dict[str, Any]:
    """Return what ``plan --json`` and ``replan --json`` print: the file's keys, and ``run``."""
    return {**file_payload(plan), **running_payload(why_not_run, plan.goal.way)}


def file_payload(plan: Plan) -> dict[str, Any]:
    """Return the keys of a plan's file, with the ranges of its predicted times."""
    predicted = _with_ranges(plan.prediction, plan)
    return {**plan.model_dump(mode="json"), "prediction": predicted}


def _with_ranges(prediction: Prediction, plan: Plan) -> dict[str, Any]:
    predicted = prediction.model_dump(mode="json")
    for phase in Phase:
        predicted[phase.value]["step_range_s"] = dump(step_range(prediction, plan.offload, phase))
    return predicted


def running_payload(why_not: str | None, way: Way) -> dict[str, Any]:
    """Return its key ``run``: whether ``run`` can execute the model, why not, and by whose passes.

    Its ``way`` is ``own`` for offplan's own passes.
    """
    told = why_not and name_options(why_not)
    return {"run": {"can_execute": why_not is None, "why_not": told, "way": way.name}}


def model_payload(model: Model) -> dict[str, Any]:
    """Return its keys: ``model``, ``layers``, ``outside_layers``, ``experts``, ``notes``."""
    return {
        "model": {
            "source": model.source,
            "revision": model.revision,
            "model_type": model.model_type,
            "dtype": model.dtype,
            "num_layers": len(model.layers),
            "num_tensors": model.num_tensors,
            "num_parameters": model.num_parameters,
            "total_bytes": model.total_bytes,
            "loaded_bytes": hold(model).loaded_bytes,
            "headers_sha256": model.headers_sha256,
            "gguf": dump(model.gguf),
        },
        "layers": [
            {
                "index": layer.index,
                "kind": layer.kind,
                "bytes": layer.nbytes,
                "segments": layer.segments,
                "kv_cache_bytes_per_token": layer.kv_cache.bytes_per_token,
            }
            for layer in model.layers
        ],
        "outside_layers": {
            "bytes": sum(tensor.nbytes for tensor in model.outside),
            "segments": outside_segments(model),
            "tied": sorted(model.tied),
            "not_loaded": sorted(model.not_loaded),
        },
        "experts": dump(model.experts, exclude={"groups"}),
        "notes": list(model.notes),
    }


def why_payload(result: PlanResult) -> dict[str, Any]:
    """Return why it is this plan, and what no plan of its budget can beat."""
    return {
        "basis": result.plan.prediction.basis,
        "reasons": explain_plan(result),
        **dump(result, exclude={"plan"}),
        "gap": result.gap,
    }


def _infeasible_payload(error: InfeasibleError, analysis: Analysis) -> dict[str, Any]:
    """Return why nothing fits, how many bytes are missing, and the longest contexts that fit."""
    return {
        "message": name_options(str(error)),
        "shortfall_bytes": error.shortfall_bytes,
        "longest_context": error.longest_context,
        "longest_context_fp8": analysis.longest_context_fp8,
    }


def run_payload(plan: Plan, result: RunResult, texts: Sequence["Text"]) -> dict[str, Any]:
    """Return what ``run --json`` prints; ``texts`` are what followed prompts, if there were any."""
    measured, other = result.measured, result.prediction
    decode = {"step_s": measured.median_step_s, "link_bytes": measured.step_link_bytes}
    prefill = {"step_s": measured.first_token_s, "link_bytes": measured.prefill_link_bytes}
    memory = {"total_bytes": result.gpu_bytes}
    return {
        **dump(result, include={"device", "batch", "prompt_tokens"}),
        "way": plan.goal.way.name,
        "output_tokens": max((text.num_made for text in texts), default=len(measured.step_s) + 1),
        "text": texts[0].made if texts else None,
        "texts": [text_payload(text) for text in texts],
        "predicted": _prediction_payload(plan.prediction, plan),
        "predicted_as_run": None if other is None else _prediction_payload(other, plan),
        "measured": {"decode": decode, "prefill": prefill, "gpu_memory": memory},
        **_counts_payload(result.counts),
        **drafts_payload(plan, measured.drafts),
        **dict(plan.goal.list_outcomes()),
    }


def drafts_payload(plan: Plan, counts: DraftCounts | None, **more: object) -> dict[str, Any]:
    """Return what was counted of drafts and ``more``, where a plan has some."""
    return {} if plan.offload.draft is None else {"drafts": {**dump(counts), **more}}


def text_payload(text: "Text") -> dict[str, Any]:
    """Return what is said of a text that was made."""
    return {"text": text.made, "num_tokens": text.num_made, "finish_reason": text.finish}


def bench_payload(plan: Plan, result: "BenchResult") -> dict[str, Any]:
    """Return what ``bench --json`` prints; ``vs`` has other ways, or why one was not measured."""
    return {
        **dump(result, exclude={"plan", "host_bytes", "others", "counts", "ran"}),
        "way": plan.goal.way.name,
        "plan": Ran.of(plan).model_dump(mode="json"),
        "runtime": {"predicted": plan.goal.engine or OWN_RUNTIME, "measured": OWN_RUNTIME},
        "predicted": {
            **_prediction_payload(plan.prediction, plan),
            "host_memory": {"weights_bytes": plan.prediction.host_memory_bytes},
        },
        "measured": {
            **{phase: _measured_payload(plan, result, phase) for phase in PHASES},
            "link": {"bytes_per_s": result.plan.link_bytes_per_s},
            "gpu_memory": {"total_bytes": result.plan.gpu_bytes},
            "host_memory": {"process_bytes": result.host_bytes},
            "notes": [*result.plan.notes],
        },
        **_counts_payload(result.counts),
        **drafts_payload(plan, result.plan.drafts, token_s=result.plan.drafted_s),
        **dict(plan.goal.list_outcomes()),
        "vs": {name: _way_payload(way) for name, way in result.others.items()},
    }


def _counts_payload(counts: Mapping[str, ComparedCounts]) -> dict[str, Any]:
    return {each.key: dump(counts.get(name)) for name, each in COUNTS.items()}


def _prediction_payload(prediction: Prediction, plan: Plan) -> dict[str, Any]:
    predicted = _with_ranges(prediction, plan)
    return {key: predicted[key] for key in (*PHASES, "gpu_memory")}


def _measured_payload(plan: Plan, result: "BenchResult", phase: str) -> dict[str, Any]:
    cost: PhaseCost = getattr(result.plan, phase)
    return {
        **_step_payload(cost),
        **dump(measured_phase(plan, result, phase), exclude={"step"}),
        "stalls": [
            {"layer": layer, "stall_s": seconds}
            for layer, seconds in sorted((cost.stalls_s or {}).items())
        ],
        "recorded": None if cost.recorded is None else _recording_payload(cost),
    }


def _recording_payload(cost: "PhaseCost") -> dict[str, Any]:
    """Return when compute waited, in a request of its own."""
    return {"num_passes": cost.num_recorded, **dump(cost.recorded)}


def _step_payload(cost: "PhaseCost") -> dict[str, float]:
    step = cost.step
    return {"step_s": step.median_s, "step_min_s": step.min_s, "step_max_s": step.max_s}


def _way_payload(way: "Measurement | str") -> dict[str, Any]:
    """Return one way to run the workload, with the same keys whether it was measured or not."""
    if isinstance(way, str):
        return {"decode": None, "prefill": None, "gpu_memory": None, "why_not": name_options(way)}
    return {
        **{phase: _step_payload(getattr(way, phase)) for phase in PHASES},
        "gpu_memory": {"total_bytes": way.gpu_bytes},
        "why_not": None,
        **({"told": way.told} if way.told else {}),
    }
