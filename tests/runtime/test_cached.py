"""Experts kept on the GPU one by one: what comes out, what is there, and what is counted."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offplan.errors import PlanError
from offplan.plan import Rule
from offplan.routing.use_order import UseOrder
from offplan.runtime.forms.expert_table import NOTED_TOKENS
from offplan.runtime.model import cached
from offplan.runtime.session import Session
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import offload, open_session

NUM_EXPERTS = 4
NAMES = ["qwen3_moe_tied", "deepseek_v2", "sinks", "chunked", "linear_experts", "deepseek_v3"]
"""With shared experts beside, biases, transposed weights, and none of these."""


def keeping(num: int, more: int | None = None, prefill: str = "prefetch", every: int = 2) -> Rule:
    return Rule.model_validate(
        {
            "cpu_offload_params": ["experts"],
            "group_size": every,
            "num_in_group": 1,
            "prefill": prefill,
            "decode": "uva",
            "cached_experts": num,
            "cached_experts_more": more,
        }
    )


@functools.cache
def saved(name: str, folder: Path) -> Path:
    return save_tiny(name, folder / name)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cached")


class Abort(Exception):
    """Ends a pass amid its layers."""


def abort_in(session: Session, layer: int) -> None:
    """Have the next pass end once a layer has run."""
    see = session.runner.layers.step

    def step(index: int, call: Any) -> torch.Tensor:
        made = see(index, call)
        if index == layer:
            session.runner.layers.step = see  # type: ignore[method-assign]
            raise Abort
        return made

    session.runner.layers.step = step  # type: ignore[method-assign]


def prompts(seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    shapes = [(1, 10), (3, 5), (1, 1), (2, 30), (3, 5), (1, 33)]
    return [torch.randint(0, 64, shape, generator=made) for shape in shapes]


def run_hostile(session: Session, num_steps: int = 5) -> list[torch.Tensor]:
    """Logits of prompts and steps of several batches, with passes that are aborted between."""
    logits = []
    for number, prompt in enumerate(prompts(0)):
        if number in (2, 4):
            abort_in(session, number)
            with pytest.raises(Abort):
                session.prefill(prompt)
        logits.append(session.prefill(prompt).clone())
        for step in range(num_steps):
            if number == 3 and step == 3:
                abort_in(session, 1)
                with pytest.raises(Abort):
                    session.decode(logits[-1].argmax(-1, keepdim=True))
                break
            logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
    return logits


@functools.cache
def run_resident(folder: Path, chunk: int) -> list[torch.Tensor]:
    with open_session(folder, offload(prefill_chunk=chunk)) as session:
        return run_hostile(session)


@pytest.mark.parametrize("num", range(1, NUM_EXPERTS + 1))
@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_resident(folder: Path, name: str, num: int) -> None:
    checkpoint = saved(name, folder)
    for prefill, chunk in (("prefetch", 64), ("prefetch", 3), ("uva", 7)):
        expected = run_resident(checkpoint, chunk)
        rule = keeping(num, 1 if num < NUM_EXPERTS else None, prefill)
        with open_session(checkpoint, offload(rule, prefill_chunk=chunk)) as session:
            got = run_hostile(session)
        assert all(map(torch.equal, got, expected))


class Trace:
    """What each layer's experts are called with, for an order of use that is kept beside."""

    def __init__(self, session: Session, num_chosen: int) -> None:
        self.num_chosen = num_chosen
        self.calls: dict[int, list[np.ndarray]] = {}
        for index, layer in session.loaded.cached._layers.items():
            self.calls[index] = []
            layer.experts.register_forward_pre_hook(functools.partial(self._note, index))

    def _note(self, index: int, experts: object, arguments: Any) -> None:
        self.calls[index].append(arguments[1].reshape(-1, self.num_chosen).numpy().copy())

    def pass_over(self, orders: dict[int, UseOrder], batch: int, is_step: bool) -> np.ndarray:
        """Hits and choices of a pass by lists of the calls, [layers, 2, sizes]."""
        found = []
        for index, order in orders.items():
            chunks = [each.reshape(batch, -1, self.num_chosen) for each in self.calls[index]]
            tokens = np.concatenate(chunks, axis=1).swapaxes(0, 1)[-NOTED_TOKENS:]
            before = order.reuse
            for token in tokens:
                order.take(token.reshape(1, -1))
            distances = (order.reuse.distances - before.distances)[0]
            first = (order.reuse.first_uses - before.first_uses)[0]
            hits = np.concatenate([[0], distances.cumsum()])
            found.append(np.stack([hits, np.full_like(hits, distances.sum() + first)]) * is_step)
            self.calls[index].clear()
        return np.stack(found)


@pytest.mark.parametrize("num", [1, 2, 3, 4])
@pytest.mark.parametrize("prefill", ["prefetch", "uva"])
@pytest.mark.parametrize("name", ["qwen3_moe_tied", "deepseek_v2"])
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
            trace_of = {k: [*v] for k, v in trace.calls.items()}
            # the pass in which caches are allocated is of one token a sequence, ahead of all
            for index, calls in trace_of.items():
                num_tokens = sum(map(len, calls))
                if num_tokens > prompt.numel():
                    del trace.calls[index][0]
            trace.pass_over(orders, len(prompt), is_step=False)
            check_slots(session, orders)
            copied.clear()
            for _ in range(6):
                logits = session.decode(logits.argmax(-1, keepdim=True))
                total += trace.pass_over(orders, len(prompt), is_step=True)
                check_slots(session, orders)
            step_bytes += sum(copied)
        counts = session.count_experts()
        slots = session.loaded.placement.expert_slots
        assert list(counts) == list(orders)
        for row, (index, found) in enumerate(counts.items()):
            assert found.hits == total[row, 0, slots[index].num_slots]
            assert found.hits + found.misses == total[row, 1, 0]
            assert found.copied_bytes == found.copied * slots[index].expert_bytes
        assert sum(found.copied_bytes for found in counts.values()) == step_bytes
        session.warm_up(1, 7)
        assert all(not (c.hits or c.misses) for c in session.count_experts().values())


def count_copied_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Note the bytes of each copy into slots, as the tensors have them."""
    copied: list[int] = []

    def copy(table: Any, sources: Any, slots: Any) -> None:
        before = {name: slot.clone() for name, slot in slots.items()}
        for slot in slots.values():
            slot.view(torch.uint8).fill_(0xA5)
        own(table, sources, slots)
        for name, slot in slots.items():
            rows = slot.view(torch.uint8).flatten(1)
            is_written = (rows != 0xA5).any(1)
            copied.append(int(is_written.sum()) * rows.shape[1])
            rows[~is_written] = before[name].view(torch.uint8).flatten(1)[~is_written]

    own = cached.copy_missed
    monkeypatch.setattr(cached, "copy_missed", copy)
    return copied


def check_slots(session: Session, orders: dict[int, UseOrder]) -> None:
    """The experts used last are in slots, each with all of its parts."""
    for index, order in orders.items():
        layer = session.loaded.cached._layers[index]
        table, num_used = layer.table, int(order.num_used[0])
        first = order.order[0][: min(num_used, table.num_slots)]
        assert table.list_of(0).tolist() == order.order[0].tolist()
        assert int(table.number(8)) == num_used
        places = table.list_of(1)[: len(first)].tolist()
        assert len(set(places)) == len(places)
        for name, slots in layer.slots.items():
            path = next(
                n
                for n, (of, _) in session.loaded.store._places.items()
                if of == index and n.endswith(name)
            )
            stored = session.loaded.store.offloaded[path]
            assert torch.equal(slots[places], stored[torch.from_numpy(first)])


def test_more_pairs_than_kernels_sort(folder: Path) -> None:
    with open_session(saved("deepseek_v2", folder), offload(keeping(2))) as session:
        session.prefill(torch.zeros(512, 1, dtype=torch.int64))
        with pytest.raises(PlanError, match="run 512 sequences at a time"):
            session.prefill(torch.zeros(513, 1, dtype=torch.int64))


def test_memory_holds_the_slots(folder: Path) -> None:
    with open_session(saved("deepseek_v2", folder), offload(keeping(2, every=1))) as session:
        store, placement = session.loaded.store, session.loaded.placement
        assert sum(m.nbytes for m in store.expert_slots.values()) == placement.expert_slots_bytes
        for index, layer in session.loaded.cached._layers.items():
            views = [layer.table.memory, *layer.slots.values()]
            begin = store.expert_slots[index].data_ptr()
            stop = begin + store.expert_slots[index].nbytes
            assert all(begin <= v.data_ptr() <= v.data_ptr() + v.nbytes <= stop for v in views)
    assert not store.expert_slots
