"""A model whose weights lie where a plan puts them."""

from contextlib import nullcontext
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.errors import UnpackableError
from offplan.held.packing import name_weights
from offplan.placement import Phase
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.runtime.forms.experts import mark_in_place
from offplan.runtime.forms.stored import drop_scratch, share_scratch
from offplan.runtime.loading.by_cores import (
    give_to_cores,
    let_compute,
    take_from_cores,
)
from offplan.runtime.loading.cached import CachedExperts
from offplan.runtime.loading.contents import apply_contents
from offplan.runtime.loading.loader import load_weights
from offplan.runtime.loading.packed import OverfullError, bringing_kernels
from offplan.runtime.loading.parted import divide_experts
from offplan.runtime.loading.places import assign, find_places, keep_computed, materialise_buffers
from offplan.runtime.loading.prepared import prepare
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.loading.target import Target
from offplan.runtime.loading.verify import verify_places
from offplan.runtime.memory.store import WeightStore
from offplan.runtime.model.parts import ExpertsInParts


class LoadedModel:
    """Module and memory together: which bytes each parameter reads depends on the phase."""

    def __init__(
        self,
        model: Model,
        offload: Offload,
        device: torch.device,
        folder: Path | None,
        on_progress: Progress | None = None,
        *,
        stock: bool = False,
        share_layers: bool = False,
        host_threads: int | None = None,
    ) -> None:
        """Load ``model`` as ``offload`` says; ``folder`` holds its files, None for random weights.

        ``stock`` loads it for transformers' own passes, and ``share_layers`` one layer's random
        weights for all that are alike. ``host_threads`` are what the host's cores compute with.

        Raises what ``prepare`` raises, and CheckpointError for files that cannot be read or have
        changed. Raises UnpackableError for weights that the plan packs and that have more patches
        than room. Raises MemoryLimitError when memory runs out.
        """
        with bringing_kernels(device) if offload.packing else nullcontext():
            prepared = prepare(model, offload, device, stock=stock, share_layers=share_layers)
        self.model, self.stage, self.placement = model, prepared.stage, prepared.placement
        self.module: PreTrainedModel = prepared.module
        targets = prepared.targets
        self._places = find_places(self.module)
        self._by_cores: list[nn.Module] = []
        """Modules that the host's cores compute in decode."""
        self._phase: Phase | None = None
        """The phase whose parameters are in place; None if they may be mixed."""
        materialise_buffers(self.module, device, targets)
        self.store = WeightStore(
            self.placement, prepared.wanted, prepared.offloaded, device, prepared.peer, host_threads
        )
        self.cached = CachedExperts(self.model, self.module, self.placement, {}, self.store)
        """The experts that lie in GPU memory one by one."""
        self.parts: dict[int, ExpertsInParts] = {}
        """The experts that prompts stream in parts, by layer index."""
        try:
            loaded = self.store.resident | self.store.offloaded
            try:
                own = {name: each for name, each in targets.items() if name in loaded}
                load_weights(folder, own, loaded, on_progress)
                if folder is None:
                    keep_computed(self.module, loaded)
            except OverfullError as error:
                names = name_weights(self.model, error.tensors)
                raise UnpackableError(
                    f"{error}; plan it again with `leave_unpacked={','.join(names)}`", names
                ) from None
            shared = {name: loaded[owner] for name, owner in prepared.owners.items()}
            loaded |= shared
            self.store.page_lock()
            dtype = self.model.dtype
            share_scratch(decoder_layers(self.module), getattr(torch, dtype), device)
            apply_contents(self.module, targets, loaded, device, dtype, is_random=folder is None)
            assign(self._places, self.store.resident | shared)
            self.cached = CachedExperts(
                self.model, self.module, self.placement, prepared.cached, self.store
            )
            self._check(targets)
            self.parts = divide_experts(self.module, self.store, prepared.offloaded)
            self._by_cores = give_to_cores(self.module, self.store, loaded)
            self._phase = None
        except BaseException:
            self.close()
            raise

    def enter_phase(self, phase: Phase) -> None:
        """Point the offloaded parameters at what this phase reads, unless they already are."""
        if self._phase is phase:
            return
        self._phase = None  # until all of them are
        assign(self._places, self.store.by_phase[phase])
        mark_in_place(self.module, self.store.in_place[phase])
        let_compute(self._by_cores, phase)
        self.cached.enter(phase)
        self._phase = phase

    def invalidate(self) -> None:
        """Rely on nothing that passes left: phase, kept experts, what the cores have begun."""
        self._phase = None
        self.cached.empty()
        self.store.invalidate()
        for each in self.parts.values():
            each.take(None)

    def enter_stored(self) -> None:
        """Point the offloaded parameters at where they are stored, until a phase is entered."""
        self._phase = None
        assign(self._places, self.store.offloaded)

    def close(self) -> None:
        """Give the weights' memory back; the device must be idle, and the module runs no more."""
        drop_scratch(self.module)
        for each in self.parts.values():
            each.close()
        self.cached.close()
        take_from_cores(self._by_cores)
        self.module.to_empty(device="meta")
        self.store.close()

    def _check(self, targets: dict[str, Target]) -> None:
        """Compare what was loaded with the plan; a plan that did not take effect is an error."""
        for phase in Phase:
            self.enter_phase(phase)
            verify_places(self.module, phase, targets, self.store)
