"""Routers that choose by one kernel, against transformers' own."""

from itertools import product
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
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
GROUPED = [(1, 60, 4, 1, 1), (2, 32, 4, 8, 2), (5, 64, 6, 4, 4), (16, 256, 8, 8, 4)]
"""The same, groups of experts, and how many of these are looked at."""


def make_router(
    name: str, num_experts: int, num_chosen: int, normalises: bool, groups: tuple[int, int] = (1, 1)
) -> Any:
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.ernie4_5_moe.modeling_ernie4_5_moe import Ernie4_5_MoeTopKRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.granitemoe.modeling_granitemoe import GraniteMoeTopKRouter
    from transformers.models.hunyuan_v1_moe.modeling_hunyuan_v1_moe import HunYuanMoEV1Gate
    from transformers.models.hy_v3.modeling_hy_v3 import HYV3TopKRouter
    from transformers.models.minimax_m2.modeling_minimax_m2 import MiniMaxM2TopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    class Config:
        num_experts_per_tok = num_chosen
        num_local_experts = num_experts
        hidden_size = 48
        norm_topk_prob = normalises
        routed_scaling_factor = router_scaling_factor = 2.5
        moe_norm_min = 1e-12
        moe_topk = num_chosen
        topk_method = "greedy"

    Config.num_experts = num_experts  # type: ignore[attr-defined]
    Config.n_group, Config.topk_group = groups  # type: ignore[attr-defined]
    classes = {
        "deepseek_v2": DeepseekV2TopkRouter,
        "deepseek_v3": DeepseekV3TopkRouter,
        "ernie": Ernie4_5_MoeTopKRouter,
        "gpt_oss": GptOssTopKRouter,
        "granite": GraniteMoeTopKRouter,
        "hunyuan": HunYuanMoEV1Gate,
        "hy_v3": HYV3TopKRouter,
        "minimax_m2": MiniMaxM2TopKRouter,
        "mixtral": MixtralTopKRouter,
        "qwen3_5_moe": Qwen3_5MoeTopKRouter,
        "qwen3_moe": Qwen3MoeTopKRouter,
    }
    router: Any = classes[name](Config)
    for weight in router.parameters():
        weight.data = torch.randn_like(weight)
    return router


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("sizes", "name", "normalises", "dtype"),
    each_value_once(
        product(
            SIZES,
            ["deepseek_v2", "gpt_oss", "granite", "hunyuan", "mixtral", "qwen3_5_moe", "qwen3_moe"],
            [True, False],
            DTYPES,
        )
    ),
)
def test_choices_are_those_of_transformers(
    sizes: tuple[int, int, int], name: str, normalises: bool, dtype: torch.dtype
) -> None:
    """The same experts in the same order, weights but for rounding, and the pairs sorted."""
    torch.manual_seed(1)
    num_tokens, num_experts, num_chosen = sizes
    router = make_router(name, num_experts, num_chosen, normalises)
    router, rows = prepare(router, num_tokens, dtype)
    logits, expected, experts = router(rows)
    order = logits.gather(1, experts).sort(descending=True, stable=True)[1]  # DeepSeek-V2 does not
    expected, experts = expected.gather(1, order), experts.gather(1, order)
    # of equal scores torch takes any
    assert dtype is not torch.float32 or all(len(row.unique()) == num_experts for row in logits)
    weights, indices = check_order(router, rows)
    assert weights.dtype == expected.dtype
    assert torch.equal(logits.gather(1, indices), logits.gather(1, experts))  # whichever of equals
    assert torch.equal(indices, expect_experts(logits, num_chosen))
    if weights.dtype is torch.float32:
        torch.testing.assert_close(weights, expected, rtol=2e-6, atol=1e-7)
    else:
        torch.testing.assert_close(weights, expected)


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("sizes", "normalises", "dtype"), each_value_once(product(GROUPED, [True, False], DTYPES))
)
def test_choices_by_sigmoids_are_those_of_transformers(
    sizes: tuple[int, ...], normalises: bool, dtype: torch.dtype
) -> None:
    """A bias moves the choice and no weight, and experts of other groups are left out."""
    torch.manual_seed(2)
    num_tokens, num_experts, num_chosen, *groups = sizes
    router = make_router("deepseek_v3", num_experts, num_chosen, normalises, tuple(groups))  # type: ignore[arg-type]
    router.e_score_correction_bias.copy_(torch.randn(num_experts) / 4)
    router, rows = prepare(router, num_tokens, dtype)
    _, expected, experts = router(rows)
    weights, indices = check_order(router, rows)
    experts, places = experts.sort()
    ours, own = indices.sort()
    assert torch.equal(ours, experts)
    torch.testing.assert_close(
        weights.gather(1, own), expected.gather(1, places), rtol=2e-6, atol=1e-7
    )


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize(
    ("sizes", "name", "dtype"),
    each_value_once(product(SIZES, ["ernie", "hy_v3", "minimax_m2"], DTYPES)),
)
def test_choices_by_a_bias_are_those_of_transformers(
    sizes: tuple[int, int, int], name: str, dtype: torch.dtype
) -> None:
    """Whether the router or its block has the bias; weights are of the router's type."""
    torch.manual_seed(3)
    num_tokens, num_experts, num_chosen = sizes
    router, rows = prepare(make_router(name, num_experts, num_chosen, True), num_tokens, dtype)
    biases = [] if name == "ernie" else [torch.randn(num_experts, device=DEVICE) / 4]
    if name == "ernie":
        router.moe_statics.e_score_correction_bias.div_(16)
    _, expected, experts = router(rows, *biases)
    weights, indices = check_order(router, rows, *biases)
    assert weights.dtype == expected.dtype
    experts, places = experts.sort()
    ours, own = indices.sort()
    assert torch.equal(ours, experts)
    torch.testing.assert_close(weights.gather(1, own), expected.gather(1, places))


def need_code(router: Any) -> None:
    """Skip where transformers is older than the code by which its router is known."""
    from offplan.runtime.model.routers import find_scoring

    if Version(transformers.__version__) < Version("5.21") and find_scoring(router) is None:
        pytest.skip(f"transformers {transformers.__version__} has another {type(router).__name__}")


def prepare(router: Any, num_tokens: int, dtype: torch.dtype) -> tuple[Any, torch.Tensor]:
    """Bring a router to the device, with rows for it."""
    need_code(router)
    router = router.to(DEVICE, dtype).requires_grad_(False)
    return router, torch.randn(num_tokens, 48, device=DEVICE).to(dtype)


def check_order(
    router: Any, rows: torch.Tensor, *bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and experts that the kernel finds, whose pairs it sorts, too."""
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.model.routers import find_scoring, route_rows

    router.scoring = find_scoring(router)
    _, (weights, indices, order, starts) = route_rows(router, rows, *bias)
    _, expected_order, expected_starts = sort_pairs(indices.reshape(-1), router.num_experts)
    assert torch.equal(order, expected_order)
    assert torch.equal(starts, expected_starts)
    return weights, indices


def expect_experts(logits: torch.Tensor, num_chosen: int) -> torch.Tensor:
    """Choose the largest scores, of equal ones the lower expert's."""
    return torch.sort(logits.float(), dim=-1, descending=True, stable=True)[1][:, :num_chosen]


@pytest.mark.gpu
@runs_kernels
@pytest.mark.parametrize("score", ["chosen", "all", "sigmoid", "share"])
def test_equal_scores_and_what_is_no_number(score: str) -> None:
    """The lower expert comes first, zeros of both signs are equal, and each is taken once."""
    from offplan.runtime.model.router_kernel import Way, choose

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
    weights, indices, order, starts = choose(logits, 3, Way(score))
    of_nan = [[0, 1, 2]] * 2 if score == "share" else [[0, 3, 2], [0, 4, 1]]  # which all shares are
    assert indices.tolist() == [[1, 2, 4], [0, 1, 2], [0, 1, 2], *of_nan]
    assert weights[:2].isfinite().all()
    assert weights[3:].isnan().any(-1).all()
    assert weights[2].isnan().any() == (score != "sigmoid")  # all of whose are zero
    assert order.sort()[0].tolist() == list(range(15))
    expected = indices.flatten().bincount(minlength=5).cumsum(0)
    assert starts.tolist() == [0, *expected.tolist()]


def test_routers_are_known_by_their_code() -> None:
    from transformers.models.jamba.modeling_jamba import JambaTopKRouter

    from offplan.runtime.model.routers import Scoring, find_scoring

    assert find_scoring(make_router("gpt_oss", 4, 2, False)) == Scoring("chosen")
    assert find_scoring(make_router("qwen3_moe", 4, 2, True)) == Scoring("all", normalises=None)
    assert find_scoring(make_router("qwen3_5_moe", 4, 2, True)) == Scoring("all")
    assert find_scoring(make_router("mixtral", 4, 2, True)) == Scoring("all", widens=True)
    in_groups = make_router("deepseek_v2", 8, 2, True)
    scale = "routed_scaling_factor"
    of_groups = Scoring("all", normalises=False, reads_float32=True, scale=scale)
    assert find_scoring(in_groups) == of_groups
    for method in ("group_limited_greedy", None):
        in_groups.topk_method = method
        assert find_scoring(in_groups) is None
    by_sigmoids = Scoring("sigmoid", normalises=None, reads_float32=True, scale=scale)
    assert find_scoring(make_router("deepseek_v3", 8, 2, True)) == by_sigmoids
    assert find_scoring(make_router("deepseek_v3", 60, 2, True)) == by_sigmoids
    assert find_scoring(make_router("deepseek_v3", 60, 2, True, (4, 2))) is None

    class Other(type(make_router("gpt_oss", 4, 2, False))):  # type: ignore[misc]
        def forward(self, hidden_states: torch.Tensor) -> Any:
            logits, scores, indices = super().forward(hidden_states)
            return logits, scores * 2, indices

    other = Other.__new__(Other)
    nn.Module.__init__(other)
    assert find_scoring(other) is None
    assert find_scoring(nn.Linear(2, 2)) is None
    jamba = JambaTopKRouter.__new__(JambaTopKRouter)
    nn.Module.__init__(jamba)
    assert find_scoring(jamba) is None


def test_another_least_sum_is_not_known() -> None:
    from offplan.runtime.model.routers import Scoring, find_scoring

    ernie = make_router("ernie", 4, 2, True)
    need_code(ernie)
    assert find_scoring(ernie) == Scoring("share", narrows=True, reads_float32=True)
    ernie.norm_min = 1e-3
    assert find_scoring(ernie) is None


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

    kinds = {"logits": "*bf16", "bias": "*fp32", "weights": "*fp32", "indices": "*i64"}
    kinds |= {"order": "*i32", "starts": "*i32", "scale": "fp32"}
    kernel: Any = router_kernel.route
    for tokens, experts, score, groups in (
        (1, 128, "all", 1),
        (64, 128, "chosen", 1),
        (4, 64, "share", 1),
        (16, 256, "sigmoid", 8),
    ):
        sizes = {"CHOSEN": 8, "EXPERTS": experts, "TOKENS": tokens, "PAIRS": 8 * tokens}
        ways = {"SCORE": score, "NORMALISES": True, "GROUPS": groups, "CHOSEN_GROUPS": 4}
        options = {"num_warps": min(8, max(1, tokens // 2))}
        constants = sizes | ways | {"OTHERS": min(64, 8 * tokens)}
        if score in ("all", "chosen"):
            constants["bias"] = None
        own = {name: kind for name, kind in kinds.items() if name not in constants}
        assert "entry" in compile_ptx(kernel, target, own, constants, options)
