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

from offplan.kernel_sizes import are_routed


class Choice(NamedTuple):
    """How a router makes weights of the scores of experts."""

    of_all: bool
    """True if weights are shares of the softmax over all experts, not over the chosen ones."""
    may_normalise: bool = False
    """True if ``norm_topk_prob`` says whether shares are divided by their sum."""


# Source of both: transformers 5.23, ``GptOssTopKRouter`` and ``Qwen3MoeTopKRouter``. A docstring
# would be one of their constants.
def _top_of_scores(self, hidden_states):  # type: ignore[no-untyped-def]
    router_logits = F.linear(hidden_states, self.weight, self.bias)
    router_top_value, router_indices = torch.topk(router_logits, self.top_k, dim=-1)
    router_scores = torch.nn.functional.softmax(
        router_top_value, dim=1, dtype=router_top_value.dtype
    )
    return router_logits, router_scores, router_indices


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


_KNOWN = {_top_of_scores: Choice(of_all=False), _top_of_shares: Choice(True, may_normalise=True)}


def find_choice(router: nn.Module) -> Choice | None:
    """Return how a module chooses experts if its forward has the code of a known router."""
    code = getattr(type(router).forward, "__code__", None)
    same = (choice for known, choice in _KNOWN.items() if _are_same(known.__code__, code))
    return next(same, None)


def _are_same(known: CodeType, code: CodeType | None) -> bool:
    parts = ("co_code", "co_names", "co_varnames", "co_consts", "co_freevars")
    return all(getattr(known, part) == getattr(code, part, None) for part in parts)


def choose_by_kernel(skeleton: nn.Module) -> None:
    """Have the known routers of a model choose by the kernel where few tokens choose on a GPU."""
    for module in skeleton.modules():
        choice = find_choice(module)
        if choice is not None:
            own: Any = type(module)
            vars(module)["choice"] = choice
            module.__class__ = _class_by_kernel(own)


class _ByKernel(nn.Module):
    """Stands before the class of a router, whose forward it calls for many tokens."""

    forward: Callable[..., Any]

    def forward(self, hidden_states: torch.Tensor) -> Any:  # type: ignore[no-redef]
        """Return scores, [tokens, experts], and the weights and experts of each token."""
        own: Any = self
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        if not (rows.is_cuda and are_routed(len(rows), own.top_k)):
            return super().forward(hidden_states)
        from offplan.runtime.model.router_kernel import choose  # needs triton

        logits = F.linear(rows, own.weight, getattr(own, "bias", None))
        normalises = own.choice.may_normalise and bool(own.norm_topk_prob)
        return (logits, *choose(logits, own.top_k, own.choice.of_all, normalises)[:2])


@cache  # layers of two classes would be compiled twice
def _class_by_kernel(own: Any) -> Any:
    return type(own.__name__, (_ByKernel, own), {})
