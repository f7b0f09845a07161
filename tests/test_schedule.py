"""Schedules: no slot is overwritten before its use, and every wait has its copy."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.placement import Phase, Placement, Span
from offplan.plan import Backend
from offplan.schedule import (
    Begin,
    Compute,
    ComputePiece,
    Copy,
    Schedule,
    Wait,
    build_pass,
    build_request,
    empty_ring,
    kept_after_prefill,
    turns_of,
)
from tests.costs.builders import dense_model, moe_model, place_rules, rule
from tests.costs.strategies import (
    models_with_experts,
    odd_models,
    place_or_skip,
    rule_lists,
    rules_in_parts,
)


def check_passes(passes: Sequence[Schedule]) -> None:
    """Prove that consecutive passes are safe, by executing them on names alone.

    Raises ValueError when a layer would run without its bytes, when a copy would overwrite what
    was waited for before its layer has run, or move what the slot already holds. Whatever else is
    overwritten too early is missed by the next wait for it.
    """
    if not passes:
        return
    ring: list[Span | None] = list(passes[0].before)
    awaited: dict[int, Span] = {}
    for number, schedule in enumerate(passes):
        if tuple(ring) != schedule.before:
            raise ValueError(f"pass {number} expects another ring than the one it finds")
        for op in schedule.operations:
            if isinstance(op, Copy):
                if ring[op.slot] == op.span:
                    raise ValueError(f"pass {number} copies what slot {op.slot} already holds")
                if op.slot in awaited:
                    raise ValueError(f"pass {number} overwrites slot {op.slot} before its use")
                ring[op.slot] = op.span
            elif isinstance(op, Wait):
                if ring[op.slot] != op.span:
                    raise ValueError(f"pass {number} waits for bytes that nobody copies")
                awaited[op.slot] = op.span
            elif any(span.layer != op.layer for span in awaited.values()):
                raise ValueError(f"pass {number} runs layer {op.layer} with another's bytes")
            elif isinstance(op, ComputePiece):
                slots = [slot for slot, span in awaited.items() if span.piece is not None]
                if [awaited[slot].piece for slot in slots] != [op.piece]:
                    raise ValueError(f"pass {number} runs a part of layer {op.layer} without it")
                awaited.pop(slots[0])  # what the layer streams whole it still needs
            elif isinstance(op, Compute):
                awaited.clear()


def run_by_hand(placement: Placement, passes: list[Schedule], *, late: bool) -> None:
    """Execute passes on names, with every copy as early or as late as it may happen.

    Copies are one queue: one that is waited for carries out all before it. Layers read what
    their slot holds at that moment.
    """
    slots: list[Span | None] = [None] * len(placement.slot_sizes)
    queue: list[Copy] = []
    left = kept_after_prefill(placement)
    for schedule in passes:
        turns = turns_of(placement, schedule.phase)
        for op in schedule.operations:
            if isinstance(op, Copy):
                queue.append(op)
            elif isinstance(op, Wait):
                while any(copy.slot == op.slot and copy.span == op.span for copy in queue):
                    first = queue.pop(0)
                    slots[first.slot] = first.span
            else:
                part = op.piece if isinstance(op, ComputePiece) else None
                if schedule.phase is Phase.DECODE and op.layer in left:
                    slot, span = left[op.layer]
                    assert slots[slot] == span, f"layer {op.layer} finds another's bytes"
                for slot, span in turns.get(op.layer, ()):
                    if span.piece in (None, part):  # what it streams whole it reads all the while
                        assert slots[slot] == span, f"layer {op.layer} reads another's bytes"
                        assert placement.slot_sizes[slot] >= span.slot_bytes
            while queue and not late:
                first = queue.pop(0)
                slots[first.slot] = first.span


@given(st.data(), odd_models() | models_with_experts(), st.integers(1, 4))
@pytest.mark.slow
def test_requests_are_safe(data: st.DataObject, model: Model, prefetch_step: int) -> None:
    placement = place_or_skip(model, data.draw(rules_in_parts(model)), prefetch_step)
    ring = empty_ring(placement)
    passes: list[Schedule] = []
    for _ in range(3):
        num_chunks = data.draw(st.integers(1, 7))
        request = build_request(placement, len(model.layers), ring, num_chunks=num_chunks)
        steps = data.draw(st.integers(0, 2))
        passes += [request.prefill, request.first_decode, *[request.decode] * steps]
        ring = passes[-1].after
    check_passes(passes)
    run_by_hand(placement, passes, late=False)
    run_by_hand(placement, passes, late=True)


@pytest.mark.slow
@given(st.data(), odd_models() | models_with_experts(), st.integers(1, 4))
def test_any_order_of_phases_is_safe(data: st.DataObject, model: Model, prefetch_step: int) -> None:
    """Passes whose successor is another than they were told: more copies, never wrong bytes.

    So it is where a pass believes the ring empty, as after one that was aborted.
    """
    placement = place_or_skip(model, data.draw(rules_in_parts(model)), prefetch_step)
    ring = empty_ring(placement)
    passes: list[Schedule] = []
    for phase, told, follows_aborted in data.draw(
        st.lists(
            st.tuples(st.sampled_from(Phase), st.sampled_from(Phase), st.booleans()), max_size=6
        )
    ):
        if follows_aborted:
            ring = empty_ring(placement)
        num_chunks = data.draw(st.integers(1, 7))
        passes.append(
            build_pass(placement, len(model.layers), phase, ring, told, num_chunks=num_chunks)
        )
        ring = passes[-1].after
    run_by_hand(placement, passes, late=False)
    run_by_hand(placement, passes, late=True)


@pytest.mark.slow
@given(st.data(), odd_models(), st.integers(1, 4))
def test_steady_decode_leaves_what_it_finds(
    data: st.DataObject, model: Model, prefetch_step: int
) -> None:
    placement = place_or_skip(model, data.draw(rule_lists(len(model.layers))), prefetch_step)
    decode = build_request(placement, len(model.layers), empty_ring(placement)).decode
    assert decode.before == decode.after
    assert [op.layer for op in decode.operations if isinstance(op, Compute)] == list(
        range(len(model.layers))
    )


@pytest.mark.parametrize(
    ("num_streamed", "num_slots", "num_copies"),
    [(6, 1, 6), (6, 2, 6), (5, 2, 5), (3, 2, 2), (5, 3, 4), (5, 4, 2), (2, 2, 0), (3, 4, 0)],
)
def test_a_layer_with_a_slot_of_its_own_is_copied_once(
    num_streamed: int, num_slots: int, num_copies: int
) -> None:
    placement = place_rules(dense_model(num_streamed), [rule("mlp")], num_slots)
    request = build_request(placement, num_streamed, empty_ring(placement))
    copies = [op for op in request.decode.operations if isinstance(op, Copy)]
    assert len(copies) == num_copies
    assert request.decode.link_bytes == sum(copy.span.nbytes for copy in copies)


def test_prefetch_in_prefill_alone_leaves_decode_without_copies() -> None:
    placement = place_rules(dense_model(4), [rule("mlp", decode=Backend.UVA)], 2)
    request = build_request(placement, 4, empty_ring(placement))
    assert request.prefill.link_bytes > 0
    assert request.decode.operations == tuple(Compute(layer) for layer in range(4))


def test_decode_copies_again_what_an_aborted_prompt_took_from_the_ring() -> None:
    placement = place_rules(dense_model(4), [rule("mlp", decode=Backend.UVA)], 2)
    decode = build_request(placement, 4, empty_ring(placement)).decode
    mended = build_pass(placement, 4, Phase.DECODE, empty_ring(placement), Phase.DECODE)
    kept = kept_after_prefill(placement)
    for layer, turn in kept.items():
        before = mended.operations[: mended.operations.index(Compute(layer))]
        assert Copy(*turn) in before
        assert before[-1] == Wait(*turn)
    assert mended.after == decode.before


@given(st.data(), odd_models(), st.integers(1, 4))
@pytest.mark.slow
def test_what_is_kept_stays_in_its_slot_through_decode(
    data: st.DataObject, model: Model, prefetch_step: int
) -> None:
    placement = place_or_skip(model, data.draw(rule_lists(len(model.layers))), prefetch_step)
    kept = kept_after_prefill(placement)
    request = build_request(placement, len(model.layers), empty_ring(placement))
    streams = any(isinstance(op, Copy | Wait) for op in request.first_decode.operations)
    if streams:
        assert kept == {}
        return
    assert len(kept) == min(placement.num_slots, len(placement.spans(Phase.PREFILL)))
    for schedule in (request.first_decode, request.decode):
        assert all(schedule.before[slot] == span for slot, span in kept.values())
        assert schedule.before == schedule.after


def test_the_last_layers_to_stream_are_kept() -> None:
    placement = place_rules(dense_model(5), [rule("mlp", decode=Backend.UVA)], 2)
    assert {layer: slot for layer, (slot, _) in kept_after_prefill(placement).items()} == {
        3: 1,
        4: 0,
    }
    mixed = [rule("mlp", decode=Backend.UVA), rule("o_proj", prefill=Backend.UVA)]
    assert kept_after_prefill(place_rules(dense_model(5), mixed, 2)) == {}


def test_parts_take_turns_while_what_is_streamed_whole_stays() -> None:
    whole = rule("self_attn", decode=Backend.UVA)
    parts = rule("experts", decode=Backend.UVA).model_copy(update={"parts": 4})
    placement = place_rules(moe_model(3), [whole, parts], 1)
    assert placement.slot_sizes == [placement.slot_bytes, *[placement.piece_bytes] * 2]
    schedule = build_request(placement, 3, empty_ring(placement)).prefill
    told = [
        f"{type(op).__name__}{getattr(op, 'slot', '')}"
        for op in schedule.operations
        if not isinstance(op, Copy) or op.slot
    ]
    turns = [name for slot in (1, 2) for name in (f"Wait{slot}", "ComputePiece", f"Copy{slot}")]
    layer = ["Wait0", "Begin", *turns, *turns, "Compute"]
    last = ["Wait0", "Begin", *turns, *(name for name in turns if "Copy" not in name), "Compute"]
    assert told == ["Copy1", "Copy2", "Wait0", "Compute", *layer, *last]
    experts = [slab for slab in placement.slabs if slab.pieces]
    moved = [op.span.nbytes for op in schedule.operations if isinstance(op, Copy) and op.slot]
    assert sum(moved) == sum(
        e.unit.nbytes for slab in experts for e in slab.entries if e.num_pieces > 1
    )
    assert all(len(span.runs) == 2 for slab in experts for span in slab.pieces)


@pytest.mark.parametrize(("num_parts", "crossings"), [(4, 3), (2, 1)])
def test_parts_cross_again_for_each_group_of_chunks(num_parts: int, crossings: int) -> None:
    """Seven chunks, three at once: three groups. Of two parts each stays in its slot for them."""
    more = {"parts": num_parts, "tokens_at_once": 3}
    parts = rule("experts", decode=Backend.UVA).model_copy(update=more)
    placement = place_rules(moe_model(3), [parts], 1)
    ring = empty_ring(placement)
    requests = [build_request(placement, 3, ring, num_chunks=n) for n in (3, 7)]
    moved = [request.prefill.link_bytes for request in requests]
    assert moved == [placement.slab_bytes, crossings * placement.slab_bytes]
    told = [op for op in requests[1].prefill.operations if isinstance(op, Begin | ComputePiece)]
    assert told == [
        op
        for layer in (1, 2)
        for group in range(3)
        for op in (Begin(layer, group), *(ComputePiece(layer, n, group) for n in range(num_parts)))
    ]


def spoil(schedule: Schedule, how: str) -> Schedule:
    """A schedule with one mistake in it."""
    ops = list(schedule.operations)
    first = next(i for i, op in enumerate(ops) if isinstance(op, Copy))
    copy = ops[first]
    wait = next(i for i, op in enumerate(ops) if isinstance(op, Wait))
    if how == "lost copy":
        del ops[first]
    elif how == "copied twice":
        ops.insert(first, copy)
    elif how == "too early":  # the slot is refilled before its layer has run
        ops.insert(wait, ops.pop(first))
    elif how == "between wait and layer":
        ops.insert(wait + 1, ops.pop(first))
    elif how == "another's wait":
        ops[wait + 1], ops[wait + 2] = Compute(3), ops[wait + 1]
    return replace(schedule, operations=tuple(ops))


@pytest.mark.parametrize(
    "how", ["lost copy", "copied twice", "too early", "between wait and layer", "another's wait"]
)
def test_mistakes_are_found(how: str) -> None:
    placement = place_rules(dense_model(4), [rule("mlp")], 1)
    decode = build_request(placement, 4, empty_ring(placement)).decode
    check_passes([decode, decode])
    with pytest.raises(ValueError, match="pass 0"):
        check_passes([spoil(decode, how), decode])


def test_passes_that_do_not_follow_each_other_are_found() -> None:
    placement = place_rules(dense_model(4), [rule("mlp", decode=Backend.UVA)], 2)
    request = build_request(placement, 4, empty_ring(placement))
    with pytest.raises(ValueError, match="another ring"):
        check_passes([request.prefill, request.prefill])
