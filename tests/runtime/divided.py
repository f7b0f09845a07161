"""Kept experts of which cores and link divide those missed, held to a list of the trace."""

from pathlib import Path

import torch

from benchmarks.divided import DividedSlots
from offplan.plan import Rule
from offplan.runtime.cached_experts.expert_table import NOTED_TOKENS, ORDER, SLOTS
from offplan.runtime.session import Session
from tests.runtime.cached import Trace, cached_of, count_experts, keeping, prompts
from tests.runtime.quantise import save_stored


def dividing(
    num: int,
    share: float | None,
    prefill: str = "prefetch",
    every: int = 1,
    *,
    splits: bool = False,
) -> Rule:
    changed = {"decode": "host", "host_share": share, "split_expert": splits or None}
    return Rule.model_validate(keeping(num, None, prefill, every).model_dump(mode="json") | changed)


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
    """What a list keeps is in slots, each with all of its parts."""
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


def run_beside_lists(session: Session, share: float) -> None:
    """Hold tables, slots and counts of prompts and steps to lists of the trace."""
    layers = cached_of(session).layers
    trace = Trace(session, 2)
    lists = {index: DividedSlots(layer.of) for index, layer in layers.items()}
    assert all(layer.of.host_share == share for layer in layers.values())
    for prompt in prompts(1):
        logits = session.prefill(prompt)
        trace.drop_allocating_pass(prompt.numel())
        for index, calls in trace.calls.items():
            chunks = [each.reshape(len(prompt), -1, 2) for each in calls]
            tokens = [t.flatten().tolist() for c in chunks for t in c.swapaxes(0, 1)]
            lists[index].settle(tokens[-NOTED_TOKENS:])
            calls.clear()
        check_layers(session, lists)
        for _ in range(6):
            logits = session.decode(logits.argmax(-1, keepdim=True))
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
