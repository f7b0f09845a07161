"""Experts kept one by one on a GPU, compiled and captured, against resident ones."""

import functools
from pathlib import Path

import numpy as np
import pytest
import torch

from offplan.capabilities.cached_experts import ExpertSlots
from offplan.capabilities.packing import Packing
from offplan.routing.use_order import UseOrder
from tests.runtime.cached import (
    Trace,
    cached_of,
    check_slots,
    count_experts,
    keeping,
    prompts,
    run_hostile,
)
from tests.runtime.plans import offload, open_session
from tests.runtime.quantise import save_routed

pytestmark = pytest.mark.gpu

FORMS = ["fp8_block", "fp8_tensor", "int4_zeros", "int8_zeros", "int8_bytes", "awq", "nvfp4"]
FORMS += ["gptq8_v2"]
CASES = [("qwen3_moe", form) for form in ("values", "packed", *FORMS)]
CASES += [("deepseek_v3", "values"), ("deepseek_v3", "fp8_block"), ("gpt_oss", "mxfp4")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


@functools.cache
def run_resident(folder: Path, capture: bool, packing: Packing | None) -> list[torch.Tensor]:
    decision = offload(prefill_chunk=7).model_copy(update={"packing": packing})
    with open_session(folder, decision, "cuda", capture=capture) as session, session.stream():
        return [each.cpu() for each in run_hostile(session, steps_before=0)]


# resident values that are not captured are multiplied by transformers' kernels, not by ours
@pytest.mark.parametrize(
    ("family", "form", "capture"),
    [
        *((*case, True) for case in CASES),
        *((*case, False) for case in CASES if "values" not in case),
    ],
)
def test_logits_equal_resident(folder: Path, family: str, form: str, capture: bool) -> None:
    """Captured, with slots for all of a step's experts, for some and for one."""
    checkpoint, packing = save_routed(folder, family, form, 2)
    expected = run_resident(checkpoint, capture, packing)
    for num, prefill in ((1, "prefetch"), (2, "uva"), (3, "prefetch")):
        rule = keeping(num, 1 if num == 2 else None, prefill)
        decision = offload(rule, prefill_chunk=7).model_copy(update={"packing": packing})
        with open_session(checkpoint, decision, "cuda", capture=capture) as session:
            with session.stream():
                got = [each.cpu() for each in run_hostile(session, steps_before=0)]
            counts = count_experts(session).values()
            differences = [(a - b).abs().max().item() for a, b in zip(got, expected, strict=True)]
            assert differences == [0.0] * len(expected)
            assert any(count.hits for count in counts)
            assert any(count.copied for count in counts)


@pytest.mark.parametrize("num", [1, 2, 3])
def test_counts_are_those_of_a_list_of_the_trace(folder: Path, num: int) -> None:
    checkpoint, _ = save_routed(folder, "qwen3_moe", "fp8_block", 2)
    decision = offload(keeping(num), prefill_chunk=7)
    with open_session(checkpoint, decision, "cuda", capture=False) as session, session.stream():
        session.warm_up(1, 7)
        trace = Trace(session, 2)
        num_experts = session.loaded.model.experts.num_experts  # type: ignore[union-attr]
        orders = {index: UseOrder(1, num_experts) for index in trace.calls}
        total = np.zeros((len(orders), 2, num_experts + 1), np.int64)
        for prompt in prompts(1):
            logits = session.prefill(prompt)
            trace.drop_allocating_pass(prompt.numel())
            trace.pass_over(orders, len(prompt), is_step=False)
            check_slots(session, orders)
            for _ in range(6):
                logits = session.decode(logits.argmax(-1, keepdim=True))
                total += trace.pass_over(orders, len(prompt), is_step=True)
                check_slots(session, orders)
        counts = count_experts(session)
    for row, (index, found) in enumerate(counts.items()):
        slots = session.loaded.placement.caches_of(ExpertSlots)[index]
        assert found.hits == total[row, 0, num]
        assert found.hits + found.misses == total[row, 1, 0]
        assert found.copied_bytes == found.copied * slots.expert_bytes


def test_two_sessions_one_after_the_other(folder: Path) -> None:
    checkpoint, _ = save_routed(folder, "qwen3_moe", "values", 2)
    decision = offload(keeping(2), prefill_chunk=7)
    runs = []
    for _ in range(2):
        session = open_session(checkpoint, decision, "cuda")
        with session.stream():
            runs.append([each.cpu() for each in run_hostile(session, steps_before=0)])
        store, memory = session.loaded.store, cached_of(session)._memory
        assert memory
        held = [store.arena, *store.slots, *memory.values()]
        num_bytes = sum(tensor.nbytes for tensor in held)
        del held, memory, store
        # not against what was there before: cuBLAS keeps a workspace for each session's stream
        before = torch.cuda.memory_allocated()
        session.close()
        assert before - torch.cuda.memory_allocated() >= num_bytes
    assert all(map(torch.equal, *runs))
