"""``offplan chat``: talk to a plan's model, or to a server, in the terminal."""

import contextlib
import json
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from offplan.cli import options
from offplan.cli.opening import AS_USUAL, ModelOptions, PlanFile, open_to_run
from offplan.cli.output import (
    ProgressBar,
    check_stdout,
    print_note,
    printable,
    printing_to_stderr,
    save_file,
    waiting,
)
from offplan.errors import InputError, OffplanError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.cli.speakers import LocalSpeaker, Speaker
    from offplan.plan import Plan
    from offplan.runtime.sampling import Sampling

_HELP = "/reset forgets the conversation, /save FILE writes it, /exit or Ctrl-D ends"


@options.flattens
def chat(
    plan: Annotated[
        str | None,
        typer.Argument(
            metavar="[PLAN or MODEL]",
            help="A plan file, or a model, which is planned for this machine; none with --url.",
        ),
    ] = None,
    url: Annotated[
        str | None, typer.Option(help="Talk to this server of OpenAI's API instead.")
    ] = None,
    api_key: Annotated[
        str | None, options.api_key(help="The server's key; or OFFPLAN_API_KEY.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Read the model here instead of where the plan says; with --url, its name there."
        ),
    ] = None,
    planned: ModelOptions = AS_USUAL,
    output: PlanFile = None,
    force: options.Force = False,
    system: Annotated[
        str | None,
        typer.Option(parser=options.read_text, metavar="TEXT", help="What the system says first."),
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of an answer. [default: what fits]")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="Draw tokens; 0 is greedy. [default: greedy, or the server's]"),
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw from the N likeliest tokens.")] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw from the likeliest of this probability together.")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the answers. [default: 0]")] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    dummy_weights: options.DummyWeights = False,
    device: options.Device = None,
) -> None:
    """Talk to a plan's model, which reads only what is new of the conversation.

    Ctrl-C stops an answer, and what was said of it stays. /reset begins anew, /save FILE writes the
    conversation as a line for `run --prompts`, /exit or Ctrl-D ends.
    """
    check_stdout()
    if (plan is None) == (url is None):
        raise InputError("name a plan or a model, or a server with --url")
    drawing = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
    said = [{"role": "system", "content": system}] if system else []
    if url is not None:
        from offplan.cli.speakers import RemoteSpeaker

        asked = {"max_tokens": max_new_tokens, **drawing}
        named = {key: value for key, value in asked.items() if value is not None}
        _Conversation(RemoteSpeaker(url, api_key, model, named), said).run()
        return
    assert plan is not None, "one of the two is there"
    found = open_to_run(
        plan,
        model,
        planned,
        output=output,
        force=force,
        device=device,
        dummy_weights=dummy_weights,
        trust_remote_code=trust_remote_code,
    )
    with _open_local(*found, max_new_tokens, drawing, dummy_weights, device) as speaker:
        _Conversation(speaker, said).run()


@contextlib.contextmanager
def _open_local(
    plan: "Plan",
    found: "Model",
    num_tokens: int | None,
    drawing: Any,
    dummy_weights: bool,
    device: str | None,
) -> Iterator["LocalSpeaker"]:
    with waiting("starting torch"):
        from offplan.cli.request import read_sampling
        from offplan.cli.speakers import LocalSpeaker
        from offplan.library.sessions import load_session
        from offplan.library.settling import replan_without
        from offplan.runtime.device import find_device
        from offplan.runtime.joined import JoinedTexts
        from offplan.runtime.prompts import load_tokenizer
        from offplan.runtime.rendering import Renderer
        from offplan.runtime.rows import Rows
        from offplan.runtime.rules import read_rules

    sampling: Sampling | None = read_sampling(**drawing)
    with printing_to_stderr():
        tokenizer = load_tokenizer(found)
    if not getattr(tokenizer, "chat_template", None):
        raise InputError(f"{found.source} has no chat template: `offplan run` continues prompts")
    rules, renderer = read_rules(found, tokenizer), Renderer()
    renderer.start()  # while the model is loaded
    plan, opened = load_session(
        plan,
        found,
        find_device(device),
        dummy_weights=dummy_weights,
        on_stage=ProgressBar,
        settle=replan_without(print_note),
    )
    context = plan.workload.context
    with opened as session:
        rows = Rows(session, 1)
        with waiting("warming up, which compiles and captures on a GPU"):
            rows.warm_up(min(plan.workload.prompt_tokens, context))
        texts = JoinedTexts(rows)
        yield LocalSpeaker(texts, found, tokenizer, rules, context, num_tokens, sampling, renderer)


class _Conversation:
    """The messages so far, and the user's input."""

    def __init__(self, speaker: "Speaker", said: list[dict[str, str]]) -> None:
        """Begin with what was ``said``."""
        self._speaker, self._beginning, self._said = speaker, said, [*said]
        self._is_typed = sys.stdin.isatty()

    def run(self) -> None:
        """Talk until the user's last word."""
        if self._is_typed:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401  # input() edits lines by it

            print_note(_HELP)
        while (text := self._hear()) is not None:
            if text.startswith("/"):
                if not self._obey(*text.split(maxsplit=1)):
                    return
            elif text:
                self._say(text)

    def _hear(self) -> str | None:
        """Return what the user types next, without spaces around it; None at the end."""
        while True:
            try:
                return input("> " if self._is_typed else "").strip()
            except EOFError:
                if self._is_typed:
                    print()
                return None
            except KeyboardInterrupt:
                print()
                print_note("/exit or Ctrl-D ends")
            except UnicodeDecodeError:
                print_note("that is no text in UTF-8")

    def _obey(self, command: str, argument: str = "") -> bool:
        """Do what a command says; returns False if it is to end."""
        if command == "/exit":
            return False
        if command == "/reset":
            self._said = [*self._beginning]
        elif command == "/save" and argument:
            self._save(Path(argument.strip()))
        else:
            print_note(_HELP)
        return True

    def _save(self, path: Path) -> None:
        try:
            save_file(path, json.dumps({"messages": self._said}) + "\n", force=False)
        except OffplanError as error:
            print_note(str(error))

    def _say(self, text: str) -> None:
        """Have an answer, and keep both; what was stopped is kept as far as it came."""
        from offplan.cli.speakers import Thought

        said, pieces = [*self._said, {"role": "user", "content": text}], list[str]()
        is_thinking = False
        dim, bright = ("\x1b[2m", "\x1b[0m") if sys.stdout.isatty() else ("", "")
        try:
            with _stopping(self._speaker):
                for piece in filter(None, self._speaker.answer(said)):
                    shown = printable(piece)
                    if isinstance(piece, Thought):
                        is_thinking, shown = True, f"{dim}{shown}{bright}"
                    else:
                        pieces.append(piece)
                        is_thinking, shown = False, "\n\n" * is_thinking + shown
                    print(shown, end="", flush=True)
        except OffplanError as error:
            print("\n" * (is_thinking or bool(pieces)), end="", flush=True)
            print_note(str(error))
            return
        print(flush=True)
        self._said = [*said, {"role": "assistant", "content": "".join(pieces)}]
        if self._speaker.told:
            print_note(self._speaker.told)


@contextlib.contextmanager
def _stopping(speaker: "Speaker") -> Iterator[None]:
    """Have a Ctrl-C stop an answer; the second one in it ends the program, as ever."""
    from offplan.cli.speakers import StoppedError

    before = signal.getsignal(signal.SIGINT)

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        speaker.stop()

    signal.signal(signal.SIGINT, stop)
    try:
        with contextlib.suppress(StoppedError):
            yield
    finally:
        signal.signal(signal.SIGINT, before)
