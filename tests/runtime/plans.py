"""Offload decisions for tests, made without the planner."""

from offplan.plan import Offload, Rule


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


def offload(*rules: Rule, prefetch_step: int = 2, prefill_chunk: int = 64) -> Offload:
    return Offload(prefetch_step=prefetch_step, prefill_chunk=prefill_chunk, rules=rules)
