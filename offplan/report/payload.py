"""The JSON that scripts read: versioned, plain numbers, the same keys every time."""

import dataclasses
from typing import TYPE_CHECKING, Any

from offplan.checkpoint.model import Model
from offplan.costs.crossovers import Crossovers
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.plan import Plan
from offplan.planner.make import PlanResult
from offplan.report.analysis import Analysis
from offplan.report.bench import PHASES, measured_phase
from offplan.report.model import outside_segments
from offplan.report.run import RunResult
from offplan.report.why import explain_plan

if TYPE_CHECKING:  # they import torch
    from offplan.benchmark import BenchResult
    from offplan.runtime.measuring.bench import PhaseCost
    from offplan.runtime.measuring.versus import Measurement

JSON_VERSION = 1


def analyze_payload(analysis: Analysis) -> dict[str, Any]:
    """Return what ``analyze --json`` prints; ``plan`` is null if nothing fits or was measured."""
    machine, result, infeasible = analysis.machine, analysis.result, analysis.infeasible
    return {
        "offplan": JSON_VERSION,
        **model_payload(analysis.model),
        "machine": None if machine is None else machine_payload(machine),
        "plan": None if result is None else result.plan.model_dump(mode="json"),
        "why": None if result is None else why_payload(result, analysis.crossovers),
        "infeasible": None if infeasible is None else infeasible_payload(infeasible),
        "unmeasured": analysis.unmeasured,
    }


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
            "loaded_bytes": model.loaded_bytes,
            "headers_sha256": model.headers_sha256,
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
        "experts": experts_payload(model),
        "notes": list(model.notes),
    }


def experts_payload(model: Model) -> dict[str, int] | None:
    """Return the routed experts; None for a dense model."""
    if model.experts is None:
        return None
    return {
        "num_experts": model.experts.num_experts,
        "num_experts_per_token": model.experts.num_experts_per_token,
        "bytes_per_expert": model.experts.bytes_per_expert,
    }


def machine_payload(machine: MachineProfile) -> dict[str, Any]:
    """Return the profile's own keys, and its fingerprint."""
    return {**machine.model_dump(mode="json"), "fingerprint": machine.fingerprint}


def why_payload(result: PlanResult, crossovers: Crossovers | None) -> dict[str, Any]:
    """Return why it is this plan, and what no plan of its budget can beat."""
    return {
        "basis": result.plan.prediction.basis,
        "reasons": explain_plan(result),
        "num_candidates": result.num_candidates,
        "num_priced": result.num_priced,
        "second_rule_gain": result.second_rule_gain,
        "max_rules": result.max_rules,
        "floor": dataclasses.asdict(result.floor),
        "gap": result.gap,
        "crossovers": None if crossovers is None else dataclasses.asdict(crossovers),
    }


def infeasible_payload(error: InfeasibleError) -> dict[str, Any]:
    """Return why nothing fits, and how many bytes are missing."""
    return {"message": str(error), "shortfall_bytes": error.shortfall_bytes}


def run_payload(plan: Plan, result: RunResult, text: str | None) -> dict[str, Any]:
    """Return what ``run --json`` prints; ``text`` is what followed a prompt, None without one."""
    predicted = plan.prediction.model_dump(mode="json")
    return {
        "offplan": JSON_VERSION,
        "device": result.device,
        "batch": result.batch,
        "prompt_tokens": result.prompt_tokens,
        "output_tokens": result.output_tokens,
        "text": text,
        "predicted": {key: predicted[key] for key in ("decode", "prefill", "gpu_memory")},
        "measured": {
            "decode": {"step_s": result.step_s, "link_bytes": result.decode_link_bytes},
            "prefill": {"step_s": result.first_token_s, "link_bytes": result.prefill_link_bytes},
            "gpu_memory": {"total_bytes": result.gpu_bytes},
        },
    }


def bench_payload(plan: Plan, result: "BenchResult") -> dict[str, Any]:
    """Return what ``bench --json`` prints; ``vs`` has other ways, or why one was not measured."""
    predicted = plan.prediction.model_dump(mode="json")
    return {
        "offplan": JSON_VERSION,
        "device": result.device,
        "batch": result.batch,
        "prompt_tokens": result.prompt_tokens,
        "num_steps": result.num_steps,
        "num_repeats": result.num_repeats,
        "predicted": {
            **{key: predicted[key] for key in ("decode", "prefill", "gpu_memory")},
            "host_memory": {"weights_bytes": predicted["host_memory_bytes"]},
        },
        "measured": {
            **{phase: _measured_payload(plan, result, phase) for phase in PHASES},
            "link": {"bytes_per_s": result.plan.cost.link_bytes_per_s},
            "gpu_memory": {"total_bytes": result.plan.gpu_bytes},
            "host_memory": {"process_bytes": result.host_bytes},
        },
        "vs": {name: _way_payload(way) for name, way in result.others.items()},
    }


def _measured_payload(plan: Plan, result: "BenchResult", phase: str) -> dict[str, Any]:
    found = measured_phase(plan, result, phase)
    cost: PhaseCost = getattr(result.plan.cost, phase)
    return {
        **_step_payload(cost),
        "link_bytes": found.link_bytes,
        "stall_s": found.stall_s,
        "bound_s": found.bound_s,
        "compute_s": found.compute_s,
        "stalls": [
            {"layer": layer, "stall_s": seconds}
            for layer, seconds in sorted((cost.stalls_s or {}).items())
        ],
    }


def _step_payload(cost: "PhaseCost") -> dict[str, float]:
    step = cost.step
    return {"step_s": step.median_s, "step_min_s": step.min_s, "step_max_s": step.max_s}


def _way_payload(way: "Measurement | str") -> dict[str, Any]:
    """Return one way to run the workload, with the same keys whether it was measured or not."""
    if isinstance(way, str):
        return {"decode": None, "prefill": None, "gpu_memory": None, "why_not": way}
    return {
        **{phase: _step_payload(getattr(way.cost, phase)) for phase in PHASES},
        "gpu_memory": {"total_bytes": way.gpu_bytes},
        "why_not": None,
    }
