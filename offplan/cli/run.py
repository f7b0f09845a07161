"""``offplan run``: load by a plan, generate, compare with what was predicted."""

import sys
from dataclasses import asdict

from offplan.cli.options import takes
from offplan.cli.output import (
    ProgressBar,
    check_stdout,
    print_note,
    print_result,
    waiting,
)
from offplan.cli.run_options import RunOptions
from offplan.errors import InputError


@takes(RunOptions)
def run(given: RunOptions) -> None:
    """Run a plan: continue prompts, or random tokens, then show predicted against measured.

    Of a model, plan it for this machine first. The plan is kept for the next time.
    """
    from offplan.cli.drafts import require_drafts, save_drafts
    from offplan.cli.opening import open_to_run
    from offplan.cli.routing import check_file, save_routing
    from offplan.library.machines import check_threads
    from offplan.routing.profile import require_routing

    # before torch is imported, which takes seconds: the mistakes that need none
    check_stdout()
    given.check()
    check_file(given.record_routing, force=given.force)
    check_file(given.record_drafts, "--record-drafts", force=given.force)
    lines = given.read_lines()
    plan, model = open_to_run(
        given.plan,
        given.model,
        given.planned,
        output=None if given.prompts is not None else given.output,
        force=given.force,
        goal=asdict(given.goal),
        device=given.device,
        dummy_weights=given.dummy_weights,
        trust_remote_code=given.trust_remote_code,
    )
    if given.record_drafts is not None:
        require_drafts(plan)
    if given.host_threads is not None:
        if not plan.has_cores:
            raise InputError(
                "--host-threads is for plans whose rules have `decode: host`, and this one has "
                "none: leave it out, or plan with --host-cores"
            )
        check_threads(given.host_threads)
    if given.record_routing is not None:
        require_routing(model, way=plan.goal.way)

    with waiting("starting torch"):
        from offplan.cli.generating import generate_request
        from offplan.cli.output_sink import open_teller
        from offplan.cli.request import make_request
        from offplan.cli.threads import settle_threads
        from offplan.library.sessions import check_context, load_session
        from offplan.library.settling import replan_without
        from offplan.report.payload import run_payload
        from offplan.report.run import render_run
        from offplan.runtime.device import device_name, find_device

    request = make_request(given, lines, plan)
    device = find_device(given.device)
    settle_threads(device)
    texts = request.read_texts(plan, model)
    if not texts:
        check_context(plan, plan.workload.prompt_tokens, request.num_tokens)
    with open_teller(given, lines, request, texts, plan, model) as teller:
        left = teller.leave_out_done(texts)
        if texts and not left:
            if given.json:
                print_result({"texts": [], "measured": None}, json=True)
            return
        plan, opened = load_session(
            plan,
            model,
            device,
            dummy_weights=given.dummy_weights,
            record_routing=given.record_routing is not None,
            host_threads=given.host_threads,
            on_stage=ProgressBar,
            settle=replan_without(print_note),
        )
        with opened as session:

            def save() -> None:
                if given.record_routing is not None:
                    save_routing(session, plan, given.record_routing, force=given.force)

            if (other := session.loaded.store.slab_device) is not None:
                print_note(f"the offloaded weights lie on {other}, {device_name(other)}")
            try:
                result = generate_request(session, plan, model, request, left, teller)
            except BrokenPipeError:
                save()  # who reads the texts has closed the pipe; the file was asked for, too
                raise
            save()
            if given.record_drafts is not None:
                save_drafts(result.measured.drafts, plan, given.record_drafts, force=given.force)
    # in a pipe or a file a text stands alone
    text_alone = bool(texts) and not given.json and not sys.stdout.isatty()
    print_result(
        run_payload(plan, result, left),
        render_run(plan, result),
        json=given.json,
        file=sys.stderr if given.prints_lines or text_alone else None,
    )
