"""A session generates what ``run`` asks for, and says how fast while it does."""

from collections.abc import Sequence

from offplan.checkpoint.model import Model
from offplan.cli.live import LiveLine
from offplan.cli.output import waiting
from offplan.cli.request import GenerationRequest
from offplan.cli.told import Teller
from offplan.errors import NotANumberError
from offplan.library.repricing import compare_experts, predict_workload
from offplan.plan import Plan
from offplan.report.run import RunResult
from offplan.runtime.device import device_name
from offplan.runtime.generate import Measured, generate
from offplan.runtime.prompts import random_prompt
from offplan.runtime.sampling import make_chooser
from offplan.runtime.session import Session
from offplan.runtime.texts import Text, form_batches, generate_texts


def generate_request(
    session: Session,
    plan: Plan,
    model: Model,
    request: GenerationRequest,
    texts: Sequence[Text],
    teller: Teller,
) -> RunResult:
    """Continue ``texts`` by batches of the plan, or its workload's random tokens without any."""
    measured, workload = Measured(), plan.workload
    if texts:
        changes = session.changes_with_length
        batches = form_batches(texts, workload.batch, changes_with_length=changes)
        batch = max(map(len, batches))
        lengths = [min(len(text.prompt) for text in each) for each in batches]
        num_tokens = lengths[-1]
        _warm_up(session, batch, lengths[0])
        with LiveLine(len(texts), lambda: session.link_bytes, shown=not teller.is_shown) as live:
            try:
                for text, piece in generate_texts(session, batches, request.sampling, measured):
                    teller.take(text, piece)
                    live.count(1, num_ended=text.finish is not None)
            except NotANumberError as error:
                teller.finish()  # what came out before is shown
                names = [request.prompts[number][0] for number in error.numbers]
                raise NotANumberError(error.cause, error.numbers, names) from None
        teller.finish()
    else:
        tokens = random_prompt(model, workload)
        batch, num_tokens = tokens.shape
        _warm_up(session, batch, num_tokens)
        choose = make_chooser(request.sampling, range(batch), session.device)
        with LiveLine(batch, lambda: session.link_bytes) as live:
            for _ in generate(session, tokens, request.num_tokens, measured, choose=choose):
                live.count(batch)
    ran = workload.model_copy(
        update={"batch": batch, "prompt_tokens": num_tokens, "output_tokens": request.num_tokens}
    )
    is_same = (ran.batch, ran.prompt_tokens) == (workload.batch, workload.prompt_tokens)
    return RunResult(
        device_name(session.device),
        batch,
        num_tokens,
        session.gpu_bytes or None,
        measured,
        None if is_same else predict_workload(plan, model, ran),
        compare_experts(plan, model, session.find_experts(measured.num_decodes)),
    )


def _warm_up(session: Session, batch: int, prompt_tokens: int) -> None:
    with waiting("warming up, which compiles and captures on a GPU"):
        session.warm_up(batch, prompt_tokens)
