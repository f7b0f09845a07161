"""What ``analyze`` and ``plan`` are asked: their options, declared once."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from offplan.cli import options
from offplan.cli.output import (
    STANDARD,
    ProgressBar,
    check_writable,
    print_result,
    save_file,
    waiting,
)
from offplan.cli.printable import printable
from offplan.errors import InputError

if TYPE_CHECKING:
    from offplan.checkpoint.model import Model
    from offplan.plan import Plan
    from offplan.planner.question import Question
    from offplan.ranks import Ranks


@dataclass(frozen=True)
class Query:
    """The options of a command that plans."""

    model: options.Model
    machine: options.Machine = None
    gpu_memory: options.GPUMemory = None
    host_memory: options.HostMemory = None
    store: options.Store = "host"
    batch: options.ChosenBatch = None
    prompt_tokens: options.PromptTokens = 512
    output_tokens: options.OutputTokens = 128
    context: options.ChosenContext = 4096
    objective: options.Objective = "latency"
    max_ttft: options.MaxTTFT = None
    max_tpot: options.MaxTPOT = None
    engine: options.Engine = None
    tensor_parallel: options.TensorParallel = 1
    pipeline_parallel: options.PipelineParallel = 1
    expert_parallel: options.ExpertParallel = 1
    packing: options.Packing = True
    leave_unpacked: options.LeaveUnpacked = None
    frontier: options.Frontier = False
    revision: options.Revision = None
    source: options.Source = None
    output: options.Output = None
    svg: options.Picture = None
    force: options.Force = False
    verbose: options.Verbose = False
    json: options.Json = False

    def check(self) -> None:
        """Raise InputError for what contradicts itself, and for files that cannot be written."""
        if self.frontier:
            for used, why in (
                (self.output or self.svg, "many plans and writes none: leave --output and --svg"),
                (self.max_ttft or self.max_tpot, "all times: leave --max-ttft and --max-tpot"),
                (self.objective != "latency", "the plans of one batch: leave --objective"),
            ):
                if used:
                    raise InputError(f"--frontier shows {why} out")
        check_writable(self.output, self.svg, force=self.force)

    def read(self) -> "tuple[Model, Question | None]":
        """Read the model, and ask what is asked; None where there is no machine to ask about."""
        from offplan.checkpoint.open import open_model
        from offplan.cli.planning import note_budget, read_workload, settle_context
        from offplan.library.asking import ask
        from offplan.library.machines import find_machine

        tokens = self.prompt_tokens, self.output_tokens, self.context
        workload = read_workload(self.batch or 1, *tokens)
        model = open_model(
            self.model,
            revision=self.revision,
            name=self.source,
            on_progress=ProgressBar("reading headers"),
        )
        machine = find_machine(
            self.machine,
            model,
            workload,
            store=self.store,
            num_gpus=self.ranks.tensor,
            packing=self.packing and self.engine is None,
            on_stage=ProgressBar,
        )
        if machine is None:
            return model, None
        question = ask(
            model,
            machine,
            workload,
            gpu_memory=self.gpu_memory,
            host_memory=self.host_memory,
            store=self.store,
            # a named batch leaves none to be chosen
            objective="latency" if self.batch is not None else self.objective,
            max_ttft_s=self.max_ttft,
            max_tpot_s=self.max_tpot,
            engine=self.engine,
            packing=self.packing,
            leave_unpacked=self.leave_unpacked or (),
            ranks=self.ranks,
        )
        note_budget(question, self.gpu_memory)
        with waiting("planning"):
            return model, settle_context(question, self.context)

    def print_frontier(self, question: "Question | None") -> None:
        """Answer ``--frontier``; raises InputError where there is no machine to ask about."""
        from offplan.library.machines import why_unmeasured
        from offplan.planner.frontier import find_frontier
        from offplan.report.frontier import frontier_payload, render_frontier

        if question is None:
            raise InputError(why_unmeasured())
        points = find_frontier(question, ProgressBar("planning"))
        payload = {"frontier": frontier_payload(points)}
        print_result(payload, render_frontier(points), json=self.json)

    def save_picture(self, question: "Question", plan: "Plan") -> None:
        """Answer ``--svg``."""
        from offplan.report.portrait import portray
        from offplan.report.poster import draw_poster

        if self.svg is not None:
            picture = draw_poster(
                portray(plan, question.held.pack(plan.offload.packing), question.machine)
            )
            save_file(self.svg, printable(picture), force=self.force)

    @property
    def ranks(self) -> "Ranks":
        """The GPUs that the plan is for."""
        from offplan.ranks import Ranks

        return Ranks(self.tensor_parallel, self.pipeline_parallel, self.expert_parallel)

    @property
    def plan_file(self) -> Path | None:
        """The plan's file, if one is written."""
        return None if self.output == STANDARD else self.output
