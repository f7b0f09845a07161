"""Passes whose copies end with them: vLLM's and SGLang's."""

import pytest

from offplan.costs.engine_times import EngineTimes, price_on_engine
from offplan.costs.predict import predict
from offplan.plan import Budget, Offload, Rule, Workload
from tests.costs.builders import dense_model, make_machine

WORKLOAD = Workload(prompt_tokens=64, output_tokens=16, context=128)
BUDGET = Budget(gpu_memory=2**30)


def offload(chunk: int = 64, slots: int = 1, **rule: object) -> Offload:
    given = {"prefill": "prefetch", "decode": "prefetch", **rule}
    return Offload(prefetch_step=slots, prefill_chunk=chunk, rules=(Rule.model_validate(given),))


def price(decision: Offload, *, in_turns: bool = False, link: float = 1e9) -> EngineTimes:
    machine = make_machine(h2d=link, uva=link)
    return price_on_engine(dense_model(8), machine, WORKLOAD, decision, copies_in_turns=in_turns)


def own(decision: Offload, link: float = 1e9) -> EngineTimes:
    found = predict(dense_model(8), make_machine(h2d=link, uva=link), WORKLOAD, BUDGET, decision)
    return EngineTimes(found.prefill.step_s, found.decode.step_s)


def test_nothing_is_copied_beside_the_head() -> None:
    """Our own copies go on while the next step begins; theirs wait for nothing and nobody."""
    decision = offload(group_size=2, num_in_group=1)
    assert price(decision).decode_s > own(decision).decode_s
    resident = Offload(prefill_chunk=64)
    assert price(resident) == pytest.approx(own(resident), rel=1e-9)


def test_copies_in_turns() -> None:
    decision = offload(group_size=2, num_in_group=1)
    predicted = predict(dense_model(8), make_machine(h2d=1e9, uva=1e9), WORKLOAD, BUDGET, decision)
    told = price(decision, in_turns=True)
    assert told.decode_s == pytest.approx(predicted.decode.compute_s + predicted.decode.link_s)
    assert told.decode_s >= price(decision).decode_s


def test_each_chunk_streams_again() -> None:
    whole, halves = (price(offload(n, group_size=2, num_in_group=1)) for n in (64, 32))
    assert halves.prefill_s == pytest.approx(2 * whole.prefill_s, rel=0.2)
    assert halves.decode_s == whole.decode_s


def test_what_is_to_be_read_in_place_is_copied() -> None:
    """Once a pass, however many rows it has."""
    decision = offload(max_bytes="64KiB", prefill="uva", decode="uva")
    resident, told = price(Offload(prefill_chunk=64)), price(decision, in_turns=True)
    copied = told.decode_s - resident.decode_s
    assert copied == pytest.approx(told.prefill_s - resident.prefill_s)
    assert copied > 2**16 / 1e9


def test_a_request() -> None:
    assert EngineTimes(2.0, 0.5).request_s(WORKLOAD) == 2 + 16 * 0.5
