"""A model whose weights lie where a plan puts them, and the places that its tensors are held in."""

import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
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
from offplan.runtime.loading.skeleton import decoder_layers, has_named_layers
from offplan.runtime.memory.store import WeightStore
from offplan.runtime.refusal import refuse, refuse_config
from offplan.transformers_private import compute_buffers

Places = dict[str, list[tuple[dict[str, Any], str]]]
"""Every place in a model that holds one stored tensor, ties included, by each of its names. A place
is a module's parameters or buffers, and the tensor's key there."""


def find_places(skeleton: PreTrainedModel) -> Places:
    """Find where each tensor of a model is held, so that it can be exchanged."""
    places: dict[int, list[tuple[dict[str, Any], str]]] = {}
    owners: dict[str, int] = {}
    for path, module in skeleton.named_modules():
        # router biases of DeepSeek-V3 and its like are stored buffers
        for holder in (module._parameters, module._buffers):
            for attribute, value in holder.items():
                if value is not None:
                    places.setdefault(id(value), []).append((holder, attribute))
                    owners[f"{path}.{attribute}".lstrip(".")] = id(value)
    return {name: places[owner] for name, owner in owners.items()}


def assign(places: Places, parameters: Mapping[str, nn.Parameter]) -> None:
    """Put each parameter where its name is used, ties included."""
    for name, parameter in parameters.items():
        for holder, attribute in places[name]:
            is_parameter = isinstance(holder[attribute], nn.Parameter)
            holder[attribute] = parameter if is_parameter else parameter.data


def materialise_buffers(
    skeleton: PreTrainedModel, device: torch.device, stored: Container[str]
) -> None:
    """Give buffers their values on the device; ``stored`` ones are loaded over them later.

    Raises CheckpointError if the config does not let transformers compute them, or if
    transformers computes none.
    """
    models = [part for part in skeleton.modules() if isinstance(part, PreTrainedModel)]
    # a model within comes later, and knows its own
    owners = {module: model for model in models for module in model.modules()}
    made: dict[str, tuple[dict[str, Any], str]] = {}
    with_buffers: dict[torch.nn.Module, None] = {}
    for path, module in skeleton.named_modules():
        buffers: dict[str, Any] = module._buffers
        if any(buffer is not None and buffer.is_meta for buffer in buffers.values()):
            with_buffers[module] = None
            for name, buffer in buffers.items():
                if buffer is not None:
                    buffers[name] = torch.full_like(buffer, _unset(buffer.dtype), device="cpu")
                    made[f"{path}.{name}".lstrip(".")] = buffers, name
    # a model may compute those of its layers (Falcon-H1), as the last, as where it is initialised
    if made and has_named_layers(skeleton):  # whole, as transformers builds it
        with_buffers |= dict.fromkeys(reversed(models))
    for module in with_buffers:
        try:
            compute_buffers(owners[module], module)
        except Exception as error:  # whatever transformers raises
            raise refuse_config(owners[module], error) from error
    for path, (buffers, name) in made.items():
        if path not in stored and buffers[name].numel() and _is_unset(buffers[name]):
            raise refuse(f"{path} of {type(skeleton).__name__} is neither stored nor computed")
        buffers[name] = buffers[name].to(device)


def keep_computed(skeleton: nn.Module, random: Mapping[str, torch.Tensor]) -> None:
    """Write whole numbers that transformers computes over ``random`` ones, by their names.

    Qwen3.8's are sizes of tables, by which it divides. Zeros stand for what only files have.
    """
    for name, buffer in skeleton.named_buffers():
        is_whole = name in random and not buffer.is_floating_point()
        if is_whole and buffer.any() and not _is_unset(buffer):
            random[name].copy_(buffer)


def _unset(dtype: torch.dtype) -> float:
    """Return a value that no buffer of numbers has all over."""
    if dtype.is_floating_point:
        return math.nan
    return -(2**7) if dtype.is_signed and not dtype.is_complex else 0


def _is_unset(buffer: torch.Tensor) -> bool:
    if buffer.dtype.is_floating_point:
        return bool(buffer.isnan().all())
    unset = _unset(buffer.dtype)
    return unset != 0 and bool((buffer == unset).all())


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
