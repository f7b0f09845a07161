"""Routed experts whose weights are stored as codes, for transformers' experts interface."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import nn

from offplan.forms.form import Component
from offplan.kernel_sizes import EXPERT_MULTIPLE, are_gathered
from offplan.runtime.forms.stored import (
    KERNEL_DTYPES,
    StoredWeight,
    component_name,
    multiplies_values,
)
from offplan.transformers_private import (
    ExpertsInterface,
    apply_gate,
    is_experts,
    multiply_groups,
    name_first,
)

STORED_EXPERTS_NAME = "offplan_stored"
GROUPS_NAME = "offplan_groups"
"""Name of ``forward_groups`` for experts that are held by their values."""
PLAIN_WAY = "plain_way"
"""Attribute that holds what multiplies a layer's experts by their values. A model needs it if other
layers' experts are stored as codes: transformers asks for one implementation for all of them."""
MULTIPLIED_BY = "multiplied_by"
"""Attribute that names the implementation that experts need which lie in several places."""
KNOWN_GATE = "known_gate"
"""Attribute that has the Gate that experts compute, or None."""
SHARE = "share"
"""Attribute of experts that lie in several places. It has the host's cores, given their description
of the experts, multiply a share of them; it returns False if a plan gives the cores none."""
FEW_TOKENS = 16
"""Tokens up to which transformers multiplies each by its own experts, which waits for nothing."""


def are_plain(experts: Any) -> bool:
    """Return True if kernels know these experts, held by their values, without importing any.

    They multiply plain products, of sizes that blocks divide.
    """
    is_other = experts.is_transposed or experts.has_bias
    is_other |= getattr(experts, "has_post_expert_norm", False)
    first = getattr(experts, name_first(experts))
    sizes = (*first.shape[1:], *experts.down_proj.shape[1:])
    return not is_other and all(size % EXPERT_MULTIPLE == 0 for size in sizes)


def holds_codes(experts: nn.Module) -> bool:
    """Return True if these experts' weights are stored in another form than their values."""
    return "stored_experts" in vars(experts)


def are_rounded(experts: nn.Module) -> bool:
    """Return True if codes stand for these experts' values: not if they are raw or packed."""
    return any(each.form.is_rounded for each in vars(experts).get("stored_experts", {}).values())


def mark_in_place(module: nn.Module, names: Collection[str]) -> None:
    """Have experts know which of their weights are read in place, as codes or values.

    ``names`` are those of the module's parameters that are.
    """
    for path, experts in module.named_modules():
        if not is_experts(experts):
            continue
        stored, own = vars(experts).get("stored_experts", {}), (name_first(experts), "down_proj")
        kept_as = {
            name: component_name(name, Component.WEIGHT) if name in stored else name for name in own
        }
        vars(experts)["in_place"] = tuple(
            name for name, kept in kept_as.items() if f"{path}.{kept}" in names
        )


def forward_stored(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Send tokens, [tokens, hidden], through their experts; returns [tokens, hidden].

    ``top_k_index`` and ``top_k_weights`` are [tokens, k]. Experts that are held by their values are
    handed on to their PLAIN_WAY. On a GPU each weight is multiplied from its codes. They are read
    once for up to 64 pairs of a token and an expert, 128 in host memory. Elsewhere the weight is
    expanded. Few experts' codes in host memory are copied first: their rows begin amid lines of the
    link, and scales are a few bytes a row. Many tokens are sent by ``forward_groups``.
    """
    if not holds_codes(experts):
        made: torch.Tensor = vars(experts)[PLAIN_WAY](
            experts, hidden_states, top_k_index, top_k_weights
        )
        return made
    if not hidden_states.is_cuda or hidden_states.dtype not in KERNEL_DTYPES:
        expanded = Expanded(experts, hidden_states.dtype)
        return forward_values(expanded, hidden_states, top_k_index, top_k_weights)
    if multiplies_values(experts, top_k_index.numel()):
        return forward_groups(experts, hidden_states, top_k_index, top_k_weights)
    from offplan.runtime.forms import operators  # needs triton
    from offplan.runtime.forms.gather import gather, sort_pairs

    pairs = sort_pairs(top_k_index.reshape(-1), experts.num_experts)
    expert_of_pair, order, starts = pairs
    is_gathered = are_gathered(len(order), experts.num_experts)

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        stored: StoredWeight = experts.stored_experts[name]
        parts, begins, in_place = stored.of(experts), starts, name in experts.in_place
        if in_place and is_gathered:
            in_place = False
            parts, begins = gather(parts, *pairs)
        made = operators.multiply(stored.form, parts, x, order, begins, in_place=in_place)
        return _add_bias(experts, name, made, expert_of_pair)

    return send(experts, hidden_states, top_k_weights, multiply)


def forward_groups(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Send many tokens through their experts as ``forward_stored`` does, on a GPU, by values.

    Each pair's row is copied once, sorted by its expert. Values are made of codes, which are read
    once, also over the link, whatever the number of rows. The sum over a token's experts reads
    products where they are. Every pair must have an expert.
    """
    from offplan.runtime.forms import operators  # needs triton
    from offplan.runtime.forms.gather import sort_pairs

    _, order, starts = sort_pairs(top_k_index.reshape(-1), experts.num_experts)
    rows = hidden_states.index_select(0, order // top_k_index.shape[-1])
    made = _pass(experts, rows, _by_groups(experts, starts), gates_at_once=True)
    row_of_pair = torch.empty_like(order)
    row_of_pair[order] = torch.arange(len(order), dtype=order.dtype, device=order.device)
    return operators.sum_pairs(made, top_k_weights, row_of_pair).to(hidden_states.dtype)


def _by_groups(experts: Any, starts: torch.Tensor) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """Return what multiplies sorted rows by values."""
    from offplan.runtime.forms import operators  # needs triton

    def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
        bias = getattr(experts, f"{name}_bias") if experts.has_bias else None
        if not holds_codes(experts):
            values = getattr(experts, name)
            values = values.mT if experts.is_transposed else values
            return operators.multiply_values(values, x, starts, bias, name in experts.in_place)
        stored: StoredWeight = experts.stored_experts[name]
        scratch = getattr(experts, "scratch", None)
        return operators.multiply_groups(stored.form, stored.of(experts), x, starts, bias, scratch)

    return multiply


def forward_values(experts: Any, hidden_states: torch.Tensor, *pairs: torch.Tensor) -> torch.Tensor:
    """Do what ``forward_stored`` does by values of weights, as transformers does: few and many."""
    name = "batched_mm" if len(hidden_states) <= FEW_TOKENS else "grouped_mm"
    made: torch.Tensor = ExpertsInterface()[name](experts, hidden_states, *pairs)
    return made


def multiply_sorted(
    experts: Any,
    rows: torch.Tensor,
    chosen: torch.Tensor,
    starts: torch.Tensor,
    *,
    by_groups: bool = False,
) -> torch.Tensor:
    """Multiply rows, [pairs, hidden], each by its own expert; returns as many, unweighted.

    Rows are sorted by their experts, ``chosen``, [pairs]; ``starts``, int32 [experts + 1], says
    where each expert's begin. ``by_groups`` multiplies as ``forward_groups`` does. Codes need a
    GPU, and none is read in place. This launches some ten kernels; transformers' own way, which
    sorts the rows and puts them back, more than forty.
    """
    if by_groups:
        multiply = _by_groups(experts, starts)
    elif not holds_codes(experts):

        def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
            return _add_bias(experts, name, multiply_groups(experts, name, x, starts[1:]), chosen)
    else:
        from offplan.runtime.forms import operators  # needs triton

        order = torch.arange(len(rows), dtype=torch.int32, device=rows.device)

        def multiply(name: str, x: torch.Tensor) -> torch.Tensor:
            stored: StoredWeight = experts.stored_experts[name]
            made = operators.multiply(stored.form, stored.of(experts), x, order, starts)
            return _add_bias(experts, name, made, chosen)

    return _pass(experts, rows, multiply, gates_at_once=by_groups)


def _add_bias(
    experts: Any, name: str, made: torch.Tensor, expert_of_pair: torch.Tensor
) -> torch.Tensor:
    if not experts.has_bias:
        return made
    return add_rows(made, getattr(experts, f"{name}_bias"), expert_of_pair)


def add_rows(made: torch.Tensor, table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Add to products, [pairs, out], each pair's row of a table, [any, out]; ``rows`` is [pairs].

    Whoever adds biases does it so: where torch.compile joins this with what follows it rounds
    between them or not by the number of tensors read.

    Source: torch 2.11, ``realize_reads_threshold`` in torch/_inductor/config.py.
    """
    return made + table[rows]


def send(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_weights: torch.Tensor,
    multiply: Callable[[str, torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Send tokens, [tokens, hidden], through experts, weighed by [tokens, k]: [tokens, hidden].

    ``multiply`` is given the name of a weight and rows, each for as many pairs of a token and an
    expert. It returns the products of all pairs, token by token.
    """
    made = _pass(experts, hidden_states, multiply)
    return sum_up(made, top_k_weights).to(hidden_states.dtype)


def sum_up(made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Sum up each token's products, [tokens x k, hidden], by [tokens, k]: [tokens, hidden].

    Whoever sums up products of our kernels does it so: one way rounds what another does not.

    Source: 8,192 tokens of Qwen3-30B with FP8 on an H200 took 3.08 ms a layer by our kernel, and
    3.73 by torch's operators.
    """
    is_known = made.is_cuda and made.dtype in KERNEL_DTYPES
    if is_known and len(weights) > FEW_TOKENS:
        from offplan.runtime.forms import operators  # needs triton

        return operators.sum_pairs(made, weights)
    return (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


def _pass(
    experts: Any,
    rows: torch.Tensor,
    multiply: Callable[[str, torch.Tensor], torch.Tensor],
    *,
    gates_at_once: bool = False,
) -> torch.Tensor:
    """Take rows through experts by ``multiply``, as ``send`` has it; all but the weighing.

    ``gates_at_once`` has one kernel compute the gate, if it knows it.
    """
    made = multiply(name_first(experts), rows)
    gate = getattr(experts, KNOWN_GATE, None) if gates_at_once else None
    if gate is not None:
        from offplan.runtime.forms import operators  # needs triton

        made = operators.gate_rows(made, gate)
    else:
        made = apply_gate(experts, made) if experts.has_gate else experts.act_fn(made)
    made = multiply("down_proj", made)
    if getattr(experts, "has_post_expert_norm", False):
        made = experts.post_expert_norm(made)
    return made


class Expanded:
    """Experts as transformers holds them: with the values of their weights."""

    def __init__(self, experts: Any, dtype: torch.dtype) -> None:
        self._experts = experts
        for name, stored in experts.stored_experts.items():
            values = stored.expand(experts, dtype)
            setattr(self, name, values.mT if experts.is_transposed else values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


class ReadElsewhere:
    """Experts whose parameters are read from where a pass has them, all or some of the experts."""

    def __init__(self, experts: Any, values: Mapping[str, Any]) -> None:
        """``values`` takes the place of what ``experts`` has by the same names."""
        vars(self).update(vars(experts))
        vars(self).update(values)
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


ExpertsInterface.register(STORED_EXPERTS_NAME, forward_stored)
ExpertsInterface.register(GROUPS_NAME, forward_groups)
