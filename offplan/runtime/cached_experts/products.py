"""Products of experts that lie in slots, by kernels. CUDA only."""

from typing import Any

import torch

from offplan.runtime.cached_experts.table_kernels import read_slots
from offplan.runtime.forms import operators, tasks
from offplan.runtime.forms.experts import add_rows, holds_codes, send
from offplan.runtime.forms.pairs import sort_pairs
from offplan.runtime.forms.stored import StoredWeight, part_name
from offplan.runtime.model.experts import multiply


def _pick_rows(
    slots: torch.Tensor, rows: torch.Tensor, slot_of_pair: torch.Tensor, chosen: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    own = slots[slot_of_pair.clamp(max=len(slots) - 1)]
    has_slot = (slot_of_pair < len(slots)).unsqueeze(-1)
    return torch.where(has_slot, own, rows[chosen]), torch.arange(len(own), device=own.device)


# To torch.compile one operator: whatever it joined would be rounded otherwise than in layers whose
# experts are resident, which look rows up in one table.
_operator = torch.library.custom_op(
    "offplan::pick_rows",
    _pick_rows,
    mutates_args=(),
    schema="(Tensor slots, Tensor rows, Tensor slot_of_pair, Tensor chosen) -> (Tensor, Tensor)",
)
_operator.register_fake(
    lambda slots, rows, slot_of_pair, chosen: (
        slots.new_empty(chosen.numel(), slots.shape[1]),
        chosen.new_empty(chosen.numel(), dtype=torch.int64),
    )
)


def _pick(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return each pair's row, of its slot or of all experts' rows, and their places: [pairs]."""
    if not torch.compiler.is_compiling():
        return _pick_rows(*tensors)
    made: tuple[torch.Tensor, torch.Tensor] = _operator(*tensors)
    return made


def forward_slots(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Do what ``cached.forward_cached`` does in a step, on a GPU: two launches, then the products.

    Only a step of more pairs than slots may choose experts that have none. It multiplies twice,
    what is in slots and what is read in place, each pair once. Pairs that the host's cores multiply
    are left out of both, and what lies in their rows is cut before the sum. So are the inner
    columns that the cores multiply of an expert: what the last slot has there is an older one's.
    """
    own = vars(experts)
    slots, table, num_slots = own["slots"], own["slot_memory"], own["num_slots"]
    chosen = top_k_index.reshape(-1)
    num_pairs, num_experts = chosen.numel(), experts.num_experts
    task = own["cores"]
    divided = [] if task is None else [task, own["slot_shares"], hidden_states, top_k_weights]
    slot_of_pair, order, starts, rest, first_column = read_slots(
        chosen, table, own["slot_sources"], num_slots, num_experts, divided
    )
    all_fit = num_pairs <= num_slots
    others = None if all_fit else sort_pairs(rest, num_experts)

    def add_bias(name: str, made: torch.Tensor) -> torch.Tensor:
        if all_fit:
            most = len(slots[name]) - 1
            places = slot_of_pair if task is None else slot_of_pair.clamp(max=most)
            return add_rows(made, slots[name], places)
        return add_rows(made, *_pick(slots[name], getattr(experts, name), slot_of_pair, chosen))

    def multiply_codes(name: str, x: torch.Tensor) -> torch.Tensor:
        stored: StoredWeight = experts.stored_experts[name]
        in_slots = {part: slots[part_name(name, part)] for part in stored.parts}
        rest_parts = {} if others is None else stored.of(experts)
        rest_pairs = () if others is None else others[1:]
        made = operators.multiply_slots(
            stored.form, in_slots, rest_parts, x, order, starts, *rest_pairs
        )
        return add_bias(f"{name}_bias", made) if experts.has_bias else made

    def multiply_values(name: str, x: torch.Tensor) -> torch.Tensor:
        pairs, of_row = (slot_of_pair, order, starts), num_pairs // len(x)
        into = None  # by pairs only where each has a slot
        if task is not None:
            into = x.new_empty(num_pairs, slots[name].shape[1])
        made = multiply(x, slots[name], pairs, of_row, into)
        if others is not None:
            multiply(x, getattr(experts, name), others, of_row, into=made)
        return made

    by = multiply_codes if holds_codes(experts) else multiply_values

    if task is None:
        return send(experts, hidden_states, top_k_weights, by)
    is_here = ((slot_of_pair < num_experts) | (rest < num_experts)).unsqueeze(-1)
    splits = own["slot_runs"] is not None

    def multiply_here(name: str, x: torch.Tensor) -> torch.Tensor:
        if name != "down_proj":
            return by(name, x)
        if splits:
            columns = torch.arange(x.shape[-1], device=x.device)
            x = torch.where(columns >= first_column.unsqueeze(-1), x, 0)
        return torch.where(is_here, by(name, x), 0)

    made = send(experts, hidden_states, top_k_weights, multiply_here)
    return made if own["ends_in_block"] else tasks.end(task, made)
