"""Executes kept experts: those of all layers that lie in GPU memory, their slots and counters."""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from offplan.capabilities.cached_experts import ExpertsFound, ExpertSlots
from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.forms.form import Component
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.kernel_sizes import MAX_PAIRS
from offplan.placement import Phase, align
from offplan.runtime.cached_experts.expert_table import (
    BY_CORES,
    COPIED,
    FROM_PROMPT,
    HITS,
    IN_PLACE,
    NOBODY,
    NOTED_TOKENS,
    SPLIT,
    SPLIT_CHUNKS,
    Runs,
    Table,
    copy_missed,
    use,
)
from offplan.runtime.cached_experts.experts import (
    divide,
    keep_elsewhere,
    keep_in_slots,
    leave_slots,
)
from offplan.runtime.forms.experts import SHARE, holds_codes
from offplan.runtime.forms.stored import component_name
from offplan.runtime.loading.capability import CapabilityExecutor, Prepared
from offplan.runtime.memory.store import WeightStore, allocate
from offplan.runtime.refusal import refuse
from offplan.transformers_private import list_experts, name_first


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


def _check_kernels(model: Model, experts: Any, layer: int) -> None:
    """Raise CheckpointError for experts that kernels on a GPU do not read from slots."""
    stored = vars(experts).get("stored_experts", {}).values()
    if any(Component.GROUP_INDEX in weight.components for weight in stored):
        # to kernels all inputs have one order
        raise refuse(
            f"experts of layer {layer} have inputs in an order of each expert's own (g_idx), which "
            "kernels do not read from slots: leave cached_experts out"
        )
    if holds_codes(experts):
        return
    from offplan.runtime.model.experts import serves  # needs triton

    if not serves(experts):
        raise refuse(
            f"{model.source} has experts with biases, transposed ones, or sizes that 16 "
            "does not divide, held by their values: kernels cannot keep some of them "
            "(cached_experts): leave cached_experts out"
        )


class CachedExperts(CapabilityExecutor):
    """Keeps experts of some layers in GPU memory: for steps in slots, by the order of their use."""

    def __init__(self, prepared: Prepared) -> None:
        """Find the parameters of the experts of each layer that keeps some."""
        model, placement = prepared.stage.model, prepared.placement
        self._module, self._of = prepared.module, placement.caches_of(ExpertSlots)
        self._found = prepared.find_experts("cached_experts", lambda entry: entry.is_cached)
        for layer, (experts, _) in self._found.items():
            if prepared.device.type == "cuda":
                _check_kernels(model, experts, layer)
        self.device_bytes = sum(of.nbytes for of in self._of.values())
        self._memory: dict[int, torch.Tensor] = {}
        """Bytes of slots and table, by layer index."""
        self._num_chosen = model.experts.num_experts_per_token if model.experts else 0
        self._noted: torch.Tensor | None = None
        """Choices of the prompt's last tokens in the layer at hand, [tokens, batch, choices]."""
        self._notes: dict[int, torch.Tensor] = {}
        """Notes of prompts' choices, by their number of sequences."""
        self._place = torch.zeros(1, dtype=torch.int64)
        """Place of the oldest of these."""
        self.layers: dict[int, _Layer] = {}

    @classmethod
    def find(cls, prepared: Prepared) -> Self | None:
        """Return an executor if a rule keeps experts; raises CheckpointError, too."""
        return cls(prepared) if prepared.placement.caches_of(ExpertSlots) else None

    def allocate(self, device: torch.device) -> None:
        """Allocate the slots."""
        self._place = self._place.to(device)
        for layer, of in self._of.items():
            self._memory[layer] = allocate(of.nbytes, device, "kept experts")

    def attach(self, store: WeightStore) -> None:
        """Give experts their slots, which are empty."""
        for experts in list_experts(self._module):
            keep_elsewhere(experts)
        for layer, (experts, names) in self._found.items():
            self.layers[layer] = self._take(layer, experts, names, store)

    def _take(self, layer: int, experts: Any, names: list[str], store: WeightStore) -> _Layer:
        of, memory = self._of[layer], self._memory[layer]
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
        if memory.is_cuda:
            from offplan.runtime.cached_experts.table_kernels import address_parts  # needs triton

            sources = [[store.by_phase[phase][name] for name in names] for phase in Phase]
            addresses, own = (address_parts(of_phase, slots.values()) for of_phase in sources)
        keep_in_slots(experts, table, slots, own)
        vars(experts)[SHARE] = partial(self._share, layer)
        return _Layer(experts, table, slots, of, addresses)

    def _share(self, layer: int, by_cores: Any) -> bool:
        """Have the host's cores multiply the plan's share of the experts that a step misses.

        ``by_cores`` describes the experts to the cores.
        """
        own, of = self.layers[layer], self._of[layer]
        if of.host_share == 0:
            return False
        runs: dict[str, Runs] = {}
        assert not of.splits or of.inner == by_cores.down.num_in
        up_runs = 2 if by_cores.is_gated and not by_cores.is_interleaved else 1
        coded = vars(own.experts).get("stored_experts", {})
        for name, matrix, number in (
            (name_first(own.experts), by_cores.up, up_runs),
            ("down_proj", by_cores.down, by_cores.down.num_out),
        ):
            held = component_name(name, Component.WEIGHT) if name in coded else name
            first = own.slots[held][0]
            if of.splits and len(first) == matrix.num_out:
                chunk_bytes = first.nbytes // number * CHUNK_COLUMNS // of.inner
                runs[held] = Runs(number, chunk_bytes)
        shares = list_shares(of).to(self._place.device)
        divide(own.experts, shares, runs if of.splits else None)
        return True

    def enter(self, phase: Phase) -> None:
        """Have passes of a phase read experts as they do: steps from slots."""
        for layer in self.layers.values():
            vars(layer.experts)["reads_slots"] = phase is Phase.DECODE

    def begin(self, num_rows: int, chunks_as_one: int) -> None:
        """Have a prompt of so many sequences note its choices."""
        if num_rows not in self._notes:  # each stays: captured prompts write to theirs
            shape = NOTED_TOKENS, num_rows, self._num_chosen
            self._notes[num_rows] = torch.empty(shape, dtype=torch.int32, device=self._place.device)
        self._noted = self._notes[num_rows]
        self._noted.fill_(NOBODY)
        self._note_into(self._noted)

    def _note_into(self, noted: torch.Tensor | None) -> None:
        for layer in self.layers.values():
            vars(layer.experts).update(noted=noted, noted_place=self._place)

    def settle(self, index: int) -> None:
        """Take what the prompt that has just passed a layer leaves there: its last tokens' experts.

        They are copied from where the prompt read them.
        """
        layer = self.layers.get(index)
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
            from offplan.runtime.cached_experts.table_kernels import settle  # needs triton

            settle(layer.table, chosen, layer.addresses)
        self._noted.fill_(NOBODY)

    def begin_batch(self, batch: int) -> None:
        """Have passes note nothing and read no slots, until ``begin``."""
        if batch * self._num_chosen > MAX_PAIRS:
            raise PlanError(
                f"steps of {batch} sequences send tokens to {batch * self._num_chosen} experts, "
                f"and with cached_experts to {MAX_PAIRS} at most: run "
                f"{MAX_PAIRS // self._num_chosen} sequences at a time"
            )
        self.enter(Phase.PREFILL)
        for layer in self.layers.values():
            # a step's share of what it misses; whoever enters its phase gives it back
            vars(layer.experts)["cores"] = None
        self._note_into(None)

    def invalidate(self) -> None:
        """Empty all slots, as before the first pass, which finds memory that nobody has written."""
        for layer in self.layers.values():
            layer.table.empty()

    def forget(self) -> None:
        """Empty all slots, and forget what was counted."""
        self.invalidate()
        for layer in self.layers.values():
            layer.table.counts.zero_()

    def close(self) -> None:
        """Let go of the slots' memory; the device is idle, and the experts run no more."""
        for layer in self.layers.values():
            leave_slots(layer.experts)
        self.layers.clear()
        self._memory.clear()
        self._noted = None

    def count(self) -> ExpertsFound:
        """Return the experts that steps found, over all layers."""
        counts = self.count_layers().values()
        names = [field.name for field in fields(ExpertsFound)]
        return ExpertsFound(*(sum(getattr(each, of) for each in counts) for of in names))

    def count_layers(self) -> dict[int, ExpertCounts]:
        """Return what was counted, by layer index; waits for the device."""
        counts = torch.stack([layer.table.counts for layer in self.layers.values()]).tolist()
        return {
            index: _count(self.layers[index].of, of)
            for index, of in zip(self.layers, counts, strict=True)
        }


def list_shares(slots: ExpertSlots) -> torch.Tensor:
    """List what the host's cores multiply of each number of missed experts, int32 of [experts + 1].

    Whole experts in 16 bits, and above them the chunks of one more.
    """
    divided = [slots.divide(number) for number in range(slots.num_experts + 1)]
    return torch.tensor([of.experts + (of.chunks << 16) for of in divided], dtype=torch.int32)


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
