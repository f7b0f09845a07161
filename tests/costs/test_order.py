"""Estimates keep the order of GPUs, and are never faster than their bytes allow."""

from functools import cache

import pytest

from offplan.costs.compute import ModelCompute
from offplan.costs.work import PassShape
from offplan.held.stage import Stage
from offplan.machine.cards import shipped_profiles
from offplan.machine.profile import MachineProfile, load_profile
from offplan.placement import Phase
from tests.cli import ROOT
from tests.held import open_stage

MODELS = (
    *("tests/models/qwen3-8b", "tests/models/deepseek-v2-lite"),
    *(
        f"benchmarks/models/{name}"
        for name in (
            *("deepseek-v3-8-layers", "ernie-4.5-21b-a3b-gptq", "gemma-3-4b", "glm-4.5-air"),
            *("gpt-oss-120b", "gpt-oss-20b", "mistral-nemo-12b", "mixtral-8x7b"),
            *("qwen3-30b-a3b-fp8", "qwen3-32b-w4a16", "qwen3-8b-fp8"),
        )
    ),
)
GPUS = [name for name in shipped_profiles() if name != "cpu"]
STEP, STEPS = PassShape(Phase.DECODE, 1, 1, 576), PassShape(Phase.DECODE, 16, 1, 576)
SHORT, LONG = (PassShape(Phase.PREFILL, 1, number, number) for number in (512, 8192))
RATES = ("hbm", "matmul", "vector")


@cache
def stage_of(model: str) -> Stage:
    return open_stage(ROOT / model / "config.json")


@cache
def seconds(model: str, gpu: str, shape: PassShape) -> float:
    return price(model, load_profile(gpu), shape)


def price(model: str, machine: MachineProfile, shape: PassShape) -> float:
    return ModelCompute(stage_of(model), machine).price(shape).resident_ps / 1e12


def change(machine: MachineProfile, name: str, factor: float) -> MachineProfile:
    figure = getattr(machine, name)
    changed = figure.model_copy(update={"value": factor * figure.value})
    return MachineProfile.model_validate({**dict(machine), name: changed})


def test_gpt_oss_takes_the_order_of_memory() -> None:
    rates = {gpu: 1 / seconds("benchmarks/models/gpt-oss-20b", gpu, STEP) for gpu in GPUS}
    t4, a10, l4 = (rates[gpu] for gpu in ("t4-pcie3", "a10-pcie4", "l4-pcie4"))
    ampere, ada, blackwell = (
        rates[gpu] for gpu in ("rtx3090-pcie4", "rtx4090-pcie4", "rtx5090-pcie5")
    )
    assert t4 < a10 < ampere < ada < blackwell
    assert l4 < ampere
    assert rates["rtx5080-pcie5"] < blackwell
    assert ampere >= 130


@pytest.mark.parametrize("model", MODELS)
def test_a_step_is_never_faster_than_its_bytes(model: str) -> None:
    stage = stage_of(model)
    head = 0 if stage.head is None else stage.head.nbytes
    for gpu in GPUS:
        machine = load_profile(gpu)
        works = ModelCompute(stage, machine).works
        for shape in (STEP, STEPS, SHORT):
            num_bytes = head + sum(works[layer.key].device_bytes(shape) for layer in stage.layers)
            assert seconds(model, gpu, shape) > num_bytes / machine.hbm.value


@pytest.mark.parametrize("model", MODELS)
def test_no_tensor_core_bounds_the_step_of_one_text(model: str) -> None:
    """An H20 has the bytes of an H200 and a fifth of its tensor cores: 1.04 % of a step."""
    for gpu in GPUS:
        quick = change(load_profile(gpu), "matmul", 1e3)
        assert price(model, quick, STEP) > 0.985 * seconds(model, gpu, STEP)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("gpu", ["t4-pcie3", "rtx3060-laptop-pcie4", "h100-pcie5"])
def test_more_of_a_rate_is_never_slower(model: str, gpu: str) -> None:
    machine = load_profile(gpu)
    for name, factor in [*((name, 1.3) for name in RATES), ("layer_overhead", 0.5)]:
        for shape in (STEP, STEPS, SHORT, LONG):
            assert price(model, change(machine, name, factor), shape) <= seconds(model, gpu, shape)


@pytest.mark.parametrize("model", MODELS)
def test_a_gpu_with_more_of_all_rates_is_never_slower(model: str) -> None:
    rates = {gpu: [getattr(load_profile(gpu), name).value for name in RATES] for gpu in GPUS}
    for less in GPUS:
        for more in GPUS:
            if all(a <= b for a, b in zip(rates[less], rates[more], strict=True)):
                for shape in (STEP, SHORT):
                    assert seconds(model, more, shape) <= seconds(model, less, shape)
