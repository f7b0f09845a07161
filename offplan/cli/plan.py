"""``offplan plan``: just the plan, on stdout."""

import shlex
import sys

from offplan.cli.output import STANDARD, print_json, print_note, print_result, waiting
from offplan.cli.query import Query
from offplan.cli.takes import takes
from offplan.errors import InputError


@takes(Query)
def plan(query: Query) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan.cli.planning import save_plan
    from offplan.library.analysis import analyze_result
    from offplan.library.machines import why_unmeasured
    from offplan.plan import dump_plan
    from offplan.planner.make import make_plan
    from offplan.report.analysis import render_analysis
    from offplan.report.answer import describe_answer, render_answer
    from offplan.report.payload import plan_payload

    query.check()
    if query.svg == STANDARD and (query.json or query.plan_file is None):
        raise InputError("the plan is printed to stdout: name another file with --svg or --output")
    _, question = query.read(writes=not query.frontier)
    if question is None:
        raise InputError(why_unmeasured())
    if query.frontier:
        query.print_frontier(question)
        return
    with waiting("planning"):
        result = make_plan(question)
        analysis = analyze_result(question, result)
    made = result.plan
    if not query.verbose:
        for line in describe_answer(analysis, made, question):
            print_note(line)
    # before the report is printed: who reads it may close the pipe
    query.save_picture(question, made)
    if query.plan_file is not None:
        save_plan(query.plan_file, made, force=query.force)
    if query.verbose:
        command = shlex.join(["offplan", *sys.argv[1:]])
        report = [*render_answer(analysis, command, query.plan_file), *render_analysis(analysis)]
        print_result({}, *report, json=False, file=sys.stderr)
    if query.json:
        print_json(plan_payload(made, analysis.why_not_run))
    elif query.plan_file is None:
        sys.stdout.write(dump_plan(made))
