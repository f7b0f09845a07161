"""``offplan run``: load by a plan, generate, compare with what was predicted."""

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from offplan.cli import options
from offplan.cli.options import read_text
from offplan.cli.output import (
    JSON_VERSION,
    STANDARD,
    ProgressBar,
    check_stdout,
    print_json,
    print_note,
    print_result,
    waiting,
)
from offplan.errors import InputError


def run(
    plan: options.Plan,
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            parser=read_text, metavar="TEXT", help="Text to continue; without any, random tokens."
        ),
    ] = None,
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File whose text to continue; - is standard input.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(help="Lines of JSON, each with a prompt or messages; - is standard input."),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File that --prompts writes a line to for each text; a rerun goes on with it. "
            "[default: standard output]",
        ),
    ] = None,
    force: options.Force = False,
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer prompts, by the model's chat template.")
    ] = False,
    model: options.LocalModel = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate. [default: the plan's]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Draw tokens: logits are divided by it; 0 is greedy. [default: greedy]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw from so many of the likeliest tokens.")
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that have this probability together."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the first text; the next one has the next number. [default: 0]"),
    ] = None,
    stop_strings: Annotated[
        list[str] | None,
        typer.Option(parser=read_text, metavar="TEXT", help="End a text before this one."),
    ] = None,
    dummy_weights: options.DummyWeights = False,
    device: options.Device = None,
    json: options.Json = False,
) -> None:
    """Run a plan: continue prompts, or random tokens, then show predicted against measured."""
    from offplan.cli.lines import Results, read_lines
    from offplan.cli.planning import open_plan_to_run

    # before torch is imported, which takes seconds: the mistakes that need none
    check_stdout()
    is_prompted = bool(prompt or prompt_file or prompts)
    _check_usage(
        {
            "--prompts takes prompts from its file: leave --prompt and --prompt-file out": prompts
            and (prompt or prompt_file),
            "--output is for the lines that --prompts makes": output and not prompts,
            "--chat and --stop-strings need a prompt": (chat or stop_strings) and not is_prompted,
            "--json is printed to stdout, and so are the lines: name a file with --output": json
            and prompts
            and output in (None, STANDARD),
        }
    )
    lines = [] if prompts is None else read_lines(prompts)
    loaded, found = open_plan_to_run(plan, model)

    with waiting("starting torch"):
        from offplan.cli.asked import Asked, list_prompts, read_sampling
        from offplan.cli.generating import generate_asked
        from offplan.cli.told import Printer, Teller, Writer
        from offplan.library.sessions import check_context, load_session
        from offplan.library.settling import settle_by
        from offplan.report.payload import run_payload
        from offplan.report.run import render_run
        from offplan.runtime.device import device_name, find_device

    asked = Asked(
        list_prompts(prompt or (), prompt_file or (), lines, chat=chat),
        chat,
        max_new_tokens or loaded.workload.output_tokens,
        stop_strings or (),
        read_sampling(temperature, top_k, top_p, seed),
    )
    chosen = find_device(device)
    texts = asked.read_texts(loaded, found)
    if not texts:
        check_context(loaded, loaded.workload.prompt_tokens, asked.num_tokens)
    with ExitStack() as stack:
        teller = Teller()
        if prompts is not None:
            settings = asked.fingerprint(found, texts[0].rules, dummy_weights=dummy_weights)
            results = Results(output or STANDARD, lines, settings, force=force)
            stack.enter_context(results)
            teller = Writer(results, dict(enumerate(lines)))
            texts = [text for text in texts if lines[text.number].number not in results.done]
            if results.done:
                print_note(f"{len(results.done)} of {len(lines)} texts are in {output} already")
            if not texts:
                if json:
                    print_json({"offplan": JSON_VERSION, "texts": [], "measured": None})
                return
        elif texts and not json:
            alone = loaded.workload.batch == 1 or len(texts) == 1
            teller = Printer(asked.shown, alone=alone)
        loaded, opened = load_session(
            loaded,
            found,
            chosen,
            dummy_weights=dummy_weights,
            on_stage=ProgressBar,
            settle=settle_by(print_note),
        )
        session = stack.enter_context(opened)
        if (peer := session.loaded.store.peer) is not None:
            print_note(f"the offloaded weights lie on {peer}, {device_name(peer)}")
        result = generate_asked(session, loaded, found, asked, texts, teller)
    to_stderr = prompts is not None and output in (None, STANDARD)
    print_result(
        run_payload(loaded, result, texts),
        render_run(loaded, result),
        json=json,
        file=sys.stderr if to_stderr else None,
    )


def _check_usage(mistakes: dict[str, object]) -> None:
    """Raise InputError for the first mistake that was made."""
    for text, made in mistakes.items():
        if made:
            raise InputError(text)
