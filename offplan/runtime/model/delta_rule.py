"""The gated delta rule for many tokens: of a prompt, and of a pass that checks drafts.

On a GPU ``delta_kernel`` takes a prompt's tokens, if it knows their sizes. It is an operator, for
torch.compile to compile what lies around it.

A pass that checks drafts leaves the states as they were before it. It notes what each of its tokens
adds to a state: its key k, its delta u and its decay. The state behind n taken tokens is exp(G_n) S
+ sum of exp(G_n - G_i) k_i u_i^T over i <= n. There S is the state before the pass, and G_i the sum
of the first i decays.

To keep a state for each token would write and keep as many: of Qwen3.6-27B 8 of 144 MiB. To repeat
the taken tokens would read all weights twice. What eight tokens add takes 26 MiB there, and to
add it moves the states four times.

Source: Gated DeltaNet (arXiv 2412.06464); its form for several tokens at once as in
``torch_chunk_gated_delta_rule`` of transformers 5.23.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from offplan.kernel_sizes import are_ruled
from offplan.runtime.forms.declared import declare

EPSILON = 1e-6
"""Added to the squared norm of queries and keys. Source: ``l2norm`` of transformers 5.23."""
TYPES = (torch.float32, torch.bfloat16, torch.float16)
"""Types of queries, keys and values that ``delta_kernel`` takes."""
MAX_TOKENS = 2**16
"""Tokens of a sequence up to which its programs count elements in 32 bits."""


@dataclass(frozen=True)
class Additions:
    """What the tokens of a pass add to a layer's states, or to those of all layers."""

    keys: torch.Tensor
    """Keys, normalised, float32 of [..., value heads, tokens, key dim]."""
    deltas: torch.Tensor
    """Values less what the state has for their keys, [..., value heads, tokens, value dim]."""
    decays: torch.Tensor
    """Sums of the logarithms of decays up to each token, [..., value heads, tokens]."""
    inputs: torch.Tensor
    """Inputs of the convolution, [..., channels, tokens]."""


def check_tokens(
    additions: Additions,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
) -> torch.Tensor:
    """Return what tokens read of a state and of those before them; note what they add.

    Arguments are those of transformers' rule, [batch, tokens, heads, ...]; the result is as
    ``value``. The state stays as it is.
    """
    share = value.shape[2] // key.shape[2]
    query, key = (each.repeat_interleave(share, 2) if share > 1 else each for each in (query, key))
    query, key, values, rates, decays = (
        each.transpose(1, 2).float() for each in (query, key, value, beta, g)
    )
    query, key = (each * _inverse_norm(each) for each in (query, key))
    query = query * query.shape[-1] ** -0.5
    decays, num_tokens = decays.cumsum(-1), query.shape[2]
    # of a token and those up to it: 0 for those behind it, and never more than 1
    between = (decays.unsqueeze(-1) - decays.unsqueeze(-2)).tril().exp().tril()
    seen = torch.cat([key, query], 2) @ initial_state
    of_keys, of_queries = (seen * decays.exp().repeat(1, 1, 2).unsqueeze(-1)).split(num_tokens, 2)
    rates = rates.unsqueeze(-1)
    deltas = torch.linalg.solve_triangular(
        (rates * key) @ key.transpose(-1, -2) * between,
        rates * (values - of_keys),
        upper=False,
        unitriangular=True,
    )
    noted = (additions.keys, key), (additions.deltas, deltas), (additions.decays, decays)
    for kept, new in noted:
        kept[:, :, :num_tokens].copy_(new)
    made = of_queries + (query @ key.transpose(-1, -2) * between) @ deltas
    return made.transpose(1, 2).to(value.dtype)


def _inverse_norm(vectors: torch.Tensor) -> torch.Tensor:
    return torch.rsqrt((vectors * vectors).sum(-1, keepdim=True) + EPSILON)


def add_taken(
    states: torch.Tensor, inputs: torch.Tensor, additions: Additions, num_taken: int
) -> None:
    """Add the first tokens of a pass to the states of all layers, in place.

    ``states`` are [layers, batch, value heads, key dim, value dim], and ``inputs`` the last ones of
    convolutions, [layers, batch, channels, kernel size]. Works on the current stream, and takes no
    memory to speak of. ``additions`` serve once.
    """
    decays = additions.decays[..., :num_taken]
    last = decays[..., -1:]
    deltas = additions.deltas[..., :num_taken, :]
    deltas.mul_((last - decays).exp().unsqueeze(-1))
    states.mul_(last.exp().unsqueeze(-1))
    keys = additions.keys[..., :num_taken, :].flatten(0, 2)
    states.flatten(0, 2).baddbmm_(keys.transpose(1, 2), deltas.flatten(0, 2))
    size = inputs.shape[-1]
    for place in range(size):  # a copy of all would overlap itself
        behind = place + num_taken
        inputs[..., place] = (
            inputs[..., behind] if behind < size else additions.inputs[..., behind - size]
        )


def _describe(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: object
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, num_heads, value_dim = value.shape[0], *value.shape[2:]
    states = value.new_empty(batch, num_heads, key.shape[-1], value_dim, dtype=torch.float32)
    return value.new_empty(value.shape), states


@declare(
    "delta_rule",
    "(Tensor query, Tensor key, Tensor value, Tensor g, Tensor beta, Tensor? initial_state)"
    " -> (Tensor, Tensor)",
    _describe,
    tags=[torch.Tag.flexible_layout],  # copies of all rows' queries, keys and values otherwise
)
def take_tokens(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what tokens read, and the states behind them, as ``delta_kernel`` does."""
    from offplan.runtime.model import delta_kernel  # needs triton

    return delta_kernel.take_tokens(query, key, value, g, beta, initial_state, EPSILON)


def serves(tokens: torch.Tensor, key_dim: int, value_dim: int) -> bool:
    """Return True if ``take_tokens`` computes the rule for tokens, [batch, new, ...].

    Their heads have keys and values of such sizes.
    """
    return tokens.is_cuda and fits(tokens.dtype, tokens.shape[1], key_dim, value_dim)


def fits(dtype: torch.dtype, num_tokens: int, key_dim: int, value_dim: int) -> bool:
    """Return True if so many tokens of such heads fit the kernels of ``delta_kernel``."""
    return dtype in TYPES and num_tokens <= MAX_TOKENS and are_ruled(key_dim, value_dim)


@functools.cache  # code is compiled again for every function that it finds in the place of another
def taking_additions(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return transformers' rule for many tokens; with ``additions`` it checks tokens instead.

    On a GPU kernels take a prompt's tokens, where they know its sizes.
    """

    @functools.wraps(own)
    def rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        additions: Additions | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        given = {name: others[name] for name in ("g", "beta", "initial_state")}
        if additions is not None:
            return check_tokens(additions, query, key, value, **given), None
        if serves(value, key.shape[-1], value.shape[-1]) and others["use_qk_l2norm_in_kernel"]:
            made, states = take_tokens(query, key, value, *given.values())
            return made, states if others["output_final_state"] else None
        by_torch: tuple[torch.Tensor, torch.Tensor | None] = own(query, key, value, **others)
        return by_torch

    return rule
