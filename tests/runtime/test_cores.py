"""Products by the host's cores against each form's reference, whatever instructions there are."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from offplan.errors import OffplanError
from offplan.forms.form import RAW, Component, Form, Kind, WordOrder
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.hostcores.library import Activation, Experts, InstructionSet, Library, RowOrder, Team
from offplan.runtime.host_cores import cores
from offplan.runtime.host_cores.cores import Gate
from tests.hostcores.cores import FORMS, make_weight, require_cores, values_of
from tests.tiers import first_quick

require_cores()

ROUNDED = {Kind.MXFP4, Kind.NVFP4, Kind.W4A16, Kind.W8A16, Kind.BNB8}
"""Kinds whose inputs kernels round to 16 bits."""


@pytest.fixture(autouse=True)
def _same_draws() -> None:
    torch.manual_seed(0)  # a value may round to either of two bfloat16: never by the day's luck


@pytest.fixture(scope="module")
def library() -> Library:
    return cores.load()


@pytest.fixture(params=list(InstructionSet))
def kernels(library: Library, request: pytest.FixtureRequest) -> int:
    if request.param not in library.instruction_sets:
        pytest.skip(f"this processor has no {request.param.name}")
    return library.kernels(request.param)


@pytest.fixture
def team(library: Library) -> Iterator[Team]:
    team = library.team(2)
    yield team
    team.close()


def tolerance(kind: Kind) -> float:
    return 1e-4 if kind in ROUNDED else 1e-6


def check(made: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    assert made.shape == expected.shape
    assert (made - expected).abs().max() <= tolerance * expected.abs().max()


@pytest.mark.parametrize("name", first_quick(FORMS))
@pytest.mark.parametrize(("num_out", "num_in"), first_quick([(320, 768), (64, 1280), (192, 2816)]))
def test_products_are_those_of_the_reference(
    library: Library, team: Team, kernels: int, name: str, num_out: int, num_in: int
) -> None:
    form, parts = make_weight(name, num_out, num_in)
    weight = cores.describe(form, parts)
    for num_rows in (1, 2, 3, 8, 15):
        x = torch.randn(num_rows, num_in).to(torch.bfloat16)
        made = cores.multiply(team, kernels, weight, x, precise=True)
        expected = x.double() @ values_of(form, parts).mT
        check(made, expected, tolerance(form.kind))
        assert torch.equal(cores.multiply(team, kernels, weight, x), made.to(torch.bfloat16))


@pytest.mark.parametrize(
    "name",
    [
        *("bf16", "fp8", "fp8 channel", "mxfp4", "bnb8", "packed", "int4", "int4 with zeros"),
        *("nvfp4", "int4 of 32 with zeros"),
    ],
)
@pytest.mark.parametrize(("num_out", "num_in"), [(64, 224), (128, 32), (64, 1000), (192, 96)])
def test_rows_that_fill_no_vector(
    library: Library, team: Team, kernels: int, name: str, num_out: int, num_in: int
) -> None:
    if num_in % {"mxfp4": 32, "nvfp4": 16, "int4 of 32 with zeros": 32}.get(name, 1):
        pytest.skip("scales are for 16 or 32 weights")
    form, parts = make_weight(name, num_out, num_in)
    x = torch.randn(5, num_in).to(torch.bfloat16)
    made = cores.multiply(team, kernels, cores.describe(form, parts), x, precise=True)
    check(made, x.double() @ values_of(form, parts).mT, tolerance(form.kind))


@pytest.mark.parametrize("name", FORMS)
def test_outliers_zeros_and_infinity_stay_their_rows(
    library: Library, team: Team, kernels: int, name: str
) -> None:
    """An outlier of rounded inputs costs those of its own chunk alone."""
    form, parts = make_weight(name, 64, 768)
    x = torch.randn(4, 768).to(torch.bfloat16)
    x[0, 5], x[1], x[2, 7] = 1000.0, 0.0, float("inf")
    made = cores.multiply(team, kernels, cores.describe(form, parts), x, precise=True)
    weights = values_of(form, parts)
    expected = x.double() @ weights.mT
    allowed = tolerance(form.kind)
    assert not made[1].any()
    assert not made[2].isfinite().any()
    check(made[3:], expected[3:], allowed)
    if allowed > 1e-6:
        largest = x[0].double().abs().view(-1, CHUNK_COLUMNS).amax(1)
        largest = largest.repeat_interleave(CHUNK_COLUMNS)
        off = 2**-16 * (largest @ weights.abs().mT) + 1e-6 * expected[0].abs().max()
        assert ((made[0] - expected[0]).abs() <= 1.01 * off).all()
    else:
        check(made[:1], expected[:1], allowed)


@pytest.mark.parametrize(("name", "num_in"), [("mxfp4", 32), ("nvfp4", 16)])
def test_rows_of_one_group(library: Library, kernels: int, name: str, num_in: int) -> None:
    """A chunk's other groups have no scale: nothing is read of what lay on the stack there."""
    form, parts = make_weight(name, 128, 128)
    parts[Component.SCALE].view(torch.uint8).fill_(255)  # no finite scale in either type
    team, x = library.team(1), torch.randn(5, 128).to(torch.bfloat16)
    cores.multiply(team, kernels, cores.describe(form, parts), x)
    form, parts = make_weight(name, 128, num_in)
    x = torch.randn(5, num_in).to(torch.bfloat16)
    made = cores.multiply(team, kernels, cores.describe(form, parts), x, precise=True)
    check(made, x.double() @ values_of(form, parts).mT, tolerance(form.kind))


@pytest.mark.parametrize("num_out", [1, 6, 63, 67])
def test_any_number_of_rows(team: Team, kernels: int, num_out: int) -> None:
    form, parts = make_weight("bf16", num_out, 200)
    for num_inputs in (1, 7, 70):
        x = torch.randn(num_inputs, 200).to(torch.bfloat16)
        made = cores.multiply(team, kernels, cores.describe(form, parts), x, precise=True)
        check(made, x.double() @ values_of(form, parts).mT, 1e-6)


@pytest.mark.parametrize("name", FORMS)
def test_bits_are_the_same_for_any_number_of_threads(
    library: Library, kernels: int, name: str
) -> None:
    form, parts = make_weight(name, 320, 768)
    weight, x = cores.describe(form, parts), torch.randn(3, 768).to(torch.bfloat16)
    made = []
    for team in (library.team(1), library.team(3), library.team_of_caller(2)):
        made.append(cores.multiply(team, kernels, weight, x, precise=True))
        team.close()
        team.close()
    assert all(torch.equal(each, made[0]) for each in made)


def test_what_is_no_number_stays_none(team: Team, kernels: int) -> None:
    for name in FORMS:
        form, parts = make_weight(name, 64, 256)
        x = torch.ones(2, 256).to(torch.bfloat16)
        x[1, 7] = torch.nan
        made = cores.multiply(team, kernels, cores.describe(form, parts), x)
        assert made[0].isfinite().all(), name
        assert made[1].isnan().all(), name


def describe_experts(
    name: str, gate: Gate, *, with_bias: bool, inner: int = 192
) -> tuple[Experts, Any]:
    """Describe 5 experts of so many inner columns, and return with them what computes the same.

    A choice of 10 and more is the first 128 inner columns of an expert, 5 and more is none.
    """
    width = 2 * inner if gate.is_gated else inner
    up, down = make_weight(name, width, 256, 5), make_weight(name, 256, inner, 5)
    up_bias, down_bias = (torch.randn(5, size).to(torch.bfloat16) for size in (width, 256))
    made = Experts(up=cores.describe(*up), down=cores.describe(*down), num_experts=5)
    made.is_gated, made.activation, made.is_interleaved = (
        gate.is_gated, gate.activation, gate.is_interleaved,
    )  # fmt: skip
    made.alpha, made.limit, made.offset = gate.alpha, gate.limit, gate.offset
    if with_bias:
        made.up_bias, made.down_bias = up_bias.data_ptr(), down_bias.data_ptr()

    def compute(x: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(len(x), 256, dtype=torch.float64)
        for token, experts in enumerate(chosen.tolist()):
            for place, choice in enumerate(experts):
                is_part, expert = choice >= 10, choice % 5
                if 5 <= choice < 10:
                    continue
                hidden = values_of(*up)[expert] @ x[token].double()
                hidden = gate.apply(hidden + up_bias[expert] * with_bias)
                hidden[128 if is_part else inner :] = 0
                product = values_of(*down)[expert] @ hidden.to(torch.bfloat16).double()
                product += down_bias[expert] * (with_bias and not is_part)
                out[token] += factors[token, place] * product
        return out

    return made, (compute, up, down, up_bias, down_bias)


GATES = {
    "silu": Gate(Activation.SILU, True),
    "gpt-oss": Gate(Activation.SILU, True, True, alpha=1.702, limit=7.0, offset=1.0),
    "gelu": Gate(Activation.GELU, True),
    "gelu tanh": Gate(Activation.GELU_TANH, True),
    "relu": Gate(Activation.RELU, True),
    "relu squared": Gate(Activation.RELU_SQUARED, False),
}


def draw_choices(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    x = torch.randn(num_tokens, 256).to(torch.bfloat16)
    chosen = torch.stack([torch.randperm(5)[:3] for _ in range(num_tokens)])
    return x, chosen, torch.rand(num_tokens, 3)


def take_part(chosen: torch.Tensor, expert: int) -> torch.Tensor:
    """Choose the first columns of an expert wherever it is chosen."""
    return torch.where(chosen == expert, chosen + 10, chosen)


@pytest.mark.parametrize("gate", first_quick(GATES.values()), ids=GATES)
@pytest.mark.parametrize("with_bias", first_quick([False, True]))
def test_experts(library: Library, team: Team, kernels: int, gate: Gate, with_bias: bool) -> None:
    experts, (compute, *kept) = describe_experts("bf16", gate, with_bias=with_bias)
    for num_tokens in (1, 4, 70):
        x, chosen, factors = draw_choices(num_tokens)
        made = cores.send(team, kernels, experts, x, chosen, factors, precise=True)
        # a value in between may round to the next bfloat16
        check(made, compute(x, chosen, factors), 2e-4)
        some = take_part(chosen, 2).where(chosen != 3, 5)
        part = cores.send(team, kernels, experts, x, some, factors, precise=True)
        check(part, compute(x, some, factors), 2e-4)
        few = library.team(1)
        assert torch.equal(
            made, cores.send(few, kernels, experts, x, chosen, factors, precise=True)
        )
        few.close()
    assert kept


@pytest.mark.parametrize(
    "name", first_quick([n for n in FORMS if "256" not in n and n != "bytes with zeros"])
)
def test_experts_of_each_form(team: Team, kernels: int, name: str) -> None:
    if FORMS[name].block in ((1, 128),):
        pytest.skip("192 columns are no multiple of 128")
    experts, (compute, *kept) = describe_experts(name, GATES["silu"], with_bias=False)
    x, chosen, factors = draw_choices(6)
    made = cores.send(team, kernels, experts, x, chosen, factors)
    assert made.dtype is torch.bfloat16
    check(made.double(), compute(x, chosen, factors), 2e-2)
    if FORMS[name].kind is not Kind.PACKED:
        some = take_part(chosen, int(chosen[0, 0]))
        part = cores.send(team, kernels, experts, x, some, factors)
        check(part.double(), compute(x, some, factors), 2e-2)
        assert not torch.equal(part, made)
    assert kept


@pytest.mark.parametrize("gate", [GATES["silu"], GATES["gpt-oss"]], ids=["silu", "gpt-oss"])
def test_packed_experts_whose_halves_share_a_block(team: Team, kernels: int, gate: Gate) -> None:
    """Rows of up then begin within one of the blocks that patches lie together for."""
    experts, (compute, *kept) = describe_experts("packed", gate, with_bias=False, inner=96)
    x, chosen, factors = draw_choices(6)
    made = cores.send(team, kernels, experts, x, chosen, factors)
    check(made.double(), compute(x, chosen, factors), 2e-2)
    assert kept


@pytest.mark.parametrize("name", ["bf16", "fp8", "mxfp4", "nvfp4", "int4 with zeros", "packed"])
def test_rows_in_any_order_make_the_same(library: Library, team: Team, name: str) -> None:
    form, parts = make_weight(name, 320, 256)
    weight, kernels = cores.describe(form, parts), library.kernels()
    x = torch.randn(1, 256).to(torch.bfloat16)
    expected = cores.multiply(team, kernels, weight, x, precise=True)
    try:
        for order in RowOrder:
            library.take_rows(order)
            assert torch.equal(cores.multiply(team, kernels, weight, x, precise=True), expected)
    finally:
        library.take_rows(RowOrder.OF_PROCESSOR)


@pytest.mark.slow
@pytest.mark.parametrize("num_threads", first_quick([6, 70]))
def test_any_number_of_threads_makes_the_same(library: Library, num_threads: int) -> None:
    """Also of one token, which whoever starts them prepares, and of none that is chosen."""
    experts, (_, *kept) = describe_experts("fp8", GATES["silu"], with_bias=False)
    form, parts = make_weight("fp8", 192, 256)
    weight, kernels = cores.describe(form, parts), library.kernels()
    one, many = library.team(1), library.team(num_threads)
    for num_tokens in (1, 4, 1):
        x, chosen, factors = draw_choices(num_tokens)
        for of in (chosen, chosen.where(chosen == chosen[0, 1], -1), torch.full_like(chosen, -1)):
            made = [cores.send(team, kernels, experts, x, of, factors) for team in (one, many)]
            assert torch.equal(*made)
            assert made[0].any() == (of >= 0).any()
        assert torch.equal(*(cores.multiply(team, kernels, weight, x) for team in (one, many)))
    one.close()
    many.close()
    assert kept


def test_gates_are_found_by_what_they_compute() -> None:
    plain = Qwen3MoeExperts(Qwen3MoeConfig(num_experts=4))
    clamped = GptOssExperts(GptOssConfig(num_local_experts=4, hidden_size=64, intermediate_size=32))
    assert cores.find_gate(plain) == GATES["silu"]
    assert cores.find_gate(clamped) == GATES["gpt-oss"]
    plain.act_fn = nn.GELU(approximate="tanh")
    assert cores.find_gate(plain) == GATES["gelu tanh"]
    plain.act_fn = nn.Tanh()
    with pytest.raises(OffplanError, match="no kernel for what Qwen3MoeExperts computes"):
        cores.find_gate(plain)
    plain.has_post_expert_norm = True
    with pytest.raises(OffplanError, match="no kernel for experts with a norm behind them"):
        cores.find_gate(plain)


REFUSED = {
    "float16": (RAW, torch.float16, 64, "computes in bfloat16, found a model in float16"),
    "nf4": (Form(Kind.NF4), torch.bfloat16, 64, "no kernel for weights stored as nf4"),
    "columns": (
        *(Form(Kind.W4A16, (1, 128), WordOrder.AWQ), torch.bfloat16, 256),
        "no kernel for weights stored as w4a16 1x128 awq",
    ),
    "groups": (
        *(Form(Kind.W8A16, (1, 64), WordOrder.COMPRESSED_TENSORS), torch.bfloat16, 256),
        "no kernel for scales of 64 weights of 8 bits",
    ),
    "long": (RAW, torch.bfloat16, 70000, "rows of 65536 weights at most, found 70000"),
}


@pytest.mark.parametrize(("form", "dtype", "num_in", "why"), REFUSED.values(), ids=REFUSED)
def test_what_has_no_kernel_is_named(form: Form, dtype: torch.dtype, num_in: int, why: str) -> None:
    assert why in str(cores.why_not(form, dtype, num_in))
    assert cores.why_not(RAW, torch.bfloat16, 64) is None


def test_a_plain_read_reads(team: Team) -> None:
    memory = torch.ones(1 << 20, dtype=torch.uint8)
    team.read(memory.data_ptr(), memory.nbytes)
    assert Component.WEIGHT in make_weight("bf16", 1, 2)[1]


def test_scales_of_scales_that_rows_do_not_share_evenly_are_refused() -> None:
    form, parts = make_weight("nvfp4", 65, 64)  # two scales of scales: the last row has none
    with pytest.raises(OffplanError, match=r"65 rows .* 2 scales of scales"):
        cores.describe(form, parts)
