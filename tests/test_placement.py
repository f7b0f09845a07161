"""Placement: where every byte lives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.capabilities.cached_experts import ExpertSlots
from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.held.held import hold
from offplan.held.unit import group_units
from offplan.placement import ALIGNMENT_BYTES, Phase, place
from offplan.plan import Backend, Offload, Rule
from offplan.refusals import require_batch
from offplan.schedule import read_at_use
from tests.costs.builders import DENSE, MOE, dense_model, make_model, moe_model, place_rules, rule
from tests.costs.strategies import (
    models_with_experts,
    odd_models,
    place_or_skip,
    rules_in_parts,
)


@pytest.mark.slow
@given(st.data(), odd_models() | models_with_experts(), st.integers(1, 4))
def test_bytes_add_up(data: st.DataObject, model: Model, prefetch_step: int) -> None:
    rules = data.draw(rules_in_parts(model))
    placement = place_or_skip(model, rules, prefetch_step)
    on_host = [entry.unit for slab in placement.slabs for entry in slab.entries]
    assert (
        placement.resident_bytes + sum(unit.nbytes for unit in on_host) == hold(model).loaded_bytes
    )
    assert len({(unit.layer, unit.name) for unit in on_host}) == len(on_host)
    assert placement.num_slots <= prefetch_step
    assert (
        placement.ring_bytes
        == placement.num_slots * placement.slot_bytes
        + placement.num_piece_slots * placement.piece_bytes
    )
    for phase in Phase:
        assert all(span.nbytes <= placement.slot_bytes for span in placement.spans(phase))
        assert placement.num_slots <= prefetch_step


@pytest.mark.slow
@given(st.data(), odd_models() | models_with_experts())
def test_slabs_are_aligned_and_spans_contiguous(data: st.DataObject, model: Model) -> None:
    for slab in place_or_skip(model, data.draw(rules_in_parts(model)), 2).slabs:
        end = 0
        for entry in slab.entries:
            assert entry.offset % ALIGNMENT_BYTES == 0
            assert end <= entry.offset < end + ALIGNMENT_BYTES
            end = entry.offset + entry.unit.nbytes
        assert slab.nbytes == end
        for phase in Phase:
            span = slab.span(phase)
            for entry in slab.entries:
                streamed = entry.backend(phase) is Backend.PREFETCH and entry.num_pieces == 1
                inside = span is not None and span.start <= entry.offset < span.stop
                assert streamed == inside


@pytest.mark.parametrize(
    ("group", "layers"),
    [
        ((1, 1), [0, 1, 2, 3, 4, 5]),
        ((2, 1), [1, 3, 5]),
        ((3, 2), [1, 2, 4, 5]),
        ((4, 1), [3]),
        ((6, 5), [1, 2, 3, 4, 5]),
    ],
)
def test_group_pattern_takes_the_last_of_each_group(
    group: tuple[int, int], layers: list[int]
) -> None:
    placement = place_rules(dense_model(6), [rule("mlp", group=group)], 2)
    assert [slab.layer for slab in placement.slabs] == layers


def test_first_rule_wins() -> None:
    rules = [rule("down_proj", decode=Backend.UVA), rule("mlp")]
    slab = place_rules(dense_model(2), rules, 1).slabs[0]
    backends = {entry.unit.name: entry.decode for entry in slab.entries}
    assert backends == {
        "mlp.down_proj.weight": Backend.UVA,
        "mlp.gate_proj.weight": Backend.PREFETCH,
        "mlp.up_proj.weight": Backend.PREFETCH,
    }


@pytest.mark.parametrize(("max_bytes", "count"), [(1, 1), (24576, 1), (24577, 2), (10**9, 18)])
def test_max_bytes_overshoots_by_at_most_one(max_bytes: int, count: int) -> None:
    rules = [
        Rule(
            cpu_offload_params=("mlp",),
            max_bytes=max_bytes,
            prefill=Backend.UVA,
            decode=Backend.UVA,
        )
    ]
    placement = place_rules(dense_model(6), rules, 1)
    assert sum(len(slab.entries) for slab in placement.slabs) == count
    assert placement.num_slots == 0


def test_experts_inputs_are_one_unit() -> None:
    units = group_units(moe_model(2).layers[1])
    fused = [unit for unit in units if len(unit.parameters) > 1]
    assert [[p.name for p in unit.parameters] for unit in fused] == [
        ["mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"]
    ]


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ([rule("experts.gate_proj")], "fuses them"),
        ([rule("q_prj")], "rule 1 matches nothing with 'q_prj'.*; is q_proj meant"),
        ([rule("mlp"), rule("q_proj", "experts.down_prj")], "rule 2 .* is experts.down_proj meant"),
        ([rule("experts", group=(9, 1))], "of each 9 layers it takes the last 1, .* has 5 layers"),
        ([rule("mlp.gate_proj", group=(5, 4))], "group_size 5, num_in_group 4 selects no layer"),
        ([rule("mlp"), rule("experts")], "takes nothing"),
    ],
)
def test_rules_that_cannot_be_meant(rules: list[Rule], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        place_rules(moe_model(5), rules, 1)


def test_segments_are_whole_name_parts() -> None:
    assert not rule("experts").matches("mlp.shared_experts.up_proj.weight")
    assert not rule("proj").matches("mlp.up_proj.weight")
    assert all(rule().matches(name) for name in DENSE)


def test_convolutions_that_are_one_once_loaded_are_placed_as_one() -> None:
    convolutions = {f"linear_attn.{part}_conv1d.weight": (8, 1, 4) for part in "qkv"}
    model = make_model([DENSE | convolutions])
    (unit,) = (unit for unit in group_units(model.layers[0]) if "conv1d" in unit.name)
    assert {parameter.name for parameter in unit.parameters} == convolutions.keys()
    with pytest.raises(PlanError, match="name all of them or none"):
        place_rules(model, [rule("q_conv1d")], 1)


EXPERTS = {"prefill": "prefetch", "decode": "uva", "group_size": 2, "num_in_group": 1}


def keeping(num: int, segment: str = "experts", **more: object) -> Rule:
    fields = {"cpu_offload_params": [segment], "cached_experts": num, **EXPERTS, **more}
    return Rule.model_validate(fields)


def test_experts_kept_one_by_one_take_slots_of_their_layers() -> None:
    model = moe_model(4)
    plain = place_rules(model, [keeping(1).model_copy(update={"cached_experts": None})], 2)
    placement = place_rules(model, [keeping(1, cached_experts_more=1)], 2)
    assert not plain.caches_of(ExpertSlots)
    assert plain.cached_bytes == {}
    assert [slab.nbytes for slab in plain.slabs] == [slab.nbytes for slab in placement.slabs]
    assert placement.resident_bytes == plain.resident_bytes
    assert all(entry.is_cached for entry in placement.entries)
    kept = placement.caches_of(ExpertSlots)
    assert {layer: slots.num_slots for layer, slots in kept.items()} == {1: 2, 3: 1}
    for layer, slots in kept.items():
        units = [entry.unit for entry in placement.entries if entry.unit.layer == layer]
        assert slots.expert_bytes * slots.num_experts == sum(unit.nbytes for unit in units)
        assert 0 <= slots.slots_bytes - slots.num_slots * slots.expert_bytes < 256 * len(units)
        assert slots.nbytes > slots.slots_bytes
    assert sum(placement.cached_bytes.values()) == sum(slots.nbytes for slots in kept.values())


def test_decode_reads_kept_experts_at_use_and_not_what_the_ring_has_left() -> None:
    placement = place_rules(moe_model(4), [keeping(1)], 2)
    assert {k: len(v) > 0 for k, v in read_at_use(placement, Phase.DECODE).items()} == {
        1: True,
        3: True,
    }


@pytest.mark.parametrize(
    ("segment", "num", "found"),
    [
        ("self_attn", 1, "is no routed expert"),
        ("mlp", 1, "is no routed expert"),
        ("experts.down_proj", 1, "leaves .* of layer 1 out"),
        ("experts", 99, "has 8 experts: keep 8 at most"),
    ],
)
def test_rules_that_cannot_keep_experts(segment: str, num: int, found: str) -> None:
    with pytest.raises(PlanError, match=found):
        place_rules(moe_model(4), [keeping(num, segment)], 2)


def test_one_more_than_there_are_experts() -> None:
    with pytest.raises(PlanError, match="8 and one more, and layer 1"):
        place_rules(moe_model(4), [keeping(8, cached_experts_more=1)], 2)


def in_parts(num_parts: int, *segments: str, decode: Backend = Backend.UVA) -> Rule:
    return Rule.model_validate({**dict(rule(*segments, decode=decode)), "parts": num_parts})


@pytest.mark.parametrize(
    ("parts", "segment", "found"),
    [
        (3, "experts", "does not divide the 8 experts of layer 0 .* write one of 2, 4, 8"),
        (16, "experts", "does not divide the 8 experts"),
        (2, "mlp", "takes mlp.gate.weight of layer 0, which is no routed expert"),
        (2, "experts.down_proj", "leaves mlp.experts.gate_proj.weight of layer 0 out"),
    ],
)
def test_rules_that_cannot_stream_parts(parts: int, segment: str, found: str) -> None:
    with pytest.raises(PlanError, match=f"rule 1 has parts.*{found}"):
        place_rules(make_model([MOE, MOE]), [in_parts(parts, segment)], 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parts": 1}, "greater than or equal to 2"),
        ({"parts": 3, "tokens_at_once": 8}, "parts: 3 with tokens_at_once, expected an even"),
        ({"parts": None, "tokens_at_once": 8}, "parts is missing: add it, or take tokens_at_once"),
        ({"decode": "prefetch"}, "expected prefill: prefetch and decode: uva or host"),
        ({"prefill": "uva"}, "expected prefill: prefetch"),
        ({"cached_experts": 2}, "leave one of them out"),
        ({"group_size": None, "num_in_group": None, "max_bytes": 9}, "give the rule group_size"),
    ],
)
def test_rules_that_cannot_say_parts(changes: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Rule.model_validate({**dict(in_parts(2, "experts")), **changes})


@pytest.mark.parametrize(
    ("tokens", "at_once", "groups"),
    [(None, None, 1), (3, 1, 9), (8, 1, 9), (16, 2, 5), (20, 3, 3), (99, 13, 1)],
)
def test_whole_chunks_wait_at_once(tokens: int | None, at_once: int | None, groups: int) -> None:
    """Nine chunks of eight tokens each."""
    parts = Rule.model_validate({**dict(in_parts(2, "experts")), "tokens_at_once": tokens})
    placement = place(hold(make_model([DENSE, MOE])), Offload(prefill_chunk=8, rules=(parts,)))
    assert placement.chunks_at_once.get(1) == at_once
    assert (placement.num_groups(1, 9), placement.num_groups(0, 9)) == (groups, 1)


def test_parts_are_experts_of_every_matrix() -> None:
    (slab,) = place_rules(make_model([MOE]), [in_parts(4, "experts")], 1).slabs
    expert = 64 * 64 * 2
    assert [[(stop - start) for start, stop, _ in piece.runs] for piece in slab.pieces] == [
        [2 * expert, 2 * 2 * expert]
    ] * 4
    assert [piece.runs[0][0] for piece in slab.pieces] == [n * 2 * expert for n in range(4)]
    assert sum(piece.nbytes for piece in slab.pieces) == slab.nbytes
    assert slab.span(Phase.PREFILL) is None


def test_a_dense_layer_has_no_experts_to_keep() -> None:
    with pytest.raises(PlanError, match="is no routed expert: name the routed experts alone"):
        place_rules(dense_model(4), [keeping(1, "mlp")], 2)


def test_steps_of_more_pairs_than_kernels_sort() -> None:
    stage = hold(moe_model(4))
    chosen = stage.experts.num_experts_per_token
    decision = Offload(prefill_chunk=8, rules=(keeping(1),))
    require_batch(stage, decision, 1024 // chosen)
    require_batch(stage, Offload(prefill_chunk=8), 4096)
    with pytest.raises(PlanError, match=f"lower `batch` to {1024 // chosen}"):
        require_batch(stage, decision, 1024 // chosen + 1)
