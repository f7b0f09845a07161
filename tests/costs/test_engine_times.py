"""What prompts and steps take on vLLM and SGLang, whose copies end with the pass."""

from typing import Any

import pytest

from offplan import placement as placements
from offplan.checkpoint.open import open_model
from offplan.costs.engine_times import build_engine_pass
from offplan.costs.kernels import DENSE_LAUNCHES, LAUNCH_SLOWDOWN
from offplan.engines.vllm import VLLM_PASSES
from offplan.machine.profile import LAUNCHES, MachineProfile, load_profile
from offplan.placement import Phase
from offplan.plan import Budget, Offload, Prediction, Rule, Workload
from offplan.schedule import Compute, Copy, Wait, build_repeated_pass
from tests.cli import ROOT
from tests.costs.builders import dense_model, make_machine
from tests.held import hold_by, place, predict
from tests.tiers import first_quick

NUM_LAYERS = 8
WORKLOAD = Workload(prompt_tokens=64, output_tokens=16, context=128)
BUDGET = Budget(gpu_memory=2**30)


def offload(chunk: int = 64, slots: int = 1, **rule: object) -> Offload:
    given = {"prefill": "prefetch", "decode": "prefetch", **rule}
    return Offload(prefetch_step=slots, prefill_chunk=chunk, rules=(Rule.model_validate(given),))


def every(group_size: int, *, chunk: int = 64, slots: int = 1) -> Offload:
    return offload(chunk, slots, group_size=group_size, num_in_group=1)


RESIDENT = Offload(prefill_chunk=64)


def on(engine: str | None, decision: Offload, link: float = 1e9) -> Prediction:
    """What a decision takes on an engine; None is offplan's own runtime."""
    return predict(dense_model(NUM_LAYERS), machine(link), WORKLOAD, BUDGET, decision, engine)


def machine(link: float = 1e9) -> MachineProfile:
    """A machine whose layers have the overhead of vLLM's."""
    given = make_machine(h2d=link, uva=link)
    assert VLLM_PASSES.layer_overhead_s is not None
    of_launches = VLLM_PASSES.layer_overhead_s * LAUNCHES / (DENSE_LAUNCHES * LAUNCH_SLOWDOWN)
    overhead = given.layer_overhead.model_copy(update={"value": of_launches})
    return given.model_copy(update={"layer_overhead": overhead})


@pytest.mark.parametrize("engine", ["vllm", "sglang==0.5.23"])
def test_what_is_resident_takes_what_it_takes_elsewhere(engine: str) -> None:
    ours, theirs = on(None, RESIDENT), on(engine, RESIDENT)
    assert (theirs.prefill, theirs.decode) == (ours.prefill, ours.decode)


def test_layers_on_an_engine_have_its_own_overhead() -> None:
    """And all-reduces where ranks share a layer, twice; SGLang's is the machine's."""
    rules = VLLM_PASSES
    assert rules.overhead_s(is_routed=False, num_gpus=1) == 40e-6
    assert rules.overhead_s(is_routed=True, num_gpus=2) == pytest.approx(70e-6)
    quick = make_machine(h2d=1e9, uva=1e9)
    for engine, more_s in {"vllm": NUM_LAYERS * (40e-6 - 2.16e-6), "sglang": 0.0}.items():
        steps = [
            predict(dense_model(NUM_LAYERS), quick, WORKLOAD, BUDGET, RESIDENT, of).decode.step_s
            for of in (None, engine)
        ]
        assert steps[1] - steps[0] == pytest.approx(more_s, abs=1e-12)


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_step_of_sglang_copies_and_computes_in_turns(slots: int) -> None:
    step = on("sglang", every(2, slots=slots)).decode
    assert step.step_s == pytest.approx(step.compute_s + step.link_s, rel=1e-9)
    assert step.step_s > on("vllm", every(2, slots=slots)).decode.step_s


@pytest.mark.parametrize(("slots", "ahead"), [(1, 1), (2, 1), (3, 2)])
def test_sglang_copies_less_ahead_and_that_twice_in_a_step(slots: int, ahead: int) -> None:
    """Of four layers; a prompt is alike where vLLM has as many slots as SGLang copies ahead."""
    plan, alike = every(2, slots=slots), every(2, slots=ahead)
    assert on("sglang", plan).prefill == on("vllm", alike).prefill
    ours, theirs = on("sglang", plan).decode, on("vllm", plan).decode
    layers = NUM_LAYERS // 2
    assert ours.link_bytes * layers == theirs.link_bytes * (layers + ahead)
    copying_s = ours.link_s / (layers + ahead)
    # beside layers, and to begin and be awaited
    assert theirs.link_s == pytest.approx(layers * (1.04 * copying_s + 15e-6))
    assert ours.compute_s == theirs.compute_s


def test_a_layer_waits_for_its_copy_and_is_followed_by_that_of_another() -> None:
    """Three layers, two slots: what a slot holds at the end is copied, whether or not it changed.

    vLLM 0.33 starts these copies in this order: ``_get_next_prefetch_index``.
    """
    placement = place(dense_model(6), every(2, slots=2))
    first, second, third = placement.spans(Phase.DECODE)
    passed = build_repeated_pass(placement, 6, Phase.DECODE)
    assert passed.before == passed.after == (first, second)
    assert passed.operations == (
        *(Compute(0), Wait(0, first), Compute(1), Copy(0, third)),
        *(Compute(2), Wait(1, second), Compute(3), Copy(1, second)),
        *(Compute(4), Wait(0, third), Compute(5), Copy(0, first)),
    )


def test_sglang_copies_the_first_layers_in_their_order_after_the_last() -> None:
    """Three layers, two ahead: it has no slots, and starts the copy of the one two further on."""
    (stage,) = hold_by(dense_model(6), "sglang")
    placement, runtime = placements.place(stage, every(2, slots=3)), stage.pass_rules
    assert runtime is not None
    first, second, third = placement.spans(Phase.PREFILL)
    passed = build_engine_pass(runtime, placement, 6, Phase.PREFILL)
    copied = [op.span for op in passed.operations if isinstance(op, Copy)]
    assert copied == [third, first, second]


@pytest.mark.parametrize("phase", ["prefill", "decode"])
@pytest.mark.parametrize("link", [1e9, 1e8])
def test_vllm_computes_beside_copies_and_ends_with_them(phase: str, link: float) -> None:
    """One slot, every second layer: a copy goes on while the layer in between computes."""
    taken = getattr(on("vllm", every(2), link), phase)
    shorter = predict(dense_model(NUM_LAYERS - 1), machine(link), WORKLOAD, BUDGET, RESIDENT)
    layer_s = taken.compute_s - getattr(shorter, phase).compute_s
    copy_s = taken.link_s / (NUM_LAYERS / 2)
    outside_s = taken.compute_s - NUM_LAYERS * layer_s
    gaps_s = (NUM_LAYERS / 2 - 1) * max(copy_s, layer_s)
    assert taken.step_s == pytest.approx(
        layer_s + NUM_LAYERS / 2 * layer_s + gaps_s + copy_s + outside_s, rel=1e-6
    )


def test_each_chunk_streams_again() -> None:
    whole, halves = (on("vllm", every(2, chunk=chunk)) for chunk in (64, 32))
    assert halves.prefill.link_bytes == 2 * whole.prefill.link_bytes
    assert halves.prefill.step_s >= 2 * whole.prefill.link_s
    assert halves.decode == whole.decode


@pytest.mark.parametrize("chunk", [64, 32])
def test_sglang_copies_what_is_to_be_read_in_place(chunk: int) -> None:
    """Once a pass, however many rows it has; vLLM reads it."""
    decision = offload(chunk, max_bytes="64KiB", prefill="uva", decode="uva")
    resident = Offload(prefill_chunk=chunk)
    step, prompt = on("sglang", decision).decode, on("sglang", decision).prefill
    assert step.stall_s == pytest.approx(step.step_s - on("sglang", resident).decode.step_s)
    assert prompt.link_s == pytest.approx(64 // chunk * step.link_s)
    assert prompt.link_bytes == 64 // chunk * step.link_bytes > 0
    assert on("vllm", decision).decode == on(None, decision).decode


QWEN, DEEPSEEK = "qwen3-8b", "deepseek-v2-lite"
IN_PLACE: dict[str, Any] = {"prefill": "uva", "decode": "uva"}
MEASURED = [
    (QWEN, offload(512, group_size=2, num_in_group=1), 135.5, 133.0),
    (QWEN, offload(512, group_size=5, num_in_group=2), 106.4, 103.8),
    (QWEN, offload(512, group_size=4, num_in_group=1), 67.0, 69.8),
    (QWEN, offload(512, max_bytes="7GiB", **IN_PLACE), None, 152.0),
    (
        DEEPSEEK,
        offload(512, max_bytes="14GiB", cpu_offload_params=["experts"], **IN_PLACE),
        None,
        30.7,
    ),
]
"""Plans, and the milliseconds to the first token of 512 and of a step that vLLM 0.25.1 took.

Source: one H200, torch 2.11, batch 1, context 2,048; ``docs/engines.md``.
"""


@pytest.mark.parametrize(("name", "decision", "first_ms", "step_ms"), first_quick(MEASURED))
def test_predictions_are_near_what_vllm_took(
    name: str, decision: Offload, first_ms: float | None, step_ms: float
) -> None:
    """By the profile that comes with offplan, whose layer times are estimated; the docs say so."""
    model = open_model(str(ROOT / "tests" / "models" / name / "config.json"))
    workload = Workload(prompt_tokens=512, output_tokens=128, context=2048)
    found = predict(model, load_profile("h200-pcie5"), workload, BUDGET, decision, "vllm")
    told = {found.prefill.step_s: first_ms, found.decode.step_s: step_ms}
    docs = (ROOT / "docs" / "engines.md").read_text("utf-8")
    for predicted_s, measured_ms in told.items():
        if measured_ms is not None:
            assert 1e3 * predicted_s == pytest.approx(measured_ms, rel=0.05)
            assert f"{measured_ms} / {1e3 * predicted_s:.1f} ms" in docs
