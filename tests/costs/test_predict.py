"""Predictions come from the schedule, and say whether they rest on measurements."""

from typing import Any

import pytest

from offplan.costs.compute import ModelCompute
from offplan.costs.predict import predict as predict_stages
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.held.held import hold
from offplan.plan import Backend, Budget, Offload, Workload
from tests.costs.builders import (
    HIDDEN,
    MIB,
    VOCABULARY,
    dense_model,
    make_machine,
    measured,
    moe_model,
    rule,
)
from tests.held import predict

BUDGET = Budget(gpu_memory=64 * MIB)
WORKLOAD = Workload(prompt_tokens=600, output_tokens=10, context=700)


def test_everything_resident_moves_nothing() -> None:
    prediction = predict(
        dense_model(4), make_machine(), WORKLOAD, BUDGET, Offload(prefill_chunk=600)
    )
    for phase in (prediction.prefill, prediction.decode):
        assert phase.link_bytes == phase.link_s == phase.stall_s == 0
        assert phase.step_s == phase.compute_s == phase.bound_s
    assert prediction.host_memory_bytes == 0


def test_objective_is_prompt_and_a_step_for_every_token_after_the_first() -> None:
    offload = Offload(prefetch_step=2, prefill_chunk=512, rules=(rule("mlp"),))
    prediction = predict(dense_model(4), make_machine(), WORKLOAD, BUDGET, offload)
    total = prediction.prefill.step_s + 9 * prediction.decode.step_s
    assert prediction.objective_s == pytest.approx(total)
    assert prediction.prefill.link_bytes == prediction.decode.link_bytes  # two chunks, one pass
    assert prediction.host_memory_bytes == prediction.decode.link_bytes


def test_experts_read_in_place_cross_as_touched() -> None:
    offload = Offload(
        prefill_chunk=600, rules=(rule("experts", prefill=Backend.UVA, decode=Backend.UVA),)
    )
    model = moe_model(5)
    prediction = predict(model, make_machine(), WORKLOAD, BUDGET, offload)
    assert model.experts is not None
    assert prediction.decode.link_bytes == 4 * 2 * model.experts.bytes_per_expert
    assert prediction.decode.stall_s == pytest.approx(prediction.decode.link_s)
    assert prediction.gpu_memory.ring_bytes == 0


def test_rows_of_an_embedding_on_the_host_cross_one_a_token() -> None:
    model = dense_model(3)
    on_host = Offload(prefill_chunk=512, embeddings="host")
    resident = predict(model, make_machine(), WORKLOAD, BUDGET, Offload(prefill_chunk=512))
    prediction = predict(model, make_machine(), WORKLOAD, BUDGET, on_host)
    row, table = 2 * HIDDEN, 2 * HIDDEN * VOCABULARY
    assert prediction.decode.link_bytes == row
    num_rows = 600 + 1  # the last token again, for the head of a prompt in chunks
    assert prediction.prefill.link_bytes == num_rows * row
    assert prediction.prefill.stall_s == pytest.approx(num_rows * row / 0.9e9)
    assert prediction.host_memory_bytes == table
    saved = resident.gpu_memory.resident_bytes - prediction.gpu_memory.resident_bytes
    assert saved == table


def test_a_second_gpu_holds_the_slabs_alone() -> None:
    peer = make_machine(peer=20e9).with_store("peer")
    rules: dict[str, Any] = {"prefill_chunk": 512, "embeddings": "host", "rules": (rule("mlp"),)}
    on_host, on_peer = (
        predict(dense_model(3), peer, WORKLOAD, BUDGET, Offload(**rules, store=store))
        for store in ("host", "peer")
    )
    table = 2 * HIDDEN * VOCABULARY
    assert (on_peer.host_memory_bytes, on_host.peer_memory_bytes) == (table, 0)
    assert on_peer.peer_memory_bytes == on_host.host_memory_bytes - table > 0


def test_basis_is_measured_only_when_all_of_it_is() -> None:
    model = dense_model(3)
    offload = Offload(prefill_chunk=512, rules=())
    workload = Workload(prompt_tokens=1024, output_tokens=10, context=1100)
    shapes = [*prefill_shapes(workload, 512), decode_shape(workload)]
    stage = hold(model)
    keys = [*ModelCompute(stage, make_machine()).works, stage.outside_key]
    times = [measured(shape, 0.5, key) for shape in shapes for key in keys]
    prediction = predict(model, make_machine(layer_times=times), workload, BUDGET, offload)
    assert prediction.basis == "measured"
    assert prediction.decode.step_s == pytest.approx(0.5 * 4)
    partly = predict(model, make_machine(layer_times=times[1:]), workload, BUDGET, offload)
    assert partly.basis == "estimated"
    machine = make_machine(layer_times=times)
    for stages, basis in (
        ([hold(dense_model(12))], "measured"),
        ([hold(dense_model(12)), hold(moe_model(2))], "estimated"),
    ):
        of_all = predict_stages(stages, machine, workload, BUDGET, offload)
        assert of_all.basis == basis
