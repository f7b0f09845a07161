"""Offloading changes where weights lie, never what comes out."""

import functools
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from offplan.checkpoint.open import open_model
from offplan.errors import PlanError
from offplan.placement import Phase
from offplan.plan import Rule
from offplan.runtime.generate import Measured, generate
from tests.held import input_embedding
from tests.runtime.conftest import CONFIGS, NUM_LAYERS, save_tiny
from tests.runtime.plans import group, offload, open_session, run_greedily
from tests.tiers import each_value_once

NUM_TOKENS = 6
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])
BATCH = torch.tensor([[3, 14, 15, 9, 26], [58, 9, 7, 9, 3], [2, 38, 4, 6, 2]])


def list_ways() -> list[tuple[int, int, int]]:
    """Patterns and rings that differ: no layers twice, no more slots than layers that stream."""
    ways: dict[tuple[tuple[int, ...], int], tuple[int, int, int]] = {}
    for size in range(1, NUM_LAYERS + 1):
        for number in range(1, size + 1):
            selects = group(size, number).selects_layer
            layers = tuple(filter(selects, range(NUM_LAYERS)))
            for step in (1, 2, 3, 6):
                ways.setdefault((layers, min(step, len(layers))), (size, number, step))
    return list(ways.values())


WAYS = list_ways()
SOME_WAYS = [(1, 1, 2), (2, 1, 1), (3, 2, 3), (4, 1, 1)]
"""With slots for fewer layers than stream, for all of them, and for one alone."""
SEGMENTS: list[tuple[str, ...]] = [(), ("self_attn",), ("mlp",), ("down_proj", "input_layernorm")]


@functools.cache
def run_resident(
    folder: Path, prompt: tuple[tuple[int, ...], ...], chunk: int
) -> list[torch.Tensor]:
    return run_greedily(folder, offload(prefill_chunk=chunk), torch.tensor(prompt))


def assert_same_as_resident(
    folder: Path, *rules: Rule, prefetch_step: int, prompt: torch.Tensor = PROMPT, chunk: int = 64
) -> None:
    resident = run_resident(folder, tuple(map(tuple, prompt.tolist())), chunk)
    decision = offload(*rules, prefetch_step=prefetch_step, prefill_chunk=chunk)
    for late in (False, True):
        got = run_greedily(folder, decision, prompt, late_copies=late)
        assert all(map(torch.equal, got, resident))


def name_way(way: tuple[int, int, int]) -> str:
    return "{}x{}-{}".format(*way)


FIRST, *OTHERS = sorted(CONFIGS)
"""Checkpoints: one for every combination, and others for each part of one."""
CASES = [(FIRST, way, segments) for way in SOME_WAYS for segments in SEGMENTS]
CASES += [
    (name, way, SEGMENTS[(number + shift) % len(SEGMENTS)])
    for shift, name in enumerate(OTHERS)
    for number, way in enumerate(SOME_WAYS)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "way", "segments"), each_value_once(CASES), indirect=["checkpoint"]
)
def test_logits_equal_resident(
    checkpoint: Path, way: tuple[int, int, int], segments: tuple[str, ...]
) -> None:
    group_size, num_in_group, prefetch_step = way
    rule = group(group_size, num_in_group, *segments)
    assert_same_as_resident(checkpoint, rule, prefetch_step=prefetch_step)


@pytest.fixture(scope="module")
def two_kinds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose first layer is dense; the others have experts."""
    return save_tiny("deepseek_v2", tmp_path_factory.mktemp("two_kinds"))


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=name_way)
def test_every_way_through_the_ring(two_kinds: Path, way: tuple[int, int, int]) -> None:
    """Which layers stream through how many slots is the same for every architecture."""
    group_size, num_in_group, prefetch_step = way
    rule = group(group_size, num_in_group)
    assert_same_as_resident(two_kinds, rule, prefetch_step=prefetch_step)


BACKENDS = [("prefetch", "prefetch"), ("prefetch", "uva"), ("uva", "prefetch"), ("uva", "uva")]
BACKEND_CASES = [(FIRST, each, step) for each in BACKENDS for step in (1, 2)]
BACKEND_CASES += [
    (name, each, step) for name in OTHERS for each, step in zip(BACKENDS, (1, 2, 2, 1), strict=True)
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "backends", "prefetch_step"),
    each_value_once(BACKEND_CASES),
    indirect=["checkpoint"],
)
def test_each_phase_has_its_backend(
    checkpoint: Path, backends: tuple[str, str], prefetch_step: int
) -> None:
    prefill, decode = backends
    first = group(2, 1, "mlp", prefill=prefill, decode=decode)
    second = group(1, 1, "self_attn", prefill=decode, decode=prefill)
    assert_same_as_resident(checkpoint, first, second, prefetch_step=prefetch_step, chunk=3)
    assert_same_as_resident(checkpoint, first, prefetch_step=prefetch_step, prompt=BATCH)


@pytest.mark.slow
def test_max_bytes(checkpoint: Path) -> None:
    rule = Rule.model_validate({"max_bytes": "30 KB", "prefill": "uva", "decode": "uva"})
    assert_same_as_resident(checkpoint, rule, prefetch_step=1)


@pytest.mark.slow
def test_embeddings_on_the_host(checkpoint: Path) -> None:
    if input_embedding(open_model(str(checkpoint))) is None:
        with pytest.raises(PlanError, match="tied"):
            run_greedily(checkpoint, offload(embeddings="host"), PROMPT)
        return
    resident = run_resident(checkpoint, tuple(map(tuple, PROMPT.tolist())), 64)
    got = run_greedily(checkpoint, offload(group(2, 1), embeddings="host"), PROMPT)
    assert all(map(torch.equal, got, resident))


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [3, 10])
def test_weights_cross_once_a_prompt(checkpoint: Path, chunk: int) -> None:
    with open_session(checkpoint, offload(group(2, 1), prefetch_step=1, prefill_chunk=chunk)) as s:
        s.prefill(PROMPT)
        slabs = [slab.nbytes for slab in s.loaded.placement.slabs]
        assert s.link.bytes_moved == sum(slabs) + slabs[0]  # the last one is for decode


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_tokens_equal_stock_transformers(checkpoint: Path, chunk: int) -> None:
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    expected = stock.generate(BATCH, max_new_tokens=NUM_TOKENS, do_sample=False, eos_token_id=None)
    with open_session(checkpoint, offload(group(2, 1), prefill_chunk=chunk)) as session:
        measured = Measured()
        tokens = list(generate(session, BATCH, NUM_TOKENS, measured))
    assert torch.equal(torch.stack(tokens, dim=1), expected[:, BATCH.shape[1] :])
    assert len(measured.step_s) == NUM_TOKENS - 1


def test_a_second_request_starts_afresh(checkpoint: Path) -> None:
    with open_session(checkpoint, offload(group(2, 1))) as session:
        first = [t.tolist() for t in generate(session, PROMPT, NUM_TOKENS, Measured())]
        list(generate(session, BATCH, NUM_TOKENS, Measured()))
        assert first == [t.tolist() for t in generate(session, PROMPT, NUM_TOKENS, Measured())]


@pytest.mark.slow
def test_bytes_moved_are_the_slabs(checkpoint: Path) -> None:
    with open_session(checkpoint, offload(group(2, 1), prefetch_step=1)) as session:
        session.warm_up(len(PROMPT), PROMPT.shape[1])
        measured = Measured()
        list(generate(session, PROMPT, NUM_TOKENS, measured))
        slabs = sum(slab.nbytes for slab in session.loaded.placement.slabs)
        assert measured.decode_link_bytes == slabs * (NUM_TOKENS - 1)


def test_decode_reads_what_prefill_left_in_the_ring(checkpoint: Path) -> None:
    """Layers whose slabs prefill left in slots are as good as resident."""
    with open_session(checkpoint, offload(group(1, 1, "mlp", decode="uva"))) as session:
        decode = session.loaded.store.by_phase[Phase.DECODE]
        slots = [(s.data_ptr(), s.data_ptr() + s.nbytes) for s in session.loaded.store.slots]
        kept = {
            name.split(".")[2]
            for name, view in decode.items()
            if any(start <= view.data_ptr() < stop for start, stop in slots)
        }
    assert len(kept) == len(slots) == 2
