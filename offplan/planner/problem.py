"""One question to the planner, and what all candidates share; equal layers are merged."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from offplan.checkpoint.model import Model
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs.compute import ModelCompute
from offplan.costs.link import embedding_bytes, uva_bytes
from offplan.costs.memory import activation_bytes, kv_cache_bytes, overhead_bytes
from offplan.costs.predict import PricedPass, price_prompt, price_step
from offplan.costs.timeline import to_ps
from offplan.machine.profile import MachineProfile
from offplan.placement import Unit, align, group_units
from offplan.plan import Budget, Offload, Workload

PREFILL_CHUNKS = (8192, 4096, 2048, 1024, 512)
"""Chunks tried beside the whole prompt; longer ones than the prompt are left out."""


def prefill_chunks(prompt_tokens: int) -> tuple[int, ...]:
    """Sizes of chunks to try for a prompt, the largest first."""
    return (prompt_tokens, *(size for size in PREFILL_CHUNKS if size < prompt_tokens))


@dataclass(frozen=True)
class Setting:
    """One choice of everything that does not depend on the rules: chunk and embedding."""

    prefill_chunk: int
    embeddings: Literal["device", "host"]
    lacking_bytes: int
    """Of layers' weights that must leave the GPU, the ring's bytes to come on top; may be < 0."""
    host_bytes: int
    """Of the embedding, if it lies there."""
    row_ps: tuple[int, int]
    """Reading embedding rows in place: while a prompt is read, and in a decode step."""
    row_bytes: tuple[int, int]
    """That this moves."""
    prefill: PricedPass
    chunk_tokens: tuple[tuple[int, int], ...]
    """New tokens over all sequences, and the number of chunks that have as many."""


@dataclass(frozen=True)
class Restriction:
    """What an engine's flags can say: one rule, with one backend in both phases, and no embedding.

    Of such plans only those that ``allows`` are searched.
    """

    engine: str
    allows: Callable[[Offload], bool]
    max_bytes_unit: int = 1
    """A rule's ``max_bytes`` is a whole number of these."""


@dataclass(frozen=True)
class Problem:
    """One question to the planner, and what all candidates share."""

    model: Model
    machine: MachineProfile
    workload: Workload
    budget: Budget
    """As the user gave it, but no more than the machine has."""
    restriction: Restriction | None = None

    @property
    def weights(self) -> tuple[int, int]:
        """Of the prompt, and of a decode step, in the objective: a step for each output token."""
        return 1, self.workload.output_tokens

    @cached_property
    def compute(self) -> ModelCompute:
        """Prices passes with everything resident."""
        return ModelCompute(self.model, self.machine)

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """What rules can take, by layer."""
        return tuple(group_units(layer) for layer in self.model.layers)

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Keys of the distinct layers, in the order of their first appearance."""
        return tuple(self.compute.works)

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """The number of each layer's kind, by layer."""
        return tuple(self.kinds.index(key) for key in self.compute.keys)

    @cached_property
    def layers_of_kind(self) -> tuple[int, ...]:
        """The layers of each kind, as bits."""
        return tuple(
            sum(1 << i for i, key in enumerate(self.compute.keys) if key == kind)
            for kind in self.kinds
        )

    @cached_property
    def units_of_kind(self) -> tuple[tuple[Unit, ...], ...]:
        """The units of one layer of each kind."""
        return tuple(self.units[self.compute.keys.index(kind)] for kind in self.kinds)

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The chunks to try, the largest first, with the embedding in either place."""
        sizes = prefill_chunks(self.workload.prompt_tokens)
        places: tuple[TensorInfo | None, ...] = (None,)
        if self.model.input_embedding is not None and self.restriction is None:
            places = (None, self.model.input_embedding)
        return tuple(self._setting(size, place) for size in sizes for place in places)

    def _setting(self, prefill_chunk: int, host_embedding: TensorInfo | None) -> Setting:
        prompt = price_prompt(self.compute, self.workload, prefill_chunk)
        taken = (
            kv_cache_bytes(self.model, self.workload)
            + activation_bytes(self.model, self.workload, prefill_chunk)
            + overhead_bytes(self.machine, self.budget)
        )
        host_bytes = 0 if host_embedding is None else host_embedding.nbytes
        prompt_read, step_read = (
            embedding_bytes(host_embedding, priced.shapes) for priced in (prompt, self.decode)
        )
        return Setting(
            prefill_chunk=prefill_chunk,
            embeddings="device" if host_embedding is None else "host",
            lacking_bytes=self.model.loaded_bytes - host_bytes + taken - self.budget.gpu_memory,
            host_bytes=host_bytes,
            row_ps=(
                to_ps(prompt_read / self.machine.uva.value),
                to_ps(step_read / self.machine.uva.value),
            ),
            row_bytes=(prompt_read, step_read),
            prefill=prompt,
            chunk_tokens=tuple(Counter(shape.num_tokens for shape in prompt.shapes).items()),
        )

    @cached_property
    def decode(self) -> PricedPass:
        """The decode step and its compute."""
        return price_step(self.compute, self.workload)

    def objective(self, prefill: int, decode: int) -> int:
        """Weigh the two phases: the prompt, and a step for each output token."""
        return self.weights[0] * prefill + self.weights[1] * decode

    def host_room(self, setting: Setting) -> int | None:
        """Bytes of slabs that the store has room for, beside an embedding that it holds."""
        limit = self.budget.host_memory
        beside = setting.host_bytes if self.machine.store == "host" else 0
        return None if limit is None else limit - beside

    def host_lack(self, slab_bytes: int, setting: Setting) -> int:
        """Bytes by which slabs exceed the store's room; at most 0 where they fit."""
        room = self.host_room(setting)
        return 0 if room is None else slab_bytes - room

    def resident_ps(self, setting: Setting) -> tuple[int, int]:
        """A prompt and a step with all layers resident: no plan of a setting takes less."""
        prompt_ps, step_ps = setting.prefill.resident_ps, self.decode.resident_ps
        return prompt_ps + setting.row_ps[0], step_ps + setting.row_ps[1]

    def may_fit(self, setting: Setting) -> bool:
        """Whether the store has room for the least that leaves the GPU."""
        return self.host_lack(max(0, setting.lacking_bytes), setting) <= 0

    def read_in_place(
        self, units: Sequence[Unit], chunk_tokens: Iterable[tuple[int, int]]
    ) -> tuple[int, int]:
        """Time, and bytes, that a pass takes to read these units of one layer in place.

        ``chunk_tokens`` are the tokens of its chunks, and how many chunks have as many.
        """
        num_bytes = sum(
            count * uva_bytes(self.machine, units, self.model.experts, num_tokens)
            for num_tokens, count in chunk_tokens
        )
        return to_ps(num_bytes / self.machine.uva.value), num_bytes

    def read_step_in_place(self, units: Sequence[Unit]) -> tuple[int, int]:
        """Time, and bytes, that a decode step takes to read these units of one layer in place."""
        return self.read_in_place(units, [(self.workload.batch, 1)])


def pose(
    model: Model,
    machine: MachineProfile,
    workload: Workload,
    budget: Budget,
    restriction: Restriction | None = None,
) -> Problem:
    """Pose a question; the budget takes no more than the machine has."""
    gpu = min(budget.gpu_memory, machine.gpu_memory.value)
    host = budget.host_memory
    if machine.host_memory is not None:
        limit = machine.host_memory.value
        host = limit if host is None else min(host, limit)
    within = Budget(gpu_memory=gpu, host_memory=host)
    return Problem(model, machine, workload, within, restriction)


@dataclass(frozen=True)
class KindCosts:
    """What offloading some units in one layer of one kind means; zeros if there are none.

    Figures of the prompt are over all its chunks, one for each setting.
    """

    unit_bytes: int
    """Taken off the GPU."""
    slab_bytes: int
    """On the host, padding included: what one DMA moves."""
    copy_ps: int
    decode_uva_bytes: int
    decode_uva_ps: int
    prefill_uva_bytes: tuple[int, ...]
    prefill_uva_ps: tuple[int, ...]
    decode_compute_ps: int
    """The layer's own compute."""
    prefill_compute_ps: tuple[int, ...]


def kind_costs(problem: Problem, taken: Sequence[Sequence[Unit]]) -> tuple[KindCosts, ...]:
    """Price the units that are taken of a layer of each kind."""
    return tuple(
        _price_kind(problem, units, kind) for kind, units in zip(problem.kinds, taken, strict=True)
    )


def slab_bytes(units: Sequence[Unit]) -> int:
    """Size of a slab of these units, padding between them included."""
    end = slab = 0
    for unit in units:
        slab = end + unit.nbytes
        end = align(slab)
    return slab


def _price_kind(problem: Problem, taken: Sequence[Unit], kind: str) -> KindCosts:
    if not taken:
        zeros = (0,) * len(problem.settings)
        return KindCosts(0, 0, 0, 0, 0, zeros, zeros, 0, zeros)
    layer = problem.compute.keys.index(kind)
    num_bytes = slab_bytes(taken)
    decode_uva_ps, decode_uva_bytes = problem.read_step_in_place(taken)
    prompts = [problem.read_in_place(taken, each.chunk_tokens) for each in problem.settings]
    return KindCosts(
        unit_bytes=sum(unit.nbytes for unit in taken),
        slab_bytes=num_bytes,
        copy_ps=to_ps(problem.machine.copy_seconds(num_bytes)),
        decode_uva_ps=decode_uva_ps,
        decode_uva_bytes=decode_uva_bytes,
        prefill_uva_ps=tuple(reading_ps for reading_ps, _ in prompts),
        prefill_uva_bytes=tuple(read_bytes for _, read_bytes in prompts),
        decode_compute_ps=problem.decode.layer_ps[layer],
        prefill_compute_ps=tuple(each.prefill.layer_ps[layer] for each in problem.settings),
    )
