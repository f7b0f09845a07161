"""Segments that choose exactly the parameters a rule chooses, in the engine's own names."""

from collections.abc import Collection, Sequence

from offplan.checkpoint.model import Model
from offplan.engines.names import EngineParameter, vllm_parameters
from offplan.errors import ExportError
from offplan.plan import Rule, match_segments


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

    The preferred ones are kept when they do; the rest is a greedy cover, shortest runs first
    among equals, so the same names always give the same segments.
    """
    if not _matched(preferred, unwanted) and _matched(preferred, wanted) == set(wanted):
        return list(preferred)
    runs = {run for name in wanted for run in _runs(name)}
    candidates = {run: _matched([run], wanted) for run in runs if not _matched([run], unwanted)}
    left = set(wanted)
    segments: list[str] = []
    while left:
        best = min(candidates, key=lambda run: (-len(candidates[run] & left), len(run), run))
        assert candidates[best] & left, "a whole name is a run that covers itself"
        segments.append(best)
        left -= candidates[best]
    return sorted(segments)


def _matched(segments: Sequence[str], names: Collection[str]) -> set[str]:
    return {name for name in names if segments and match_segments(segments, name)}


def _runs(name: str) -> list[str]:
    parts = name.split(".")
    return [
        ".".join(parts[start:stop])
        for start in range(len(parts))
        for stop in range(start + 1, len(parts) + 1)
    ]


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
