"""Experts that the link brings for later: copies made as early as can be, and as late."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from offplan.capabilities.cached_experts import MOST_LATER, ExpertSlots, MissRates, table_bytes
from offplan.hostcores.library import MOST_LISTED, LaterList
from offplan.runtime.cached_experts import expert_table
from offplan.runtime.cached_experts.executor import list_shares
from offplan.runtime.cached_experts.expert_table import (
    LIST_COUNT,
    LIST_FAILED,
    LIST_NUMBERS,
    LIST_PAIRS,
    LIST_SEQUENCE,
    ORDER,
    QUOTA,
    Table,
    copy_later,
    copy_missed,
    is_pending,
    use,
)
from offplan.runtime.host_cores.server import ByCores
from offplan.runtime.session import Session
from tests.hostcores.cores import require_cores
from tests.runtime.cached import (
    Abort,
    abort_in,
    cached_of,
    count_experts,
    prompts,
    run_hostile,
)
from tests.runtime.divided import check_contents, dividing, run_beside_lists, save, sharing, wide
from tests.runtime.plans import offload, open_session

require_cores()

EIGHT = {"num_local_experts": 8, "num_hidden_layers": 3}
KINDS = {
    "whole": ("qwen3_moe", "values", EIGHT),
    "split": ("qwen3_moe", "values", EIGHT | wide("qwen3_moe")),
    "coded": ("gpt_oss", "mxfp4", EIGHT | wide("gpt_oss")),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    into = {kind: tmp_path_factory.mktemp(kind) for kind in KINDS}
    return {k: save(f, form, into[k], **c)[0] for k, (f, form, c) in KINDS.items()}


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_table, "COPIES_AT_ONCE", False)


@pytest.fixture(autouse=True)
def mostly_cores() -> Iterator[None]:
    with sharing(0.7):
        yield


DECISION = offload(dividing(4, later=1.5), prefill_chunk=7)


def step(session: Session, *tokens: int) -> torch.Tensor:
    return session.decode(torch.tensor([tokens]).mT).clone()


def list_pending(session: Session) -> list[int]:
    layers = cached_of(session).layers
    return [index for index, layer in layers.items() if is_pending(layer.table)]


def run_until_pending(session: Session) -> None:
    """Run steps until one has listed experts whose copies are not made."""
    tokens = iter(range(3, 33))
    while not list_pending(session):
        step(session, next(tokens))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_early_and_late_copies_give_the_same_bits(
    kind: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of other batches, and behind passes that were aborted."""
    runs, counts = [], []
    for at_once in (True, False):
        monkeypatch.setattr(expert_table, "COPIES_AT_ONCE", at_once)
        with open_session(folders[kind], DECISION) as session:
            runs.append(run_hostile(session))
            counts.append(count_experts(session))
    assert all(map(torch.equal, *runs))
    assert counts[0] == counts[1]
    assert any(found.later for found in counts[0].values())


@pytest.mark.slow
@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("kind", ["whole", "split"])
def test_late_copies_count_as_a_list_has_them(kind: str, folders: dict[str, Path]) -> None:
    """More steps than the layer takes to decide whether the link brings any."""
    with open_session(folders[kind], DECISION) as session:
        session.warm_up(1, 7)
        cached_of(session).invalidate()
        run_beside_lists(session, 0.7, num_steps=14)
        assert all(found.later for found in count_experts(session).values())


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_an_abort_with_copies_under_way(folders: dict[str, Path]) -> None:
    """The slots are then empty, and nothing is pending that would write to them."""
    with open_session(folders["whole"], DECISION) as session:
        session.prefill(prompts(0)[0])
        run_until_pending(session)
        abort_in(session, 1)
        with pytest.raises(Abort):
            step(session, 22)
        assert not list_pending(session)
        got = [session.prefill(prompts(3)[0]).clone()] + [step(session, t) for t in (3, 9, 50, 4)]
    with open_session(folders["whole"], DECISION) as session:
        expected = [session.prefill(prompts(3)[0]).clone()]
        expected += [step(session, token) for token in (3, 9, 50, 4)]
    assert all(map(torch.equal, got, expected))


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_a_prompt_fills_the_slots_that_copies_were_on_their_way_to(
    folders: dict[str, Path],
) -> None:
    with open_session(folders["whole"], DECISION) as session:
        session.prefill(prompts(0)[0])
        run_until_pending(session)
        before = count_experts(session)
        session.prefill(prompts(2)[0])
        assert not list_pending(session)
        after = count_experts(session)
        assert any(after[index].from_prompts > before[index].from_prompts for index in after)
        check_contents(session)


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_another_batch_waits_for_copies_and_divides_anew(folders: dict[str, Path]) -> None:
    with open_session(folders["whole"], DECISION) as session:
        session.prefill(prompts(0)[0])
        run_until_pending(session)
        (layer, *_) = cached_of(session).layers.values()
        assert layer.table.shares is not None
        shares, address = layer.table.shares.clone(), layer.table.shares.data_ptr()
        session.prefill((torch.arange(80) % 40).view(40, 2))
        assert not list_pending(session)
        (layer, *_) = cached_of(session).layers.values()
        assert layer.table.shares is not None
        # forty rows choose eight experts: each is multiplied ten times
        assert int(layer.table.shares.sum()) < int(shares.sum())
        assert layer.table.shares.data_ptr() == address


@pytest.mark.slow
@pytest.mark.usefixtures("late")
def test_it_closes_with_copies_pending(
    folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What copies is waited for while the slots are there."""
    drained: list[dict[int, torch.Tensor]] = []
    own = ByCores.drain

    def drain(server: ByCores) -> None:
        assert session.loaded.store.slabs
        assert not list_pending(session)
        drained.append(cached_of(session)._memory.copy())
        own(server)

    with open_session(folders["whole"], DECISION) as session:
        session.prefill(prompts(0)[0])
        run_until_pending(session)
        monkeypatch.setattr(ByCores, "drain", drain)
    assert [len(memory) for memory in drained] == [3]


def make_table(num_slots: int, num_experts: int, share: float, quota: int) -> Table:
    memory = torch.zeros(table_bytes(num_experts) // 4, dtype=torch.int32)
    of = ExpertSlots(num_slots, num_experts, (), by_cores=True)
    shares = list_shares(of, MissRates(0.0, 1 - share, share))
    later = torch.zeros(LIST_NUMBERS, dtype=torch.int32)
    table = Table(memory, num_slots, num_experts, shares, later)
    table.number(QUOTA).fill_(quota)
    table.empty()
    return table


def list_pairs(table: Table) -> list[list[int]]:
    assert table.later is not None
    num_pairs = int(table.later[LIST_COUNT])
    pairs: list[list[int]] = table.later[LIST_PAIRS:][: 2 * num_pairs].view(-1, 2).tolist()
    return pairs


def test_victims_are_never_slots_that_the_step_uses() -> None:
    drawn = torch.Generator().manual_seed(0)
    num_listed = 0
    for number in range(300):
        if number % 50 == 0:
            table = make_table(4 + number // 50, 12, (0.3, 0.6, 1.0)[number // 50 % 3], 40)
        chosen = torch.rand(12, generator=drawn).topk(4).indices
        place, by_cores, _ = use(table, chosen[None], is_step=True)
        pairs = list_pairs(table)
        for expert, slot in pairs:
            assert slot not in place.tolist()
            assert expert in by_cores.tolist()
            num_listed += 1
        copy_later(table, {}, {})
    assert num_listed > 100


def test_a_pending_copy_comes_before_its_slot_is_given_away() -> None:
    """Two slots: what the first step lists is the second step's victim."""
    table = make_table(2, 8, 1.0, 128)
    source = {"weight": torch.arange(8).view(8, 1) * torch.ones(8, 3)}
    slots = {"weight": torch.full((2, 3), -1.0)}
    use(table, torch.tensor([[1, 2]]), is_step=True)
    assert list_pairs(table) == [[1, 0], [2, 1]]
    with pytest.raises(AssertionError, match="waits for the copies of the one before"):
        use(table, torch.tensor([[4, 5]]), is_step=True)
    copy_later(table, source, slots)
    assert slots["weight"][:, 0].tolist() == [1, 2]
    use(table, torch.tensor([[4, 5]]), is_step=True)
    assert list_pairs(table) == [[4, 0], [5, 1]]
    copy_later(table, source, slots)
    copy_later(table, source, {"weight": torch.empty(0)})  # once
    assert slots["weight"][:, 0].tolist() == [4, 5]


@pytest.mark.parametrize("share", [0.4, 1.0])
def test_with_a_quota_for_all_slots_are_those_of_the_link(share: float) -> None:
    drawn = torch.Generator().manual_seed(1)
    for num_slots in (2, 5, 8):
        table, other = make_table(num_slots, 8, share, 128), make_table(num_slots, 8, 0.0, 0)
        source = {"weight": torch.arange(8.0).view(8, 1)}
        both = [{"weight": torch.full((num_slots, 1), -1.0)} for _ in range(2)]
        for _ in range(60):
            chosen = torch.rand(8, generator=drawn).topk(3).indices[None]
            for each, slots in zip((table, other), both, strict=True):
                use(each, chosen, is_step=True)
                copy_missed(each, source, slots)
                copy_later(each, source, slots)
            orders = (each.list_of(ORDER).tolist() for each in (table, other))
            assert next(orders) == next(orders)
            held = [sorted(slots["weight"].flatten().tolist()) for slots in both]
            assert held[0] == held[1]


def test_lists_are_what_the_coordinator_reads() -> None:
    """By the places of their numbers, and room for all that a step may list."""
    names = "count", "sequence", "failed", "pairs"
    places = {name: getattr(LaterList, name).offset // 4 for name in names}
    assert places["count"] == LIST_COUNT
    assert places["sequence"] == LIST_SEQUENCE
    assert places["failed"] == LIST_FAILED
    assert places["pairs"] == LIST_PAIRS
    assert MOST_LATER <= MOST_LISTED
    assert ctypes.sizeof(LaterList) >= 4 * LIST_NUMBERS
