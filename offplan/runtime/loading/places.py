"""The places in a model that hold its tensors, and what is put there."""

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from offplan.runtime.transformers_private import compute_buffers


class Places:
    """Every place in a model that holds one stored tensor, so that it can be exchanged."""

    def __init__(self, skeleton: PreTrainedModel) -> None:
        places: dict[int, list[tuple[dict[str, Any], str]]] = {}
        owners: dict[str, int] = {}
        for path, module in skeleton.named_modules():
            # router biases of DeepSeek-V3 and its like are stored buffers
            for holder in (module._parameters, module._buffers):
                for attribute, value in holder.items():
                    if value is not None:
                        places.setdefault(id(value), []).append((holder, attribute))
                        owners[f"{path}.{attribute}".lstrip(".")] = id(value)
        self._places = {name: places[owner] for name, owner in owners.items()}

    def assign(self, name: str, parameter: nn.Parameter) -> None:
        """Put ``parameter`` where ``name`` is used, ties included."""
        for holder, attribute in self._places[name]:
            is_parameter = isinstance(holder[attribute], nn.Parameter)
            holder[attribute] = parameter if is_parameter else parameter.data


def materialise_buffers(skeleton: PreTrainedModel, device: torch.device) -> None:
    """Give buffers their values on the device; those that are stored are loaded over them later."""
    for module in skeleton.modules():
        own: dict[str, Any] = {
            name: buffer for name, buffer in module._buffers.items() if buffer is not None
        }
        if not any(buffer.is_meta for buffer in own.values()):
            continue
        for name, buffer in own.items():
            module._buffers[name] = torch.empty_like(buffer, device="cpu")
        compute_buffers(skeleton, module)
        for name in own:
            value = module._buffers[name]
            assert value is not None
            module._buffers[name] = value.to(device)
