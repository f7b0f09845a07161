"""Estimates of layers are corrected by timed layers of other models of the same form."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest

from offplan.costs.compute import ModelCompute
from offplan.costs.corrections import (
    CORRECTED_ERRORS,
    ESTIMATES,
    LEAST_RATIO,
    MOST_RATIO,
    note_estimates,
)
from offplan.costs.kernels import estimate_layer
from offplan.costs.pass_compute import PassCompute
from offplan.costs.ranges import COMPUTE_ERRORS, step_range
from offplan.costs.work import PassShape, layer_work
from offplan.held.stage import Stage
from offplan.machine.profile import LayerTime, MachineProfile, dump_profile, load_profile
from offplan.machine.profile import parse_profile as parse
from offplan.placement import Phase
from offplan.plan import Budget, Offload, Workload
from offplan.report.answer import describe_correction
from tests.cli import ROOT
from tests.costs.builders import make_machine, measured
from tests.held import open_stage, predict

STEP = PassShape(Phase.DECODE, 1, 1, 576)
SHORT, LONG = (PassShape(Phase.PREFILL, 1, number, number) for number in (512, 8192))
GPU = load_profile("rtx4090")
DENSE, OTHER_DENSE = "benchmarks/models/mistral-nemo-12b", "tests/models/qwen3-8b"
FP8, EXPERTS = "benchmarks/models/qwen3-8b-fp8", "benchmarks/models/gpt-oss-20b"


@cache
def stage_of(model: str) -> Stage:
    return open_stage(ROOT / model / "config.json")


def timed(
    model: str, ratios: Sequence[float], shape: PassShape = STEP, machine: MachineProfile = GPU
) -> MachineProfile:
    """The machine with times of a model's first layer, as multiples of its estimates."""
    stage = stage_of(model)
    work = layer_work(stage, stage.layers[0])
    shapes = [replace(shape, context=shape.context + number) for number in range(len(ratios))]
    times = [
        measured(each, ratio * estimate_layer(machine, work, each), work.key)
        for each, ratio in zip(shapes, ratios, strict=True)
    ]
    return change(machine, note_estimates(machine, [stage], times))


def change(machine: MachineProfile, times: Sequence[LayerTime]) -> MachineProfile:
    return with_figure(machine, "layer_times", tuple(times))


def with_figure(machine: MachineProfile, name: str, value: object) -> MachineProfile:
    figures = {each: getattr(machine, each) for each in MachineProfile.model_fields}
    return MachineProfile.model_validate({**figures, name: value})


def price(model: str, machine: MachineProfile, shape: PassShape = STEP) -> PassCompute:
    return ModelCompute(stage_of(model), machine).price(shape)


def ratio_of(model: str, machine: MachineProfile, shape: PassShape = STEP) -> float:
    corrected, plain = price(model, machine, shape), price(model, GPU, shape)
    assert corrected.outside_ps == plain.outside_ps
    assert not corrected.measured
    return sum(corrected.layer_ps) / sum(plain.layer_ps)


def test_the_median_of_the_same_form_and_phase_corrects() -> None:
    machine = timed(DENSE, (1.1, 1.7, 1.2))
    assert ratio_of(OTHER_DENSE, machine) == pytest.approx(1.2)
    assert ratio_of(OTHER_DENSE, machine, SHORT) == 1.0
    assert ratio_of(FP8, machine) == ratio_of(EXPERTS, machine) == 1.0
    assert ratio_of(FP8, timed(FP8, [1.3])) == pytest.approx(1.3)
    assert ratio_of(EXPERTS, timed(EXPERTS, [1.3], SHORT)) == 1.0


def test_a_models_own_times_come_first() -> None:
    mine, others = timed(OTHER_DENSE, [1.5]), timed(DENSE, [0.9])
    both = change(GPU, (*others.layer_times, *mine.layer_times))
    assert price(OTHER_DENSE, both).layer_ps == price(OTHER_DENSE, mine).layer_ps
    assert price(OTHER_DENSE, both).correction is None


@pytest.mark.parametrize(("ratio", "bound"), [(9.0, MOST_RATIO), (0.01, LEAST_RATIO)])
def test_a_correction_is_bounded(ratio: float, bound: float) -> None:
    machine = timed(DENSE, [ratio], LONG)
    priced = price(OTHER_DENSE, machine, LONG)
    assert ratio_of(OTHER_DENSE, machine, LONG) == pytest.approx(bound)
    assert priced.correction is not None
    widest = COMPUTE_ERRORS[Phase.PREFILL]
    assert (priced.correction.least, priced.correction.most) == widest


def test_a_corrected_step_is_no_faster_than_its_bytes() -> None:
    work = next(iter(ModelCompute(stage_of(OTHER_DENSE), GPU).works.values()))
    least_ps = 1e12 * work.device_bytes(STEP) / GPU.hbm.value
    priced = price(OTHER_DENSE, timed(DENSE, [0.01]))
    assert min(priced.layer_ps) == pytest.approx(least_ps)


@pytest.mark.parametrize("ratio", [0.7, 1.4])
def test_a_correction_keeps_the_order_of_shapes_and_rates(ratio: float) -> None:
    machine = timed(DENSE, [ratio], machine=timed(DENSE, [ratio], LONG))
    tokens = [PassShape(Phase.PREFILL, 1, number, number) for number in (16, 512, 2048, 8192)]
    prompts = [price(OTHER_DENSE, machine, each).resident_ps for each in tokens]
    assert prompts == sorted(prompts)
    for name in ("hbm", "matmul"):
        figure = getattr(machine, name)
        quicker = figure.model_copy(update={"value": 1.3 * figure.value})
        better = with_figure(machine, name, quicker)
        for shape in (STEP, SHORT, LONG):
            more, less = (price(OTHER_DENSE, each, shape) for each in (better, machine))
            assert more.resident_ps <= less.resident_ps


def test_times_without_estimates_of_today_correct_nothing() -> None:
    machine = timed(DENSE, [1.5])
    plain = [time.model_copy(update={"estimate": None}) for time in machine.layer_times]
    assert ratio_of(OTHER_DENSE, change(GPU, plain)) == 1.0
    stale = [
        time.model_copy(update={"estimate": time.estimate.model_copy(update={"model": 99})})
        for time in machine.layer_times
        if time.estimate is not None
    ]
    assert len(stale) == 1
    assert ratio_of(OTHER_DENSE, change(GPU, stale)) == 1.0
    key = stage_of(DENSE).outside_key
    assert note_estimates(GPU, [stage_of(DENSE)], [measured(STEP, 1.0, key)])[0].estimate is None


def test_a_saved_profile_keeps_estimates() -> None:
    machine = timed(DENSE, [1.5])
    read = parse(dump_profile(machine), "saved")
    assert read.layer_times == machine.layer_times
    assert ratio_of(OTHER_DENSE, read) == pytest.approx(1.5)
    assert (
        "estimate"
        not in dump_profile(
            change(GPU, [machine.layer_times[0].model_copy(update={"estimate": None})])
        ).partition("layer_times")[2]
    )


def test_the_range_narrows_and_the_answer_says_so() -> None:
    workload, budget = Workload(), Budget(gpu_memory=2**40)
    offload = Offload(prefill_chunk=512)
    model = stage_of(OTHER_DENSE).model
    found, plain = (
        predict(model, machine, workload, budget, offload)
        for machine in (timed(DENSE, (1.2, 1.25, 1.6)), GPU)
    )
    assert found.decode.correction is not None
    ends, wide = (step_range(each, offload, Phase.DECODE) for each in (found, plain))
    assert ends is not None
    assert wide is not None
    assert ends[0] == pytest.approx(CORRECTED_ERRORS.least * found.decode.step_s)
    assert ends[1] == pytest.approx(1.6 / 1.25 * found.decode.step_s)
    assert ends[1] / ends[0] < wide[1] / wide[0]
    assert step_range(found, offload, Phase.PREFILL) == step_range(plain, offload, Phase.PREFILL)
    assert describe_correction(found) == [
        "The estimate is corrected by other models' layers that were timed on that machine: "
        "steps x 1.25 (3 timed)."
    ]
    assert describe_correction(plain) == []
    assert "correction" not in plain.model_dump()["decode"]


def test_estimates_have_a_version() -> None:
    """Raise ESTIMATES where an estimate moves: older ones are not compared with times then."""
    cpu = with_figure(make_machine(), "name", "CPU")
    estimates = [
        f"{estimate_layer(machine, layer_work(stage_of(model), layer), shape):.5g}"
        for machine in (make_machine(), make_machine(gpu=9), cpu)
        for model in (DENSE, FP8, EXPERTS, "benchmarks/models/qwen3-32b-w4a16")
        for layer in stage_of(model).layers[:1]
        for shape in (STEP, replace(STEP, batch=16), SHORT, LONG)
    ]
    digest = hashlib.sha256(" ".join(estimates).encode()).hexdigest()[:12]
    assert (ESTIMATES, digest) == (4, "84a9aa352873")
