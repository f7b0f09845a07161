"""Findings of a check of a plan."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "drift", "infeasible", "refused", "unknown", "error"]
"""A fact is as the plan has it, differs, lacks memory, is refused by its runtime, could not be
compared, or could not be read."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    subject: str
    verdict: Verdict
    text: str
    """Words for people: what was found, and what to do about it."""
