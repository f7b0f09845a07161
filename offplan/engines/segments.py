"""Segments that choose exactly the parameters a rule chooses, in the engine's own names."""

from collections.abc import Collection, Sequence

from offplan.checkpoint.model import Model
from offplan.engines.names import EngineParameter, vllm_parameters
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
    wanted = {_known_name(p) for p in chosen}
    unwanted = {p.name or p.parameter.name for p in others}
    if split := sorted(wanted & unwanted):
        _refuse_part(split[0], chosen, others)
    return choose_segments(rule.cpu_offload_params, wanted, unwanted)


def choose_segments(
    preferred: Sequence[str], wanted: Collection[str], unwanted: Collection[str]
) -> list[str]:
    """Find few segments that match all of ``wanted`` and none of ``unwanted``.

    The preferred ones are kept when they do.
    """
    fits = all(match_segments(preferred, name) for name in wanted)
    if preferred and fits and not any(match_segments(preferred, name) for name in unwanted):
        return list(preferred)
    found = cover_names(wanted, unwanted, {run for name in wanted for run in list_runs(name)})
    assert found is not None, "a whole name is a run that covers itself"
    return found


def _known_name(parameter: EngineParameter) -> str:
    if parameter.name is None:
        raise ExportError(
            f"it is not known what vLLM calls {parameter.parameter.name} of layer "
            f"{parameter.layer}; choose other segments, or whole layers"
        )
    return parameter.name


def _refuse_part(
    name: str, chosen: Sequence[EngineParameter], others: Sequence[EngineParameter]
) -> None:
    inside = sorted({p.parameter.name for p in chosen if p.name == name})
    outside = sorted({p.parameter.name for p in others if p.name == name})
    raise ExportError(
        f"vLLM holds {', '.join(inside)} and {', '.join(outside)} in one parameter, {name}: "
        "it offloads all of them or none"
    )
