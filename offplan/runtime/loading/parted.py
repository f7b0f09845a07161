"""The experts that prompts stream in parts: where each part's parameters are in the slots."""

from importlib.util import find_spec

import torch
from transformers import PreTrainedModel

from offplan.errors import OffplanError, PlanError
from offplan.placement import Placement
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.store import Offloaded, WeightStore
from offplan.runtime.model.parts import ExpertsInParts
from offplan.schedule import part_slots_of
from offplan.transformers_private import list_experts


def check_package(placement: Placement) -> None:
    """Raise OffplanError if prompts stream in parts, and the package for that is missing."""
    if placement.parts and find_spec("greenlet") is None:
        raise OffplanError(
            "a rule has parts, and prompts in parts need the package greenlet: pip install greenlet"
        )


def check_parted(
    module: PreTrainedModel,
    placement: Placement,
    offloaded: Offloaded,
) -> None:
    """Raise PlanError for experts that cannot be read in parts, before anything is loaded.

    The module is on the meta device.
    """
    values = dict(module.named_parameters())
    for layer, names in _names_by_layer(placement, offloaded).items():
        groups = list_experts(decoder_layers(module)[layer])
        if len(groups) != 1:
            raise PlanError(
                f"layer {layer} has {len(groups)} groups of routed experts that transformers lets "
                "be chosen, expected 1: leave parts out"
            )
        owned = {id(value) for value in groups[0].parameters(recurse=False)}
        for name in names.values():
            value, num_experts = values[name], groups[0].num_experts
            if id(value) not in owned or value.shape[0] != num_experts:
                raise PlanError(
                    f"{name} of layer {layer} is not divided into {num_experts} experts once "
                    f"loaded (found {list(value.shape)}): leave parts out of its rule"
                )


def divide_experts(
    module: PreTrainedModel, store: WeightStore, offloaded: Offloaded
) -> dict[int, ExpertsInParts]:
    """Have the experts that stream in parts be read so in prompts; by layer index."""
    placement = store.placement
    names, slots = _names_by_layer(placement, offloaded), part_slots_of(placement)
    entries = {slab.layer: [e for e in slab.entries if e.num_parts > 1] for slab in placement.slabs}
    found = {}
    for layer, turns in slots.items():
        parts = []
        for slot, span in turns:
            runs = zip(entries[layer], span.runs, strict=True)
            parts.append(
                {
                    names[layer][entry.offset].rpartition(".")[2]: _view(
                        store.offloaded[names[layer][entry.offset]],
                        store.slots[slot][at : at + stop - start],
                    )
                    for entry, (start, stop, at) in runs
                }
            )
        (experts,) = list_experts(decoder_layers(module)[layer])
        found[layer] = ExpertsInParts(experts, parts, placement.chunks_at_once.get(layer))
    return found


def _names_by_layer(placement: Placement, offloaded: Offloaded) -> dict[int, dict[int, str]]:
    """Name the parameters that stream in parts, by layer index and offset in its slab."""
    found: dict[int, dict[int, str]] = {}
    parted = {(e.unit.layer, e.offset) for e in placement.entries if e.num_parts > 1}
    for name, (layer, offset) in offloaded.items():
        if (layer, offset) in parted:
            found.setdefault(layer, {})[offset] = name
    return found


def _view(whole: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """View bytes as some experts of a parameter of all, [experts, ...]."""
    return memory.view(whole.dtype).view(-1, *whole.shape[1:])
