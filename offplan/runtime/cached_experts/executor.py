"""Executes kept experts: those of all layers that lie in GPU memory, their slots and counters."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import torch
from torch import nn
from typing_extensions import Self

from offplan.capabilities.cached_experts import LATER_STEPS, ExpertsFound, ExpertSlots, MissRates
from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.forms.form import Component
from offplan.forms.host_kernels import CHUNK_COLUMNS
from offplan.kernel_sizes import MAX_PAIRS
from offplan.placement import Phase, align
from offplan.runtime.cached_experts.expert_table import (
    BY_CORES,
    COPIED,
    DONE,
    FROM_PROMPT,
    HITS,
    IN_PLACE,
    LATER,
    LIST_NUMBERS,
    MISSED,
    MISSED_SLOTS,
    NOBODY,
    NOTED_TOKENS,
    NUM_MISSED,
    SPLIT,
    SPLIT_CHUNKS,
    Runs,
    Table,
    copy_later,
    copy_missed,
    use,
)
from offplan.runtime.cached_experts.experts import (
    divide,
    keep_elsewhere,
    keep_in_slots,
    leave_slots,
)
from offplan.runtime.cached_experts.rates import (
    Found,
    Remeasuring,
    Timed,
    assume,
    name_question,
    scale,
)
from offplan.runtime.cached_experts.rates import find as find_rates
from offplan.runtime.forms.experts import SHARE, are_plain, are_rounded, holds_codes
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
    later: int
    """Experts of which the cores multiplied all or a part, and that the link brought for later."""
    from_prompts: int
    """Experts that prompts copied into slots, from the ring or over the link."""
    copied_bytes: int
    """Bytes of the experts that steps copied over the link for themselves; of split ones the link's
    part of all, although their scales are copied whole."""

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
    sources: dict[str, torch.Tensor]
    """Parameters of the experts where they are stored, by the same names."""
    addresses: torch.Tensor | None
    """Addresses that prompts copy from and to, on a GPU: see ``address_parts``."""
    task: Any = None
    """By which the host's cores multiply some of what steps miss, with the server that does; None
    if they multiply none."""
    rates: MissRates | None = None
    """Rates of one row by which cores and link divide what steps miss, once a pass is to run."""


def _check_kernels(model: Model, experts: Any) -> None:
    """Raise CheckpointError for experts that kernels on a GPU do not read from slots."""
    if not holds_codes(experts) and not are_plain(experts):
        raise refuse(
            f"{model.source} has experts with biases, transposed ones, or sizes that 16 "
            "does not divide, held by their values: kernels cannot keep some of them "
            "(cached_experts): leave cached_experts out"
        )


def _check_order(experts: Any, layer: int) -> None:
    """Raise CheckpointError for experts whose files order each one's inputs in its own way."""
    stored = vars(experts).get("stored_experts", {}).values()
    if any(Component.GROUP_INDEX in weight.components for weight in stored):
        # to kernels all inputs have one order
        raise refuse(
            f"experts of layer {layer} have inputs in an order of each expert's own (g_idx), which "
            "kernels do not read from slots: leave cached_experts out"
        )


class CachedExperts(CapabilityExecutor):
    """Keeps experts of some layers in GPU memory: for steps in slots, by the order of their use.

    The copies of experts brought for later run beside a step, and beside steps of the same batch.
    Every other pass waits for them before it begins, as ``begin``, ``begin_batch`` and
    ``invalidate`` do: a prompt fills the same slots, and an aborted pass leaves nothing to rely on.
    """

    given_rates: MissRates | None = None
    """Rates of one row in place of those that are measured: for tests."""

    def __init__(self, prepared: Prepared) -> None:
        """Find the parameters of the experts of each layer that keeps some."""
        model, placement = prepared.stage.model, prepared.placement
        self._module, self._of = prepared.module, placement.caches_of(ExpertSlots)
        self._found = prepared.find_experts("cached_experts", lambda entry: entry.is_cached)
        for experts, _ in self._found.values():
            if prepared.device.type == "cuda":
                _check_kernels(model, experts)
        self.device_bytes = sum(of.nbytes for of in self._of.values())
        self.settling_steps = LATER_STEPS if any(of.later for of in self._of.values()) else 0
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
        self._disturbed: dict[Any, Found] = {}
        """Rates that something disturbed, by how the experts are stored that they are of."""
        self._again: Remeasuring | None = None
        """When these are measured again; None where there are none."""
        self._num_sequences = 0
        """Sequences of a step that cores and link divide what is missed for."""

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
            if self._place.is_cuda:
                _check_order(experts, layer)
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
        stored = {name.rpartition(".")[2]: store.offloaded[name].data for name in names}
        return _Layer(experts, table, slots, of, stored, addresses)

    def _share(self, layer: int, task: Any) -> bool:
        """Have the host's cores multiply some of the experts that a step misses.

        ``task`` describes the experts to the cores (``experts``) and has the server that asks them.
        How many these are is settled by ``begin_batch``.
        """
        own, of, by_cores = self.layers[layer], self._of[layer], task.experts
        if not of.by_cores:
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
        device = self._place.device
        shares = torch.zeros(of.num_experts + 1, dtype=torch.int32, device=device)
        later = torch.zeros(LIST_NUMBERS if of.later else 0, dtype=torch.int32, device=device)
        if of.later and own.addresses is not None:
            parts = [
                (own.sources[name].data_ptr(), slots.data_ptr(), slots[0].nbytes)
                for name, slots in own.slots.items()
            ]
            task.server.keep(self._memory[layer])  # copies write there
            later = task.server.bring_later(by_cores, parts, own.table.number(DONE).data_ptr())
        table = divide(own.experts, shares, runs if of.splits else None, later, of.later)
        self.layers[layer] = replace(own, table=table, task=task)
        return True

    def _drain(self) -> None:
        """Wait until all that steps listed for later is copied, and whatever they have begun."""
        bringing = [each for each in self.layers.values() if each.table.later is not None]
        for layer in bringing:
            if layer.addresses is None:
                copy_later(layer.table, layer.sources, layer.slots)
        if bringing:
            bringing[0].task.server.drain()

    def _divide(self, batch: int) -> None:
        """Have cores and link divide what steps of a batch miss, by the rates of each layer."""
        self._num_sequences = batch
        found: dict[Any, MissRates] = {}
        for index, layer in self.layers.items():
            if layer.task is None:
                continue
            stored = _name_stored(layer)
            if layer.rates is None:
                if stored not in found:
                    alike = [
                        each
                        for each in self.layers.values()
                        if each.task is not None and _name_stored(each) == stored
                    ]
                    found[stored] = self._find_rates(stored, alike)
                layer = self.layers[index] = replace(layer, rates=found[stored])
            assert layer.rates is not None
            assert layer.table.shares is not None
            codes, of = are_rounded(layer.experts), layer.of
            rates = scale(layer.rates, of.num_experts, self._num_chosen, batch, codes=codes)
            layer.table.shares.copy_(list_shares(of, rates))

    def _measure_again(self) -> None:
        """Measure rates that something disturbed once more, if it is time; waits for steps then."""
        if self._again is None or not self._again.is_due():
            return
        next(each.task for each in self.layers.values() if each.task is not None).server.drain()
        for index, layer in self.layers.items():
            if _name_stored(layer) in self._disturbed:
                self.layers[index] = replace(layer, rates=None)
        self._divide(self._num_sequences)
        if not self._disturbed:
            self._again = None

    @property
    def is_timed(self) -> bool:
        """True if rates are measured: those of a GPU."""
        return self._place.is_cuda

    def _find_rates(self, stored: Any, layers: Sequence[_Layer]) -> MissRates:
        """Find the rates of layers whose experts are stored alike; on the current stream.

        They are measured once on a machine, in tenths of a second. On the CPU they are assumed.
        """
        first = layers[0]
        if self.given_rates is not None:
            return self.given_rates
        if not self.is_timed:
            return assume(first.of)
        by = first.task.server.key
        question = name_question(first.of, stored, by, self._place.device)
        before = self._disturbed.get(stored)
        found = find_rates(question, partial(self._time, layers), self._num_chosen, before)
        if found.why_doubtful is not None:
            self._disturbed[stored] = found
            self._again = self._again or Remeasuring()
        else:
            self._disturbed.pop(stored, None)
        return found.rates

    def _time(self, layers: Sequence[_Layer], number: int, num_experts: int) -> Timed:
        """Time the cores with so many experts of a layer, while others cross the link.

        The slots then hold what no table says.
        """
        from offplan.runtime.cached_experts.table_kernels import copy_listed  # needs triton

        layer = layers[number % len(layers)]
        of, table = layer.of, layer.table
        first = number * num_experts  # no cache has them, even where layers share their weights
        chosen = [(first + at) % of.num_experts for at in range(num_experts)]
        num_copied = min(2 * num_experts + 2, of.num_experts)
        places = torch.arange(num_copied, dtype=torch.int32, device=self._place.device)
        table.list_of(MISSED)[:num_copied] = (first + of.num_experts // 2 + places) % of.num_experts
        table.list_of(MISSED_SLOTS)[:num_copied] = places % of.num_slots
        table.number(NUM_MISSED).fill_(num_copied)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        copy_listed(table, vars(layer.experts)["slot_sources"])
        ended.record()
        room = max(num_experts, self._num_chosen)
        cores_s = layer.task.server.time_experts(layer.task.experts, chosen, room)
        ended.synchronize()
        table.empty()
        return Timed(cores_s, began.elapsed_time(ended) / 1e3 / num_copied)

    def describe(self) -> Iterator[str]:
        """Yield who multiplies how many missed experts, by which rates; of the first such layer."""
        for layer in self.layers.values():
            if layer.rates is not None and layer.table.shares is not None:
                said = describe_division(layer.of, layer.rates, layer.table.shares.tolist())
                is_assumed = not self.is_timed and self.given_rates is None
                said += " These times are assumed." * is_assumed
                if (found := self._disturbed.get(_name_stored(layer))) is not None:
                    said += f" These times were {found.why_doubtful}, and are not kept."
                yield said
                return

    def enter(self, phase: Phase) -> None:
        """Have passes of a phase read experts as they do: steps from slots."""
        for layer in self.layers.values():
            vars(layer.experts)["reads_slots"] = phase is Phase.DECODE

    def begin(self, num_rows: int, chunks_as_one: int) -> None:
        """Have a prompt of so many sequences note its choices, once later copies are made.

        On a GPU the host waits for steps before it.
        """
        self._drain()
        self._measure_again()
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
        """Have passes note nothing and read no slots, until ``begin``; divide what steps will miss.

        Waits for steps of the batch before.
        """
        if batch * self._num_chosen > MAX_PAIRS:
            raise PlanError(
                f"steps of {batch} sequences send tokens to {batch * self._num_chosen} experts, "
                f"and with cached_experts to {MAX_PAIRS} at most: run "
                f"{MAX_PAIRS // self._num_chosen} sequences at a time"
            )
        self._drain()
        self._divide(batch)
        self.enter(Phase.PREFILL)
        for layer in self.layers.values():
            # a step's share of what it misses; whoever enters its phase gives it back
            vars(layer.experts)["cores"] = None
        self._note_into(None)

    def invalidate(self) -> None:
        """Empty all slots, as before the first pass, which finds memory that nobody has written.

        Copies that an aborted step has listed are waited for.
        """
        self._drain()
        for layer in self.layers.values():
            layer.table.empty()

    def forget(self) -> None:
        """Empty all slots, and forget what was counted."""
        self.invalidate()
        self._measure_again()
        for layer in self.layers.values():
            layer.table.counts.zero_()

    def close(self) -> None:
        """Let go of the slots' memory; the device is idle, and the experts run no more.

        Copies for later, which no stream of the session's waits for, may yet be under way.
        """
        with suppress(RuntimeError):  # of a device that failed, whose error is on its way
            self._drain()
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


@lru_cache(maxsize=8)  # layers are alike
def list_shares(slots: ExpertSlots, rates: MissRates) -> torch.Tensor:
    """List what the host's cores multiply of each number of missed experts, int32 of [experts + 1].

    Whole experts in 16 bits, and above them the chunks of one more.
    """
    divided = [slots.divide(number, rates) for number in range(slots.num_experts + 1)]
    return torch.tensor([of.experts + (of.chunks << 16) for of in divided], dtype=torch.int32)


MOST_DESCRIBED = 8
"""Missed experts up to which ``describe_division`` says who multiplies them."""


def describe_division(slots: ExpertSlots, rates: MissRates, shares: Sequence[int]) -> str:
    """Say how many of each number of missed experts the cores multiply, and by which rates."""
    of_each = []
    for number, share in enumerate(shares[1 : 1 + MOST_DESCRIBED], 1):
        by_cores = slots.count_by_cores(share & 0xFFFF, share >> 16)
        of_each.append(f"{by_cores:.2g} of {number}")
    trip, cores, link = (f"{1e6 * each:.0f} us" for each in rates)
    return (
        f"Of the experts that a layer misses the host's cores multiply {', '.join(of_each)}. An "
        f"expert of one token takes them {cores}, and {trip} to hand over; the link takes {link}."
    )


def _name_stored(layer: _Layer) -> tuple[Any, ...]:
    """Name how experts of a layer are stored: what layers share, their rates do, too."""
    parts = ((n, str(s.dtype), *s.shape) for n, s in sorted(layer.sources.items()))
    return tuple(parts)


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
        counts[LATER],
        counts[FROM_PROMPT],
        round(copied * slots.expert_bytes),
    )
