"""The layers' caches: addresses are fixed for captured graphs, and no position is on the host."""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from functools import partial
from math import prod
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from offplan.placement import align

BLOCK_BYTES = 64 * 2**20
"""Bytes of one allocation, unless one tensor is larger. torch gives allocations of 1 to 10 MiB a
part of 20 MiB and rounds larger ones up to 2 MiB, little beside this."""


ALL = slice(None)
"""All rows of the cache."""


class Position:
    """The position of each sequence, and those of the tokens of a pass."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64, device=device)
        """Tokens kept so far of each row, shape [rows], on the device, for captured graphs to read.
        """
        self.new = self.tensor
        """Positions at which layers write the pass's new tokens, int64 on the device. They are
        [new], the same for every sequence, or [sequences, 1], one of its own for each."""
        self.shared = self.tensor.new_zeros(())
        """The position of a step's sequences, for layers that know but one (Llama 4)."""
        self.is_shared = False
        """True if there are such layers: they have asked for it."""

    def invalidate(self) -> None:
        """Let go of where the last pass wrote its tokens; each pass says it anew."""
        self.new = self.tensor

    def allocate(self, num_rows: int) -> None:
        """Be at the start of so many rows, at another address."""
        self.new = self.tensor = self.tensor.new_zeros(num_rows)


class _Blocks:
    """The keys of all layers, or the values, cut from few allocations."""

    def __init__(self, context: int) -> None:
        self._context = context
        self._spare: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._taken = Counter[tuple[object, ...]]()
        self.whole: list[torch.Tensor] = []
        """Allocations, each [layers, batch, heads, context, dim]."""

    def take(self, states: torch.Tensor, num_alike: int) -> torch.Tensor:
        """Return zeros, [batch, heads, context, dim], for ``states``, [batch, heads, new, dim].

        ``num_alike`` is the number of layers that take as much, this one included.
        """
        batch, heads, _, dim = states.shape
        shape = (batch, heads, self._context, dim)
        key = shape, states.dtype, states.device
        spare = self._spare.setdefault(key, [])
        if not spare:
            num_elements = prod(shape)
            # kernels are compiled for aligned addresses
            stride = align(num_elements * states.itemsize) // states.itemsize
            left = num_alike - self._taken[key]
            count = max(1, min(left, BLOCK_BYTES // (stride * states.itemsize)))
            block = states.new_zeros(count, stride)[:, :num_elements].unflatten(1, shape)
            self.whole.append(block)
            spare += block
        self._taken[key] += 1
        return spare.pop()


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, or MLA's latent and its rotary part.

    A layer is given its own, not all of them: it would be compiled again for every index it reads.
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self, position: Position, context: int, keys: _Blocks, values: _Blocks, num_alike: int
    ) -> None:
        super().__init__()
        self._num_alike = num_alike
        self._position = position
        self._context = context
        self._blocks = keys, values
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: slice | None = ALL
        """The rows that a pass writes to; None where that is not known."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take [batch, heads, context, dim] like the first states seen."""
        keys, values = self._blocks
        self.keys = keys.take(key_states, self._num_alike)
        self.values = values.take(value_states, self._num_alike)
        self._whole = self.keys, self.values
        self.is_initialized = True

    def select(self, rows: slice) -> None:
        """Keep what passes bring in these rows; views of one shape serve the same compilation."""
        if self._whole is not None and rows != self._rows:
            self.keys, self.values = (whole[rows] for whole in self._whole)
            self._rows = rows

    def invalidate(self) -> None:
        """Know of no rows: the next pass selects its own."""
        self._rows = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [batch, heads, new, dim]; return the batch's cache, [batch, heads, context, dim].

        Attention is to know where the filled part ends: one compilation serves every position.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _write(self.keys, self._position.new, key_states)
        _write(self.values, self._position.new, value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the cache, for transformers' interface."""
        return self._context, 0

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """Return the position of the pass's first token, int64 of shape [], on the device."""
        position = self._position
        if not position.is_shared:  # in the pass that allocates, which is not compiled
            position.is_shared = True
        return position.new[0] if position.new.dim() == 1 else position.shared

    def get_max_length(self) -> int:
        """Return the number of tokens that it can keep."""
        return self._context


def _write(kept: torch.Tensor, new: torch.Tensor, states: torch.Tensor) -> None:
    """Write ``states``, [batch, heads, new, dim], to ``kept``, [batch, heads, context, dim]."""
    if new.dim() == 1:
        kept.index_copy_(2, new, states)
        return
    # by every dimension and not of a view: compiled, that would copy the cache
    batch, heads = (
        torch.arange(size, device=kept.device).view(shape)
        for size, shape in zip(kept.shape, ((-1, 1, 1), (1, -1, 1)), strict=False)
    )
    kept.index_put_((batch, heads, new[:, None]), states)


class _State(LinearAttentionLayer):
    """The state of a linear attention: its convolution's last inputs, and one matrix a head.

    transformers writes both in place. Zeros are where a text begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self._whole: list[torch.Tensor] = []
        self._rows: slice | None = ALL

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        """Take zeros like the first states seen, the former [batch, channels, kernel size].

        transformers' own are marked as static, and layers compiled again for each of them.
        """
        if conv_states is not None:
            assert conv_kernel_size is not None
            self.conv_kernel_size[state_idx] = conv_kernel_size
            shape = *conv_states.shape[:-1], conv_kernel_size
            self.conv_states[state_idx] = conv_states.new_zeros(shape)
            self._whole.append(self.conv_states[state_idx])
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self._whole.append(self.recurrent_states[state_idx])
            self.is_recurrent_states_initialized[state_idx] = True

    def select(self, rows: slice) -> None:
        """Go on from the states of these rows."""
        if self._whole and rows != self._rows:
            self.conv_states[0], self.recurrent_states[0] = (whole[rows] for whole in self._whole)
            self._rows = rows

    def invalidate(self) -> None:
        """Know of no rows: the next pass selects its own."""
        self._rows = None

    def tensors(self) -> list[torch.Tensor]:
        """Return what is allocated of it, for all rows."""
        return self._whole


class Swap:
    """An exchange of what two rows of a cache hold, which can be undone however far it has come."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        row: int,
        other: int,
        clear: Callable[[slice], None],
    ) -> None:
        """Exchange two rows of each part, [rows, ...]; ``clear`` clears what lies behind in one."""
        self._parts, self._row, self._other, self._clear = parts, row, other, clear
        self._moved: list[torch.Tensor] = []
        """Parts whose other row holds what the first one held."""

    def run(self) -> None:
        """Exchange part by part. Takes as much memory as one row of a part has."""
        self._clear(slice(self._other, self._other + 1))
        for part in self._parts:
            kept = part[self._other].clone()
            part[self._other] = part[self._row]
            self._moved.append(part)
            part[self._row] = kept

    def undo(self) -> None:
        """Have the first row hold what it did; the second row then holds nothing to rely on."""
        for part in self._moved:
            part[self._row] = part[self._other]
        self._moved.clear()


class LayerCaches(Cache):
    """The cache of each decoder layer, with a row for each sequence."""

    def __init__(
        self,
        token_bytes: Sequence[int],
        context: int,
        position: Position,
        linear: Collection[int] = (),
    ) -> None:
        """Make room once the layers are first called.

        It is for keys and values of ``context`` tokens, in blocks that layers of as many
        ``token_bytes`` share. Those are the bytes that each layer keeps of a token, 0 if it reads
        an earlier layer's. It is also for states of the layers ``linear``.
        """
        self._states = {index: _State() for index in linear}
        self._blocks = _Blocks(context), _Blocks(context)
        num_alike = Counter(token_bytes)
        self._parts = [
            self._states.get(index) or _Layer(position, context, *self._blocks, num_alike[each])
            for index, each in enumerate(token_bytes)
        ]
        # linear attention asks its cache for a layer of it
        super().__init__(
            layers=[
                Cache(layers=[each]) if isinstance(each, _State) else each for each in self._parts
            ]
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return nothing that a model may rely on: positions are passed explicitly."""
        return 0

    def select(self, rows: slice, index: int | None = None) -> None:
        """Have the next pass write to these rows and read them: in every layer, or in one."""
        for part in self._parts if index is None else [self._parts[index]]:
            part.select(rows)

    def invalidate(self) -> None:
        """Know of no rows that layers write to; what the rows hold stays."""
        for part in self._parts:
            part.invalidate()

    def clear_from(self, position: int, rows: slice = ALL) -> None:
        """Write zeros over ``rows`` of every layer from ``position`` on.

        Many layers at a time: one by one the host would take a millisecond to ask for it.
        """
        for blocks in self._blocks:
            for block in blocks.whole:
                block[:, rows, :, position:].zero_()

    def swap(self, row: int, other: int, num_tokens: int) -> "Swap":
        """Exchange what two rows hold of their first ``num_tokens`` tokens, and their states.

        Nothing is done until the exchange is run. The rest of the other row is cleared, since
        attention weighs it by zero from then on, which does not hide a NaN.
        """
        parts = self._rows_of(num_tokens)
        parts += [part for state in self._states.values() for part in state.tensors()]
        return Swap(parts, row, other, partial(self.clear_from, num_tokens))

    def copy(self, row: int, other: int, num_tokens: int) -> None:
        """Write what a row holds of its first ``num_tokens`` tokens to another; no states."""
        for part in self._rows_of(num_tokens):
            part[other] = part[row]

    def count_numbers(self, row: int, num_tokens: int) -> int:
        """Count the tokens of a row before the first that has a NaN in any layer.

        Of a row's first ``num_tokens``; none where a state of the row has a NaN. Waits for the
        device.
        """
        # the largest is NaN where one is; a comparison would take memory for each element
        is_nan = [part[row].amax((0, 1, 3)).isnan() for part in self._rows_of(num_tokens)]
        states = [part[row] for state in self._states.values() for part in state.tensors()]
        is_nan += [state.amax().isnan().expand(num_tokens) for state in states]
        found = torch.stack(is_nan).any(0).nonzero()
        return int(found[0]) if len(found) else num_tokens

    def _rows_of(self, num_tokens: int) -> list[torch.Tensor]:
        """Return the first tokens of all blocks, each [rows, layers, heads, num_tokens, dim]."""
        blocks = [block for blocks in self._blocks for block in blocks.whole]
        return [block[:, :, :, :num_tokens].transpose(0, 1) for block in blocks]

    def clear_states(self, rows: slice = ALL) -> None:
        """Write zeros over the states of ``rows``, with which a text begins."""
        states = [part[rows] for state in self._states.values() for part in state.tensors()]
        if states:
            torch._foreach_zero_(states)
