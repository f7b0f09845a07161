"""Sizes of a row of the cache in offplan's own passes, layer by layer, for costs and runtime.

A layer that sees the last w tokens keeps w, in a ring: the token at position p lies at p mod w. A
layer that sees chunks of w tokens does likewise. A ring cannot go back to what it has overwritten,
nor can a state of linear attention. So each row keeps a checkpoint of both, from the end of its
last prompt, called the row checkpoint.

A layer that keeps nothing may read an earlier layer's ring. A chunk's keys and values then stay
until the prompt has passed all layers. Each reader repeats what the chunks did to the ring.

A pass that checks drafts writes tokens which may be rejected. Then a ring has places for them
beside its w, so that they overwrite nothing that the next pass reads. To states such a pass writes
nothing: the row keeps what each token adds, and adds those of the tokens that are taken.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from offplan.checkpoint.model import KVCache, Vectors

SCALE_BYTES = 4
"""Bytes of the scale of a vector that is kept as codes, behind these."""
CHECKPOINTS = 1
"""Copies of a row's rings and states, beside those that passes work on."""


def why_not_coded(vectors: Sequence[Vectors]) -> str | None:
    """Say why what a layer caches of a token cannot be kept as codes; None if it can."""
    if not vectors:
        return "caches what is not known to be vectors, each of which has a scale"
    odd = next((each.dim for each in vectors if each.dim % SCALE_BYTES), None)
    if odd is not None:
        return f"caches vectors of {odd} elements, and scales need a multiple of {SCALE_BYTES}"
    return None


@dataclass(frozen=True)
class RowCache:
    """The cache of one row: of one sequence, in all layers."""

    layers: Sequence[KVCache]
    context: int
    """Tokens that the row has room for."""
    drafted: int = 0
    """Drafts that a pass checks at most, padding included: places of each ring beside its w."""
    token_addition_bytes: int = 0
    """Bytes of what a token of such a pass adds to the states of all layers."""

    def window(self, layer: int) -> int | None:
        """Return the tokens of a layer's ring; None if it keeps the whole context."""
        cache = self.layers[layer]
        if not cache.bytes_per_token or cache.window is None:
            return None
        places = cache.window + self.drafted
        return None if places >= self.context else places

    def owner(self, layer: int) -> int | None:
        """Return the earlier layer whose ring a layer reads; None if it reads no other's.

        A layer that keeps nothing reads the last one before it that has its window.
        """
        cache = self.layers[layer]
        if cache.bytes_per_token or cache.window is None:
            return None
        alike = (n for n in reversed(range(layer)) if self.layers[n].window == cache.window)
        return next((n for n in alike if self.window(n) is not None), None)

    @cached_property
    def shared_rings(self) -> frozenset[int]:
        """Layers whose rings later layers read."""
        owners = map(self.owner, range(len(self.layers)))
        return frozenset(owner for owner in owners if owner is not None)

    @cached_property
    def waiting_token_bytes(self) -> int:
        """Bytes of a prompt's token that wait for layers which read another's ring."""
        return sum(self.layers[owner].bytes_per_token for owner in self.shared_rings)

    def most_values(self, chunk: int) -> int:
        """Bytes of the values that a pass makes of one layer's codes at most; 0 if it has none.

        A ring's are those of the tokens before a chunk of so many tokens, and its own.
        """
        most = 0
        for index, each in enumerate(self.layers):
            window = self.window(index)
            kept = self.context if window is None else min(self.context, window - 1 + chunk)
            most = max(most, kept * each.value_bytes)
        return most

    @cached_property
    def whole_bytes(self) -> int:
        """Bytes of the layers that keep the whole context."""
        return self.context * sum(
            each.bytes_per_token for n, each in enumerate(self.layers) if self.window(n) is None
        )

    @cached_property
    def window_bytes(self) -> int:
        """Bytes of all rings, without their checkpoint."""
        rings = ((each, self.window(n) or 0) for n, each in enumerate(self.layers))
        return sum(tokens * each.bytes_per_token for each, tokens in rings)

    @cached_property
    def state_bytes(self) -> int:
        """Bytes of the states of linear attention, without their checkpoint."""
        return sum(each.state_bytes for each in self.layers)

    @property
    def addition_bytes(self) -> int:
        """Bytes of what the tokens of a pass that checks drafts add to states."""
        return (1 + self.drafted) * self.token_addition_bytes if self.drafted else 0

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the copies of rings and states from the end of the last prompt."""
        return CHECKPOINTS * (self.window_bytes + self.state_bytes)

    @property
    def nbytes(self) -> int:
        """Bytes of all that it keeps."""
        at_end = self.whole_bytes + self.window_bytes + self.state_bytes
        return at_end + self.checkpoint_bytes + self.addition_bytes

    def begin_at(self, common: int, length: int) -> int:
        """Return how many of a text's first ``common`` tokens a pass can go on from.

        The row's rings and states are those of a text of ``length`` tokens, ``common`` or more. Of
        its last tokens a ring has one less than it has room for: a step of other rows may have
        written to the place of the next. Rejected drafts may be behind the text.
        """
        if common == length:
            return length
        places = (self.window(n) or length + self.drafted + 1 for n in range(len(self.layers)))
        least = min(places, default=0) - self.drafted
        return common if not self.state_bytes and length < least else 0
