"""The answer of ``analyze``: does it fit, how fast, where is what, what next, and what else."""

import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from offplan.backends import Backend
from offplan.capabilities.table import Recoding
from offplan.capabilities.way import Way
from offplan.checkpoint.model import Model
from offplan.checkpoint.tables import describe_tables
from offplan.checkpoint.weights import has_weights
from offplan.costs.ranges import step_range
from offplan.engines.export import export_plan
from offplan.errors import ExportError
from offplan.held.stage import Stage
from offplan.library.alternatives import Alternative
from offplan.library.analysis import Analysis
from offplan.library.cache_advice import CacheAdvice, ContextAdvice
from offplan.machine.name import parse_name
from offplan.machine.profile import MachineProfile
from offplan.placement import Phase
from offplan.plan import WORKLOADS, Plan, Prediction, Rule, Workload
from offplan.planner.question import Question
from offplan.refusals import why_not_multiplied
from offplan.report.machine import render_machine
from offplan.report.model import render_model
from offplan.report.plan import render_plan
from offplan.report.shares import describe_shares, render_shares
from offplan.report.strip import MemoryBar, make_layer_strip, memory_parts
from offplan.report.table import Paragraph
from offplan.report.wording import name_options
from offplan.stores import STORES
from offplan.units import (
    format_about,
    format_budget,
    format_bytes,
    format_frequency,
    format_range,
    format_rate,
    format_seconds,
)

_LEFT_BYTES = 2**29
"""Bytes of a GPU that drivers and contexts may take. Source: chosen."""
_REPOSITORIES = {8: "FP8", 4: "GPTQ, AWQ, W4A16, MXFP4 or NVFP4"}
"""The words that repositories on the Hub which store so many bits a weight have in their names."""


def describe_alternatives(analysis: Analysis) -> list[str]:
    """Describe what checkpoints of fewer bits would give, in a line; nothing without any."""
    told = [
        f"{_name_bits(each)} ({format_bytes(each.total_bytes)}) {_describe_speed(each)}"
        for each in analysis.alternatives
    ]
    if not told:
        return []
    return [
        f"A checkpoint of this model in fewer bits would give here: {'; '.join(told)}. Its answers "
        "differ from this one's; offplan estimates its size and speed from the same shapes. "
        f"{_name_repositories(analysis)}"
    ]


def describe_fitting(analysis: Analysis) -> list[str]:
    """Describe the checkpoints of fewer bits that fit where this one does not; nothing without."""
    found = analysis.alternatives
    if not found:
        return []
    told = " ".join(
        f"{_name_bits(each)} {'fits and gives' if each.bits == 8 else 'fit and give'} "
        f"{_describe_speed(each)}."
        for each in found
    )
    return [f"{told} {_name_repositories(analysis)}"]


def _name_repositories(analysis: Analysis) -> str:
    names = " or ".join(_REPOSITORIES[each.bits] for each in analysis.alternatives)
    return f"Look for a repository of this model with {names} in its name."


def describe_too_large(analysis: Analysis) -> list[str]:
    """Name the memory that the checkpoint of fewest bits needs, where not even that one fits."""
    other = analysis.too_large
    if other is None:
        return []
    size, ram = format_bytes(other.total_bytes), format_bytes(other.ram_bytes)
    return [f"In {other.bits} bits ({size}) it needs a machine with {ram} of memory."]


def describe_cache(analysis: Analysis) -> list[str]:
    """Describe what a KV cache in FP8 would give, in a line; nothing where that is no better."""
    found = analysis.cache_advice
    if found is None:
        return []
    size = format_bytes(found.cache_bytes)
    if analysis.result is None:
        return [
            f"A plan with --kv-cache-dtype fp8 fits and gives {_describe_speed(found)}. It "
            "rounds keys and values to 4 bits of mantissa."
        ]
    return [
        f"--kv-cache-dtype fp8 would give {_describe_speed(found)}, with a KV cache of {size}. It "
        "rounds keys and values to 4 bits of mantissa: its answers differ a little from this one's."
    ]


def describe_drafts(analysis: Analysis) -> list[str]:
    """Describe what drafts would give, in a line; nothing where they gain little."""
    found = analysis.draft_advice
    if found is None:
        return []
    (few, many), (less, more) = found.chances, map(format_about, found.tokens_per_s)
    why = "texts that repeat themselves take many"
    if found.draft.startswith("mtp"):
        why = "the checkpoint's own layer makes them"
    return [
        f"--draft {found.draft} would give some {less} tokens a second if {few:.0%} of drafts are "
        f"taken, {more} if {many:.0%}, with the same answers: {why}. "
        "`run PLAN --record-drafts FILE` records how many; --acceptance FILE plans by it."
    ]


def describe_longer(analysis: Analysis) -> list[str]:
    """Name the longest context of a KV cache in FP8, in a line; nothing if advice names a plan."""
    longest = analysis.longest_context_fp8
    if longest is None or analysis.cache_advice is not None:
        return []
    return [
        "With --kv-cache-dtype fp8, which rounds keys and values, the longest context that fits is "
        f"{longest:,} tokens."
    ]


def _name_bits(alternative: Alternative) -> str:
    return "FP8" if alternative.bits == 8 else f"{alternative.bits} bits"


def _describe_speed(alternative: Alternative | CacheAdvice | ContextAdvice) -> str:
    host = format_bytes(alternative.host_bytes) if alternative.host_bytes else "nothing"
    rate = format_about(alternative.tokens_per_s)
    return f"about {rate} tokens a second with {host} on the host"


def describe_type(analysis: Analysis) -> list[str]:
    """Name weights of float32, which another type would halve; nothing for others."""
    if analysis.stage.dtype != "float32" or (analysis.machine and analysis.machine.is_cpu):
        return []
    return [
        "Its weights are float32, twice the bytes of bfloat16. --dtype bfloat16 plans for a "
        "checkpoint in bfloat16, where MODEL is a config.json alone."
    ]


def describe_advice(analysis: Analysis, plan: Plan) -> list[str]:
    """Describe what would give more tokens a second, a line for each; often nothing."""
    lines = [
        *describe_alternatives(analysis),
        *describe_context(analysis),
        *describe_left(analysis, plan),
        *describe_cache(analysis),
        *describe_drafts(analysis),
        *describe_type(analysis),
    ]
    if reads_experts(plan, analysis.stage) and plan.routing is None:
        lines.append(
            "`run PLAN --record-routing FILE` records which experts your texts choose; "
            "--routing FILE plans by it."
        )
    return [*lines, *map(name_options, analysis.sample.advise())]


def describe_context(analysis: Analysis) -> list[str]:
    """Describe what a shorter context would give, in a line; nothing where that is no better."""
    found = analysis.context_advice
    if found is None:
        return []
    return [f"A shorter context: --context {found.context} would give {_describe_speed(found)}."]


def describe_left(analysis: Analysis, plan: Plan) -> list[str]:
    """Describe GPU memory that a plan with offloaded weights leaves to other programs."""
    machine, question = analysis.machine, analysis.question
    if machine is None or question is None or not plan.offload.rules:
        return []
    whole, left = machine.gpu_memory.value, machine.gpu_memory.value - plan.budget.gpu_memory
    takes = f"--gpu-memory {format_budget(whole)}".replace(" GiB", "GiB")
    if question.profile is not None and left == machine.display_bytes > 0:
        return [
            f"{format_bytes(left)} of the GPU is left to the display. With no desktop and no "
            f"browser on this card, {takes} takes it."
        ]
    if question.profile is None and left > _LEFT_BYTES and not machine.is_cpu:
        return [
            f"{format_bytes(left)} of the card's {format_bytes(whole)} are not planned with. If "
            "other programs have them, close these: a browser, the desktop, another model."
        ]
    return []


def reads_experts(plan: Plan, stage: Stage) -> bool:
    """Return True if decode steps of offplan's own runtime read some experts over the link."""
    if not plan.goal.is_own:
        return False
    experts = [(n.index, p.name) for n in stage.layers for p in n.parameters if p.is_expert]
    return any(
        rule.selects_layer(layer) and rule.matches(name)
        for rule in plan.offload.rules
        if not rule.decode.streams
        for layer, name in experts
    )


def describe_running(model: Model, why_not: str | None, way: Way) -> str:
    """Say in a line whether ``run`` can execute a model, or the text part of it, and which way."""
    if why_not is not None:
        return f"Plans only: {name_options(why_not)}"
    if not way.is_own:
        return f"`offplan run` can execute this model, by {way.whose} passes."
    if not model.towers:
        return "`offplan run` can execute this model."
    left = format_bytes(model.tower_bytes)
    return (
        "`offplan run` executes the text part alone; what reads images or sound "
        f"({left}) stays unloaded."
    )


def render_analysis(analysis: Analysis) -> list[RenderableType]:
    """Show all that a plan rests on, part by part: the model, the machine, reasons and terms."""
    parts = render_model(analysis.model)
    if analysis.machine is not None:
        parts.append(render_machine(analysis.machine))
    if analysis.result is not None:
        parts += render_plan(analysis.result)
        if analysis.shares:
            parts.append(render_shares(analysis.shares))
    return parts


_SOME_FOLDER = "DIR"
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def render_answer(
    analysis: Analysis, command: str | None = None, output: Path | None = None
) -> list[RenderableType]:
    """Answer first; ``command`` is what was asked, ``output`` the plan's file if one is written.

    Without a ``command`` no next one is named: what was asked for goes on.
    """
    model, plan = analysis.model, None if analysis.result is None else analysis.result.plan
    file, named = describe_file(model), describe_model(model)
    if analysis.infeasible is not None:
        # memory that lacks, or a target that is missed
        error = analysis.infeasible
        told = [name_options(each) for each in (error.facts, error.way_out) if each]
        told = [f"{each}{'' if each.endswith('.') else '.'}" for each in told]
        machine = "" if analysis.machine is None else f" on {analysis.machine.name}"
        why, *ways_out = [f"Does not run{machine} as asked: {told[0]}", *told[1:]]
        fitting = [*describe_cache(analysis), *describe_fitting(analysis)]
        more = [
            *describe_too_large(analysis),
            *describe_longer(analysis),
            *describe_type(analysis),
            *([] if error.topic is None else [f"More about it: {error.topic.link}"]),
        ]
        return [_group([*file, why, *fitting, *ways_out, named, *more])]
    if plan is None or analysis.question is None:
        why = name_options(str(analysis.unmeasured))
        told = [*_describe_running(analysis), f"Not planned: {why}"]
        return [_group([*file, named, *told]), *render_model(model)[1:]]
    stages = analysis.question.hold(plan.offload)
    question = analysis.question
    head = _group([*file, *describe_verdict(analysis, plan, question), named])
    parts: list[RenderableType] = [
        head,
        _group(["It assumes:"], describe_assumptions(plan, question)),
    ]
    if advice := describe_advice(analysis, plan):
        parts.append(_group(["Better would be:"], advice))
    if command is not None:
        following = f"Next: {_name_next(analysis, command, output)}"
        # in one piece, to be copied
        parts.append(Group(Text(following, no_wrap=True, overflow="ignore")))
    if plan.offload.rules:
        legend = "Layers, first to last: as high as their share on the GPU"
        legend += ", a strip for each stage" * (len(stages) > 1)
        strips = (make_layer_strip(stage, plan.offload) for stage in stages)
        parts.append(Group(Text(legend), *strips))
    bar = MemoryBar(memory_parts(plan.prediction.gpu_memory), plan.budget.gpu_memory)
    parts.append(Group(Text(f"GPU memory, {format_budget(bar.total)}"), bar))
    return [*parts, _group([describe_plainly(plan, stages)])]


def _group(lines: Sequence[str], listed: Sequence[str] = ()) -> Group:
    """Show lines, and below them a list."""
    return Group(*map(Paragraph, lines), *(Paragraph(each, "- ") for each in listed))


def describe_answer(analysis: Analysis, plan: Plan, question: Question) -> list[str]:
    """Answer what is asked of every plan: does it run, how fast, by what, what is better."""
    return [
        *describe_verdict(analysis, plan, question),
        *describe_assumptions(plan, question),
        *describe_advice(analysis, plan),
    ]


def describe_verdict(analysis: Analysis, plan: Plan, question: Question) -> list[str]:
    """Say whether the plan can be run, how fast it is, and what memory it takes."""
    machine, speed, engine = question.machine.name, describe_speed(plan), plan.goal.engine
    running = _describe_running(analysis, plan)
    if analysis.model.gguf is not None:
        first = [f"It would run on {machine}: {speed}"]
    elif analysis.why_not_run is not None:
        first = [*running, f"On {machine} the plan gives {speed}"]
    elif engine is not None:
        first = [f"Runs in {engine} on {machine}: {speed}"]
    else:
        is_plain = analysis.stage.way.is_own and not analysis.model.towers
        first = [f"Runs on {machine}: {speed}", *([] if is_plain else running)]
    notes = question.runner.note_memory(plan, question.hold(plan.offload))
    return [
        *first,
        describe_fit(plan, question.machine),
        *(f"{note[0].upper()}{note[1:]}." for note in notes),
        *describe_shares(plan, question.stages, question.machine),
    ]


def describe_assumptions(plan: Plan, question: Question) -> list[str]:
    """Say what the figures rest on: machine, workload, the host's cores, the experts chosen."""
    lines = [describe_workload(plan.workload)]
    if plan.goal.engine is not None and plan.workload.batch == 1:
        lines[0] += " Further requests wait; --batch 16 plans for 16 together."
    if question.profile is not None and plan.prediction.basis != "measured":
        name = parse_name(question.profile)
        whose = "the profile's figures"
        if name.is_shipped:
            whose = "a profile's figures, none of them measured on your machine"
        lines.append(
            f"The times are estimates from {whose}. `offplan machines {name.base}` prints their "
            "sources."
        )
    lines += [*describe_correction(plan.prediction), *describe_cores(plan, question)]
    lines += describe_untaken(plan)
    if reads_experts(plan, question.stages[0]) and plan.routing is None:
        lines.append("Tokens choose all experts equally often, which is the slowest case.")
    return lines


def _describe_running(analysis: Analysis, plan: Plan | None = None) -> list[str]:
    """Say whether ``run`` can execute the model, unless the plan is for an engine to run.

    Of a GGUF file ``describe_file`` says it.
    """
    model = analysis.model
    if plan is not None and plan.goal.engine is not None and analysis.why_not_run is None:
        return []
    if model.gguf is not None:
        return []
    return [describe_running(model, analysis.why_not_run, analysis.stage.way)]


def describe_file(model: Model) -> list[str]:
    """Describe the GGUF file whose shape is planned, and what runs it; nothing for a checkpoint."""
    gguf = model.gguf
    return [] if gguf is None else [f"{model.source}: {gguf.facts}.", f"{gguf.remedy}."]


def describe_model(model: Model) -> str:
    """Name a model, its size and its type in a line."""
    revision = f" at {model.revision[:12]}" if model.revision else ""
    count = model.num_parameters
    told = f"{count / 1e9:.3g} billion" if count >= 1e9 else f"{count:,}"
    named = f"{model.source}{revision}"
    if model.gguf is not None:
        named = f"Below is a safetensors checkpoint of this shape in {model.gguf.planned_in}"
    return (
        f"{named}: {model.model_type}, {told} parameters, "
        f"{format_bytes(model.total_bytes)} as stored"
    )


def describe_fit(plan: Plan, machine: MachineProfile) -> str:
    """Say how the memory of GPU and host is used, and what the host must be able to lock."""
    memory, prediction = plan.prediction.gpu_memory, plan.prediction
    budget = format_budget(plan.budget.gpu_memory)
    told = f"It fits {machine.name}: {format_bytes(memory.total_bytes)} of {budget} of GPU memory"
    locked = prediction.host_memory_bytes
    if not locked:
        return f"{told}.{'' if plan.offload.rules else ' Nothing needs offloading.'}"
    if machine.host_memory is None:
        return (
            f"{told}, {format_bytes(locked)} of page-locked host memory. This machine's profile "
            "does not say how much host memory can be page-locked: add ,ram=64GiB, or what it has."
        )
    room = format_bytes(machine.host_memory.value)
    return f"{told}, {format_bytes(locked)} of {room} of page-locked host memory."


class Speed(NamedTuple):
    """The speed of a plan in words, by ranges if it is estimated."""

    rate: str
    """Tokens a second."""
    each: str
    """Time of a token; of requests without steps, whose prompts give the only token, a prompt's."""
    first: str
    """Time of the first token."""


def print_speed(plan: Plan) -> Speed:
    """Print how fast tokens come, the first one and those after it."""
    workload, prediction = plan.workload, plan.prediction
    phase, took = Phase.DECODE, prediction.decode
    if workload.num_steps == 0:
        phase, took = Phase.PREFILL, prediction.prefill
    steps, prompts = (step_range(prediction, plan.offload, each) for each in (phase, Phase.PREFILL))
    if steps is None or prompts is None:
        each, first = format_seconds(took.step_s), format_seconds(prediction.prefill.step_s)
        return Speed(format_frequency(workload.batch / took.step_s), each, first)
    each, first = (format_range(*ends, format_seconds) for ends in (steps, prompts))
    low, high = steps
    rate = format_range(workload.batch / high, workload.batch / low, format_frequency)
    return Speed(rate, each, first)


def describe_speed(plan: Plan) -> str:
    """Say how fast tokens come, the first one and those after it."""
    workload, prediction, (rate, each, first) = plan.workload, plan.prediction, print_speed(plan)
    batch = f" over a batch of {workload.batch}" if workload.batch > 1 else ""
    prompt = f"a prompt of {workload.prompt_tokens:,}"
    told = f"{rate} tokens a second{batch}"
    if workload.num_steps == 0:
        told += f", one after each {prompt.removeprefix('a ')}: {each}"
    else:
        told += f", {each} each; the first token {first} after {prompt}"
    if prediction.basis == "measured":
        return f"{told} ({prediction.basis})."
    return f"{told}, estimated; `offplan measure` on that machine narrows it."


def describe_workload(workload: Workload) -> str:
    """Name the workload that the answer is for, where it is a usual one, and its numbers."""
    name = next((name for name, usual in WORKLOADS.items() if usual == workload), None)
    who = f"the workload {name}: " if name else ""
    sequences = "one sequence" if workload.batch == 1 else f"{workload.batch} sequences"
    return (
        f"This is for {who}{sequences} of {workload.prompt_tokens:,} prompt and "
        f"{workload.output_tokens:,} output tokens, with a context of {workload.context:,}."
    )


def describe_correction(prediction: Prediction) -> list[str]:
    """Say by what measured layers of other models corrected the estimate, in a line."""
    phases = {"steps": prediction.decode, "prompts": prediction.prefill}
    told = [
        f"{what} x {known.ratio:.3g} ({known.times} timed)"
        for what, phase in phases.items()
        if (known := phase.correction) is not None
    ]
    of = "The estimate is corrected by other models' layers that were timed on that machine"
    return [f"{of}: {', '.join(told)}."] if told else []


def describe_untaken(plan: Plan) -> list[str]:
    """Say from how many tokens a pass on drafts gain, in a line; nothing with an acceptance."""
    draft, priced = plan.offload.draft, plan.prediction.draft
    if draft is None or priced is None or plan.acceptance is not None:
        return []
    passes = {1: priced.pass_2_s, 3: priced.pass_4_s, 7: priced.pass_8_s}
    took = next(s for drafts, s in passes.items() if drafts >= draft.tokens and s is not None)
    return [
        f"offplan counts no draft as taken. A pass that checks {draft.tokens} takes as long as "
        f"{took / priced.step_s:.1f} steps: drafts gain where it gives more tokens than that. "
        "`run PLAN --record-drafts FILE` records how many; --acceptance FILE plans by it."
    ]


def describe_cores(plan: Plan, question: Question) -> list[str]:
    """Say what is assumed of the host's cores, or why they multiply nothing of what is offloaded.

    Nothing is said where no rule has them multiply, though rules might, or they are not wanted.
    """
    if not plan.has_cores:
        why = plan.goal.why_left_out(question.asked)
        stage = question.hold(plan.offload)[0]
        why = why or next(
            filter(None, (_why_no_kernel(b, stage) for b in plan.goal.more_backends)), None
        )
        is_resident = not plan.offload.rules
        return (
            []
            if why is None or is_resident or not plan.goal.is_own
            else [f"The host's cores multiply nothing: {why}."]
        )
    assumed = question.machine.with_threads(plan.goal.host_threads)
    rate, threads = assumed.cores_rate, assumed.host_threads
    by = "as many threads as suit" if threads is None else f"{threads.value} threads"
    told = f"{rate.basis}: {rate.source}" if rate.basis == "estimated" else rate.basis
    is_assumed = assumed.cores is None and question.profile is not None
    other = " For two modules of DDR4-3200 add ,ddr=4-3200x2 to --machine." if is_assumed else ""
    return [f"The host's cores read {format_rate(rate.value)} with {by} ({told}).{other}"]


def _why_no_kernel(backend: Backend, stage: Stage) -> str | None:
    """Say why a backend multiplies some routed experts with no kernel of its own, else None."""
    for units in stage.units if backend.why_no_kernel is not None else ():
        experts = [unit for unit in units if unit.is_expert]
        if why := why_not_multiplied(backend, stage, units, experts):
            return f"offplan {why.partition(':')[0]}"
    return None


def describe_plainly(plan: Plan, stages: Sequence[Stage]) -> str:
    """Say what a plan does in sentences that need no glossary; ``stages`` are held by it."""
    offload = plan.offload
    recoded = []
    if offload.recoding is not None:
        recoded.append(_describe_recoding_plainly(offload.recoding, stages))
    if offload.draft is not None:
        recoded.append(f"offplan checks {offload.draft.describe()}")
    if not offload.rules and offload.embeddings == "device":
        is_whole = offload.draft is None or offload.draft.experts == "device"
        what = "everything" if is_whole else "all of the model"
        return _join([f"{what} stays on the GPU", *recoded])
    where = STORES[offload.store].where
    sentences = [_describe_rule_plainly(rule, stages, where) for rule in offload.rules]
    if offload.embeddings == "host":
        tables = {table.name: table for stage in stages for table in stage.tables}
        stays = "stays" if len(tables) == 1 else "stay"
        what = describe_tables(tables.values())
        sentences.append(f"{what} {stays} in host memory, read row by row")
    return _join([*sentences, *recoded])


def _join(sentences: Sequence[str]) -> str:
    first, *others = sentences
    return " ".join([f"The plan: {first}.", *(f"{each[0].upper()}{each[1:]}." for each in others)])


def _describe_recoding_plainly(recoding: Recoding, stages: Sequence[Stage]) -> str:
    """Say which weights a plan recodes, and how much smaller they are so."""
    layers = [layer.is_recoded for stage in stages for layer in stage.layers]
    weights = [p for stage in stages for p in stage.parameters if p.is_recoded]
    share = sum(p.nbytes for p in weights) / sum(p.as_stored.nbytes for p in weights)
    told = recoding.describe_plainly(f"{sum(layers)} of {len(layers)}")
    return f"{told}, in {share:.2f} of their size"


def _describe_rule_plainly(rule: Rule, stages: Sequence[Stage], where: str) -> str:
    layers = [layer for stage in stages for layer in stage.layers]
    taken = [
        layer
        for layer in layers
        if rule.selects_layer(layer.index) and any(rule.matches(p.name) for p in layer.parameters)
    ]
    what, few = ", ".join(rule.cpu_offload_params) or "weights", "them"
    experts = stages[0].experts
    if experts is not None and all(
        p.is_expert for layer in taken for p in layer.parameters if rule.matches(p.name)
    ):
        names = [name.rpartition(".")[2] for name in rule.cpu_offload_params]
        what = "experts" if {*names} == {"experts"} else f"the experts' {', '.join(names)}"
        few = f"the {experts.num_experts_per_token} experts that it needs"
    engine, backends = stages[0].pass_rules, (rule.prefill, rule.decode)
    if engine is not None and engine.copies_in_place:
        backends = (Backend.PREFETCH, Backend.PREFETCH)
    size = f"up to {format_bytes(rule.max_bytes)} of {what}" if rule.max_bytes is not None else what
    total = len(layers)
    told = f"all {total}" if len(taken) == total else f"{len(taken)} of {total}"
    stays = f"in {told} layers {size} stay {where}"
    return f"{stays}{_describe_reads(*backends, few)}{rule.describe_plainly()}"


def _describe_reads(prefill: Backend, decode: Backend, few: str) -> str:
    """Say how weights off the GPU are reached; ``few`` are those of which only some are."""
    if prefill is decode:
        return f" and are {decode.words.passive}"
    told = (
        prefill.words.sentence.format(who="a prompt", what="them"),
        decode.words.sentence.format(
            who="each further token", what="them" if decode.streams else few
        ),
    )
    return "".join(f". {each[0].upper()}{each[1:]}" for each in told)


def _name_next(analysis: Analysis, command: str, output: Path | None) -> str:
    """Name the command to run after this one: one that works, weights fetched first."""
    if (gguf := analysis.model.gguf) is not None:
        if not gguf.bases:
            return gguf.runs_with[0]
        return command.replace(shlex.quote(analysis.model.source), gguf.bases[0], 1)
    if output is None:
        return f"{command} -o plan.yaml"
    assert analysis.result is not None, "it is asked of plans"
    plan, model = analysis.result.plan, analysis.model
    engine = plan.goal.engine
    fetch, folder = describe_fetch(model)
    elsewhere = f" --model {folder}" if folder else ""
    which = "  # DIR: a folder with the model's weights" if folder == _SOME_FOLDER else ""
    if engine is None and analysis.why_not_run is None:
        return f'{fetch}offplan run {output}{elsewhere} --prompt "..."{which}'
    if engine is None:
        try:
            export_plan(plan, model, "vllm")
        except ExportError as error:
            return (
                f"neither `offplan run` nor vLLM's flags can execute this plan "
                f"({name_options(str(error))}); "
                f"{command} --for vllm{' --force' * ('--force' not in command)} looks for one that "
                "vLLM can run"
            )
    return f"{fetch}offplan export {output} --engine {engine or 'vllm'}{elsewhere}{which}"


def describe_fetch(model: Model) -> tuple[str, str]:
    """Name the command that fetches a model's weights, and the folder that they are then in.

    Both are empty where the weights are there, or where a Hub id says where they are.
    """
    if has_weights(model):
        return "", ""
    beside = Path(model.source).parent
    if any(beside.glob("*.safetensors")):
        return "", str(beside)
    for name in (model.source, model.config.get("_name_or_path")):
        if isinstance(name, str) and _HUB_NAME.fullmatch(name) and not Path(name).exists():
            return f"hf download {name} --local-dir weights && ", "weights"
    return "", _SOME_FOLDER
