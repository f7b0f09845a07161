"""Sessions that keep experts one by one, and what a list of the trace says of them."""

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offplan.plan import Rule
from offplan.routing.use_order import UseOrder
from offplan.runtime.cached_experts.executor import CachedExperts, ExpertCounts
from offplan.runtime.cached_experts.expert_table import NOTED_TOKENS
from offplan.runtime.session import Session
from tests.runtime.plans import offload, open_session


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


def cached_of(session: Session) -> CachedExperts:
    found = session.loaded.executors["cached_experts"]
    assert isinstance(found, CachedExperts)
    return found


def count_experts(session: Session) -> dict[int, ExpertCounts]:
    if "cached_experts" not in session.loaded.executors:
        return {}
    with session.stream():
        return cached_of(session).count_layers()


FEW = 2, 1, (1, 2, 3, 4), 16
"""What ``run_hostile`` does with models whose steps are slow: each kind of pass, few times."""


class Abort(Exception):
    """Ends a pass amid its layers."""


def abort_in(session: Session, layer: int, times: int = 1) -> None:
    """Have what comes next end once a layer has run so many times."""
    left = [times]
    see = session.runner.layers.step

    def step(index: int, call: Any) -> torch.Tensor:
        made = see(index, call)
        left[0] -= index == layer
        if not left[0]:
            session.runner.layers.step = see  # type: ignore[method-assign]
            raise Abort
        return made

    session.runner.layers.step = step  # type: ignore[method-assign]


SHAPES = (1, 10), (3, 5), (1, 1), (2, 30), (3, 5), (1, 33)
"""Batches and tokens of ``prompts``."""


def prompts(seed: int) -> list[torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 64, shape, generator=made) for shape in SHAPES]


def run_hostile(
    session: Session,
    num_steps: int = 5,
    steps_before: int = 3,
    numbers: Sequence[int] = range(len(SHAPES)),
    most: int | None = None,
) -> list[torch.Tensor]:
    """Logits of prompts and steps of several batches, with passes that are aborted between.

    One of them is a step, after ``steps_before`` others: a captured one cannot be aborted. Of the
    prompts those of such ``numbers`` are read, ``most`` tokens of each, and every batch is another
    than the one before: before 2 and 4 a prompt is aborted, in 3 a step.
    """
    logits = []
    given = prompts(0)
    for number in numbers:
        prompt = given[number][:, :most]
        if number in (2, 4):
            # before the prompt a pass allocates caches
            abort_in(session, min(number, len(session.runner.layers) - 1), times=2)
            with pytest.raises(Abort):
                session.prefill(prompt)
        logits.append(session.prefill(prompt).clone())
        for step in range(num_steps):
            if number == 3 and step == steps_before:
                abort_in(session, 0)
                with pytest.raises(Abort):
                    session.decode(logits[-1].argmax(-1, keepdim=True))
                break
            logits.append(session.decode(logits[-1].argmax(-1, keepdim=True)).clone())
    return logits


class Trace:
    """What each layer's experts are called with, for an order of use that is kept beside."""

    def __init__(self, session: Session, num_chosen: int) -> None:
        self.num_chosen = num_chosen
        self.calls: dict[int, list[np.ndarray]] = {}
        for index, layer in cached_of(session).layers.items():
            self.calls[index] = []
            layer.experts.register_forward_pre_hook(functools.partial(self._note, index))

    def _note(self, index: int, experts: object, arguments: Any) -> None:
        self.calls[index].append(arguments[1].reshape(-1, self.num_chosen).cpu().numpy().copy())

    def drop_allocating_pass(self, num_tokens: int) -> None:
        """Forget the pass that allocates caches: of one token a sequence, ahead of the prompt."""
        for calls in self.calls.values():
            if sum(map(len, calls)) > num_tokens:
                del calls[0]

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


def check_slots(session: Session, orders: dict[int, UseOrder]) -> None:
    """The experts used last are in slots, each with all of its parts."""
    for index, order in orders.items():
        layer = cached_of(session).layers[index]
        table, num_used = layer.table, int(order.num_used[0])
        first = order.order[0][: min(num_used, table.num_slots)]
        assert table.list_of(0).tolist() == order.order[0].tolist()
        assert int((table.list_of(1) >= 0).sum()) == len(first)
        places = table.list_of(1)[: len(first)].tolist()
        assert all(0 <= place < table.num_slots for place in places)
        assert len(set(places)) == len(places)
        for name, slots in layer.slots.items():
            path = next(
                n
                for n, (of, _) in session.loaded.store._places.items()
                if of == index and n.endswith(name)
            )
            stored = session.loaded.store.offloaded[path]
            assert torch.equal(slots[places].cpu(), stored[torch.from_numpy(first)].cpu())


@functools.cache
def run_resident(folder: Path, chunk: int, *passes: Any) -> list[torch.Tensor]:
    """Logits of ``run_hostile`` where all weights are on the GPU, read in chunks of so many."""
    with open_session(folder, offload(prefill_chunk=chunk)) as session:
        return run_hostile(session, *passes)
