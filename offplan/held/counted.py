"""Costs of passes other than offplan's own, which are counted and not priced by formulas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil


@dataclass(frozen=True)
class CountedPasses:
    """The costs of passes that were run to be counted, for one sequence unless they say more."""

    is_estimated: bool
    """True if small passes were measured, as passes without values fail."""
    calls: Mapping[str, Sequence[int]]
    """The layers in the order in which a pass of each phase calls them."""
    caches: Sequence[tuple[int, int | None, int]]
    """Of each layer the bytes of a token, the tokens kept at most, and the bytes of a state."""
    prompt_bytes: tuple[float, float, float]
    """Temporaries of a prompt: bytes for any, for each token, and for each pair of tokens."""
    step_bytes: tuple[float, float]
    """Temporaries of a decode step: bytes for any, and for each token of its context."""
    pinned: Sequence[str]
    """Stored tensors of layers that loading splits or joins, or that several layers read: no rule
    takes them."""
    borrowed: Sequence[int]
    """Elements of the matrices of other layers that each layer reads, too."""
    operators: Mapping[str, Sequence[int]]
    """Operators that a pass launches in each layer, by phase; then those outside the layers."""
    prompt_moved: Sequence[tuple[float, float, float]]
    """Bytes that operators read and write beside weights, in each layer and outside the layers.
    They are for any prompt, for each token, and for each pair of tokens."""
    step_moved: Sequence[tuple[float, float]]
    """The same of a decode step: for any, and for each token of its context."""
    chunk_bytes: tuple[float, float, float, float] | None = None
    """Temporaries of a chunk at the end of a context, of a model that reads prompts in chunks.
    They are bytes for any, for each token of the chunk, for each of the context, and for each pair.
    None: a prompt is counted as read whole."""

    def moved_bytes(self, index: int, phase: str, batch: int, tokens: int, context: int) -> float:
        """Bytes that operators of a pass read and write in a layer; -1 is what lies outside."""
        if phase == "decode":
            fixed, of_token = self.step_moved[index]
            return fixed + batch * of_token * context
        fixed, of_token, of_pair = self.prompt_moved[index]
        return fixed + batch * (of_token * tokens + of_pair * tokens * context)

    def activation_bytes(self, batch: int, chunk: int, context: int) -> tuple[int, int]:
        """Bytes of the temporaries of a prompt's ``chunk`` tokens, and of a decode step."""
        fixed, of_token, of_pair = self.prompt_bytes
        prompt = fixed + batch * (of_token * chunk + of_pair * chunk * chunk)
        if self.chunk_bytes is not None:  # either may be more: layers of several kinds
            fixed, of_token, of_kept, of_pair = self.chunk_bytes
            prompt = max(
                prompt,
                fixed + batch * (of_token * chunk + of_kept * context + of_pair * chunk * context),
            )
        fixed, of_token = self.step_bytes
        return ceil(prompt), ceil(batch * (fixed + of_token * context))

    def describe_calls(self) -> str | None:
        """Say that a pass calls layers several times, if it does."""
        called = self.calls["decode"]
        if len(called) == len({*called}):
            return None
        return f"a pass makes {len(called)} calls of {len({*called})} layers, each with its weights"
