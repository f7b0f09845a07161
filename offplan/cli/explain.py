"""``offplan explain`` and ``offplan show``: where a plan's numbers come from, and what it says."""

from offplan.cli import options
from offplan.cli.output import ProgressBar, print_result


def explain(
    plan: options.Plan,
    model: options.LocalModel = None,
    machine: options.OtherMachine = None,
    json: options.Json = False,
) -> None:
    """Show each number of a plan with its formula and inputs, and what one step of a knob costs.

    Numbers are those that the decision has by now, before they are rounded for the file. If the
    file says something else, that is noted.
    """
    from offplan.cli.planning import price_asked
    from offplan.costs.predict import derive_prediction
    from offplan.library.asking import ask_again
    from offplan.library.machines import load_machine
    from offplan.plan import load_plan
    from offplan.planner.neighbours import find_neighbours
    from offplan.report.explain import explanation_payload, render_explanation

    loaded = load_plan(plan)
    chosen = None if machine is None else load_machine(machine)
    question = ask_again(
        loaded, model=model, machine=chosen, on_progress=ProgressBar("reading headers")
    )
    priced = price_asked(plan, loaded, question)
    terms = derive_prediction(question.hold(priced.offload), question.planned_machine, priced)
    neighbours = find_neighbours(question, priced)
    payload = explanation_payload(terms, neighbours)
    print_result(payload, *render_explanation(priced, terms, neighbours), json=json)


def show(plan: options.Plan, json: options.Json = False) -> None:
    """Show what a plan file says: the question, the decision, memory and times.

    Nothing else is read, neither the model nor the machine.
    """
    from offplan.plan import load_plan
    from offplan.report.payload import file_payload
    from offplan.report.plan import render_plan_file

    loaded = load_plan(plan)
    print_result(file_payload(loaded), *render_plan_file(loaded), json=json)
