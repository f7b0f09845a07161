"""A second GPU as the store, on two GPUs: the same logits, and memory that really moved there."""

import gc
from pathlib import Path

import pytest
import torch

from offplan.checkpoint.open import open_model
from offplan.placement import Phase
from offplan.plan import Rule
from offplan.runtime.measuring.versus import measure_plan, measure_serial
from offplan.runtime.session import Session
from tests.held import input_embedding, place
from tests.runtime.plans import CONTEXT, group, make_bench, offload, open_session
from tests.runtime.resident import NUM_TOKENS, PROMPT, check_against_resident

TWO_GPUS = torch.cuda.device_count() > 1 and torch.cuda.can_device_access_peer(1, 0)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not TWO_GPUS, reason="needs two CUDA devices with peer access"),
]

RULES: dict[str, tuple[Rule, ...]] = {
    "every layer": (group(1, 1),),
    "every second layer": (group(2, 1),),
    "attention": (group(1, 1, "self_attn"),),
    "in chunks": (group(2, 1, "mlp"),),
}


@pytest.mark.parametrize(
    ("prefetch_step", "capture"), [(1, True), (2, True), (3, True), (2, False)]
)
@pytest.mark.parametrize("name", RULES)
def test_logits_equal_resident(
    checkpoint: Path, name: str, prefetch_step: int, capture: bool
) -> None:
    chunk = 4 if name == "in chunks" else 10
    untied = input_embedding(open_model(str(checkpoint))) is not None
    decision = offload(
        *RULES[name],
        prefetch_step=prefetch_step,
        prefill_chunk=chunk,
        embeddings="host" if untied and name == "attention" else "device",
        store="peer",
    )
    check_against_resident(checkpoint, decision, capture)


def allocated() -> tuple[int, int]:
    """Bytes that torch has given out on each GPU, less those of sessions that are gone."""
    gc.collect()
    return torch.cuda.memory_allocated(0), torch.cuda.memory_allocated(1)


def test_slabs_lie_on_the_peer_and_cross_each_step(checkpoint: Path) -> None:
    before = allocated()
    with open_session(checkpoint, offload(), "cuda:0"):
        resident = allocated()[0] - before[0]
        assert allocated()[1] == before[1]
    before = allocated()
    decision = offload(group(1, 1, "mlp"), prefetch_step=1, store="peer")
    with open_session(checkpoint, decision, "cuda:0") as session, session.stream():
        store, placement = session.loaded.store, session.loaded.placement
        assert store.slab_device == torch.device("cuda", 1)
        assert {slab.device for slab in store.slabs.values()} == {store.slab_device}
        assert allocated()[0] - before[0] < resident
        assert allocated()[1] - before[1] >= placement.slab_bytes > 0
        session.warm_up(*PROMPT.shape)  # a step runs once more before it is captured
        tokens = session.prefill(PROMPT).argmax(-1, keepdim=True)
        moved = session.link.bytes_moved
        for _ in range(NUM_TOKENS):
            tokens = session.decode(tokens).argmax(-1, keepdim=True)
        assert session.link.bytes_moved - moved == NUM_TOKENS * placement.slab_bytes


def test_the_second_gpu_computes_and_the_first_stores(checkpoint: Path) -> None:
    """Whatever device is the current one, streams and events are of the right one."""
    logits = []
    for decision in (offload(), offload(group(2, 1), store="peer")):
        with torch.cuda.device(1), open_session(checkpoint, decision, "cuda:1") as session:
            if decision.rules:
                assert session.loaded.store.slab_device == torch.device("cuda", 0)
            session.warm_up(*PROMPT.shape)
            with session.stream():
                logits.append([session.prefill(PROMPT).cpu()])
                for _ in range(NUM_TOKENS):
                    tokens = logits[-1][-1].argmax(-1, keepdim=True).to("cuda:1")
                    logits[-1].append(session.decode(tokens).cpu())
    assert all(map(torch.equal, *logits))


def test_random_weights_are_those_of_a_resident_model(checkpoint: Path) -> None:
    model = open_model(str(checkpoint))
    logits = []
    for decision in (offload(), offload(group(2, 1), store="peer")):
        with Session(model, decision, context=CONTEXT, device="cuda") as session, session.stream():
            session.prefill(PROMPT)
            logits.append(session.decode(torch.zeros_like(PROMPT[:, :1]).cuda()).cpu())
    assert torch.equal(*logits)


def test_benchmarks_time_the_peer_link(checkpoint: Path) -> None:
    decision = offload(group(2, 1), prefetch_step=1, store="peer")
    bench = make_bench(checkpoint, decision, PROMPT, "cuda")
    spans = place(bench.model, bench.offload).spans(Phase.DECODE)
    for measure in (measure_plan, measure_serial):
        cost = measure(bench)
        assert cost.decode.link_bytes == sum(span.nbytes for span in spans)
        assert cost.link_bytes_per_s is not None
