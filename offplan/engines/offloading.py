"""A plan's decision in an engine's flags, or by offplan's worker in it, and what that takes."""

from collections.abc import Callable
from functools import cache

from offplan.engines.engine import (
    Engine,
    Said,
    SayRule,
    Version,
    join_flags,
    join_stages,
    require_stored_weights,
)
from offplan.engines.registry import find_engine
from offplan.engines.taken import say_to_worker
from offplan.errors import ExportError
from offplan.held.held import Held
from offplan.placement import place
from offplan.plan import Offload, Rule


def say_offload(offload: Offload, held: Held, engine: str) -> Said:
    """Say a plan's decision to an engine, as ``export_plan`` does, whatever its budget.

    ``held`` is what the engine's ranks hold.
    """
    chosen, version = find_engine(engine)
    require_stored_weights(offload, chosen.title)
    if not offload.rules and offload.embeddings == "device":
        return max(
            (chosen.stay(stage, version) for stage in held.stages),
            key=lambda said: said.more_gpu_bytes,
        )
    if chosen.say is None:
        return say_to_worker(offload, held, version)
    return _say_rule(offload, held, chosen, chosen.say, version)


def _say_rule(offload: Offload, held: Held, engine: Engine, say: SayRule, version: Version) -> Said:
    """Say a plan's only rule to an engine, and to all ranks of it."""
    rule = _only_rule(offload, engine)
    # each stage starts the pattern anew
    stages = [say(rule, place(stage, offload), stage, version) for stage in held.stages]
    said = join_stages(stages, held)
    if any(stage.flags != said.flags for stage in stages):
        told = "; ".join(" ".join(join_flags(stage.flags)) for stage in stages)
        raise ExportError(
            f"{held.ranks.label}: {engine.title} gives all stages of a pipeline the same "
            f"flags, and the plan needs others in each ({told})"
        )
    return said


def export_check(held: Held, engine: str) -> Callable[[Offload], Said | None]:
    """Return what says a decision, or None; what it was asked it remembers."""

    @cache
    def say(offload: Offload) -> Said | None:
        try:
            return say_offload(offload, held, engine)
        except ExportError:
            return None

    def check(offload: Offload) -> Said | None:
        # what an engine cannot move in every layer it cannot move in some: asked once for all
        everywhere = {"group_size": 1, "num_in_group": 1}
        of_all = tuple(
            rule if rule.max_bytes is not None else rule.model_copy(update=everywhere)
            for rule in offload.rules
        )
        asked = offload.model_copy(update={"prefill_chunk": 1})  # which is said elsewhere
        if say(asked.model_copy(update={"rules": of_all, "prefetch_step": 1})) is None:
            return None
        return say(asked)

    return check


def _only_rule(offload: Offload, engine: Engine) -> Rule:
    rules = offload.rules
    if offload.embeddings == "host":
        raise ExportError(
            f"{engine.title} keeps the input embedding on the GPU; the plan has it on the host"
        )
    if len(rules) > 1:
        raise ExportError(f"{engine.title}'s flags say one rule; the plan has {len(rules)}")
    if rules[0].is_mixed:
        raise ExportError(
            f"{engine.title} has one backend for both phases; the plan has "
            f"{rules[0].prefill.value} in prefill and {rules[0].decode.value} in decode"
        )
    return rules[0]
