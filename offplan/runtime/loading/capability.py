"""The protocol of a capability's executor, and the record that executors are given.

``offplan.runtime.executors`` registers them. Nothing else in the runtime names one.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedModel
from typing_extensions import Self

from offplan.backends import Backend
from offplan.capabilities.way import Way
from offplan.checkpoint.model import Model
from offplan.errors import PlanError
from offplan.held.runner import Counter
from offplan.held.stage import Stage
from offplan.placement import Phase, Placement, SlabEntry
from offplan.plan import Offload
from offplan.runtime.loading.fill import Target
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.store import Offloaded, Server, WeightStore
from offplan.transformers_private import list_experts

Steps = Sequence[tuple[Callable[[], torch.Tensor], Callable[[], AbstractContextManager[Any]]]]
"""For each chunk what takes it through a layer and returns its hidden states, and what makes the
context that it runs in."""


class CapabilityExecutor:
    """Executes a capability of a plan in one loaded model; methods do nothing unless overridden.

    Methods come in the order in which they are called. ``attach`` and what follows works on the
    current stream.
    """

    slab_device: torch.device | None = None
    """Device that slabs lie on, once the machine was asked; None for the host."""
    servers: Mapping[Backend, Callable[[torch.device], Server]] = {}
    """Makers of servers for backends that are read at use."""
    device_bytes: int = 0
    """Bytes that ``allocate`` takes on the device."""
    settling_steps: int = 0
    """Steps that decide what it does in those behind them."""
    prompt_layers: Collection[int] = ()
    """Indices of the layers that ``run_layer`` takes prompts through."""

    @classmethod
    def find(cls, prepared: "Prepared") -> Self | None:
        """Make the executor of a model that lies on the meta device; None if the plan needs none.

        Raises PlanError and CheckpointError for a plan that the capability cannot execute.
        """
        raise NotImplementedError

    def prepare(self, device: torch.device, host_threads: int | None) -> None:
        """Ask the machine for what the capability needs, before anything is allocated.

        ``host_threads`` are what the host computes with; None leaves that open. Raises OffplanError
        for what is missing, MemoryLimitError for lack of memory.
        """

    def allocate(self, device: torch.device) -> None:
        """Allocate memory on the device; raises MemoryLimitError."""

    def attach(self, store: WeightStore) -> None:
        """Have the model's modules be executed so; all weights are loaded."""

    def begin_batch(self, batch: int) -> None:
        """Leave the next pass alone: it allocates caches of so many sequences; a prompt follows.

        Raises PlanError if steps cannot take so many.
        """

    def enter(self, phase: Phase) -> None:
        """Set modules up for passes of a phase, whose parameters are in place."""

    def begin(self, num_rows: int, chunks_as_one: int) -> None:
        """Begin a prompt of so many sequences, before anything of it is captured.

        ``chunks_as_one`` of its chunks have the tokens of one of all rows of the cache.
        """

    def run_layer(self, executor: Any, index: int, steps: Steps) -> list[torch.Tensor]:
        """Take a prompt's chunks through a layer; ``executor`` runs the schedule of the pass."""
        raise NotImplementedError

    def settle(self, index: int) -> None:
        """Take what a prompt that has just passed a layer leaves, before its slot is filled."""

    def begin_step(self) -> None:
        """Be ready for a step, captured or not, that is about to run."""

    def count(self) -> Any:
        """Sum up what steps did since ``forget``, as a record of numbers; waits for the device.

        Returns None if nothing is counted.
        """

    def describe(self) -> Iterator[str]:
        """Yield what was settled when the session opened, a sentence each, for whoever runs it."""
        yield from ()

    def forget(self) -> None:
        """Forget passes that only warmed up, and what they counted."""

    def invalidate(self) -> None:
        """Rely on nothing that passes left; one may have been aborted."""

    def close(self) -> None:
        """Let go of memory; the device is idle, and the model runs no more."""


class PassesExecutor(CapabilityExecutor):
    """Runs a model by other passes than offplan's own; nothing of them is captured.

    Its name in the table of executors is that of their ``Way``.
    """

    way: Way
    build: Callable[[Model], PreTrainedModel]
    """Builds the model's class, every tensor on the meta device; raises CheckpointError."""
    make_runner: Callable[..., Any]
    """Makes what runs the passes, as ``ModelRunner`` is made."""
    begin_texts: Callable[[PreTrainedModel, torch.Tensor, int], Any]
    """Begins texts of a prompt, up to so many tokens, by a built model with all its weights at
    hand: its ``prefill`` reads some of the prompt, its ``decode`` extends them by a token."""
    count_model: Counter
    """Counts what the passes of a model take, by running them without weights."""

    @classmethod
    def find(cls, prepared: "Prepared") -> Self | None:
        """Make an executor if the passes run the model."""
        return cls() if prepared.stage.way == cls.way else None


def find_passes(
    executors: Mapping[str, type[CapabilityExecutor]], way: Way
) -> type[PassesExecutor] | None:
    """Find the executor of a way of running a model; None for offplan's own passes."""
    if way.is_own:
        return None
    found = executors[way.name]
    assert issubclass(found, PassesExecutor), f"{way.name} runs no passes"
    return found


@dataclass(frozen=True)
class Prepared:
    """All that is settled before any weight is there."""

    stage: Stage
    """What the GPU holds of the model, packed as the plan says."""
    offload: Offload
    placement: Placement
    module: PreTrainedModel
    """The model's class, every tensor on the meta device."""
    targets: dict[str, Target]
    wanted: dict[str, torch.Tensor]
    """What is loaded, by parameter name, on the meta device."""
    offloaded: Offloaded
    device: torch.device
    """The device that is to run the model, if only by its type."""
    executors: Mapping[str, CapabilityExecutor] = field(default_factory=dict)
    """Executors of the capabilities that the plan uses, by their name."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Whose weight a parameter that is not loaded reads, by name."""
    host_bytes: int = 0
    """Bytes of host memory that it takes as planned."""
    stand_in_bytes: int = 0
    """Bytes that the CPU takes for a GPU for which it stands in."""

    @property
    def passes(self) -> PassesExecutor | None:
        """Executor of the model's passes; None for offplan's own."""
        found = (each for each in self.executors.values() if isinstance(each, PassesExecutor))
        return next(found, None)

    @property
    def slab_device(self) -> torch.device | None:
        """The device that slabs lie on in place of the host; None for the host."""
        found = (each.slab_device for each in self.executors.values())
        return next((device for device in found if device is not None), None)

    def find_experts(
        self, key: str, is_taken: Callable[[SlabEntry], bool]
    ) -> dict[int, tuple[Any, list[str]]]:
        """Find the routed experts of which a capability reads some at a time, by layer index.

        With the names of their parameters, in the slab's order. ``is_taken`` says which entries
        these are, and ``key`` is the rule's. Raises PlanError for experts that are not one group of
        a layer, and for parameters that are not divided into experts once loaded.
        """
        taken = {(e.unit.layer, e.offset) for e in self.placement.entries if is_taken(e)}
        found: dict[int, tuple[Any, list[str]]] = {}
        for name, place in sorted(self.offloaded.items(), key=itemgetter(1)):
            if place not in taken:
                continue
            layer, value = place[0], self.module.get_parameter(name)
            groups = list_experts(decoder_layers(self.module)[layer])
            if len(groups) != 1:
                raise PlanError(
                    f"layer {layer} has {len(groups)} groups of routed experts that transformers "
                    f"lets be chosen, expected 1: leave {key} out"
                )
            (experts,) = groups
            is_own = any(value is each for each in experts.parameters(recurse=False))
            if not is_own or len(value) != experts.num_experts:
                raise PlanError(
                    f"{name} of layer {layer} is not divided into {experts.num_experts} experts "
                    f"once loaded (found {list(value.shape)}): leave {key} out of its rule"
                )
            found.setdefault(layer, (experts, []))[1].append(name)
        return found
