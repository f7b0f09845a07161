"""A model whose weights lie where a plan puts them."""

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.checkpoint.model import Model
from offplan.hostmem.limits import check_host_room
from offplan.placement import Phase, Placement, place
from offplan.plan import Offload
from offplan.progress import Progress
from offplan.runtime.loading.loader import fill_random, load_weights
from offplan.runtime.loading.mapping import Target, map_tensors
from offplan.runtime.loading.places import Places, materialise_buffers
from offplan.runtime.loading.precheck import verify_headers
from offplan.runtime.loading.skeleton import build_skeleton
from offplan.runtime.loading.verify import verify_places, verify_totals
from offplan.runtime.memory.peer import find_peer
from offplan.runtime.memory.store import TensorSpec, WeightStore


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
        self.model = model
        self.placement: Placement = place(model, offload)
        self.module: PreTrainedModel = build_skeleton(model)
        targets = map_tensors(self.module, model)
        state = self.module.state_dict()
        verify_headers(targets, state)
        peer = _find_store(self.placement, offload, device)
        check_host_room(_host_bytes(self.placement, device, peer))
        tensors = {name: _describe(target, state[name]) for name, target in targets.items()}
        self._places = Places(self.module)
        self._by_phase: dict[Phase, dict[str, nn.Parameter]] = {}
        self._phase: Phase | None = None
        """The phase whose parameters are in place; None where they may be mixed."""
        materialise_buffers(self.module, device)
        self.store = WeightStore(self.placement, tensors, device, peer)
        try:
            with self.store.page_locking() as check:
                self._load(folder, targets, check, on_progress)
            self._assign(_parameters(self.store.resident))
            self._by_phase = {phase: _parameters(self.store.by_phase[phase]) for phase in Phase}
            self._check(targets)
        except BaseException:
            self.close()
            raise

    def _load(
        self,
        folder: Path | None,
        targets: Mapping[str, Target],
        check: Callable[[], object],
        on_progress: Progress | None,
    ) -> None:
        """Fill the store; ``check`` is called now and then, to raise what ends that early."""

        def tell(done: int, total: int) -> None:
            check()
            if on_progress is not None:
                on_progress(done, total)

        destinations = self.store.resident | self.store.offloaded
        if folder is None:
            fill_random(destinations, tell)
        else:
            load_weights(folder, targets, destinations, tell)

    def enter_phase(self, phase: Phase) -> None:
        """Point the offloaded parameters at what this phase reads, unless they already are."""
        if self._phase is phase:
            return
        self._phase = None  # until all of them are
        self._assign(self._by_phase[phase])
        self._phase = phase

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens that the model knows."""
        return int(self.module.config.get_text_config().vocab_size)

    def close(self) -> None:
        """Give the weights' memory back; the device must be idle, and the module runs no more."""
        self.module.to_empty(device="meta")
        self._by_phase.clear()
        self.store.close()

    def _assign(self, parameters: Mapping[str, nn.Parameter]) -> None:
        for name, parameter in parameters.items():
            self._places.assign(name, parameter)

    def _check(self, targets: Mapping[str, Target]) -> None:
        """Compare what was loaded with the plan; a plan that did not take effect is an error."""
        verify_totals(self.placement, targets, self.store)
        for phase in Phase:
            self.enter_phase(phase)
            verify_places(self.module, phase, self.placement, targets, self.store)


def _describe(target: Target, wanted: torch.Tensor) -> TensorSpec:
    stored = tuple(piece.tensor.name for piece in target.pieces)
    return TensorSpec(tuple(wanted.shape), wanted.dtype, stored)


def _parameters(views: Mapping[str, torch.Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(view, requires_grad=False) for name, view in views.items()}


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
