"""The rule by which the drafted tokens of a pass follow what was taken before.

It knows counts alone. A plan is priced by this rule, and the runtime follows it. A text begins with
a pause.

- **Pause.** Steps have no drafts. Where drafts cost nothing, steps tell whether they would have
  been right: after RIGHT_IN_A_ROW of them, passes begin to check drafts. Where drafts cost
  something, a pass of one draft is a trial: the first pass of a text, then one after FIRST_PAUSE
  steps, and after twice as many steps each time that it fails, up to LONGEST_PAUSE. Behind a run
  of drafts the first trial comes after PAUSE_BEHIND steps.
- **Running.** A pass drafts the least of 1, 3, 7 and the plan's number that is twice the recent
  mean of taken tokens and one more. The mean gives each pass MEAN_WEIGHT.
- **Credit.** Each pass adds what was taken and subtracts LEAST_TAKEN. A pause begins at 0, and
  where no draft was found.
"""

from offplan.capabilities.drafts import MOST_DRAFTED, PASS_TOKENS, Draft

LEAST_TAKEN = 0.4
"""Tokens that a pass has to take, on average, for drafts to go on.

Source: estimated. A pass of four tokens costs up to 1.4 steps where the link is the limit.
"""
FIRST_CREDIT, MOST_CREDIT = 2.0, 6.0
"""Credit behind a pause, and at most. Source: estimated: five passes without a taken token, and 15.
"""
MEAN_WEIGHT = 1 / 8
"""Weight of the last pass in the recent mean of taken tokens. Source: estimated."""
FIRST_PAUSE, PAUSE_BEHIND, LONGEST_PAUSE = 4, 32, 512
"""Steps of a pause whose drafts cost something: at first, behind a run of drafts, and at most.

At 128 tokens and acceptance 0 five trials fail. At 0.7 three texts in ten fail their first trial.
A short pause costs such a text few steps. Source: estimated.
"""
RIGHT_IN_A_ROW = 2
"""Steps of a pause in a row, with drafts that cost nothing, that would have been right."""
COSTS_NOTHING = frozenset({"ngram"})
"""Kinds whose drafts cost nothing, so that steps without drafts compare them as well."""
_RUNGS = tuple(size - 1 for size in PASS_TOKENS)
assert _RUNGS[-1] == MOST_DRAFTED


class DraftLength:
    """The number of drafted tokens that the next pass of one text has."""

    def __init__(self, draft: Draft) -> None:
        """Begin a text, for passes of up to the plan's number of drafts."""
        self._rungs = [*(rung for rung in _RUNGS if rung < draft.tokens), draft.tokens]
        self._is_free = draft.kind in COSTS_NOTHING
        self._credit = 0.0
        self._mean = 0.0
        self._pause = FIRST_PAUSE
        self._left = 0
        """Steps that are left of a pause whose drafts cost something."""
        self._right = 0
        """Steps in a row whose drafts would have been right."""

    @property
    def tokens(self) -> int:
        """Tokens that the next pass is to draft; 0 for a step without drafts."""
        if self._credit > 0:
            wanted = 2 * self._mean + 1
            return next((rung for rung in self._rungs if rung >= wanted), self._rungs[-1])
        return 0 if self._is_free or self._left else self._rungs[0]

    @property
    def compares(self) -> bool:
        """True if the next step has no drafts and is to compare one, which costs nothing."""
        return self._is_free and not self.tokens

    def note(self, offered: int, taken: int) -> None:
        """Note a pass: of ``offered`` drafts the first ``taken`` were taken.

        A step that ``compares`` offers one draft. A step for which there was none offers 0.
        """
        if self._credit > 0:
            if not offered:
                self._rest()
                return
            self._mean += MEAN_WEIGHT * (taken - self._mean)
            self._credit = min(MOST_CREDIT, self._credit + taken - LEAST_TAKEN)
            if self._credit <= 0:
                self._rest()
        elif self._is_free:
            if offered:
                self._right = self._right + 1 if taken else 0
            if self._right >= RIGHT_IN_A_ROW:
                self._begin()
        elif self._left:
            self._left -= 1
        elif taken:
            self._begin()
        else:
            self._rest()

    def _begin(self) -> None:
        self._credit, self._mean, self._pause = FIRST_CREDIT, 1.0, PAUSE_BEHIND

    def _rest(self) -> None:
        """Begin a pause."""
        self._credit, self._right, self._left = 0.0, 0, self._pause
        self._pause = min(LONGEST_PAUSE, 2 * self._pause)
