"""A model whose weights lie where a plan puts them."""

from pathlib import Path

import torch
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.hostmem.limits import check_host_room
from offplan.packing import pack_model
from offplan.placement import Phase, Placement, place
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.runtime.forms.experts import mark_in_place
from offplan.runtime.forms.stored import drop_scratch, share_scratch
from offplan.runtime.loading.contents import heed_contents
from offplan.runtime.loading.loader import load_weights
from offplan.runtime.loading.mapping import Target, hold_codes, map_tensors
from offplan.runtime.loading.places import assign, find_places, materialise_buffers
from offplan.runtime.loading.skeleton import build_skeleton, decoder_layers
from offplan.runtime.loading.verify import verify_places
from offplan.runtime.memory.peer import find_peer
from offplan.runtime.memory.store import WeightStore
from offplan.runtime.refusal import refuse


class LoadedModel:
    """Module and memory together: which bytes each parameter reads depends on the phase."""

    def __init__(
        self,
        model: Model,
        offload: Offload,
        device: torch.device,
        folder: Path | None,
        on_progress: Progress | None = None,
    ) -> None:
        """Load ``model`` as ``offload`` says; ``folder`` holds its files, None for random weights.

        Raises PlanError for rules that do not fit the model, CheckpointError for files that
        cannot be read, have changed or do not fit the model, MemoryLimitError when memory runs
        out.
        """
        self.model = model = pack_model(model, offload.packing)
        self.placement: Placement = place(model, offload)
        self.module: PreTrainedModel = build_skeleton(model)
        targets = map_tensors(self.module, model)
        hold_codes(self.module, targets)
        _check_types(model, device)
        peer = _find_store(self.placement, offload, device)
        check_host_room(_host_bytes(self.placement, device, peer))
        state = self.module.state_dict()
        stored = {n: [piece.tensor.name for piece in t.pieces] for n, t in targets.items()}
        self._places = find_places(self.module)
        self._phase: Phase | None = None
        """The phase whose parameters are in place; None where they may be mixed."""
        materialise_buffers(self.module, device)
        wanted = {name: state[name] for name in targets}
        self.store = WeightStore(self.placement, wanted, stored, device, peer)
        try:
            with self.store.page_locking() as check:

                def tell(done: int, total: int) -> None:
                    check()  # raises what ends loading early
                    if on_progress is not None:
                        on_progress(done, total)

                loaded = self.store.resident | self.store.offloaded
                load_weights(folder, targets, loaded, tell)
            dtype = model.dtype
            share_scratch(decoder_layers(self.module), getattr(torch, dtype), device)
            heed_contents(self.module, targets, loaded, device, dtype, is_random=folder is None)
            assign(self._places, self.store.resident)
            self._check(targets)
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
        self._phase = phase

    def close(self) -> None:
        """Give the weights' memory back; the device must be idle, and the module runs no more."""
        drop_scratch(self.module)
        self.module.to_empty(device="meta")
        self.store.close()

    def _check(self, targets: dict[str, Target]) -> None:
        """Compare what was loaded with the plan; a plan that did not take effect is an error."""
        for phase in Phase:
            self.enter_phase(phase)
            verify_places(self.module, phase, targets, self.store)


def _check_types(model: Model, device: torch.device) -> None:
    """Raise CheckpointError for experts that a GPU would have to expand, all of a layer at once."""
    coded = (p for p in model.loaded_parameters if p.is_expert and not p.form.is_raw)
    if device.type == "cuda" and model.dtype == "float32" and any(coded):
        raise refuse(f"{model.source} has experts stored as codes and is computed in float32")


def _find_store(
    placement: Placement, offload: Offload, device: torch.device
) -> torch.device | None:
    """Find the GPU that holds the slabs; None for host memory, which stands in on the CPU."""
    if offload.store == "host" or not placement.slabs or device.type == "cpu":
        return None
    return find_peer(device, placement.slab_bytes)


def _host_bytes(placement: Placement, device: torch.device, peer: torch.device | None) -> int:
    """Count the bytes that the weights will take on the host."""
    if peer is not None:
        return placement.offloaded_bytes - placement.slab_bytes
    on_device = placement.resident_bytes + placement.ring_bytes
    return placement.offloaded_bytes + (on_device if device.type == "cpu" else 0)
