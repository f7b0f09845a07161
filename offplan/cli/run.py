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
from offplan.cli.output import Progress, print_json, print_note, print_report
from offplan.errors import InputError

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
    from offplan.cli.models import find_weights, open_planned_model
    from offplan.plan import load_plan

    loaded = load_plan(plan)
    found = open_planned_model(loaded, model)

    from offplan.cli.text import Text
    from offplan.cli.workload import device_name, find_device, random_prompt

    num_tokens = max_new_tokens or loaded.workload.output_tokens
    chosen = find_device(device)
    text = None if prompt is None else Text(found, prompt, stream=not json)
    tokens = random_prompt(loaded, found) if text is None else text.tokens
    _check_context(loaded, tokens.shape[1], num_tokens)
    folder = None if dummy_weights else find_weights(found)

    from offplan.runtime.session import Session

    with Session(
        found,
        loaded.offload,
        context=loaded.workload.context,
        device=chosen,
        folder=folder,
        on_progress=Progress("loading"),
    ) as session:
        if (peer := session.loaded.store.peer) is not None:
            print_note(f"the offloaded weights lie on {peer}, {device_name(peer)}")
        result = _generate(session, tokens, num_tokens, text)
    _report(loaded, result, text, json=json)


def _generate(
    session: "Session", prompt: "torch.Tensor", num_tokens: int, text: "Text | None"
) -> "RunResult":
    """Generate to the end and collect what it cost."""
    from offplan.cli.workload import device_name
    from offplan.report.run import RunResult
    from offplan.runtime.generate import Measured, generate

    session.warm_up(*prompt.shape)
    measured = Measured()
    stop = frozenset[int]() if text is None else text.stop_tokens
    for token in generate(session, prompt, num_tokens, measured, stop):
        if text is not None:
            text.add(token)
    if text is not None:
        text.end()
    on_gpu = session.device.type == "cuda"
    num_steps = len(measured.step_s)
    # a stop token ends the text when the step after it is already on its way
    num_decodes = min(num_steps + 1, num_tokens - 1)
    return RunResult(
        device=device_name(session.device),
        batch=prompt.shape[0],
        prompt_tokens=prompt.shape[1],
        output_tokens=num_steps + 1,
        first_token_s=measured.first_token_s,
        step_s=measured.median_step_s if num_steps else None,
        prefill_link_bytes=measured.prefill_link_bytes,
        decode_link_bytes=measured.decode_link_bytes // num_decodes if num_decodes else None,
        gpu_bytes=session.gpu_bytes if on_gpu else None,
    )


def _report(plan: "Plan", result: "RunResult", text: "Text | None", *, json: bool) -> None:
    from offplan.report.payload import run_payload
    from offplan.report.run import render_run

    if json:
        print_json(run_payload(plan, result, None if text is None else text.generated))
        return
    if text is not None:
        print()
    print_report(render_run(plan, result))


def _check_context(plan: "Plan", prompt_tokens: int, num_tokens: int) -> None:
    context = plan.workload.context
    if prompt_tokens + num_tokens > context:
        raise InputError(
            f"{prompt_tokens} prompt tokens and {num_tokens} new ones exceed the plan's context "
            f"of {context}: lower --max-new-tokens, or plan with a larger --context"
        )
