"""Experts kept on the GPU one by one: what comes out, what is there, and what is counted."""

import functools
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers import AutoModelForCausalLM, PhimoeConfig, Qwen3MoeConfig

from offplan.capabilities.cached_experts import ExpertSlots
from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.errors import PlanError
from offplan.plan import Offload, Rule
from offplan.routing.use_order import UseOrder
from offplan.runtime.cached_experts import experts as cached
from offplan.runtime.rows import Rows
from offplan.runtime.session import Session
from tests.runtime.cached import (
    FEW,
    Abort,
    Trace,
    abort_in,
    cached_of,
    check_slots,
    count_experts,
    keeping,
    prompts,
    run_hostile,
    run_resident,
)
from tests.runtime.conftest import SIZES, save_tiny
from tests.runtime.plans import compiled_layers, offload, open_session
from tests.runtime.quantise import FEW_FORMS, FORMS, save_stored
from tests.tiers import each_value_once, first_quick, others_in_sweep

NUM_EXPERTS = 4
NAMES = ["qwen3_moe_tied"]
NAMES += ["deepseek_v2", "sinks", "chunked", "linear_experts", "deepseek_v3"]
"""With shared experts beside, biases, transposed weights, and none of these."""


@functools.cache
def saved(name: str, folder: Path) -> Path:
    return save_tiny(name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


PREFILLS = ("prefetch", 64), ("prefetch", 3), ("uva", 7)
"""How prompts are read, and their chunks."""


@pytest.mark.parametrize(
    ("name", "num"), each_value_once(product(NAMES, range(1, NUM_EXPERTS + 1)))
)
@pytest.mark.slow
def test_logits_equal_resident(folder: Path, name: str, num: int) -> None:
    """Each number of slots with prompts read in each way; in other families in one of the ways."""
    checkpoint = saved(name, folder)
    for prefill, chunk in PREFILLS if name == NAMES[0] else [PREFILLS[num % len(PREFILLS)]]:
        expected = run_resident(checkpoint, chunk)
        rule = keeping(num, 1 if num < NUM_EXPERTS else None, prefill)
        with open_session(checkpoint, offload(rule, prefill_chunk=chunk)) as session:
            got = run_hostile(session)
        assert all(map(torch.equal, got, expected))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num", "prefill", "name"),
    each_value_once(product([1, 2, 3, 4], ["prefetch", "uva"], NAMES[:2])),
)
def test_counts_are_those_of_a_list_of_the_trace(
    folder: Path, name: str, prefill: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = count_copied_bytes(monkeypatch)
    rule = keeping(num, 1 if num == 2 else None, prefill)
    with open_session(saved(name, folder), offload(rule, prefill_chunk=7)) as session:
        session.warm_up(1, 7)
        trace = Trace(session, 2)
        orders = {index: UseOrder(1, NUM_EXPERTS) for index in trace.calls}
        total = np.zeros((len(orders), 2, NUM_EXPERTS + 1), np.int64)
        step_bytes = 0
        for prompt in prompts(1):
            logits = session.prefill(prompt)
            trace.drop_allocating_pass(prompt.numel())
            trace.pass_over(orders, len(prompt), is_step=False)
            check_slots(session, orders)
            copied.clear()
            for _ in range(6):
                logits = session.decode(logits.argmax(-1, keepdim=True))
                total += trace.pass_over(orders, len(prompt), is_step=True)
                check_slots(session, orders)
            step_bytes += sum(copied)
        counts = count_experts(session)
        slots = session.loaded.placement.caches_of(ExpertSlots)
        assert list(counts) == list(orders)
        for row, (index, found) in enumerate(counts.items()):
            assert found.hits == total[row, 0, slots[index].num_slots]
            assert found.hits + found.misses == total[row, 1, 0]
            assert found.copied_bytes == found.copied * slots[index].expert_bytes
        assert sum(found.copied_bytes for found in counts.values()) == step_bytes
        session.warm_up(1, 7)
        assert all(not (c.hits or c.misses) for c in count_experts(session).values())


STORED = [*(("qwen3_moe", form) for form in FORMS)]
STORED += [("deepseek_v3", "fp8_block"), ("gpt_oss", "mxfp4")]
WAYS = [(1, "prefetch"), (3, "uva")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form", "num", "prefill"),
    each_value_once(
        ((*case, *way) for case in STORED for way in WAYS),
        of=[(*case, *way) for case in STORED if case[1] in (*FEW_FORMS, "mxfp4") for way in WAYS],
    ),
)
def test_stored_forms_equal_resident(
    family: str, form: str, num: int, prefill: str, tmp_path: Path
) -> None:
    stored, _ = save_stored(family, form, tmp_path, num_experts_per_tok=2)
    expected = run_resident(stored, 7, *FEW)
    decision = offload(keeping(num, prefill=prefill), prefill_chunk=7)
    with open_session(stored, decision) as session:
        assert all(map(torch.equal, run_hostile(session, *FEW), expected))
        assert any(count.hits for count in count_experts(session).values())


@pytest.mark.slow
@pytest.mark.parametrize("family", others_in_sweep(["qwen3_moe", "deepseek_v3"], ["deepseek_v3"]))
def test_packed_experts_equal_resident(family: str, tmp_path: Path) -> None:
    _, plain = save_stored(family, "fp8_block", tmp_path, torch.bfloat16, num_experts_per_tok=2)
    packing = {"packing": Packing(group_size=2, num_in_group=2)}
    with open_session(plain, offload(prefill_chunk=7).model_copy(update=packing)) as session:
        expected = run_hostile(session, *FEW)
    for num in (1, 3):
        decision = offload(keeping(num), prefill_chunk=7).model_copy(update=packing)
        with open_session(plain, decision) as session:
            assert all(map(torch.equal, run_hostile(session, *FEW), expected))
            assert any(count.hits for count in count_experts(session).values())


def count_copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of each copy into slots, as the tensors have them."""
    copied: list[int] = []

    def copy(table: Any, sources: Any, slots: Any, runs: Any) -> None:
        before = {name: slot.clone() for name, slot in slots.items()}
        for slot in slots.values():
            slot.view(torch.uint8).fill_(0xA5)
        own(table, sources, slots, runs)
        for name, slot in slots.items():
            rows = slot.view(torch.uint8).flatten(1)
            is_written = (rows != 0xA5).any(1)
            copied.append(int(is_written.sum()) * rows.shape[1])
            rows[~is_written] = before[name].view(torch.uint8).flatten(1)[~is_written]

    own = cached.copy_missed
    monkeypatch.setattr(cached, "copy_missed", copy)
    return copied


@pytest.mark.slow
def test_compiled_layers_with_slots_run_no_code_of_those_without(folder: Path) -> None:
    """All layers of a class share what was compiled: of resident experts, and of those that go."""
    checkpoint, decision = saved("qwen3_moe_tied", folder), offload(keeping(1), prefill_chunk=7)
    traced = CompileCounter()

    def run(rules: Offload) -> tuple[list[torch.Tensor], dict[int, Any]]:
        with open_session(checkpoint, rules) as session:
            return run_hostile(session, 3, 2, (3, 0), 14), count_experts(session)

    logits, counts = run(decision)
    assert all(found.hits and found.copied for found in counts.values())
    with compiled_layers(traced):
        assert all(map(torch.equal, run(offload(prefill_chunk=7))[0], logits))
        for _ in range(2):
            got, found = run(decision)
            assert all(map(torch.equal, got, logits))
            assert found == counts
    assert traced.frame_count


def test_more_pairs_than_kernels_sort(folder: Path) -> None:
    with open_session(saved("deepseek_v2", folder), offload(keeping(2))) as session:
        session.prefill(torch.zeros(512, 1, dtype=torch.int64))
        with pytest.raises(PlanError, match="run 512 sequences at a time"):
            session.prefill(torch.zeros(513, 1, dtype=torch.int64))


def test_memory_holds_the_slots(folder: Path) -> None:
    with open_session(saved("deepseek_v2", folder), offload(keeping(2, every=1))) as session:
        memory, placement = cached_of(session)._memory, session.loaded.placement
        assert sum(m.nbytes for m in memory.values()) == sum(placement.cached_bytes.values())
        for index, layer in cached_of(session).layers.items():
            views = [layer.table.memory, *layer.slots.values()]
            begin = memory[index].data_ptr()
            stop = begin + memory[index].nbytes
            assert all(begin <= v.data_ptr() <= v.data_ptr() + v.nbytes <= stop for v in views)
        experts = [layer.experts for layer in cached_of(session).layers.values()]
    assert not memory
    assert not cached_of(session).layers
    assert not any("slots" in vars(each) for each in experts)


@pytest.mark.slow
@pytest.mark.parametrize("num", first_quick([1, 2]))
def test_texts_that_join_and_leave_beside_a_prompt_that_fails(tmp_path: Path, num: int) -> None:
    """Texts of unlike lengths in rows of the cache have the resident logits, bit for bit."""
    path = save_tiny("qwen3_moe_tied", tmp_path)
    texts = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [7, 3], [5, 5, 1, 2]]

    def run(*rules: Rule) -> tuple[list[torch.Tensor], int]:
        made = []
        with open_session(path, offload(*rules, prefill_chunk=4)) as session:
            rows = Rows(session, 2)
            first = rows.join(texts[0])
            made.append(first.logits.clone())
            for token in (3, 4):
                made.append(rows.step({first.row: token})[first.row].clone())
            second = rows.join(texts[1])
            made.append(second.logits.clone())
            made += [each.clone() for each in rows.step({first.row: 1, second.row: 2}).values()]
            rows.leave(second.row)
            abort_in(session, 1)
            with pytest.raises(Abort):
                rows.join(texts[2])
            made.append(rows.step({first.row: 6})[first.row].clone())
            third = rows.join(texts[2])
            made.append(third.logits.clone())
            for tokens in ((3, 4), (9, 9), (2, 8)):
                stepped = rows.step(dict(zip((first.row, third.row), tokens, strict=True)))
                made += [stepped[row].clone() for row in (first.row, third.row)]
            return made, sum(each.hits for each in count_experts(session).values())

    expected, _ = run()
    got, hits = run(keeping(num))
    assert hits
    assert all(map(torch.equal, got, expected))


@pytest.mark.slow
def test_a_router_that_heeds_no_number_of_the_config(tmp_path: Path) -> None:
    """Phi-MoE's chooses two experts, and so does the plan."""
    config = PhimoeConfig(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=NUM_EXPERTS,
        num_experts_per_tok=3,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stock.save_pretrained(tmp_path)
    text = [3, 14, 15, 9, 26]
    with open_session(tmp_path, offload(keeping(2, every=1))) as session:
        got = [session.prefill(torch.tensor([text])).clone()]
        got.append(session.decode(torch.tensor([[7]])).clone())
    with torch.inference_mode():
        wanted = stock(torch.tensor([[*text, 7]]), use_cache=False).logits[0, -2:]
    assert torch.allclose(torch.cat(got), wanted, atol=1e-5)


@pytest.mark.slow
def test_random_weights_choose_experts_evenly(tmp_path: Path) -> None:
    """Small embeddings had 886 of 1,200 choices be those of the token before."""
    config = Qwen3MoeConfig(
        **SIZES
        | {"hidden_size": 256, "num_hidden_layers": 12, "vocab_size": 500}
        | {"moe_intermediate_size": 32, "num_experts": 32, "num_experts_per_tok": 2},
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(tmp_path)
    model, draw = open_model(str(tmp_path / "config.json")), torch.Generator().manual_seed(0)
    decision = offload(keeping(2, None, "uva", every=1))
    with Session(model, decision, context=160, device="cpu") as session, session.stream():
        session.prefill(torch.randint(0, 500, (1, 100), generator=draw))
        for _ in range(50):
            session.decode(torch.randint(0, 500, (1, 1), generator=draw))
        hits = sum(each.hits for each in count_experts(session).values())
    assert hits == pytest.approx(50 * 12 * 2 * 2 / 32, rel=0.3)
