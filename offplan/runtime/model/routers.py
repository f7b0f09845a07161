"""Routers whose tokens choose experts by one kernel in steps, where transformers' code is known.

A router is known by the code of its forward, not by its name: a family whose code differs, and a
version of transformers that changes it, keep the operators that transformers calls.
"""

from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from offplan.kernel_sizes import LEAST_SHARES, are_routed, next_power


class Scoring(NamedTuple):
    """How a router makes weights of the scores of experts."""

    score: str
    """What weights are, as ``router_kernel.route`` says."""
    normalises: bool | None = True
    """True if they are divided by their sum, None if ``norm_topk_prob`` says whether."""
    widens: bool = False
    """True if they stay in float32."""
    narrows: bool = False
    """True if they are of the type of the rows, whatever that of scores."""
    reads_float32: bool = False
    """True if scores are computed in float32."""
    scale: str | None = None
    """The attribute of a router that multiplies weights."""


# Source of all: transformers 5.23, the routers of GPT-OSS, Granite, Qwen3-MoE, Qwen3.5-MoE,
# Mixtral, HunYuan-MoE, Ernie 4.5, DeepSeek-V2 and V3, MiniMax-M2 and Hy3. A docstring would be one
# of their constants.
def _top_of_scores(self, hidden_states):  # type: ignore[no-untyped-def]
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
    router_scores = torch.nn.functional.softmax(
        router_top_value, dim=1, dtype=router_top_value.dtype
    )
    return router_logits, router_scores, router_indices


def _top_of_wide_scores(self, hidden_states):  # type: ignore[no-untyped-def]
    router_logits = F.linear(hidden_states, self.weight).float()
    top_k_logits, top_k_index = router_logits.topk(self.top_k, dim=-1)
    top_k_weights = torch.softmax(top_k_logits, dim=-1).type_as(hidden_states)
    return router_logits, top_k_weights, top_k_index


def _top_of_shares(self, hidden_states):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    if self.norm_topk_prob:
        router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_top_value = router_top_value.to(router_logits.dtype)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices


def _top_of_shares_divided(self, hidden_states):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits, dtype=torch.float, dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_top_value = router_top_value.to(router_logits.dtype)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices


def _top_of_shares_in_float32(self, hidden_states):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states, self.weight)
    router_probs = torch.nn.functional.softmax(router_logits.float(), dim=-1)
    router_top_value, router_indices = torch.topk(router_probs, self.top_k, dim=-1)
    router_top_value /= router_top_value.sum(dim=-1, keepdim=True)
    router_scores = router_top_value
    return router_logits, router_scores, router_indices


def _top_of_shares_of_gate(self, hidden_states):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.reshape(-1, hidden_states.shape[-1])
    if self.wg.weight.dtype == torch.float32:
        hidden_states = hidden_states.float()
    router_logits = self.wg(hidden_states)
    routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
    routing_weights, selected_experts = torch.topk(routing_weights, self.top_k, dim=-1)
    routing_weights /= routing_weights.sum(dim=-1, keepdim=True)
    return router_logits, routing_weights.to(router_logits.dtype), selected_experts


def _top_of_biased_shares(self, hidden_states):  # type: ignore[no-untyped-def]
    device_type = hidden_states.device.type if isinstance(hidden_states.device.type, str) else "cpu"
    with maybe_autocast(device_type=device_type, enabled=False):  # type: ignore[name-defined] # noqa: F821
        router_logits = F.linear(hidden_states.float(), self.weight.float())
        routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
        _, selected_experts = torch.topk(self.moe_statics(routing_weights), self.top_k, dim=-1)
        routing_weights = torch.gather(routing_weights, dim=-1, index=selected_experts)
        routing_weights = routing_weights / torch.clamp(
            routing_weights.sum(dim=-1, keepdim=True), min=self.norm_min
        )
    routing_weights = routing_weights.to(hidden_states.dtype)
    return router_logits, routing_weights, selected_experts


def _top_of_shares_of_groups(self, hidden_states):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.view(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
    scores = router_logits.softmax(dim=-1, dtype=torch.float32)
    if self.topk_method == "greedy":
        topk_weights, topk_indices = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
    elif self.topk_method == "group_limited_greedy":
        group_scores = (
            scores.view(-1, self.num_group, self.num_experts // self.num_group).max(dim=-1).values
        )
        group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
        group_mask = torch.zeros_like(group_scores)
        group_mask.scatter_(1, group_idx, 1)
        score_mask = (
            group_mask.unsqueeze(-1)
            .expand(-1, self.num_group, self.num_experts // self.num_group)
            .reshape(-1, self.num_experts)
        )
        scores = scores.masked_fill(~score_mask.bool(), 0.0)
        topk_weights, topk_indices = torch.topk(scores, k=self.top_k, dim=-1, sorted=False)
    topk_weights = topk_weights * self.routed_scaling_factor
    return router_logits, topk_weights, topk_indices


def _top_of_groups(self, hidden_states):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.view(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states.type(torch.float32), self.weight.type(torch.float32))
    scores = router_logits.sigmoid()
    scores_for_choice = scores + self.e_score_correction_bias
    group_scores = (
        scores_for_choice.view(-1, self.num_group, self.num_experts // self.num_group)
        .topk(2, dim=-1)[0]
        .sum(dim=-1)
    )
    group_idx = torch.topk(group_scores, k=self.topk_group, dim=-1, sorted=False)[1]
    group_mask = torch.zeros_like(group_scores)
    group_mask.scatter_(1, group_idx, 1)
    score_mask = (
        group_mask.unsqueeze(-1)
        .expand(-1, self.num_group, self.num_experts // self.num_group)
        .reshape(-1, self.num_experts)
    )
    scores_for_choice = scores_for_choice.masked_fill(~score_mask.bool(), float("-inf"))
    topk_indices = torch.topk(scores_for_choice, k=self.top_k, dim=-1, sorted=False)[1]
    topk_weights = scores.gather(1, topk_indices)
    if self.norm_topk_prob:
        denominator = topk_weights.sum(dim=-1, keepdim=True) + 1e-20
        topk_weights /= denominator
    topk_weights = topk_weights * self.routed_scaling_factor
    return router_logits, topk_weights, topk_indices


def _top_of_sigmoids(self, hidden_states, e_score_correction_bias):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states.to(self.weight.dtype), self.weight)
    routing_weights = nn.functional.sigmoid(router_logits.float())
    scores_for_choice = routing_weights + e_score_correction_bias
    _, top_k_index = torch.topk(scores_for_choice, self.top_k, dim=-1, sorted=False)
    top_k_weights = routing_weights.gather(1, top_k_index)
    top_k_weights /= top_k_weights.sum(dim=-1, keepdim=True)
    router_scores = top_k_weights
    return router_logits, router_scores, top_k_index


def _top_of_scaled_sigmoids(self, hidden_states, e_score_correction_bias):  # type: ignore[no-untyped-def]
    hidden_states = hidden_states.reshape(-1, self.hidden_dim)
    router_logits = F.linear(hidden_states.float(), self.weight.float())
    routing_weights = torch.sigmoid(router_logits)
    scores_for_choice = routing_weights + e_score_correction_bias
    _, top_k_index = torch.topk(scores_for_choice, self.top_k, dim=-1, sorted=False)
    top_k_weights = routing_weights.gather(1, top_k_index)
    top_k_weights = top_k_weights / (top_k_weights.sum(dim=-1, keepdim=True) + 1e-20)
    top_k_weights = top_k_weights * self.router_scaling_factor
    return router_logits, top_k_weights, top_k_index


_SCALE = "routed_scaling_factor"
_KNOWN = {
    _top_of_scores: Scoring("chosen"),
    _top_of_wide_scores: Scoring("chosen", narrows=True),
    _top_of_shares: Scoring("all", normalises=None),
    _top_of_shares_divided: Scoring("all"),
    _top_of_shares_in_float32: Scoring("all", widens=True),
    _top_of_shares_of_gate: Scoring("all"),
    _top_of_biased_shares: Scoring("share", narrows=True, reads_float32=True),
    _top_of_shares_of_groups: Scoring("all", normalises=False, reads_float32=True, scale=_SCALE),
    _top_of_groups: Scoring("sigmoid", normalises=None, reads_float32=True, scale=_SCALE),
    _top_of_sigmoids: Scoring("sigmoid", widens=True),
    _top_of_scaled_sigmoids: Scoring("sigmoid", reads_float32=True, scale="router_scaling_factor"),
}


def find_scoring(router: nn.Module) -> Scoring | None:
    """Return how a module chooses experts if its forward has the code of a known router.

    The kernel takes several groups of experts if both numbers are powers of two, and their two
    best experts tell which are looked at.
    """
    code = getattr(type(router).forward, "__code__", None)
    same = (scoring for known, scoring in _KNOWN.items() if _are_same(known.__code__, code))
    scoring = next(same, None)
    return scoring if scoring is None or _is_taken(router) else None


def _is_taken(router: Any) -> bool:
    if getattr(router, "norm_min", LEAST_SHARES) != LEAST_SHARES:
        return False
    if hasattr(router, "topk_method"):  # DeepSeek-V2's
        return bool(router.topk_method == "greedy")
    num_groups = getattr(router, "num_group", 1)
    return num_groups == 1 or all(n == next_power(n) for n in (num_groups, router.num_experts))


def _are_same(known: CodeType, code: CodeType | None) -> bool:
    parts = ("co_code", "co_names", "co_varnames", "co_consts", "co_freevars")
    return all(getattr(known, part) == getattr(code, part, None) for part in parts)


def choose_by_kernel(skeleton: nn.Module) -> None:
    """Have the known routers of a model choose by the kernel where few tokens choose on a GPU."""
    for module in skeleton.modules():
        scoring = find_scoring(module)
        if scoring is not None:
            own: Any = type(module)
            vars(module)["scoring"] = scoring
            module.__class__ = _class_by_kernel(own)


class _ByKernel(nn.Module):
    """Stands before the class of a router, whose forward it calls for many tokens."""

    forward: Callable[..., Any]

    def forward(  # type: ignore[no-redef]
        self, hidden_states: torch.Tensor, bias: torch.Tensor | None = None
    ) -> Any:
        """Return scores, [tokens, experts], and the weights and experts of each token.

        Some blocks have the ``bias`` by which experts are chosen, and not the router.
        """
        own: Any = self
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not (rows.is_cuda and are_routed(len(rows), own.top_k)):
            return super().forward(hidden_states, *([] if bias is None else [bias]))
        logits, chosen = route_rows(own, rows, bias)
        return (logits, *chosen[:2])


def route_rows(
    router: Any, rows: torch.Tensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the scores of rows, [rows, experts], and what the kernel chooses by them.

    ``router`` has its ``scoring``, and the ``bias`` that experts are chosen by if none is given.
    """
    from offplan.runtime.model.router_kernel import Way, choose  # needs triton

    scoring: Scoring = router.scoring
    normalises = scoring.normalises
    if normalises is None:
        normalises = bool(router.norm_topk_prob)
    way = Way(scoring.score, normalises, widens=scoring.widens)
    if scoring.score == "sigmoid" and hasattr(router, "num_group"):
        way = way._replace(groups=router.num_group, chosen_groups=router.topk_group)
    if scoring.scale is not None:
        way = way._replace(scale=float(getattr(router, scoring.scale)))
    if (gate := getattr(router, "wg", None)) is not None:  # HunYuan's
        logits = gate(rows.float() if gate.weight.dtype is torch.float32 else rows)
    elif scoring.reads_float32:
        logits = F.linear(rows.float(), router.weight.float())
    else:
        logits = F.linear(
            rows.to(router.weight.dtype), router.weight, getattr(router, "bias", None)
        )
    if bias is None:
        bias = getattr(getattr(router, "moe_statics", router), "e_score_correction_bias", None)
    weights, *others = choose(logits, router.top_k, way, None if bias is None else bias.flatten())
    return logits, (weights.to(rows.dtype) if scoring.narrows else weights, *others)


@cache  # layers of two classes would be compiled twice
def _class_by_kernel(own: Any) -> Any:
    return type(own.__name__, (_ByKernel, own), {})
