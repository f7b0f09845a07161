"""Drafts of texts with grammars: what one forces comes first, what it forbids is left out."""

from collections.abc import Sequence

from offplan.capabilities.drafts import Draft, DraftKind
from offplan.drafts.drafting import Drafting


class Guesses:
    """A drafter of one guess."""

    def __init__(self, guess: Sequence[int]) -> None:
        self.guess, self.asked = guess, list[int]()

    def extend(self, tokens: Sequence[int]) -> None:
        pass

    def propose(self, most: int) -> list[int]:
        self.asked.append(most)
        return [*self.guess[:most]]


class Rules:
    """A grammar that forces some tokens and forbids token 9."""

    def __init__(self, forced: Sequence[int] = ()) -> None:
        self.forced = forced

    def list_forced(self) -> list[int]:
        return [*self.forced]

    def cut(self, drafts: Sequence[int]) -> list[int]:
        return [*drafts[: [*drafts, 9].index(9)]]


def begin(guess: Sequence[int], kind: DraftKind = "ngram", tokens: int = 3) -> Drafting:
    """Return drafts behind a pause."""
    drafting = Drafting(Draft(kind=kind, tokens=tokens), [1], lambda: Guesses(guess))
    drafting._length._begin()
    drafting._length._mean = 8.0
    return drafting


def test_what_is_forced_comes_before_guesses() -> None:
    for guess, forced, expected in (
        ([4, 5, 6], [], [4, 5, 6]),
        ([4, 5, 6], [4], [4, 5, 6]),
        ([4, 5, 6], [7], [7]),
        ([], [7, 8], [7, 8]),
        ([4, 5, 6], [4, 5, 6, 7], [4, 5, 6]),
        ([4, 9, 6], [4], [4]),
        ([9, 5, 6], [], []),
    ):
        drafting = begin(guess)
        assert drafting.propose(7, Rules(forced)) == expected
    assert begin([4, 5, 6]).propose(2, Rules([4, 5, 6])) == [4, 5]
    assert begin([4, 5, 6]).propose(0, Rules([4])) == []


def test_what_is_forced_tells_nothing_of_guesses() -> None:
    drafting = begin([4, 5, 6])
    credit = drafting._length._credit
    drafting.propose(7, Rules([7, 8]))
    drafting.take_pass(2, [7, 8, 3])
    assert (drafting._length._credit, drafting._length._mean) == (credit, 8.0)
    assert (drafting.counts.drafted, drafting.counts.accepted) == (2, 2)
    drafting.propose(7, Rules([4, 5]))
    drafting.take_pass(3, [4, 5, 1])
    assert drafting._length._credit < credit
    assert drafting._length._mean == 7.0
    assert (drafting.counts.drafted, drafting.counts.accepted) == (5, 4)


def test_a_forbidden_guess_is_one_that_was_wrong() -> None:
    drafting = begin([9], "mtp")
    assert drafting.propose(7, Rules()) == []
    assert drafting.wants_pass
    for _ in range(5):
        drafting.propose(7, Rules())
    assert not drafting.wants_pass
    assert drafting.counts.num_passes == 0


def test_a_pause_goes_on_while_tokens_are_forced() -> None:
    for kind in ("ngram", "mtp"):
        drafting = Drafting(Draft(kind=kind, tokens=3), [1], lambda: Guesses([4]))
        drafting._length._rest()
        left = drafting._length._left
        for _ in range(3):
            assert drafting.propose(7, Rules([5, 6])) == [5, 6]
            drafting.take_pass(2, [5, 6, 7])
            assert drafting.propose(7, Rules()) == []
        assert not drafting.wants_pass
        assert drafting._length._left == left
