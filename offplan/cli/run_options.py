"""Options of ``run``, declared once."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from offplan.cli import options
from offplan.cli.opening import AS_USUAL, ModelOptions
from offplan.cli.output import STANDARD
from offplan.errors import InputError

if TYPE_CHECKING:
    from offplan.cli.lines import Line


@dataclass(frozen=True)
class RunOptions:
    """The options of ``run``."""

    plan: options.PlanOrModel
    prompt: Annotated[
        list[str] | None,
        typer.Option(
            parser=options.read_text,
            metavar="TEXT",
            help="Text to continue; without any, random tokens.",
        ),
    ] = None
    prompt_file: Annotated[
        list[Path] | None, typer.Option(help="File whose text to continue; - is standard input.")
    ] = None
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="Lines of JSON, each with a prompt or messages, or OpenAI's batches; - is stdin."
        ),
    ] = None
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="File that --prompts writes a line to for each text; a rerun goes on with it. "
            "Without --prompts, file for the plan of a MODEL. [default: standard output]",
        ),
    ] = None
    force: options.Force = False
    chat: Annotated[
        bool, typer.Option("--chat", help="Answer prompts, by the model's chat template.")
    ] = False
    model: options.LocalModel = None
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens to generate. [default: the plan's]")
    ] = None
    temperature: Annotated[
        float | None,
        typer.Option(help="Draw tokens: logits are divided by it; 0 is greedy. [default: greedy]"),
    ] = None
    top_k: Annotated[int | None, typer.Option(help="Draw from the N likeliest tokens.")] = None
    top_p: Annotated[
        float | None,
        typer.Option(help="Draw from the likeliest tokens that have this probability together."),
    ] = None
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the first text; the next one has the next number. [default: 0]"),
    ] = None
    stop_strings: Annotated[
        list[str] | None,
        typer.Option(parser=options.read_text, metavar="TEXT", help="End a text before this one."),
    ] = None
    record_routing: options.RecordRouting = None
    record_drafts: options.RecordDrafts = None
    goal: options.RunGoal = options.AS_PLANNED
    planned: ModelOptions = AS_USUAL
    trust_remote_code: options.TrustRemoteCode = False
    dummy_weights: options.DummyWeights = False
    host_threads: options.HostThreads = None
    device: options.Device = None
    json: options.Json = False

    def check(self) -> None:
        """Raise InputError for what contradicts itself."""
        from offplan.library.model_plans import names_model

        is_prompted = self.prompt or self.prompt_file or self.prompts
        mistakes = {
            "--prompts takes prompts from its file: leave --prompt and --prompt-file out": (
                self.prompts and (self.prompt or self.prompt_file)
            ),
            "--output is for the lines that --prompts makes, and for the plan of a model": (
                self.output and not self.prompts and not names_model(self.plan)
            ),
            "--chat and --stop-strings need a prompt": (
                (self.chat or self.stop_strings) and not is_prompted
            ),
            "--stop-strings '' ends no text: leave it out": "" in (self.stop_strings or ()),
            "--json is printed to stdout, and so are the lines: name a file with --output": (
                self.json and self.prints_lines
            ),
        }
        for text, made in mistakes.items():
            if made:
                raise InputError(text)

    def read_lines(self) -> "Sequence[Line]":
        """Read the file of prompts; none without one. Raises InputError."""
        from offplan.cli.lines import read_lines

        return () if self.prompts is None else read_lines(self.prompts)

    @property
    def prints_lines(self) -> bool:
        """True if results of the file of prompts go to standard output."""
        return self.prompts is not None and self.output in (None, STANDARD)
