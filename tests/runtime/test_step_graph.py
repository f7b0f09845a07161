"""Graphs of compiled steps that take fewer launches, run by Triton's interpreter."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import linear

from tests.runtime import coded
from tests.runtime.columns import hold
from tests.runtime.interpreted import (
    INTERPRETED,
    TARGETS,
    compile_kernel,
    compile_ptx,
    need_triton,
    runs_kernels,
    spilled_bytes,
)

DEVICE, DTYPE = coded.DEVICE, coded.DTYPES[0]


@pytest.fixture(autouse=INTERPRETED)
def limits_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    from offplan.runtime.forms import products
    from offplan.runtime.model import step_graph

    monkeypatch.setattr(products, "gpu_limits", lambda index: (99 << 10, 128))
    monkeypatch.setattr(step_graph, "DEVICES", ("cuda", "cpu"))


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(DTYPE)


def compile_changed(step: Callable[..., Any], *inputs: Any) -> tuple[Any, Counter[str]]:
    """Run a step whose graph is changed, and count what it calls, by the name."""
    from torch._dynamo.backends.common import aot_autograd

    from offplan.runtime.model.step_graph import FewerLaunches

    calls: Counter[str] = Counter()

    def change(module: Any, _: Any) -> Any:
        FewerLaunches()(module.graph)
        module.graph.lint()
        module.recompile()
        calls.update(str(node.target) for node in module.graph.nodes if node.op == "call_function")
        return module

    torch._dynamo.reset()
    with torch.no_grad():
        made = torch.compile(step, backend=aot_autograd(fw_compiler=change))(*inputs)
    return made, calls


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("rows", "has_bias"), [(1, True), (2, False), (4, True)])
def test_values_are_multiplied_together(rows: int, has_bias: bool) -> None:
    """Those that read the same rows: three weights in a launch, a small one and another in one."""
    sizes = [(264, 72), (300, 72), (256, 72), (40, 72), (264, 264)]
    weights = [random(*size) for size in sizes]
    biases = [random(len(weight)) if has_bias else None for weight in weights]

    def step(x: torch.Tensor, *tensors: Any) -> Any:
        count = len(sizes)
        own, added = tensors[:count], tensors[count:]
        first, *more = (linear(x, own[n], added[n]) for n in range(4))
        return first, *more, linear(first, own[4], added[4])

    made, calls = compile_changed(step, random(1, rows, 72), *weights, *biases)
    alone = rows == 1  # of several rows a library multiplies by one large weight sooner
    assert calls["offplan.multiply_few.default"] == 2 + alone
    assert calls["aten.addmm.default"] + calls["aten.mm.default"] == 1 - alone
    torch.manual_seed(0)
    x = random(1, rows, 72)
    again, _ = compile_changed(step, x, *weights, *biases)
    for got, weight, bias in zip(again[:4], weights, biases, strict=False):
        expected = x.double() @ weight.double().T + (0 if bias is None else bias.double())
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 2 * torch.finfo(DTYPE).eps * expected.abs().max()
    assert made[4].shape == (1, rows, 264)


@pytest.mark.gpu
@runs_kernels
def test_products_beside_others_are_those_alone() -> None:
    from offplan.runtime.forms.value_kernels import multiply_values

    x, weights = random(2, 1100), [random(size, 1100) for size in (264, 256, 520)]
    biases = [random(len(weight)) for weight in weights]
    alone = [
        multiply_values(x, [weight], [bias]) for weight, bias in zip(weights, biases, strict=True)
    ]
    assert torch.equal(multiply_values(x, weights, biases), torch.cat(alone))


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(("rows", "num_in"), [(1, 17000), (2, 9000), (4, 5120)])
def test_small_weights_longer_than_a_tile(rows: int, num_in: int) -> None:
    from offplan.runtime.forms.value_kernels import choose_tile, multiply_values

    (_, columns), _ = choose_tile(rows, num_in)
    assert columns < num_in
    x, weight = random(rows, num_in), random(40, num_in)
    expected = x.double() @ weight.double().T
    made = multiply_values(x, [weight], []).view(rows, 40)
    assert (made - expected).abs().max() < 2 * torch.finfo(DTYPE).eps * expected.abs().max()


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("name", ["fp8", "int4 about 8"])
def test_codes_are_multiplied_together(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit as one by one; a product of other rows keeps its launch."""
    from offplan.runtime.forms import operators

    weights = []
    for num_out in (128, 64):
        monkeypatch.setattr(coded, "NUM_OUT", num_out)
        form, parts = hold(coded.FORMS[name], coded.tame(coded.make_parts(name), coded.FORMS[name]))
        weights.append(parts)
    tensors = [[*parts.values()] for parts in weights]

    def step(x: torch.Tensor, other: torch.Tensor, first: Any, second: Any) -> Any:
        parts = [dict(zip(weights[0], each, strict=True)) for each in (first, second)]
        made = [operators.multiply(form, each, x.flatten(0, -2)) for each in parts]
        return *made, operators.multiply(form, parts[0], other)

    x, other = random(1, 1, coded.NUM_IN), random(1, coded.NUM_IN)
    made, calls = compile_changed(step, x, other, *tensors)
    assert calls["offplan.multiply_together.default"] == 1
    assert calls["offplan.multiply.default"] == 1
    for got, expected in zip(made, step(x, other, *tensors), strict=True):
        assert torch.equal(got, expected)


def test_an_operator_that_nobody_has_registered_is_called_by_no_node() -> None:
    """As the routers' is where no router of a model is known."""
    from offplan.runtime.model.step_graph import _is

    graph = torch.fx.Graph()
    node = graph.call_function(torch.ops.aten.add.Tensor, (graph.placeholder("x"), 1))
    assert not _is(node, "nobody_has_registered_it")


@pytest.mark.gpu
@runs_kernels
def test_pairs_are_sorted_once() -> None:
    """By the kernel that chose experts; other pairs are sorted as ever."""
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.model.router_kernel import Way, choose

    def step(logits: torch.Tensor) -> Any:
        weights, indices, *_ = choose(logits, 2, Way("all"))
        own = sort_pairs(indices.reshape(-1), 8)[1:]
        return weights, *own, *sort_pairs(indices[:2].reshape(-1), 8)[1:]

    logits = random(3, 8)
    made, calls = compile_changed(step, logits)
    assert calls["offplan.sort_pairs.default"] == 1
    for got, expected in zip(made, step(logits), strict=True):
        assert torch.equal(got, expected)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_compiles(target: int, tmp_path: Path) -> None:
    """For GPUs that are not here; of small weights threads keep nothing in local memory."""
    need_triton()
    from offplan.runtime.forms import value_kernels

    kernel: Any = value_kernels.multiply_few
    kinds: dict[str, Any] = dict.fromkeys(("x", "out", "weight", "bias"), "*bf16")
    for rows, more in ((1, ("i32", "i32", "i64", "i64") * 2), (4, None)):
        constants: dict[Any, Any] = {"ROWS": rows, "BLOCK_N": 8, "BLOCK_K": 512}
        constants |= {} if more else {"more": None, "bias": None}
        own = kinds | ({"more": more} if more else {})
        assert "entry" in compile_ptx(kernel, target, own, constants)
    for rows, num_in in product((1, 2, 4), (2880, 5120, 16384)):
        (outputs, columns), warps = value_kernels.choose_tile(rows, num_in)
        constants = {"ROWS": rows, "BLOCK_N": outputs, "BLOCK_K": columns, "more": None}
        made = compile_kernel(kernel, target, kinds, constants, {"num_warps": warps})
        assert not spilled_bytes(made, target, tmp_path)


STEP = """
import sys
import torch
from torch.nn.functional import linear
from offplan.runtime.model import step_graph

step_graph.DEVICES = ("cuda", "cpu")
options = {"post_grad_custom_pre_pass": step_graph.FewerLaunches()}
step = lambda x, one, other: (linear(x, one), linear(x, other))
with torch.no_grad():
    inputs = [torch.randn(rows, 128, device=sys.argv[1]).bfloat16() for rows in (1, 64, 64)]
    made = torch.compile(step, options=options)(*inputs)
    for own, expected in zip(made, step(*inputs), strict=True):
        torch.testing.assert_close(own, expected, rtol=0.02, atol=0.2)
print(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])
"""


@runs_kernels
def test_a_graph_that_another_process_compiled_is_run(tmp_path: Path) -> None:
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", STEP, DEVICE]
    hits = [
        subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert hits == ["0\n", "1\n"]
