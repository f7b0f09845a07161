"""A model's calls of its layers, as they happen: who is called when, and what reads weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from offplan.runtime.refusal import refuse

See = Callable[[int, torch.Tensor, torch.Tensor], None]
"""A call is told a layer's index and its hidden states, before and after."""


class LayerCalls:
    """Tells of each call that a model makes of its layers, by hooks, until it is closed."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        self.enter: Callable[[int], None] = lambda index: None
        """Told the index of a layer that is about to run."""
        self.leave: Callable[[int], None] = lambda index: None
        """Told the index of a layer that has run."""
        self.see: See | None = None
        """Told of the hidden states of each layer that has run."""
        self.current: int | None = None
        """The layer that runs; None between layers."""
        self._handles = []
        for index, layer in enumerate(layers):
            begin, end = partial(self._begin, index), partial(self._end, index)
            self._handles += [
                layer.register_forward_pre_hook(begin, with_kwargs=True),
                layer.register_forward_hook(end, with_kwargs=True),
            ]

    def invalidate(self) -> None:
        """Take it that no layer runs."""
        self.current = None

    def close(self) -> None:
        """Take the hooks back."""
        for handle in self._handles:
            handle.remove()

    def _begin(self, index: int, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.current is not None:
            raise refuse(f"layer {self.current} calls layer {index}: its weights cannot be moved")
        self.enter(index)
        self.current = index

    def _end(self, index: int, module: nn.Module, args: Any, kwargs: Any, made: Any) -> None:
        self.current = None
        if self.see is not None:
            before, after = (
                next((each for each in tree_leaves(part) if _is_states(each)), None)
                for part in ((args, kwargs), made)
            )
            if before is not None and after is not None:
                self.see(index, before, after)
        self.leave(index)


def _is_states(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.ndim > 1


class WeightWatch(TorchDispatchMode):
    """Refuses a model that reads a layer's offloaded weights while that layer does not run."""

    def __init__(
        self,
        calls: LayerCalls,
        owners: Mapping[int, tuple[int, str]],
        slots: Sequence[torch.Tensor],
        slot_of: Mapping[int, int],
    ) -> None:
        """Watch the calls of layers.

        ``owners`` has the layer and the name of each offloaded weight by its ``id``, ``slot_of``
        the slot that each layer reads in the ring.
        """
        super().__init__()
        self._calls, self._owners, self._slot_of = calls, owners, slot_of
        self.is_watching = True
        """True if reads are checked: not while weights are moved."""
        self._slots = {slot.data_ptr(): number for number, slot in enumerate(slots)}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Check each weight, and each view of the ring, that an operator is given."""
        current = self._calls.current
        for value in tree_leaves((args, kwargs)) if self.is_watching else ():
            if not isinstance(value, torch.Tensor):
                continue
            layer, name = self._owners.get(id(value), (current, ""))
            if layer != current:
                raise refuse(f"{name} is read outside layer {layer}, which its pass does not call")
            slot = self._slots.get(value.untyped_storage().data_ptr())
            if slot is not None and (current is None or self._slot_of.get(current) != slot):
                where = "outside the layers" if current is None else f"in layer {current}"
                raise refuse(f"a part of another layer's weights is read {where} ({func})")
        return func(*args, **(kwargs or {}))
