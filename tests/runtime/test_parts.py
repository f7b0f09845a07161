"""Prompts that stream a layer's experts in parts: what comes out, and what crosses."""

import functools
import weakref
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offplan import kernel_sizes
from offplan.capabilities.packing import Packing
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError, PlanError
from offplan.forms.form import Form, Kind
from offplan.plan import Offload
from offplan.runtime.forms.experts import multiply_sorted
from offplan.runtime.model import attention
from offplan.runtime.parts import experts as parted_experts
from offplan.runtime.parts.experts import ExpertsInParts, Meeting
from offplan.runtime.rows import Rows
from tests.held import place
from tests.runtime.cached import FEW, Abort, abort_in, run_hostile, run_resident
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import compiled_layers, group, in_parts, offload, open_session
from tests.runtime.quantise import FEW_FORMS, FORMS, save_stored
from tests.tiers import each_value_once, first_quick, others_in_sweep

NAME = "qwen3_moe_tied"
OTHERS = ["deepseek_v2", "gpt_oss", "chunked", "linear_experts", "deepseek_v3"]
"""With shared experts beside, biases, transposed weights, and none of these."""


@functools.cache
def saved(name: str, folder: Path) -> Path:
    if name == "gpt_oss":
        # torch gives a vector's last elements, which fill no register, other last bits; where
        # experts are a few elements wide, these are others in a part
        return save_stored(name, "mxfp4", folder / name, num_experts_per_tok=2)[1]
    return save_tiny(name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parts")


def assert_same(checkpoint: Path, decision: Offload, late: bool = False, *passes: Any) -> None:
    expected = run_resident(checkpoint, decision.prefill_chunk, *passes)
    with open_session(checkpoint, decision, late_copies=late) as session:
        assert all(map(torch.equal, run_hostile(session, *passes), expected))


ATTENTION = group(1, 1, "self_attn", decode="uva")
PLANS = [
    ([in_parts(2)], 64),
    ([in_parts(4)], 3),
    ([in_parts(4, every=2), ATTENTION], 7),
    ([ATTENTION, in_parts(2, every=2)], 1),
    ([in_parts(4, tokens_at_once=9), ATTENTION], 3),
]
"""Rules, and tokens of a chunk."""


@pytest.mark.parametrize(
    ("plan", "late"), each_value_once(product(range(len(PLANS)), (False, True)))
)
@pytest.mark.slow
def test_logits_equal_resident(folder: Path, plan: int, late: bool) -> None:
    checkpoint, (rules, chunk) = saved(NAME, folder), PLANS[plan]
    assert_same(checkpoint, offload(*rules, prefill_chunk=chunk, prefetch_step=1), late)


@pytest.mark.parametrize(
    ("name", "plan"), each_value_once(product(OTHERS, reversed(range(len(PLANS)))))
)
@pytest.mark.slow
def test_other_families_equal_resident(folder: Path, name: str, plan: int) -> None:
    """By copies that are late or not: which is no matter of the family."""
    checkpoint, few, (rules, chunk) = saved(name, folder), (5, 3, FEW[2]), PLANS[plan]
    decision = offload(*rules, prefill_chunk=chunk, prefetch_step=1)
    assert_same(checkpoint, decision, plan % 2 == 0, *few)


@pytest.mark.parametrize(
    ("name", "chunk"),
    others_in_sweep(
        [("qwen3_moe_tied", 3), ("qwen3_moe_tied", 7), ("sinks", 3), ("linear_experts", 3)],
        [("qwen3_moe_tied", 7), ("sinks", 3)],
    ),
)
@pytest.mark.slow
def test_chunks_that_meet_parts_together(
    name: str, chunk: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As on a GPU; a part's pairs are then more than those of one chunk, and come in pieces."""
    checkpoint = save_tiny(name, tmp_path)
    monkeypatch.setattr(
        ExpertsInParts,
        "meet",
        lambda self, chunks: [Meeting(self._experts, chunks, self._parts, is_joined=True)],
    )
    sorted_pieces: list[int] = []

    def see(*given: Any, **how: Any) -> torch.Tensor:
        sorted_pieces.append(len(given[1]))
        return multiply_sorted(*given, **how)

    monkeypatch.setattr(parted_experts, "multiply_sorted", see)
    expected, others = (run_resident(checkpoint, of) for of in (chunk, 64))
    # on some processors sums of other chunks, in another order, lie further apart than that
    apart = max((a - b).abs().max().item() for a, b in zip(expected, others, strict=True))
    with open_session(checkpoint, offload(in_parts(2), prefill_chunk=chunk)) as session:
        for got, right in zip(run_hostile(session), expected, strict=True):
            torch.testing.assert_close(got, right, atol=max(1e-5, apart), rtol=1e-5)
    assert sorted_pieces


def test_chunks_that_are_multiplied_alike_meet_parts_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A last chunk of few tokens multiplies codes where those before it multiply values."""
    met: list[tuple[Any, bool]] = []

    def meet(experts: Any, chunks: Any, parts: Any, is_joined: bool) -> None:
        met.append((chunks, is_joined))

    monkeypatch.setattr(parted_experts, "Meeting", meet)
    stored = SimpleNamespace(form=Form(Kind.MXFP4, (1, 32)))
    experts: Any = SimpleNamespace(stored_experts={"down_proj": stored}, num_experts=8)
    parted: Any = SimpleNamespace(_experts=experts, _parts=[])
    hidden = SimpleNamespace(is_cuda=True, dtype=torch.bfloat16)
    least = 8 * kernel_sizes.GROUPED_ROWS["mxfp4"] // 2
    chunks: Any = [
        SimpleNamespace(hidden=hidden, chosen=torch.zeros(tokens, 2))
        for tokens in (least, least, least - 1)
    ]
    for rows in ({}, kernel_sizes.GROUPED_ROWS):
        monkeypatch.setattr(kernel_sizes, "GROUPED_ROWS", rows)
        ExpertsInParts.meet(parted, chunks)
    assert met == [(chunks, True), (chunks[:2], True), (chunks[2:], True)]


class Repeated(TorchDispatchMode):
    """Stands in for a CUDA graph: notes what is computed, and computes it again in place."""

    def __init__(self) -> None:
        super().__init__()
        self._noted: list[tuple[Any, ...]] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self._noted.append((function, args, kwargs or {}, made))
        return made

    def capture_begin(self, **_: object) -> None:
        self.__enter__()

    def capture_end(self) -> None:
        self.__exit__(None, None, None)

    def replay(self) -> None:
        for function, args, kwargs, made in self._noted:
            again = function(*args, **kwargs)
            for old, new in zip(tree_leaves(made), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


@pytest.mark.parametrize("name", first_quick(["qwen3_moe_tied", "deepseek_v2"]))
@pytest.mark.slow
def test_captured_prompts_wait_for_their_own_choices(
    folder: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts are multiplied between graphs, at each replay by what its tokens chose."""
    checkpoint = saved(name, folder)
    decision = offload(in_parts(4, tokens_at_once=9), prefill_chunk=3, prefetch_step=1)
    texts = torch.randint(0, 64, (5, 2, 14), generator=torch.Generator().manual_seed(0))
    graphs: list[Repeated] = []

    def begin() -> Repeated:
        graphs.append(Repeated())
        return graphs[-1]

    def see_before(num_new: int, num_kept: int) -> torch.Tensor:
        return torch.ones(num_new, num_kept, dtype=torch.bool).tril(num_kept - num_new)

    def run(*, is_captured: bool) -> list[torch.Tensor]:
        logits = []
        with open_session(checkpoint, decision, late_copies=True) as session:
            session.runner.captures_prompt = lambda *_: is_captured
            for text in texts:
                logits.append(session.prefill(text).clone())
                logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
        return logits

    monkeypatch.setattr(torch.cuda, "CUDAGraph", begin)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    # no tensors of their own class, which the stand-in cannot note
    monkeypatch.setattr(attention, "causal_lower_right", see_before)
    expected = run(is_captured=False)
    assert not graphs
    assert all(map(torch.equal, run(is_captured=True), expected))
    assert graphs


WHOLE_PROMPTS = ["fp8_block", "int4", "mxfp4"]
"""Forms of which prompts are read whole too: bytes, words, and experts stored together."""


STORED = [*(("qwen3_moe", form) for form in FORMS)]
STORED += [("deepseek_v3", "fp8_block"), ("gpt_oss", "mxfp4")]
IN_PARTS = [(*case, *way) for case in STORED for way in ((2, 7, None), (4, 7, 14))]
IN_PARTS += [("qwen3_moe", form, 4, 40, None) for form in WHOLE_PROMPTS]
"""Families, forms, numbers of parts, tokens of a chunk and at once."""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form", "num_parts", "chunk", "at_once"),
    each_value_once(IN_PARTS, of=[case for case in IN_PARTS if case[1] in (*FEW_FORMS, "mxfp4")]),
)
def test_stored_forms_equal_resident(
    family: str, form: str, num_parts: int, chunk: int, at_once: int | None, tmp_path: Path
) -> None:
    # one layer more than the ring has slots
    stored, _ = save_stored(family, form, tmp_path, num_experts_per_tok=2, num_hidden_layers=3)
    rule = in_parts(num_parts, tokens_at_once=at_once)
    assert_same(stored, offload(rule, prefill_chunk=chunk), True, *FEW)


@pytest.mark.slow
@pytest.mark.parametrize("family", others_in_sweep(["qwen3_moe", "deepseek_v3"], ["qwen3_moe"]))
def test_packed_experts_equal_resident(family: str, tmp_path: Path) -> None:
    _, plain = save_stored(family, "fp8_block", tmp_path, torch.bfloat16, num_experts_per_tok=2)
    packing = {"packing": Packing(group_size=2, num_in_group=2)}
    logits = []
    for rules in ([], [in_parts(4)], [in_parts(4, tokens_at_once=14)]):
        decision = offload(*rules, prefill_chunk=7).model_copy(update=packing)
        with open_session(plain, decision) as session:
            logits.append(run_hostile(session, *FEW))
    for each in logits[1:]:
        assert all(map(torch.equal, each, logits[0]))


@pytest.mark.slow
def test_experts_by_cores_in_steps_alone(folder: Path) -> None:
    checkpoint = saved("qwen3_moe_tied", folder)
    plain = offload(in_parts(2, decode="uva"), prefill_chunk=7)
    try:
        with open_session(
            checkpoint, offload(in_parts(2, decode="host"), prefill_chunk=7)
        ) as session:
            got = session.prefill(torch.arange(12)[None]).clone()
    except PlanError as error:
        pytest.skip(f"the host's cores do not compute it: {error}")
    with open_session(checkpoint, plain) as session:
        assert torch.equal(got, session.prefill(torch.arange(12)[None]))


@pytest.mark.parametrize("chunk", [3, 10])
def test_each_part_crosses_once_a_prompt(folder: Path, chunk: int) -> None:
    checkpoint = saved("qwen3_moe_tied", folder)
    decision = offload(in_parts(4), prefill_chunk=chunk)
    placement = place(open_model(str(checkpoint)), decision)
    assert placement.slot_sizes == [placement.piece_bytes] * 2
    assert 4 * placement.piece_bytes == max(slab.nbytes for slab in placement.slabs)
    with open_session(checkpoint, decision) as session:
        assert [slot.nbytes for slot in session.loaded.store.slots] == placement.slot_sizes
        logits = session.prefill(torch.arange(10)[None])
        assert session.link_bytes == placement.slab_bytes
        session.decode(logits.argmax(-1, keepdim=True))
        assert session.link_bytes == placement.slab_bytes


@pytest.mark.parametrize(("num_parts", "crossings"), [(4, 3), (2, 1)])
def test_parts_cross_once_for_each_group_of_chunks(
    folder: Path, num_parts: int, crossings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five chunks of two tokens, two at once; of two parts each stays in its slot."""
    waiting: list[int] = []
    alive: weakref.WeakSet[Meeting] = weakref.WeakSet()
    begin, add = Meeting.__init__, Meeting.add

    def note(meeting: Meeting, *given: Any, **named: Any) -> None:
        alive.add(meeting)
        begin(meeting, *given, **named)

    def count(meeting: Meeting, *given: Any) -> None:
        waiting.append(len(alive))
        add(meeting, *given)

    monkeypatch.setattr(Meeting, "__init__", note)
    monkeypatch.setattr(Meeting, "add", count)
    checkpoint = saved("qwen3_moe_tied", folder)
    decision = offload(in_parts(num_parts, tokens_at_once=4), prefill_chunk=2)
    placement = place(open_model(str(checkpoint)), decision)
    with open_session(checkpoint, decision) as session:
        session.prefill(torch.arange(10)[None])
        assert session.link_bytes == crossings * placement.slab_bytes
    assert max(waiting) == 2


@pytest.mark.slow
def test_a_text_of_one_row_has_the_tokens_of_all_rows_meet_a_part(folder: Path) -> None:
    """Seven chunks of one of three rows: six have as many tokens as two of all rows."""
    checkpoint, tokens = saved("qwen3_moe_tied", folder), [*range(13)]
    decision = offload(in_parts(4, tokens_at_once=4), prefill_chunk=2)
    placement = place(open_model(str(checkpoint)), decision)
    with open_session(checkpoint, decision) as session:
        expected = session.prefill(torch.tensor([tokens])).clone()
    with open_session(checkpoint, decision) as session:
        (logits,) = (each.logits.clone() for each in Rows(session, 3).join_all([tokens]))
        assert session.link_bytes == 2 * placement.slab_bytes
    assert torch.equal(logits, expected[0])


@pytest.mark.slow
def test_texts_of_many_logits_and_nan(folder: Path) -> None:
    checkpoint, prompt = saved("qwen3_moe_tied", folder), torch.arange(20).view(2, 10)
    logits, told = [], []
    for rules in ([], [in_parts(2)]):
        with open_session(checkpoint, offload(*rules, prefill_chunk=4)) as session:
            logits.append(torch.cat([each.clone() for each in session.prefill_all(prompt)], 1))
            told.append(session.find_nan(prompt))
    assert torch.equal(*logits)
    assert told[0] == told[1]


@pytest.mark.slow
def test_a_prompt_that_ends_amid_a_layer_leaves_nothing_behind(folder: Path) -> None:
    checkpoint, prompt = saved("qwen3_moe_tied", folder), torch.arange(10)[None]
    with open_session(checkpoint, offload(in_parts(2), prefill_chunk=3)) as session:
        expected = session.prefill(prompt).clone()
        experts: Any = session.loaded.executors["parts"].layers[1]
        add = experts.add

        def fail(*_: Any) -> None:
            raise Abort

        experts.add = fail
        with pytest.raises(Abort):
            session.prefill(prompt)
        experts.add = add
        assert torch.equal(session.prefill(prompt), expected)
        abort_in(session, 1, times=2)
        with pytest.raises(Abort):
            session.prefill(prompt)
        assert torch.equal(session.prefill(prompt), expected)
        assert torch._dynamo.config.recompile_limit < 64


def test_a_layer_that_does_not_call_its_experts(folder: Path) -> None:
    checkpoint = saved("qwen3_moe_tied", folder)
    with open_session(checkpoint, offload(in_parts(2))) as session:
        session.prefill(torch.arange(3)[None])
        session.runner.layers._steps[0] = lambda hidden, **_: hidden
        with pytest.raises(CheckpointError, match="does not call its experts"):
            session.prefill(torch.arange(3)[None])


@pytest.mark.slow
def test_layers_compiled_by_their_pieces(folder: Path) -> None:
    """A prompt's layer is cut at its experts; a step's is compiled whole, as without parts."""
    checkpoint = saved("qwen3_moe_tied", folder)
    decision = offload(in_parts(2, every=2), prefill_chunk=7)
    traced = CompileCounter()
    expected = run_resident(checkpoint, 7, *FEW)
    before = torch._dynamo.config.recompile_limit
    with compiled_layers(traced):
        for _ in range(2):
            with open_session(checkpoint, decision) as session:
                assert all(map(torch.equal, run_hostile(session, *FEW), expected))
                num_traced = traced.frame_count
                logits = session.prefill(torch.arange(28).view(2, 14))
                for _ in range(2):
                    logits = session.decode(logits.argmax(-1, keepdim=True))
        assert traced.frame_count
        assert num_traced
        assert torch._dynamo.config.recompile_limit == before


def test_stock_passes_stream_no_parts(folder: Path) -> None:
    with pytest.raises(PlanError, match=r"transformers' own passes .* plan with `stock=True`"):
        open_session(saved("qwen3_moe_tied", folder), offload(in_parts(2)), stock=True)
