"""Sinks of texts while they are made: the terminal, or a file of results."""

import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from offplan.checkpoint.model import Model
from offplan.cli.lines import Line, Results
from offplan.cli.output import STANDARD, print_note, printable
from offplan.cli.request import GenerationRequest
from offplan.cli.run_options import RunOptions
from offplan.plan import Plan
from offplan.report.payload import text_payload
from offplan.runtime.joined import Added, Continued
from offplan.runtime.texts import Text
from offplan.serve.answers import Choice, TokenNames, make_answer


class Teller:
    """A sink of texts: this one keeps them to itself, for a result that is printed."""

    is_shown = False
    """True if a text is seen while it is made."""

    def leave_out_done(self, texts: Sequence[Text]) -> Sequence[Text]:
        """Return the texts that are yet to be made: all of them."""
        return texts

    def take(self, each: Continued, added: Added) -> None:
        """Take what a token has added to a text."""

    def finish(self) -> None:
        """End the output."""


class Printer(Teller):
    """Prints texts behind their prompts: while they are made if one is made at a time.

    They are a model's, and no terminal is to obey them.
    """

    def __init__(self, prompts: Sequence[str], *, alone: bool) -> None:
        """Print behind these prompts, by the texts' numbers; ``alone``: one is made at a time."""
        self._prompts = prompts
        self._alone = alone
        self._texts: dict[int, Text] = {}
        self.is_shown = alone and sys.stdout.isatty()

    def take(self, each: Continued, added: Added) -> None:
        """Print what a token has added, if this is the one text that is being made."""
        text, piece = each.text, added.piece
        is_new = text.number not in self._texts
        self._texts[text.number] = text
        if self._alone:
            print((self._begin(text) if is_new else "") + printable(piece), end="", flush=True)

    def finish(self) -> None:
        """Print what has not been printed yet, in the order of the prompts, and end the line."""
        if not self._alone:
            for number in sorted(self._texts):
                text = self._texts[number]
                print(self._begin(text) + printable(text.made), end="")
        print("\n" if sys.stdout.isatty() else "", flush=True)  # a table follows on a terminal

    def _begin(self, text: Text) -> str:
        between = "\n\n" if text.number else ""
        return between + printable(self._prompts[text.number])


class Writer(Teller):
    """Writes a line of results for each text that ends."""

    def __init__(self, results: Results, lines: Mapping[int, Line], model: Model) -> None:
        """Write to ``results``; ``lines`` are those of the prompts, by the texts' numbers."""
        self._results, self._lines, self._model = results, lines, model
        self._made = defaultdict[int, list[Added]](list)
        """Tokens of the texts that are being made, by the texts' numbers."""

    def leave_out_done(self, texts: Sequence[Text]) -> Sequence[Text]:
        """Return the texts that have no line of results yet, and say how many have one."""
        if done := self._results.done:
            print_note(
                f"{len(done)} of {len(self._lines)} texts are in {self._results.path} already"
            )
        return [text for text in texts if self._lines[text.number].number not in done]

    def take(self, each: Continued, added: Added) -> None:
        """Write a text's line, once it has ended."""
        number = each.text.number
        self._made[number].append(added)
        if added.finish is not None:
            self._results.write(self._lines[number], self._describe(each, self._made.pop(number)))

    def _describe(self, each: Continued, made: list[Added]) -> dict[str, Any]:
        """Return a line's result, in the form that the line has."""
        line, names = self._lines[each.text.number], TokenNames(each.text.tokenizer)
        choice = Choice(len(each.text.prompt), each.num_read, made, each.text.finish)
        answer = make_answer(line.request, [choice], self._model.source, names).whole()
        if line.is_batch:
            response = {"status_code": 200, "request_id": answer["id"], "body": answer}
            return {"id": f"batch_req_{line.number}", "response": response, "error": None}
        told = text_payload(each.text)
        if each.num_logprobs is not None:
            # beside the line's own key, which says how many
            told["scores"] = answer["choices"][0]["logprobs"]
        return told


@contextmanager
def open_teller(
    given: RunOptions,
    lines: Sequence[Line],
    request: GenerationRequest,
    texts: Sequence[Text],
    plan: Plan,
    model: Model,
) -> Iterator[Teller]:
    """Find where the texts of a request go, by the options of ``run``.

    ``lines`` are those of its file of prompts: their results have a file, which is closed when the
    context is left. Raises InputError if that file is of something else, and HubError.
    """
    if lines:
        settings = request.fingerprint(model, texts[0].rules, dummy_weights=given.dummy_weights)
        with Results(given.output or STANDARD, lines, settings, force=given.force) as results:
            yield Writer(results, dict(enumerate(lines)), model)
    elif texts and not given.json:
        alone = plan.workload.batch == 1 or len(texts) == 1
        yield Printer(request.shown, alone=alone)
    else:
        yield Teller()
