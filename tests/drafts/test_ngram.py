"""Drafts are what followed the longest match; counts say how far they were right."""

import pytest

from offplan.capabilities.drafts import Draft
from offplan.drafts.counts import DraftCounts
from offplan.drafts.drafting import Drafting, count_taken
from offplan.drafts.ngram import NgramDrafter


@pytest.mark.parametrize(
    ("text", "most", "drafts"),
    [
        ([], 3, []),
        ([1, 2], 3, []),
        ([1, 2, 3, 1, 2], 3, [3, 1, 2]),
        ([1, 2, 3, 1, 2], 1, [3]),
        ([5, 1, 2, 7, 6, 1, 2, 8, 5, 1, 2], 2, [7, 6]),  # the longer match, not the last
        ([1, 2, 7, 1, 2, 8, 1, 2], 2, [8, 1]),  # the last of equals
        ([4, 4, 4], 3, [4]),  # what follows may be short
    ],
)
def test_what_followed_the_longest_match(text: list[int], most: int, drafts: list[int]) -> None:
    drafter = NgramDrafter()
    drafter.extend(text[:3])
    drafter.extend(text[3:])
    assert drafter.propose(most) == drafts


def test_drafts_are_right_up_to_the_first_that_differs() -> None:
    assert count_taken([1, 2, 3], [1, 2, 3, 4]) == 3
    assert count_taken([1, 2, 3], [1, 5, 3, 4]) == 1
    assert count_taken([1], [-1, 4]) == 0


def test_counts_by_position() -> None:
    counts, other = DraftCounts(), DraftCounts()
    counts.note(0, 0)
    assert counts == other
    counts.note(3, 1)
    counts.note(2, 2)
    other.note(3, 3)
    assert (counts.offered, counts.taken) == ([2, 2, 0], [2, 1, 0])
    assert (counts.accepted, counts.rejected, counts.num_passes) == (3, 2, 2)
    counts.add(other)
    assert (counts.offered, counts.taken) == ([3, 3, 1], [3, 2, 1])
    assert (counts.accepted, counts.rejected, counts.num_passes) == (6, 2, 3)


def test_a_text_begins_to_draft_once_its_drafts_would_be_right() -> None:
    drafting = Drafting(Draft(kind="ngram", tokens=3), [1, 2, 3, 4, 5, 6, 1, 2])
    drafting.take_step(3)
    assert not drafting.wants_pass
    drafting.take_step(4)
    assert drafting.wants_pass
    assert drafting.propose(0) == []
    assert not drafting.wants_pass
    for token in (5, 6, 1):
        drafting.take_step(token)
    assert drafting.propose(2) == [2, 3]
    drafting.take_pass(2, [2, 9])
    assert (drafting.counts.offered, drafting.counts.taken) == ([1, 1], [1, 0])


def test_a_token_behind_the_end_is_none_of_the_text() -> None:
    counts = DraftCounts()
    assert counts.describe() == "No pass checked drafts: none would have been right"
    counts.note(5, 4)
    counts.num_behind = 3
    assert (counts.accepted, counts.rejected) == (1, 4)
    assert counts.describe() == (
        "Of 5 drafts 4 were taken, in 1 pass; by their place, those before being right: 100%, "
        "100%, 100%, 100%, 0%"
    )
