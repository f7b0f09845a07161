"""Kept experts of which cores and link divide those missed, held to a list of the trace."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.divided import DividedSlots
from offplan.capabilities.cached_experts import MissRates
from offplan.plan import Rule
from offplan.runtime.cached_experts.executor import CachedExperts
from offplan.runtime.cached_experts.expert_table import NOTED_TOKENS, ORDER, SLOTS
from offplan.runtime.cached_experts.rates import scale
from offplan.runtime.forms.experts import are_rounded
from offplan.runtime.session import Session
from tests.runtime.cached import Trace, cached_of, count_experts, keeping, prompts
from tests.runtime.quantise import save_stored


def dividing(
    num: int, prefill: str = "prefetch", every: int = 1, later: float | None = None
) -> Rule:
    changed = {"decode": "host", "later_experts": later}
    return Rule.model_validate(keeping(num, None, prefill, every).model_dump(mode="json") | changed)


@contextmanager
def sharing(share: float) -> Iterator[None]:
    """Have the cores of sessions multiply a share of what steps miss, by rates that say so."""
    rates = MissRates(0.0, 1 - share, share)
    with patch.object(CachedExperts, "given_rates", rates):
        yield


def wide(family: str) -> dict[str, int]:
    """Experts of three chunks of inner columns, which can be split."""
    name = "intermediate_size" if family == "gpt_oss" else "moe_intermediate_size"
    return {name: 384}


def save(family: str, form: str, into: Path, **config: int) -> tuple[Path, Path]:
    """What is stored, and its values."""
    stored = "fp8_block" if form == "values" else form
    more = {"num_experts_per_tok": 2, **config}
    paths = save_stored(family, stored, into, torch.bfloat16, **more)
    return paths[form == "values"], paths[1]


def check_layers(session: Session, lists: dict[int, DividedSlots]) -> None:
    """What a list keeps is in slots, each with all of its parts once what is under way is there."""
    cached_of(session)._drain()
    for index, kept in lists.items():
        layer = cached_of(session).layers[index]
        order, slots = (layer.table.list_of(which).tolist() for which in (ORDER, SLOTS))
        place_of = {e: slot for e, slot in zip(order, slots, strict=True) if slot >= 0}
        assert order == kept.order
        assert set(place_of) == kept.kept
        assert len(set(place_of.values())) == len(place_of)
        for path, (of, _) in session.loaded.store._places.items():
            if of == index:
                stored = session.loaded.store.offloaded[path]
                values = layer.slots[path.rpartition(".")[2]]
                for expert, slot in place_of.items():
                    assert torch.equal(values[slot].cpu(), stored[expert].cpu())


def check_contents(session: Session) -> None:
    """Each expert that a table names is in its slot, and nobody else is."""
    for layer in cached_of(session).layers.values():
        order, slots = (layer.table.list_of(which).tolist() for which in (ORDER, SLOTS))
        taken = [slot for slot in slots if slot >= 0]
        assert len(set(taken)) == len(taken)
        for expert, slot in zip(order, slots, strict=True):
            for name, values in layer.slots.items():
                assert slot < 0 or torch.equal(
                    values[slot].cpu(), layer.sources[name][expert].cpu()
                )


def run_beside_lists(session: Session, share: float, num_steps: int = 6) -> None:
    """Hold tables, slots and counts of prompts and steps to lists of the trace.

    The cores are to multiply a ``share`` of what is missed: see ``sharing``.
    """
    layers = cached_of(session).layers
    trace = Trace(session, 2)
    rates = MissRates(0.0, 1 - share, share)
    assert all(layer.of.by_cores for layer in layers.values())
    lists = {index: DividedSlots(layer.of, rates) for index, layer in layers.items()}
    fed = torch.Generator().manual_seed(0)
    for prompt in prompts(1):
        num_rows = len(prompt)
        for index, kept in lists.items():
            codes = are_rounded(layers[index].experts)
            kept.rates = scale(rates, layers[index].of.num_experts, 2, num_rows, codes=codes)
        session.prefill(prompt)
        trace.drop_allocating_pass(prompt.numel())
        for index, calls in trace.calls.items():
            chunks = [each.reshape(len(prompt), -1, 2) for each in calls]
            tokens = [t.flatten().tolist() for c in chunks for t in c.swapaxes(0, 1)]
            lists[index].settle(tokens[-NOTED_TOKENS:])
            calls.clear()
        check_layers(session, lists)
        for _ in range(num_steps):
            drawn = torch.randint(0, 64, (num_rows, 1), generator=fed)
            session.decode(drawn.to(session.device))
            for index, calls in trace.calls.items():
                lists[index].step(calls.pop().flatten().tolist())
            check_layers(session, lists)
    for index, found in count_experts(session).items():
        listed = dict(lists[index].counts)
        del listed["chunks"]
        assert {of: getattr(found, of) for of in listed} == listed
        assert found.by_cores == lists[index].by_cores
        rest = found.split - found.split_by_cores
        assert found.copied_bytes == round((found.copied + rest) * layers[index].of.expert_bytes)
