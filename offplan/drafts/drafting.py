"""The drafts of one text: what the next pass checks, and what came of those before."""

from collections.abc import Callable, Sequence

from offplan.capabilities.drafts import Draft
from offplan.drafts.counts import DraftCounts
from offplan.drafts.drafter import DRAFTERS, Drafter, Grammar
from offplan.drafts.length import DraftLength


class Drafting:
    """Drafts the next tokens of a text, as many as the rule of ``DraftLength`` says."""

    def __init__(
        self, draft: Draft, prompt: Sequence[int], make: Callable[[], Drafter] | None = None
    ) -> None:
        """Begin behind a prompt; ``make`` makes another drafter than the one of the kind."""
        self._most = draft.tokens
        self._drafter = (make or DRAFTERS[draft.kind])()
        self._drafter.extend(prompt)
        self._length = DraftLength(draft)
        self.counts = DraftCounts()
        self._guess: list[int] = []
        """The draft that a step without drafts is compared with."""
        self._num_forced = 0
        """Drafts of the pass at hand that a grammar forces: they tell nothing of the drafter."""
        self._guess_next()

    @property
    def wants_pass(self) -> bool:
        """True if the next pass is to check drafts, for which all tokens of the text are wanted."""
        return self._length.tokens > 0

    def propose(self, most: int, grammar: Grammar | None = None) -> list[int]:
        """Return up to ``most`` drafts for the next pass; a step follows if there are none.

        Tokens that the text's ``grammar`` forces come before guesses. Guesses are cut where it
        forbids one.
        """
        forced = [] if grammar is None else grammar.list_forced()[: min(most, self._most)]
        wanted = min(most, self._length.tokens)
        drafts = self._drafter.propose(wanted) if wanted > len(forced) else []
        if drafts[: len(forced)] != forced:
            drafts = forced
        allowed = grammar.cut(drafts) if grammar is not None and drafts else drafts
        self._num_forced = len(forced)
        if not allowed and self.wants_pass:
            self._length.note(min(1, len(drafts)), 0)
            self._guess_next()
        return allowed

    def take_step(self, token: int) -> bool | None:
        """Take the token that a step without drafts has made.

        Returns whether a draft would have been right; None if the step compares none.
        """
        is_right = self._guess[:1] == [token] if self._length.compares else None
        if is_right is not None:
            self.counts.note_step(is_right=is_right)
        if self._guess:
            self._length.note(1, int(is_right or False))
        elif not self.wants_pass:
            self._length.note(0, 0)
        self._drafter.extend([token])
        self._guess_next()
        return is_right

    def take_pass(self, num_drafts: int, made: Sequence[int]) -> None:
        """Take the tokens of a pass: of its drafts all but the last of ``made`` were right."""
        num_taken = len(made) - 1
        self.counts.note(num_drafts, num_taken)
        if num_drafts > self._num_forced:
            guessed = num_drafts - self._num_forced
            self._length.note(guessed, max(0, num_taken - self._num_forced))
        self._drafter.extend(made)
        self._guess_next()

    def _guess_next(self) -> None:
        self._guess = self._drafter.propose(1) if self._length.compares else []


def count_taken(drafts: Sequence[int], chosen: Sequence[int]) -> int:
    """Count the first drafts that are the tokens chosen in their places."""
    right = (draft == token for draft, token in zip(drafts, chosen, strict=False))
    return next(
        (n for n, is_right in enumerate(right) if not is_right), min(len(drafts), len(chosen))
    )
