"""Many rows multiplied by the values of experts, group of experts by group, against plain torch."""

from itertools import pairwise, product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import silu

from offplan import kernel_sizes
from offplan.forms.form import Form, Kind
from offplan.kernel_sizes import (
    FEW_IN_PLACE_ROWS,
    IN_PLACE_VALUE_ROWS,
    are_grouped,
    experts_at_once,
)
from offplan.runtime.forms import experts as experts_module
from offplan.runtime.forms import stored
from offplan.runtime.forms.experts import (
    FEW_TOKENS,
    ReadElsewhere,
    forward_groups,
    multiply_sorted,
)
from offplan.runtime.forms.gates import Gate, compute_gate, find_gate
from offplan.runtime.forms.stored import (
    SharedScratch,
    StoredLinear,
    StoredWeight,
    component_name,
)
from tests.runtime import coded
from tests.runtime.columns import expand, hold
from tests.runtime.interpreted import INTERPRETED, TARGETS, compile_ptx, need_triton, runs_kernels
from tests.tiers import each_value_once, others_in_sweep

DEVICE, DTYPE = coded.DEVICE, coded.DTYPES[0]
FORMS = [name for name, form in coded.FORMS.items() if form.kind is not Kind.NF4]
FEW = [name for name in coded.FEW if name in FORMS]
ROUTINGS = {"uneven": [2, 0, 5, 70, 0], "to one": [0, 0, 0, 9, 0], "even": [3, 3, 3, 3, 3]}
"""Rows of each expert."""


@pytest.fixture(autouse=INTERPRETED)
def limits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.forms import grouped, products

    for launcher in (grouped, products):
        monkeypatch.setattr(launcher, "gpu_limits", lambda index: (99 << 10, 2))
    monkeypatch.setattr(grouped, "compute_capability", lambda index: (8, 9))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def starts_of(rows: list[int]) -> torch.Tensor:
    counts = torch.tensor([0, *rows], device=DEVICE)
    return counts.cumsum(0).to(torch.int32)


def expect(
    values: torch.Tensor, x: torch.Tensor, starts: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    """Multiply rows, each by its own expert's values, in float64."""
    bounds = pairwise(starts.tolist())
    return torch.cat(
        [
            x[begin:end].double() @ values[expert].double().T + bias[expert].double()
            for expert, (begin, end) in enumerate(bounds)
        ]
    )


def assert_near(got: torch.Tensor, expected: torch.Tensor) -> None:
    assert (got - expected).abs().max() < 0.01 * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("name", others_in_sweep(FORMS, FEW))
def test_codes_are_multiplied_by_groups(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two experts at a time, or all: bit for bit the same."""
    from offplan.runtime.forms.grouped import multiply_codes

    num_out = coded.few_out(name)
    monkeypatch.setattr(coded, "NUM_OUT", num_out)
    form, num_in, rows = coded.FORMS[name], coded.NUM_IN, ROUTINGS["uneven"]
    parts = coded.tame(coded.make_parts(name, len(rows)), form)
    values = expand(form, parts, torch.float32)
    form, parts = hold(form, parts)
    starts, x, bias = starts_of(rows), random(sum(rows), num_in), random(len(rows), num_out)
    expected = expect(values, x, starts, bias)
    with monkeypatch.context() as little:
        little.setattr(kernel_sizes, "EXPERT_SCRATCH_BYTES", 5 * num_out * num_in)
        assert experts_at_once(len(rows), num_out * num_in) == 2
        got = multiply_codes(form, parts, x, starts, bias)
    assert_near(got, expected)
    scratch = torch.empty(len(rows) * num_out * num_in + 8, dtype=DTYPE, device=DEVICE)
    again = multiply_codes(form, parts, x, starts, bias, scratch)
    assert torch.equal(again, got)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("routing", "sizes", "is_described", "is_transposed"),
    each_value_once(product(ROUTINGS, [(72, 88), (200, 128)], [False, True], [False, True])),
)
def test_values_are_multiplied(
    routing: str,
    sizes: tuple[int, int],
    is_described: bool,
    is_transposed: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Tiles reach past the last output, input, row of an expert and row of all."""
    from offplan.runtime.forms import grouped

    capability = (9, 0) if is_described else (8, 9)
    monkeypatch.setattr(grouped, "compute_capability", lambda index: capability)
    rows, (num_out, num_in) = ROUTINGS[routing], sizes
    starts, x, bias = starts_of(rows), random(sum(rows), num_in), random(len(rows), num_out)
    values = random(len(rows), num_out, num_in)
    if is_transposed:
        values = values.mT.contiguous().mT
    assert grouped.can_describe(values, x) == (is_described and not is_transposed)
    for in_place in (False, True):
        made = grouped.multiply_values(values, x, starts, bias, in_place=in_place)
        assert_near(made, expect(values, x, starts, bias))
    no_bias = grouped.multiply_values(values, x, starts)
    assert_near(no_bias, expect(values, x, starts, torch.zeros_like(bias)))


@pytest.mark.parametrize(
    ("major", "num_rows", "is_part", "is_for_library"),
    [
        *((9, 512, False, False), (9, 513, False, True), (9, 8, True, True)),
        *((10, 8, False, True), (8, 8, False, False), (12, 513, False, False)),
    ],
)
def test_torchs_product_serves_where_it_is_the_faster_one(
    major: int,
    num_rows: int,
    is_part: bool,
    is_for_library: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On 9.x of more than 128 rows with each of 4 experts, or of those that no descriptor reads."""
    from offplan.runtime.forms import grouped

    monkeypatch.setattr(grouped, "compute_capability", lambda index: (major, 0))
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    x, values = torch.zeros(num_rows, 64).bfloat16(), torch.zeros(4, 64, 128).bfloat16()
    values = values[..., :64] if is_part else values[..., :64].contiguous()
    assert grouped.is_for_library(values, x) == is_for_library
    assert not grouped.is_for_library(values.half(), x.half())


@pytest.mark.parametrize(
    ("num_rows", "in_place", "rows"),
    [
        *((3 * 48, False, 64), (3 * 48 + 1, False, 128)),
        *((64, True, 64), (65, True, 128), (129, True, FEW_IN_PLACE_ROWS)),
        *((192, True, FEW_IN_PLACE_ROWS), (513, True, IN_PLACE_VALUE_ROWS)),
    ],
)
def test_tiles_have_as_many_rows_as_their_experts_need(
    num_rows: int, in_place: bool, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those of values in host memory as many as any expert may have, up to a limit."""
    from offplan.runtime.forms import grouped

    monkeypatch.setattr(grouped, "compute_capability", lambda index: (8, 9))
    x, values = torch.zeros(num_rows, 8), torch.zeros(3, 8, 8)
    tile = grouped.choose_tile(values, x, 3, in_place=in_place)
    assert tile.rows == rows
    assert tile.rows * tile.outs <= 256 * 128


@pytest.mark.gpu
@pytest.mark.skipif(INTERPRETED, reason="torch has no such product there")
@pytest.mark.parametrize(
    ("num_out", "num_in"), [(2048, 768), (2048, 1408), (96, 14336), (2880, 72)]
)
def test_products_are_torchs_to_the_bit(num_out: int, num_in: int) -> None:
    """Kept experts and those in host memory may have ours and torch's in one pass."""
    from offplan.runtime.forms import grouped

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("torch has no kernels of its own for this device")
    starts = starts_of([0, 5, 200, 64, 1])
    x, values = random(270, num_in).bfloat16(), random(5, num_out, num_in).bfloat16()
    made = x.new_empty(270, num_out)
    grouped.launch(values, x, starts, None, made)
    assert made.equal(torch.nn.functional.grouped_mm(x, values.mT, offs=starts[1:]))


@pytest.mark.gpu
@runs_kernels
def test_products_do_not_depend_on_the_rows_of_a_tile() -> None:
    """Nor on which programs take it: plans may send an expert's rows in several pieces.

    The interpreter's products do depend on it.
    """
    from offplan.runtime.forms import grouped

    rows = ROUTINGS["uneven"]
    starts, x, values = starts_of(rows), random(sum(rows), 96), random(len(rows), 72, 96)
    made = []
    for num_rows, programs in ((64, 1), (64 if INTERPRETED else 128, 1), (64, 10**6)):
        out = x.new_zeros(len(x), 72)
        tile = grouped.TILE._replace(rows=num_rows, programs=programs)
        grouped.launch(values, x, starts, None, out, tile=tile)
        made.append(out)
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("num_chosen", "width"), [(1, 64), (3, 100), (8, 1100)])
def test_products_of_a_token_are_summed_up(num_chosen: int, width: int) -> None:
    from offplan.runtime.forms.grouped import sum_pairs

    made, weights = random(5 * num_chosen, width), torch.rand(5, num_chosen, device=DEVICE)
    expected = (made.view(5, num_chosen, width).double() * weights[..., None].double()).sum(1)
    got = sum_pairs(made, weights)
    assert got.dtype == made.dtype
    assert_near(got, expected)
    order = torch.randperm(5 * num_chosen, device=DEVICE)
    assert torch.equal(sum_pairs(made[order], weights, order.argsort().to(torch.int32)), got)


@pytest.mark.gpu
@runs_kernels
def test_products_of_codes_are_summed_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of few tokens are not: steps compute as they did."""
    from offplan.runtime.forms import operators

    asked: list[int] = []
    own = operators.sum_pairs

    def sum_pairs(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        asked.append(len(weights))
        return own(made, weights)

    monkeypatch.setattr(operators, "sum_pairs", sum_pairs)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda tensor: True))
    made, weights = random(2 * (FEW_TOKENS + 1), 72), torch.rand(FEW_TOKENS + 1, 2, device=DEVICE)
    plain = (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)
    assert_near(experts_module.sum_up(made, weights), plain)
    experts_module.sum_up(made[2:], weights[1:])
    assert asked == [FEW_TOKENS + 1]


GATES = [
    Gate(),
    Gate("gelu"),
    Gate("gelu_tanh", is_interleaved=True),
    Gate("relu", limited="before", limit=0.7),
    Gate("silu", True, "before", 0.7, 1.702, 1.0),
    Gate("silu", limited="after", limit=0.7),
]


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("gate", GATES)
@pytest.mark.parametrize("width", [72, 1100])
def test_gates_are_computed_at_once(gate: Gate, width: int) -> None:
    from offplan.runtime.forms.grouped import gate_rows

    made = random(3, 2 * width)
    made[0, 0] = torch.nan
    got, expected = gate_rows(made, gate), compute_gate(gate, made.double())
    torch.testing.assert_close(got, expected.to(DTYPE), equal_nan=True)


class Experts(SimpleNamespace):
    """Three experts as transformers describes them, by values or by codes of them."""

    has_gate, in_place, is_transposed = True, (), False

    def __init__(self, form: str, *, has_bias: bool, interleaved: bool) -> None:
        super().__init__(num_experts=3, has_bias=has_bias, interleaved=interleaved)
        self.values = {}
        for name, (num_out, num_in) in {"gate_up_proj": (128, 64), "down_proj": (64, 64)}.items():
            bias = random(3, num_out)
            setattr(self, f"{name}_bias", bias if has_bias else torch.zeros_like(bias))
            if form == "values":
                self.values[name] = random(3, num_out, num_in) / 8
                setattr(self, name, self.values[name])
                continue
            coded.NUM_OUT, coded.NUM_IN = num_out, num_in
            parts = coded.tame(coded.make_parts(form, 3), coded.FORMS[form])
            self.values[name] = expand(coded.FORMS[form], parts, DTYPE)
            stored = StoredWeight(name, coded.FORMS[form], tuple(parts))
            vars(self).setdefault("stored_experts", {})[name] = stored
            for part, value in parts.items():
                setattr(self, component_name(name, part), value)
        self.known_gate = None if interleaved else find_gate(self)

    def _apply_gate(self, made: torch.Tensor) -> torch.Tensor:
        if self.interleaved:
            return silu(made[..., ::2]) * made[..., 1::2]
        gate, up = made.chunk(2, -1)
        return silu(gate) * up


EXPERT_CASES = [("mxfp4", True, True), ("nvfp4", False, False), ("values", True, False)]


@pytest.fixture
def inputs(monkeypatch: pytest.MonkeyPatch) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens of which none chooses the first expert; their choices, and weights."""
    for name in ("NUM_OUT", "NUM_IN"):  # which experts set
        monkeypatch.setattr(coded, name, getattr(coded, name))
    chosen = torch.tensor([[1, 2], [2, 1], [2, 1], [1, 2], [1, 2]], device=DEVICE)
    return random(5, 64) / 16, chosen, torch.rand(5, 2, device=DEVICE)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("form", "has_bias", "interleaved"), EXPERT_CASES)
def test_tokens_are_sent_through_their_experts(
    inputs: tuple[torch.Tensor, ...], form: str, has_bias: bool, interleaved: bool
) -> None:
    experts, (hidden, chosen, weights) = (
        Experts(form, has_bias=has_bias, interleaved=interleaved),
        inputs,
    )
    expected = torch.zeros(hidden.shape, dtype=torch.float64, device=DEVICE)
    for token, expert in product(range(5), range(3)):
        weight = (weights[token] * (chosen[token] == expert)).sum().double()
        made = hidden[token].double()
        for name in ("gate_up_proj", "down_proj"):
            made = experts.values[name][expert].double() @ made
            made += getattr(experts, f"{name}_bias")[expert].double()
            made = experts._apply_gate(made) if name == "gate_up_proj" else made
        expected[token] += weight * made
    got = forward_groups(experts, hidden, chosen, weights)
    assert (got - expected).abs().max() < 0.02 * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("form", "has_bias", "interleaved"), EXPERT_CASES)
def test_experts_in_parts_give_the_same(
    inputs: tuple[torch.Tensor, ...], form: str, has_bias: bool, interleaved: bool
) -> None:
    """Bit for bit, whichever experts a part has."""
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.forms.operators import sum_pairs

    experts, (hidden, chosen, weights) = (
        Experts(form, has_bias=has_bias, interleaved=interleaved),
        inputs,
    )
    expert_of, order, starts = sort_pairs(chosen.reshape(-1), 3)
    made = hidden.new_empty(10, 64)
    for first, end in ((0, 2), (2, 3)):
        stacks = {n: v for n, v in vars(experts).items() if isinstance(v, torch.Tensor)}
        some: Any = ReadElsewhere(experts, {n: stack[first:end] for n, stack in stacks.items()})
        some.num_experts = end - first
        begin, stop = starts[first].item(), starts[end].item()
        pairs = order[begin:stop].long()
        own = (starts[first : end + 1] - begin).to(torch.int32)
        rows = hidden[pairs // 2]
        made[pairs] = multiply_sorted(some, rows, expert_of[pairs] - first, own, by_groups=True)
    assert torch.equal(sum_pairs(made, weights), forward_groups(experts, hidden, chosen, weights))


@pytest.mark.gpu
@runs_kernels
def test_compiled_layers_compute_the_same(
    inputs: tuple[torch.Tensor, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one graph, whose operators hide the kernels; the gate is a constant of it."""
    from offplan.runtime.forms import gather

    monkeypatch.setattr(gather, "MAX_PAIRS", 0)  # by torch's sort: none traces the interpreter

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            vars(self).update(vars(Experts("mxfp4", has_bias=True, interleaved=False)))

        _apply_gate = Experts._apply_gate
        has_gate, in_place, is_transposed = True, (), False

    experts = Module()
    assert vars(experts)["known_gate"] == Gate()
    compiled = torch.compile(
        lambda *given: forward_groups(experts, *given), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(*inputs), forward_groups(experts, *inputs))


@pytest.mark.gpu
@runs_kernels
def test_operators_tell_what_they_return() -> None:
    """torch.compile goes by their shapes and strides alone."""
    from offplan.runtime.forms import operators

    form, parts = coded.FORMS["mxfp4"], coded.make_parts("mxfp4", 2)
    x, starts, bias = random(3, coded.NUM_IN), starts_of([1, 2]), random(2, coded.NUM_OUT)
    scratch = torch.empty(2 * coded.NUM_OUT * coded.NUM_IN, dtype=DTYPE, device=DEVICE)
    weight, checks = operators._split(form, parts), "test_faketensor"
    for room in (None, scratch):
        arguments = (*weight, x, starts, bias, room)
        torch.library.opcheck(
            torch.ops.offplan.multiply_groups.default, arguments, test_utils=checks
        )
    values = random(2, 40, coded.NUM_IN)
    torch.library.opcheck(
        torch.ops.offplan.multiply_values.default,
        (values, x, starts, None, False),
        test_utils=checks,
    )
    torch.library.opcheck(
        torch.ops.offplan.gate_rows.default, (random(3, 80), *Gate()), test_utils=checks
    )
    summed = random(6, 40), random(3, 2), None
    torch.library.opcheck(torch.ops.offplan.sum_pairs.default, summed, test_utils=checks)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernels_compile(target: int) -> None:
    """For GPUs that are not here, with inputs read by descriptors or not."""
    need_triton()
    from offplan.runtime.forms import grouped_kernels

    kinds = dict.fromkeys(("x", "weight", "out", "bias"), "*bf16")
    kinds["starts"] = "*i32"
    tile = {"EXPERTS": 32, "BLOCK_K": 64, "WHOLE": True, "stride_in": 1}
    options = {"num_warps": 8, "num_stages": 3 if target == 90 else 1}
    sizes = (128, 128), (FEW_IN_PLACE_ROWS, 128), (IN_PLACE_VALUE_ROWS, 64)
    for (rows, outs), is_described in product(sizes, (False, True)):
        constants: dict[Any, Any] = {**tile, "BLOCK_M": rows, "BLOCK_N": outs}
        constants["DESCRIBED"] = is_described
        types = dict(kinds)
        if is_described:
            constants["bias"] = None
            types |= {
                "x": f"tensordesc<bf16[{rows}, 64]>",
                "weight": f"tensordesc<bf16[{outs}, 64]>",
            }
        kernel: Any = grouped_kernels.multiply_groups
        made = compile_ptx(kernel, target, types, constants, options)
        assert ("wgmma" if target == 90 else "mma") in made
    summed: Any = grouped_kernels.sum_pairs
    types = {"made": "*bf16", "rows": "*i32", "weights": "*fp32", "out": "*bf16"}
    assert "entry" in compile_ptx(summed, target, types, {"CHOSEN": 4, "BLOCK": 1024})
    gated: Any = grouped_kernels.gate_rows
    types = {"made": "*bf16", "out": "*bf16"} | dict.fromkeys(("limit", "factor", "added"), "fp32")
    for gate in GATES:
        kind: dict[Any, Any] = {"ACT": gate.activation, "LIMITED": gate.limited, "BLOCK": 1024}
        kind["INTERLEAVED"] = gate.is_interleaved
        assert "entry" in compile_ptx(gated, target, types, kind)


def test_forms_and_shapes_choose_what_is_grouped() -> None:
    least = 8 * kernel_sizes.GROUPED_ROWS["fp8_block"]
    assert not are_grouped(least - 1, 8, ["mxfp4", "fp8_block"])
    assert are_grouped(least, 8, ["mxfp4", "fp8_block"])
    assert are_grouped(least - 1, 8, ["mxfp4"])
    assert not are_grouped(10**9, 8, ["mxfp4", "other"])


def test_experts_share_scratch_that_a_linear_layer_needs_anyway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With memory of their own besides, a prompt would exceed what costs have it take."""
    linear, experts = StoredLinear(16, 16), nn.Module()
    vars(experts).update(num_experts=8)
    vars(experts)["stored_experts"] = {"w": StoredWeight("w", Form(Kind.MXFP4, (1, 32)), ())}
    sizes: dict[Any, int] = {linear: 256, experts: 128}
    monkeypatch.setattr(stored, "scratch_size", lambda module: sizes.get(module, 0))
    with FakeTensorMode():
        shared = SharedScratch(
            nn.ModuleList([linear, experts]), torch.bfloat16, torch.device("cuda")
        )
        assert "scratch" not in vars(experts)
        shared.make_room(10**6)
        assert vars(experts)["scratch"] is vars(linear)["scratch"]
        monkeypatch.setattr(torch, "empty", fail_for_lack_of_memory)
        shared._sizes[experts] = 512
        with pytest.raises(torch.OutOfMemoryError):
            shared.make_room(10**6)
        monkeypatch.undo()
        shared.make_room(0)
        assert vars(linear)["scratch"].numel() == 256


def fail_for_lack_of_memory(*size: int, **options: Any) -> torch.Tensor:
    raise torch.OutOfMemoryError
