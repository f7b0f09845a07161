"""Segments that choose exactly the parameters a rule chooses, in the engine's own names."""

from collections.abc import Collection, Iterable, Sequence

from offplan.engines.names import EngineParameter
from offplan.errors import ExportError
from offplan.plan import Rule
from offplan.segments import cover_names, list_runs, match_segments


def engine_segments(rule: Rule, parameters: Iterable[EngineParameter]) -> list[str]:
    """Say the rule's segments in the engine's names; empty when the rule matches everything.

    Raises ExportError if an engine's parameter holds more than the rule chooses.
    """
    if not rule.cpu_offload_params:
        return []
    wanted: set[str] = set()
    unwanted: set[str] = set()
    for each in parameters:
        chosen = {p.name for p in each.parameters if rule.matches(p.name)}
        others = {p.name for p in each.parameters} - chosen
        if chosen and others:
            inside, outside = (", ".join(sorted(names)) for names in (chosen, others))
            raise ExportError(
                f"vLLM holds {inside} and {outside} in one parameter, {each.name}: it offloads all "
                "of them or none"
            )
        (wanted if chosen else unwanted).add(each.name)
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
