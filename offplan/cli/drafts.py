"""The acceptance profile that ``run --record-drafts`` saves and prints."""

from pathlib import Path

from offplan.cli.output import print_note, save_file
from offplan.drafts.acceptance import AcceptanceProfile, dump_acceptance
from offplan.drafts.counts import DraftCounts
from offplan.errors import InputError
from offplan.plan import Plan


def require_drafts(plan: Plan) -> None:
    """Raise InputError for a plan without drafts, of which none can be recorded."""
    if plan.offload.draft is None:
        raise InputError(
            "--record-drafts is for plans that check drafts, and this one checks none: leave it "
            "out, or plan with --draft ngram:7"
        )


def save_drafts(counts: DraftCounts, plan: Plan, path: Path, *, force: bool) -> None:
    """Write what a run counted as an acceptance profile, and print its chances.

    Raises InputError if no draft was offered, and what ``save_file`` raises.
    """
    assert plan.offload.draft is not None, "require_drafts refuses others"
    profile = AcceptanceProfile.of_counts(plan.offload.draft.kind, plan.model, counts)
    save_file(path, dump_acceptance(profile), force=force)
    chances = ", ".join(f"{chance:.0%}" for chance in profile.chances)
    print_note(f"drafts taken by position, given those before: {chances}")
