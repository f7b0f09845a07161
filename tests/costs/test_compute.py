"""Compute times: measured first, then scaled by what was measured, then a roofline."""

from dataclasses import replace
from typing import Any

import pytest

from offplan.checkpoint.tensors import TensorInfo
from offplan.checkpoint.windows import Mixer
from offplan.costs.compute import ModelCompute, layer_time, outside_time
from offplan.costs.kernels import (
    ATTENTION_EFFICIENCY,
    MATMUL_EFFICIENCY,
    REST_EFFICIENCY,
    layer_seconds,
)
from offplan.costs.work import PassShape, layer_work, prefill_shapes
from offplan.held.held import hold
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase
from offplan.plan import Workload
from tests.costs.builders import HIDDEN, VOCABULARY, dense_model, make_machine, measured, moe_model

DECODE = PassShape(Phase.DECODE, 1, 1, 100)
PREFILL = PassShape(Phase.PREFILL, 1, 10_000, 10_000)
STAGE = hold(dense_model(2))
WORK = layer_work(STAGE, STAGE.layers[0])


LAUNCHING_S = 12 * 1.8 * 2e-6 / 20
"""12 kernels, each 1.8 times as long as one of the 20 that the machine launches in 2 us."""


def test_decode_is_held_by_memory() -> None:
    time = layer_time(make_machine(), WORK, DECODE)
    num_bytes = WORK.device_bytes(DECODE) + 2 * WORK.row_elements
    assert time.seconds == pytest.approx(num_bytes / 100e9 + LAUNCHING_S)
    assert not time.measured


def test_prefill_is_held_by_arithmetic() -> None:
    time = layer_time(make_machine(), WORK, PREFILL)
    attending = WORK.attention_flops(PREFILL, 0)
    products = (WORK.flops(PREFILL) - attending) / (1e12 * MATMUL_EFFICIENCY)
    moving = 2 * 10_000 * WORK.row_elements / 100e9
    attending /= 1e12 * ATTENTION_EFFICIENCY
    assert time.seconds == pytest.approx(products + attending + moving + LAUNCHING_S)


@pytest.mark.parametrize(
    ("differs", "machine"),
    [
        ({}, make_machine()),
        ({"overhead_s": 1e-6}, make_machine()),
        ({"operators": {Phase.PREFILL: 1.0}}, make_machine()),
        ({"mixer": Mixer.SLIDING}, make_machine()),
        ({}, make_machine().model_copy(update={"name": "CPU"})),
    ],
    ids=["own", "engine", "stock", "windows", "CPU"],
)
def test_the_rest_of_a_prompt_attends_slower_in_own_passes(
    differs: dict[str, Any], machine: MachineProfile
) -> None:
    work = replace(WORK, **differs)
    whole = replace(PREFILL, is_part=True)
    times = [layer_seconds(machine, work, replace(whole, is_rest=rest)) for rest in (False, True)]
    slower = times[1].attention / times[0].attention
    is_own = not differs and not machine.is_cpu
    assert slower == pytest.approx(ATTENTION_EFFICIENCY / REST_EFFICIENCY if is_own else 1.0)


def test_measured_time_is_taken_as_it_is() -> None:
    machine = make_machine(layer_times=[measured(DECODE, 1.5, WORK.key)])
    time = layer_time(machine, WORK, DECODE)
    assert (time.seconds, time.measured) == (1.5, True)


def test_a_measured_time_is_that_of_its_own_shape_alone() -> None:
    machine = make_machine(layer_times=[measured(DECODE, 1.5, WORK.key)])
    for other in (replace(DECODE, batch=2), replace(DECODE, phase=Phase.PREFILL)):
        assert not layer_time(machine, WORK, other).measured


def test_other_shapes_scale_the_estimate() -> None:
    plain = layer_time(make_machine(), WORK, PREFILL).seconds
    half = PassShape(Phase.PREFILL, 1, 5_000, 5_000)
    tiny = PassShape(Phase.PREFILL, 1, 5, 5)
    estimate = layer_time(make_machine(), WORK, half).seconds
    times = [
        measured(half, 3 * estimate, WORK.key),
        measured(tiny, 7.0, WORK.key),
        measured(DECODE, 9.0, WORK.key),
    ]
    time = layer_time(make_machine(layer_times=times), WORK, PREFILL)
    assert time.seconds == pytest.approx(3 * plain)
    assert not time.measured


def test_a_part_of_a_prompt_is_not_priced_as_a_whole_one() -> None:
    """A chunk of several may be launched where a whole prompt is captured, and attends in two."""
    whole = PassShape(Phase.PREFILL, 1, 512, 512)
    first, second = (PassShape(Phase.PREFILL, 1, 512, 512 * n, is_part=True) for n in (1, 2))
    times = [measured(whole, 1.0, WORK.key), measured(first, 5.0, WORK.key)]
    machine = make_machine(layer_times=times)
    assert layer_time(machine, WORK, whole).seconds == 1.0
    assert layer_time(machine, WORK, first).seconds == 5.0
    more = layer_time(make_machine(), WORK, second).seconds
    more -= layer_time(make_machine(), WORK, first).seconds
    assert layer_time(machine, WORK, second).seconds == pytest.approx(5.0 + more)
    only_whole = make_machine(layer_times=times[:1])
    assert not layer_time(only_whole, WORK, first).measured


def test_a_chunk_takes_the_time_between_those_of_equal_ones() -> None:
    first, fourth, last = (PassShape(Phase.PREFILL, 1, 8, 8 * n, is_part=True) for n in (1, 4, 6))
    times = [measured(first, 1.0, WORK.key), measured(fourth, 7.0, WORK.key)]
    times += [measured(last, 8.0, WORK.key)]
    machine = make_machine(layer_times=times)
    for context, seconds in ((8, 1.0), (16, 3.0), (24, 5.0), (40, 7.5), (48, 8.0)):
        time = layer_time(machine, WORK, PassShape(Phase.PREFILL, 1, 8, context, is_part=True))
        assert time.seconds == pytest.approx(seconds)
        assert time.measured
    behind = PassShape(Phase.PREFILL, 1, 8, 56, is_part=True)
    assert not layer_time(machine, WORK, behind).measured


@pytest.mark.parametrize("prompt_tokens", [40, 37])
def test_a_prompt_whose_chunks_were_timed_here_and_there_is_measured(prompt_tokens: int) -> None:
    """As a machine times them: four of a prompt's chunks, and what lies outside behind the last.

    The last one is timed as a whole one.
    """
    stops = [8, 16, 24, 40]
    timed = [PassShape(Phase.PREFILL, 1, 8, stop, is_part=True) for stop in stops]
    outside = STAGE.time_key(STAGE.outside_key)
    times = [measured(each, 1.0, WORK.key) for each in timed]
    shapes = prefill_shapes(Workload(prompt_tokens=prompt_tokens), 8)
    for known, is_measured in ((times, False), ([*times, measured(timed[-1], 1.0, outside)], True)):
        compute = ModelCompute(STAGE, make_machine(layer_times=known))
        assert compute.price(*shapes).measured == is_measured
    compute = ModelCompute(STAGE, make_machine(layer_times=[*known[:3], known[-1]]))
    assert not compute.price(*shapes).measured
    others = [time.model_copy(update={"layer": "another", "tokens": 1}) for time in known]
    compute = ModelCompute(STAGE, make_machine(layer_times=[*known, *others]))
    for tokens, is_little in ((33, False), (35, False), (36, True)):  # the last has half of a chunk
        shapes = prefill_shapes(Workload(prompt_tokens=tokens), 8)
        assert compute.price(*shapes).measured == is_little


@pytest.mark.parametrize("is_part", [True, False])
def test_a_larger_chunk_takes_the_time_of_those_it_has(is_part: bool) -> None:
    first, last = (PassShape(Phase.PREFILL, 1, 8, 8 * n, is_part=True) for n in (1, 4))
    times = [measured(first, 1.0, WORK.key), measured(last, 7.0, WORK.key)]
    machine = make_machine(layer_times=times)
    whole = PassShape(Phase.PREFILL, 1, 24, 24, is_part=is_part)
    assert layer_time(machine, WORK, whole).seconds == pytest.approx(1.0 + 3.0 + 5.0)
    behind = PassShape(Phase.PREFILL, 1, 16, 32, is_part=is_part)
    assert layer_time(machine, WORK, behind).seconds == pytest.approx(5.0 + 7.0)
    rest = PassShape(Phase.PREFILL, 1, 4, 28, is_part=True)
    more = PassShape(Phase.PREFILL, 1, 28, 28, is_part=is_part)
    of_rest = layer_time(machine, WORK, rest).seconds
    assert layer_time(machine, WORK, more).seconds == pytest.approx(1.0 + 3.0 + 5.0 + of_rest)


def test_a_part_takes_its_share_of_a_whole_prompt_that_was_faster_than_estimated() -> None:
    """Less the difference of their estimates the whole prompt would leave it no time."""
    part = PassShape(Phase.PREFILL, 1, 1_000, 1_000, is_part=True)
    estimate = layer_time(make_machine(), WORK, PREFILL).seconds
    share = layer_time(make_machine(), WORK, part).seconds / estimate
    machine = make_machine(layer_times=[measured(PREFILL, estimate / 2, WORK.key)])
    assert layer_time(machine, WORK, part).seconds == pytest.approx(share * estimate / 2)


def test_head_is_read_once_for_the_last_tokens() -> None:
    machine = make_machine()
    time = outside_time(machine, STAGE, DECODE)
    rows = 2 * HIDDEN * 2
    assert time.seconds == pytest.approx((VOCABULARY * HIDDEN * 2 + rows) / 100e9)
    known = make_machine(layer_times=[measured(DECODE, 0.25, STAGE.outside_key)])
    assert outside_time(known, STAGE, DECODE).seconds == 0.25


@pytest.mark.parametrize(
    ("head", "embedding"),
    [
        ("lm_head.weight", "model.embed_tokens.weight"),
        ("transformer.output_layer.weight", "transformer.word_embeddings.weight"),
    ],
)
def test_a_tied_head_is_the_embedding(head: str, embedding: str) -> None:
    tensors = (
        TensorInfo(head, "BF16", (VOCABULARY, HIDDEN)),
        TensorInfo(embedding, "BF16", (VOCABULARY, HIDDEN)),
    )
    model = replace(STAGE.model, outside=tensors)
    assert model.head.tensors == tensors[:1]
    assert replace(model, outside=tensors[1:]).head.tensors == tensors[1:]


def test_outside_the_layers_of_a_model_whose_head_is_unknown() -> None:
    stage = hold(replace(STAGE.model, outside=()))
    known = make_machine(layer_times=[measured(DECODE, 0.25, stage.outside_key)])
    other = PassShape(Phase.DECODE, 7, 1, DECODE.context)
    assert outside_time(known, stage, other).seconds == 0.25
    assert outside_time(make_machine(), stage, other).seconds == 0


def test_equal_layers_are_priced_alike() -> None:
    compute = ModelCompute(hold(moe_model(4)), make_machine())
    priced = compute.price(DECODE)
    assert len(compute.works) == 2
    assert priced.layer_ps[1] == priced.layer_ps[3] != priced.layer_ps[0]
    assert priced.resident_ps == sum(priced.layer_ps) + priced.outside_ps
    assert not priced.measured
