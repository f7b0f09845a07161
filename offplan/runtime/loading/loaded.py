"""A model whose weights lie where a plan puts them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from offplan.placement import Phase
from offplan.progress import Progress
from offplan.runtime.forms.experts import mark_in_place
from offplan.runtime.forms.stored import SharedScratch
from offplan.runtime.loading.capability import Prepared
from offplan.runtime.loading.checks import verify_places
from offplan.runtime.loading.contents import apply_contents
from offplan.runtime.loading.fill import Target
from offplan.runtime.loading.loader import load_weights
from offplan.runtime.loading.packed import OverfullError
from offplan.runtime.loading.places import assign, find_places, keep_computed, materialise_buffers
from offplan.runtime.loading.skeleton import decoder_layers
from offplan.runtime.memory.store import WeightStore


class LoadedModel:
    """Module and memory together: which bytes each parameter reads depends on the phase."""

    def __init__(
        self, prepared: Prepared, folder: Path | None, on_progress: Progress | None = None
    ) -> None:
        """Load what was prepared; ``folder`` holds the model's files, None for random weights.

        Raises CheckpointError for files that cannot be read or have changed. Raises UnpackableError
        for weights that the plan packs and that have more patches than room. Raises
        MemoryLimitError when memory runs out.
        """
        self.stage, self.placement, device = prepared.stage, prepared.placement, prepared.device
        self.model = self.stage.model
        self.module: PreTrainedModel = prepared.module
        self.executors = prepared.executors
        """Executors of the plan's capabilities, by their name."""
        targets = prepared.targets
        self._places = find_places(self.module)
        self._phase: Phase | None = None
        """The phase whose parameters are in place; None if they may be mixed."""
        self._scratch: SharedScratch | None = None
        materialise_buffers(self.module, device, targets)
        self.store = WeightStore(
            self.placement,
            prepared.wanted,
            prepared.offloaded,
            device,
            prepared.slab_device,
            {of: make for each in self.executors.values() for of, make in each.servers.items()},
        )
        try:
            for each in self.executors.values():
                each.allocate(device)
            loaded = self.store.resident | self.store.offloaded
            try:
                own = {name: each for name, each in targets.items() if name in loaded}
                load_weights(folder, own, loaded, on_progress)
                if folder is None:
                    keep_computed(self.module, loaded)
            except OverfullError as error:
                raise error.named(self.model) from None
            shared = {name: loaded[owner] for name, owner in prepared.owners.items()}
            loaded |= shared
            self.store.page_lock()
            dtype = self.model.dtype
            layers = decoder_layers(self.module)
            self._scratch = SharedScratch(layers, getattr(torch, dtype), device)
            apply_contents(self.module, targets, loaded, device, dtype, is_random=folder is None)
            assign(self._places, self.store.resident | shared)
            for each in self.executors.values():
                each.attach(self.store)
            self._check(targets)
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
        for each in self.executors.values():
            each.enter(phase)
        self._phase = phase

    def make_room(self, num_tokens: int) -> None:
        """Have memory for what passes of so many tokens, over all sequences, make of codes."""
        experts = self.model.experts
        if self._scratch is not None and experts is not None:
            self._scratch.make_room(num_tokens * experts.num_experts_per_token)

    def invalidate(self) -> None:
        """Rely on nothing that passes left: phase, what executors keep, what servers have begun."""
        self._phase = None
        self.store.invalidate()
        for each in self.executors.values():
            each.invalidate()

    def enter_stored(self) -> None:
        """Point the offloaded parameters at where they are stored, until a phase is entered."""
        self._phase = None
        assign(self._places, self.store.offloaded)

    def close(self) -> None:
        """Give the weights' memory back; the device must be idle, and the module runs no more."""
        if self._scratch is not None:
            self._scratch.close()
        for each in self.executors.values():
            each.close()
        self.module.to_empty(device="meta")
        self.store.close()

    def _check(self, targets: dict[str, Target]) -> None:
        """Compare what was loaded with the plan; a plan that did not take effect is an error."""
        for phase in Phase:
            self.enter_phase(phase)
            verify_places(self.module, phase, targets, self.store)
