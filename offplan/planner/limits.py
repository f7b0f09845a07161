"""The questions that can be searched: the search adds up picoseconds and bytes in int64."""

from collections import Counter
from functools import partial
from math import ceil

from offplan.costs.steady import MOST, NUM_STEPS
from offplan.costs.timeline import to_ps
from offplan.errors import InputError
from offplan.planner.space import Space


def check_range(space: Space) -> None:
    """Raise InputError for a question some of whose plans may take more than MOST.

    What is taken as the most is a plan that reads every layer at use, and copies it as well, in
    the setting where that takes longest.
    """
    question, settings = space.question, space.settings
    prompt_bytes, step_bytes = [0] * len(settings), space.stage.loaded_bytes
    copies_ps = to_ps(space.machine.copy_seconds(step_bytes)) + len(space.kind_of) * space.start_ps
    if space.stage.runner.pass_rules is not None:  # for each chunk, and in a step at most twice
        copies_ps *= max(2, int(space.table.num_chunks.max()))
    for kind, count in Counter(space.kind_of).items():
        units = space.units[kind]
        served = [[(unit, backend) for unit in units] for backend in space.read_at_use]
        step_bytes += count * max(space.step_reads(each)[1] for each in served)
        reads = map(max, zip(*(space.prompt_reads(each)[1] for each in served), strict=True))
        prompt_bytes = [a + count * b for a, b in zip(prompt_bytes, reads, strict=True)]
    slowdown, workload = ceil(space.slowdown), question.workload
    slowest_ps = partial(space.reading_ps, backend=space.slowest)
    step_ps = space.decode.resident_ps + copies_ps + slowdown * slowest_ps(step_bytes)
    prompt_ps = max(
        each.prefill.resident_ps + copies_ps + slowdown * slowest_ps(read + each.row_bytes[0])
        for each, read in zip(settings, prompt_bytes, strict=True)
    )
    moved_bytes = max(prompt_bytes) + workload.num_steps * step_bytes
    held_bytes = max(each.device_bytes for each in settings)
    if max(prompt_ps + NUM_STEPS * step_ps, moved_bytes, held_bytes) > MOST:
        raise InputError(
            f"requests of {workload.batch} x {workload.prompt_tokens} prompt tokens and "
            f"{workload.output_tokens} output tokens may take longer on {space.machine.name}, "
            "or move more bytes, than can be counted: lower --batch, --prompt-tokens or "
            "--output-tokens"
        )
