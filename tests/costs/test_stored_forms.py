"""A quantised model costs the bytes that it is stored in, and the products that it stands for."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from offplan import kernel_sizes
from offplan.backends import Backend
from offplan.costs.activations import (
    CODED_EXPERTS_BYTES,
    EXPANDED_COPIES,
    NESTED_SCALE_BYTES,
    ROUTED_COPIES,
    activation_bytes,
    coded_experts_bytes,
    expanded_bytes,
    logits_bytes,
    mlp_bytes,
    phase_bytes,
    scratch_bytes,
)
from offplan.costs.compute import outside_time
from offplan.costs.kernels import (
    CPU_VALUE_BYTES,
    GROUP_S,
    MATMUL_EFFICIENCY,
    layer_seconds,
)
from offplan.costs.link import UNALIGNED_ROWS, expert_reads
from offplan.costs.work import PassShape, layer_work
from offplan.forms.form import RAW, Component, Kind
from offplan.held.held import hold
from offplan.held.packing import pack_everything
from offplan.held.stage import Stage
from offplan.held.unit import group_units
from offplan.kernel_sizes import IN_PLACE_ROWS
from offplan.machine.profile import load_profile
from offplan.placement import Phase
from offplan.plan import Workload
from tests.checkpoint.quantised import (
    EXPERT_INNER,
    FORMATS,
    HIDDEN,
    INNER,
    Format,
    write_quantised,
)
from tests.costs.builders import use_bytes
from tests.held import open_stage

uva_bytes = partial(use_bytes, Backend.UVA)

MANY, ROWS = 10**6, kernel_sizes.GROUPED_ROWS
PROMPT = PassShape(Phase.PREFILL, 1, 512, 512)
BF16 = Format(None, lambda out, columns: {"weight": ("BF16", (out, columns))}, RAW)


@pytest.fixture(autouse=True)
def from_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts' codes are multiplied as they are, but where a test has their values made."""
    monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", {})


@pytest.fixture(scope="module")
def raw(tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return open_stage(write_quantised(tmp_path_factory.mktemp("raw"), BF16))


@pytest.mark.parametrize("name", FORMATS)
def test_costs(tmp_path: Path, raw: Stage, name: str) -> None:
    stage = open_stage(write_quantised(tmp_path, FORMATS[name]))
    for layer, whole in zip(stage.layers, raw.layers, strict=True):
        stored, before = layer_work(stage, layer), layer_work(raw, whole)
        assert stored.flops(PROMPT) == before.flops(PROMPT)
        assert stored.weight_bytes(PROMPT) < 0.7 * before.weight_bytes(PROMPT)
        assert stored.key != before.key
        units, before_units = group_units(layer), group_units(whole)
        weights = [(u.name, u.shape) for u in units if u.part is Component.WEIGHT]
        assert weights == [(u.name, u.shape) for u in before_units]
        assert sum(unit.nbytes for unit in units) == layer.nbytes
    workload = Workload(prompt_tokens=512)
    largest = max(p.num_weights for p in stage.parameters if not p.is_expert)
    expanded = largest * stage.element_bytes
    nested = [p for p in stage.parameters if Component.NESTED_SCALE in p.components]
    num_scales = max((p.of(Component.SCALE)[0].num_elements for p in nested), default=0)
    expanded += 2 * NESTED_SCALE_BYTES * num_scales  # of a step, and of a prompt
    if stage.experts is not None:  # those that a step copies over the link
        expanded += 2 * stage.experts.num_experts_per_token * stage.experts.bytes_per_expert
        expanded += CODED_EXPERTS_BYTES
    assert activation_bytes(stage, workload, 512) <= activation_bytes(raw, workload, 512) + expanded
    assert stage.cache_bytes(workload) == raw.cache_bytes(workload)


@pytest.mark.parametrize("name", FORMATS)
def test_experts_stored_as_codes_take_more_than_the_scratch(tmp_path: Path, name: str) -> None:
    stage = open_stage(write_quantised(tmp_path, FORMATS[name]))
    values = HIDDEN * INNER * 2  # of the largest dense matrix
    dense = replace(stage, layers=stage.layers[:1])
    assert (scratch_bytes(stage, MANY), scratch_bytes(dense, MANY)) == (values, values)
    assert (coded_experts_bytes(stage), coded_experts_bytes(dense)) == (CODED_EXPERTS_BYTES, 0)
    workload = Workload(prompt_tokens=512)
    prompt, step = phase_bytes(stage, workload, 512)
    total = prompt + step + values + CODED_EXPERTS_BYTES
    assert activation_bytes(stage, workload, 512) == total


def test_experts_packed_or_stored_as_they_are_take_no_more(raw: Stage) -> None:
    packed = hold(raw.model, pack_everything(raw.model))
    routed = {p.form.kind for layer in packed.layers for p in layer.parameters if p.is_expert}
    assert routed == {Kind.PACKED}
    assert (scratch_bytes(packed, MANY), scratch_bytes(raw, MANY)) == (HIDDEN * INNER * 2, 0)
    assert (coded_experts_bytes(packed), coded_experts_bytes(raw)) == (0, 0)


def test_experts_are_all_that_gpt_oss_stores_as_codes() -> None:
    stage = open_stage("benchmarks/models/gpt-oss-20b/config.json")
    assert (scratch_bytes(stage, MANY), coded_experts_bytes(stage)) == (0, CODED_EXPERTS_BYTES)


def test_rows_that_begin_amid_a_line_are_read_slower() -> None:
    machine = load_profile("h200-pcie5")
    stage = open_stage("benchmarks/models/gpt-oss-20b/config.json")
    units = [u for u in group_units(stage.layers[0]) if not u.parameters[0].form.is_raw]
    codes = [unit for unit in units if unit.part is Component.WEIGHT]
    num_bytes = sum(unit.nbytes for unit in codes)
    read = uva_bytes(machine, codes, stage.experts, 16)
    assert read == pytest.approx(UNALIGNED_ROWS * num_bytes * stage.experts.touched(16) / 32)
    # those of few tokens are copied in whole lines
    assert uva_bytes(machine, codes, stage.experts, 1) == pytest.approx(num_bytes * 4 / 32)


def test_codes_of_experts_cross_once_where_values_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = load_profile("h200-pcie5")
    stage = open_stage("benchmarks/models/gpt-oss-20b/config.json")
    units = [u for u in group_units(stage.layers[0]) if u.part is Component.WEIGHT]
    codes = [unit for unit in units if not unit.parameters[0].form.is_raw]
    num_bytes, num_tokens = sum(unit.nbytes for unit in codes), 4 * 8 * IN_PLACE_ROWS
    often = uva_bytes(machine, codes, stage.experts, num_tokens)
    assert often == pytest.approx(
        UNALIGNED_ROWS * num_bytes * expert_reads(4 * IN_PLACE_ROWS, IN_PLACE_ROWS)
    )
    monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", ROWS)
    once = uva_bytes(machine, codes, stage.experts, num_tokens)
    assert once == pytest.approx(UNALIGNED_ROWS * num_bytes)


def test_experts_are_read_once_for_as_many_rows_as_a_program_takes() -> None:
    assert [expert_reads(rows, 64) for rows in (1, 16, 32)] == [1, 1, 1]
    # half of the experts have more rows than a block of the average
    assert expert_reads(128, 128) == pytest.approx(1.5)
    assert expert_reads(512, 128) == pytest.approx(4.5, rel=1e-3)


@pytest.mark.parametrize(
    ("rows", "reads"),
    [(64, 1.0), (128, 1.0), (256, 1.0), (384, 1.0), (512, 1.5), (1024, 2.44), (2048, 4.5)],
)
def test_values_of_experts_are_read_as_often_as_measured(rows: int, reads: float) -> None:
    """With what an H200's grouped products took, in multiples of few rows."""
    machine = load_profile("h200-pcie5")
    stage = open_stage("tests/models/deepseek-v2-lite/config.json")
    values = [unit for unit in group_units(stage.layers[1]) if unit.is_expert]
    read = uva_bytes(machine, values, stage.experts, rows * 64 // 6)
    assert read == pytest.approx(reads * sum(unit.nbytes for unit in values), rel=0.07)


@pytest.mark.parametrize("told", [{}, {"desc_act": False}, {"static_groups": True}])
def test_scales_in_the_order_of_activations_are_read_once(
    tmp_path: Path, told: dict[str, bool]
) -> None:
    config = {**(FORMATS["gptq"].config or {}), **told}
    stage = open_stage(write_quantised(tmp_path, FORMATS["gptq"]._replace(config=config)))
    machine = load_profile("h200-pcie5")
    down = [u for u in group_units(stage.layers[0]) if u.name == "mlp.down_proj.weight"]
    for unit in down:
        assert uva_bytes(machine, [unit], None, 1) == unit.nbytes
    assert {unit.part for unit in down} >= {Component.SCALE, Component.ZERO, Component.GROUP_INDEX}
    # those of few experts are copied whole before they are multiplied
    routed = [u for u in group_units(stage.layers[1]) if u.is_expert and u.part is Component.SCALE]
    for unit in routed:
        assert uva_bytes(machine, [unit], stage.experts, 1) == unit.nbytes // 2


def test_a_head_stored_as_codes_is_expanded_for_many_sequences(tmp_path: Path, raw: Stage) -> None:
    stored = FORMATS["fp8 blocks"]._replace(takes_all=True)
    stage, machine = open_stage(write_quantised(tmp_path, stored)), load_profile("h200-pcie5")
    few, many = (PassShape(Phase.DECODE, batch, 1, 9) for batch in (128, 129))
    values = stage.head.num_weights * 2
    assert not stage.head.form.is_raw
    assert logits_bytes(stage, few) == logits_bytes(raw, few)
    assert logits_bytes(stage, many) == logits_bytes(raw, many) + values
    took, raw_took = (outside_time(machine, m, many).seconds for m in (stage, raw))
    made = 2 * values - (values - stage.head.nbytes)
    assert took - raw_took == pytest.approx(made / machine.hbm.value)
    # a prompt's tokens beyond each sequence's last never meet it
    assert logits_bytes(stage, PROMPT) == logits_bytes(raw, PROMPT)


def test_float32_is_multiplied_by_values_alone(tmp_path: Path) -> None:
    stage = open_stage(write_quantised(tmp_path, FORMATS["fp8 blocks"]))
    step, layer = PassShape(Phase.DECODE, 1, 1, 9), stage.layers[0]
    wide = hold(replace(stage.model, dtype="float32"))
    assert (expanded_bytes(stage, layer, step), scratch_bytes(wide, MANY)) == (0, 0)
    largest = max(p.num_weights for p in layer.parameters)
    assert expanded_bytes(wide, layer, step) == EXPANDED_COPIES * largest * 4
    works = layer_work(stage, layer), layer_work(wide, layer)
    made = [work.device_bytes(step) - work.weight_bytes(step) for work in works]
    assert made[1] - made[0] == 2 * 4 * works[1].expanded_elements


@pytest.mark.parametrize(("name", "kind"), [("fp8 blocks", 1), ("compressed-tensors int4", 0)])
def test_codes_take_the_cuda_cores(tmp_path: Path, raw: Stage, name: str, kind: int) -> None:
    """With slow cores a layer takes as much longer as they are slower; by values it does not."""
    stage = open_stage(write_quantised(tmp_path, FORMATS[name]))
    work, plain = (layer_work(each, each.layers[-1]) for each in (stage, raw))
    assert work.dense_codes[kind] > 0 < work.expert_codes[kind]
    assert work.dense_codes[1 - kind] == work.expert_codes[1 - kind] == 0
    assert sum(plain.dense_codes) == sum(plain.expert_codes) == 0
    machine = load_profile("h200-pcie5")
    for num_tokens in (1, 9, 32):
        shape = PassShape(Phase.DECODE, num_tokens, 1, 9)
        taken = []
        for rate in (1e6, 2e6):
            assert machine.vector is not None
            vector = machine.vector.model_copy(update={"value": rate})
            slow = machine.model_copy(update={"vector": vector})
            slow.__dict__.pop("vector_rate", None)
            taken.append(layer_seconds(slow, work, shape))
            assert layer_seconds(slow, plain, shape) == layer_seconds(machine, plain, shape)
        assert taken[0].dense == pytest.approx(2 * taken[1].dense, rel=1e-3)
        assert taken[0].routed == pytest.approx(2 * taken[1].routed, rel=1e-3)


@pytest.mark.parametrize(("name", "kind"), [("fp8 blocks", 1), ("compressed-tensors int4", 0)])
def test_a_cpu_makes_all_values_in_every_pass(
    tmp_path: Path, raw: Stage, name: str, kind: int
) -> None:
    stage = open_stage(write_quantised(tmp_path, FORMATS[name]))
    work, plain = (layer_work(each, each.layers[-1]) for each in (stage, raw))
    cpu, each = load_profile("cpu"), CPU_VALUE_BYTES[kind] / load_profile("cpu").hbm.value
    for num_tokens in (1, 500):
        shape = PassShape(Phase.DECODE, num_tokens, 1, 9)
        taken, of_values = (layer_seconds(cpu, of, shape) for of in (work, plain))
        assert taken.making == pytest.approx(work.dense_codes[kind] * each)
        assert taken.routed > work.expert_codes[kind] * each
        assert taken.dense == pytest.approx(of_values.dense, rel=0.1)
        assert of_values.making == 0


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_experts_are_made_in_the_scratch(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = open_stage(write_quantised(tmp_path, FORMATS[name]))
    stage = replace(stage, layers=stage.layers[1:])  # the first has a larger dense weight
    dense = scratch_bytes(stage, MANY)
    monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", ROWS)
    assert stage.experts is not None
    # gate and up of as many experts as there is room for; GPTQ's, which are put in order, twice
    of_expert, num_experts = 2 * HIDDEN * EXPERT_INNER * 2, stage.experts.num_experts
    experts = [p for p in stage.parameters if p.is_expert]
    copies = 1 + any(Component.GROUP_INDEX in p.components for p in experts)
    assert scratch_bytes(stage, 1) == dense
    if not all(p.form.kind.value in ROWS for p in experts):
        assert scratch_bytes(stage, MANY) == dense
        return
    assert scratch_bytes(stage, MANY) == copies * num_experts * of_expert > dense
    monkeypatch.setattr(kernel_sizes, "EXPERT_SCRATCH_BYTES", of_expert)
    assert scratch_bytes(stage, MANY) == max(dense, copies * of_expert)


def test_as_many_experts_are_made_at_once_as_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage, workload = (
        open_stage("benchmarks/models/gpt-oss-20b/config.json"),
        Workload(prompt_tokens=512),
    )
    without = activation_bytes(stage, workload, 512)
    monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", ROWS)
    grown = activation_bytes(stage, workload, 512) - without
    assert grown == scratch_bytes(stage, 512) == 4 * 5760 * 2880 * 2
    assert grown <= kernel_sizes.EXPERT_SCRATCH_BYTES
    assert scratch_bytes(stage, 300) == 0  # which multiply codes
    # rows that are gathered for experts are among the temporaries, on and off
    hidden, width = 2880, 2 * 2880 + 2880
    routed = mlp_bytes(stage, stage.layers[0], PROMPT)
    assert routed == 512 * 4 * (width + ROUTED_COPIES * hidden) * 2


def test_values_of_experts_are_made_and_then_multiplied(monkeypatch: pytest.MonkeyPatch) -> None:
    stage, machine = (
        open_stage("benchmarks/models/gpt-oss-20b/config.json"),
        load_profile("h200-pcie5"),
    )
    machine = machine.model_copy(update={"layer_times": ()})
    work = layer_work(stage, stage.layers[0])
    monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", ROWS)
    few = PassShape(Phase.PREFILL, 1, 8 * ROWS["mxfp4"] - 1, 512)
    many = replace(few, tokens=8 * ROWS["mxfp4"])
    assert not work.groups_experts(few)
    assert work.groups_experts(many)
    values, rate = 32 * 3 * 2880 * 2880, machine.hbm.value
    made = (work.expert_bytes + 2 * values) / rate
    # of gate and up the scratch has room for 4 experts, of down for 8
    expected = made + 2 * values / rate + (8 + 4) * GROUP_S
    assert layer_seconds(machine, work, many).routed == pytest.approx(expected, rel=1e-3)
    most = replace(many, tokens=65_536)
    products = 2 * values / 32 * (4 * 65_536 + 64 * 32) / (680e12 * MATMUL_EFFICIENCY)
    expected = made + products + 12 * GROUP_S
    assert layer_seconds(machine, work, most).routed == pytest.approx(expected, rel=1e-3)


def test_no_scratch_holds_values_of_experts_that_are_stored_so(
    raw: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", ROWS)
    assert scratch_bytes(raw, MANY) == 0
