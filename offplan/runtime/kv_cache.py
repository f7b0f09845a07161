"""The KV cache: fixed addresses for captured graphs, no mask and no position kept on the host."""

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin


class Position:
    """Where the sequences stand; all have the same length."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64, device=device)
        """Tokens kept so far, shape [1], on the device, for captured graphs to read."""
        self.rows = self.tensor
        """Where layers write the pass's new tokens, int64 of shape [new], on the device."""


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, or MLA's latent and its rotary part."""

    is_compileable = False
    is_sliding = False

    def __init__(self, position: Position, context: int) -> None:
        super().__init__()
        self._position = position
        self._context = context

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Allocate [batch, heads, context, dim] like the first states seen."""

        def allocate(states: torch.Tensor) -> torch.Tensor:
            batch, heads, _, dim = states.shape
            return states.new_zeros(batch, heads, self._context, dim)

        self.keys = allocate(key_states)
        self.values = allocate(value_states)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [batch, heads, new, dim]; return the whole cache, [batch, heads, context, dim].

        Where the filled part ends is for attention to know: one compilation serves every position.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys.index_copy_(2, self._position.rows, key_states)
        self.values.index_copy_(2, self._position.rows, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and offset of the cache, for transformers' interface."""
        return self._context, 0

    def get_seq_length(self) -> int:
        """Nothing that a model may rely on: positions are passed explicitly."""
        return 0

    def get_max_length(self) -> int:
        """Tokens it can keep."""
        return self._context


class KVCache(Cache):
    """One layer of cache for each decoder layer, all at the same position."""

    def __init__(self, num_layers: int, context: int, position: Position) -> None:
        super().__init__(layers=[_Layer(position, context) for _ in range(num_layers)])

    def clear_from(self, position: int) -> None:
        """Write zeros over every layer's rows from ``position`` on."""
        for layer in self.layers:
            if layer.is_initialized:
                layer.keys[:, :, position:].zero_()
                layer.values[:, :, position:].zero_()

    def of_layer(self, index: int) -> "LayerCache":
        """What the layer ``index`` is given as its cache."""
        return LayerCache(self.layers[index])


class LayerCache:
    """The cache as one layer sees it; the layer's own index is not asked for.

    A compiled layer is compiled again for every index that it reads.
    """

    def __init__(self, layer: CacheLayerMixin) -> None:
        self._layer = layer

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [batch, heads, new, dim]; return the whole cache."""
        return self._layer.update(key_states, value_states)
