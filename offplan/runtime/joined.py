"""Texts that are continued together: each joins and leaves between two steps of the others."""

import math
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from typing import Literal, NamedTuple

import torch

from offplan.capabilities.drafts import MOST_DRAFTED
from offplan.drafts.counts import DraftCounts
from offplan.drafts.drafter import Drafter
from offplan.drafts.drafting import Drafting, count_taken
from offplan.errors import InputError, NotANumberError
from offplan.runtime.generate import Arrival, Measured
from offplan.runtime.masks import Matcher, RowMask
from offplan.runtime.rows import Rows
from offplan.runtime.sampling import (
    NO_TOKEN,
    Checking,
    Choose,
    Sampling,
    check_tokens,
    choose_likeliest,
    make_ruled_chooser,
    mark_nan,
)
from offplan.runtime.texts import Text

_NUM_HOSTS = 4
"""Passes whose tokens may be on their way at a time without an allocation."""


class Scored(NamedTuple):
    """A token, and the logarithm of its probability before temperature and other rules."""

    token: int
    logprob: float


_Scores = tuple[torch.Tensor, torch.Tensor]
"""Logarithms of a token and of the likeliest in its place, and which these are."""


@dataclass(frozen=True)
class Added:
    """The piece that one token added to a text."""

    text: Text
    piece: str
    """Text that has become certain; may be empty."""
    token: int
    scored: Scored | None
    """The token with its logarithm, where the text was to have them."""
    likeliest: Sequence[Scored]
    """The likeliest tokens in its place, the likeliest first."""
    finish: Literal["stop", "length"] | None
    """Reason that the text ended with this token, as ``Text.finish`` has it; None while it goes
    on."""
    prompt_scores: Sequence[Sequence[Scored]] = ()
    """Tokens of the prompt from the second on, each before the likeliest in its place; empty but
    for a text's first token, where the text was to have them."""
    drafts: DraftCounts | None = None
    """Counts of the text's drafts up to this token; None if the plan has none."""


Outcome = Added | InputError | NotANumberError
"""A token of a text, or the error by which the text has left in place of one."""


@dataclass(eq=False)
class Continued:
    """A text, and how it is continued."""

    text: Text
    sampling: Sampling | None = None
    """Way in which its tokens are drawn; None for greedily."""
    num_logprobs: int | None = None
    """Likeliest tokens to tell beside the one that was made; None tells no logarithms."""
    number: int | None = None
    """Number that is added to the seed of ``sampling``; None for the text's own."""
    owner: Hashable = None
    """Whose text it is: it goes on from the cache of no other owner's text."""
    scores_prompt: bool = False
    """True to tell the same of the prompt's tokens, whose logits the prompt's pass then makes."""
    matcher: Matcher | None = None
    """Grammar that the text follows, at its beginning; None for none."""
    num_read: int = field(default=0, init=False)
    """Tokens of the prompt that a pass read; the cache had the others."""
    made: list[int] = field(default_factory=list, init=False)
    """Tokens that the host has."""
    _row: int | None = field(default=None, init=False)
    """The row of the cache; None before the text joins, and once it needs none."""
    _choose: Choose = field(default=choose_likeliest, init=False)
    _mask: RowMask | None = field(default=None, init=False)
    _prompt_scores: list["_Scores"] = field(default_factory=list, init=False)
    """Scores of the prompt's tokens, on the device until the first token is taken."""
    _num_chosen: int = field(default=0, init=False)
    """Tokens that the device has chosen; the host may not have them yet."""
    _drafting: Drafting | None = field(default=None, init=False)
    """Drafts the text's tokens; None if the plan has no drafts."""

    @property
    def drafts(self) -> DraftCounts | None:
        """Counts of its drafts so far; None if the plan has none."""
        return None if self._drafting is None else self._drafting.counts


@dataclass(frozen=True)
class _Chosen:
    """Tokens that were chosen by one pass, on their way to the host."""

    texts: Mapping[int, Continued]
    """The texts that they are of, by their rows."""
    arrival: Arrival
    scores: Mapping[Continued, _Scores]
    began_s: float | None
    """Time at which their prompts were begun, by ``perf_counter``; None for a step's."""


class JoinedTexts:
    """Continues texts, a token of each at a time; one thread may use it.

    Each text draws from random numbers of its own. Its logits are those that it has alone up to the
    order of sums, which depends on how many rows a pass has. In float32 the difference stands in
    the last bits, and tokens are the same but for ties. In a shorter type tokens may differ with
    the number of rows. A text is the same bit for bit, whatever it is beside, under three
    conditions. There is one number of rows (``sizes=()`` of ``Rows``). All weights are resident,
    and the host's cores multiply none. Its prompt is read alone and as a whole.

    Runs on the session's stream. The next step is queued before the tokens of the last one are
    read, so that the device is not kept waiting for the host. A pass that checks drafts is queued
    once the host has the tokens before it.
    """

    def __init__(
        self,
        rows: Rows,
        measured: Measured | None = None,
        *,
        make_drafter: Callable[[], Drafter] | None = None,
    ) -> None:
        """Continue texts in ``rows``, which nobody else uses meanwhile.

        ``measured`` is filled: the prompt's figures are of those that join at first, the steps
        those of all. ``make_drafter`` makes another drafter than a plan's, for each text.
        """
        self._make_drafter = make_drafter or rows.make_drafter
        self._rows, self._session, self._measured = rows, rows.session, measured
        self._joined: dict[Continued, None] = {}
        self._chosen: deque[_Chosen] = deque()
        self._last_s = 0.0
        """Time at which the last tokens arrived."""
        # page-locked once: a later allocation would wait for the device
        self._hosts = cycle([self._make_host() for _ in range(_NUM_HOSTS)])
        self._checked = self._make_host(1 + MOST_DRAFTED)
        with self._session.stream():
            self._tokens = torch.zeros(
                rows.num_rows, 1, dtype=torch.int64, device=self._session.device
            )
        """The last token of each row, int64 of [rows, 1]."""

    @property
    def num_rows(self) -> int:
        """Texts that can be continued at a time."""
        return self._rows.num_rows

    @property
    def num_free(self) -> int:
        """Texts that may join."""
        return self._rows.num_free

    def __len__(self) -> int:
        """Count the texts that have joined, and have not ended."""
        return len(self._joined)

    def join(self, texts: Sequence[Continued]) -> None:
        """Read the prompts of texts together; ``step`` tells their first tokens.

        Raises what ``Rows.join_all`` raises; then none of them has joined, and ``find_lost`` says
        which of the others are gone, too.
        """
        began, moved = time.perf_counter(), self._session.link_bytes
        for each in texts:
            if each.scores_prompt:
                self._score_prompt(each)
        joined = self._rows.join_all(
            [each.text.prompt for each in texts], [each.owner for each in texts]
        )
        try:
            with self._session.stream(), torch.inference_mode():
                for each, (row, _, num_read) in zip(texts, joined, strict=True):
                    each._row = row
                    each.num_read = len(each.text.prompt) if each.scores_prompt else num_read
                    self._joined[each] = None
                    each._choose = self._make_chooser(each)
                    draft, mask = self._session.draft, each._mask
                    if draft is not None and (mask is None or mask.can_go_back):
                        each._drafting = Drafting(draft, each.text.prompt, self._make_drafter)
                logits = joined[0].logits.new_zeros(self._rows.num_rows, len(joined[0].logits))
                for row, each_logits, _ in joined:
                    logits[row] = each_logits
            self._choose(
                {row: each for each, (row, _, _) in zip(texts, joined, strict=True)}, logits, began
            )
        except BaseException:
            for each, (row, *_) in zip(texts, joined, strict=True):
                each._row = row  # which the loop may not have come to
                self.leave(each)
            raise
        if self._measured is not None and not self._measured.prefill_link_bytes:
            self._measured.prefill_link_bytes = self._session.link_bytes - moved

    def step(self) -> Iterator[tuple[Continued, Outcome]]:
        """Queue the next token of each text, and yield the tokens that were queued before.

        A text that has ended leaves. So does a text whose logits are NaN, or that cannot follow its
        grammar: an error stands in place of the token. Raises what ``Rows.extend`` and
        ``Rows.check`` raise; ``find_lost`` says which texts are gone then. Where a pass is to check
        drafts, the tokens before it are yielded first, and then those that it made.
        """
        if (drafting := self._find_drafting()) is not None:
            yield from self.flush()
            drafts = self._propose(drafting)
            if drafts:
                yield from self._check(drafting, drafts)
                return
        going = {each._row: each for each in self._joined if each._row is not None}
        num_queued = len(self._chosen)
        if going:
            moved = self._session.link_bytes
            logits = self._rows.extend([*going], self._tokens)
            self._choose(going, logits, None)
            if self._measured is not None:
                self._measured.decode_link_bytes += self._session.link_bytes - moved
                self._measured.num_decodes += 1
        for _ in range(num_queued):
            yield from self._take(self._chosen.popleft())

    def _find_drafting(self) -> Continued | None:
        """Find the one text whose next pass is to check drafts."""
        each = next(iter(self._joined), None)
        if each is None or each._row is None or each._drafting is None:
            return None
        mask = each._mask
        is_forced = mask is not None and mask.count_forced(each._num_chosen) > 0
        return each if each._drafting.wants_pass or is_forced else None

    def _propose(self, each: Continued) -> list[int]:
        """Return the drafts of a text's next pass, all of whose tokens the host has."""
        row, drafting = each._row, each._drafting
        if each not in self._joined or row is None or drafting is None:
            return []  # it has ended
        left = each.text.num_tokens - each._num_chosen
        return drafting.propose(min(self._rows.count_checked(row), left) - 1, each._mask)

    def _check(self, each: Continued, drafts: list[int]) -> Iterator[tuple[Continued, Outcome]]:
        """Check drafts by one pass, and yield the tokens that it makes."""
        assert each._drafting is not None
        made, scores, now = self._make_checked(each, drafts)
        each._drafting.take_pass(len(drafts), made)
        each._num_chosen += len(made)
        if self._measured is not None:
            self._measured.drafts.note(len(drafts), len(made) - 1)
            self._measured.step_s += [(now - self._last_s) / len(made)] * len(made)
        self._last_s = now
        if each._num_chosen == each.text.num_tokens:
            self._free_row(each)  # nothing follows its last token
        for place, token in enumerate(made):
            if each not in self._joined:  # it ended, or left, before this token
                return
            added = self._add(each, token, scores[place] if scores else [])
            if each.text.finish is not None:
                each._drafting.counts.num_behind += max(0, len(made) - 2 - place)
            yield each, added

    def _make_checked(
        self, each: Continued, drafts: list[int]
    ) -> tuple[list[int], list[list[Scored]], float]:
        """Run a pass that checks drafts; return its tokens, their scores, and when they arrived."""
        row, moved = each._row, self._session.link_bytes
        assert row is not None
        checking = Checking(each._choose)
        try:
            logits = self._rows.check(row, [each.made[-1], *drafts])
            with self._session.stream(), torch.inference_mode():
                if each._mask is not None:  # whose masks are made while the pass runs
                    logits = logits[: each._mask.prepare(drafts)]
                tokens = checking.choose(logits)
                arrival = Arrival(mark_nan(tokens, logits), self._checked[: len(logits)])
            if self._measured is not None:
                self._measured.decode_link_bytes += self._session.link_bytes - moved
                self._measured.num_decodes += 1
            arrived, now = arrival.wait()
            self._session.check()
            chosen: list[int] = arrived.tolist()
            made = chosen[: count_taken(drafts, chosen) + 1]
            scores = []
            with self._session.stream(), torch.inference_mode():
                if each.num_logprobs is not None:
                    scores = _read_scores(
                        _score(logits[: len(made)], tokens[: len(made)], each.num_logprobs)
                    )
                checking.keep(len(made))
                taken = self._tokens.clone()  # the rows keep the one before
                taken[row] = tokens[len(made) - 1]
            # drafts behind the last mask may have any logits
            has_nan = NO_TOKEN in chosen or len(chosen) <= len(drafts)
            self._rows.take(row, 1 + len(drafts), len(made), has_nan=has_nan)
        except BaseException:
            checking.keep(0)  # the text goes on as if no pass had been, if its row does
            raise
        self._tokens = taken
        return made, scores, now

    def flush(self) -> Iterator[tuple[Continued, Outcome]]:
        """Yield the tokens that were queued before, as ``step`` does, and queue none."""
        while self._chosen:
            yield from self._take(self._chosen.popleft())

    def find_lost(self) -> list[Continued]:
        """Take out the texts whose rows are gone after a call that raised; return them."""
        in_use = self._rows.in_use
        lost = [each for each in self._joined if each._row is not None and each._row not in in_use]
        for each in lost:
            self.leave(each)
        return lost

    def explain_nan(self, each: Continued, cause: str = "") -> NotANumberError:
        """Return the error of a text that left by a NaN; finds its layer without a ``cause``."""
        cause = cause or self._rows.find_nan([*each.text.prompt, *each.made])
        return NotANumberError(cause, [each.text.number], [f"text {each.text.number}"])

    def leave(self, each: Continued) -> None:
        """Take a text out, if it is there."""
        self._joined.pop(each, None)
        self._free_row(each)

    def _free_row(self, each: Continued) -> None:
        row, each._row = each._row, None
        if row is not None and row in self._rows.in_use:
            self._rows.leave(row)

    def _score_prompt(self, each: Continued) -> None:
        """Read a prompt into the row that it joins next, and score all of its tokens."""
        prompt, num_seen = each.text.prompt, 0
        with self._session.stream():
            tokens = torch.tensor([*prompt[1:], 0]).to(self._session.device)
        each._prompt_scores = []

        def see(logits: torch.Tensor) -> None:
            nonlocal num_seen
            following = tokens[num_seen : num_seen + len(logits), None]
            num_seen += len(logits)
            each._prompt_scores.append(_score(logits, following, each.num_logprobs or 0))

        self._rows.score(prompt, each.owner, see)

    def _make_chooser(self, each: Continued) -> Choose:
        text, device = each.text, self._session.device
        processors = text.rules.make_processors(len(text.prompt), device)
        if each.matcher is not None:
            most = 0 if self._session.draft is None else self._session.draft.tokens
            each._mask = RowMask(each.matcher, device, len(text.prompt), most)
            processors.append(each._mask)  # the last one: no other rule allows what it does not
        number = text.number if each.number is None else each.number
        return make_ruled_chooser(
            processors, text.prompt, text.num_tokens, each.sampling, number, device
        )

    def _choose(
        self, texts: Mapping[int, Continued], logits: torch.Tensor, began_s: float | None
    ) -> None:
        """Choose the next token of texts, by their rows of the logits, [rows, vocabulary]."""
        scores = {}
        with self._session.stream(), torch.inference_mode():
            self._follow(texts)
            tokens = choose_likeliest(logits, ())
            for row, each in texts.items():
                if each._choose is not choose_likeliest:
                    of_row = logits[row : row + 1]
                    chosen = each._choose(of_row, (0,))
                    check_tokens(chosen, of_row)
                    tokens[row] = chosen[0]
                each._num_chosen += 1
                if each.num_logprobs is not None:
                    scores[each] = _score(
                        logits[row : row + 1], tokens[row : row + 1], each.num_logprobs
                    )
            arrival = Arrival(mark_nan(tokens, logits), self._find_host()[: len(tokens)])
            if not self._rows.in_use <= texts.keys():  # others wait for a step with their last one
                kept = self._tokens.clone()  # the rows keep the one before
                for row in texts:
                    kept[row] = tokens[row]
                tokens = kept
            self._tokens = tokens
        self._chosen.append(_Chosen(texts, arrival, scores, began_s))
        for each in texts.values():
            if each._num_chosen == each.text.num_tokens:
                self._free_row(each)  # nothing follows its last token

    def _follow(self, texts: Mapping[int, Continued]) -> None:
        """Bring the masks of texts to their last tokens, while the pass behind them runs.

        Waits for these tokens, which the pass before chose; for no token of other texts.
        """
        for row, each in texts.items():
            if (mask := each._mask) is None:
                continue
            if mask.num_followed < each._num_chosen:
                last = next(made for made in reversed(self._chosen) if made.texts.get(row) is each)
                token = int(last.arrival.wait()[0][row])
                if token != NO_TOKEN and token not in each.text.rules.end_tokens:
                    mask.follow(each._num_chosen - 1, token)
            mask.refresh(each._num_chosen)

    def _make_host(self, num_tokens: int | None = None) -> torch.Tensor:
        on_gpu = self._session.device.type == "cuda"
        size = self._rows.num_rows if num_tokens is None else num_tokens
        return torch.empty(size, dtype=torch.int64, pin_memory=on_gpu)

    def _find_host(self) -> torch.Tensor:
        """Return memory for a pass's tokens that holds none which nobody has read."""
        return next(self._hosts) if len(self._chosen) < _NUM_HOSTS else self._make_host()

    def _take(self, chosen: _Chosen) -> Iterator[tuple[Continued, Outcome]]:
        tokens, now = chosen.arrival.wait()
        self._session.check()
        if self._measured is not None:
            if chosen.began_s is None:
                self._measured.step_s.append(now - self._last_s)
            elif not self._measured.first_token_s:
                self._measured.first_token_s = now - chosen.began_s
        self._last_s, made = now, tokens.tolist()
        for row, each in chosen.texts.items():
            if each in self._joined:  # else it ended, or left, when this token was queued already
                if each._drafting is not None:
                    is_right = each._drafting.take_step(made[row])
                    if is_right is not None and self._measured is not None:
                        self._measured.drafts.note_step(is_right=is_right)
                scores: list[Scored] = []
                if each in chosen.scores:
                    (scores,) = _read_scores(chosen.scores[each])
                yield each, self._add(each, made[row], scores)

    def _add(self, each: Continued, token: int, scores: Sequence[Scored]) -> Outcome:
        """Add a token to a text; ``scores`` are its own and those of the likeliest, if any."""
        text, mask = each.text, each._mask
        before, each._prompt_scores = each._prompt_scores, []
        of_prompt = [scored for part in before for scored in _read_scores(part)][:-1]
        if token == NO_TOKEN or any(math.isnan(first.logprob) for first, *_ in of_prompt):
            self.leave(each)
            return self.explain_nan(each, "its layer is not known")
        if mask is not None:
            if token not in text.rules.end_tokens:
                mask.follow(len(each.made), token)
            if mask.error is not None:  # an end token may have been all that was left
                self.leave(each)
                return mask.error
        each.made.append(token)
        piece = text.add(token, is_last=mask is not None and mask.is_over)
        if text.finish is not None:
            self.leave(each)
        first, likeliest = (scores[0], scores[1:]) if scores else (None, ())
        return Added(text, piece, token, first, likeliest, text.finish, of_prompt, each.drafts)


def _score(logits: torch.Tensor, tokens: torch.Tensor, num_likeliest: int) -> _Scores:
    """Score tokens, [tokens, 1], by their logits, [tokens, vocabulary], beside the likeliest."""
    logarithms = logits.log_softmax(-1, dtype=torch.float32)
    values, names = logarithms.topk(min(num_likeliest, logits.shape[-1]))
    return torch.cat((logarithms.gather(1, tokens), values), 1), torch.cat((tokens, names), 1)


def _read_scores(scores: _Scores) -> list[list[Scored]]:
    values, names = scores
    return [[*map(Scored, *each)] for each in zip(names.tolist(), values.tolist(), strict=True)]


def generate_texts(
    rows: Rows,
    texts: Iterable[Text],
    sampling: Sampling | None = None,
    measured: Measured | None = None,
) -> Iterator[tuple[Text, str]]:
    """Continue texts, as many at a time as there are ``rows``; yield one with what a token adds.

    A text begins in the row that another has left, while those beside it go on. ``measured`` is
    filled: the prompt's figures are of the texts that begin together at first, the steps those of
    all. Raises what ``Rows.join_all`` and ``Rows.extend`` raise. Raises NotANumberError if a text's
    logits are NaN: no text begins from there on, and those beside it are made first.
    """
    for each, added in continue_texts(
        rows, [Continued(text, sampling) for text in texts], measured
    ):
        yield each.text, added.piece


class _NoWords:
    """The tokenizer of a text that nobody reads."""

    def decode(self, *_: object, **__: object) -> str:
        return ""


def continue_tokens(
    rows: Rows,
    prompt: Sequence[int],
    num_tokens: int,
    sampling: Sampling | None = None,
    measured: Measured | None = None,
) -> Iterator[int]:
    """Yield the ``num_tokens`` tokens that follow a prompt, as ``generate_texts`` makes them."""
    text = Text(_NoWords(), prompt, num_tokens=num_tokens)
    for _, added in continue_texts(rows, [Continued(text, sampling)], measured):
        yield added.token


def continue_texts(
    rows: Rows, texts: Iterable[Continued], measured: Measured | None = None
) -> Iterator[tuple[Continued, Added]]:
    """Do what ``generate_texts`` does with texts that are each continued in their own way."""
    together = JoinedTexts(rows, Measured() if measured is None else measured)
    waiting, failed = deque(texts), list[Continued]()

    def take(
        told: Iterable[tuple[Continued, Outcome]],
    ) -> Iterator[tuple[Continued, Added]]:
        for each, added in told:
            if isinstance(added, Added):
                yield each, added
            else:
                failed.append(each)

    while waiting or len(together):
        yield from take(together.step())
        if failed:
            waiting.clear()
        if waiting and together.num_free:
            yield from take(together.flush())  # or a prompt would count as a step's time
            count = min(len(waiting), together.num_free)
            together.join([waiting.popleft() for _ in range(count)])
    if failed:
        cause = together.explain_nan(failed[0]).cause
        numbers = [each.text.number for each in failed]
        raise NotANumberError(cause, numbers, [f"text {number}" for number in numbers])
