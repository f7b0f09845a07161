"""Times of prompts and steps on engines, which run them by rules of their own.

offplan's own copies go on from one pass to the next. An engine's copies end before the next pass
begins.

- A captured step waits for all copies that are under way, and joins its own at its end. Copies that
  a prompt leaves under way are charged to the prompt, though only the first step waits for them.
  First tokens of prompts one behind the other were measured so.
- Each chunk of a prompt goes through all layers by a pass of its own. A layer that streams waits
  for its copy. Once it has run, its slot is filled for the layer ``prefetch_step`` further on.
- A decode step is captured as one graph. In SGLang's graph nothing is computed while a layer is
  copied. vLLM's graph lets layers run meanwhile, and copies then take longer:
  ``PassRules.step_copy_ps``.
- SGLang copies what is to be read in place, each layer before it runs.
- One slot of SGLang's ring holds the layer that has run while the next copy is under way. Its
  prompts copy as many layers ahead as there are other slots, or one if there is none. That number
  is the ``prefetch_step`` of its command.
- SGLang's captured steps copy so many first layers twice. They copy them before they run, since a
  graph takes nothing that was copied outside it. They copy them after the last layers, as for a
  next pass.
- After a pass's last layers vLLM fills each one's slot again. SGLang copies the first layers in
  their order.

Source: vLLM 0.25.1 and 0.33, ``PrefetchOffloader`` (``_wait_for_layer``, ``_start_prefetch``,
``join_after_forward``, ``sync_prev_onload``); SGLang 0.5.23, ``_ModuleOffloader``, ``OffloaderV1``.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import numpy as np

from offplan.costs.pass_compute import PassCompute
from offplan.costs.pass_times import pass_times
from offplan.costs.timeline import PassTimes, PhaseTimes, add_up, to_ps
from offplan.costs.work import step_tokens
from offplan.held.layout import PassRules
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase, Placement
from offplan.plan import Workload
from offplan.schedule import Schedule, build_repeated_pass


def add_up_engine(
    engine: PassRules,
    placement: Placement,
    phase: Phase,
    times: PassTimes,
    step_ps: Fraction | int,
    num_passes: int,
) -> PhaseTimes:
    """Add up the link's work of a prompt, whose passes are assumed to be alike, or of a step.

    ``times`` are those of ``engine_pass_times``.
    """
    schedule = build_engine_pass(engine, placement, len(times.compute_ps), phase)
    waiting = "waits in the timeline: a pass for each chunk, which its copies end"
    if phase is Phase.DECODE:
        waiting = "link: captured steps copy and compute in turns"
        waiting += ", and copy the first layers twice" if engine.copies_first_again else ""
        if engine.beside_percent is not None:
            waiting = "waits in the timeline: layers run beside copies, which end with the step"
    taken = add_up(schedule, times, step_ps, waiting, num_passes)
    if not engine.copies_in_place:
        return taken
    # what is copied before each use, and so priced as read in place, counts as copies
    num_copies = num_passes * sum(slab.span(phase) is None for slab in placement.slabs)
    return replace(
        taken,
        times=replace(taken.times, uva_ps=(), uva_bytes=0),
        num_copies=taken.num_copies + num_copies,
        copied_bytes=taken.link_bytes,
        copied_ps=taken.link_ps,
    )


def build_engine_pass(
    engine: PassRules, placement: Placement, num_layers: int, phase: Phase
) -> Schedule:
    """Order a pass by an engine: of a prompt that of one chunk, of decode that of one step."""
    ahead = engine.slots_ahead(np.array(placement.num_slots))
    return build_repeated_pass(
        replace(placement, num_slots=int(ahead)),
        num_layers,
        phase,
        finds_first=phase is Phase.PREFILL or not engine.copies_first_again,
        in_order=engine.allocates_copies,
    )


def engine_pass_times(
    engine: PassRules,
    placement: Placement,
    stage: Stage,
    machine: MachineProfile,
    priced: PassCompute,
) -> PassTimes:
    """Find what each operation takes; what is copied before each use counts as read in place."""
    times = pass_times(placement, stage, machine, priced)
    num_passes, phase = len(priced.shapes), priced.shapes[0].phase
    if phase is Phase.DECODE:
        alone_ps = times.copy_ps
        times = replace(times, copy_ps=lambda span: engine.step_copy_ps(alone_ps(span)))
    if not engine.copies_in_place:
        return times
    copied = {s.layer: s.nbytes for s in placement.slabs if s.span(phase) is None}
    copies_ps = [0] * len(times.uva_ps)
    for layer, num_bytes in copied.items():
        copies_ps[layer] = num_passes * to_ps(machine.copy_seconds(num_bytes))
    return replace(times, uva_ps=tuple(copies_ps), uva_bytes=num_passes * sum(copied.values()))


CacheKind = tuple[int | None, bool]
"""A layer's window, if any, and whether it has a state."""

BLOCK_TOKENS = (16, 32, 64, 128)
"""Tokens in a block of the KV cache, or parts of one that holds a state: backends differ.

Source: ``get_supported_kernel_block_sizes`` of FlashAttention, FlashInfer, FlashMLA, CUTLASS MLA.
"""
MORE_STATES = 2
"""States that vLLM wants room for beside that of each sequence, since it caches those of prefixes.

Source: ``MambaSpec.max_memory_usage_bytes``.
"""
IN_FLIGHT = 2
"""Steps that are scheduled at once, of each stage. Source: ``VllmConfig.max_in_flight_tokens``."""


def cache_bytes(stage: Stage, workload: Workload, prefill_chunk: int) -> int:
    """Bytes that a GPU needs for a batch of whole contexts.

    They are those of the caches in whole blocks, or of as many blocks as vLLM divides them into,
    whichever of its sizes blocks have. It keeps one empty, and does not start where a whole context
    has no room.
    """
    caches = [layer.kv_cache for layer in stage.layers]
    tokens = 1 + workload.batch * -(-workload.context // BLOCK_TOKENS[-1])
    tokens *= BLOCK_TOKENS[-1]
    planned = tokens * sum(each.bytes_per_token for each in caches)
    planned += workload.batch * sum(each.state_bytes for each in caches)
    kinds = _list_kinds(stage)
    if kinds.keys() <= {(None, False)}:
        return planned
    sizes = (_blocks_bytes(stage, kinds, workload, prefill_chunk, n) for n in BLOCK_TOKENS)
    return max(planned, *sizes)


def _list_kinds(stage: Stage) -> dict[CacheKind, list[bool]]:
    """List the layers of each kind in the whole model, and whether the stage has them."""
    here = {layer.prefix for layer in stage.layers}
    kinds: defaultdict[CacheKind, list[bool]] = defaultdict(list)
    for layer in stage.model.layers:
        cache = layer.kv_cache
        if cache.bytes_per_token or cache.state_bytes:
            kinds[cache.window, cache.state_bytes > 0].append(layer.prefix in here)
    return kinds


def _blocks_bytes(
    stage: Stage,
    kinds: Mapping[CacheKind, Sequence[bool]],
    workload: Workload,
    prefill_chunk: int,
    block_tokens: int,
) -> int:
    """Bytes of the blocks that a batch of whole contexts takes, and of the empty one."""
    batch, context = workload.batch, workload.context
    caches = [layer.kv_cache for layer in stage.layers]
    in_flight = IN_FLIGHT * stage.num_stages * step_tokens(workload, prefill_chunk)
    # a block has so many tokens that it holds a state
    token_bytes = max(each.bytes_per_token for each in caches)
    block_bytes = max(1, *(each.state_bytes for each in caches))
    if token_bytes:
        multiple = block_tokens * token_bytes
        block_bytes = -(-block_bytes // multiple) * multiple
    # layers of a kind are split into groups of one size, each with blocks of its own
    fewest, most = min(map(len, kinds.values())), max(map(len, kinds.values()))
    group_size = most if 2 * most < 3 * fewest else fewest
    num_blocks, widest = 1, 0
    for (window, has_state), layers in kinds.items():
        kept = context if window is None else min(context, window)
        reached = min(context, kept + in_flight)
        of_group = batch * -(-reached * token_bytes // block_bytes)
        if window is not None:
            # all prompts together pass so many tokens, and a window need not begin with a block
            passed = min(batch * (reached - kept), in_flight)
            together = (batch * kept + passed) * token_bytes
            of_group = batch + min(of_group, batch - 1 - (-together // block_bytes))
        if has_state:
            of_group = batch + MORE_STATES
        num_groups = -(-len(layers) // group_size)
        num_blocks += num_groups * of_group
        # of a pipeline the groups are those of all stages, which have unlike parts of them
        widest = max(widest, *(sum(layers[i::num_groups]) for i in range(num_groups)))
    return widest * block_bytes * num_blocks
