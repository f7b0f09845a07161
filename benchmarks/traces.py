"""Traces of routing with a stated reuse: which experts each token of a layer chooses.

Random weights choose almost uniformly, so that no cache would serve them; real models choose again
what they chose a few tokens ago.
"""

import numpy as np
from numpy.typing import NDArray

Trace = NDArray[np.int64]
"""Experts that tokens choose: [tokens, choices]."""

REUSES: dict[str, tuple[tuple[int, int, float], ...]] = {
    "published": (
        (1, 1, 0.45), (2, 2, 0.12), (3, 3, 0.07), (4, 4, 0.05), (5, 5, 0.04), (6, 6, 0.03),
        (7, 7, 0.02), (8, 8, 0.02), (9, 16, 0.06), (17, 32, 0.05), (33, 64, 0.03),
    ),
    "none": (),
    "skewed": (),
}  # fmt: skip
"""Chances that a choice is an expert that was last chosen so many tokens ago, from and to.

What is left is any expert. Source: Qwen3-30B-A3B as reported, of which 45 % of a token's experts
are chosen again by the next token and 80 % within eight. ``skewed`` draws experts by a popularity
of their own, whatever came before: the nth most popular one as often as 1 / n.
"""


def make_trace(num_experts: int, num_chosen: int, num_tokens: int, reuse: str, seed: int) -> Trace:
    """Draw the experts of each token of a sequence, distinct within a token."""
    random = np.random.default_rng(seed)
    if reuse == "skewed":
        popularity = random.permutation(1 / np.arange(1, num_experts + 1))
        drawn = np.log(popularity) + random.gumbel(size=(num_tokens, num_experts))
        return np.argsort(-drawn, axis=1)[:, :num_chosen]
    ages = REUSES[reuse]
    ends = np.cumsum([chance for *_, chance in ages])
    last = np.full(num_experts, -(10**9))
    trace = np.zeros((num_tokens, num_chosen), np.int64)
    for token in range(num_tokens):
        is_free = np.ones(num_experts, bool)
        for number in range(num_chosen):
            which = int(np.searchsorted(ends, random.random(), side="right"))
            fitting = np.flatnonzero(is_free)
            if which < len(ages):
                low, high, _ = ages[which]
                age = token - last
                aged = np.flatnonzero(is_free & (age >= low) & (age <= high))
                fitting = aged if len(aged) else fitting
            trace[token, number] = expert = random.choice(fitting)
            is_free[expert] = False
        last[trace[token]] = token
    return trace
