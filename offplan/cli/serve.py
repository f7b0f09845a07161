"""``offplan serve``: a plan behind OpenAI's API."""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from offplan.cli import options
from offplan.cli.opening import (
    SERVED_AS_USUAL,
    PlanFile,
    ServedModelOptions,
    open_to_run,
)
from offplan.cli.output import ProgressBar, print_note, printing_to_stderr, waiting
from offplan.errors import InputError, OffplanError
from offplan.units import format_seconds

if TYPE_CHECKING:
    from offplan.runtime.rows import Rows
    from offplan.runtime.session import Session

_BYTES_PER_TOKEN = 32
"""Bytes of a body for each token of the context: text in UTF-8 has 4, escaped in JSON up to 12."""
_LEAST_BODY_BYTES = 2**20
_DRAIN_S = 6.0
"""Seconds for the requests at hand when a server is to end. The rest of its end takes up to three,
of the ten that ``docker stop`` leaves. Source:
https://docs.docker.com/reference/cli/docker/container/stop."""
_MOST_CONNECTIONS = 128
"""Connections of one address, with a whole request or without. Four times as many fit into the
1,024 files that a process may have open by default."""


@options.flattens
def serve(
    plan: options.PlanOrModel,
    model: options.LocalModel = None,
    planned: ServedModelOptions = SERVED_AS_USUAL,
    output: PlanFile = None,
    force: options.Force = False,
    host: Annotated[
        str, typer.Option(help="Address to listen on; 0.0.0.0 lets other machines in.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = 8000,
    name: Annotated[
        str | None, typer.Option(help="The model's name in the API. [default: the folder's or id]")
    ] = None,
    api_key: Annotated[
        str | None,
        options.api_key(
            help="Key that clients must send; better in OFFPLAN_API_KEY, which `ps` does not show."
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Listen on other addresses without a key.")
    ] = False,
    cors: Annotated[
        list[str] | None,
        typer.Option(metavar="ORIGIN", help="Origin whose pages may call the server; * for all."),
    ] = None,
    generation_config: Annotated[
        Literal["auto", "none"],
        typer.Option(
            case_sensitive=False,
            help="`none` draws by OpenAI's defaults, not by the model's generation_config.",
        ),
    ] = "auto",
    temperature: Annotated[
        float | None,
        typer.Option(help="Temperature of requests that name none. [default: the model's]"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(min=0, help="Their likeliest tokens to draw from; 0 for all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Their likeliest tokens of this probability together.")
    ] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Their tokens of this part of the likeliest's probability.")
    ] = None,
    max_waiting: Annotated[
        int, typer.Option(min=0, help="Texts that may wait beyond the batch; more get 503.")
    ] = 256,
    max_waiting_per_client: Annotated[
        int, typer.Option(min=0, help="Texts of one client that may wait; more get 429.")
    ] = 64,
    share_prefixes: Annotated[
        bool,
        typer.Option(
            "--share-prefixes",
            help="Let a client's text go on from what others asked, which they can find out.",
        ),
    ] = False,
    max_body: Annotated[
        int | None,
        typer.Option(min=1, help="Bytes of a request. [default: 1 MiB, or 32 a token of context]"),
    ] = None,
    max_connections: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Requests of one address at a time, of which more get 503, and its other "
            "connections, of which the oldest is closed. "
            "[default: 128, or the texts that may run and wait]",
        ),
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(min=0, help="Seconds for what is being made once a signal ends it.")
    ] = _DRAIN_S,
    trust_remote_code: options.TrustRemoteCode = False,
    dummy_weights: options.DummyWeights = False,
    device: options.Device = None,
) -> None:
    """Serve a plan by OpenAI's API: chats and completions, whole or streamed.

    Of a model, plan it for this machine first, with --batch texts. The plan is kept for the next
    time.
    Up to the plan's batch of texts are continued together, each from its own prompt; the rest wait,
    and clients take turns. The first Ctrl-C or SIGTERM takes no more requests and finishes those
    that are there, the second one ends them.
    """
    require_extra()
    from offplan.serve.guard import Guard, check_exposure
    from offplan.serve.serving import Serving, listen

    check_exposure(host, api_key, insecure=insecure)
    # before minutes of loading, in which it answers that it loads
    serving = Serving(
        listen(host, port),
        max_connections=max_connections or _MOST_CONNECTIONS,
        drain_s=drain_timeout,
        on_end=_note,
        leave=_leave,
    )
    with serving, serving.hearing_signals():
        at = f"http://{f'[{host}]' if ':' in host else host}:{serving.port}"
        _note(f"listening at {at}, which answers 503 until the model is loaded")
        loaded, found = open_to_run(
            plan,
            model,
            planned,
            output=output,
            force=force,
            device=device,
            dummy_weights=dummy_weights,
            trust_remote_code=trust_remote_code,
        )
        with waiting("starting torch"):
            from offplan.library.sessions import load_session
            from offplan.library.settling import replan_without
            from offplan.runtime.device import find_device
            from offplan.runtime.joined import JoinedTexts
            from offplan.runtime.prompts import load_tokenizer
            from offplan.runtime.rendering import Renderer
            from offplan.runtime.rules import read_recommended, read_rules
            from offplan.serve.app import Service, make_app
            from offplan.serve.metrics import Metrics
            from offplan.serve.reading import Reader
            from offplan.serve.worker import Worker

        with printing_to_stderr():
            tokenizer = load_tokenizer(found)
        rules, drawing = read_rules(found, tokenizer), dict[str, float]()
        if generation_config == "auto":
            drawing = read_recommended(found)
        else:
            rules = replace(rules, repetition_penalty=1.0)
        of_file = dict(drawing)
        for field, value in (
            ("temperature", temperature),
            ("top_k", top_k),
            ("top_p", top_p),
            ("min_p", min_p),
        ):
            if value is not None:
                drawing[field] = value
        _check_drawing(drawing)
        renderer = Renderer()
        renderer.start()  # while the model is loaded
        name = name or _name_model(loaded.model.source)
        context, batch = loaded.workload.context, loaded.workload.batch
        loaded, opened = load_session(
            loaded,
            found,
            find_device(device),
            dummy_weights=dummy_weights,
            on_stage=ProgressBar,
            settle=replan_without(print_note),
        )
        with opened as session:
            metrics = Metrics(loaded.prediction)
            rows = _make_rows(session, batch)
            with waiting("warming up, which compiles and captures on a GPU"):
                rows.warm_up(min(loaded.workload.prompt_tokens, context))
            texts = JoinedTexts(rows)
            limits = Guard(
                api_key or None,
                host,
                max_body or max(_LEAST_BODY_BYTES, _BYTES_PER_TOKEN * context),
                max_connections or max(_MOST_CONNECTIONS, rows.num_rows + max_waiting),
            )
            reader = Reader.of(found, tokenizer, rules, context, name, renderer, drawing)
            for note in reader.notes:
                _note(note)
            service = Service(
                name=name,
                created_s=int(time.time()),
                reader=reader,
                worker=Worker(
                    texts,
                    metrics,
                    most_waiting=max_waiting,
                    most_of_client=max_waiting_per_client,
                    on_fault=_print_fault,
                ),
                metrics=metrics,
                guard=limits,
                on_fault=_print_fault,
                on_note=_note,
                shares_prefixes=share_prefixes,
            )
            _note(_describe_drawing(drawing, of_file, rules.repetition_penalty))
            predicted = format_seconds(loaded.prediction.decode.step_s)
            ready = (
                f"{name} is served at {at}/v1: {rows.num_rows} at a time, contexts of up to "
                f"{context} tokens, predicted {predicted} a token"
            )
            if (draft := loaded.offload.draft) is not None:
                ready += f", {draft.describe()}"
            serving.serve(service, make_app(service, cors or ()), on_ready=lambda: _note(ready))
            if service.worker.drafts.num_passes:
                _note(service.worker.drafts.describe())


def _check_drawing(drawing: Mapping[str, Any]) -> None:
    """Raise InputError for options that nothing can be drawn with."""
    from offplan.runtime.sampling import Sampling

    Sampling(**{key: value for key, value in drawing.items() if (key, value) != ("top_k", 0)})


def _describe_drawing(
    drawing: Mapping[str, float], of_file: Mapping[str, float], penalty: float
) -> str:
    """Say how tokens are drawn where a request names nothing, and who says so."""
    told = [
        f"{field} {value:g} ({'generation_config' if of_file.get(field) == value else 'option'})"
        for field, value in drawing.items()
    ]
    if "temperature" not in drawing:
        told.insert(0, "temperature 1 (OpenAI's default)")
    if penalty != 1:
        told.append(f"repetition_penalty {penalty:g} (generation_config)")
    return f"requests that name no sampling are drawn with {', '.join(told)}"


def require_extra() -> None:
    """Raise InputError if the packages of the extra ``serve`` are missing."""
    try:
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ModuleNotFoundError as error:
        raise InputError(
            f"serving needs the package {error.name}: in a clone of offplan, pip install '.[serve]'"
        ) from None


def _make_rows(session: "Session", batch: int) -> "Rows":
    """Make rows for a plan's batch, or a single one where the model allows no more."""
    from offplan.runtime.rows import Rows

    if batch == 1:
        print_note(
            "the plan serves one text at a time, and further ones wait: `offplan plan --batch 4` "
            "plans for 4 together"
        )
    try:
        return Rows(session, batch)
    except InputError as error:
        print_note(f"{error}: texts are continued one at a time")
        return Rows(session, 1)


def _name_model(source: str) -> str:
    """Return what clients call a model: its id on the Hub, or its folder's name, and no path."""
    path = Path(source)
    if not path.exists() and source.count("/") == 1 and not source.startswith((".", "/", "~")):
        return source
    resolved = path.resolve()
    return (resolved.parent if resolved.suffix == ".json" else resolved).name or "model"


def _note(text: str) -> None:
    """Say something while the server runs, which goes on where nobody reads it any more."""
    with contextlib.suppress(OSError):
        print_note(text)


def _leave(why: BaseException) -> None:
    """End the process whatever its other threads are in."""
    from offplan.cli.ending import tell

    with contextlib.suppress(OSError):
        os._exit(tell(why))
    os._exit(OffplanError.exit_code)


def _print_fault(error: BaseException) -> None:
    """Say what went wrong, with the places in offplan's code unless it is one of its own errors."""
    _note(f"a request failed: {type(error).__name__}: {' '.join(str(error).split())}")
    if not isinstance(error, OffplanError):
        import traceback

        for line in "".join(traceback.format_exception(error)).splitlines():
            _note(line)
