"""Times of layers in transformers' own passes, and plans that are made from them."""

from pathlib import Path

import pytest
import torch

from offplan.capabilities.stock import STOCK
from offplan.checkpoint.open import open_model
from offplan.costs.predict import predict
from offplan.held.held import hold, hold_counted
from offplan.library.asking import ask
from offplan.library.machines import measure_here
from offplan.machine import measure_cpu
from offplan.machine.profile import LayerTime, dump_profile, parse_profile
from offplan.plan import Budget, Workload
from offplan.planner.make import make_plan
from offplan.runtime.measuring import layer_times, pass_times
from offplan.runtime.session import Session
from tests.runtime.families import require, save
from tests.runtime.plans import CONTEXT, group, offload
from tests.runtime.quantise import save_stored

pytestmark = pytest.mark.usefixtures("counted_by_warm_processes")
WORKLOAD = Workload(batch=2, prompt_tokens=14, output_tokens=8, context=48)


@pytest.fixture(autouse=True)
def in_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure_cpu, "_LARGE_BYTES", 2**20)
    for module in (layer_times, pass_times):
        monkeypatch.setattr(module, "NUM_SAMPLES", 2)
        monkeypatch.setattr(module, "CPU_REPEATS", 2)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon", "nemotron_h", "hrm_text", "zamba2"])
def test_a_plan_takes_the_times_that_were_measured(family: str, tmp_path: Path) -> None:
    require(family)
    model = open_model(str(save(family, tmp_path)))
    stage = hold_counted(model, STOCK)
    profile = measure_here(model, WORKLOAD, device="cpu").profile
    names = {stage.time_key(key) for key in (stage.outside_key, *(x.key for x in stage.layers))}
    assert all(name.startswith("stock-") for name in names)
    for phase, tokens, context, samples in (("prefill", 14, 14, 2), ("decode", 1, 18, 4)):
        found = [each for each in profile.layer_times if each.phase == phase]
        assert {each.layer for each in found} == names
        assert {(each.batch, each.tokens, each.context) for each in found} == {(2, tokens, context)}
        assert all(each.samples == samples and each.spread is not None for each in found)
    assert parse_profile(dump_profile(profile), "measured") == profile
    decision = offload(group(2, 1))
    priced = predict([stage], profile, WORKLOAD, Budget(gpu_memory=2**30), decision)
    assert priced.basis == "measured"
    seconds = {each.layer: each.seconds for each in profile.layer_times if each.phase == "decode"}
    assert stage.passes is not None
    calls = [stage.time_key(stage.layers[index].key) for index in stage.passes.calls["decode"]]
    expected = sum(seconds[name] for name in (*calls, stage.time_key(stage.outside_key)))
    assert priced.decode.compute_s == pytest.approx(expected)


@pytest.mark.slow
def test_times_are_of_one_way_alone(tmp_path: Path) -> None:
    model = open_model(str(save("llama", tmp_path)))
    workload = WORKLOAD.model_copy(update={"batch": 1})
    machines = {
        stock: measure_here(model, workload, device="cpu", stock=stock) for stock in (False, True)
    }
    for measured, machine in machines.items():
        for asked in (False, True):
            plan = make_plan(ask(model, machine, workload, stock=asked)).plan
            basis = "measured" if asked == measured else "estimated"
            assert plan.prediction.basis == basis


@pytest.mark.slow
def test_no_more_tokens_are_cached_than_are_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_times, "MOST_FILLED", 16)
    stage = hold_counted(open_model(str(save("falcon", tmp_path))), STOCK)
    workload = Workload(prompt_tokens=40, output_tokens=8, context=64)
    times = pass_times.measure_pass_times(stage, workload, (16,), device="cpu")
    assert {(each.tokens, each.context) for each in times} == {(16, 16), (1, 16)}


def test_layers_alike_share_their_weights(tmp_path: Path) -> None:
    model = open_model(str(save("falcon", tmp_path)))
    stage = hold(model, way=STOCK)
    with Session(
        model, offload(), context=CONTEXT, device="cpu", way=STOCK, share_layers=True
    ) as session:
        layers = [layer.state_dict() for layer in session.loaded.module.transformer.h]
        outside = sum(parameter.loaded_bytes for parameter in stage.outside)
        assert session.loaded.store.arena.nbytes <= outside + 2 * stage.layers[0].nbytes
        for name, value in layers[0].items():
            assert {each[name].data_ptr() for each in layers} == {value.data_ptr()}
        assert session.prefill(torch.arange(4)[None]).isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), [("qwen3", "nf4"), ("qwen3_moe", "gptq")])
def test_stored_forms_are_timed(family: str, form: str, tmp_path: Path) -> None:
    stored, _ = save_stored(family, form, tmp_path)
    stage = hold_counted(open_model(str(stored)), STOCK)
    times: tuple[LayerTime, ...] = pass_times.measure_pass_times(
        stage, WORKLOAD, (14,), device="cpu"
    )
    assert {each.phase for each in times} == {"prefill", "decode"}


@pytest.mark.slow
def test_tokens_that_a_table_sends_to_experts_are_sent_to_all(tmp_path: Path) -> None:
    require("deepseek_v4")
    model = open_model(str(save("deepseek_v4", tmp_path)))
    with Session(model, offload(), context=CONTEXT, device="cpu", way=STOCK) as session:
        tables = [v for n, v in session.loaded.module.state_dict().items() if "tid2eid" in n]
        experts = session.loaded.module.config.n_routed_experts
        assert tables
        assert all(set(table.view(-1).tolist()) == {*range(experts)} for table in tables)
        session.prefill(torch.arange(4)[None])
