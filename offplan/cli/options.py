"""Arguments and options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

from offplan.choices import EngineName, ObjectiveName, Store

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A Hub id, a folder of safetensors, or a config.json."),
]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.")]
RevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a model on the Hub.")
]
SourceOption = Annotated[
    str | None, typer.Option(help="Name of the model in the plan, when MODEL is a local copy.")
]
MachineOption = Annotated[
    str | None,
    typer.Option(help="Plan for this machine profile, by name or file; else this GPU is measured."),
]
GPUMemoryOption = Annotated[
    str | None,
    typer.Option(help="GPU memory the process may take (16GiB). [default: what is free]"),
]
HostMemoryOption = Annotated[
    str | None,
    typer.Option(help="Memory of the store the weights may take. [default: what it has]"),
]
StoreOption = Annotated[
    Store, typer.Option(help="Offload to host memory, or to that of a second GPU.")
]
BatchOption = Annotated[int, typer.Option(min=1, help="Sequences generated together.")]
PromptTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")]
OutputTokensOption = Annotated[int, typer.Option(min=1, help="Tokens generated for each.")]
ContextOption = Annotated[int, typer.Option(min=1, help="Tokens a sequence may reach.")]
LocalModelOption = Annotated[
    str | None,
    typer.Option("--model", help="Read the model here instead of where the plan says."),
]
DummyWeightsOption = Annotated[
    bool, typer.Option("--dummy-weights", help="Random weights; none are read.")
]
DeviceOption = Annotated[
    str | None, typer.Option(help="cuda, cuda:1 or cpu. [default: a GPU if there is one]")
]
OutputOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="Write the result to this file.")
]
PictureOption = Annotated[
    Path | None, typer.Option("--svg", help="Save the report as a picture, too.")
]
ForceOption = Annotated[bool, typer.Option("--force", help="Overwrite the output file.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON for scripts.")]
ChosenBatchOption = Annotated[
    int | None,
    typer.Option(min=1, help="Sequences generated together. [default: 1, or what gives most]"),
]
ObjectiveOption = Annotated[
    ObjectiveName,
    typer.Option(help="Time of a request, or tokens a second (which chooses the batch)."),
]
MaxTTFTOption = Annotated[
    str | None, typer.Option("--max-ttft", help="Longest time to the first token (800ms).")
]
MaxTPOTOption = Annotated[
    str | None, typer.Option("--max-tpot", help="Longest time of each further token (50ms).")
]
FrontierOption = Annotated[
    bool,
    typer.Option("--frontier", help="Show GPU memory against speed instead of one plan."),
]
EngineOption = Annotated[
    EngineName | None,
    typer.Option("--for", help="Search only plans that this engine's flags can say."),
]
