"""Why there is no plan: what is missing, and the longest context that has one."""

from functools import cache, partial

from offplan.costs.memory import MARGIN, overhead_bytes, stored_draft_bytes
from offplan.costs.term import least_that
from offplan.errors import ExportError, InfeasibleError, Topic
from offplan.held.held import hold_prediction
from offplan.machine.name import find_enough_ram
from offplan.plan import Backend, Offload, Rule
from offplan.planner.aims import Fastest
from offplan.planner.question import Question
from offplan.planner.search import Candidate, Search, Searcher
from offplan.planner.space import find_room
from offplan.units import format_budget, format_bytes, format_bytes_enough

RESOLUTION = 100
"""The memory that would do is found to this part of the budget."""


def explain_infeasible(searcher: Searcher, question: Question, search: Search) -> InfeasibleError:
    """Say what is missing and what would help."""
    budget, workload = question.budget, question.workload
    if question.goal.engine and not search.gpu_lack:
        return _explain_engine(searcher, question, question.goal.engine, not search.host_lack)
    if search.gpu_lack:
        lack = -(-int(search.gpu_lack) * 1000 // round(1000 * (1 - MARGIN)))
        space = min(searcher.spaces, key=lambda each: find_room(each, budget).lacking_bytes.min())
        stage, number = space.stage, int(find_room(space, budget).lacking_bytes.argmin())
        smallest = space.settings[number]
        layers = "prediction layers, " if hold_prediction(stage, space.draft) else ""
        fixed = stage.outside_bytes - smallest.host_bytes
        weights = stage.loaded_bytes - smallest.host_bytes
        taken = smallest.device_bytes + overhead_bytes(space.machine, budget) - weights
        most = "up to " * (searcher.spared_bytes > 0)  # a second rule may take the rest
        return InfeasibleError(
            f"no plan fits {format_budget(budget.gpu_memory)} of GPU memory: "
            f"{most}{format_bytes_enough(lack)} more are needed. Of what lies outside the layers "
            f"{format_bytes(fixed)} are always on the GPU; {layers}KV cache, "
            f"activations and overhead take {format_bytes(taken)}. Give more GPU memory, or "
            f"shorten the context ({workload.context} tokens) or the batch "
            f"({workload.batch})",
            lack,
            topic=Topic.GPU_MEMORY,
        )
    # that of plans of one rule: others may lack less
    lack, machine, given = int(search.host_lack), searcher.space.machine, budget.host_memory or 0
    drafting = stored_draft_bytes(searcher.space.stage, searcher.space.draft)
    if drafting > given:
        return InfeasibleError(
            f"no plan fits {format_budget(given)} of host memory: `experts: host` of the draft "
            f"needs {format_bytes_enough(drafting)}. Leave it out, or give more host memory",
            drafting - given,
            topic=Topic.HOST_MEMORY,
        )
    told = (
        f"no plan fits {format_budget(given)} of {machine.store} memory: "
        f"up to {format_bytes_enough(lack)} more are needed to hold what the GPU "
        f"({format_budget(budget.gpu_memory)}) cannot. Give more of either"
    )
    ram, room = None, machine.host_memory
    if room is not None and room.value == given and machine.store == "host":
        ram = find_enough_ram(room.source, given + lack)
        told += f": a machine with {format_bytes(ram)} of memory has enough" if ram else ""
        if "wsl2" in room.source:
            told += ", and `memory=` in Windows' .wslconfig gives WSL2 more than half of it"
        told += ". llama.cpp, with a GGUF file, reads from disk what memory does not hold"
    return InfeasibleError(told, lack, ram_bytes=ram, topic=Topic.HOST_MEMORY)


def _explain_engine(
    searcher: Searcher, question: Question, engine: str, others_fit: bool
) -> InfeasibleError:
    """Say how much more of either memory the engine's plans need, or why it runs none."""
    space, given, lacks, offloads = searcher.space, question.budget, {}, False
    any_plan = Fastest((0, 0), space.limits_ps)
    most = {
        "gpu_memory": space.machine.gpu_memory.value,
        # page-locking rounds up to a power of two
        "host_memory": 2 * space.stage.loaded_bytes * question.goal.num_gpus,
    }

    @cache
    def find(name: str, num_bytes: int) -> Candidate | None:
        return searcher.find(given.model_copy(update={name: num_bytes}), any_plan).best

    def finds(name: str, num_bytes: int) -> bool:
        return find(name, num_bytes) is not None

    for name, title in (("gpu_memory", "GPU"), ("host_memory", "host")):
        low, high = getattr(given, name), most[name]
        if low is None or high <= low or not finds(name, high):
            continue
        enough = least_that(partial(finds, name), low, high, low // RESOLUTION)
        lacks[title] = enough - low
        found = find(name, enough)
        offloads |= found is not None and bool(found.offload.rules)
    told = f"no plan that {engine} can run fits {format_budget(given.gpu_memory)}"
    if given.host_memory is not None:
        told += f" and {format_budget(given.host_memory)} of host memory"
    told += ", though others do" * others_fit
    if lacks:
        more = (f"{format_bytes_enough(lack)} more of {title}" for title, lack in lacks.items())
        told += f"; with {' memory, or with '.join(more)} memory there is one"
    elif question.goal.targets:
        told += f"; nor does one reach {question.goal.targets} with more of either memory"
    if not offloads:
        told += _refuse_layers(question)
    return InfeasibleError(told, next(iter(lacks.values()), None))


def _refuse_layers(question: Question) -> str:
    """Say why an engine cannot even copy whole layers, if it cannot."""
    way = Backend.PREFETCH
    rule = Rule(group_size=1, num_in_group=1, prefill=way, decode=way)
    offload = Offload(prefill_chunk=1, rules=(rule,))
    try:
        question.demand(offload)
    except ExportError as error:
        return f": {error}"
    return ""
