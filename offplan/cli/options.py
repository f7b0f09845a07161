"""Arguments and options that several commands share."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from offplan import choices
from offplan.errors import InputError
from offplan.units import parse_bytes, parse_seconds


def read_text(argument: str) -> str:
    """Read an argument as UTF-8 where the locale, such as C, has no characters for its bytes.

    Raises InputError for bytes that are not UTF-8.
    """
    try:
        argument.encode()  # the locale's characters, and no bytes that Python keeps as surrogates
        return argument
    except UnicodeEncodeError:
        pass
    try:
        return os.fsencode(argument).decode("utf-8")
    except UnicodeError:
        raise InputError(f"{argument!a} is not a text: type it in UTF-8") from None


def read_context(argument: str | int) -> int:
    """Read a number of tokens, or ``max``, which is LONGEST; raises InputError for the rest."""
    text = str(argument)
    if text.lower() == "max":
        return LONGEST
    if not text.isdecimal() or int(text) < 1:
        raise InputError(f"--context {text!r}: write a number of tokens, 1 or more, or max")
    return int(text)


def complete_engine(start: str) -> list[str]:
    """List the engines whose names start so."""
    from offplan.engines.registry import ENGINES

    return [name for name in ENGINES if name.startswith(start)]


def _read_choice(words: Sequence[str], argument: str) -> str:
    """Read one of some words, in any case; raises InputError for another one."""
    if argument.lower() not in words:
        raise InputError(f"{argument!r} is not one of {', '.join(words)}")
    return argument.lower()


def choice(literal: Any) -> dict[str, Any]:
    """Return what has an argument or an option take a word of a Literal, in any case."""
    words = get_args(literal)
    return {"parser": partial(_read_choice, words), "metavar": "|".join(words)}


_size = partial(typer.Option, parser=parse_bytes, metavar="TEXT")
_time = partial(typer.Option, parser=parse_seconds, metavar="TEXT")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hub id, a folder of safetensors, or a config.json."),
]
Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]
Source = Annotated[
    str | None, typer.Option(help="Name of the model in the plan, when MODEL is a local copy.")
]
Machine = Annotated[
    str | None,
    typer.Option(
        help="Plan for this machine, a profile's name or file (rtx4090 or "
        "rtx4090,pcie=4x8,ram=64GiB); else this GPU is measured."
    ),
]
OtherMachine = Annotated[
    str | None,
    typer.Option("--machine", help="Take this machine, a profile's name or file, not the plan's."),
]
GPUMemory = Annotated[
    int | None, _size(help="GPU memory the process may take (16GiB). [default: what is free]")
]
HostMemory = Annotated[
    int | None, _size(help="Memory of the store the weights may take. [default: what it has]")
]
Store = Annotated[
    choices.Store,
    typer.Option(
        **choice(choices.Store), help="Offload to host memory, or to that of a second GPU."
    ),
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences generated together.")]
PromptTokens = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputTokens = Annotated[int, typer.Option(min=1, help="Tokens generated for each.")]
Context = Annotated[int, typer.Option(min=1, help="Tokens a sequence may reach.")]
LONGEST = 0
"""The context that ``max`` stands for: the longest that fits."""
ChosenContext = Annotated[
    int,
    typer.Option(
        parser=read_context,
        metavar="N or max",
        help="Tokens a sequence may reach; max: all that fit.",
    ),
]
LocalModel = Annotated[
    str | None,
    typer.Option("--model", help="Read the model here instead of where the plan says."),
]
DummyWeights = Annotated[
    bool, typer.Option("--dummy-weights", help="Random weights; none are read.")
]
Device = Annotated[
    str | None,
    typer.Option(
        parser=str.lower,
        metavar="TEXT",
        help="cuda, cuda:1 or cpu. [default: a GPU if there is one]",
    ),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the result to this file; - is stdout.")
]
Picture = Annotated[Path | None, typer.Option("--svg", help="Save pictures of the plan, too.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]
Verbose = Annotated[
    bool,
    typer.Option(
        "--verbose",
        "-v",
        help="Show all that the answer rests on: layers, figures, reasons, terms.",
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
ChosenBatch = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences generated together. [default: 1, or what gives most]"),
]
Objective = Annotated[
    choices.ObjectiveName,
    typer.Option(
        **choice(choices.ObjectiveName),
        help="Time of a request, or tokens a second (which chooses the batch).",
    ),
]
MaxTTFT = Annotated[
    float | None, _time("--max-ttft", help="Longest time to the first token (800ms).")
]
MaxTPOT = Annotated[
    float | None, _time("--max-tpot", help="Longest time of each further token (50ms).")
]
Frontier = Annotated[
    bool, typer.Option("--frontier", help="Show GPU memory against speed instead of one plan.")
]
Engine = Annotated[
    str | None,
    typer.Option(
        "--for",
        metavar="ENGINE",
        parser=str.lower,
        autocompletion=complete_engine,
        help="Search only plans that this engine can run: vllm, vllm-worker, sglang, vllm==0.31.",
    ),
]


def _ranks(name: str, text: str, option: str) -> Any:
    return typer.Option(name, min=1, help=f"{text}, with {option}.")


_LAYERS = "GPUs that divide each layer"
_STAGES = "Stages of layers, on GPUs of their own"
_EXPERTS = "Groups of the --tp GPUs that divide whole experts"
TensorParallel = Annotated[int, _ranks("--tp", _LAYERS, "--for")]
PipelineParallel = Annotated[int, _ranks("--pp", _STAGES, "--for")]
ExpertParallel = Annotated[int, _ranks("--ep", _EXPERTS, "--for")]
ExportedTensorParallel = Annotated[int, _ranks("--tp", _LAYERS, "--replan")]
ExportedPipelineParallel = Annotated[int, _ranks("--pp", _STAGES, "--replan")]
ExportedExpertParallel = Annotated[int, _ranks("--ep", _EXPERTS, "--replan")]
ExportedTo = Annotated[
    str,
    typer.Option(
        "--engine",
        metavar="ENGINE",
        parser=str.lower,
        autocompletion=complete_engine,
        help="Whose command: vllm, vllm-worker, sglang, or a version of it, vllm==0.31.",
    ),
]


def read_names(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    return tuple(name for each in text.split(",") if (name := each.strip()))


LeaveUnpacked = Annotated[
    Any,
    typer.Option(
        "--leave-unpacked",
        metavar="NAMES",
        parser=read_names,
        help="Leave layers or segments as stored: 7, 7.mlp.down_proj, mlp.down_proj, output_head.",
    ),
]
Packing = Annotated[
    bool,
    typer.Option(
        "--packing/--no-packing",
        help="Hold bf16 weights packed without loss where that is faster, or as they are stored.",
    ),
]
