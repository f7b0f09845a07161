"""Masks of rows: a matcher says behind each token what may follow, whatever other rules say."""

import random
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from offplan.errors import InputError
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.masks import RowMask
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import Sampling
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from tests.runtime.conftest import save_tiny
from tests.runtime.counting import Counts
from tests.runtime.drafted import PROMPT, Scripted, drafting, open_drafted
from tests.runtime.interrupted import Abort, interrupted_at
from tests.runtime.plans import group, offload, open_session

VOCABULARY = 64
END = 1


class Decoder:
    """A tokenizer of numbers."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(f"{token} " for token in tokens)


def list_allowed(mask: RowMask, length: int, scores: torch.Tensor) -> list[int]:
    """Tokens that a mask leaves behind so many of prompt and text."""
    left = mask(torch.zeros(1, length, dtype=torch.int64), scores)[0] > -torch.inf
    return left.nonzero().flatten().tolist()


def test_only_what_is_allowed_can_be_chosen() -> None:
    mask = RowMask(Counts(12), torch.device("cpu"), prompt_tokens=3)
    scores = torch.zeros(1, VOCABULARY + 8)  # padded beyond the matcher's tokens
    scores[0, 10] = -torch.inf  # another rule bans the only one that is allowed
    assert list_allowed(mask, 3, scores) == [10]
    mask.follow(0, 10)
    mask.follow(0, 10)
    mask.refresh(1)
    assert list_allowed(mask, 4, scores[:, :20]) == [10, 11]
    assert (mask.num_followed, mask.is_over, mask.error) == (1, False, None)


@pytest.mark.slow
def test_rows_follow_their_own_grammars(tmp_path: Path) -> None:
    with open_session(save_tiny("qwen3", tmp_path), offload(group(2, 1))) as session:

        def continue_(*each: Continued) -> list[Any]:
            texts = JoinedTexts(Rows(session, 3))
            ends = dict[Continued, Any]()
            for one in each:
                texts.join([one])
                ends |= dict(texts.step())
            while len(texts):
                ends |= dict(texts.step())
            return [ends.get(one) for one in each]

        def make(num_tokens: int = 30, **fields: Any) -> Continued:
            rules = TokenRules(frozenset([END]), suppress_tokens=(12,))
            return Continued(
                Text(Decoder(), [3, 14, 15], num_tokens=num_tokens, rules=rules), **fields
            )

        plain = make(8)
        continue_(plain)
        beside, first = make(8), Counts(14)
        second = Counts(15)
        formed = make(matcher=first), make(matcher=second, sampling=Sampling(3.0, seed=4))
        continue_(formed[0], beside, formed[1])
        assert beside.made == plain.made
        for each, counts in zip(formed, (first, second), strict=True):
            assert [*dict.fromkeys(each.made)] == [*range(10, counts.last + 1)]
            assert (each.made, each.text.finish) == (counts.taken, "stop")
            assert each.made.count(counts.last) == 1
        cut = make(2, matcher=Counts(14))
        continue_(cut)
        assert (len(cut.made), cut.text.finish) == (2, "length")
        whole = make(1, matcher=Counts(10))
        continue_(whole)
        assert (whole.made, whole.text.finish) == ([10], "stop")
        # the only way on is an end token, since the grammar was left
        hopeless = make(matcher=Counts(14, fails_at=0))
        hopeless.text.rules = TokenRules(frozenset([10]))
        assert isinstance(continue_(hopeless)[0], InputError)
        broken, other = make(matcher=Counts(14, fails_at=2)), make(8)
        (error, _) = continue_(broken, other)
        assert isinstance(error, InputError)
        assert other.made == plain.made


def test_each_place_of_a_pass_has_its_own_mask() -> None:
    counts, scores = Counts(14), torch.zeros(1, VOCABULARY)
    mask = RowMask(counts, torch.device("cpu"), 3, 4)
    for number, token in enumerate([10, 11, 11]):
        mask.follow(number, token)
    assert mask.cut([11, 12]) == []
    assert mask.cut([12, 12, 13, 40]) == [12, 12, 13]
    assert mask.cut([12, 13, 14, 14]) == [12, 13]  # the text ends by the third
    for _ in range(2):
        assert mask.prepare([12, 12, 13, 13]) == 5
        allowed = [list_allowed(mask, 6 + place, scores) for place in range(5)]
        assert allowed == [[12], [12, 13], [13], [13, 14], [14]]
        assert counts.taken == [10, 11, 11]
    for length in (5, 11):  # places that have none
        with pytest.raises(ValueError, match="not in range"):
            list_allowed(mask, length, scores)
    assert len(counts.copies) == 1
    mask.follow(3, 12)
    mask.refresh(4)
    assert list_allowed(mask, 7, scores) == [12, 13]
    with pytest.raises(ValueError, match="not in range"):
        list_allowed(mask, 8, scores)
    assert mask.prepare([13]) == 2
    assert list_allowed(mask, 8, scores) == [13, 14]
    counts.copies[0].fails_at = 6  # a limit that drafts meet on their way
    assert mask.prepare([12, 13, 13]) == 2
    assert mask.prepare([12, 13, 13]) == 4
    assert (len(counts.copies), mask.error, counts.taken) == (2, None, [10, 11, 11, 12])


def test_a_grammar_that_does_not_go_back_has_no_drafts() -> None:
    class Onwards(Counts):
        def rollback(self, num_tokens: int) -> bool:
            return False

    assert not RowMask(Onwards(14), torch.device("cpu"), 3, 4).can_go_back
    assert not RowMask(Counts(14), torch.device("cpu"), 3).can_go_back
    assert RowMask(Counts(14), torch.device("cpu"), 3, 4).can_go_back


LAST = 26
ENDED = TokenRules(frozenset([END]), suppress_tokens=(END,))
DRAFTED: dict[str, dict[str, Any]] = {
    "greedy": {"rules": ENDED},
    "drawn": {"rules": ENDED, "sampling": Sampling(3.0, seed=4)},
    "penalties": {
        "rules": replace(ENDED, repetition_penalty=1.6, logit_bias=((12, 4.0), (17, -2.0))),
        "sampling": Sampling(2.0, top_p=0.9, seed=7),
    },
    "logprobs": {"rules": ENDED, "num_logprobs": 2},
}


def continue_counting(
    session: Session,
    counts: Counts | None,
    script: Sequence[int] = (),
    right: Sequence[bool] = (),
    **given: Any,
) -> tuple[Continued, list[Any]]:
    """Continue a text by a grammar; drafts are of a script, where some are right."""
    make = partial(Scripted, [*PROMPT, *script], right) if right else None
    texts, added = JoinedTexts(Rows(session, 1), make_drafter=make), list[Any]()
    text = Text(Decoder(), PROMPT, num_tokens=30, rules=given.pop("rules", ENDED))
    each = Continued(text, matcher=counts, **given)
    texts.join([each])
    while len(texts):
        added += [made for _, made in texts.step()]
    assert texts.num_free == 1
    return each, added


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_text_with_a_grammar_is_the_same_whatever_is_drafted(tmp_path: Path, device: str) -> None:
    folder, decision = save_tiny("qwen3_wide", tmp_path), offload(group(2, 1))
    with open_drafted(folder, decision, device=device) as session:
        alone = {
            way: continue_counting(session, Counts(LAST), **given) for way, given in DRAFTED.items()
        }
    expected = {way: each.made for way, (each, _) in alone.items()}
    assert len({tuple(made) for made in expected.values()}) == len(DRAFTED) - 1
    with open_drafted(folder, drafting(decision), device=device) as session:
        for way, given in DRAFTED.items():
            for right in ([True], [False], [True, True, True, False, True, True, False]):
                counts = Counts(LAST)
                each, added = continue_counting(session, counts, expected[way], right, **given)
                assert each.made == expected[way] == counts.taken
                assert each.text.finish == "stop"
                assert each.drafts is not None
                assert (each.drafts.accepted > 5) == right[0]
                if all(right):
                    assert (each.drafts.rejected, each.drafts.num_behind) == (0, 0)
                for ours, theirs in zip(added, alone[way][1], strict=True):
                    for scored, other in zip(ours.likeliest, theirs.likeliest, strict=True):
                        assert scored.logprob == pytest.approx(other.logprob, abs=1e-4)
        # a draft that the grammar forbids costs no pass
        forbidden, _ = continue_counting(session, Counts(LAST), [40] * 30, [True])
        assert forbidden.made == expected["greedy"]
        assert forbidden.drafts is not None
        assert forbidden.drafts.num_passes == 0
        # and texts without grammars are drafted beside them
        plain, _ = continue_counting(session, None)
        again, _ = continue_counting(session, None, plain.made, [True])
        assert again.made == plain.made
        assert again.drafts.accepted > 5


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 7])
def test_what_a_grammar_forces_is_drafted(tmp_path: Path, tokens: int) -> None:
    folder, decision = save_tiny("qwen3", tmp_path), drafting(offload(group(2, 1)), tokens)
    with open_drafted(folder, decision) as session:
        each, added = continue_counting(session, Counts(LAST, often=1))
        assert each.made == [*range(10, LAST + 1)]
        assert [made.finish for made in added] == [None] * (LAST - 10) + ["stop"]
        assert each.drafts is not None
        passes = -(-(LAST - 10) // (tokens + 1))
        # one token is of the prompt's pass, and one is on its way when the text begins
        assert each.drafts.num_passes <= passes
        assert (each.drafts.rejected, each.drafts.num_behind) == (0, 0)
        assert each._drafting is not None
        assert not each._drafting.wants_pass  # they tell nothing of the drafter
        assert len(each.drafts.offered) == tokens


class Frail(Counts):
    """A matcher whose copies meet a limit that the text does not."""

    def deep_copy(self) -> Counts:
        made = super().deep_copy()
        made.fails_at = len(self.taken) + 3
        return made


@pytest.mark.slow
def test_limits_that_drafts_meet_end_no_text_before_its_time(tmp_path: Path) -> None:
    folder, decision = save_tiny("qwen3", tmp_path), offload(group(2, 1))
    with open_drafted(folder, decision) as session:
        expected = continue_counting(session, Counts(LAST))[0].made
        alone = {at: continue_counting(session, Counts(LAST, at)) for at in range(1, 16)}
    with open_drafted(folder, drafting(decision)) as session:
        each, added = continue_counting(session, Frail(LAST), expected, [True])
        assert (each.made, each.text.finish) == (expected, "stop")
        assert each.drafts is not None
        assert each.drafts.accepted > 5
        for at, (each, added) in alone.items():
            ours, made = continue_counting(session, Counts(LAST, at), expected, [True])
            assert ours.made == each.made == expected[: at - 1]
            assert [type(one) for one in made] == [type(one) for one in added]
            assert isinstance(made[-1], InputError)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_an_aborted_pass_leaves_the_text_and_its_grammar(tmp_path: Path, seed: int) -> None:
    """At any line before the row takes tokens: drawing goes back, too."""
    folder, decision = save_tiny("qwen3", tmp_path), offload(group(2, 1))
    given = DRAFTED["penalties"]
    with open_drafted(folder, decision) as session:
        expected = continue_counting(session, Counts(LAST), **given)[0].made
    draw, right = random.Random(seed), [True, True, False, True, True]
    taking = list[str]()

    def noting(name: str) -> Any:
        own = getattr(Rows, name)

        def note(*arguments: Any, **named: Any) -> Any:
            taking.append(name)
            return own(*arguments, **named)

        return patch.object(Rows, name, note)

    num_aborted, num_lines = 0, 0
    opened = open_drafted(folder, drafting(decision))
    with opened as session, noting("take"), noting("extend"):
        for _ in range(8):
            script = partial(Scripted, [*PROMPT, *expected], right)
            texts, counts = JoinedTexts(Rows(session, 1), make_drafter=script), Counts(LAST)
            text = Text(Decoder(), PROMPT, num_tokens=30, rules=given["rules"])
            each = Continued(text, given["sampling"], matcher=counts)
            texts.join([each])
            while len(texts):
                number = draw.randint(1, num_lines) if num_lines and not texts._chosen else 0
                taking.clear()
                try:
                    with interrupted_at(number) as lines:
                        list(texts.step())
                except Abort:
                    if taking:
                        texts.leave(each)
                        break
                    num_aborted += 1
                    is_same = counts.taken == each.made == expected[: len(each.made)]
                    assert is_same, lines
                else:
                    num_lines = max(num_lines, lines[0])
            else:
                assert each.made == counts.taken == expected
    assert num_aborted > 8
