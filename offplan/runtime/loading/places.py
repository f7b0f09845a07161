"""The places in a model that hold its tensors, and what is put there."""

import math
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.runtime.loading.skeleton import has_named_layers
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
