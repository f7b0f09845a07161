"""Plans for tests, made without the planner."""

from typing import Any

from offplan.checkpoint.model import Model
from offplan.plan import Plan, Rule, parse_plan

PHASE = {"step_s": 1, "compute_s": 1, "link_s": 1, "stall_s": 0, "bound_s": 1, "link_bytes": 0}


def group(
    group_size: int,
    num_in_group: int,
    *segments: str,
    prefill: str = "prefetch",
    decode: str = "prefetch",
) -> Rule:
    return Rule.model_validate(
        {
            "cpu_offload_params": segments,
            "group_size": group_size,
            "num_in_group": num_in_group,
            "prefill": prefill,
            "decode": decode,
        }
    )


def make_test_plan(
    model: Model,
    *rules: Rule,
    prefetch_step: int = 2,
    prefill_chunk: int = 64,
    context: int = 48,
    **workload: Any,
) -> Plan:
    data = {
        "offplan": 1,
        "model": {
            "source": model.source,
            "headers_sha256": model.headers_sha256,
            "dtype": model.dtype,
        },
        "workload": {"prompt_tokens": 8, "output_tokens": 8, "context": context, **workload},
        "budget": {"gpu_memory": "1 GiB"},
        "machine": {
            "name": "test",
            "link": "memcpy",
            "h2d": 1e9,
            "uva": 1e9,
            "basis": "estimated",
            "fingerprint": "none",
        },
        "offload": {
            "prefetch_step": prefetch_step,
            "prefill_chunk": prefill_chunk,
            "rules": [rule.model_dump(exclude_none=True) for rule in rules],
        },
        "prediction": {
            "objective_s": 1,
            "basis": "estimated",
            "prefill": PHASE,
            "decode": PHASE,
            "gpu_memory": {
                "resident_bytes": 0,
                "ring_bytes": 0,
                "kv_cache_bytes": 0,
                "activation_bytes": 0,
                "overhead_bytes": 0,
                "total_bytes": 0,
            },
            "host_memory_bytes": 0,
        },
    }
    return parse_plan(data, "test plan")
