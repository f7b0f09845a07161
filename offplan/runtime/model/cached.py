"""Routed experts, those used last in GPU memory, for transformers' experts interface."""

from typing import Any

import torch
from torch import nn

from offplan.runtime.forms.expert_table import Table, copy_missed, use
from offplan.runtime.forms.experts import forward_stored
from offplan.runtime.transformers_private import ExpertsInterface

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
    vars(experts).update(
        slot_table=table,
        slot_memory=table.memory,
        num_slots=table.num_slots,
        slots=slots,
        slot_sources=sources,
        reads_slots=False,
        noted=None,
    )


def has_slots(experts: nn.Module) -> bool:
    """Whether some of these experts lie in slots."""
    return "slots" in vars(experts)


def forward_cached(
    experts: Any,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """Send tokens, [tokens, hidden], through their experts; returns [tokens, hidden].

    ``top_k_index`` and ``top_k_weights`` are [tokens, k]. In a step the experts that are missing
    are copied into slots, over the link, and multiplied there; where there are more of them than
    slots, the others are read where they lie. A prompt reads all of them as it would without slots,
    and its last choices are noted. Everything is on the current stream; on a GPU the host waits for
    nothing.
    """
    own = vars(experts)
    if not has_slots(experts) or not own["reads_slots"]:
        if has_slots(experts) and own["noted"] is not None:
            _note(own["noted"], top_k_index)
        return forward_stored(experts, hidden_states, top_k_index, top_k_weights)
    if hidden_states.is_cuda:
        from offplan.runtime.model.cached_products import forward_slots  # needs triton

        return forward_slots(experts, hidden_states, top_k_index, top_k_weights)
    chosen = top_k_index.reshape(-1)
    table: Table = own["slot_table"]
    slots: dict[str, torch.Tensor] = own["slots"]
    sources = {name: getattr(experts, name) for name in slots}
    slot_of_pair = use(table, chosen[None], is_step=True)
    copy_missed(table, sources, slots)
    values = {name: _join(sources[name], slots[name], chosen, slot_of_pair) for name in slots}
    return forward_stored(_Joined(experts, values), hidden_states, top_k_index, top_k_weights)


def _note(noted: torch.Tensor, chosen: torch.Tensor) -> None:
    """Note a chunk's last choices behind those before: [tokens, batch, choices] of both."""
    num_noted, batch, num_chosen = noted.shape
    # what is noted is the same for all sequences of a token, and tokens come by sequence
    new = chosen.reshape(batch, -1, num_chosen).transpose(0, 1)[-num_noted:].to(noted.dtype)
    noted.copy_(torch.cat([noted[len(new) :], new]))


def _join(
    source: torch.Tensor, slots: torch.Tensor, chosen: torch.Tensor, slot_of_pair: torch.Tensor
) -> torch.Tensor:
    """Return a part of all experts, [experts, ...]: those chosen from where they are, others 0."""
    joined = torch.zeros_like(source)
    has_slot = slot_of_pair < len(source)
    joined[chosen[~has_slot]] = source[chosen[~has_slot]]
    joined[chosen[has_slot]] = slots[slot_of_pair[has_slot].long()]
    return joined


class _Joined:
    """Experts whose parts are read from where a step has them."""

    def __init__(self, experts: Any, values: dict[str, torch.Tensor]) -> None:
        vars(self).update(vars(experts))
        vars(self).update(values)
        self._experts = experts

    def __getattr__(self, name: str) -> Any:
        return getattr(self._experts, name)


ExpertsInterface.register(CACHED_NAME, forward_cached)
