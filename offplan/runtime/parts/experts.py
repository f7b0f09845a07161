"""Routed experts that a prompt multiplies some at a time, while the others are on their way.

A chunk that has come to the experts of a layer is handed over. It goes on once every part of them
has met its tokens. The product of each pair of a token and an expert is kept, unweighted. So the
sum over a token's experts has the order of a layer whose experts are all there.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import cache
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import nn

from offplan.kernel_sizes import parted_width
from offplan.runtime.forms.experts import (
    FEW_TOKENS,
    PLAIN_WAY,
    Expanded,
    ReadElsewhere,
    forward_groups,
    forward_stored,
    holds_codes,
    multiply_sorted,
    sum_up,
)
from offplan.runtime.forms.stored import KERNEL_DTYPES, multiplies_values
from offplan.transformers_private import ExpertsInterface, chosen_experts


class Way(NamedTuple):
    """The way to multiply a chunk's tokens where all experts are there."""

    multiply: Callable[..., torch.Tensor]
    """Multiplies tokens, [tokens, hidden], by experts that they choose, weighted: the same shape.
    """
    is_batched: bool = False
    """True if it is ``batched_mm``, which copies the experts of each pair."""
    is_grouped: bool = False
    """True if ``multiply_sorted`` gives the same but for the order of an expert's rows."""
    by_groups: bool = False
    """True if it is ``forward_groups``."""
    is_own: bool = False
    """True if ``sum_up`` sums up its products."""


class Arrived(NamedTuple):
    """The tensors that a chunk hands over at the experts of a layer."""

    hidden: torch.Tensor
    """[tokens, hidden]"""
    chosen: torch.Tensor
    """The experts of each token, [tokens, choices]."""
    weights: torch.Tensor
    """[tokens, choices]"""


class Meeting:
    """Chunks' tokens at the experts of a layer, and what their choices have given so far.

    On the current stream; the host waits in ``count`` alone.
    """

    def __init__(
        self,
        experts: nn.Module,
        chunks: Sequence[Arrived],
        parts: Sequence[Mapping[str, torch.Tensor]],
        *,
        is_joined: bool,
    ) -> None:
        """Sort the choices of all chunks together, by the experts of each part.

        ``parts`` has the parts' parameters. ``is_joined`` says that each product is its own row's,
        in whatever order an expert's rows come.
        """
        self._experts, num_parts = experts, len(parts)
        self._num_experts: int = vars(experts)["num_experts"] // num_parts
        """Experts of a part."""
        self._parameters = dict(experts.named_parameters(recurse=False))
        """Parameters of the prompt's phase: a captured prompt runs again amid steps."""
        self._hidden, chosen, self._weights = map(_join, zip(*chunks, strict=True))
        self._sizes = [len(chunk.hidden) for chunk in chunks]
        self._num_chosen = chosen.shape[-1]
        self._most = max(self._sizes) * self._num_chosen
        """Pairs that are multiplied at a time: as many as where chunks come one by one."""
        hidden = self._hidden.shape[-1]
        largest = max(value.numel() for value in parts[0].values())
        inside = largest // (self._num_experts * hidden)
        self._pair_width = parted_width(hidden, inside)
        """Elements that a pair takes while it is multiplied."""
        self._way = _find_way(experts, self._hidden, chunks[0].chosen.numel())
        self._is_sorted = is_joined and self._way.is_grouped
        self._chosen = flat = chosen.reshape(-1)
        # the very sort of transformers: an expert's rows have its order, which shows in last bits
        self._expert_of, self._order = torch.sort(flat)
        self._made = self._hidden.new_empty(len(flat), self._hidden.shape[-1])
        """The product of each pair of a token and a choice, [tokens x choices, hidden]."""
        firsts = torch.arange(num_parts * self._num_experts + 1, device=flat.device)
        self._starts = torch.searchsorted(self._expert_of, firsts, out_int32=True)
        """Start of each expert's pairs among the sorted ones, [experts + 1]."""
        self._bounds: list[int] = []
        """Start of each part's pairs among the sorted ones, and the end of the last one's."""

    def borrow(self) -> "Meeting":
        """Return what counts and adds whenever a captured pass is replayed; elsewhere itself.

        It keeps none of the memory that what is captured later may take.
        """
        if not (self._hidden.is_cuda and torch.cuda.is_current_stream_capturing()):
            return self
        borrowed = copy(self)
        for name, value in vars(self).items():
            if isinstance(value, torch.Tensor):
                vars(borrowed)[name] = _Borrowed(value).view_as(value)
        return borrowed

    def count(self) -> None:
        """Wait for how many pairs each part has; before parts are added."""
        self._bounds = self._starts[:: self._num_experts].tolist()
        if self._hidden.is_cuda:
            # For parts with ever more pairs the allocator would take ever larger pieces, and keep
            # them all. It cuts them from this block, which it has once the block is let go.
            self._hidden.new_empty(self._most * self._pair_width)

    def add(self, part: int, values: Mapping[str, torch.Tensor]) -> None:
        """Multiply the tokens that chose experts of a part; ``values`` are its parameters."""
        first = part * self._num_experts
        # experts are counted from 0 on
        here = {**values, "num_experts": self._num_experts, "in_place": ()}
        some = ReadElsewhere(self._experts, {**self._parameters, **here})
        end = self._bounds[part + 1]
        for start in range(self._bounds[part], end, self._most):
            self._multiply(some, first, slice(start, min(start + self._most, end)))

    def _multiply(self, some: Any, first: int, found: slice) -> None:
        """Multiply sorted pairs, whose experts are ``some``, the ``first`` one among them."""
        pairs, multiply = self._order[found], self._way.multiply
        chosen = self._expert_of[found] - first
        if self._is_sorted:
            starts = self._starts[first : first + some.num_experts + 1] - found.start
            rows = self._hidden[pairs // self._num_chosen]
            starts = starts.clamp_(0, len(pairs))
            by_groups = self._way.by_groups
            made = multiply_sorted(some, rows, chosen, starts, by_groups=by_groups)
        elif self._way.is_batched:  # whose products depend on how many there are
            chosen = (self._chosen - first).clamp(0, some.num_experts - 1)[:, None]
            rows = self._hidden.repeat_interleave(self._num_chosen, 0)
            made = multiply(some, rows, chosen, self._weights.new_ones(chosen.shape))[pairs]
        else:
            again = torch.sort(chosen)[1]  # as each expert's rows will be put once more
            pairs = torch.empty_like(pairs).scatter_(0, again, pairs)
            rows, chosen = self._hidden[pairs // self._num_chosen], chosen[:, None]
            made = multiply(some, rows, chosen, self._weights.new_ones(chosen.shape))
        self._made.index_copy_(0, pairs, made)

    def finish(self) -> list[torch.Tensor]:
        """Return the weighted sum of each token's choices, [tokens, hidden] of each chunk."""
        made = self._made.split([size * self._num_chosen for size in self._sizes])
        weights = self._weights.split(self._sizes)
        # tokens of several chunks are a copy, which nothing reads any more
        sums = self._hidden if len(self._sizes) > 1 else torch.empty_like(self._hidden)
        for some, of_them, into in zip(made, weights, sums.split(self._sizes), strict=True):
            into.copy_(self._sum_up(some, of_them))
        return list(sums.split(self._sizes))

    def _sum_up(self, made: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum up products, [tokens x choices, hidden], by [tokens, choices]."""
        if self._way.by_groups:
            from offplan.runtime.forms import operators  # needs triton

            return operators.sum_pairs(made, weights)
        if self._way.is_own:
            return sum_up(made, weights)
        return (made.view(*weights.shape, -1) * weights.unsqueeze(-1)).sum(1)


class _Borrowed:
    """A tensor's memory on a GPU, by its address alone, as numba's interface describes it."""

    def __init__(self, value: torch.Tensor) -> None:
        behind = value.untyped_storage().nbytes() // value.itemsize - value.storage_offset()
        self.__cuda_array_interface__ = {
            "shape": (behind * value.itemsize,),
            "typestr": "|u1",
            "data": (value.data_ptr(), False),
            "version": 2,
        }

    def view_as(self, value: torch.Tensor) -> torch.Tensor:
        """View the memory as the tensor does."""
        whole = torch.as_tensor(self, device=value.device).view(value.dtype)
        return whole.as_strided(value.shape, value.stride())


def _join(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([*parts])


class ExpertsInParts:
    """The experts of a layer, which prompts read by the parameters of their parts."""

    def __init__(
        self,
        experts: nn.Module,
        parts: list[dict[str, torch.Tensor]],
        chunks_at_once: int | None = None,
    ) -> None:
        """Have chunks be handed over at ``experts``; ``parts`` has their parameters by name."""
        self._experts, self._parts = experts, parts
        self.chunks_at_once = chunks_at_once
        """Chunks that meet a part while it is in its slot; None for all."""
        vars(experts).update(takes_parts=False, hand_over=None)
        kind: Any = type(experts)
        experts.__class__ = _stops_at(kind)

    @property
    def num_parts(self) -> int:
        """Parts that chunks meet."""
        return len(self._parts)

    def take(self, hand_over: Callable[[Arrived], torch.Tensor] | None) -> None:
        """Hand chunks that come to the experts over, which returns the sums; None for no longer."""
        vars(self._experts).update(takes_parts=hand_over is not None, hand_over=hand_over)

    def meet(self, chunks: Sequence[Arrived]) -> list[Meeting]:
        """Have chunks meet the parts: all together where each product is its own row's.

        On a GPU that is one launch for all, not one for each chunk. Elsewhere, and where few tokens
        are multiplied, a row's last bits depend on those beside it, and chunks come one by one. A
        last chunk of fewer tokens may be multiplied in another way than those before it.
        """

        def way_of(chunk: Arrived) -> Way:
            return _find_way(self._experts, chunk.hidden, chunk.chosen.numel())

        groups, is_joined = [[chunk] for chunk in chunks], False
        if all(chunk.hidden.is_cuda and not way_of(chunk).is_batched for chunk in chunks):
            alike = groupby(chunks, lambda chunk: way_of(chunk).by_groups)
            groups = [list(each) for _, each in alike]
            is_joined = True
        return [Meeting(self._experts, each, self._parts, is_joined=is_joined) for each in groups]

    def add(self, meeting: Meeting, part: int) -> None:
        """Have chunks meet a part, which must be in its slot."""
        meeting.add(part, self._parts[part])


@cache
def _stops_at(kind: Any) -> type[nn.Module]:
    """Return the class of experts whose forward may hand over; compiled code tells the two apart.

    Only passes that hand over have the compiled layer cut there.
    """

    def forward(
        experts: Any,
        hidden_states: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> Any:
        if experts.takes_parts:
            return _hand_over(experts, hidden_states, top_k_index, top_k_weights)
        return kind.forward(experts, hidden_states, top_k_index, top_k_weights)

    return type(kind.__name__, (kind,), {"forward": forward})


@torch.compiler.disable
def _hand_over(experts: nn.Module, *given: torch.Tensor) -> Any:
    return vars(experts)["hand_over"](Arrived(*given))


def _find_way(experts: Any, hidden: torch.Tensor, num_pairs: int) -> Way:
    """Find how a chunk's tokens, [tokens, hidden], are multiplied where all experts are there.

    The chunk has so many pairs of a token and an expert.
    """
    interface = ExpertsInterface()
    batched, grouped = interface["batched_mm"], interface["grouped_mm"]
    if not holds_codes(experts):
        plain = vars(experts).get(PLAIN_WAY) or interface[chosen_experts(experts.config)]
        by_groups = plain is forward_groups
        is_grouped = by_groups or plain is grouped
        is_own = plain not in (batched, grouped)
        return Way(plain, plain is batched, is_grouped, by_groups, is_own)
    if hidden.is_cuda and hidden.dtype in KERNEL_DTYPES:
        by_groups = multiplies_values(experts, num_pairs)
        return Way(forward_stored, is_grouped=True, by_groups=by_groups, is_own=True)
    is_few = len(hidden) <= FEW_TOKENS
    multiply = batched if is_few else grouped
    return Way(lambda some, *given: multiply(Expanded(some, hidden.dtype), *given), is_few)
