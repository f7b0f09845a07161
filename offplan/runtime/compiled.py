"""Compiles the decoder layers: one compilation serves all layers that look alike."""

from typing import Any

import torch
from torch import nn

from offplan.runtime.kv_cache import KVCache

MAX_VARIANTS = 64
"""Compilations kept for one layer class: kinds of layers x phases x where their weights lie."""


def compile_layers(layers: nn.ModuleList) -> None:
    """Compile each layer's forward for the shapes it will meet; hooks stay outside.

    A pass that is not worth a compilation runs in ``torch.compiler.set_stance("force_eager")``.
    """
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, MAX_VARIANTS)
    for layer in layers:
        # torch.compile guards on every integer that it reads from a module
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                vars(module)["layer_idx"] = 0
        layer.forward = torch.compile(layer.forward, dynamic=False)


class CacheHooks:
    """Gives each layer its own part of the KV cache, whatever index it would ask for."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.cache: KVCache | None = None
        self._handles = [
            layer.register_forward_pre_hook(self._make_hook(index), with_kwargs=True)
            for index, layer in enumerate(layers)
        ]

    def _make_hook(self, index: int) -> Any:
        def give(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            assert self.cache is not None
            return args, {**kwargs, "past_key_values": self.cache.of_layer(index)}

        return give

    def close(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
