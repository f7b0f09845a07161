"""The kernels that keep experts in slots, against the same in plain torch and resident experts."""

import functools
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from torch.utils._pytree import tree_leaves

from offplan.capabilities.cached_experts import ExpertSlots, table_bytes
from offplan.forms.form import Form, Kind
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.runtime.cached_experts.executor import list_shares
from offplan.runtime.cached_experts.expert_table import (
    NOBODY,
    NUM_MISSED,
    ORDER,
    SLOTS,
    SPLIT,
    Runs,
    Table,
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
    run_interpreted,
    runs_itself,
    runs_kernels,
)
from tests.tiers import each_value_once

DEVICE, DTYPE = ("cpu", torch.float16) if INTERPRETED else ("cuda", torch.bfloat16)
LIMITS = (232448, 132)


@pytest.mark.slow
@runs_itself
@pytest.mark.parametrize("tier", ["not sweep", pytest.param("sweep", marks=pytest.mark.sweep)])
def test_on_the_cpu(tier: str) -> None:
    assert "passed" in run_interpreted(__file__, tier=tier)


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
CASES = [(1, 8, 2, 1), (3, 8, 2, 1), (8, 8, 2, 2), (5, 12, 3, 4), (2, 12, 3, 4), (7, 20, 4, 30)]
"""Slots, experts, those that a token chooses, and the batch."""


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("sizes", "share", "inner"),
    each_value_once((*case, inner) for case in product(CASES, (None, 0.4)) for inner in (0, 768)),
)
@pytest.mark.parametrize("quota", [0, 20])
def test_the_table_is_that_of_plain_torch(
    sizes: tuple[int, int, int, int], share: float | None, inner: int, quota: int
) -> None:
    from offplan.runtime.cached_experts.table_kernels import address_parts, read_slots, settle
    from offplan.runtime.forms.gather import sort_pairs

    num_slots, num_experts, num_chosen, batch = sizes
    torch.manual_seed(num_slots)
    of = ExpertSlots(num_slots, num_experts, (), share or 0.0, inner)
    num_kept = of.num_kept
    ours = make_table(num_kept, num_experts, DEVICE)
    expected = make_table(num_kept, num_experts, "cpu")
    task, divided = Cores(), []
    if share is not None:
        shares = list_shares(of)
        expected = expected._replace(shares=shares)
        tokens = torch.randn(batch, 64, device=DEVICE).to(DTYPE)
        weights = torch.rand(batch, num_chosen, device=DEVICE)
        divided = [tasks.number(task), shares.to(DEVICE), tokens, weights]
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
            use(expected, noted, is_step=False)
            settle(ours, noted.to(DEVICE), addresses)
            copy_missed(expected, on_cpu, slots_on_cpu)
        else:
            chosen = choose(batch).flatten()
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
        assert int(ours.number(NUM_MISSED)) == int(expected.number(NUM_MISSED))
        for name, value in slots.items():
            assert torch.equal(value.cpu(), slots_on_cpu[name])
    assert bool(ours.counts[SPLIT]) == (of.splits and share is not None)
    ours.empty()
    expected.empty()
    assert ours.list_of(0).tolist() == expected.list_of(0).tolist()


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
    ("kind", "shape"), list_kinds((3, 2), (8, 1), (3, 1), (3, 2), (1, 2), (3, 9))
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
    shares = list_shares(ExpertSlots(num_slots, 8, (), 0.5))
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
    of, task = ExpertSlots(4, 8, (), 0.3, 256), Cores()
    task.experts, experts.num_slots = experts, of.num_kept
    experts.cores, experts.slot_shares = tasks.number(task), list_shares(of).to(DEVICE)
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
        for ones in ({}, {"num_slots": 1, "num_pairs": 1}):
            assert "entry" in compile_for(table_kernels._use, {"num_warps": 4}, **table, **ones)
        if is_divided:
            both = {"EXPERTS": 128, "PAIRS": 8, "BLOCK": 2048}
            text = compile_for(table_kernels._use_and_hand_over, {"num_warps": 4}, **both)
            require_one_bell(text)
        copy = {"PAIRS": 8, "BLOCK": 1024, "IS_STEP": is_step}
        text = compile_for(table_kernels._copy_missed, {"num_warps": 8}, **copy)
        assert "ld.global.v4.b32" in text
        assert "st.global.v4.b32" in text


POINTERS = (
    *("chosen", "addresses", "table", "shares", "order", "starts"),
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
        shares = list_shares(ExpertSlots(num_slots, 8, (), 0.5))
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
