"""The JSON that scripts read: versioned, plain numbers, the same keys every time."""

import dataclasses
from typing import Any

from offplan.checkpoint.model import Model
from offplan.errors import InfeasibleError
from offplan.machine.profile import MachineProfile
from offplan.plan import Plan, plan_json
from offplan.planner import PlanResult
from offplan.planner.crossovers import Crossovers
from offplan.report.analysis import Analysis
from offplan.report.model import outside_segments
from offplan.report.run import RunResult

JSON_VERSION = 1


def analyze_payload(analysis: Analysis) -> dict[str, Any]:
    """What ``analyze --json`` prints; ``plan`` is null if nothing fits or nothing was measured."""
    machine, result, infeasible = analysis.machine, analysis.result, analysis.infeasible
    return {
        "offplan": JSON_VERSION,
        **model_payload(analysis.model),
        "machine": None if machine is None else machine_payload(machine),
        "plan": None if result is None else plan_json(result.plan),
        "why": None if result is None else why_payload(result, analysis.crossovers),
        "infeasible": None if infeasible is None else infeasible_payload(infeasible),
        "unmeasured": analysis.unmeasured,
    }


def model_payload(model: Model) -> dict[str, Any]:
    """The model's keys: ``model``, ``layers``, ``outside_layers``, ``experts``, ``notes``."""
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
    """The routed experts; null for a dense model."""
    if model.experts is None:
        return None
    return {
        "num_experts": model.experts.num_experts,
        "num_experts_per_token": model.experts.num_experts_per_token,
        "bytes_per_expert": model.experts.bytes_per_expert,
    }


def machine_payload(machine: MachineProfile) -> dict[str, Any]:
    """The profile's own keys, and its fingerprint."""
    return {**machine.model_dump(mode="json"), "fingerprint": machine.fingerprint}


def why_payload(result: PlanResult, crossovers: Crossovers | None) -> dict[str, Any]:
    """Why it is this plan, and what no plan of its budget can beat."""
    return {
        "reasons": list(result.reasons),
        "num_candidates": result.num_candidates,
        "num_priced": result.num_priced,
        "second_rule_gain": result.second_rule_gain,
        "floor": dataclasses.asdict(result.floor),
        "gap": result.gap,
        "crossovers": None if crossovers is None else dataclasses.asdict(crossovers),
    }


def infeasible_payload(error: InfeasibleError) -> dict[str, Any]:
    """Why nothing fits, and by how much."""
    return {"message": str(error), "shortfall_bytes": error.shortfall_bytes}


def run_payload(plan: Plan, result: RunResult, text: str | None) -> dict[str, Any]:
    """What ``run --json`` prints; ``text`` is the continuation of the prompt, if there was one."""
    predicted = plan_json(plan)["prediction"]
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
