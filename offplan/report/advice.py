"""The answer's additions to a plan's figures: other types and checkpoints, and what it assumes."""

from offplan.held.stage import Stage
from offplan.library.alternatives import Alternative
from offplan.library.analysis import Analysis
from offplan.plan import Plan
from offplan.report.wording import name_options
from offplan.units import format_bytes, format_frequency

_REPOSITORIES = {8: "FP8", 4: "GPTQ, AWQ, W4A16, MXFP4 or NVFP4"}
"""The words that repositories on the Hub which store so many bits a weight have in their names."""


def describe_alternatives(analysis: Analysis) -> list[str]:
    """Describe what checkpoints of fewer bits would give, in a line; nothing without any."""
    told = [
        f"{_name_bits(each)} ({format_bytes(each.total_bytes)}) {_describe_speed(each)}"
        for each in analysis.alternatives
    ]
    if not told:
        return []
    return [
        f"A checkpoint of this model in fewer bits would give here: {'; '.join(told)}. Its answers "
        "differ from this one's; offplan estimates its size and speed from the same shapes."
    ]


def describe_fitting(analysis: Analysis) -> list[str]:
    """Describe the checkpoints of fewer bits that fit where this one does not; nothing without."""
    found = analysis.alternatives
    if not found:
        return []
    told = " ".join(f"{_name_bits(each)} fit and give {_describe_speed(each)}." for each in found)
    names = " or ".join(_REPOSITORIES[each.bits] for each in found)
    return [f"{told} Look for a repository of this model with {names} in its name."]


def _name_bits(alternative: Alternative) -> str:
    return "FP8" if alternative.bits == 8 else f"{alternative.bits} bits"


def _describe_speed(alternative: Alternative) -> str:
    host = format_bytes(alternative.host_bytes) if alternative.host_bytes else "nothing"
    return f"{format_frequency(alternative.tokens_per_s)} tokens a second with {host} on the host"


def describe_type(analysis: Analysis) -> list[str]:
    """Name weights of float32, which another type would halve; nothing for others."""
    if analysis.stage.dtype != "float32" or (analysis.machine and analysis.machine.is_cpu):
        return []
    return [
        "Its weights are float32, twice the bytes of bfloat16. --dtype bfloat16 plans for a "
        "checkpoint in bfloat16, where MODEL is a config.json alone."
    ]


def describe_advice(analysis: Analysis, plan: Plan) -> list[str]:
    """Name what a plan's figures leave out, a line for each; often nothing."""
    lines = [*describe_type(analysis), *describe_alternatives(analysis)]
    if reads_experts(plan, analysis.stage) and plan.routing is None:
        lines.append(
            "The prediction assumes that tokens choose all experts equally often, which is the "
            "slowest case. `offplan run PLAN --record-routing FILE` records what they choose; "
            "--cached-experts auto --routing FILE plans by the record."
        )
    return [*lines, *map(name_options, analysis.sample.advise())]


def reads_experts(plan: Plan, stage: Stage) -> bool:
    """Return True if decode steps of offplan's own runtime read some experts over the link."""
    if not plan.goal.is_own:
        return False
    experts = [(n.index, p.name) for n in stage.layers for p in n.parameters if p.is_expert]
    return any(
        rule.selects_layer(layer) and rule.matches(name)
        for rule in plan.offload.rules
        if not rule.decode.streams
        for layer, name in experts
    )
