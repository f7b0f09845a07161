"""Prompts in parts: options whose prompts stream a layer's routed experts some at a time."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from offplan.costs.link import copy_ps
from offplan.costs.parts import PartsMemory, divide_ps, find_parts_memory
from offplan.errors import PlanError
from offplan.placement import PIECE_SLOTS, build_slab
from offplan.plan import Rule, Workload
from offplan.planner.classes import expert_class
from offplan.planner.option import Option, Pieces, Steps, Ways
from offplan.planner.space import Space
from offplan.routed_experts import require_experts

NUM_PARTS = (2, 4, 8, 16, 32)
"""Values of ``parts`` tried: each part has launches of its own, and more parts spare little."""
MOST_LONGER = 4
"""Groups are tried where a prompt of the context has at most so many times the planned tokens.

The parts of a longer prompt would cross more often. Source: predictions. DeepSeek-V2-Lite in 3.82
GiB of an H100 was planned for 1,500 tokens. A prompt of 8,176 would take 2.4 s in groups of 1,500,
and 0.63 s without parts.
"""
MOST_GROUPS = 16
"""Groups of chunks, at most, that values of ``tokens_at_once`` divide a prompt into: they are the
prompt's tokens, and powers of two below."""
LEAST_AT_ONCE = 1024
"""Fewer tokens at once, over all sequences, are not tried: each group has the parts cross again.

Source: DeepSeek-V2-Lite in 4.5 GiB of an H200, planned for prompts of 512 tokens. A prompt of 3,968
took 4.4 s in groups of 512, and 1.1 s without parts (``benchmarks/results/parts-h200.json``).
"""


@dataclass(frozen=True)
class StreamsParts(Option):
    """Routed experts that prompts stream in parts: ``parts``."""

    num_parts: int
    memory: tuple[PartsMemory, ...]
    """Memory that prompts take at the experts in each of the space's settings."""
    tokens_at_once: int | None = None

    @property
    def order(self) -> tuple[object, ...]:
        """Of equally good ones that with most tokens at once comes first, as they are listed."""
        return *super().order[:-1], (self.num_parts,)

    @property
    def fills_ring(self) -> bool:
        """Parts have slots of their own, which the next part takes."""
        return False

    def numbers(self, cache_sizes: int, more: int) -> Mapping[str, Any]:
        """Return the number of parts, and how much of a prompt meets one at once."""
        return {"parts": self.num_parts, "tokens_at_once": self.tokens_at_once}

    def pieces(self, space: Space, kind: int) -> Pieces | None:
        """Price the parts of a kind of layer."""
        units = space.taken(self.segment_class)[kind]
        if not units:
            return None
        rule, layer = self.every_layer, space.kind_of.index(kind)
        first, *_ = build_slab((unit, rule) for unit in units).pieces
        gpu_bytes, times = [], []
        for each, memory in zip(space.settings, self.memory, strict=True):
            num_chunks = len(each.prefill.shapes)
            at_once = rule.chunks_at_once(each.prefill_chunk)
            gpu_bytes.append(PIECE_SLOTS * first.slot_bytes + memory.of_group(at_once))
            num_groups = -(-num_chunks // (at_once or num_chunks))
            times.append(divide_ps(each.prefill, layer, self.num_parts, num_groups))
        return Pieces(
            self.num_parts,
            np.array(gpu_bytes),
            np.array([each.routed_bytes for each in self.memory]),
            copy_ps(space.machine, first),
            np.array([each.moved_ps for each in times]),
            np.array([each.piece_ps for each in times]),
            np.array([each.num_groups for each in times]),
        )


def list_options(space: Space, ways: Ways) -> Iterator[StreamsParts]:
    """List the ways to stream the layers' experts in parts, as a question allows."""
    stage, goal = space.stage, space.question.goal
    if goal.parts == "off" or stage.experts is None:
        return
    experts, workload = expert_class(stage), space.question.workload
    chunks = [each.prefill_chunk for each in space.settings]
    memory = tuple(find_parts_memory(stage, workload, chunk) for chunk in chunks)
    for prefill, decode in ways:
        in_place = prefill.streams and not decode.streams and not decode.is_served
        if not in_place or not space.suits(experts, decode):
            continue
        for num_parts in NUM_PARTS:
            option = StreamsParts(experts, prefill, decode, num_parts, memory)
            with suppress(PlanError):  # it does not divide the experts
                for layer, units in zip(space.layers, space.taken(experts), strict=True):
                    if units:
                        require_experts(stage, layer, 1, option.every_layer, units)
                yield option
                for tokens in _list_at_once(workload):
                    yield replace(option, tokens_at_once=tokens)


def _list_at_once(workload: Workload) -> Iterator[int]:
    """List the values of ``tokens_at_once`` that are tried, the largest first."""
    prompt_tokens, least = workload.prompt_tokens, LEAST_AT_ONCE / workload.batch
    if workload.context > MOST_LONGER * workload.batch * prompt_tokens:
        return
    if least <= prompt_tokens < workload.context:  # longer prompts than planned come in groups
        yield prompt_tokens
    tokens = 1 << (prompt_tokens - 1).bit_length()
    while (tokens := tokens // 2) * MOST_GROUPS >= prompt_tokens and tokens >= least:
        yield tokens


def list_steps(rule: Rule) -> Steps:
    """Yield the steps of a rule's parts, and the keys that each changes."""
    if (parts := rule.parts) is None:
        return
    for number in (parts // 2, 2 * parts):
        yield f"parts {parts} -> {number}", {"parts": number}
    if (tokens := rule.tokens_at_once) is not None:
        for number in (tokens // 2, 2 * tokens):
            yield f"tokens_at_once {tokens} -> {number}", {"tokens_at_once": number}
        yield "without tokens_at_once", {"tokens_at_once": None}
    yield "without parts", {"parts": None, "tokens_at_once": None}
