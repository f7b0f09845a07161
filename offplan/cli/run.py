"""``offplan run``: load by a plan, generate, compare with what was predicted."""

from typing import TYPE_CHECKING, Annotated

import typer

from offplan.cli.options import (
    DeviceOption,
    DummyWeightsOption,
    JsonOption,
    LocalModelOption,
    PlanArgument,
)
from offplan.cli.output import ProgressBar, print_json, print_note, print_report

if TYPE_CHECKING:
    import torch

    from offplan.cli.text import Text
    from offplan.plan import Plan
    from offplan.report.run import RunResult
    from offplan.runtime.session import Session


def run(
    plan: PlanArgument,
    prompt: Annotated[
        str | None, typer.Option(help="Text to continue; without it, random tokens.")
    ] = None,
    model: LocalModelOption = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate. [default: the plan's]")
    ] = None,
    dummy_weights: DummyWeightsOption = False,
    device: DeviceOption = None,
    json: JsonOption = False,
) -> None:
    """Run a plan: generate text, then show predicted against measured."""
    from offplan.plan import load_plan
    from offplan.planned import open_planned_model

    # before torch is imported, which takes seconds: the mistakes that need none
    loaded = load_plan(plan)
    found = open_planned_model(loaded, model, ProgressBar("reading headers"))

    from offplan.cli.text import Text
    from offplan.prompts import random_prompt
    from offplan.runtime.device import device_name, find_device
    from offplan.sessions import check_context, open_session

    chosen = find_device(device)
    num_tokens = max_new_tokens or loaded.workload.output_tokens
    text = None if prompt is None else Text(found, prompt, stream=not json)
    tokens = random_prompt(found, loaded.workload) if text is None else text.tokens
    check_context(loaded, tokens.shape[1], num_tokens)
    with open_session(
        loaded, model=found, device=chosen, dummy_weights=dummy_weights, on_stage=ProgressBar
    ) as session:
        if (peer := session.loaded.store.peer) is not None:
            print_note(f"the offloaded weights lie on {peer}, {device_name(peer)}")
        result = _generate(session, tokens, num_tokens, text)
    _report(loaded, result, text, json=json)


def _generate(
    session: "Session", prompt: "torch.Tensor", num_tokens: int, text: "Text | None"
) -> "RunResult":
    """Generate to the end, show the text as it comes, and collect what it cost."""
    from offplan.report.run import collect_result
    from offplan.runtime.generate import Measured, generate

    session.warm_up(*prompt.shape)
    measured = Measured()
    end_tokens = frozenset[int]() if text is None else text.end_tokens
    for token in generate(session, prompt, num_tokens, measured, end_tokens):
        if text is not None:
            text.add(token)
    if text is not None:
        text.end()
    return collect_result(session, prompt, measured)


def _report(plan: "Plan", result: "RunResult", text: "Text | None", *, json: bool) -> None:
    from offplan.report.payload import run_payload
    from offplan.report.run import render_run

    if json:
        print_json(run_payload(plan, result, None if text is None else text.generated))
        return
    if text is not None:
        print()
    print_report(render_run(plan, result))
