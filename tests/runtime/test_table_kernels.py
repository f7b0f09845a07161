"""The kernels that keep experts in slots, against the same in plain torch and resident experts."""

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from torch.utils._pytree import tree_leaves

from offplan.capabilities.cached_experts import (
    LATER_FADES,
    LATER_STEPS,
    MOST_LATER,
    ExpertSlots,
    MissRates,
    table_bytes,
)
from offplan.forms.form import Form, Kind
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.runtime.cached_experts import expert_table
from offplan.runtime.cached_experts.executor import list_shares
from offplan.runtime.cached_experts.expert_table import (
    CREDIT,
    DONE,
    HAS_FAILED,
    IS_IDLE,
    LATER,
    LIST_COUNT,
    LIST_FAILED,
    LIST_NUMBERS,
    LIST_PAIRS,
    LIST_SEQUENCE,
    NOBODY,
    NUM_MISSED,
    ORDER,
    QUOTA,
    SEQUENCE,
    SLOTS,
    SPLIT,
    Runs,
    Table,
    copy_later,
    copy_missed,
    use,
)
from offplan.runtime.forms import tasks
from offplan.runtime.forms.packing import pack
from offplan.runtime.forms.stored import StoredWeight, component_name
from tests.runtime.bells import make_bell, require_one_bell, require_rung
from tests.runtime.interpreted import (
    HAS_GPU,
    INTERPRETED,
    TARGETS,
    compile_ptx,
    need_triton,
    runs_kernels,
)
from tests.tiers import each_value_once

DEVICE, DTYPE = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)
LIMITS = (232448, 132)


@pytest.fixture(autouse=INTERPRETED)
def limits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.cached_experts import table_kernels
    from offplan.runtime.forms import products
    from offplan.runtime.model import experts

    monkeypatch.setattr(table_kernels, "COPY_PROGRAMS", 5)  # the interpreter takes one by one
    monkeypatch.setattr(products, "gpu_limits", lambda index: LIMITS)
    monkeypatch.setattr(experts, "gpu_limits", lambda index: LIMITS)


def make_table(num_slots: int, num_experts: int, device: str) -> Table:
    memory = torch.zeros(table_bytes(num_experts) // 4, dtype=torch.int32, device=device)
    table = Table(memory, num_slots, num_experts)
    table.empty()
    return table


def make_parts(num_experts: int, device: str) -> dict[str, torch.Tensor]:
    """Parts of all sizes: whole words of 16 bytes, others, and less than one."""
    sizes = {"codes": (24, 64), "scale": (5,), "half": (1,), "large": (1500,), "odd": (30,)}
    types = (torch.uint8, torch.float32, torch.bfloat16, torch.int32, torch.uint8)
    return {
        name: torch.randint(0, 100, (num_experts, *size), device=device).to(dtype)
        for (name, size), dtype in zip(sizes.items(), types, strict=True)
    }


RUNS = {"codes": Runs(2, 128), "large": Runs(10, 100), "odd": Runs(1, 5)}
"""How parts lie that are divided by 768 inner columns."""


def sharing(share: float) -> MissRates:
    """Rates by which the cores multiply a share of what is missed."""
    return MissRates(0.0, 1 - share, share)


CASES = [(1, 8, 2, 1), (3, 8, 2, 1), (8, 8, 2, 2), (5, 12, 3, 4), (2, 12, 3, 4), (7, 20, 4, 30)]
"""Slots, experts, those that a token chooses, and the batch."""


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("sizes", "share", "inner", "quota"),
    each_value_once(
        [
            *((case, None, 0, 0) for case in CASES),
            *product(CASES, (0.4, 1.0), (0, 768), (0, 20, 128)),
        ]
    ),
)
def test_the_table_is_that_of_plain_torch(
    sizes: tuple[int, int, int, int], share: float | None, inner: int, quota: int
) -> None:
    from offplan.runtime.cached_experts.table_kernels import address_parts, read_slots, settle
    from offplan.runtime.forms.gather import sort_pairs

    num_slots, num_experts, num_chosen, batch = sizes
    torch.manual_seed(num_slots)
    of = ExpertSlots(num_slots, num_experts, (), share is not None, inner, quota)
    num_kept = of.num_kept
    ours = make_table(num_kept, num_experts, DEVICE)
    expected = make_table(num_kept, num_experts, "cpu")
    task, divided = Cores(), []
    if share is not None:
        shares = list_shares(of, sharing(share))
        lists = [torch.full((LIST_NUMBERS if quota else 0,), 7, dtype=torch.int32) for _ in "ab"]
        expected = expected._replace(shares=shares, later=lists[0] if quota else None)
        for table in (ours, expected):
            table.number(QUOTA).fill_(quota)
            table.number(expert_table.NUM_STEPS).fill_(LATER_STEPS - 3)  # it decides amid the steps
            table.number(expert_table.NUM_USED).fill_(64 * num_chosen)
            by_chance = 64 * num_chosen * num_kept // num_experts
            # by chance, an eighth more and a little, or so many that chance does not make them
            more = (0, by_chance // 8 + 2, 64 * num_chosen - by_chance)[
                (num_slots + quota // 20) % 3
            ]
            table.number(expert_table.NUM_RECENT).fill_(by_chance + more)
        tokens = torch.randn(batch, 64, device=DEVICE).to(DTYPE)
        weights = torch.rand(batch, num_chosen, device=DEVICE)
        later = lists[1].to(DEVICE)
        divided = [tasks.number(task), shares.to(DEVICE), later, tokens, weights]
    sources = make_parts(num_experts, DEVICE)
    on_cpu = {name: value.cpu() for name, value in sources.items()}
    slots = {name: torch.zeros_like(value[:num_slots]) for name, value in sources.items()}
    slots_on_cpu = {name: value.cpu() for name, value in slots.items()}
    addresses = address_parts(sources.values(), slots.values())
    of_steps = address_parts(sources.values(), slots.values())
    of_steps[:, 3:] = torch.tensor([RUNS.get(name, Runs()) for name in slots])

    def choose(num_tokens: int) -> torch.Tensor:
        drawn = torch.rand(num_tokens, num_experts) + 2 * torch.rand(num_experts)
        return drawn.topk(num_chosen).indices

    for number in range(8):
        if number in (1, 5):
            noted = torch.full((64, batch * num_chosen), NOBODY, dtype=torch.int32)
            length = 5 if number == 1 else 64
            noted[-length:] = choose(length * batch).view(length, -1).int()
            copy_later(expected, on_cpu, slots_on_cpu)
            bring(ours, later if share is not None else None, sources, slots)
            use(expected, noted, is_step=False)
            settle(ours, noted.to(DEVICE), addresses)
            copy_missed(expected, on_cpu, slots_on_cpu)
        else:
            chosen = choose(batch).flatten()
            copy_later(expected, on_cpu, slots_on_cpu)
            bring(ours, later if share is not None else None, sources, slots)
            place, by_cores, first = use(expected, chosen[None], is_step=True)
            copy_missed(expected, on_cpu, slots_on_cpu, RUNS)
            got, order, starts, rest, first_column = read_slots(
                chosen.to(DEVICE), ours.memory, of_steps, num_kept, num_experts, divided
            )
            assert got.tolist() == place.tolist()
            left = chosen.where((place == num_experts) & (by_cores == NOBODY), num_experts)
            assert rest.tolist() == left.tolist()
            if share is not None:
                assert task.chosen.flatten().tolist() == by_cores.tolist()
                assert first_column.tolist() == first.tolist()
                assert torch.equal(task.tokens, tokens)
                assert torch.equal(task.weights, weights)
            _, by_slot, begins = sort_pairs(got, num_experts)
            num_there = int(begins[-1])
            assert starts.tolist() == begins.tolist()
            assert order[:num_there].tolist() == by_slot[:num_there].tolist()
        for which in (ORDER, SLOTS):
            assert ours.list_of(which).tolist() == expected.list_of(which).tolist()
        assert ours.counts.tolist() == expected.counts.tolist()
        numbers = slice(QUOTA, HAS_FAILED + 1)
        assert ours.memory[numbers].tolist() == expected.memory[numbers].tolist()
        if quota and number not in (0, 1, 5):
            num_pairs = int(lists[0][LIST_COUNT])
            most = LIST_PAIRS + 2 * num_pairs
            assert later[:most].tolist() == lists[0][:most].tolist()
            require_idle_victims(expected, chosen, num_pairs)
        assert int(ours.number(NUM_MISSED)) == int(expected.number(NUM_MISSED))
        for name, value in slots.items():
            assert torch.equal(value.cpu(), slots_on_cpu[name])
    assert bool(ours.counts[SPLIT]) == (of.splits and share == 0.4)
    assert quota or not ours.counts[LATER]
    ours.empty()
    expected.empty()
    assert ours.memory[CREDIT:HAS_FAILED].tolist() == [0] * (HAS_FAILED - CREDIT)
    assert ours.list_of(0).tolist() == expected.list_of(0).tolist()


def bring(
    table: Table,
    later: torch.Tensor | None,
    sources: dict[str, torch.Tensor],
    slots: dict[str, torch.Tensor],
) -> None:
    """Copy what a kernel has listed, as the copier does."""
    if later is not None and len(later):
        copy_later(table._replace(later=later), sources, slots)


def require_idle_victims(table: Table, chosen: torch.Tensor, num_listed: int) -> None:
    """What is listed takes slots of nobody else, and is used by the step itself."""
    assert table.later is not None
    pairs = table.later[LIST_PAIRS : LIST_PAIRS + 2 * num_listed].view(-1, 2).tolist()
    order, slots = (table.list_of(which).tolist() for which in (ORDER, SLOTS))
    for expert, slot in pairs:
        assert expert in chosen.tolist()
        assert [e for e, s in zip(order, slots, strict=True) if s == slot] == [expert]


def spoil(memory: torch.Tensor) -> torch.Tensor:
    return memory.fill_(float("nan")) if memory.is_floating_point() else memory


class Cores:
    """A task that multiplies by resident experts what it is given, in place of the host's cores."""

    tokens: torch.Tensor
    chosen: torch.Tensor
    weights: torch.Tensor
    experts: Any = None
    """Those that it multiplies; none where what is chosen is all that counts."""

    def __init__(self) -> None:
        self.bell = make_bell(DEVICE)
        self.num_rung = self.num_parts = 0

    def begin_by(self, sizes: Any, launch: Any) -> None:
        self.tokens = torch.full((sizes[0], 64), torch.nan, device=DEVICE).to(DTYPE)
        self.chosen = torch.full(sizes, 77, dtype=torch.int64, device=DEVICE)
        self.weights = torch.full(sizes, torch.nan, device=DEVICE)
        self.num_rung += 1
        launch((self.tokens, self.chosen, self.weights), self.bell._replace(job=self.num_rung))
        require_rung(self.bell, self.num_rung)
        if self.experts is not None:
            is_its = self.chosen != NOBODY
            factors = self.weights.masked_fill(~is_its, 0).to(DTYPE)
            chosen = self.chosen.masked_fill(~is_its, 0)
            num_experts = self.experts.num_experts
            whole, chunks = chosen % num_experts, (chosen // num_experts - 1).clamp(min=0)
            self.num_parts += int((chunks > 0).sum())
            of_whole = factors.masked_fill(chunks > 0, 0)
            self.made = forward_resident(self.experts, self.tokens, whole, of_whole)
            for token, place in chunks.nonzero().tolist():
                choice, columns = whole[token, place], int(chunks[token, place]) * CHUNK_COLUMNS
                made = self.experts.gate_up_proj[choice] @ self.tokens[token]
                inner = self.experts._apply_gate(made)[:columns]
                product = self.experts.down_proj[choice][:, :columns] @ inner
                self.made[token] += factors[token, place] * product

    def end(self, made: torch.Tensor) -> torch.Tensor:
        return made + self.made


class Experts:
    """Routed experts of a layer, held by values or by packed codes."""

    def __init__(
        self, num_experts: int, num_slots: int, *, packed: bool, bias: bool, width: int = 48
    ) -> None:
        hidden, width = 64, (32 if INTERPRETED else 64) if packed else width
        shapes = {"gate_up_proj": (2 * width, hidden), "down_proj": (hidden, width)}
        self.num_experts, self.has_gate, self.has_bias = num_experts, True, bias
        self._apply_gate = lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1]
        parts: dict[str, torch.Tensor] = {}
        stored = {}
        for name, shape in shapes.items():
            values = torch.randn(num_experts, *shape) / 8
            if packed:
                each = [pack(value.bfloat16()) for value in values]
                form = Form(Kind.PACKED)
                stored[name] = StoredWeight(name, form, tuple(each[0]))
                for part in each[0]:
                    of = torch.stack([one[part] for one in each])
                    parts[component_name(name, part)] = of.to(DEVICE)
            else:
                parts[name] = values.to(DTYPE).to(DEVICE)
            if bias:
                parts[f"{name}_bias"] = torch.randn(num_experts, shape[0]).to(DTYPE).to(DEVICE)
        vars(self).update(parts)
        if packed:
            self.stored_experts, self.in_place = stored, ()
        self.slots = {name: torch.zeros_like(value[:num_slots]) for name, value in parts.items()}
        table = make_table(num_slots, num_experts, DEVICE)
        from offplan.runtime.cached_experts.table_kernels import address_parts

        self.slot_memory, self.num_slots, self.cores = table.memory, num_slots, None
        self.ends_in_block, self.slot_runs = False, None
        self.slot_later = torch.zeros(0, dtype=torch.int32, device=DEVICE)
        self.slot_sources = address_parts(parts.values(), self.slots.values())


def forward_resident(experts: Any, tokens: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
    """What ``forward_stored`` does on a GPU, and what multiplies values."""
    from offplan.runtime.forms import operators
    from offplan.runtime.forms.experts import add_rows, holds_codes, send
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.model.experts import forward_experts

    if not holds_codes(experts):
        return forward_experts(experts, tokens, *routed)
    chosen, order, starts = sort_pairs(routed[0].reshape(-1), experts.num_experts)

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        stored = experts.stored_experts[name]
        parts = {part: getattr(experts, component_name(name, part)) for part in stored.components}
        made = operators.multiply(stored.form, parts, x, order, starts)
        if experts.has_bias:
            made = add_rows(made, getattr(experts, f"{name}_bias"), chosen)
        return made

    return send(experts, tokens, routed[1], multiply)


KINDS = ["packed and biased", "packed", "values"]
NUM_STEPS = 3 if INTERPRETED else 4


@functools.cache
def run_resident(kind: str, num_tokens: int) -> list[tuple[torch.Tensor, ...]]:
    """Tokens, their experts and weights, and what resident experts make of them, for each step.

    They are drawn as soon as ``Experts`` has drawn its weights from a seed, whatever its slots.
    """
    torch.manual_seed(0)
    experts: Any = Experts(8, 1, packed="packed" in kind, bias="biased" in kind)
    steps: list[tuple[torch.Tensor, ...]] = []
    for _ in range(NUM_STEPS):
        tokens = torch.randn(num_tokens, 64, device=DEVICE).to(DTYPE)
        routed = torch.rand(num_tokens, 8, device=DEVICE).topk(2, -1)
        weights = routed.values.to(DTYPE)
        made = forward_resident(experts, tokens, routed.indices, weights)
        steps.append((tokens, routed.indices, weights, made))
    return steps


def list_kinds(biased: tuple[int, int], *shapes: tuple[int, int]) -> list[Any]:
    """Kinds with numbers of slots and tokens; in CI packed experts once, with biases and without.

    The interpreter takes seconds for them. Those with biases are of ``biased`` slots and tokens.
    """
    packed = [("packed and biased", biased), ("packed", (8, 1))]
    return each_value_once(
        product(KINDS, shapes), of=[*packed, *(("values", shape) for shape in shapes)]
    )


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("kind", "shape"), list_kinds((3, 4), (8, 1), (3, 1), (3, 4), (1, 2), (3, 9))
)
def test_products_are_those_of_resident_experts(kind: str, shape: tuple[int, int]) -> None:
    from offplan.runtime.cached_experts.experts import forward_slots

    num_slots, num_tokens = shape
    steps = run_resident(kind, num_tokens)
    torch.manual_seed(0)
    experts: Any = Experts(8, num_slots, packed="packed" in kind, bias="biased" in kind)

    for *given, expected in steps:
        got = forward_slots(experts, *given)
        assert torch.equal(got, expected)
        assert got.isfinite().all()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("kind", "shape"), list_kinds((3, 9), (8, 1), (3, 1), (1, 2), (3, 9)))
def test_what_the_cores_multiply_is_added(
    kind: str, shape: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever lies in the rows of their pairs."""
    from offplan.runtime.cached_experts.experts import forward_slots

    num_slots, num_tokens = shape
    steps = run_resident(kind, num_tokens)
    torch.manual_seed(0)
    experts: Any = Experts(8, num_slots, packed="packed" in kind, bias="biased" in kind)
    task = Cores()
    task.experts = experts
    shares = list_shares(ExpertSlots(num_slots, 8, (), by_cores=True), sharing(0.5))
    experts.cores, experts.slot_shares = tasks.number(task), shares.to(DEVICE)
    num_by_cores = 0
    own = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda *a, **k: spoil(own(*a, **k)))
    for *given, expected in steps:
        got = forward_slots(experts, *given)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=4e-3)
        num_by_cores += int((task.chosen != NOBODY).sum())
    assert num_by_cores


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_part_of_an_expert_is_the_cores(num_tokens: int) -> None:
    """The rest is read from the last slot, whatever lies beside it there."""
    from offplan.runtime.cached_experts.experts import forward_slots

    torch.manual_seed(0)
    experts: Any = Experts(8, 4, packed=False, bias=False, width=256)
    of, task = ExpertSlots(4, 8, (), True, 256), Cores()
    task.experts, experts.num_slots = experts, of.num_kept
    shares = list_shares(of, sharing(0.3))
    experts.cores, experts.slot_shares = tasks.number(task), shares.to(DEVICE)
    experts.slot_runs = {"gate_up_proj": Runs(2, 128 * 128), "down_proj": Runs(64, 256)}
    lie = [experts.slot_runs[name] for name in experts.slots]
    experts.slot_sources[:, 3:] = torch.tensor(lie)
    for memory in experts.slots.values():
        memory[-1] = torch.randn_like(memory[-1])
    for _ in range(NUM_STEPS):
        tokens = torch.randn(num_tokens, 64, device=DEVICE).to(DTYPE)
        routed = torch.rand(num_tokens, 8, device=DEVICE).topk(2, -1)
        given = tokens, routed.indices, routed.values.to(DTYPE)
        got, expected = forward_slots(experts, *given), forward_resident(experts, *given)
        torch.testing.assert_close(got, expected, rtol=2e-2, atol=2e-2)
    assert task.num_parts


class Waits:
    """A table of which the cores multiply all that is missed, and the link brings it for later."""

    def __init__(self, num_slots: int = 3, num_experts: int = 8) -> None:
        of = ExpertSlots(num_slots, num_experts, (), by_cores=True)
        self.table = make_table(num_slots, num_experts, DEVICE)
        self.table.number(QUOTA).fill_(16 * MOST_LATER)
        self.later = torch.zeros(LIST_NUMBERS, dtype=torch.int32, device=DEVICE)
        self.shares = list_shares(of, sharing(1.0)).to(DEVICE)
        self.task, self._sizes = Cores(), (num_slots, num_experts)

    def look_up(self, *chosen: int) -> list[int]:
        """Return the slots of pairs."""
        from offplan.runtime.cached_experts.table_kernels import address_parts, read_slots

        num_slots, num_experts = self._sizes
        nothing = torch.zeros(num_experts, 16, dtype=torch.uint8, device=DEVICE)
        addresses = address_parts([nothing], [nothing[:num_slots]])
        tokens = torch.zeros(1, 64, device=DEVICE).to(DTYPE)
        weights = torch.ones(1, len(chosen), device=DEVICE)
        divided = [tasks.number(self.task), self.shares, self.later, tokens, weights]
        pairs = torch.tensor(chosen, device=DEVICE)
        made = read_slots(pairs, self.table.memory, addresses, num_slots, num_experts, divided)
        slots: list[int] = made[0].tolist()
        return slots


@pytest.mark.gpu
@runs_kernels
@pytest.mark.skipif(not INTERPRETED, reason="the interpreter lets others write meanwhile")
def test_a_lookup_waits_for_the_copies_of_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.cached_experts import table_kernels

    waits, seen = Waits(), []
    assert waits.look_up(1, 2) == [8, 8]  # multiplied by the cores, and listed
    assert waits.later[: LIST_PAIRS + 4].tolist() == [2, 1, 0, 0, 1, 0, 2, 1]
    own = table_kernels.tl.atomic_add
    done = waits.table.number(DONE)

    def look(pointer: Any, value: Any, *others: Any, **more: Any) -> Any:
        if more.get("sem") == "acquire":
            seen.append(int(done))
            assert waits.later[LIST_SEQUENCE] == 1  # which the copier may be reading yet
            if len(seen) == 3:
                done.fill_(1)
        return own(pointer, value, *others, **more)

    monkeypatch.setattr(table_kernels.tl, "atomic_add", look)
    assert waits.look_up(2, 5) == [1, 8]
    assert seen == [0, 0, 0]
    assert waits.later[:LIST_PAIRS].tolist() == [1, 2, 0, 0]
    done.fill_(2)
    waits.look_up(2, 5)  # nothing is pending, or listed
    assert waits.later[:2].tolist() == [0, 2]
    assert len(seen) == 3


@pytest.mark.gpu
@runs_kernels
def test_copies_that_never_come_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host reads that in the list; the layer waits no more, and has none brought."""
    from offplan.runtime.cached_experts import table_kernels

    monkeypatch.setattr(table_kernels, "MOST_POLLS", 5)
    waits = Waits()
    waits.look_up(1, 2)
    assert int(waits.later[LIST_FAILED]) == 0
    waits.look_up(3, 4)
    assert int(waits.later[LIST_FAILED]) == 1
    assert int(waits.table.number(HAS_FAILED)) == 1
    assert int(waits.later[LIST_COUNT]) == 0
    assert int(waits.table.number(SEQUENCE)) == 1
    waits.table.empty()
    assert int(waits.table.number(HAS_FAILED)) == 1
    assert waits.look_up(3, 4) == [8, 8]
    assert int(waits.later[LIST_COUNT]) == 0


def test_what_decides_is_the_rule_of_the_slots() -> None:
    """Of integers, in the table: as ``brings_later`` has it."""
    of = ExpertSlots(3, 8, (), by_cores=True, later=16)
    drawn = torch.Generator().manual_seed(0)
    decided = set()
    for _ in range(60):
        table = make_table(3, 8, "cpu")._replace(later=torch.zeros(LIST_NUMBERS, dtype=torch.int32))
        steps = torch.randint(1, 6, (LATER_STEPS, 1), generator=drawn).tolist()
        chance = float(torch.rand(1, generator=drawn))
        recent = [int(chance * used) for (used,) in steps]
        for (used,), of_these in zip(steps, recent, strict=True):
            assert not table.number(IS_IDLE)
            expert_table._count_later(table, 1, used, of_these)
        counted = [sum(used for (used,) in steps), sum(recent)]
        left = [number - number // LATER_FADES for number in counted]
        assert table.memory[expert_table.NUM_STEPS : IS_IDLE].tolist() == [0, *left]
        brings = of.brings_later(*counted)
        assert bool(table.number(IS_IDLE)) == (not brings)
        decided.add(brings)
    assert decided == {True, False}


@runs_kernels
def test_rows_come_from_slots_or_from_all_experts() -> None:
    from offplan.runtime.cached_experts.table_kernels import BLOCK, pick_rows

    rows = torch.randn(6, BLOCK + 24).to(DTYPE).to(DEVICE)
    slots = torch.randn(3, BLOCK + 24).to(DTYPE).to(DEVICE)
    slot_of_pair = torch.tensor([2, 6, 0, 3], dtype=torch.int32, device=DEVICE)
    chosen = torch.tensor([5, 1, 4, 0], device=DEVICE)
    made, places = pick_rows(slots, rows, slot_of_pair, chosen)
    assert made.equal(torch.stack([slots[2], rows[1], slots[0], rows[0]]))
    assert places.tolist() == [0, 1, 2, 3]


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile_to_whole_lines_of_the_link(target: int) -> None:
    """For GPUs that are not here: 16 bytes a thread are what fills the link."""
    need_triton()
    from offplan.runtime.cached_experts import table_kernels

    def compile_for(kernel: Any, options: dict[str, int], **constants: Any) -> str:
        names = ["chosen", "addresses", "cores_of_pair"]
        kinds = {name: "*i64" if name in names else "*i32" for name in POINTERS}
        kinds |= dict.fromkeys(("tokens", "tokens_there", "factors"), "*bf16")
        kinds["factors_there"] = "*fp32"
        return compile_ptx(kernel, target, kinds, constants, options)

    for is_step, is_divided in ((True, False), (True, True), (False, False)):
        table = {"EXPERTS": 128, "PAIRS": 8, "IS_STEP": is_step, "IS_DIVIDED": is_divided}
        table |= {"BRINGS_LATER": False, "MOST_POLLS": 0}
        for ones in ({}, {"num_slots": 1, "num_pairs": 1}):
            assert "entry" in compile_for(table_kernels._use, {"num_warps": 4}, **table, **ones)
        if is_divided:
            both = {"EXPERTS": 128, "PAIRS": 8, "BLOCK": 2048, "MOST_POLLS": 1 << 22}
            for brings in (False, True):
                both["BRINGS_LATER"] = brings
                text = compile_for(table_kernels._use_and_hand_over, {"num_warps": 4}, **both)
                require_one_bell(text)
                # of the whole system's, since copies come from without
                polls = [line for line in text.splitlines() if ".acquire" in line]
                assert [".sys" in line for line in polls] == [True] * brings
        copy = {"PAIRS": 8, "BLOCK": 1024, "IS_STEP": is_step}
        text = compile_for(table_kernels._copy_missed, {"num_warps": 8}, **copy)
        assert "ld.global.v4.b32" in text
        assert "st.global.v4.b32" in text
    kinds = dict.fromkeys(("slots", "rows", "out"), "*bf16") | {"slot_of_pair": "*i32"}
    kinds |= dict.fromkeys(("chosen", "places"), "*i64")
    assert "entry" in compile_ptx(table_kernels._pick_rows, target, kinds, {"BLOCK": 1024}, {})


POINTERS = (
    *("chosen", "addresses", "table", "shares", "later", "order", "starts"),
    *("slot_of_pair", "rest_of_pair", "cores_of_pair", "first_of_pair", "words", "arrived"),
)


def computed_behind_products(graph: Any) -> list[Any]:
    """What a graph does with products, and with which tensors: where and how it may round."""
    nodes: dict[Any, str] = {}
    found = []
    for node in graph.graph.nodes:
        if str(node.target).startswith("offplan.multiply"):
            nodes[node] = "product"
        elif any(each in nodes for each in node.all_input_nodes):
            nodes[node] = str(node.target)
        else:
            continue
        if node.op != "output" and nodes[node] != "product":
            value = node.meta["example_value"]
            like = [(each.shape, each.dtype, each.stride()) for each in tree_leaves(value)]
            inputs = [
                str(each.target) if each.op == "call_function" else each.op
                for each in node.all_input_nodes
            ]
            inputs = [each.replace("multiply_slots", "multiply") for each in inputs]
            found.append((nodes[node], inputs, like))
    return found


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED or HAS_GPU, reason="stands in for kernels that would run")
@pytest.mark.parametrize(("num_slots", "num_tokens"), [(8, 1), (3, 4)])
@pytest.mark.parametrize(("packed", "is_divided"), [(False, False), (True, False), (True, True)])
def test_a_step_is_compiled_whole(
    packed: bool,
    is_divided: bool,
    num_slots: int,
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where torch.compile ended its graph, layers would round elsewhere than resident ones."""
    need_triton()
    from offplan.runtime.cached_experts.experts import forward_slots
    from offplan.runtime.forms import products
    from offplan.runtime.model import experts as own

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda *_: True)
    monkeypatch.setattr(f"{__name__}.DEVICE", "cpu")
    for module in (products, own):
        monkeypatch.setattr(module, "gpu_limits", lambda index: LIMITS)
    graphs: list[Any] = []

    def note(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        (made,) = next(n for n in graph.graph.nodes if n.op == "output").args
        likes = [each.meta["example_value"] for each in made]
        return lambda *_: [torch.zeros(like.shape, dtype=like.dtype) for like in likes]

    class Layer(torch.nn.Module):
        way: Any

        def forward(self, *arguments: torch.Tensor) -> Any:
            return self.way(self, *arguments)

    layer = Layer()
    vars(layer).update(vars(Experts(8, num_slots, packed=packed, bias=packed)))
    if is_divided:
        shares = list_shares(ExpertSlots(num_slots, 8, (), by_cores=True), sharing(0.5))
        vars(layer).update(cores=tasks.number(Cores()), slot_shares=shares)
    for way in (forward_slots, forward_resident):
        vars(layer)["way"] = way
        torch._dynamo.reset()
        compiled = torch.compile(layer.forward, dynamic=False, fullgraph=True, backend=note)
        with torch.inference_mode():
            routed = torch.rand(num_tokens, 8).topk(2, -1)
            compiled(torch.randn(num_tokens, 64).to(DTYPE), routed.indices, routed.values.to(DTYPE))
    torch._dynamo.reset()
    assert len(graphs) == 2
    if packed and not is_divided:
        assert computed_behind_products(graphs[0]) == computed_behind_products(graphs[1])
    called = [str(node.target) for node in graphs[0].graph.nodes]
    assert called.count("offplan.read_slots.default") == 1
    assert called.count("offplan.end_by_cores.default") == is_divided
