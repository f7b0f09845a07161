"""Texts of unlike lengths that are generated together: a row of the cache for each."""

import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from offplan.capabilities.drafts import list_pass_sizes, pass_tokens
from offplan.drafts.drafter import Drafter
from offplan.errors import InputError
from offplan.runtime.faults import memory_limits
from offplan.runtime.passes.chunks import Reading
from offplan.runtime.passes.runner import Predicts
from offplan.runtime.prediction.drafter import PredictionDrafter
from offplan.runtime.session import NUM_WARMUP_STEPS, Session


class Joined(NamedTuple):
    """A text that has just been given a row."""

    row: int
    """The row of the cache, from 0 on, by which ``Rows`` knows the text from here on."""
    logits: torch.Tensor
    """Logits that follow the prompt, [vocabulary], on the device, the caller's own."""
    tokens_read: int
    """Tokens of the prompt that the pass read; the row's cache had the others already."""


@dataclass
class _Row:
    """The content of a row of the cache."""

    tokens: list[int | torch.Tensor] = field(default_factory=list)
    """Its tokens; the last ones the host may not have read: each of one element, on the device."""
    owner: Hashable = None
    """Whose text it is: no other owner's prompt goes on from it."""
    in_use: bool = False
    num_begun: int = 0
    """Tokens of the prompt that it joined with, from whose end its checkpoint is."""
    is_at_end: bool = True
    """True if its rings and states are those behind its last token, and not gone."""
    left: int = 0
    """Number of its last text among those that left."""

    @property
    def length(self) -> int:
        """Tokens that it holds."""
        return len(self.tokens)

    def known_tokens(self) -> list[int]:
        """Return its first tokens, as many as the host has read."""
        known = len(self.tokens)
        while known and isinstance(self.tokens[known - 1], torch.Tensor):
            known -= 1
        return cast(list[int], self.tokens[:known])

    def read_tokens(self) -> list[int]:
        """Return its tokens; waits for the device where there are some that were not read."""
        known = len(self.known_tokens())
        if fed := cast(list[torch.Tensor], self.tokens[known:]):
            self.tokens[known:] = torch.cat([each.view(1) for each in fed]).tolist()
        return cast(list[int], self.tokens)

    def forget(self) -> None:
        """Hold nothing, for a text to come."""
        self.tokens, self.in_use = [], False

    def fall_back(self) -> None:
        """Hold no more than the checkpoint is of."""
        del self.tokens[self.num_begun :]
        self.is_at_end = False


class _OneText:
    """Passes of a runner whose caches have one length, as those of one row."""

    keeps_more = False
    goes_back, one_row, renewal = False, "caches of transformers' own, which have one length", 0
    chunk, length = sys.maxsize, 0

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.cache = self

    def regime(self, num_tokens: int) -> int:
        """Tell a prompt from the text before it: all of a prompt is read."""
        return num_tokens

    def step_regime(self, length: int) -> None:
        """Say nothing of the one text."""

    def captures_prompt(self, batch: int, num_tokens: int) -> bool:
        """Say whether a prompt is captured."""
        return bool(self._runner.captures_prompt(batch, num_tokens))

    def begin_at(self, common: int, length: int) -> int:
        """Go on from nothing."""
        return 0

    def keep(self, rows: slice) -> None:
        """Make no checkpoint."""

    def allocate(self, batch: int) -> None:
        """Leave it to the prompt."""

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Leave it to the passes."""

    def read(self, readings: Sequence[Reading], *, may_capture: bool) -> torch.Tensor:
        """Read the one text from its beginning on."""
        made: torch.Tensor = self._runner.prefill(readings[0].tokens)
        return made

    def read_all(self, reading: Reading, num_last: int) -> Iterator[torch.Tensor]:
        """Read the one text, and make logits of its last tokens."""
        made: Iterator[torch.Tensor] = self._runner.prefill_all(reading.tokens, num_last)
        return made

    def step(self, tokens: torch.Tensor, length: int, rows: object) -> torch.Tensor:
        """Extend the one text."""
        made: torch.Tensor = self._runner.decode(tokens)
        return made


class _Held(NamedTuple):
    """The tokens of a prompt that a row holds."""

    num_tokens: int = 0
    from_checkpoint: bool = False


class _Part(NamedTuple):
    """A prompt that is about to be read into a row, from ``start`` on."""

    row: int
    prompt: list[int]
    start: int
    source: int
    """The row that holds the tokens before: itself, or that of a text which goes on."""
    from_checkpoint: bool = False
    """True if what cannot go back is taken from that row's checkpoint."""
    owner: Hashable = None


class Rows:
    """The rows of a session's cache, each with a text of its own length.

    Texts join and leave between steps. A prompt is read by a pass of its own into its row; a step
    then extends all texts together. While there are ``Rows`` of a session, nobody else may call its
    ``prefill`` and ``decode``. Works on the session's stream: read logits and make tokens inside
    ``session.stream()``. Not for several threads at once.

    A call that raises, whatever it raises, leaves the other texts as they were, ready for the next
    call. If that cannot be, as when a step has changed the states of linear attention, the rows are
    emptied. Afterwards ``in_use`` names the texts that are still there. Behind a text a row holds
    numbers, never a NaN, which attention could not weigh by zero. A row is cleared there when a
    text joins or moves in.
    """

    def __init__(
        self, session: Session, num_rows: int, *, sizes: Sequence[int] | None = None
    ) -> None:
        """Share the cache of ``session`` among up to ``num_rows`` texts at a time.

        A plan has memory for as many as its workload's batch. A step runs, and is captured, for the
        least of ``sizes`` rows that has all that it extends. ``num_rows`` is always one of them,
        and by default the other is 1. Raises InputError for fewer rows than one, and for more where
        a family's states allow one alone.
        """
        runner: Any = session.runner
        if not hasattr(runner, "read"):
            runner = _OneText(runner)
        if num_rows < 1:
            raise InputError(f"{num_rows} rows: expected 1 or more")
        if num_rows > 1 and runner.one_row:
            raise InputError(
                f"{num_rows} rows: {session.loaded.model.source} has {runner.one_row}, so give it "
                "one row"
            )
        if num_rows > 1 and session.draft is not None:
            raise InputError(
                f"{num_rows} rows with {session.draft.key}: a pass checks the drafts of one text, "
                "so give it one row"
            )
        self._pass_sizes = list_pass_sizes(session.draft)
        self.num_rows = num_rows
        """Texts that can be there at a time."""
        # what is noted of routing is noted for one batch
        smaller = () if session.routing is not None else (1,) if sizes is None else sizes
        self._sizes = sorted({size for size in smaller if 0 < size < num_rows} | {num_rows})
        self.session, self._runner = session, runner
        self._predictor: Predicts | None = session.predictor
        self._vocabulary: int = session.loaded.module.config.get_text_config().vocab_size
        self._rows = [_Row() for _ in range(num_rows)]
        self._num_left = 0
        self._slots = [*range(num_rows)]
        """Place of each row in the cache: a step runs for the first of these places."""
        self._captures_prompts = False
        self._checked: list[int] = []
        """Tokens of the last ``check`` until ``take``."""
        self._cache: object = None
        """The cache that they are rows of; None before the first pass."""
        self._is_in_doubt = True
        """True if positions on the device may be others than the rows': a call has not ended."""

    @property
    def in_use(self) -> frozenset[int]:
        """Rows that have a text."""
        return frozenset(row for row, each in enumerate(self._rows) if each.in_use)

    @property
    def num_free(self) -> int:
        """Texts that could join now."""
        return self.num_rows - len(self.in_use)

    def length(self, row: int) -> int:
        """Return the tokens of a row's text so far; ``session.context`` is the most."""
        return self._find(row).length

    def warm_up(self, prompt_tokens: int, *, capture_prompt: bool = False) -> None:
        """Compile, capture and let libraries allocate: for such a prompt, and steps of each size.

        Forgets all texts. A prompt shorter than the plan's chunk compiles nothing. With
        ``capture_prompt`` the prompt of a single row is captured where a session would capture it.
        So are others that come twice in a row. That pays if prompts have one length: a prompt of
        another length takes away all that is captured.
        """
        for row in self._rows:
            row.forget()
        # tokens that differ, or they would all be sent to the same experts
        prompt = [number % self._vocabulary for number in range(prompt_tokens)]
        self._captures_prompts = capture_prompt
        again = capture_prompt and self.num_rows == 1
        again = again and self._runner.captures_prompt(1, prompt_tokens)
        for _ in range(1 + again):
            self._rows[self.join(prompt).row].forget()
        context = self.session.context
        if prompt_tokens < context:
            with self._running("making a token"):
                self._runner.set_lengths([prompt_tokens] * self.num_rows)
                for size in self._sizes:
                    for _ in range(min(NUM_WARMUP_STEPS, context - prompt_tokens)):
                        tokens = torch.tensor(prompt[:1]).expand(size, 1).to(self.session.device)
                        self._runner.step(tokens, prompt_tokens + 1, ())
                for size in self._pass_sizes:
                    tokens = torch.tensor([(prompt * size)[:size]]).to(self.session.device)
                    for _ in range(NUM_WARMUP_STEPS * (prompt_tokens + size <= context)):
                        self._runner.check(tokens, prompt_tokens, size)
                        self._runner.take(size)
                if self._predictor is not None:
                    self._predictor.warm_up(prompt_tokens, NUM_WARMUP_STEPS)
        self.session.end_warm_up()

    def join(self, prompt: Sequence[int], owner: Hashable = None) -> Joined:
        """Read a prompt of ``owner`` into a free row.

        Of the free rows it takes the one whose cache holds most of the prompt's beginning, and
        reads the rest alone. If the row of another text holds more, a free row is given a copy, of
        what the host knows of that text. A prompt goes on from texts of its own owner alone. Where
        layers cannot go back, as windows and linear attention cannot, it goes on from all of a
        text, or from all of the prompt that the text began with. If rotary embeddings change with
        the text's length, what is as long as to change them is read as a whole. Raises InputError
        for a prompt that is empty or beyond the context, and where no row is free,
        MemoryLimitError.
        """
        (joined,) = self.join_all([prompt], [owner])
        return joined

    def join_all(
        self, prompts: Sequence[Sequence[int]], owners: Sequence[Hashable] | None = None
    ) -> list[Joined]:
        """Read several prompts into free rows, in as few passes as memory allows; as ``join`` does.

        Weights that are off the GPU cross the link once for all prompts of a pass: join those that
        wait together. ``owners`` has the owner of each; left out, all have the same. Raises what
        ``join`` raises, for all of them before any is read; where a pass fails none has joined.
        """
        if len(prompts) > self.num_free:
            raise InputError(
                f"{len(prompts)} prompts for {self.num_free} free rows of {self.num_rows}: let a "
                "text leave first"
            )
        self._check_prompts(prompts)
        with self._running("reading the prompt"):
            owners = [None] * len(prompts) if owners is None else owners
            parts = self._assign([[*prompt] for prompt in prompts], owners)
            for part in parts:  # what is not read to its end is nothing to go on from
                self._rows[part.row].forget()
                if part.source != part.row or part.from_checkpoint:
                    slots, of = (self._slots[part.source], self._slots[part.row]), part.start
                    self._runner.copy(*slots, of, from_checkpoint=part.from_checkpoint)
            try:
                joined: dict[int, Joined] = {}
                for together in self._divide(parts):
                    joined |= self._join(together, self._read(together).clone())
                for part in parts:
                    self._rows[part.row].in_use = True
                self._set_lengths()
            except BaseException:
                for part in parts:
                    self._rows[part.row].in_use = False
                raise
        return [joined[part.row] for part in parts]

    def score(
        self, prompt: Sequence[int], owner: Hashable, see: Callable[[torch.Tensor], object]
    ) -> None:
        """Read a prompt of ``owner`` into a free row, which stays free and holds it afterwards.

        ``see`` is called with the logits of some tokens at a time, [tokens, vocabulary], in order;
        it runs on the session's stream. A prompt that joins next goes on from the row. Raises what
        ``join`` raises.
        """
        if not self.num_free:
            raise InputError("no row is free to read a prompt in: let a text leave first")
        self._check_prompts([prompt])
        row = self._choose_free([row for row in range(self.num_rows) if row not in self.in_use])
        with self._running("reading the prompt"):
            self._rows[row].forget()
            tokens = torch.tensor([[*prompt]]).to(self.session.device)
            reading = Reading(tokens, 0, self._rows_of(row))
            for logits in self._runner.read_all(reading, len(prompt)):
                see(logits[0])
            self._runner.keep(reading.rows)
            self._note(_Part(row, [*prompt], 0, row, owner=owner))
            self._num_left += 1
            self._rows[row].left = self._num_left
            self._set_lengths()

    def _check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        context, vocabulary = self.session.context, self._vocabulary
        for prompt in prompts:
            if not 0 < len(prompt) <= context:
                raise InputError(
                    f"the prompt has {len(prompt)} tokens; the plan's context is {context}"
                )
            for token in (min(prompt), max(prompt)):  # a GPU would fail for good
                if not 0 <= token < vocabulary:
                    raise InputError(
                        f"the prompt has token {token}; the model has tokens from 0 to "
                        f"{vocabulary - 1}"
                    )

    def _join(self, parts: Sequence[_Part], logits: torch.Tensor) -> dict[int, Joined]:
        """Note what rows hold now; ``logits``, [parts, vocabulary], follow."""
        joined = dict[int, Joined]()
        for part, each in zip(parts, logits, strict=True):
            self._note(part)
            joined[part.row] = Joined(part.row, each, len(part.prompt) - part.start)
        return joined

    def _note(self, part: _Part) -> None:
        """Note what a row holds by now."""
        row = self._rows[part.row]
        row.owner = part.owner  # before the tokens: they are never another owner's
        row.num_begun, row.tokens, row.is_at_end = len(part.prompt), [*part.prompt], True

    def step(self, tokens: Mapping[int, int | torch.Tensor]) -> dict[int, torch.Tensor]:
        """Extend the texts of some rows by a token each, in one pass; the others stay as they are.

        A token is a number, or a tensor of one element on the device: then nothing waits for the
        host. Returns the logits that follow, [vocabulary] for each row, on the device, overwritten
        by the next call. Raises InputError for a row that has no text and for a text that has
        reached the context, before anything is changed, MemoryLimitError.

        If a model's states cannot stay as they are (linear attention), the texts of all rows in use
        have to be extended; InputError otherwise.
        """
        fed = torch.zeros(self.num_rows, 1, dtype=torch.int64)
        on_device = {row: each for row, each in tokens.items() if isinstance(each, torch.Tensor)}
        for row in tokens:
            self._find(row)
            if row not in on_device:
                fed[row] = tokens[row]
        with self.session.stream():
            fed = fed.to(self.session.device)
            for row, each in on_device.items():
                fed[row] = each.view(1)
        logits = self.extend(sorted(tokens), fed)
        for row, token in tokens.items():
            text = self._rows[row]
            if row not in on_device and not isinstance(text.tokens[-2], torch.Tensor):
                text.tokens[-1] = int(token)  # the host knows all of it
        return {row: logits[row] for row in tokens}

    def extend(self, rows: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Do what ``step`` does with the tokens of all rows in one tensor.

        ``tokens`` is int64 of [num_rows, 1] on the device, of which those of ``rows`` are read,
        there and later on. Returns logits, [batch, vocabulary]: ``rows`` are indices of its first
        dimension, and what else it has means nothing.
        """
        self._check_step(rows)
        with self._running("making a token"):
            extended = [(self._rows[row], self.length(row)) for row in rows]
            try:
                self._gather()
                made = self._extend(rows, tokens)
                for row in rows:
                    self._rows[row].tokens.append(tokens[row])
                if any(each.length == each.num_begun for each, _ in extended):
                    self._set_lengths()  # one that was read again has not moved
            except BaseException:
                for each, length in extended:
                    del each.tokens[length:]
                if not self._runner.goes_back:  # some layers' states have gone on
                    for row_left in self._rows:
                        row_left.forget()
                raise
            if self.session.routing is not None:
                self.session.routing.note_step()
        return made

    def count_checked(self, row: int) -> int:
        """Count the tokens that a pass may extend a text by, drafts among them; 1 for a step alone.

        Fewer fit the end of the context, and texts whose rotary embeddings change.
        """
        length, runner = self.length(row), self._runner
        sizes = (size for size in self._pass_sizes if length + size <= self.session.context)
        most = max(sizes, default=1)
        regime = runner.regime(length + 1)
        return next(
            (
                number
                for number in range(1, most)
                if runner.regime(length + number + 1) != regime
                or length + number + 1 == runner.renewal
            ),
            most,
        )

    def check(self, row: int, tokens: Sequence[int]) -> torch.Tensor:
        """Extend the one text by a token and by drafts behind it, in one pass.

        Returns the logits that follow each, [tokens, vocabulary], on the device, overwritten by the
        next call. ``take`` says next how many of the tokens are the text's, which stays as it was
        until then. Raises InputError for more tokens than ``count_checked`` says, and
        MemoryLimitError.
        """
        most = self.count_checked(row)
        if not 1 < len(tokens) <= most:
            raise InputError(f"a pass of {len(tokens)} tokens: expected 2 to {most}")
        text, length = self._find(row), self.length(row)
        text.read_tokens()  # others come behind those of steps before
        size = pass_tokens(len(tokens) - 1)
        with self._running("checking drafts"):
            fed = torch.tensor([[*tokens, *[tokens[-1]] * (size - len(tokens))]])
            made = self._runner.check(fed.to(self.session.device), length, len(tokens))
        self._checked = [*tokens]
        self._is_in_doubt = True  # the device does not know how many are the text's
        return cast(torch.Tensor, made[: len(tokens)])

    def take(self, row: int, num_checked: int, num_taken: int, *, has_nan: bool) -> None:
        """Extend a text by the first ``num_taken`` of the ``num_checked`` tokens of ``check``.

        With ``has_nan`` the others are cleared, which attention weighs by zero. Where it raises,
        the row is emptied: the caller may not know of what was taken.
        """
        text = self._find(row)
        text.tokens += self._checked[:num_taken]
        self._checked = []
        try:
            with self._running("checking drafts"):
                self._runner.take(num_taken)
                if has_nan:
                    end = text.length + num_checked - num_taken
                    self._runner.clear_drafts(text.length, end)
        except BaseException:
            text.forget()
            raise

    @property
    def make_drafter(self) -> Callable[[], Drafter] | None:
        """What makes a text's drafter of what its passes give; None if its words are enough."""
        return None if self._predictor is None else partial(PredictionDrafter, self._predict)

    def _predict(self, token: int, most: int) -> list[int]:
        """Draft tokens of the one text behind ``token``, which no pass has read."""
        (row,) = self.in_use
        assert self._predictor is not None
        with self._running("drafting"):
            return self._predictor.propose(token, self.length(row), most)

    def leave(self, row: int) -> None:
        """Free a row; its cache stays for a later prompt that begins as its text does.

        Raises InputError for a row that has no text.
        """
        left = self._find(row)
        self._num_left += 1
        left.in_use, left.left = False, self._num_left
        if left.length >= self.session.context:
            if not self._runner.goes_back:
                left.fall_back()
            else:  # steps of the others write to its last place
                del left.read_tokens()[-1]

    def find_nan(self, tokens: Sequence[int]) -> str:
        """Say which layer gives the first NaN of a text, by reading the text once more.

        ``tokens`` are all that were read of it. They are read into a free row: have the text leave
        its own. Waits for the device after each layer. Raises InputError where no row is free.
        """
        free = next((row for row in range(self.num_rows) if row not in self.in_use), None)
        if free is None:
            raise InputError("no row is free to find a NaN in: let a text leave first")
        with self._running("finding a NaN"):
            self._rows[free].forget()
            return self.session.find_nan(torch.tensor([[*tokens]]), self._rows_of(free))

    @contextmanager
    def _running(self, doing: str) -> Iterator[None]:
        """Context of a call that runs passes, by the name of what it is doing."""
        self.session.check_open()
        with memory_limits(doing), self.session.stream(), torch.inference_mode():
            runner = self._runner
            if self._cache is not None and (runner.length or runner.cache is not self._cache):
                self._cache = None
                for row in self._rows:
                    row.forget()
                raise ValueError(
                    "the session's own prefill has taken the cache of its rows, whose texts are "
                    "gone: join them again"
                )
            if self._cache is None:
                runner.allocate(self.num_rows)
                if self.session.routing is not None:
                    self.session.routing.begin(self.num_rows)
                self._cache, self._is_in_doubt = runner.cache, True
            if self._is_in_doubt:
                self._set_lengths()
            self._is_in_doubt = True
            yield
            self._is_in_doubt = False

    def _find(self, row: int) -> _Row:
        if row not in self.in_use:
            raise InputError(f"row {row} has no text: expected one of {sorted(self.in_use)}")
        return self._rows[row]

    def _set_lengths(self) -> None:
        """Have each row's position on the device be where a step may write, be it an idle row's."""
        lengths = [0] * self.num_rows
        for slot, row in zip(self._slots, self._rows, strict=True):
            lengths[slot] = min(row.length, self.session.context - 1)
        self._runner.set_lengths(lengths)

    def _rows_of(self, row: int) -> slice:
        """Return the rows of the cache that a text has."""
        return slice(self._slots[row], self._slots[row] + 1)

    def _gather(self) -> None:
        """Have texts lie where a step of the least size finds all of them."""
        used, sizes = sorted(self.in_use, key=self._slots.__getitem__), self._sizes
        least = next(size for size in sizes if size >= len(used))
        free = [slot for slot in range(least) if slot not in {self._slots[row] for row in used}]
        for row in used:
            if self._slots[row] < least:
                continue
            other = self._slots.index(free.pop(0))
            # an idle token may lie behind what a row holds
            num_tokens = max(self._rows[row].length, self._rows[other].length) + 1
            slots = [*self._slots]
            slots[row], slots[other] = slots[other], slots[row]
            swap = self._runner.swap(self._slots[row], self._slots[other], num_tokens)
            try:
                swap.run()
                self._slots = slots
            except BaseException:
                if self._slots is not slots:
                    self._rows[other].forget()
                    swap.undo()
                raise
            self._set_lengths()

    def _assign(self, prompts: Sequence[list[int]], owners: Sequence[Hashable]) -> list[_Part]:
        """Choose a free row for each prompt: by what it holds, or else the one left longest ago."""
        used = [*self.in_use]
        free = [row for row in range(self.num_rows) if row not in self.in_use]
        parts = []
        for prompt, owner in zip(prompts, owners, strict=True):
            held = {
                row: self._find_held(self._rows[row], prompt)
                if self._rows[row].owner == owner
                else _Held()
                for row in (*free, *used)
            }
            source = self._choose_source(held)
            is_copied, row = source in used, source
            if is_copied or not held[source].num_tokens:
                row = self._choose_free(free)
            free.remove(row)
            parts.append(
                _Part(
                    row,
                    prompt,
                    held[source].num_tokens,
                    source if is_copied else row,
                    held[source].from_checkpoint,
                    owner,
                )
            )
        return parts

    def _choose_free(self, free: Sequence[int]) -> int:
        """Choose the free row that holds nothing, or else the one left longest ago."""
        return max(free, key=lambda row: (not self._rows[row].length, -self._rows[row].left))

    def _choose_source(self, held: dict[int, _Held]) -> int:
        """Choose the row that holds most of a prompt without NaN, and correct what it holds.

        A NaN reaches tokens that came before it in the same pass: attention weighs it by zero. Its
        own logits need not be NaN: windows end before it. Of rows that hold as much, a free one and
        then the one left longest ago. Waits for the device where a row holds something.
        """

        def prefer(row: int) -> tuple[int, bool, int]:
            return held[row].num_tokens, not self._rows[row].in_use, -self._rows[row].left

        seen: set[tuple[int, bool]] = set()
        while True:
            source = max(held, key=prefer)
            num_tokens, of_checkpoint = held[source]
            if not num_tokens or (source, of_checkpoint) in seen:
                return source
            seen.add((source, of_checkpoint))
            count = self._runner.count_numbers(
                self._slots[source], num_tokens, from_checkpoint=of_checkpoint
            )
            if count < num_tokens:
                held[source] = self._reach(self._rows[source], count)

    def _find_held(self, row: _Row, prompt: list[int]) -> _Held:
        """Find the tokens of a prompt that a row holds and that a pass can go on from.

        The last token is not of them: its logits are wanted.
        """
        regime = self._runner.regime
        # of a text that goes on: no wait
        held = row.known_tokens() if row.in_use else row.read_tokens()
        if len({regime(len(prompt)), regime(row.num_begun), regime(len(held))}) > 1:
            return _Held()
        common = 0
        for ours, theirs in zip(held, prompt[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        return self._reach(row, common)

    def _reach(self, row: _Row, common: int) -> _Held:
        """Find how many of a row's first tokens a pass can go on from, and what from."""
        at_end = self._runner.begin_at(common, row.length) if row.is_at_end else 0
        kept = self._runner.begin_at(min(common, row.num_begun), row.num_begun)
        return _Held(kept, True) if kept > at_end else _Held(at_end)

    def _divide(self, parts: Sequence[_Part]) -> list[list[_Part]]:
        """Divide what is to be read among passes.

        Parts of one pass share what rotary embeddings change by. Hidden states of their tokens wait
        for each layer, two of a token. A plan has memory for six of each token that a chunk of all
        rows has (``WAITING_COPIES`` and ``HIDDEN_COPIES`` of ``costs.activations``). A chunk here
        is of one row. Where more waits of each token, a pass reads no more than that chunk.
        """
        num_chunks = self.num_rows if self._runner.keeps_more else 3 * self.num_rows - 2
        most = num_chunks * self._runner.chunk
        passes: list[list[_Part]] = []
        last: Hashable = None
        num_tokens = 0
        for part in sorted(parts, key=lambda part: self._runner.regime(len(part.prompt))):
            regime, more = (
                self._runner.regime(len(part.prompt)),
                len(part.prompt) - part.start,
            )
            num_tokens += more
            if not passes or regime != last or num_tokens > most:
                passes.append([])
                last, num_tokens = regime, more
            passes[-1].append(part)
        return passes

    def _read(self, parts: Sequence[_Part]) -> torch.Tensor:
        """Read parts in one pass; returns logits, [parts, vocabulary], that the next overwrites."""
        readings = []
        for row, prompt, start, *_ in parts:
            tokens = torch.tensor([prompt[start:]]).to(self.session.device)
            readings.append(Reading(tokens, start, self._rows_of(row)))
        logits: torch.Tensor = self._runner.read(readings, may_capture=self._captures_prompts)
        for each in readings:
            self._runner.keep(each.rows)
        return logits

    def _check_step(self, rows: Sequence[int]) -> None:
        for row in rows:
            if self._find(row).length >= self.session.context:
                raise InputError(
                    f"the text of row {row} has reached the context of "
                    f"{self.session.context} tokens"
                )
        if not rows:
            raise InputError("a step of no rows: expected some that have a text")
        if not self._runner.goes_back and (others := self.in_use - {*rows}):
            raise InputError(
                f"a step without row {min(others)}: linear attention cannot leave the state of a "
                "text as it is, so extend all of them or let some leave"
            )

    def _extend(self, rows: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Run the passes of a step: one, unless texts differ in what a pass has to know of all."""
        renewal = self._runner.renewal
        renewed = [row for row in rows if self.length(row) + 1 == renewal]
        groups: dict[Hashable, list[int]] = {}
        for row in rows:
            if row not in renewed:
                key = self._runner.step_regime(self.length(row) + 1)
                groups.setdefault(key, []).append(row)
        if not renewed and len(groups) == 1:
            return self._run_step(rows, tokens)
        parts = [(group, self._run_step(group, tokens)[group]) for group in groups.values()]
        parts += [([row], self._read_again(row, tokens)) for row in renewed]
        made = parts[0][1].new_empty(self.num_rows, parts[0][1].shape[1])
        for group, logits in parts:
            made[group] = logits
        return made

    def _run_step(self, rows: Sequence[int], tokens: torch.Tensor) -> torch.Tensor:
        """Run one pass for some rows; returns logits as ``extend`` does."""
        slots = [self._slots[row] for row in rows]
        size = next(size for size in self._sizes if size > max(slots))
        if not self._runner.goes_back:
            for slot, each in zip(self._slots, self._rows, strict=True):
                if slot < size and not each.in_use:
                    each.fall_back()  # its state goes on with an idle token
        of_step = self.length(rows[0]) + 1, slots
        logits: torch.Tensor
        if size == 1:
            logits = self._runner.step(tokens[rows[0] : rows[0] + 1], *of_step)
            return logits.expand(self.num_rows, -1)
        if self._slots == sorted(self._slots):
            logits = self._runner.step(tokens[:size], *of_step)
            return logits
        fed = torch.zeros_like(tokens[:size])
        for row, slot in zip(rows, slots, strict=True):
            fed[slot] = tokens[row]
        made = self._runner.step(fed, *of_step)
        logits = made.new_empty(self.num_rows, made.shape[1])
        for row, slot in zip(rows, slots, strict=True):
            logits[row] = made[slot]
        return logits

    def _read_again(self, row: int, tokens: torch.Tensor) -> torch.Tensor:
        """Read the whole text of a row anew, and its next token (``Frequencies.renewal``)."""
        text = self._rows[row]
        whole = [*text.read_tokens(), int(tokens[row])]
        try:
            logits = self._read([_Part(row, whole, 0, row)]).clone()
        except BaseException:
            text.forget()
            raise
        text.num_begun, text.is_at_end = len(whole), True
        return logits
