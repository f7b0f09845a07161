"""The questions that can be searched: the search adds up picoseconds and bytes in int64."""

from collections import Counter
from math import ceil

from offplan.costs.steady import MOST, NUM_STEPS
from offplan.costs.timeline import to_ps
from offplan.errors import InputError
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
    passes = [*(each.prefill for each in settings), space.decode]
    reads = [*(space.reading_ps(each.row_bytes[0]) for each in settings), 0]
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
