"""Segments that choose exactly the parameters a rule chooses, in the engine's own names."""

from collections.abc import Collection, Sequence

from offplan.checkpoint.model import Model
from offplan.engines.names import vllm_parameters
from offplan.errors import ExportError
from offplan.plan import Rule
from offplan.segments import cover_names, list_runs, match_segments


def vllm_segments(rule: Rule, model: Model) -> list[str]:
    """Say the rule's segments in vLLM's names; empty when the rule matches everything.

    Raises ExportError where vLLM's name is not known, or holds more than the rule chooses.
    """
    if not rule.cpu_offload_params:
        return []
    parameters = list(vllm_parameters(model))
    chosen = [p for p in parameters if rule.matches(p.parameter.name)]
    others = [p for p in parameters if not rule.matches(p.parameter.name)]
    for p in chosen:
        if p.name is None:
            raise ExportError(
                f"it is not known what vLLM calls {p.parameter.name} of layer {p.layer}; choose "
                "other segments, or whole layers"
            )
    wanted = {p.name for p in chosen if p.name}
    unwanted = {p.name or p.parameter.name for p in others}
    for name in sorted(wanted & unwanted):
        inside, outside = (
            ", ".join(sorted({p.parameter.name for p in parameters if p.name == name}))
            for parameters in (chosen, others)
        )
        raise ExportError(
            f"vLLM holds {inside} and {outside} in one parameter, {name}: it offloads all of them "
            "or none"
        )
    return choose_segments(rule.cpu_offload_params, wanted, unwanted)


def choose_segments(
    preferred: Sequence[str], wanted: Collection[str], unwanted: Collection[str]
) -> list[str]:
    """Find few segments that match all of ``wanted`` and none of ``unwanted``.

    The preferred ones are kept when they do.
    """
    fits = all(match_segments(preferred, name) for name in wanted)
    if fits and not any(match_segments(preferred, name) for name in unwanted):
        return list(preferred)
    found = cover_names(wanted, unwanted, {run for name in wanted for run in list_runs(name)})
    assert found is not None, "a whole name is a run that covers itself"
    return found
