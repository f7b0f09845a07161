"""The experts that lie in GPU memory one by one, all layers together: their slots and counters."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.expert_slots import ExpertSlots
from offplan.forms.form import Part
from offplan.kernel_sizes import MAX_PAIRS
from offplan.placement import Phase, Placement, align
from offplan.runtime.forms.expert_table import (
    BY_CORES,
    COPIED,
    FROM_PROMPT,
    HITS,
    IN_PLACE,
    NOBODY,
    NOTED_TOKENS,
    SPLIT,
    SPLIT_CHUNKS,
    Table,
    copy_missed,
    use,
)
from offplan.runtime.forms.experts import holds_codes
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.store import Offloaded, WeightStore
from offplan.runtime.model.cached import keep_elsewhere, keep_in_slots, leave_slots
from offplan.runtime.refusal import refuse
from offplan.transformers_private import list_experts


@dataclass(frozen=True)
class ExpertCounts:
    """The experts that decode steps chose, by where they were, each once a step and layer."""

    hits: int
    """Experts that were in GPU memory."""
    copied: int
    """Experts that a step copied over the link, into the place of those unused longest."""
    in_place: int
    """Experts that a step read over the link where they lie, for want of slots."""
    whole_by_cores: int
    """Experts that the host's cores multiplied where they lie."""
    split: int
    """Experts of which the cores multiplied a part, and the device the rest, from the last slot."""
    split_by_cores: float
    """Part of these that the cores multiplied, in experts."""
    from_prompts: int
    """Experts that prompts copied into slots, from the ring or over the link."""
    copied_bytes: int
    """Bytes of the experts that steps copied over the link; of split ones the link's part of all,
    although their scales are copied whole."""

    @property
    def by_cores(self) -> float:
        """Experts that the cores multiplied, a part of one as that part."""
        return self.whole_by_cores + self.split_by_cores

    @property
    def misses(self) -> int:
        """Experts that were not in GPU memory."""
        return self.copied + self.in_place + self.whole_by_cores + self.split


@dataclass(frozen=True)
class _Layer:
    experts: nn.Module
    table: Table
    slots: dict[str, torch.Tensor]
    """Slots of each parameter of the experts, by its name: [slots, ...]."""
    of: ExpertSlots
    addresses: torch.Tensor | None
    """Addresses that prompts copy from and to, on a GPU: see ``address_parts``."""


def find_parts(
    model: Model,
    module: PreTrainedModel,
    placement: Placement,
    offloaded: Offloaded,
    *,
    on_gpu: bool,
) -> dict[int, list[str]]:
    """Find the parameters of the experts of each layer that keeps some one by one, by layer index.

    The module is on the meta device, and ``on_gpu`` says whether a GPU is to run it. Raises
    CheckpointError and PlanError for experts that cannot be kept so, before anything is loaded.
    """
    keeping = {(e.unit.layer, e.offset) for e in placement.entries if e.keeps_experts}
    found: dict[int, list[str]] = {}
    for name, place in offloaded.items():
        if place in keeping:
            found.setdefault(place[0], []).append(name)
    values = dict(module.named_parameters())
    for layer, names in found.items():
        experts, slots = _experts_of(module, layer), placement.expert_slots[layer]
        owned = {id(value) for value in experts.parameters(recurse=False)}
        for name in names:
            value = values[name]
            if id(value) not in owned or value.shape[0] != slots.num_experts:
                raise PlanError(
                    f"{name} of layer {layer} is not divided into {slots.num_experts} experts once "
                    f"loaded (found {list(value.shape)}): leave cached_experts out of its rule"
                )
        if on_gpu:
            _refuse_orders(experts, layer)
        if on_gpu and not holds_codes(experts):
            from offplan.runtime.model.experts import serves  # needs triton

            if not serves(experts):
                raise refuse(
                    f"{model.source} has experts with biases, transposed ones, or sizes that 16 "
                    "does not divide, held by their values: kernels cannot keep some of them "
                    "(cached_experts): leave cached_experts out"
                )
    return found


def _experts_of(module: PreTrainedModel, layer: int) -> Any:
    found = list_experts(decoder_layers(module)[layer])
    if len(found) != 1:
        raise PlanError(
            f"layer {layer} has {len(found)} groups of routed experts that transformers lets be "
            "chosen, expected 1: leave cached_experts out"
        )
    return found[0]


def _refuse_orders(experts: Any, layer: int) -> None:
    """Raise CheckpointError for weights that kernels would give their inputs in another order."""
    stored = vars(experts).get("stored_experts", {}).values()
    if any(Part.GROUP_INDEX in weight.parts for weight in stored):
        raise refuse(
            f"experts of layer {layer} have inputs in an order of each expert's own (g_idx), which "
            "kernels do not read from slots: leave cached_experts out"
        )


class CachedExperts:
    """Keeps experts of some layers in GPU memory: for steps in slots, by the order of their use.

    Its work is queued on the current stream. A session has one; without layers it does nothing.
    """

    def __init__(
        self,
        model: Model,
        module: PreTrainedModel,
        placement: Placement,
        parts: Mapping[int, list[str]],
        store: WeightStore,
    ) -> None:
        """Give experts their slots in the store's memory; ``parts`` is of ``find_parts``."""
        self._device = store.device
        self._num_chosen = model.experts.num_experts_per_token if model.experts else 0
        self._noted: torch.Tensor | None = None
        """Choices of the prompt's last tokens in the layer at hand, [tokens, batch, choices]."""
        self._notes: dict[int, torch.Tensor] = {}
        """Notes of prompts' choices, by their number of sequences."""
        self._place = torch.zeros(1, dtype=torch.int64, device=store.device)
        """Place of the oldest of these."""
        self._layers: dict[int, _Layer] = {}
        if parts:
            for experts in list_experts(module):
                keep_elsewhere(experts)
        for layer, names in parts.items():
            self._layers[layer] = self._take(module, layer, names, placement, store)

    def _take(
        self,
        module: PreTrainedModel,
        layer: int,
        names: list[str],
        placement: Placement,
        store: WeightStore,
    ) -> _Layer:
        experts, of = _experts_of(module, layer), placement.expert_slots[layer]
        memory = store.expert_slots[layer]
        memory.zero_()  # what a slot holds of no expert is to be no NaN
        table = Table(memory[: of.table_bytes].view(torch.int32), of.num_kept, of.num_experts)
        offset, slots = of.table_bytes, {}
        for name in names:
            like = store.offloaded[name]
            num_bytes = like.nbytes // of.num_experts * of.num_slots
            view = memory[offset : offset + num_bytes].view(like.dtype)
            slots[name.rpartition(".")[2]] = view.view(of.num_slots, *like.shape[1:])
            offset = align(offset + num_bytes)
        addresses, own = None, None
        if self._device.type == "cuda":
            from offplan.runtime.forms.table_kernels import address_parts  # needs triton

            sources = [[store.by_phase[phase][name] for name in names] for phase in Phase]
            addresses, own = (address_parts(of_phase, slots.values()) for of_phase in sources)
        keep_in_slots(experts, table, slots, own)
        return _Layer(experts, table, slots, of, addresses)

    def enter(self, phase: Phase) -> None:
        """Have passes of a phase read experts as they do: steps from slots."""
        for layer in self._layers.values():
            vars(layer.experts)["reads_slots"] = phase is Phase.DECODE

    def begin(self, batch: int) -> None:
        """Begin a prompt of so many sequences, before anything of it is captured."""
        if not self._layers:
            return
        if batch not in self._notes:  # each stays: captured prompts write to theirs
            shape = NOTED_TOKENS, batch, self._num_chosen
            self._notes[batch] = torch.empty(shape, dtype=torch.int32, device=self._device)
        self._noted = self._notes[batch]
        self._noted.fill_(NOBODY)
        self._note_into(self._noted)

    def ignore(self) -> None:
        """Have passes note nothing and read no slots, until ``begin``."""
        self.enter(Phase.PREFILL)
        for layer in self._layers.values():
            # a step's share of what it misses; whoever enters its phase gives it back
            vars(layer.experts)["cores"] = None
        self._note_into(None)

    def _note_into(self, noted: torch.Tensor | None) -> None:
        for layer in self._layers.values():
            vars(layer.experts).update(noted=noted, noted_place=self._place)

    def settle(self, index: int) -> None:
        """Take what the prompt that has just passed a layer leaves there: its last tokens' experts.

        They are copied from where the prompt read them.
        """
        layer = self._layers.get(index)
        if layer is None or self._noted is None:
            return
        rows = torch.arange(NOTED_TOKENS, device=self._place.device)
        chosen = self._noted.index_select(0, (self._place + rows) % NOTED_TOKENS).flatten(1)
        if layer.addresses is None:
            use(layer.table, chosen, is_step=False)
            copy_missed(
                layer.table, {n: getattr(layer.experts, n) for n in layer.slots}, layer.slots
            )
        else:
            from offplan.runtime.forms.table_kernels import settle  # needs triton

            settle(layer.table, chosen, layer.addresses)
        self._noted.fill_(NOBODY)

    def require_few_pairs(self, batch: int) -> None:
        """Raise PlanError if a step of so many sequences has more pairs than kernels sort."""
        if self._layers and batch * self._num_chosen > MAX_PAIRS:
            raise PlanError(
                f"steps of {batch} sequences send tokens to {batch * self._num_chosen} experts, "
                f"and with cached_experts to {MAX_PAIRS} at most: run "
                f"{MAX_PAIRS // self._num_chosen} sequences at a time"
            )

    def empty(self) -> None:
        """Empty all slots, as before the first pass, which finds memory that nobody has written."""
        for layer in self._layers.values():
            layer.table.empty()

    def forget(self) -> None:
        """Forget what was counted."""
        for layer in self._layers.values():
            layer.table.counts.zero_()

    def close(self) -> None:
        """Let go of the slots' memory; the device is idle, and the experts run no more."""
        for layer in self._layers.values():
            leave_slots(layer.experts)
        self._layers.clear()
        self._noted = None

    def count(self) -> dict[int, ExpertCounts]:
        """Return what was counted, by layer index; waits for the device."""
        if not self._layers:
            return {}
        counts = torch.stack([layer.table.counts for layer in self._layers.values()]).tolist()
        return {
            index: _count(self._layers[index].of, of)
            for index, of in zip(self._layers, counts, strict=True)
        }


def _count(slots: ExpertSlots, counts: Sequence[int]) -> ExpertCounts:
    split_by_cores = slots.count_by_cores(0, counts[SPLIT_CHUNKS])
    copied = counts[COPIED] + counts[SPLIT] - split_by_cores
    return ExpertCounts(
        counts[HITS],
        counts[COPIED],
        counts[IN_PLACE],
        counts[BY_CORES],
        counts[SPLIT],
        split_by_cores,
        counts[FROM_PROMPT],
        round(copied * slots.expert_bytes),
    )
