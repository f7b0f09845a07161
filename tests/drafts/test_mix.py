"""The passes of a text are those that the rule of drafts begins."""

import pytest

from offplan.capabilities.drafts import Draft
from offplan.drafts.acceptance import AcceptanceProfile
from offplan.drafts.length import DraftLength
from offplan.drafts.mix import ONE_BY_ONE, find_mix
from tests.drafts import MODEL

THREE = Draft(kind="ngram", tokens=3)


def known(chance: float, draft: Draft = THREE) -> AcceptanceProfile:
    return AcceptanceProfile.of_chance(draft, MODEL, chance)


def test_without_drafts_each_pass_gives_a_token() -> None:
    assert find_mix(None, known(1.0), 100) is ONE_BY_ONE
    assert find_mix(THREE, known(1.0), 0) is ONE_BY_ONE
    # nothing is known of them, so that none is taken
    assert find_mix(THREE, None, 100).tokens == 1


def test_where_all_are_taken_passes_are_those_of_the_rule() -> None:
    """Written out: the rule is asked, and every draft is right."""
    for draft, num_tokens in ((THREE, 64), (Draft(kind="ngram", tokens=7), 33)):
        length, left, sizes = DraftLength(draft), num_tokens, []
        while left > 0:
            drafted = length.tokens
            length.note(1 if length.compares else drafted, 1 if length.compares else drafted)
            sizes.append(1 + drafted)
            left -= 1 + drafted
        mix = find_mix(draft, known(1.0, draft), num_tokens)
        assert dict(mix.shares) == {n: sizes.count(n) / len(sizes) for n in set(sizes)}
        assert mix.tokens == pytest.approx(sum(sizes) / len(sizes))


@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.9])
def test_tokens_of_a_pass_are_the_expected(chance: float) -> None:
    """A pass of T tokens gives 1 + p + ... + p^(T - 1), once it drafts."""
    mix = find_mix(THREE, known(chance), 1000)
    shares = dict(mix.shares)
    assert sum(shares.values()) == pytest.approx(1)
    given = {size: sum(chance**n for n in range(size)) for size in shares}
    expected = sum(share * given[size] for size, share in shares.items())
    assert mix.tokens == pytest.approx(expected, rel=0.06)


def test_more_taken_gives_more() -> None:
    tokens = [find_mix(THREE, known(chance), 127).tokens for chance in (0, 0.2, 0.5, 0.8, 1)]
    assert tokens == sorted(tokens)


def test_pauses_are_as_long_as_their_steps_were_wrong() -> None:
    profile = known(0.8)
    seldom = profile.model_copy(update={"steps": 1000, "right": 50})
    assert find_mix(THREE, seldom, 127).tokens < find_mix(THREE, profile, 127).tokens / 1.5
