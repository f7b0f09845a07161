"""A session generates what ``run`` asks for, and says how fast while it does."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager

from offplan.checkpoint.model import Model
from offplan.cli.output import QUIET, print_note, waiting
from offplan.cli.output_sink import Teller
from offplan.cli.request import GenerationRequest
from offplan.errors import InputError, NotANumberError
from offplan.library.repricing import compare_counts, predict_workload
from offplan.plan import Plan
from offplan.report.run import RunResult
from offplan.runtime.device import device_name
from offplan.runtime.generate import Measured, generate
from offplan.runtime.joined import continue_texts, continue_tokens
from offplan.runtime.prompts import random_prompt
from offplan.runtime.rows import Rows
from offplan.runtime.sampling import make_chooser
from offplan.runtime.session import Session
from offplan.runtime.texts import Text
from offplan.units import format_rate

_EVERY_S = 0.25


class LiveLine:
    """Tokens a second and use of the link, on stderr: silent unless that is a terminal."""

    def __init__(
        self, num_texts: int, link_bytes: Callable[[], int], *, shown: bool = True
    ) -> None:
        """Count from here on; ``link_bytes`` says what has crossed the link so far."""
        self._shown = shown and sys.stderr.isatty() and not QUIET.get()
        self._num_texts, self._link_bytes = num_texts, link_bytes
        self._num_ended = self._num_tokens = 0
        self._last = time.perf_counter(), 0, link_bytes()

    def count(self, num_tokens: int, *, num_ended: int = 0) -> None:
        """Count tokens that have come, and texts that ended; now and then show both."""
        self._num_tokens += num_tokens
        self._num_ended += num_ended
        then, tokens, moved = self._last
        now = time.perf_counter()
        if not self._shown or now - then < _EVERY_S:
            return
        self._last = now, self._num_tokens, self._link_bytes()
        rate = (self._num_tokens - tokens) / (now - then)
        link = format_rate((self._last[2] - moved) / (now - then))
        text = (
            f"{self._num_ended:,} of {self._num_texts:,} texts, {self._num_tokens:,} tokens, "
            f"{rate:,.1f} a second; {link} over the link"
        )
        print(f"\r{text}\x1b[K", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> "LiveLine":
        return self

    def __exit__(self, *error: object) -> None:
        # for what comes next
        if self._shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def generate_request(
    session: Session,
    plan: Plan,
    model: Model,
    request: GenerationRequest,
    texts: Sequence[Text],
    teller: Teller,
) -> RunResult:
    """Continue ``texts`` by batches of the plan, or its workload's random tokens without any."""
    measured, workload = Measured(), plan.workload
    if texts:
        rows = _make_rows(session, min(len(texts), workload.batch))
        batch, first = rows.num_rows, texts[: rows.num_rows]
        num_tokens = round(sum(len(text.prompt) for text in first) / batch)
        with _warming_up():
            alike = len({len(text.prompt) for text in texts}) == 1
            rows.warm_up(num_tokens, capture_prompt=alike)
        with LiveLine(len(texts), lambda: session.link_bytes, shown=not teller.is_shown) as live:
            try:
                continued = map(request.continue_text, texts)
                for each, added in continue_texts(rows, continued, measured):
                    teller.take(each, added)
                    live.count(1, num_ended=added.finish is not None)
            except NotANumberError as error:
                teller.finish()  # what came out before is shown
                names = [request.prompts[number][0] for number in error.numbers]
                raise NotANumberError(error.cause, error.numbers, names) from None
        teller.finish()
    elif session.draft is not None:
        (tokens,) = random_prompt(model, workload).tolist()
        rows, batch, num_tokens = Rows(session, 1), 1, len(tokens)
        with _warming_up():
            rows.warm_up(num_tokens, capture_prompt=True)
        made = continue_tokens(rows, tokens, request.num_tokens, request.sampling, measured)
        with LiveLine(batch, lambda: session.link_bytes) as live:
            for _ in made:
                live.count(1)
    else:
        tokens = random_prompt(model, workload)
        batch, num_tokens = tokens.shape
        with _warming_up():
            session.warm_up(batch, num_tokens)
        choose = make_chooser(request.sampling, range(batch), session.device)
        with LiveLine(batch, lambda: session.link_bytes) as live:
            for _ in generate(session, tokens, request.num_tokens, measured, choose=choose):
                live.count(batch)
    ran = workload.model_copy(
        update={"batch": batch, "prompt_tokens": num_tokens, "output_tokens": request.num_tokens}
    )
    is_same = (ran.batch, ran.prompt_tokens) == (workload.batch, workload.prompt_tokens)
    return RunResult(
        device_name(session.device),
        batch,
        num_tokens,
        session.gpu_bytes or None,
        measured,
        None if is_same else predict_workload(plan, model, ran),
        compare_counts(plan, model, session.count(measured.num_decodes)),
        session.describe(),
    )


def _make_rows(session: Session, batch: int) -> Rows:
    """Make rows for a plan's batch, or a single one where the model allows no more."""
    try:
        return Rows(session, batch)
    except InputError as error:
        print_note(f"{error}: texts are continued one at a time")
        return Rows(session, 1)


def _warming_up() -> AbstractContextManager[object]:
    return waiting("warming up, which compiles and captures on a GPU")
