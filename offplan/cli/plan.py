"""``offplan plan``: just the plan, on stdout."""

import shlex
import sys

from offplan.cli.output import STANDARD, print_json, print_note, print_result, waiting
from offplan.cli.query import Query, takes_query
from offplan.errors import InputError


@takes_query
def plan(query: Query) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan.cli.planning import save_plan
    from offplan.library.machines import why_unmeasured
    from offplan.library.runnable import why_not_run
    from offplan.packing import pack_model
    from offplan.plan import dump_plan
    from offplan.planner.make import make_plan
    from offplan.report.analysis import analyze_result, describe_running, render_analysis
    from offplan.report.answer import render_answer
    from offplan.report.payload import plan_payload

    query.check()
    if query.svg == STANDARD and (query.json or query.plan_file is None):
        raise InputError("the plan is printed to stdout: name another file with --svg or --output")
    model, question = query.read()
    if question is None:
        raise InputError(why_unmeasured())
    if query.frontier:
        query.print_frontier(question)
        return
    with waiting("planning"):
        result = make_plan(question)
        made = result.plan
        why_not = why_not_run(pack_model(model, made.offload.packing))
    if query.verbose:
        analysis = analyze_result(question, result)
        command = shlex.join(["offplan", *sys.argv[1:]])
        report = [*render_answer(analysis, command, query.plan_file), *render_analysis(analysis)]
        print_result({}, *report, json=False, file=sys.stderr)
    else:
        print_note(describe_running(model, why_not))
    query.save_picture(question, made)
    if query.plan_file is not None:
        save_plan(query.plan_file, made, force=query.force)
    if query.json:
        print_json(plan_payload(made, why_not))
    elif query.plan_file is None:
        sys.stdout.write(dump_plan(made))
