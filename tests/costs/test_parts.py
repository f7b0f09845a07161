"""What prompts in parts are predicted to take: both pricers, the link and memory."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.costs.activations import pair_bytes, phase_bytes, waiting_bytes
from offplan.costs.compute import ModelCompute
from offplan.costs.parts import (
    CHUNK_LAUNCH_S,
    PAIRS_MARGIN,
    PART_LAUNCH_S,
    REST_OF_BATCHES,
    divide_ps,
    find_parts_memory,
)
from offplan.costs.pass_times import pass_times
from offplan.costs.predict import derive_stage, price_request
from offplan.costs.timeline import to_ps
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.kernel_sizes import parted_width
from offplan.machine.profile import MachineProfile
from offplan.placement import Placement
from offplan.plan import Backend, Budget, Offload, Rule, Workload
from offplan.schedule import build_steady_request
from tests.costs.builders import make_machine, moe_model, place_rules, rule
from tests.costs.exact import run_request
from tests.costs.strategies import models_with_experts, place_or_skip, rules_in_parts
from tests.held import hold, predict

WORKLOAD = Workload(batch=2, prompt_tokens=600, output_tokens=9, context=1024)


def in_parts(num_parts: int) -> Rule:
    experts = rule("experts", decode=Backend.UVA)
    return Rule.model_validate({**dict(experts), "parts": num_parts})


def check_pricers(
    model: Model, placement: Placement, machine: MachineProfile, chunk: int
) -> tuple[float, float]:
    stage = hold(model)
    compute = ModelCompute(stage, machine)
    prompt = compute.price(*prefill_shapes(WORKLOAD, chunk))
    request = placement, stage, machine, prompt, compute.price(decode_shape(WORKLOAD))
    exact, alone = run_request(*request), price_request(*request)
    assert (alone.prefill.step_ps, alone.decode.step_ps) == exact
    assert alone.prefill.step_ps >= alone.prefill.bound_ps
    return float(exact[0]), float(alone.prefill.link_ps)


@given(
    st.data(),
    models_with_experts(),
    st.integers(1, 4),
    st.sampled_from([2e6, 1e8, 1e11]),
    st.sampled_from([13, 64, 200, 600]),
)
@pytest.mark.slow
def test_both_pricers_give_what_the_schedule_gives(
    data: st.DataObject, model: Model, prefetch_step: int, h2d: float, chunk: int
) -> None:
    placement = place_or_skip(model, data.draw(rules_in_parts(model)), prefetch_step)
    check_pricers(model, placement, make_machine(h2d=h2d, uva=0.9 * h2d), chunk)


@pytest.mark.parametrize("num_parts", [2, 4, 8])
def test_a_prompt_over_a_slow_link_takes_the_link(num_parts: int) -> None:
    """However many chunks there are, each byte crosses once; launches of each part remain."""
    model, machine = moe_model(5), make_machine(h2d=1e6)
    placement = place_rules(model, [in_parts(num_parts)], 1)
    for chunk in (100, 600):
        step_ps, link_ps = check_pricers(model, placement, machine, chunk)
        assert link_ps <= step_ps <= 1.05 * link_ps
        (moved,) = {
            sum(span.nbytes for span in build_steady_request(placement, 5).prefill.copied_spans)
        }
        assert moved == placement.slab_bytes


def test_parts_take_what_their_experts_take_and_a_launch() -> None:
    stage, machine = hold(moe_model(3)), make_machine()
    prompt = ModelCompute(stage, machine).price(*prefill_shapes(WORKLOAD, 200))
    times = pass_times(place_rules(stage.model, [in_parts(4)], 1), stage, machine, prompt)
    assert times.pieces.keys() == {1, 2}
    launching_ps = to_ps(max(1.0, len(prompt.shapes) / 4 + REST_OF_BATCHES) * PART_LAUNCH_S)
    for layer, each in times.pieces.items():
        assert 0 < prompt.routed_ps[layer] < prompt.layer_ps[layer]
        assert each.piece_ps == -(-prompt.routed_ps[layer] // 4) + launching_ps
        assert each.moved_ps == prompt.routed_ps[layer]
        assert times.begin_ps[layer] + each.moved_ps == prompt.layer_ps[layer]
    assert prompt.routed_ps[0] == 0


def test_chunks_that_are_not_captured_take_what_launching_them_takes() -> None:
    stage, machine = hold(moe_model(3)), make_machine()
    for chunk, captured in ((38, True), (37, False)):  # 16 chunks and 17
        prompt = ModelCompute(stage, machine).price(*prefill_shapes(WORKLOAD, chunk))
        num_chunks, kernels_ps = len(prompt.shapes), prompt.layer_ps[1] - prompt.routed_ps[1]
        launching_ps = to_ps(num_chunks * CHUNK_LAUNCH_S)
        assert kernels_ps < launching_ps
        divided = divide_ps(prompt, 1, 4)
        begin_ps = prompt.layer_ps[1] - divided.moved_ps
        assert begin_ps == (kernels_ps if captured else launching_ps)
        parts_ps = 4 * to_ps((num_chunks / 4 + REST_OF_BATCHES) * PART_LAUNCH_S)
        assert divided.launching_ps == parts_ps + begin_ps - kernels_ps


def test_more_parts_take_less_memory_and_chunks_at_experts_some() -> None:
    model, machine, budget = moe_model(4), make_machine(), Budget(gpu_memory=2**30)

    def memory_of(*rules: Rule) -> tuple[int, int]:
        offload = Offload(prefill_chunk=200, rules=rules)
        taken = predict(model, machine, WORKLOAD, budget, offload).gpu_memory
        return taken.ring_bytes, taken.activation_bytes

    rings = [memory_of(in_parts(n))[0] for n in (2, 4, 8)]
    assert all(2 * after == before for before, after in pairwise(rings))
    assert rings[0] == memory_of(rule("experts"))[0]  # two halves in place of a slot
    more = memory_of(in_parts(2))[1] - memory_of(rule("experts"))[1]
    stage = hold(model)
    memory = find_parts_memory(stage, WORKLOAD, 200)
    assert more == memory.of_group(None) - memory.routed_bytes > 0
    # one layer whole: the pass has its experts, too
    some = in_parts(2).model_copy(update={"group_size": 3, "num_in_group": 2})
    assert memory_of(some)[1] - memory_of(rule("experts"))[1] == memory.of_group(None)
    # a chunk's products at the experts take the place of what its attention or MLP took
    first, *_ = prefill_shapes(WORKLOAD, 200)
    pass_bytes, _ = phase_bytes(stage, WORKLOAD, 200, in_pieces=True)
    assert memory.block_bytes == pass_bytes - waiting_bytes(stage, WORKLOAD, first)
    assert memory.pair_bytes == round(
        PAIRS_MARGIN * pair_bytes(stage, stage.layers[1], first, parted_width)
    )
    assert memory.routed_bytes > 0
    tokens = WORKLOAD.batch * WORKLOAD.prompt_tokens
    products = tokens * memory.product_bytes
    shared = min(memory.block_bytes, products // 2)
    assert shared > 0
    waiting, others = tokens * memory.token_bytes, memory.pair_bytes + memory.longer_bytes
    assert memory.of_group(None) == waiting + products - shared + others
    assert memory.of_group(1) == (waiting + products) // 3 + others


def test_groups_of_chunks_take_less_memory_and_the_link_again() -> None:
    model, machine, budget = moe_model(4), make_machine(), Budget(gpu_memory=2**30)

    def predicted(tokens_at_once: int | None) -> tuple[int, int]:
        parts = in_parts(4).model_copy(update={"tokens_at_once": tokens_at_once})
        offload = Offload(prefill_chunk=100, rules=(parts,))
        taken = predict(model, machine, WORKLOAD, budget, offload)
        return taken.gpu_memory.activation_bytes, taken.prefill.link_bytes

    memory = find_parts_memory(hold(model), WORKLOAD, 100)
    (held, moved), *groups = map(predicted, (None, 300, 250, 100, 1))
    for (less, again), tokens in zip(groups, (300, 300, 100, 100), strict=True):
        assert held - less == memory.of_group(None) - memory.of_group(tokens // 100)
        assert held - less >= WORKLOAD.batch * (600 - tokens) * memory.token_bytes
        assert again == moved * (600 // tokens)


def test_prompts_longer_than_planned_are_counted_where_all_their_tokens_wait() -> None:
    model, machine, budget = moe_model(4), make_machine(), Budget(gpu_memory=2**30)

    def chunks_bytes(tokens_at_once: int | None, prompt_tokens: int) -> int:
        longer = Workload(prompt_tokens=prompt_tokens, output_tokens=1, context=1200)
        parts = in_parts(4).model_copy(update={"tokens_at_once": tokens_at_once})
        offload = Offload(prefill_chunk=100, rules=(parts,))
        terms = derive_stage(hold(model), machine, longer, budget, offload).terms
        (term,) = (term for term in terms if term.path == "gpu_memory.activations")
        return next(int(e.value) for e in term.inputs if e.name == "chunks at experts in parts")

    planned, waiting = chunks_bytes(600, 600), chunks_bytes(None, 600)
    assert chunks_bytes(600, 1100) <= planned
    assert chunks_bytes(None, 1100) <= waiting
    workload = Workload(prompt_tokens=600, output_tokens=1, context=1200)
    assert waiting - planned >= 600 * find_parts_memory(hold(model), workload, 100).token_bytes


def test_terms_name_parts() -> None:
    offload = Offload(prefill_chunk=200, rules=(in_parts(4),))
    asked = hold(moe_model(4)), make_machine(), WORKLOAD, Budget(gpu_memory=2**30), offload
    inputs = {term.path: [each.name for each in term.inputs] for term in derive_stage(*asked).terms}
    assert "largest part" in inputs["gpu_memory.ring"]
    assert "chunks at experts in parts" in inputs["gpu_memory.activations"]
    assert "launching parts" in inputs["prefill.stall"]
    assert "launching parts" not in inputs["decode.stall"]
