"""A second GPU as the store: how it is found, and that nothing else changes."""

import functools
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import pytest
import torch

from offplan.checkpoint.open import open_model
from offplan.errors import MemoryLimitError
from offplan.held.held import hold
from offplan.hostmem import limits
from offplan.plan import Offload, Rule
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading.prepared import fit
from offplan.runtime.memory.store import allocate
from offplan.runtime.peer import PeerExecutor, find_peer
from offplan.runtime.session import Session
from tests.held import input_embedding
from tests.runtime.conftest import CONFIGS
from tests.runtime.plans import CONTEXT, group, offload, open_session
from tests.tiers import each_value_once

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])
NUM_TOKENS = 6
CUDA_0 = torch.device("cuda", 0)
CPU = torch.device("cpu")


@functools.cache
def run_resident(folder: Path) -> list[torch.Tensor]:
    return generate(open_session(folder, offload()))


def generate(session: Session) -> list[torch.Tensor]:
    with session, session.stream():
        logits = [session.prefill(PROMPT).clone()]
        for _ in range(NUM_TOKENS):
            logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
        return logits


@dataclass(frozen=True)
class GPU:
    """What the driver says of a GPU other than the first."""

    free: int
    cached: int = 0
    reachable: bool = True


def show(monkeypatch: pytest.MonkeyPatch, *gpus: GPU) -> None:
    """Stand these in behind a first GPU, which alone is asked nothing."""
    reserved = {number: 5 + gpu.cached for number, gpu in enumerate(gpus, 1)}
    answers = {
        "device_count": lambda: 1 + len(gpus),
        "current_device": lambda: 0,
        "can_device_access_peer": lambda peer, own: own == 0 and gpus[peer - 1].reachable,
        "mem_get_info": lambda number: (gpus[number - 1].free, 100),
        "memory_reserved": reserved.__getitem__,
        "memory_allocated": lambda number: 5,
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)


@pytest.mark.parametrize(
    ("gpus", "chosen"),
    [
        ([GPU(free=60), GPU(free=90)], 1),
        ([GPU(free=59), GPU(free=90)], 2),
        ([GPU(free=90, reachable=False), GPU(free=60)], 2),
        ([GPU(free=20, cached=40)], 1),
    ],
)
@pytest.mark.parametrize("device", ["cuda", "cuda:0"])
def test_the_first_with_access_and_room_is_taken(
    monkeypatch: pytest.MonkeyPatch, gpus: list[GPU], chosen: int, device: str
) -> None:
    show(monkeypatch, *gpus)
    assert find_peer(torch.device(device), 60) == torch.device("cuda", chosen)


@pytest.mark.parametrize(
    ("gpus", "found"),
    [
        ([], "no other GPU"),
        ([GPU(free=59)], "cuda:1 with 59 B free"),
        (
            [GPU(free=90, reachable=False), GPU(free=5, cached=7)],
            "cuda:1 without peer access to cuda:0, cuda:2 with 12 B free",
        ),
    ],
)
def test_without_a_peer_nothing_is_loaded(
    monkeypatch: pytest.MonkeyPatch, gpus: list[GPU], found: str
) -> None:
    show(monkeypatch, *gpus)
    expected = f"needs a second GPU with peer access to cuda:0 and 60 B free; found {found}. Close"
    with pytest.raises(MemoryLimitError, match=expected):
        find_peer(CUDA_0, 60)


def test_a_peer_that_fills_up_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch, "empty", refuse)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (7, 100))
    with pytest.raises(MemoryLimitError, match=r"cuda:1 has no room for 60 B .* 7 B are free"):
        allocate(60, torch.device("cuda", 1), "offloaded weights")


RULES: dict[str, tuple[Rule, ...]] = {
    "every second layer": (group(2, 1),),
    "down_proj": (group(1, 1, "down_proj"),),
    "two rules": (group(2, 1, "mlp"), group(1, 1, "self_attn")),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "rules", "late"),
    each_value_once(product(sorted(CONFIGS), RULES.values(), [False, True])),
    indirect=["checkpoint"],
)
def test_logits_equal_resident(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, rules: tuple[Rule, ...], late: bool
) -> None:
    resident = run_resident(checkpoint)
    on_host = open_session(checkpoint, offload(*rules), late_copies=late)
    assert all(map(torch.equal, generate(on_host), resident))
    decision = offload(*rules, store="peer")
    # on the CPU, host memory stands in for a peer
    without = open_session(checkpoint, decision, late_copies=late)
    assert without.loaded.store.slab_device is None
    assert all(map(torch.equal, generate(without), resident))
    # and the CPU for a GPU, of which nothing but memory is asked
    monkeypatch.setattr(PeerExecutor, "slab_device", CPU)
    within = open_session(checkpoint, decision, late_copies=late)
    assert within.loaded.store.slab_device == CPU
    assert all(map(torch.equal, generate(within), resident))
    assert within.link.bytes_moved == without.link.bytes_moved == on_host.link.bytes_moved > 0


@pytest.mark.parametrize(
    ("decision", "asks"),
    [
        (offload(group(2, 1), store="peer"), True),
        (offload(group(2, 1)), False),
        (offload(store="peer"), False),
    ],
    ids=["peer", "host", "nothing offloaded"],
)
def test_a_gpu_is_asked_for_the_slabs_alone(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, decision: Offload, asks: bool
) -> None:
    peer = torch.device("cuda", 1)
    asked = []
    monkeypatch.setattr(
        "offplan.runtime.peer.find_peer", lambda *given: asked.append(given) or peer
    )
    prepared = fit(hold(open_model(str(checkpoint))), decision, EXECUTORS, CUDA_0)
    for each in prepared.executors.values():
        each.prepare(CUDA_0, None)
    assert asked == [(CUDA_0, prepared.placement.slab_bytes)] * asks
    assert prepared.slab_device == (peer if asks else None)


def test_a_peer_takes_no_host_memory(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_room", lambda *_: iter([(0, "the cgroup /x")]))
    monkeypatch.setattr(PeerExecutor, "slab_device", CPU)
    with open_session(checkpoint, offload(group(2, 1), store="peer")) as session:
        assert session.loaded.placement.offloaded_bytes > 0
    if input_embedding(open_model(str(checkpoint))) is not None:
        decision = offload(group(2, 1), store="peer", embeddings="host")
        with pytest.raises(MemoryLimitError, match="the weights take 8 KiB of host memory"):
            open_session(checkpoint, decision)


@pytest.mark.slow
def test_random_weights_are_the_same_wherever_they_lie(checkpoint: Path) -> None:
    model = open_model(str(checkpoint))
    decisions = [offload(), offload(group(2, 1)), offload(group(1, 1, "mlp"), store="peer")]
    logits = [
        generate(Session(model, decision, context=CONTEXT, device="cpu")) for decision in decisions
    ]
    assert all(map(torch.equal, logits[0], logits[1]))
    assert all(map(torch.equal, logits[0], logits[2]))
