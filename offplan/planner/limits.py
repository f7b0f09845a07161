"""Limits of the search: what its integers hold, and what a runner can run."""

from collections import Counter
from collections.abc import Callable
from functools import cache
from math import ceil

from offplan.costs.steady import MOST, NUM_STEPS
from offplan.costs.timeline import to_ps
from offplan.errors import ExportError, InputError
from offplan.held.runner import Demand
from offplan.plan import Budget, Offload
from offplan.planner.space import Space


def check_range(space: Space) -> None:
    """Raise InputError for a question some of whose plans may take more than MOST.

    The most is that of a plan that reads every layer in place, by the slowest backend, and copies
    it as well, in each setting.
    """
    settings, most_bytes = space.settings, space.stage.loaded_bytes
    copies_ps = to_ps(space.machine.copy_seconds(most_bytes)) + len(space.kind_of) * space.start_ps
    if space.stage.pass_rules is not None:  # for each chunk, and in a step at most twice
        copies_ps *= max(2, int(space.table.num_chunks.max()))
    backends = [way for way in space.question.runner.backends if not way.streams]
    distinct = {(each.prefill_chunk, each.row_ps[0]): each for each in settings}.values()
    passes = [*(each.prefill for each in distinct), space.decode]
    reads = [*(each.row_ps[0] for each in distinct), 0]
    for kind, count in Counter(space.kind_of).items():
        ways = [[(unit, way) for unit in space.units[kind]] for way in backends]
        reads = [
            read + count * max(space.at_use.read_ps(way, each) for way in ways)
            for read, each in zip(reads, passes, strict=True)
        ]
    pairs, slowdown = zip(passes, reads, strict=True), ceil(space.slowdown)
    *prompts_ps, step_ps = (each.resident_ps + copies_ps + slowdown * read for each, read in pairs)
    held_bytes = max(each.device_bytes for each in settings)
    if max(max(prompts_ps) + NUM_STEPS * step_ps, held_bytes) > MOST:
        workload = space.question.workload
        raise InputError(
            f"requests of {workload.batch} x {workload.prompt_tokens} prompt tokens and "
            f"{workload.output_tokens} output tokens may take longer on {space.machine.name}, "
            "or hold more bytes, than can be counted: lower `batch`, `prompt_tokens` or "
            "`output_tokens`"
        )


def make_check(space: Space) -> Callable[[Offload, Budget], bool]:
    """Return what tells whether a space's runner can run a plan, and what it takes then fits."""
    question = space.question
    if question.runner.pass_rules is None:  # it runs all that is priced
        return lambda _, __: True

    @cache
    def ask(offload: Offload) -> Demand | None:
        try:
            return question.demand(offload)
        except ExportError:
            return None

    def can_run(offload: Offload, budget: Budget) -> bool:
        # what an engine cannot move in every layer it cannot move in some: asked once for all
        everywhere = {"group_size": 1, "num_in_group": 1}
        of_all = tuple(
            rule if rule.max_bytes is not None else rule.model_copy(update=everywhere)
            for rule in offload.rules
        )
        asked = offload.model_copy(update={"prefill_chunk": 1})  # which is said elsewhere
        if ask(asked.model_copy(update={"rules": of_all, "prefetch_step": 1})) is None:
            return False
        demand, host = ask(asked), budget.host_memory
        if demand is None or (host is not None and demand.pinned_bytes > host):
            return False
        if demand.more_gpu_bytes <= 0 and question.stage.num_stages == 1 and host is None:
            return True
        # a rival may be of another recoding than the space
        taken = question.predict(offload, budget)
        fits_host = host is None or taken.host_memory_bytes <= host
        more = max(0, demand.more_gpu_bytes)
        return fits_host and taken.gpu_memory.total_bytes + more <= budget.gpu_memory

    return can_run
