"""What a check of a plan finds."""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["holds", "drift", "infeasible", "refused", "unknown", "error"]
"""Whether something is as the plan has it, is not, lacks memory, is refused by what is to run it,
could not be compared, or could not be read."""


@dataclass(frozen=True)
class Finding:
    """One thing that was checked."""

    subject: str
    verdict: Verdict
    text: str
    """What was found, and what to do about it, in words for people."""
