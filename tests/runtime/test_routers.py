"""Routers that choose by one kernel, against transformers' own."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from offplan.kernel_sizes import are_routed
from tests.runtime.interpreted import (
    HAS_GPU,
    INTERPRETED,
    TARGETS,
    compile_ptx,
    need_triton,
    runs_kernels,
)
from tests.tiers import each_value_once

DEVICE = "cuda" if HAS_GPU else "cpu"
DTYPES = [torch.float32] if INTERPRETED else [torch.bfloat16, torch.float16, torch.float32]
SIZES = [(1, 8, 2), (1, 128, 8), (3, 32, 4), (16, 60, 6), (64, 33, 8)]
"""Tokens, experts, and experts of a token."""


def make_router(name: str, num_experts: int, num_chosen: int, normalises: bool) -> Any:
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    class Config:
        num_experts_per_tok = num_chosen
        num_local_experts = num_experts
        hidden_size = 48
        norm_topk_prob = normalises

    Config.num_experts = num_experts  # type: ignore[attr-defined]
    router: Any = {"gpt_oss": GptOssTopKRouter, "qwen3_moe": Qwen3MoeTopKRouter}[name](Config)
    return router


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("sizes", "name", "normalises", "dtype"),
    each_value_once(product(SIZES, ["gpt_oss", "qwen3_moe"], [True, False], DTYPES)),
)
def test_choices_are_those_of_transformers(
    sizes: tuple[int, int, int], name: str, normalises: bool, dtype: torch.dtype
) -> None:
    """The same experts in the same order, weights but for rounding, and the pairs sorted."""
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.model.router_kernel import choose
    from offplan.runtime.model.routers import find_choice

    torch.manual_seed(1)
    num_tokens, num_experts, num_chosen = sizes
    router = make_router(name, num_experts, num_chosen, normalises)
    router.weight.data = torch.randn_like(router.weight)
    router = router.to(DEVICE, dtype).requires_grad_(False)
    logits, expected, experts = router(torch.randn(num_tokens, 48, device=DEVICE).to(dtype))
    choice = find_choice(router)
    assert choice is not None
    # of equal scores torch takes any
    assert dtype is not torch.float32 or all(len(row.unique()) == num_experts for row in logits)
    weights, indices, order, starts = choose(
        logits, num_chosen, choice.of_all, choice.may_normalise and normalises
    )
    assert weights.dtype == expected.dtype
    taken = logits.gather(1, indices)
    assert torch.equal(taken, logits.gather(1, experts))  # whichever of equal ones
    assert torch.equal(indices, expect_experts(logits, num_chosen))
    torch.testing.assert_close(weights.float(), expected.float(), rtol=2e-6, atol=1e-7) if (
        dtype is torch.float32
    ) else torch.testing.assert_close(weights, expected)
    _, expected_order, expected_starts = sort_pairs(indices.reshape(-1), num_experts)
    assert torch.equal(order, expected_order)
    assert torch.equal(starts, expected_starts)


def expect_experts(logits: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Choose the largest scores, of equal ones the lower expert's."""
    return torch.sort(logits.float(), dim=-1, descending=True, stable=True)[1][:, :num_chosen]


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("of_all", [False, True])
def test_equal_scores_and_what_is_no_number(of_all: bool) -> None:
    """The lower expert comes first, zeros of both signs are equal, and each is taken once."""
    from offplan.runtime.model.router_kernel import choose

    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [
            [1.0, 3.0, 3.0, 1.0, 3.0],
            [-0.0, 0.0, -0.0, -1.0, 0.0],
            [-inf, -inf, -inf, -inf, -inf],
            [nan, 1.0, inf, nan, 2.0],
            [-nan, -1.0, -2.0, -inf, 1e30],
        ],
        device=DEVICE,
    )
    weights, indices, order, starts = choose(logits, 3, of_all, True)
    assert indices.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2], [0, 3, 2], [0, 4, 1]]
    assert weights[:2].isfinite().all()
    assert weights[2:].isnan().any(-1).all()
    assert order.sort()[0].tolist() == list(range(15))
    assert starts.tolist() == [0, 4, 8, 12, 13, 15]


def test_routers_are_known_by_their_code() -> None:
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter

    from offplan.runtime.model.routers import Choice, find_choice

    assert find_choice(make_router("gpt_oss", 4, 2, False)) == Choice(of_all=False)
    assert find_choice(make_router("qwen3_moe", 4, 2, True)) == Choice(True, may_normalise=True)

    class Other(type(make_router("gpt_oss", 4, 2, False))):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> Any:
            logits, scores, indices = super().forward(hidden_states)
            return logits, scores * 2, indices

    other = Other.__new__(Other)
    nn.Module.__init__(other)
    assert find_choice(other) is None
    assert find_choice(nn.Linear(2, 2)) is None
    mixtral = MixtralTopKRouter.__new__(MixtralTopKRouter)
    nn.Module.__init__(mixtral)
    assert find_choice(mixtral) is None


def test_few_tokens_are_routed() -> None:
    assert are_routed(1, 8)
    assert are_routed(16, 8)
    assert not are_routed(64, 9)
    assert not are_routed(65, 1)


@pytest.mark.slow
@pytest.mark.skipif(INTERPRETED, reason="compiles kernels")
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_compiles(target: int) -> None:
    """For GPUs that are not here."""
    need_triton()
    from offplan.runtime.model import router_kernel

    kinds = {"logits": "*bf16", "weights": "*bf16", "indices": "*i64"}
    kinds |= {"order": "*i32", "starts": "*i32"}
    kernel: Any = router_kernel.route
    for tokens, of_all in ((1, True), (64, False)):
        sizes = {"CHOSEN": 8, "EXPERTS": 128, "TOKENS": tokens, "PAIRS": 8 * tokens}
        ways = {"OF_ALL": of_all, "NORMALISES": of_all, "OTHERS": min(64, 8 * tokens)}
        options = {"num_warps": min(8, max(1, tokens // 2))}
        assert "entry" in compile_ptx(kernel, target, kinds, sizes | ways, options)
