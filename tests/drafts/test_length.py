"""The number of drafts follows what was taken, and rejected ones cost next to nothing."""

import random

import pytest

from offplan.capabilities.drafts import Draft, DraftKind, list_pass_sizes, most_drafted, pass_tokens
from offplan.drafts.length import PAUSE_BEHIND, DraftLength


def replay(kind: DraftKind, tokens: int, chance: float, num_tokens: int) -> list[int]:
    """Count the passes of each number of drafts, each of which is taken by chance."""
    draw, length = random.Random(tokens), DraftLength(Draft(kind=kind, tokens=tokens))
    made, passes = 0, [0] * 8
    while made < num_tokens:
        drafted, taken = length.tokens, 0
        while taken < drafted and draw.random() < chance:
            taken += 1
        passes[drafted] += 1
        if length.compares:
            length.note(1, int(draw.random() < chance))
        else:
            length.note(drafted, taken)
        made += taken + 1
    return passes


def test_passes_are_padded_to_what_is_captured() -> None:
    assert [pass_tokens(tokens) for tokens in range(8)] == [1, 2, 4, 4, 8, 8, 8, 8]
    assert list_pass_sizes(None) == ()
    assert list_pass_sizes(Draft(kind="ngram", tokens=2)) == (2, 4)
    assert most_drafted(Draft(kind="ngram", tokens=4)) == 7


def test_drafts_that_cost_nothing_wait_until_they_would_be_right() -> None:
    length = DraftLength(Draft(kind="ngram", tokens=3))
    for offered, taken in ((0, 0), (1, 1), (1, 0), (1, 1), (0, 0)):
        assert length.compares
        length.note(offered, taken)
        assert length.tokens == 0
    length.note(1, 1)
    assert length.tokens == 3
    length.note(0, 0)  # no draft was found
    assert length.compares


def test_drafts_that_cost_something_are_tried_ever_more_rarely() -> None:
    length, tried = DraftLength(Draft(kind="mtp", tokens=7)), []
    for step in range(300):
        if length.tokens:
            assert length.tokens == 1
            tried.append(step)
        length.note(length.tokens, 0)
    assert tried == [0, 5, 14, 31, 64, 129, 258]


def test_behind_passes_in_vain_the_next_trial_comes_late() -> None:
    length, steps = DraftLength(Draft(kind="mtp", tokens=1)), 0
    length.note(1, 1)
    while length.tokens:
        length.note(1, 0)
    while not length.tokens:
        length.note(0, 0)
        steps += 1
    assert steps == PAUSE_BEHIND


def test_a_trial_that_finds_no_draft_is_followed_by_a_pause() -> None:
    length = DraftLength(Draft(kind="mtp", tokens=3))
    assert length.tokens == 1
    length.note(0, 0)
    assert length.tokens == 0


@pytest.mark.parametrize("tokens", [1, 3, 7])
@pytest.mark.parametrize(("kind", "most"), [("ngram", 0), ("mtp", 5)])
def test_no_draft_is_ever_taken(kind: DraftKind, most: int, tokens: int) -> None:
    """At 128 tokens five passes of one draft, each twice a step at most, cost 1.04 of 127."""
    plain, *drafted = replay(kind, tokens, 0.0, 128)
    assert (plain + sum(drafted), sum(drafted)) == (128, most)


@pytest.mark.parametrize("kind", ["ngram", "mtp"])
def test_drafts_that_are_taken_stay(kind: DraftKind) -> None:
    assert replay(kind, 3, 0.7, 2000)[3] > 0.95 * sum(replay(kind, 3, 0.7, 2000))
    assert replay(kind, 7, 0.9, 2000)[7] > 0.9 * sum(replay(kind, 7, 0.9, 2000))
    few = replay(kind, 7, 0.3, 2000)
    assert few[7] < 0.1 * few[3]


def test_a_text_that_is_no_longer_repeated_ends_in_steps() -> None:
    length = DraftLength(Draft(kind="ngram", tokens=7))
    while length.compares:
        length.note(1, 1)
    for _ in range(10):
        length.note(length.tokens, length.tokens)
    assert length.tokens == 7
    passes = 0
    while length.tokens:
        length.note(length.tokens, 0)
        passes += 1
    assert passes == 15
