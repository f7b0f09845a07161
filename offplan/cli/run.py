"""``offplan run``: load by a plan, generate, compare with what was predicted."""

from typing import Annotated

import typer

from offplan.cli import options
from offplan.cli.options import read_text
from offplan.cli.output import ProgressBar, print_note, print_result


def run(
    plan: options.Plan,
    prompt: Annotated[
        str | None,
        typer.Option(
            parser=read_text, metavar="TEXT", help="Text to continue; without it, random tokens."
        ),
    ] = None,
    model: options.LocalModel = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate. [default: the plan's]")
    ] = None,
    dummy_weights: options.DummyWeights = False,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Run a plan: generate text, then show predicted against measured."""
    from offplan.cli.planning import open_plan

    # before torch is imported, which takes seconds: the mistakes that need none
    loaded, found = open_plan(plan, model)

    from offplan.cli.text import Text
    from offplan.prompts import random_prompt
    from offplan.report.payload import run_payload
    from offplan.report.run import RunResult, render_run
    from offplan.runtime.device import device_name, find_device
    from offplan.runtime.generate import Measured, generate
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
        session.warm_up(*tokens.shape)
        measured = Measured()
        continuation = None
        if text is None:
            for _ in generate(session, tokens, num_tokens, measured):
                pass
        else:
            made = generate(session, tokens, num_tokens, measured, text.end_tokens)
            continuation = text.follow(made)
        batch, prompt_tokens = tokens.shape
        taken = session.gpu_bytes or None
        result = RunResult(device_name(chosen), batch, prompt_tokens, taken, measured)
    if text is not None and not json:
        print()
    payload = run_payload(loaded, result, continuation)
    print_result(payload, render_run(loaded, result), json=json)
