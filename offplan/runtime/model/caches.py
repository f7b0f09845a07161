"""The layers' caches: addresses are fixed for captured graphs, and no position is on the host."""

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import fields
from functools import partial
from math import prod
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin, LinearAttentionLayer

from offplan import kernel_sizes
from offplan.placement import align
from offplan.row_cache import RowCache
from offplan.runtime.model.cache_codes import encode, is_coded, scales_of
from offplan.runtime.model.codes_scratch import Scratch
from offplan.runtime.model.delta_rule import Additions, add_taken

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
        self.is_chunk = False
        """True in a pass of a prompt's chunk, of which rings leave the tokens to attention."""
        self.is_shared = False
        """True if there are such layers: they have asked for it."""

    def invalidate(self) -> None:
        """Let go of where the last pass wrote its tokens; each pass says it anew."""
        self.new = self.tensor

    def allocate(self, num_rows: int) -> None:
        """Be at the start of so many rows, at another address."""
        self.new = self.tensor = self.tensor.new_zeros(num_rows)


class _Blocks:
    """The keys of layers, or the values, cut from few allocations."""

    def __init__(self) -> None:
        self._spare: dict[tuple[object, ...], list[torch.Tensor]] = {}
        self._taken = Counter[tuple[object, ...]]()
        self.whole: list[torch.Tensor] = []
        """Allocations, each [layers, batch, heads, tokens, dim]."""

    def take(self, states: torch.Tensor, num_tokens: int, num_alike: int) -> torch.Tensor:
        """Return zeros, [batch, heads, tokens, dim], for ``states``, [batch, heads, new, dim].

        ``num_alike`` is the number of layers that take as much, this one included.
        """
        batch, heads, _, dim = states.shape
        shape = (batch, heads, num_tokens, dim)
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

    def rows(self, num_tokens: int | None = None) -> Iterator[torch.Tensor]:
        """Yield the first tokens of each allocation, [rows, layers, heads, tokens, dim]."""
        for block in self.whole:
            yield block[:, :, :, :num_tokens].transpose(0, 1)


_KeysAndValues = tuple[_Blocks, _Blocks]


class _Layer(CacheLayerMixin):
    """Keys and values of one layer, or MLA's latent and its rotary part.

    A layer is given its own, not all of them: it would be compiled again for every index it reads.
    """

    is_compileable = False
    is_sliding = False

    def __init__(
        self,
        position: Position,
        context: int,
        blocks: _KeysAndValues,
        num_alike: int,
        *,
        codes: bool = False,
    ) -> None:
        """Keep ``context`` tokens of each row; ``codes`` keeps them as ``encode`` makes them."""
        super().__init__()
        self._codes = codes
        self._num_alike = num_alike
        self._position = position
        self._context = self._num_tokens = context
        self._blocks = blocks
        self._whole: tuple[torch.Tensor, torch.Tensor] | None = None
        self._rows: slice | None = ALL
        """The rows that a pass writes to; None where that is not known."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take [batch, heads, context, dim] like the first states seen."""
        self.keys, self.values = self._take(self._blocks, key_states, value_states)
        self._whole = self.keys, self.values
        self.is_initialized = True

    def _take(self, blocks: _KeysAndValues, *states: torch.Tensor) -> Any:
        room = self._num_tokens, self._num_alike
        return tuple(each.take(of, *room) for each, of in zip(blocks, states, strict=True))

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
        if self._store(key_states, value_states):
            return self.keys, self.values
        if self._codes:
            key_states, value_states = encode(key_states), encode(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        _write(self.keys, self._position.new, key_states)
        _write(self.values, self._position.new, value_states)
        return self.keys, self.values

    def _store(self, key_states: torch.Tensor, value_states: torch.Tensor) -> bool:
        """Store codes of [batch, heads, new, dim] by one kernel; return False if none does."""
        if not (self._codes and self.is_initialized and _stores_codes(key_states)):
            return False
        from offplan.runtime.model import codes_kernel  # needs triton, so a GPU

        kept = self.keys, self.values
        codes_kernel.store(key_states, value_states, *kept, self._position.new)
        return True

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


class Ring(_Layer):
    """The last tokens of a layer that sees no further, the one at position p at p mod its places.

    A chunk of a prompt passes ``update`` as it is. Attention, which knows where the chunk begins,
    has it join the tokens before it, and kept.
    """

    def __init__(
        self,
        position: Position,
        context: int,
        num_tokens: int,
        blocks: _KeysAndValues,
        checkpoint: _KeysAndValues,
        num_alike: int,
        *,
        codes: bool = False,
        is_shared: bool = False,
    ) -> None:
        """Keep ``num_tokens`` of each row, of texts of up to ``context``.

        If it ``is_shared``, later layers extend it by the same chunks once more.
        """
        super().__init__(position, context, blocks, num_alike, codes=codes)
        self._num_tokens = num_tokens
        self._checkpoint = checkpoint
        self._is_shared = is_shared
        self._begun: tuple[torch.Tensor, torch.Tensor] | None = None
        """Its checkpoint, of all rows."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take [batch, heads, tokens, dim] like the first states seen, and as much beside it."""
        super().lazy_initialization(key_states, value_states)
        self._begun = self._take(self._checkpoint, key_states, value_states)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a step's tokens and return the ring, or return a chunk's tokens alone."""
        if not self._position.is_chunk and self._store(key_states, value_states):
            return self.keys, self.values
        if self._codes:
            key_states, value_states = encode(key_states), encode(value_states)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self._position.is_chunk:
            return key_states, value_states
        place = self._position.new % self._num_tokens
        _write(self.keys, place, key_states)
        _write(self.values, place, value_states)
        return self.keys, self.values

    def extend(
        self, keys: torch.Tensor, values: torch.Tensor, start: int, behind: int, begun: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a chunk's keys and values after those of ``behind`` tokens before it; keep them.

        All are [batch, heads, tokens, dim]; the chunk begins at ``start``. Copies both where there
        are any before it. The first chunk of its pass begins at ``begun``. There a shared ring goes
        back to its checkpoint, since another layer may have extended it by the same chunks.
        """
        size, stop = self._num_tokens, start + keys.shape[2]
        if self._is_shared and start == begun > 0:
            assert self._begun is not None
            for ring, kept in zip((self.keys, self.values), self._begun, strict=True):
                ring.copy_(kept[self._rows])
        last = torch.arange(max(start, stop - size), stop, device=keys.device)
        made = []
        for ring, new in ((self.keys, keys), (self.values, values)):
            made.append(torch.cat([*_cut(ring, start - behind, behind), new], 2) if behind else new)
            # what lies there is read by now
            ring.index_copy_(2, last % size, new[:, :, -len(last) :])
        return made[0], made[1]


def _cut(ring: torch.Tensor, start: int, num_tokens: int) -> list[torch.Tensor]:
    """Return the tokens of a ring, [batch, heads, tokens, dim], from position ``start`` on."""
    size = ring.shape[2]
    first = start % size
    end = first + num_tokens
    if end <= size:
        return [ring[:, :, first:end]]
    return [ring[:, :, first:], ring[:, :, : end - size]]


def _floats(kept: torch.Tensor) -> torch.Tensor:
    """Return what has a NaN where kept states have one: these themselves, or scales of codes."""
    return scales_of(kept) if is_coded(kept) else kept


def _stores_codes(states: torch.Tensor) -> bool:
    """Return True if one kernel encodes states and writes them into the cache."""
    return kernel_sizes.STORES_CODES and states.is_cuda


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


class _Stack:
    """Tensors of layers that have the same shape, in one allocation."""

    def __init__(self, num_layers: int) -> None:
        self._num_layers, self._taken = num_layers, 0
        self.whole: torch.Tensor
        """All of them, [layers, ...]."""

    def take(self, like: torch.Tensor, *shape: int) -> torch.Tensor:
        """Return zeros of a shape for the next layer, of the type of ``like``."""
        if not self._taken:
            self.whole = like.new_zeros(self._num_layers, *shape)
        self._taken += 1
        return self.whole[self._taken - 1]


class _States:
    """The states of all layers with linear attention, and what a pass adds to them."""

    def __init__(self, num_layers: int, num_tokens: int) -> None:
        """Have room for so many layers, and for passes that check up to ``num_tokens``."""
        self.num_tokens = num_tokens
        """Tokens of a pass that are noted; 0 if no pass checks drafts."""
        self.recurrent, self.inputs = _Stack(num_layers), _Stack(num_layers)
        self._noted = {each.name: _Stack(num_layers) for each in fields(Additions)}

    def take_additions(self, inputs: torch.Tensor, state: torch.Tensor) -> Additions:
        """Return where the next layer notes what tokens add to its ``inputs`` and its ``state``."""
        (batch, heads, *dims), size = state.shape, self.num_tokens
        sizes = {
            "keys": (state, batch, heads, size, dims[0]),
            "deltas": (state, batch, heads, size, dims[1]),
            "decays": (state, batch, heads, size),
            "inputs": (inputs, *inputs.shape[:-1], size),
        }
        return Additions(**{name: self._noted[name].take(*each) for name, each in sizes.items()})

    def add_taken(self, num_taken: int) -> None:
        """Add the first tokens of the last pass that checked drafts."""
        additions = Additions(**{name: each.whole for name, each in self._noted.items()})
        add_taken(self.recurrent.whole, self.inputs.whole, additions, num_taken)


class _State(LinearAttentionLayer):
    """The state of a linear attention: its convolution's last inputs, and one matrix a head.

    transformers writes both in place. Zeros are where a text begins. A pass that checks drafts
    leaves both as they are, and notes what its tokens add.
    """

    def __init__(self, position: Position, states: _States) -> None:
        super().__init__()
        self._position, self._states = position, states
        self._whole: list[torch.Tensor] = []
        self._checkpoint: list[torch.Tensor] = []
        self._rows: slice | None = ALL
        self._additions: Additions | None = None

    @property
    def additions(self) -> Additions | None:
        """Where a pass notes what its tokens add; None for one that writes the state itself."""
        return None if self._position.is_chunk else self._additions

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
        states = self._states
        if conv_states is not None:
            assert conv_kernel_size is not None
            self.conv_kernel_size[state_idx] = conv_kernel_size
            shape = *conv_states.shape[:-1], conv_kernel_size
            self.conv_states[state_idx] = states.inputs.take(conv_states, *shape)
            self._note(self.conv_states[state_idx])
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            of = recurrent_states
            self.recurrent_states[state_idx] = states.recurrent.take(of, *of.shape)
            self._note(self.recurrent_states[state_idx])
            self.is_recurrent_states_initialized[state_idx] = True
            if states.num_tokens:
                self._additions = states.take_additions(self._whole[0], of)

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, **others: Any
    ) -> torch.Tensor:
        """Return the last inputs before these, [batch, channels, new], and these; keep the last."""
        if (additions := self.additions) is None:
            made: torch.Tensor = super().update_conv_state(conv_states, state_idx, **others)
            return made
        additions.inputs[..., : conv_states.shape[-1]].copy_(conv_states)
        return torch.cat([self.conv_states[state_idx], conv_states], -1)

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor | None, state_idx: int = 0, **others: Any
    ) -> torch.Tensor:
        """Keep a state; None where a pass has noted what its tokens add."""
        if recurrent_states is None:
            kept: torch.Tensor = self.recurrent_states[state_idx]
            return kept
        made: torch.Tensor = super().update_recurrent_state(recurrent_states, state_idx, **others)
        return made

    def _note(self, state: torch.Tensor) -> None:
        self._whole.append(state)
        self._checkpoint.append(torch.zeros_like(state))

    def select(self, rows: slice) -> None:
        """Go on from the states of these rows."""
        if self._whole and rows != self._rows:
            self.conv_states[0], self.recurrent_states[0] = (whole[rows] for whole in self._whole)
            self._rows = rows

    def invalidate(self) -> None:
        """Know of no rows: the next pass selects its own."""
        self._rows = None

    def tensors(self) -> list[torch.Tensor]:
        """Return what passes work on of it, for all rows."""
        return self._whole

    def checkpoint(self) -> list[torch.Tensor]:
        """Return what is allocated of it for the checkpoint of each row."""
        return self._checkpoint


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
        row: RowCache,
        position: Position,
        linear: Collection[int] = (),
        *,
        scratch: Scratch | None = None,
    ) -> None:
        """Make room once the layers are first called: for ``row`` of each sequence of that pass.

        Layers that keep as much share blocks; one that keeps nothing reads an earlier layer's. The
        layers ``linear`` have states. ``scratch`` is for the values of one layer's codes.
        """
        self._of_states = _States(len(linear), 1 + row.drafted if row.drafted else 0)
        self._states = {index: _State(position, self._of_states) for index in linear}
        self._blocks = _Blocks(), _Blocks()
        """Keys and values of layers that keep the whole context."""
        self._rings = _Blocks(), _Blocks()
        self._checkpoint = _Blocks(), _Blocks()
        """Keys and values as in the rings, laid out alike."""
        kinds = [
            (each.bytes_per_token, row.window(n), each.is_coded, each.vectors)
            for n, each in enumerate(row.layers)
        ]
        num_alike = Counter(kinds)
        self.scratch = scratch
        """Memory for the values of one layer's codes; None if there are none."""

        def make(index: int) -> _State | _Layer:
            if (state := self._states.get(index)) is not None:
                return state
            if (owner := row.owner(index)) is not None:
                return self.by_layer[owner]
            _, num_tokens, codes, _ = kinds[index]
            given, alike = (position, row.context), num_alike[kinds[index]]
            if num_tokens is None:
                return _Layer(*given, self._blocks, alike, codes=codes)
            blocks, is_shared = (self._rings, self._checkpoint), index in row.shared_rings
            return Ring(*given, num_tokens, *blocks, alike, codes=codes, is_shared=is_shared)

        self.by_layer: list[_State | _Layer] = []
        """What each layer keeps, or the earlier layer's ring that it reads."""
        for index in range(len(kinds)):
            self.by_layer.append(make(index))
        # linear attention asks its cache for a layer of it
        super().__init__(
            layers=[
                Cache(layers=[each]) if isinstance(each, _State) else each for each in self.by_layer
            ]
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return nothing that a model may rely on: positions are passed explicitly."""
        return 0

    def select(self, rows: slice, index: int | None = None) -> None:
        """Have the next pass write to these rows and read them: in every layer, or in one."""
        for part in self.by_layer if index is None else [self.by_layer[index]]:
            part.select(rows)

    def invalidate(self) -> None:
        """Know of no rows that layers write to; what the rows hold stays."""
        for part in self.by_layer:
            part.invalidate()

    def clear_from(self, position: int, rows: slice = ALL) -> None:
        """Write zeros over ``rows`` of every layer from ``position`` on; a full ring has none.

        Many layers at a time: one by one the host would take a millisecond to ask for it.
        """
        for blocks in (*self._blocks, *self._rings):
            for block in blocks.whole:
                block[:, rows, :, position:].zero_()

    def clear_drafts(self, begin: int, stop: int) -> None:
        """Write zeros over what every row holds of positions that were rejected."""
        for blocks in (*self._blocks, *self._rings):
            for block in blocks.whole:
                places = torch.arange(begin, stop, device=block.device) % block.shape[3]
                block.index_fill_(3, places, 0)

    def add_taken(self, num_taken: int) -> None:
        """Have states go on from the first tokens of the last pass that checked drafts."""
        if self._states:
            self._of_states.add_taken(num_taken)

    def swap(self, row: int, other: int, num_tokens: int) -> "Swap":
        """Exchange what two rows hold of their first ``num_tokens`` tokens, and their states.

        Rings, states and checkpoints are of it. Nothing is done until the exchange is run. The rest
        of the other row is cleared, since attention weighs it by zero from then on, which does not
        hide a NaN.
        """
        parts = [part for blocks in self._blocks for part in blocks.rows(num_tokens)]
        parts += self._at_end() + self._at_checkpoint()
        return Swap(parts, row, other, partial(self.clear_from, num_tokens))

    def keep(self, rows: slice) -> None:
        """Make the checkpoint of ``rows``: of their rings and states as they are now."""
        for at_end, kept in zip(self._at_end(), self._at_checkpoint(), strict=True):
            kept[rows] = at_end[rows]

    def copy(self, row: int, other: int, num_tokens: int, *, from_checkpoint: bool) -> None:
        """Have another row, or the same one, go on from a row's first ``num_tokens`` tokens.

        Their rings and states are those of the end of the row's text, or its checkpoint.
        """
        if row != other:
            for part in (part for blocks in self._blocks for part in blocks.rows(num_tokens)):
                part[other] = part[row]
        source = self._at_checkpoint() if from_checkpoint else self._at_end()
        for part, of in zip(self._at_end(), source, strict=True):
            if row != other or from_checkpoint:
                part[other] = of[row]

    def count_numbers(self, row: int, num_tokens: int, *, from_checkpoint: bool) -> int:
        """Count the tokens of a row before the first that has a NaN in any layer.

        Of a row's first ``num_tokens``; none where its rings or states have a NaN, those of its end
        or of its checkpoint. Waits for the device.
        """
        # the largest is NaN where one is; a comparison would take memory for each element
        parts = [part for blocks in self._blocks for part in blocks.rows(num_tokens)]
        is_nan = [_floats(part[row]).amax((0, 1, 3)).isnan() for part in parts]
        source = self._at_checkpoint() if from_checkpoint else self._at_end()
        is_nan += [_floats(part[row]).amax().isnan().expand(num_tokens) for part in source]
        found = torch.stack(is_nan).any(0).nonzero()
        return int(found[0]) if len(found) else num_tokens

    def tensors(self) -> list[torch.Tensor]:
        """Return all that is allocated, for all rows."""
        parts = [part for blocks in self._blocks for part in blocks.rows()]
        return parts + self._at_end() + self._at_checkpoint()

    def _at_end(self) -> list[torch.Tensor]:
        """Return rings and states, each [rows, ...], which cannot go back."""
        parts = [part for blocks in self._rings for part in blocks.rows()]
        return parts + [part for state in self._states.values() for part in state.tensors()]

    def _at_checkpoint(self) -> list[torch.Tensor]:
        """Return what the checkpoints have of each in ``_at_end``."""
        parts = [part for blocks in self._checkpoint for part in blocks.rows()]
        return parts + [part for state in self._states.values() for part in state.checkpoint()]

    def clear_states(self, rows: slice = ALL) -> None:
        """Write zeros over the states of ``rows``, with which a text begins."""
        states = [part[rows] for state in self._states.values() for part in state.tensors()]
        if states:
            torch._foreach_zero_(states)
