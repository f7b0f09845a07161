"""The space that is searched, and what all its plans share: the same for every budget.

Plans of no rule, of one and of two. A rule takes a segment class in the layers of a group pattern,
with a pair of backends; a plan has a ring of one of PREFETCH_STEPS, smaller than the number of
layers that stream, and a setting: the prompt's chunk, and the place of what is read by row. Of two
rules the classes have no parameter in common, so their order makes no difference. Of the patterns
that take as many layers of each kind only that of the smallest groups is tried. One rule may also
take whole parameters in order up to ``max_bytes``, read at use.

A third rule was found to buy at most 1.5 % (median 0) in 161 cases without targets, less than
predictions are off by; more where a target or the host's memory is all but out of reach. It buys
0.5 to 1.1 % where plans of DeepSeek-V2-Lite leave 1.4 to 5.5 % of a budget free: some experts of
one layer more on the GPU, whose other rules take a whole projection of a layer at least.
What an engine is to run is one rule with one backend; its flags put no embedding on the host.
Of a pipeline it is the space of the largest stage; ``planner.stages`` prices the others.
A space has one recoding for all its plans; ``planner.packed`` goes over those.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from offplan.backends import Backend
from offplan.capabilities.drafts import Draft, list_places
from offplan.capabilities.table import Recoding
from offplan.checkpoint.model import Layer
from offplan.checkpoint.tables import Table
from offplan.costs.activations import activation_bytes
from offplan.costs.calls import count_calls
from offplan.costs.compute import ModelCompute
from offplan.costs.in_place_costs import AtUse, Served, read_ps
from offplan.costs.link import rows_bytes, uva_slowdown
from offplan.costs.memory import (
    kv_cache_bytes,
    overhead_bytes,
    resident_draft_bytes,
    stored_draft_bytes,
)
from offplan.costs.pass_compute import PassCompute
from offplan.costs.prediction import add_drafting
from offplan.costs.timeline import to_ps
from offplan.costs.work import PassShape, decode_shape, prefill_shapes
from offplan.drafts.mix import Mix
from offplan.held.held import recode_stages
from offplan.held.stage import Stage
from offplan.held.unit import Unit, group_units
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase
from offplan.plan import Budget
from offplan.planner.aims import limits_ps
from offplan.planner.classes import SegmentClass
from offplan.planner.question import Question
from offplan.refusals import has_kernels

PREFETCH_STEPS = (1, 2, 3, 4)
"""Ring sizes tried."""

PREFILL_CHUNKS = (8192, 4096, 2048, 1024, 512, 256, 128)
"""Chunks tried beside the whole prompt; longer ones than the prompt are left out."""
LEAST_TOKENS = 512
"""Tokens that a chunk of all sequences has at least, unless it is the whole prompt.

Products of fewer tokens take hardly less time, and a chunk of so many takes little memory. Source:
estimated.
"""

TIE_WEIGHT = 2.0**-32
"""Weight of a decode step that never runs: 23 picoseconds for a step of 0.1 s. A power of two, so
that products are exact; not less, so that floats still tell values apart."""


def prefill_chunks(prompt_tokens: int, batch: int) -> tuple[int, ...]:
    """Return the sizes of chunks to try for prompts of so many sequences, the largest first."""
    shorter = (size for size in PREFILL_CHUNKS if size < prompt_tokens)
    return (prompt_tokens, *(size for size in shorter if size * batch >= LEAST_TOKENS))


@dataclass(frozen=True)
class Setting:
    """One choice of everything that does not depend on the rules: chunk, embeddings, draft."""

    prefill_chunk: int
    embeddings: Literal["device", "host"]
    device_bytes: int
    """GPU memory with all layers resident, overhead left out."""
    host_bytes: int
    """Bytes of the embeddings that lie on the host."""
    row_ps: tuple[int, int]
    """Picoseconds of reading embedding rows and a prediction layer's experts in place: in a prompt,
    and in a decode step."""
    prefill: PassCompute
    draft: Draft | None = None
    """The space's draft, with the place of experts of its prediction layer."""


class SettingTable(NamedTuple):
    """Figures of all settings: arrays with a row for each; picoseconds unless they say bytes."""

    row_ps: NDArray[np.int64]
    """``Setting.row_ps``, [settings, 2]."""
    layer_ps: NDArray[np.int64]
    """A prompt's compute in each layer, [settings, layers]."""
    outside_ps: NDArray[np.int64]
    resident_ps: NDArray[np.int64]
    """All compute of a prompt, and of a decode step, [settings, 2]."""
    num_chunks: NDArray[np.int64]


@dataclass(frozen=True)
class StepPass:
    """The passes of one size of decode: all of them are steps, unless some check drafts."""

    share: float
    """Share of all passes."""
    compute: PassCompute
    at_use: AtUse
    """Prices what layers take at use."""


class Near(NamedTuple):
    """The plans near a decision."""

    classes: frozenset[SegmentClass]
    """The segment classes that rules may take."""
    prefill_chunk: int
    embeddings: Literal["device", "host"] | None
    """Their place; None for both."""


@dataclass(frozen=True)
class Space:
    """All that the plans of a question have in common, whatever its budget and targets.

    Where passes check drafts, a decode step is the mean of all passes, of each layer by itself. It
    takes no longer than passes do on average, since only compute and link that wait for each other
    tell them apart.
    """

    question: Question
    recoding: Recoding | None = None
    """The weights that all its plans hold in another form than the checkpoint's."""
    draft: Draft | None = None
    """The drafts that passes of all its plans check; settings have the place of experts."""
    near: Near | None = None
    """The part of it that is searched; None for all."""

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The weights of a GPU of each stage by its plans."""
        return recode_stages(self.question.stages, self.recoding, self.question.runner)

    @cached_property
    def stage(self) -> Stage:
        """The stage that is searched: the one that takes most memory."""
        return self.stages[self.question.stage.number]

    @cached_property
    def machine(self) -> MachineProfile:
        """The machine, with the link to the store."""
        return self.question.planned_machine

    @property
    def weights(self) -> tuple[int, float]:
        """Weights of prompt and decode step in a request's time.

        Where a request has no step, the shorter step decides between equal prompts.
        """
        return 1, self.question.workload.num_steps / self.mix.tokens or TIE_WEIGHT

    @cached_property
    def limits_ps(self) -> tuple[float, float]:
        """The most picoseconds of a prompt, and of a decode step, that the goal allows."""
        first, token = limits_ps(self.question.goal)
        return first, token * self.mix.tokens

    @cached_property
    def mix(self) -> Mix:
        """The passes of decode."""
        return self.stage.mix(self.draft, self.question.workload)

    @cached_property
    def slowdown(self) -> float:
        """What reading in place takes in a pass that copies too, as a multiple."""
        return uva_slowdown(self.machine)

    @cached_property
    def start_ps(self) -> int:
        """Picoseconds of a copy beside those of its bytes."""
        return to_ps(self.machine.copy_latency.value)

    @cached_property
    def compute(self) -> ModelCompute:
        """Prices passes with everything resident."""
        return ModelCompute(self.stage, self.machine)

    @cached_property
    def steps(self) -> tuple[StepPass, ...]:
        """The passes of decode by their size, the largest last."""
        workload, asked = self.question.workload, (self.stage, self.machine)
        return tuple(
            StepPass(
                share,
                self._price(decode_shape(workload, tokens)),
                AtUse(*asked, workload.batch, tokens),
            )
            for tokens, share in self.mix.shares
        )

    def _price(self, *shapes: PassShape) -> PassCompute:
        """Price a pass of these chunks, and what prediction layers take behind it."""
        return self._add_drafting(self.compute.price(*shapes), self.draft)

    def _add_drafting(self, priced: PassCompute, draft: Draft | None) -> PassCompute:
        return add_drafting(self.stage, self.machine, priced, draft)

    def mean(self, values: Iterable[float]) -> int:
        """Return the mean over the passes of decode, of a value of each."""
        pairs = zip(self.steps, values, strict=True)
        return round(sum(each.share * value for each, value in pairs))

    @cached_property
    def decode(self) -> PassCompute:
        """The decode step and its compute; of passes that check drafts the shape is the largest."""
        passes = [each.compute for each in self.steps]
        if len(passes) == 1:
            return passes[0]
        return replace(
            passes[-1],
            layer_ps=tuple(map(self.mean, zip(*(p.layer_ps for p in passes), strict=True))),
            outside_ps=self.mean(p.outside_ps for p in passes),
            drafting_ps=self.mean(p.drafting_ps for p in passes),
            drafting_bytes=0,  # settings have them
            routed_ps=tuple(map(self.mean, zip(*(p.routed_ps for p in passes), strict=True))),
        )

    def step_read_ps(self, served: Served) -> int:
        """Picoseconds that a decode step reads what a layer has served."""
        served = list(served)
        if not served:
            return 0
        return self.mean(each.at_use.read_ps(served, each.compute) for each in self.steps)

    def step_cores_ps(self, served: Served) -> tuple[int, int]:
        """Picoseconds that a decode step waits for the cores, alone and beside copies."""
        served = list(served)
        uses = [each.at_use.cores(served) for each in self.steps]
        alone, beside = (
            self.mean(to_ps(use.seconds(self.machine, beside=of)) for use in uses)
            for of in (False, True)
        )
        return alone, beside

    @cached_property
    def units(self) -> tuple[tuple[Unit, ...], ...]:
        """What rules can take, by kind of layer."""
        return tuple(map(group_units, self.layers))

    @cached_property
    def kind_of(self) -> tuple[int, ...]:
        """The number of each layer's kind: equal layers are merged."""
        kinds = list(self.compute.works)
        return tuple(kinds.index(key) for key in self.compute.keys)

    @cached_property
    def kinds(self) -> NDArray[np.int64]:
        """The same in an array, [layers]."""
        return np.array(self.kind_of)

    @cached_property
    def first_of(self) -> tuple[int, ...]:
        """The first layer of each kind, by number."""
        return tuple(map(self.kind_of.index, range(len(self.compute.works))))

    @property
    def layers(self) -> tuple[Layer, ...]:
        """The first layer of each kind."""
        return tuple(self.stage.layers[number] for number in self.first_of)

    def taken(self, segment_class: SegmentClass) -> tuple[tuple[Unit, ...], ...]:
        """Return what a class takes of a layer, by kind."""
        if segment_class not in self._taken:
            found = (tuple(filter(segment_class.takes, units)) for units in self.units)
            self._taken[segment_class] = tuple(found)
        return self._taken[segment_class]

    def suits(self, segment_class: SegmentClass, decode: Backend) -> bool:
        """Return True if a backend of decode has kernels for what a class takes."""
        return has_kernels(self.stage, decode, self.units, self.taken(segment_class))

    @cached_property
    def _taken(self) -> dict[SegmentClass, tuple[tuple[Unit, ...], ...]]:
        return {}

    @cached_property
    def dense_bytes(self) -> int:
        """Bytes of the layers beside their routed experts."""
        return sum(layer.nbytes - layer.expert_bytes for layer in self.stage.layers)

    @property
    def at_use(self) -> AtUse:
        """Prices what layers take at use, in the largest passes of decode."""
        return self.steps[-1].at_use

    @property
    def chunks(self) -> tuple[int, ...]:
        """The chunks to try, the largest first."""
        workload, passes = self.question.workload, self.stage.passes
        if self.near is not None:
            return (self.near.prefill_chunk,)
        sizes = prefill_chunks(workload.prompt_tokens, workload.batch)
        # where each chunk would have the weights cross again, the whole prompt is one
        return sizes[:1] if passes is not None and passes.chunk_bytes is None else sizes

    @cached_property
    def prompts(self) -> Mapping[int, PassCompute]:
        """What a prompt takes without drafts, by chunk."""
        workload = self.question.workload
        return {
            chunk: self.compute.price(*prefill_shapes(workload, chunk)) for chunk in self.chunks
        }

    @cached_property
    def _used_bytes(self) -> Mapping[int, int]:
        """Bytes of KV cache and activations, by chunk."""
        asked = self.stage, self.question.workload
        return {
            chunk: kv_cache_bytes(*asked, chunk, self.draft)
            + activation_bytes(*asked, chunk, self.draft)
            for chunk in self.chunks
        }

    @cached_property
    def settings(self) -> tuple[Setting, ...]:
        """The chunks to try, the largest first, with what may lie on the host in either place."""
        stage = self.stage
        places: tuple[tuple[Table, ...], ...] = ((),)
        if stage.tables and self.question.runner.places_tables(stage.model.tables):
            places = ((), stage.tables)
        found = (
            self.setting(chunk, place, draft)
            for chunk in self.prompts
            for place in places
            for draft in self.drafts
            # embeddings free memory for less time than experts
            if place == places[-1] or draft is self.draft
        )
        kept = None if self.near is None else self.near.embeddings
        return tuple(each for each in found if kept in (None, each.embeddings))

    @cached_property
    def calls(self) -> NDArray[np.int64]:
        """How often a pass of each phase calls each layer, [phases, layers]."""
        return np.array([count_calls(self.stage, phase) for phase in Phase])

    @cached_property
    def table(self) -> SettingTable:
        """The figures of all settings as arrays."""
        settings = self.settings
        prompts, step_ps = [each.prefill for each in settings], self.decode.resident_ps
        return SettingTable(
            row_ps=np.array([each.row_ps for each in settings]),
            layer_ps=np.array([each.layer_ps for each in prompts]),
            outside_ps=np.array([each.behind_ps for each in prompts]),
            resident_ps=np.array([[each.resident_ps, step_ps] for each in prompts]),
            num_chunks=np.array([len(each.shapes) for each in prompts]),
        )

    @cached_property
    def drafts(self) -> Mapping[Draft | None, int]:
        """The draft with experts of its prediction layer in each place, and the bytes of them that
        a decode step reads in place."""
        places = (None,) if self.draft is None else list_places(self.draft, self.stage.model)
        computes = [each.compute for each in self.steps]
        return {
            draft: self.mean(self._add_drafting(each, draft).drafting_bytes for each in computes)
            for draft in places
        }

    def setting(
        self, prefill_chunk: int, host_tables: tuple[Table, ...], draft: Draft | None = None
    ) -> Setting:
        """Return what a chunk and the places of embeddings and experts come to."""
        stage, prompt = self.stage, self._add_drafting(self.prompts[prefill_chunk], draft)
        host_bytes = sum(table.nbytes for table in host_tables)
        of_steps = (rows_bytes(host_tables, each.compute.shapes) for each in self.steps)
        read = (
            (rows_bytes(host_tables, prompt.shapes), prompt.drafting_bytes),
            (self.mean(of_steps), self.drafts[draft]),
        )
        row_ps = [sum(map(self.reading_ps, each)) for each in read]
        return Setting(
            prefill_chunk=prefill_chunk,
            embeddings="host" if host_tables else "device",
            device_bytes=stage.loaded_bytes
            - host_bytes
            + resident_draft_bytes(stage, draft)
            + self._used_bytes[prefill_chunk],
            host_bytes=host_bytes,
            row_ps=(row_ps[0], row_ps[1]),
            prefill=prompt,
            draft=draft,
        )

    def takes_padding(self, segment_class: SegmentClass) -> bool:
        """Return True if a class has weights that an engine pads, which drops their padding."""
        units, grown = chain(*self.taken(segment_class)), self.stage.layout.gpu_growth
        return bool(grown) and any(t.name in grown for unit in units for t in unit.tensors)

    def reading_ps(self, num_bytes: int, backend: Backend = Backend.UVA) -> int:
        """Picoseconds that a backend takes to read so many bytes at use."""
        return read_ps(backend, self.machine, num_bytes)

    def copying_ps(self, num_bytes: int) -> int:
        """Picoseconds of one copy of so many bytes."""
        return to_ps(self.machine.copy_seconds(num_bytes))


@dataclass(frozen=True)
class Room:
    """The room that a budget leaves for the layers' weights, for each setting of a space."""

    lacking_bytes: NDArray[np.int64]
    """Bytes of layers' weights that must leave the GPU, the ring's to come on top; may be < 0."""
    missing_bytes: int
    """Bytes of weights that no plan has room for on the GPU; may be < 0."""
    host_bytes: NDArray[np.float64]
    """Bytes of slabs of one GPU, in all stages, that the store has room for; infinite where it is
    not limited."""
    budget: Budget
    """The budget itself."""


def find_room(space: Space, budget: Budget) -> Room:
    """Find what a budget leaves for the layers."""
    overhead = overhead_bytes(space.machine, budget)
    taken = overhead + space.stage.layout.grown_bytes
    lacking = [each.device_bytes + taken - budget.gpu_memory for each in space.settings]
    on_host = space.machine.store == "host"  # other weights are, wherever the slabs lie
    limit = float("inf") if budget.host_memory is None else budget.host_memory
    limit /= space.stage.num_gpus  # each locks as much
    host = [
        limit - on_host * (each.host_bytes + stored_draft_bytes(space.stage, each.draft))
        for each in space.settings
    ]
    pairs = zip(lacking, space.settings, strict=True)
    missing = min(lack + each.host_bytes for lack, each in pairs)
    return Room(np.array(lacking), missing, np.array(host, dtype=np.float64), budget)
