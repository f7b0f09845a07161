"""Masks of rows: a matcher says behind each token what may follow, whatever other rules say."""

from pathlib import Path
from typing import Any

import pytest
import torch

from offplan.errors import InputError
from offplan.runtime.joined import Continued, JoinedTexts
from offplan.runtime.masks import RowMask
from offplan.runtime.rows import Rows
from offplan.runtime.rules import TokenRules
from offplan.runtime.sampling import Sampling
from offplan.runtime.texts import Text
from tests.runtime.conftest import save_tiny
from tests.runtime.drafted import Scripted, drafting, open_drafted
from tests.runtime.plans import group, offload, open_session

VOCABULARY = 64
END = 1


class Counts:
    """A matcher of the tokens 10, 11, ... up to a last one, each once or twice."""

    def __init__(self, last: int, fails_at: int | None = None) -> None:
        self.last, self.fails_at = last, fails_at
        self.taken, self.asked = list[int](), 0

    @property
    def _at(self) -> int:
        return self.taken[-1] if self.taken else 9

    def consume_token(self, token: int) -> bool:
        self.taken.append(token)
        return not self.is_error()

    def compute_bitmask(self) -> bytes:
        self.asked += 1
        again = [self._at] if self.taken and self.taken[-2:] != [self._at] * 2 else []
        return sum(1 << token for token in [*again, self._at + 1]).to_bytes(8, "little")

    def is_stopped(self) -> bool:
        return self._at >= self.last or self.is_error()

    def is_error(self) -> bool:
        return self.fails_at is not None and len(self.taken) >= self.fails_at


class Decoder:
    """A tokenizer of numbers."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return "".join(f"{token} " for token in tokens)


def test_only_what_is_allowed_can_be_chosen() -> None:
    mask = RowMask(Counts(12), torch.device("cpu"))
    scores = torch.zeros(1, VOCABULARY + 8)  # padded beyond the matcher's tokens
    scores[0, 10] = -torch.inf  # another rule bans the only one that is allowed
    assert (mask(scores, scores)[0] > -torch.inf).nonzero().flatten().tolist() == [10]
    mask.follow(0, 10)
    mask.follow(0, 10)
    mask.refresh()
    allowed = mask(scores[:, :20], scores[:, :20])[0] > -torch.inf
    assert allowed.nonzero().flatten().tolist() == [10, 11]
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


@pytest.mark.slow
def test_a_text_with_a_grammar_is_not_drafted(tmp_path: Path) -> None:
    """Drafts that its mask has not seen would pass what the grammar forbids."""
    folder = save_tiny("qwen3", tmp_path)
    rules = TokenRules(frozenset([END]))
    with open_drafted(folder, drafting(offload(group(2, 1)))) as session:
        forbidden = Scripted([40] * 30, [True])
        texts = JoinedTexts(Rows(session, 1), make_drafter=lambda: forbidden)
        counts = Counts(15)
        formed = Continued(Text(Decoder(), [3, 14, 15], num_tokens=30, rules=rules), matcher=counts)
        texts.join([formed])
        while len(texts):
            assert all(not isinstance(each, InputError) for _, each in texts.step())
        assert formed.made == counts.taken
        assert [*dict.fromkeys(formed.made)] == [*range(10, 16)]
        assert forbidden._num_taken == 0
