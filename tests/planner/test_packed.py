"""Weights are packed where that makes a plan faster, and nowhere else."""

import json
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import pytest

from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.forms.host_kernels import parts_of
from offplan.held.held import hold
from offplan.held.packing import pack_everything
from offplan.machine.profile import LayerTime, load_profile
from offplan.plan import Goal, Offload, Workload
from offplan.planner.classes import list_patterns
from offplan.planner.find import PlanResult
from offplan.planner.make import make_plan
from offplan.planner.neighbours import find_neighbours
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from tests.costs.builders import DENSE, HIDDEN, dense_model, make_machine, make_model, moe_model
from tests.held import place, predict
from tests.planner.cases import UNLIMITED, WORKLOAD, ask, assert_fastest
from tests.tiers import first_quick

MODELS = {"dense": dense_model(24), "moe": moe_model(24)}
MACHINE = make_machine(h2d=1e9, uva=0.9e9)


def plan(name: str, share: float, goal: Goal | None = None, **others: Any) -> PlanResult:
    return make_plan(ask(MODELS[name], MACHINE, share, goal=goal or Goal(), **others))


@pytest.mark.slow
@pytest.mark.parametrize("name", first_quick(MODELS))
@pytest.mark.parametrize("share", first_quick([0.2, 0.6, 0.95]))
def test_what_the_link_holds_up_is_packed(name: str, share: float) -> None:
    result, plain = plan(name, share), plan(name, share, Goal(packing=False))
    packed, before = result.plan, plain.plan
    assert (packed.offload.packing is None, before.offload.packing) == (False, None)
    assert packed.prediction.objective_s < before.prediction.objective_s
    assert packed.prediction.gpu_memory.total_bytes <= packed.budget.gpu_memory
    assert result.floor.objective_s <= packed.prediction.objective_s
    assert packed.model == before.model
    priced = predict(MODELS[name], MACHINE, packed.workload, packed.budget, packed.offload)
    assert priced == packed.prediction


@pytest.mark.parametrize("name", MODELS)
def test_what_fits_is_left_as_it_is_stored(name: str) -> None:
    assert plan(name, 1.2).plan.offload.packing is None


def test_engines_and_the_cpu_pack_nothing() -> None:
    assert ask(MODELS["dense"], MACHINE, 0.5, goal=Goal(engine="vllm")).recoding is None
    question = ask(MODELS["dense"], load_profile("cpu"), 0.5, goal=Goal())
    assert make_plan(question).plan.offload.packing is None


@pytest.mark.slow
def test_no_more_layers_are_packed_than_makes_all_fit() -> None:
    model = dense_model(9)
    question = ask(model, MACHINE, 0.98, goal=Goal())
    result = make_plan(question)
    found = result.plan
    assert found.offload.rules == ()
    patterns = list_patterns(len(model.layers))
    fitting = []
    pairs = zip(patterns.group_size.tolist(), patterns.num_in_group.tolist(), strict=True)
    for (size, number), head in product(pairs, (True, False)):
        packing = Packing(group_size=size, num_in_group=number, output_head=head)
        for chunk in (600, 512):
            offload = Offload(prefill_chunk=chunk, packing=packing)
            each = predict(model, MACHINE, WORKLOAD, found.budget, offload)
            if each.gpu_memory.total_bytes <= found.budget.gpu_memory:
                fitting.append(each.objective_s)
    assert_fastest(result, min(fitting))
    steps = {each.change: each for each in find_neighbours(question, found)}
    assert found.offload.packing is not None
    size = found.offload.packing.group_size
    assert steps[f"packing: group_size {size} -> {size + 1}"].refusal == "GPU memory"
    assert steps["without packing"].refusal == "GPU memory"


def test_measured_times_of_packed_layers_decide() -> None:
    model = MODELS["dense"]
    packed = hold(model, pack_everything(model)).layers[0].key
    offload = Offload(prefill_chunk=600)
    assert packed != model.layers[0].key
    prediction = predict(model, MACHINE, WORKLOAD, UNLIMITED, offload)
    for share, taken in ((0.5, True), (2.0, False)):
        times = [
            LayerTime(
                layer=packed,
                phase=phase,
                batch=1,
                tokens=tokens,
                context=context,
                seconds=share * getattr(prediction, phase).step_s / len(model.layers),
            )
            for phase, tokens, context in (("prefill", 600, 600), ("decode", 1, 610))
        ]
        machine = make_machine(h2d=1e9, uva=0.9e9, layer_times=times)
        found = make_plan(ask(model, machine, 2.0, goal=Goal())).plan
        assert (found.offload.packing is not None) == taken


def test_a_head_whose_values_are_made_for_many_sequences_is_not_packed() -> None:
    for batch, packs_head in ((128, True), (129, False)):
        workload = Workload(batch=batch, prompt_tokens=8, output_tokens=8, context=16)
        packed = Searcher(Space(ask(MODELS["dense"], MACHINE, 0.5, workload, Goal()))).recoded
        assert packed is not None
        assert packed.space.recoding is not None
        assert packed.space.recoding.output_head == packs_head


GEMMA_270M: dict[str, Any] = {
    **{"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "dtype": "bfloat16"},
    **{"hidden_size": 640, "intermediate_size": 2048, "num_hidden_layers": 18, "head_dim": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 1, "vocab_size": 262144},
    **{"sliding_window": 512, "_sliding_window_pattern": 6, "tie_word_embeddings": True},
}
"""The shape of Gemma-3-270m, of whose bytes 63 % are the embedding that its head is tied to."""


@pytest.mark.slow
def test_a_head_is_packed_with_the_embedding_that_it_is_tied_to(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_270M))
    model = open_model(str(tmp_path / "config.json"))
    assert model.head is not None
    assert not model.stores_head
    assert model.head.nbytes / model.total_bytes == pytest.approx(0.626, abs=0.001)
    for share, packs_layers, packs_head in ((1.1, 0, 0), (0.95, 1, 0), (0.8, 1, 1)):
        found = make_plan(ask(model, MACHINE, share, goal=Goal())).plan
        packing, memory = found.offload.packing, found.prediction.gpu_memory
        assert (packing is not None) == packs_layers
        assert (packing is not None and packing.output_head) == packs_head
        assert memory.resident_bytes == place(model, found.offload).resident_bytes
        assert memory.total_bytes <= found.budget.gpu_memory
        assert not found.offload.rules
    left = make_plan(ask(model, MACHINE, 0.8, goal=Goal(leave_unpacked=("output_head",)))).plan
    assert found.prediction.objective_s < left.prediction.objective_s
    packed = hold(model, pack_everything(model))
    assert packed.head is not None
    assert packed.head.nbytes == sum(
        prod(shape) * (4 if dtype == "I32" else 1)
        for dtype, shape in parts_of((262144, 640)).values()
    )


@pytest.mark.slow
def test_a_packed_head_that_is_faster_lowers_the_floor() -> None:
    model = MODELS["dense"]
    key = hold(model, pack_everything(model)).outside_key
    assert key != hold(model).outside_key
    phases = (("prefill", 600, 600), ("decode", 1, 610))
    times = [
        LayerTime(layer=key, phase=phase, batch=1, tokens=tokens, context=context, seconds=1e-12)
        for phase, tokens, context in phases
    ]
    machine = make_machine(h2d=1e9, uva=0.9e9, layer_times=times)
    for share in (0.9, 0.98, 2.0):
        found = make_plan(ask(model, machine, share, goal=Goal()))
        assert found.floor.objective_s <= found.plan.prediction.objective_s


@pytest.mark.slow
def test_a_scratch_that_takes_more_than_packing_saves_raises_no_floor() -> None:
    model = make_model([DENSE | {"mlp.up_proj.weight": (48 * HIDDEN, HIDDEN)}])
    for share in (0.3, 0.6, 0.9):
        found = make_plan(ask(model, MACHINE, share, goal=Goal()))
        prediction, floor = found.plan.prediction, found.floor
        assert found.plan.offload.packing is None
        assert floor.objective_s <= prediction.objective_s
        assert floor.decode_s <= prediction.decode.step_s
        assert floor.prefill_s <= prediction.prefill.step_s


def test_a_plan_of_few_packed_layers_is_held_so_wherever_it_is_found() -> None:
    question = ask(dense_model(9), MACHINE, 0.99, goal=Goal())
    offload = make_plan(question).plan.offload
    searcher = Searcher(Space(question))
    assert offload.packing not in (None, *(space.recoding for space in searcher.spaces))
    assert question.hold(offload)[0].recoding == offload.packing
