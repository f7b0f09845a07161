"""Routed experts, those used last in GPU memory, for transformers' experts interface."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from offplan.runtime.cached_experts import expert_table
from offplan.runtime.cached_experts.expert_table import (
    NOBODY,
    QUOTA,
    Runs,
    Table,
    clear_cut,
    copy_later,
    copy_missed,
    use,
)
from offplan.runtime.forms import tasks
from offplan.runtime.forms.experts import (
    MULTIPLIED_BY,
    SHARE,
    Expanded,
    ReadElsewhere,
    add_rows,
    forward_stored,
    forward_values,
    holds_codes,
    send,
)
from offplan.runtime.forms.stored import StoredWeight, component_name
from offplan.transformers_private import ExpertsInterface

CACHED_NAME = "offplan_cached"


def keep_in_slots(
    experts: nn.Module,
    table: Table,
    slots: dict[str, torch.Tensor],
    sources: torch.Tensor | None,
) -> None:
    """Have experts be read from slots in steps: ``slots`` are those of each parameter, by its name.

    Nothing is in them yet. ``sources`` says where steps copy from, on a GPU.
    """
    vars(experts)[MULTIPLIED_BY] = CACHED_NAME
    vars(experts).update(
        slot_table=table,
        slot_memory=table.memory,
        num_slots=table.num_slots,
        slots=slots,
        slot_sources=sources,
        slot_shares=None,
        slot_later=None,
        slot_runs=None,
        cores=None,
        reads_slots=False,
        noted=None,
        noted_place=None,
    )


def divide(
    experts: nn.Module,
    shares: torch.Tensor,
    runs: Mapping[str, Runs] | None,
    later: torch.Tensor,
    quota: int,
) -> Table:
    """Have the host's cores multiply some of the experts in slots that a step misses.

    ``shares`` says how many, as ``Table.shares`` does. The link brings some of them for later:
    ``quota`` a step, in LATER_PARTS of one, listed in ``later``. If it brings none, that has no
    elements. ``cores`` of the module, if it is not None,
    is the number of the task by which they do. ``runs`` says how the parameters lie by inner
    columns, if the cores multiply a part of an expert. The expert's rest is copied to the last
    slot. Returns the table with all of it.
    """
    own = vars(experts)
    table: Table = own["slot_table"]
    table = table._replace(shares=shares, later=later if len(later) else None)
    table.number(QUOTA).fill_(quota)
    own.update(slot_shares=shares, slot_later=later, slot_table=table, slot_runs=runs)
    if runs is not None and own["slot_sources"] is not None:
        lie = [runs.get(name, Runs()) for name in own["slots"]]
        own["slot_sources"][:, 3:] = torch.tensor(lie, dtype=torch.int64)
    return table


def keep_elsewhere(experts: nn.Module) -> None:
    """Say of experts that have no slots what ``forward_cached`` asks of all layers.

    Compiled code is shared by layers of a class and guarded by what it finds of a module, not by
    what is missing. Without this, layers with slots would run what was traced without.
    """
    vars(experts).update(reads_slots=False, noted=None)


def leave_slots(experts: nn.Module) -> None:
    """Undo ``keep_in_slots``, so that the memory can be given back."""
    for name in ("table", "memory", "sources", "shares", "later", "runs"):
        vars(experts).pop(f"slot_{name}", None)
    for name in ("slots", "num_slots", "noted_place", MULTIPLIED_BY, SHARE):
        vars(experts).pop(name, None)
    keep_elsewhere(experts)


def forward_cached(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Send tokens, [tokens, hidden], through their experts; returns [tokens, hidden].

    ``top_k_index`` and ``top_k_weights`` are [tokens, k]. In a step the missed experts are copied
    into slots, over the link, and multiplied there. If there are more of them than slots, the
    others are read where they lie. If experts are divided, the host's cores meanwhile multiply a
    share of the missed ones where they lie, and of one of them a part. Some of these are copied
    into slots for later steps, once the cores have begun. The sum of the cores' products is added
    here, or by the block where ``ends_in_block``. A prompt reads all of them as
    it would without slots. Its last choices are noted. Everything is on the current stream; on a
    GPU the host waits for nothing.
    """
    own = vars(experts)
    if not own["reads_slots"]:
        if own["noted"] is not None:
            _note(own["noted"], own["noted_place"], top_k_index)
        return forward_stored(experts, hidden_states, top_k_index, top_k_weights)
    if hidden_states.is_cuda:
        return forward_slots(experts, hidden_states, top_k_index, top_k_weights)
    chosen, task = top_k_index.reshape(-1), own["cores"]
    table: Table = own["slot_table"]
    slots: dict[str, torch.Tensor] = own["slots"]
    sources = {name: getattr(experts, name) for name in slots}
    copy_later(table, sources, slots)  # what the last step listed, and is not done
    used = use(table, chosen[None], is_step=True)
    by_cores = used.by_cores.view(top_k_index.shape)
    if task is not None:
        tasks.find(task).begin(hidden_states, by_cores, top_k_weights)
        if expert_table.COPIES_AT_ONCE:
            copy_later(table, sources, slots)
        is_whole = (by_cores != NOBODY) & (by_cores < experts.num_experts)
        top_k_weights = top_k_weights.masked_fill(is_whole, 0)
    copy_missed(table, sources, slots, own["slot_runs"])
    is_cut = bool(used.first_column.any())
    if is_cut:
        clear_cut(table, slots, own["slot_runs"])
    values = {name: _join(sources[name], slots[name], chosen, used.slot) for name in slots}
    joined: Any = ReadElsewhere(experts, values)
    forward = forward_stored
    if is_cut:
        joined, forward = _cut(joined, hidden_states.dtype, chosen, used.first_column)
    made = forward(joined, hidden_states, top_k_index, top_k_weights)
    return made if task is None or own["ends_in_block"] else tasks.end(task, made)


def _cut(
    experts: Any, dtype: torch.dtype, chosen: torch.Tensor, first_column: torch.Tensor
) -> tuple[Any, Callable[..., torch.Tensor]]:
    """Return experts by their values, without the inner columns that the cores multiply.

    With what sends tokens through them.
    """
    is_coded = holds_codes(experts)
    values: Any = Expanded(experts, dtype) if is_coded else experts
    down = values.down_proj.clone()
    by_row = down.mT if values.is_transposed else down  # [experts, out, inner]
    for expert, first in zip(chosen.tolist(), first_column.tolist(), strict=True):
        by_row[expert, :, :first] = 0
    cut = ReadElsewhere(values, {"down_proj": down})
    return cut, forward_values if is_coded else forward_stored


def _note(noted: torch.Tensor, place: torch.Tensor, chosen: torch.Tensor) -> None:
    """Note a chunk's last choices, [tokens, batch, choices], over the oldest, from a place on.

    The place, [1] on the device, is then behind them. Nothing that is noted is read, or a compiled
    layer would have to move it before it writes.
    """
    num_noted, batch, num_chosen = noted.shape
    # what is noted is the same for all sequences of a token, and tokens come by sequence
    new = chosen.reshape(batch, -1, num_chosen).transpose(0, 1)[-num_noted:].to(noted.dtype)
    rows = torch.arange(len(new), device=place.device)
    noted.index_copy_(0, (place + rows) % num_noted, new)
    place.add_(len(new))


def _join(
    source: torch.Tensor, slots: torch.Tensor, chosen: torch.Tensor, slot_of_pair: torch.Tensor
) -> torch.Tensor:
    """Return a part of all experts, [experts, ...]: those chosen from where they are, others 0."""
    joined = torch.zeros_like(source)
    has_slot = slot_of_pair < len(source)
    joined[chosen[~has_slot]] = source[chosen[~has_slot]]
    joined[chosen[has_slot]] = slots[slot_of_pair[has_slot].long()]
    return joined


def forward_slots(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Do what ``forward_cached`` does in a step, on a GPU: two launches, then the products.

    Only a step of more pairs than slots may choose experts that have none. It multiplies twice,
    what is in slots and what is read in place, each pair once. Pairs that the host's cores multiply
    are left out of both, and what lies in their rows is cut before the sum. So are the inner
    columns that the cores multiply of an expert: what the last slot has there is an older one's.
    """
    from offplan.runtime.cached_experts.table_kernels import (  # they need triton
        pick_rows,
        read_slots,
    )
    from offplan.runtime.forms import operators
    from offplan.runtime.forms.gather import sort_pairs
    from offplan.runtime.model.experts import multiply

    own = vars(experts)
    slots, table, num_slots = own["slots"], own["slot_memory"], own["num_slots"]
    chosen = top_k_index.reshape(-1)
    num_pairs, num_experts = chosen.numel(), experts.num_experts
    task = own["cores"]
    divided = []
    if task is not None:
        divided = [task, own["slot_shares"], own["slot_later"], hidden_states, top_k_weights]
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
        return add_rows(made, *pick_rows(slots[name], getattr(experts, name), slot_of_pair, chosen))

    def multiply_codes(name: str, x: torch.Tensor) -> torch.Tensor:
        stored: StoredWeight = experts.stored_experts[name]
        in_slots = {part: slots[component_name(name, part)] for part in stored.components}
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


ExpertsInterface.register(CACHED_NAME, forward_cached)
