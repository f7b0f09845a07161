"""The routing profile that ``--record-routing`` of ``run`` and ``bench`` saves and prints."""

from pathlib import Path
from typing import TYPE_CHECKING

from offplan.cli.output import STANDARD, check_writable, print_note, save_file
from offplan.errors import InputError
from offplan.plan import Plan

if TYPE_CHECKING:  # it imports torch
    from offplan.routing.profile import BatchReuse
    from offplan.runtime.session import Session

SHARES = 0.25, 0.5, 0.75
"""Shares of a layer's experts whose hits are printed."""


def check_file(path: Path | None, option: str = "--record-routing", *, force: bool) -> None:
    """Raise InputError for a file that could not be written, and for stdout, with the option."""
    if path == STANDARD:
        raise InputError(
            f"{option} writes a file, and the result is printed to stdout: name a file"
        )
    check_writable(path, force=force)


def save_routing(session: "Session", plan: Plan, path: Path, *, force: bool) -> None:
    """Write what a session recorded as a routing profile, and print what caches would serve.

    Raises InputError if no step was run, and what ``save_file`` raises.
    """
    from offplan.routing.profile import dump_routing, make_routing

    recorder, experts = session.routing, session.loaded.model.experts
    assert recorder is not None, "load_session was asked to record"
    assert experts is not None, "require_routing refuses others"
    with session.stream():
        runs = recorder.steps
    profile = make_routing(plan.model, recorder.layers, runs, experts.num_experts)
    save_file(path, dump_routing(profile), force=force)
    for each in profile.batches:
        print_note(describe_reuse(each, profile.num_experts))


def describe_reuse(reuse: "BatchReuse", num_experts: int) -> str:
    """Say how many experts a step chose, and what share of them caches would have held."""
    sizes = [round(share * num_experts) for share in SHARES]
    rates = ", ".join(f"{size} hold {reuse.hit_rate(size):.0%}" for size in sizes)
    chose = f"a step chose {reuse.touched:.1f} of {num_experts} experts of a layer"
    return f"batch {reuse.batch}: {chose}; of these choices the last used {rates}"
