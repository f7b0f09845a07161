"""The passes of a text by the rule of their drafts, simulated: how many of each size, for how much.

The rule is ``drafts.length``'s, which the runtime follows. The simulated text takes each draft by
the chances of an acceptance profile, independently of all others. Real texts take drafts in runs,
and so leave and begin pauses less often than the simulated text does.
"""

from dataclasses import dataclass
from functools import lru_cache
from random import Random

from offplan.capabilities.drafts import Draft, pass_tokens
from offplan.drafts.acceptance import AcceptanceProfile
from offplan.drafts.length import DraftLength

NUM_TOKENS = 2048
"""Tokens that are simulated, at least: the mean of a pass is then right to some 2 %."""
_SEED = 67


@dataclass(frozen=True)
class Mix:
    """The passes of a text, by the tokens that each passes."""

    shares: tuple[tuple[int, float], ...]
    """Tokens of a pass, padding included, and the share of passes that have so many; ascending."""
    tokens: float
    """Tokens of text that a pass gives, on average."""


ONE_BY_ONE = Mix(((1, 1.0),), 1.0)
"""The steps of a text without drafts."""


def find_mix(draft: Draft | None, profile: AcceptanceProfile | None, num_tokens: int) -> Mix:
    """Find the passes of texts of so many tokens behind their first.

    Without a profile no draft is taken.
    """
    if draft is None or not num_tokens:
        return ONE_BY_ONE
    chances = () if profile is None else profile.chances
    in_pause = 0.0 if profile is None else profile.chance_in_pause
    return _simulate(draft, chances, in_pause, num_tokens)


@lru_cache(maxsize=256)
def _simulate(draft: Draft, chances: tuple[float, ...], in_pause: float, num_tokens: int) -> Mix:
    random, passes = Random(_SEED).random, dict[int, int]()
    made = 0
    for _ in range(-(-NUM_TOKENS // num_tokens)):
        length, left = DraftLength(draft), num_tokens
        while left > 0:
            drafted, taken = length.tokens, 0
            while taken < min(drafted, len(chances)) and random() < chances[taken]:
                taken += 1
            if length.compares:
                length.note(1, int(random() < in_pause))
            else:
                length.note(drafted, taken)
            size = pass_tokens(drafted)
            passes[size] = passes.get(size, 0) + 1
            left -= 1 + taken
            made += 1 + taken
    num_passes = sum(passes.values())
    shares = tuple((size, number / num_passes) for size, number in sorted(passes.items()))
    return Mix(shares, made / num_passes)
