"""The places in a model that hold its tensors, and what is put there."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.runtime.refusal import refuse_config
from offplan.runtime.transformers_private import compute_buffers

Places = dict[str, list[tuple[dict[str, Any], str]]]
"""Every place in a model that holds one stored tensor, ties included, by each of its names: a
module's parameters or buffers, and the tensor's key there."""


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


def materialise_buffers(skeleton: PreTrainedModel, device: torch.device) -> None:
    """Give buffers their values on the device; those that are stored are loaded over them later.

    Raises CheckpointError where the config does not let transformers compute them.
    """
    models = (part for part in skeleton.modules() if isinstance(part, PreTrainedModel))
    # a model within comes later, and knows its own
    owners = {module: model for model in models for module in model.modules()}
    for module, model in owners.items():
        buffers: dict[str, Any] = module._buffers
        own = {name: buffer for name, buffer in buffers.items() if buffer is not None}
        if any(buffer.is_meta for buffer in own.values()):
            for name, buffer in own.items():
                buffers[name] = torch.empty_like(buffer, device="cpu")
            try:
                compute_buffers(model, module)
            except Exception as error:  # whatever transformers raises
                raise refuse_config(model, error) from error
            for name in own:
                buffers[name] = buffers[name].to(device)
