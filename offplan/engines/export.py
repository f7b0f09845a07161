"""Plan in, an engine's flags out, or a refusal."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from offplan.checkpoint.model import Model
from offplan.engines.sglang import MAX_BYTES_UNIT, sglang_flags, sglang_notes
from offplan.engines.vllm import vllm_flags, vllm_notes
from offplan.errors import ExportError
from offplan.placement import Placement, place
from offplan.plan import Offload, Plan, Rule


@dataclass(frozen=True)
class Engine:
    """How to say a rule to one engine."""

    flags: Callable[[Rule, Placement, Model], list[str]]
    notes: Callable[[Rule, Placement], list[str]]
    limits: str
    """Flags that hold it to a batch and a context."""
    max_bytes_unit: int = 1
    """A rule's ``max_bytes`` is a whole number of these."""


ENGINES = {
    "vllm": Engine(vllm_flags, vllm_notes, "--max-num-seqs {} --max-model-len {}"),
    "sglang": Engine(
        sglang_flags, sglang_notes, "--max-running-requests {} --context-length {}", MAX_BYTES_UNIT
    ),
}


def export_plan(plan: Plan, model: Model, engine: str) -> list[str]:
    """Say the plan in the engine's flags; a plan without rules needs none.

    Raises ExportError, naming what would be lost, and PlanError for a plan that is not this
    model's.
    """
    return export_offload(plan.offload, model, engine)


def export_offload(offload: Offload, model: Model, engine: str) -> list[str]:
    """Say a plan's decision in the engine's flags, as ``export_plan`` does."""
    chosen = find_engine(engine)
    rule = _only_rule(offload, engine)
    return [] if rule is None else chosen.flags(rule, place(model, offload), model)


def export_check(model: Model, engine: str) -> Callable[[Offload], bool]:
    """Return whether the engine's flags can say a decision; what it was asked it remembers."""

    @cache
    def can_say(rules: tuple[Rule, ...], prefetch_step: int) -> bool:
        # no engine's flag says the chunk
        offload = Offload(prefetch_step=prefetch_step, prefill_chunk=1, rules=rules)
        try:
            export_offload(offload, model, engine)
        except ExportError:
            return False
        return True

    def allows(offload: Offload) -> bool:
        # what an engine cannot move in every layer it cannot move in some: asked once for all
        everywhere = {"group_size": 1, "num_in_group": 1}
        of_all = tuple(
            rule if rule.max_bytes is not None else rule.model_copy(update=everywhere)
            for rule in offload.rules
        )
        return can_say(of_all, 1) and can_say(offload.rules, offload.prefetch_step)

    return allows


def export_notes(plan: Plan, model: Model, engine: str) -> list[str]:
    """Say what the flags of ``export_plan`` do not promise, a sentence each."""
    chosen = find_engine(engine)
    rule = _only_rule(plan.offload, engine)
    limits = chosen.limits.format(plan.workload.batch, plan.workload.context)
    sizes = f"{engine} sizes its KV cache by flags of its own: the plan's workload is {limits}"
    if rule is None:
        return ["the plan offloads nothing: no flag for that is needed", sizes]
    return [*chosen.notes(rule, place(model, plan.offload)), sizes]


def find_engine(name: str) -> Engine:
    """Find an engine by its name; raises ExportError for one that offplan does not export to."""
    if name not in ENGINES:
        raise ExportError(f"no engine {name!r}: offplan exports to {' and '.join(ENGINES)}")
    return ENGINES[name]


def _only_rule(offload: Offload, engine: str) -> Rule | None:
    rules = offload.rules
    if offload.embeddings == "host":
        raise ExportError(
            f"{engine} keeps the input embedding on the GPU; the plan has it on the host"
        )
    if offload.store == "peer" and rules:
        raise ExportError(
            f"{engine} offloads to host memory; the plan has a second GPU's memory as its store, "
            "whose faster link would be lost: plan again with `store: host`"
        )
    if len(rules) > 1:
        raise ExportError(f"{engine}'s flags say one rule; the plan has {len(rules)}")
    if rules and rules[0].is_mixed:
        raise ExportError(
            f"{engine} has one backend for both phases; the plan has {rules[0].prefill.value} in "
            f"prefill and {rules[0].decode.value} in decode"
        )
    return rules[0] if rules else None
