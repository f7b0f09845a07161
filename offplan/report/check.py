"""Findings of checked plans, as tables and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from offplan.report.table import make_grid
from offplan.report.wording import name_options
from offplan.upkeep.finding import Finding

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
