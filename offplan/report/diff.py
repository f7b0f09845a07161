"""Differences of two plans and findings of checked ones: as tables, Markdown and JSON."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from offplan.plan import Plan
from offplan.report.model import name_indices
from offplan.report.table import make_grid, make_table
from offplan.report.wording import name_options
from offplan.stores import STORES
from offplan.units import format_bytes, format_seconds
from offplan.upkeep.comparing import Difference, Move
from offplan.upkeep.figures import Finding

NO_CHANGE = "Question and decision are the same."


def render_difference(difference: Difference) -> list[RenderableType]:
    """Show what was asked and decided otherwise, what moves, and what that costs."""
    parts: list[RenderableType] = []
    for title, headings, rows in _tables(difference):
        table = make_table(title, headings[0])
        for heading in headings[1:]:
            table.add_column(heading, overflow="fold")
        for row in rows:
            table.add_row(*row)
        parts.append(table)
    if not (difference.asked or difference.decided):
        parts.insert(0, Text(NO_CHANGE))
    parts[-1:-1] = map(Text, difference.stale)
    return parts


def markdown_difference(difference: Difference) -> str:
    """Write the same as Markdown, for the comment of a pull request."""
    parts = [] if difference.asked or difference.decided else [NO_CHANGE]
    for title, headings, rows in _tables(difference):
        lines = [headings, ["---"] * len(headings), *rows]
        table = "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)
        parts.append(f"**{title}**\n\n{table}")
    parts[-1:-1] = map(_escape, difference.stale)
    return "\n\n".join(parts) + "\n"


def difference_payload(difference: Difference) -> dict[str, Any]:
    """Return the same as JSON."""
    moves = difference.moves
    plans = {"before": difference.before, "after": difference.after}
    repriced = {name: difference.repriced.get(name) for name in plans}
    return {
        "asked": [vars(change) for change in difference.asked],
        "decided": [vars(change) for change in difference.decided],
        "moves": None if moves is None else [vars(move) for move in moves],
        **{name: plan.model_dump(mode="json")["prediction"] for name, plan in plans.items()},
        "stale": {
            name: plan and plan.model_dump(mode="json")["prediction"]
            for name, plan in repriced.items()
        },
    }


class _TableRows(NamedTuple):
    """A table in the making."""

    title: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]


def _tables(difference: Difference) -> Iterator[_TableRows]:
    """Yield the tables of what there is."""
    for title, changes in (("Asked", difference.asked), ("Decided", difference.decided)):
        if changes:
            rows = [(each.key, each.before, each.after) for each in changes]
            yield _TableRows(title, ["key", "before", "after"], rows)
    if difference.moves:
        headings = ["what moves", "layers", "bytes", "before", "after"]
        yield _TableRows("Moves", headings, [_move_row(move) for move in difference.moves])
    before = difference.repriced.get("before", difference.before)
    after = difference.repriced.get("after", difference.after)
    bases = dict.fromkeys(plan.prediction.basis for plan in (before, after))
    again = "".join(f"; {name} is priced again" for name in difference.repriced)
    title = f"Prediction ({', then '.join(bases)}{again})"
    figures = [*_figure_rows(before, after)]
    yield _TableRows(title, ["figure", "before", "after", "change"], figures)


def _move_row(move: Move) -> Sequence[str]:
    layers = name_indices(move.layers) or "-"
    return move.parameter, layers, format_bytes(move.num_bytes), move.before, move.after


def _figure_rows(before: Plan, after: Plan) -> Iterator[Sequence[str]]:
    """Yield the figures that people compare plans by, with the change as a part of the first."""

    def of(name: str, show: Callable[[float], str], get: Callable[[Plan], float]) -> Sequence[str]:
        old, new = get(before), get(after)
        change = f"{new / old - 1:+.1%}" if old else "-"
        # one side may be as it was rounded for its file
        return name, show(old), show(new), "same" if show(old) == show(new) else change

    yield of("a request", format_seconds, lambda p: p.prediction.objective_s)
    yield of("first token", format_seconds, lambda p: p.prediction.prefill.step_s)
    yield of("a token", format_seconds, lambda p: p.prediction.decode.step_s)
    yield of("over the link, prompt", format_bytes, lambda p: p.prediction.prefill.link_bytes)
    yield of("over the link, a token", format_bytes, lambda p: p.prediction.decode.link_bytes)
    yield of("GPU memory", format_bytes, lambda p: p.prediction.gpu_memory.total_bytes)
    yield of("host memory", format_bytes, lambda p: p.prediction.host_memory_bytes)
    for store in STORES.values():
        stored = attrgetter(f"prediction.{store.bytes_key}")
        if not store.is_host and (stored(before) or stored(after)):
            yield of(store.title, format_bytes, stored)


def _escape(text: str) -> str:
    """Keep Markdown from taking a name, which comes from strangers, for its own."""
    line = " ".join(text.split())
    return "".join(f"\\{c}" if c in r"\|`*_<>[]#&!" else c for c in line)


MARKS = {
    "holds": "ok",
    "drift": "DRIFT",
    "infeasible": "NO ROOM",
    "refused": "REFUSED",
    "unknown": "not told",
    "error": "ERROR",
}
"""Words that people read for each verdict."""
FAILURES = ("drift", "infeasible", "refused", "error")
"""Verdicts that fail a plan, the worst first."""


def render_findings(title: str, findings: Sequence[Finding]) -> RenderableType:
    """Show what was found of one plan, a paragraph for each thing that was checked."""
    table = make_grid(3)
    for finding in findings:
        table.add_row(MARKS[finding.verdict], finding.subject, Text(name_options(finding.text)))
    return Group(Text(title), table)


def findings_payload(
    title: str, findings: Sequence[Finding], *, strict: bool = False
) -> dict[str, Any]:
    """Return what was found of one plan as JSON."""
    return {
        "plan": title,
        "verdict": worst_verdict(findings, strict=strict),
        "findings": [{**vars(finding), "text": name_options(finding.text)} for finding in findings],
    }


def worst_verdict(findings: Sequence[Finding], *, strict: bool = False) -> str:
    """Return the verdict of all findings together: the first of ``FAILURES`` that is among them.

    If a check is ``strict``, a fact that could not be compared is a failure, too, and the least.
    """
    verdicts = {finding.verdict for finding in findings}
    failures = (*FAILURES, "unknown") if strict else FAILURES
    return next((each for each in failures if each in verdicts), "holds")
