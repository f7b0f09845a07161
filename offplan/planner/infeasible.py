"""Why there is no plan: what is missing and what would help."""

from offplan.costs.memory import MARGIN, overhead_bytes
from offplan.costs.threshold import least_that
from offplan.engines.export import say_offload
from offplan.errors import ExportError, InfeasibleError
from offplan.plan import Backend, Offload, Rule
from offplan.planner.aims import Fastest, limits_ps
from offplan.planner.question import Question
from offplan.planner.search import Found, Search, Searcher
from offplan.planner.space import find_room
from offplan.units import format_budget, format_bytes, format_bytes_enough

RESOLUTION = 100
"""The memory that would do is found to this part of the budget."""


def explain_infeasible(searcher: Searcher, question: Question, search: Search) -> InfeasibleError:
    """Say what is missing and what would help."""
    budget, workload = question.budget, question.workload
    if question.goal.engine and not (search.gpu_lack or search.host_lack):
        return _explain_engine(searcher, question, question.goal.engine)
    if search.gpu_lack:
        lack = -(-int(search.gpu_lack) * 1000 // round(1000 * (1 - MARGIN)))
        space = min(searcher.spaces, key=lambda each: find_room(each, budget).lacking_bytes.min())
        model, number = space.model, int(find_room(space, budget).lacking_bytes.argmin())
        smallest = space.settings[number]
        fixed = model.outside_bytes - smallest.host_bytes
        weights = model.loaded_bytes - smallest.host_bytes
        taken = smallest.device_bytes + overhead_bytes(space.machine, budget) - weights
        return InfeasibleError(
            f"no plan fits {format_budget(budget.gpu_memory)} of GPU memory: "
            f"{format_bytes_enough(lack)} more are needed. Of what lies outside the layers "
            f"{format_bytes(fixed)} are always on the GPU; KV cache, "
            f"activations and overhead take {format_bytes(taken)}. Give more GPU memory, or "
            f"shorten the context ({workload.context} tokens) or the batch "
            f"({workload.batch})",
            lack,
        )
    # that of plans of one rule: others may lack less
    lack = int(search.host_lack) * question.goal.ranks.num_gpus
    return InfeasibleError(
        f"no plan fits {format_budget(budget.host_memory or 0)} of "
        f"{searcher.space.machine.store} memory: "
        f"up to {format_bytes_enough(lack)} more are needed to hold what the GPU "
        f"({format_budget(budget.gpu_memory)}) cannot. Give more of either",
        lack,
    )


def _explain_engine(searcher: Searcher, question: Question, engine: str) -> InfeasibleError:
    """Say how much more the engine's plans need where they fit the GPU, or why it runs none."""
    space, given = searcher.space, question.budget.gpu_memory
    any_plan = Fastest((0, 0), limits_ps(question.goal))

    def find(gpu_memory: int) -> Found | None:
        room = find_room(space, question.with_gpu_memory(gpu_memory).budget)
        return searcher.find(room, any_plan).best

    told = f"no plan that {engine} can run fits {format_budget(given)}, though others do"
    most, lack = space.machine.gpu_memory.value, None
    if most > given and find(most) is not None:
        enough = least_that(lambda size: find(size) is not None, given, most, given // RESOLUTION)
        lack = enough - given
        told += f"; with {format_bytes_enough(lack)} more of GPU memory there is one"
        found = find(enough)
        if found is not None and found.offload.rules:
            return InfeasibleError(told, lack)
    return InfeasibleError(f"{told}{_refuse_layers(question, engine)}", lack)


def _refuse_layers(question: Question, engine: str) -> str:
    """Say why an engine cannot even copy whole layers, if it cannot."""
    way = Backend.PREFETCH
    rule = Rule(group_size=1, num_in_group=1, prefill=way, decode=way)
    offload = Offload(prefill_chunk=1, rules=(rule,))
    unlimited = question.budget.model_copy(update={"host_memory": None})
    try:
        say_offload(offload, question.model, engine, unlimited)
    except ExportError as error:
        return f": {error}"
    return ""
