"""``offplan analyze`` and ``offplan plan``: the plan that suits a model and a machine."""

import shlex
import sys
from dataclasses import asdict

import typer

from offplan.cli.options import takes
from offplan.cli.output import STANDARD, print_json, print_note, print_result, waiting
from offplan.cli.query import Query
from offplan.errors import InfeasibleError, InputError


@takes(Query)
def analyze(query: Query) -> None:
    """Say whether a model fits a machine, how fast it runs there, and by which plan."""
    from offplan.cli.planning import save_plan
    from offplan.library.analysis import analyze_model, analyze_question
    from offplan.plan import Goal
    from offplan.report.answer import render_analysis, render_answer
    from offplan.report.payload import analyze_payload

    query.check()
    output, on_stdout = query.output, STANDARD in (query.output, query.svg)
    if query.json and on_stdout:
        raise InputError("--json is printed to stdout: name another file with --output and --svg")
    model, question = query.read(writes=output is not None)
    if query.frontier:
        query.print_frontier(question)
        return
    with waiting("planning"):
        if question is None:
            analysis = analyze_model(model, Goal.from_arguments(**asdict(query.goal)))
        else:
            analysis = analyze_question(question)
    result = analysis.result
    # before anything is printed: who reads the answer may close the pipe
    if result is not None and question is not None:
        query.save_picture(question, result.plan)
        if output is not None:
            save_plan(output, result.plan, force=query.force)
    answer = render_answer(analysis, shlex.join(["offplan", *sys.argv[1:]]), query.plan_file)
    # without a plan the answer is all there is to say
    details = render_analysis(analysis) if query.verbose and result is not None else []
    print_result(
        analyze_payload(analysis) if query.json else {},
        *answer,
        *details,
        json=query.json,
        file=sys.stderr if on_stdout else None,
    )
    if (output or query.svg) and result is None:
        kind = InfeasibleError if analysis.infeasible else InputError
        raise kind(f"{query.svg or output} was not written: there is no plan")
    if analysis.infeasible:  # as the answer says, and as `plan` ends
        raise typer.Exit(InfeasibleError.exit_code)


@takes(Query)
def plan(query: Query) -> None:
    """Print the plan for a model, a workload and a budget, as YAML or JSON."""
    from offplan.cli.planning import save_plan
    from offplan.library.analysis import analyze_result
    from offplan.library.machines import why_unmeasured
    from offplan.plan import dump_plan
    from offplan.planner.make import make_plan
    from offplan.report.answer import describe_answer, render_analysis, render_answer
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
