"""Arguments and options that several commands share."""

import functools
import inspect
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from offplan.choices import DEFAULT_PARTS, KVCacheDtype, ObjectiveName, PartsChoice, WorkloadName
from offplan.errors import InputError
from offplan.units import parse_seconds


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


def read_tokens(option: str, argument: str | int, *, otherwise: str = "") -> int:
    """Read a number of tokens, 1 or more, as people write it: ``8192``, ``8k`` or ``8K``.

    Raises InputError, which names the ``option`` and what it takes ``otherwise``.
    """
    text = str(argument)
    digits = text[:-1] if text[-1:] in ("k", "K") else text
    if not (digits.isascii() and digits.isdecimal()) or int(digits) < 1:
        raise InputError(
            f"{option} {text!r}: write a number of tokens, 1 or more, as in 8192 or 8k{otherwise}"
        )
    return int(digits) * (1 if digits == text else _KILO)


def read_context(argument: str | int) -> int:
    """Read a number of tokens, or ``max``, which is LONGEST; raises InputError for the rest."""
    if str(argument).lower() == "max":
        return LONGEST
    return read_tokens("--context", argument, otherwise=", or max")


def tokens(option: str, help_: str) -> Any:
    """Return an option that takes a number of tokens."""
    return typer.Option(option, parser=partial(read_tokens, option), metavar="N", help=help_)


_KILO = 1024
"""Tokens of 1k, as the contexts of models are named: 128k is 131,072."""


def complete_engine(start: str) -> list[str]:
    """List the engines whose names start so."""
    from offplan.engines.registry import ENGINES

    return [name for name in ENGINES if name.startswith(start)]


api_key = partial(typer.Option, envvar="OFFPLAN_API_KEY", show_envvar=False)
"""An option that takes a server's key."""

take_engine = partial(
    typer.Option, metavar="ENGINE", parser=str.lower, autocompletion=complete_engine
)
"""An option that takes an engine."""


_SHORT_TYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def _read_choice(words: Sequence[str], argument: str) -> str:
    """Read one of some words, in any case; raises InputError for another one."""
    word = _SHORT_TYPES.get(argument.lower(), argument.lower())
    if word not in words:
        raise InputError(f"{argument!r} is not one of {', '.join(words)}")
    return word


def choice(literal: Any) -> dict[str, Any]:
    """Return what has an argument or an option take a word of a Literal, in any case."""
    words = get_args(literal)
    return {"parser": partial(_read_choice, words), "metavar": "|".join(words)}


Plan = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
PlanOrModel = Annotated[
    str,
    typer.Argument(
        metavar="PLAN or MODEL",
        help="A plan file; or a model, as `analyze` takes it, which is planned for this machine.",
    ),
]
Revision = Annotated[str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")]
OtherMachine = Annotated[
    str | None,
    typer.Option("--machine", help="Take this machine, a profile's name or file, not the plan's."),
]
Batch = Annotated[int, typer.Option(min=1, help="Sequences generated together.")]
PromptTokens = Annotated[int, tokens("--prompt-tokens", "Tokens of each prompt.")]
LONGEST = 0
"""The context that ``max`` stands for: the longest that fits."""
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
Stock = Annotated[
    bool,
    typer.Option(
        "--stock",
        help="Run transformers' own passes, as is done anyway where offplan's cannot.",
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run Python code of the checkpoint, with all your rights, where transformers does not "
        "know the model.",
    ),
]
Output = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the result to this file; - is stdout.")
]
RecordRouting = Annotated[
    Path | None,
    typer.Option(help="File for how soon tokens choose the same experts again, as JSON."),
]
RecordDrafts = Annotated[
    Path | None,
    typer.Option(help="File for how often the plan's drafts are taken, as YAML."),
]
Force = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]


_RANKS = {
    "--tp": "GPUs that divide each layer",
    "--pp": "Stages of layers, on GPUs of their own",
    "--ep": "Groups of the --tp GPUs that divide whole experts",
}


def take_ranks(name: str, beside: str) -> Any:
    """Return an option for a number of ranks, which is for use ``beside`` another option."""
    return typer.Option(name, min=1, help=f"{_RANKS[name]}, with {beside}.")


def read_names(text: str) -> tuple[str, ...]:
    """Read names with commas between."""
    return tuple(name for each in text.split(",") if (name := each.strip()))


def read_cached_experts(argument: str | int) -> str | int:
    """Read a number of experts, ``auto`` or ``off``; raises InputError for the rest."""
    text = str(argument).lower()
    if text in ("auto", "off"):
        return text
    if not text.isdecimal() or not 0 < int(text) < 2**24:
        raise InputError(
            f"--cached-experts {text!r}: write a number of experts of a layer, 1 or more, auto or "
            "off"
        )
    return int(text)


HostThreads = Annotated[
    int | None,
    typer.Option(
        "--host-threads",
        min=1,
        help="Threads of the host's cores. [default: three in four physical cores]",
        show_default=False,
    ),
]
Routing = Annotated[
    Path | None,
    typer.Option(
        "--routing",
        metavar="FILE",
        help="How soon experts are chosen again, as `run --record-routing` saved it.",
    ),
]
Acceptance = Annotated[
    Path | None,
    typer.Option(
        "--acceptance",
        metavar="FILE",
        help="How often drafts are taken, as `run --record-drafts` saved it.",
    ),
]
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


KVCacheType = Annotated[
    KVCacheDtype,
    typer.Option(
        "--kv-cache-dtype",
        **choice(KVCacheDtype),
        help="Keep keys and values as computed, or in FP8 with a scale for each token and head.",
    ),
]


NoDraft = Annotated[bool, typer.Option("--no-draft", help="Check no drafts: --draft off.")]


def settle_draft(goal: dict[str, Any], *, no_draft: bool) -> dict[str, Any]:
    """Return a goal's values with ``--no-draft``; raises InputError beside ``--draft``."""
    if not no_draft:
        return goal
    if goal["draft"] not in (None, "off"):
        raise InputError("--no-draft with --draft: leave one of them out")
    return {**goal, "draft": "off"}


def _read_draft(argument: str) -> Any:
    """Read a kind and a number of drafts, ``auto`` or ``off``; raises InputError for the rest."""
    from offplan.capabilities.drafts import read_draft  # pydantic takes a while to import

    return read_draft(argument)


Draft = Annotated[
    Any,
    typer.Option(
        "--draft",
        parser=_read_draft,
        metavar="ngram:N, mtp:N, auto or off",
        help="Check up to N drafts a pass, or as many as --acceptance makes fastest. "
        "[default: auto]",
        show_default=False,
    ),
]


def take_cores(default: str) -> Any:
    """Make the option of the host's cores, whose ``default`` help names."""
    told = f"Let the host's cores multiply weights in decode. [default: {default}]"
    return typer.Option("--host-cores/--no-host-cores", help=told)


@dataclass(frozen=True)
class WorkloadOptions:
    """The options of a workload: a usual one's name, and numbers that replace its own."""

    workload: Annotated[
        WorkloadName,
        typer.Option(
            **choice(WorkloadName),
            help="Batch, prompt, output and context: 1, 512, 128, 4k for chat; 1, 32k, 1k, 128k "
            "for agent; 32, 512, 256, 1k for batch.",
        ),
    ] = "chat"
    batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences generated together, in place of its own.")
    ] = None
    prompt_tokens: Annotated[int | None, tokens("--prompt-tokens", "Tokens of each prompt.")] = None
    output_tokens: Annotated[
        int | None, tokens("--output-tokens", "Tokens generated for each.")
    ] = None
    context: Annotated[
        int | None,
        typer.Option(
            parser=read_context,
            metavar="N or max",
            help="Tokens a sequence may reach; max: all that fit.",
        ),
    ] = None

    @property
    def numbers(self) -> dict[str, int]:
        """The numbers that replace the usual workload's."""
        given = vars(self).items()
        return {key: value for key, value in given if key != "workload" and value is not None}


CHAT = WorkloadOptions()


@dataclass(frozen=True)
class TimedOptions:
    """The options of a goal that say which layers are timed."""

    packing: Packing = True
    stock: Stock = False


ALL_TIMED = TimedOptions()


@dataclass(frozen=True)
class RunGoal:
    """The options of a goal that a plan is run with, though it was made without."""

    stock: Stock = False


AS_PLANNED = RunGoal()


@dataclass(frozen=True)
class OtherGoal:
    """The options of a goal that a plan is made again with."""

    leave_unpacked: LeaveUnpacked = None
    host_cores: Annotated[bool | None, take_cores("the plan's")] = None
    draft: Draft = None


SAME_GOAL = OtherGoal()


_time = partial(typer.Option, parser=parse_seconds, metavar="TEXT")


@dataclass(frozen=True)
class GoalOptions:
    """The options of a plan's goal, by the names of its fields."""

    objective: Annotated[
        ObjectiveName,
        typer.Option(
            **choice(ObjectiveName),
            help="Time of a request, or tokens a second (which chooses the batch).",
        ),
    ] = "latency"
    max_ttft_s: Annotated[
        float | None, _time("--max-ttft", help="Longest time to the first token (800ms).")
    ] = None
    max_tpot_s: Annotated[
        float | None, _time("--max-tpot", help="Longest time of each further token (50ms).")
    ] = None
    engine: Annotated[
        str | None,
        take_engine(
            "--for",
            help="Search only plans that this engine can run: "
            "vllm, vllm-worker, sglang, vllm==0.31.",
        ),
    ] = None
    stock: Stock = False
    tensor_parallel: Annotated[int, take_ranks("--tp", "--for")] = 1
    pipeline_parallel: Annotated[int, take_ranks("--pp", "--for")] = 1
    expert_parallel: Annotated[int, take_ranks("--ep", "--for")] = 1
    kv_cache_dtype: KVCacheType = "auto"
    packing: Packing = True
    leave_unpacked: LeaveUnpacked = None
    cached_experts: Annotated[
        Any,
        typer.Option(
            "--cached-experts",
            parser=read_cached_experts,
            metavar="N, auto or off",
            help="Keep the N experts of a layer that were used last on the GPU. [default: auto]",
        ),
    ] = None
    draft: Draft = None
    parts: Annotated[
        PartsChoice | None,
        typer.Option(
            "--parts",
            help=f"Let prompts stream a layer's experts in parts. [default: {DEFAULT_PARTS}]",
        ),
    ] = None
    host_cores: Annotated[bool | None, take_cores("host-cores")] = None
    host_threads: HostThreads = None

    @property
    def num_copying(self) -> int:
        """GPUs that copy at once."""
        return self.tensor_parallel


Options = TypeVar("Options")


def takes(record: Callable[..., Options]) -> Callable[[Callable[[Options], None]], Any]:
    """Have a command that is given a record take the record's fields as arguments and options.

    In place of a field that is a record itself the command takes that one's fields.
    """
    parts: dict[str, Any] = {
        name: kind for name, kind in record.__annotations__.items() if is_dataclass(kind)
    }

    def decorate(command: Callable[[Options], None]) -> Callable[..., None]:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            for name, kind in parts.items():
                values[name] = kind(**{each.name: values.pop(each.name) for each in fields(kind)})
            command(record(**values))

        signature = inspect.signature(record)
        flat = [
            each
            for name, parameter in signature.parameters.items()
            for each in (options_of(parts[name]) if name in parts else [parameter])
        ]
        vars(run)["__signature__"] = signature.replace(parameters=flat)
        run.__annotations__ = {each.name: each.annotation for each in flat} | {"return": None}
        return run

    return decorate


def flattens(command: Callable[..., None]) -> Callable[..., None]:
    """Have a command that is given records beside options take the records' fields."""
    return takes(command)(functools.wraps(command)(lambda done: done))  # type: ignore[no-any-return]


def options_of(record: Callable[..., Any]) -> list[inspect.Parameter]:
    """List the parameters that make a record."""
    return [*inspect.signature(record).parameters.values()]
