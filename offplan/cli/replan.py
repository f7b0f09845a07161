"""``offplan replan``: a plan made again from the question that it records."""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from offplan.cli import options
from offplan.cli.options import flattens
from offplan.cli.output import (
    STANDARD,
    ProgressBar,
    check_writable,
    print_json,
    print_note,
    save_file,
    waiting,
)
from offplan.errors import InputError, PlanError


@flattens
def replan(
    plan: options.Plan,
    model: options.LocalModel = None,
    machine: options.OtherMachine = None,
    accept_drift: Annotated[
        bool,
        typer.Option("--accept-drift", help="Plan for the model as it is, if it is another one."),
    ] = False,
    goal: options.OtherGoal = options.SAME_GOAL,
    routing: options.Routing = None,
    acceptance: options.Acceptance = None,
    no_draft: options.NoDraft = False,
    trust_remote_code: options.TrustRemoteCode = False,
    output: options.Output = None,
    force: options.Force = False,
    json: options.Json = False,
) -> None:
    """Make a plan again from its file: same model, workload, budget and goal.

    Comments, the order of keys and unchanged values stay as they are written in the file. Comments
    inside a list of rules that gets longer or shorter are lost. Plans of a machine that was
    measured are made from this one's figures, measured again.
    """
    from offplan.cli.planning import (
        note_budget,
        relocate_path,
        relocate_plan,
        relocate_profile,
    )
    from offplan.library.analysis import why_not_plan
    from offplan.library.asking import ask_again, renew_goal
    from offplan.library.machines import find_machine
    from offplan.library.planned import read_planned_model
    from offplan.library.repricing import list_changes
    from offplan.plan import MOST_FILE_BYTES, dump_plan, load_plan
    from offplan.planner.make import make_plan
    from offplan.records import read_text
    from offplan.report.payload import plan_payload
    from offplan.upkeep.comparing import compare_plans
    from offplan.upkeep.rewriting import rewrite_plan

    if accept_drift and model is not None:
        raise InputError(
            "--accept-drift is for the model that the plan names: leave --model out, or ask "
            "`offplan plan` about another one"
        )
    check_writable(output, force=force)
    changed = options.settle_draft(vars(goal), no_draft=no_draft)
    old = load_plan(plan, to_replan=True)
    found = read_planned_model(
        old, model, ProgressBar("reading headers"), trust_remote_code=trust_remote_code
    )
    chosen = None
    if machine is not None or old.machine.profile is None:
        chosen = find_machine(
            machine,
            found,
            old.workload,
            store=old.offload.store,
            goal=renew_goal(old.goal, **changed),
            on_stage=ProgressBar,
        )
    if chosen is not None and chosen.profile_name is not None:
        named = relocate_profile(chosen.profile_name, Path(), plan.resolve().parent)
        chosen = replace(chosen, profile_name=named)
    question = ask_again(
        old,
        model=found,
        machine=chosen,
        accept_drift=accept_drift,
        **changed,
        routing=None if routing is None else str(routing),
        acceptance=None if acceptance is None else str(acceptance),
    )
    if routing is not None:
        file = relocate_path(str(routing), Path(), plan.resolve().parent)
        question = replace(question, routing_file=file)
    if acceptance is not None:
        file = relocate_path(str(acceptance), Path(), plan.resolve().parent)
        question = replace(question, acceptance_file=file)
    note_budget(question.machine, old.budget.gpu_memory)
    with waiting("planning"):
        made = make_plan(question).plan
    difference = compare_plans(old, made)
    changes = [f"{each.key} {each.before} -> {each.after}" for each in difference.asked]
    changes += ["another decision"] * bool(difference.decided) + list_changes(old, made)
    print_note(f"{plan}: {'; '.join(changes) or 'nothing changes'}")
    at_hand = plan if output in (None, STANDARD) else output
    moved = relocate_plan(made, plan.resolve().parent, at_hand.resolve().parent)
    text = rewrite_plan(read_text(plan, "plan", MOST_FILE_BYTES, PlanError), moved)
    if text is None:
        print_note(f"the layout of {plan} cannot be kept: its comments are left out")
        text = dump_plan(moved)
    if output is not None:
        save_file(output, text, force=force)
    if json:
        print_json(plan_payload(made, why_not_plan(found, made)))
    elif output is None:
        sys.stdout.write(text)
