"""Plans of a pipeline: searched by the times of all its stages together."""

import json
from collections.abc import Iterator, Mapping
from fractions import Fraction
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offplan.capabilities.packing import Packing
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.activations import activation_bytes
from offplan.costs.compute import ModelCompute
from offplan.costs.memory import kv_cache_bytes, overhead_bytes
from offplan.costs.predict import predict
from offplan.costs.work import decode_shape, prefill_shapes
from offplan.engines.export import export_plan
from offplan.engines.runner import find_runner
from offplan.errors import InfeasibleError, OffplanError
from offplan.held.held import find_largest, recode_stages
from offplan.held.packing import pack_everything
from offplan.library.asking import pose
from offplan.placement import place
from offplan.plan import Backend, Budget, Goal, Offload, Plan, Workload
from offplan.planner.candidates import NO_RULE, Candidates
from offplan.planner.classes import list_patterns, segment_classes
from offplan.planner.find import ALIKE
from offplan.planner.frontier import find_frontier
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import PREFETCH_STEPS, Space, prefill_chunks
from tests.costs.builders import make_machine, rule
from tests.costs.exact import run_request
from tests.engines.configs import DENSE, LATENT, MOE
from tests.tiers import each_value_once, others_in_sweep

WORKLOAD = Workload(prompt_tokens=600, output_tokens=20, context=700)
PACKABLE = DENSE | {"hidden_size": 128, "intermediate_size": 256, "vocab_size": 128}
MODELS = {"dense": DENSE, "moe": MOE, "latent": LATENT, "packable": PACKABLE}


@cache
def read(name: str, num_layers: int, folder: Path) -> Model:
    path = folder / "config.json"
    config: Mapping[str, Any] = {**MODELS[name], "num_hidden_layers": num_layers}
    path.write_text(json.dumps(config))
    return open_model(str(path))


def ask(model: Model, share: float, stages: int = 2, engine: str = "vllm", **goal: Any) -> Question:
    """Ask for a plan with room for this share of the largest stage's layers."""
    machine = make_machine(h2d=2e9, uva=1.5e9, gpu_memory=2**40)
    asked = Goal(engine=engine, pipeline_parallel=stages, **goal)
    everything = pose(model, machine, WORKLOAD, Budget(gpu_memory=2**40), asked)
    nothing = Offload(prefill_chunk=512)
    taken = predict(everything.stages, machine, WORKLOAD, everything.budget, nothing).gpu_memory
    layers = sum(layer.nbytes for layer in everything.stage.layers)
    margin = taken.overhead_bytes - machine.gpu_overhead.value
    budget = taken.total_bytes - margin - round((1 - share) * layers)
    return everything.with_gpu_memory(round(budget / 0.997) + 1)


def list_plans(question: Question) -> Iterator[Offload]:
    """List every plan of one rule and a ring, or of none."""
    pairs = ((Backend.PREFETCH, PREFETCH_STEPS), (Backend.UVA, (1,)))
    embeddings: tuple[Any, ...] = ("device",)
    if question.goal.engine == "vllm-worker":
        embeddings = ("device", "host")
    packings = [None, pack_everything(question.stages[-1], runner=question.runner)]
    chunks = prefill_chunks(WORKLOAD.prompt_tokens, WORKLOAD.batch)
    for chunk, where, packing in product(
        chunks, embeddings, packings[: 1 + (question.recoding is not None)]
    ):
        setting = Offload(prefill_chunk=chunk, embeddings=where, packing=packing)
        yield setting
        for each, (backend, steps) in product(segment_classes(question.stage), pairs):
            patterns = list_patterns(len(question.stage.layers))
            groups = zip(patterns.group_size.tolist(), patterns.num_in_group.tolist(), strict=True)
            for group, num_slots in product(groups, steps):
                said = rule(*each.segments, group=group, prefill=backend, decode=backend)
                yield setting.model_copy(update={"prefetch_step": num_slots, "rules": (said,)})


def find_all(question: Question) -> list[Plan]:
    """Price those that fit every stage and that vLLM's flags can say."""
    assert question.goal.engine is not None
    runner = find_runner(question.goal.engine)

    machine, budget = question.planned_machine, question.budget

    @cache
    def fixed_bytes(packing: Packing | None, chunk: int) -> int:
        packed = recode_stages(question.stages, packing, question.runner)
        stage = find_largest(packed, WORKLOAD)
        cache = kv_cache_bytes(stage, WORKLOAD, chunk)
        activations = activation_bytes(stage, WORKLOAD, chunk)
        return cache + activations + overhead_bytes(machine, budget)

    found = []
    for offload in list_plans(question):
        try:
            held = question.hold(offload)
            placed = place(find_largest(held, WORKLOAD), offload)
            # most plans take too much of the largest stage alone, which is seen soonest
            weights = placed.resident_bytes + placed.ring_bytes
            least = weights + fixed_bytes(offload.packing, offload.prefill_chunk)
            if least > budget.gpu_memory:
                continue
            said = runner.demand(offload, held)
            taken = predict(held, machine, WORKLOAD, budget, offload)
        except OffplanError:
            continue
        total = taken.gpu_memory.total_bytes + max(0, said.more_gpu_bytes)
        fits = total <= budget.gpu_memory and placed.num_slots <= offload.prefetch_step
        if budget.host_memory is not None:
            fits &= max(said.pinned_bytes, taken.host_memory_bytes) <= budget.host_memory
        if fits:
            found.append(question.answer(offload))
    return found


CASES: list[tuple[str, int, str, float]] = [
    # of few layers, as each packing doubles what there is to look at
    ("packable", 3, "vllm-worker", 0.7),
    *(
        (*case, share)
        for share in (0.4, 0.7)
        for case in (
            *(("dense", 5, "vllm"), ("moe", 6, "vllm"), ("latent", 7, "vllm")),
            *(("dense", 5, "vllm-worker"), ("packable", 5, "vllm-worker")),
        )
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_layers", "engine", "share"), each_value_once(CASES))
def test_no_plan_is_faster_over_all_stages(
    name: str, num_layers: int, engine: str, share: float, tmp_path: Path
) -> None:
    """The input embedding, which a worker has on the host, is that of one stage."""
    question = ask(read(name, num_layers, tmp_path), share, engine=engine)
    everything = find_all(question)
    result = make_plan(question)
    least = min(each.prediction.objective_s for each in everything)
    assert result.best_s <= 1.005 * least
    rules = result.plan.offload.rules
    is_packed = result.plan.offload.packing is not None
    assert is_packed or name != "packable"
    assert not is_packed or engine == "vllm-worker"
    if rules and rules[0].max_bytes is None:
        assert result.plan.prediction.objective_s <= ALIKE * least


@pytest.mark.slow
@pytest.mark.parametrize("part", others_in_sweep([0.0, 0.1, 0.3, 0.6], [0.1]))
def test_host_memory_is_that_of_all_stages(part: float, tmp_path: Path) -> None:
    """The second one has fewer layers, and page-locks less."""
    model = read("dense", 5, tmp_path)
    question = ask(model, 0.5)
    sizes = [
        export_plan(each, model, "vllm").demand.pinned_bytes
        for each in find_all(question)
        if each.offload.rules
    ]
    limit = round(min(sizes) + part * (max(sizes) - min(sizes)))
    budget = question.budget.model_copy(update={"host_memory": limit})
    asked = pose(model, question.machine, WORKLOAD, budget, question.goal)
    result = make_plan(asked)
    assert export_plan(result.plan, model, "vllm").demand.pinned_bytes <= limit
    assert result.best_s <= 1.005 * min(each.prediction.objective_s for each in find_all(asked))


@pytest.mark.slow
@pytest.mark.parametrize("part", [0.0, 0.4])
def test_targets_hold_for_all_stages_together(part: float, tmp_path: Path) -> None:
    model = read("dense", 5, tmp_path)
    question = ask(model, 0.5)
    everything = find_all(question)
    steps = sorted({each.prediction.decode.step_s for each in everything})
    limit = steps[0] + part * (steps[-1] - steps[0])
    goal = question.goal.model_copy(update={"max_tpot_s": limit})
    asked = pose(model, question.machine, WORKLOAD, question.budget, goal)
    result = make_plan(asked)
    kept = [each for each in everything if each.prediction.decode.step_s <= limit]
    assert result.plan.prediction.decode.step_s <= limit
    assert result.best_s <= 1.005 * min(each.prediction.objective_s for each in kept)


@pytest.mark.slow
def test_a_target_out_of_reach_names_memory_that_would_do(tmp_path: Path) -> None:
    model = read("dense", 5, tmp_path)
    question = ask(model, 0.5)
    fastest = min(each.prediction.decode.step_s for each in find_all(question))
    # a rule of max_bytes, which none of these has, takes 0.82 of it
    goal = question.goal.model_copy(update={"max_tpot_s": 0.7 * fastest})
    asked = pose(model, question.machine, WORKLOAD, question.budget, goal)
    with pytest.raises(InfeasibleError, match="of GPU memory would do") as error:
        make_plan(asked)
    shortfall = error.value.shortfall_bytes
    assert shortfall is not None
    enough = make_plan(asked.with_gpu_memory(asked.budget.gpu_memory + shortfall)).plan
    assert enough.prediction.decode.step_s <= 0.9 * fastest


@pytest.mark.slow
def test_each_budget_of_a_frontier_holds_for_the_engine(tmp_path: Path) -> None:
    """What vLLM's ring takes beyond ours is counted against the budget that is asked about."""
    model = read("latent", 7, tmp_path)
    question = ask(model, 1.0)
    points = find_frontier(question)
    assert len({point.plan.prediction.objective_s for point in points}) > 2
    for point in points:
        plan = point.plan
        assert plan.prediction.gpu_memory.total_bytes <= plan.budget.gpu_memory
        export_plan(plan, model, "vllm")


@pytest.mark.parametrize(
    ("name", "num_layers", "packs"),
    [("dense", 8, False), ("latent", 8, False), ("packable", 8, True)],
)
@pytest.mark.slow
def test_other_stages_are_priced_as_their_schedules_are(
    name: str, num_layers: int, packs: bool, tmp_path: Path
) -> None:
    """Many at once; three stages, two of which may be alike."""
    engine = "vllm-worker" if packs else "vllm"
    question = ask(read(name, num_layers, tmp_path), 0.5, stages=3, engine=engine)
    searcher = Searcher(Space(question))
    if packs:
        assert searcher.recoded is not None
        searcher = searcher.recoded
    space, rules, stages = searcher.space, searcher.rules, searcher.stages
    assert stages is not None
    rows = [
        (number, pattern, setting, num_slots)
        for number in range(len(rules.option) - 1)
        for pattern in rules.patterns[rules.first_pattern[number] :][: rules.num_patterns[number]]
        for setting in range(len(space.settings))
        for num_slots in (PREFETCH_STEPS if rules.loads.prompt_turns[0, number] else (0,))
    ]
    number, pattern, setting, num_slots = np.array(rows).T
    alone = np.full(len(rows), NO_RULE)
    candidates = Candidates(setting, num_slots, rules.option[number], pattern, alone, alone)
    taken = stages.price(candidates)
    patterns = list_patterns(len(space.kind_of))
    for row in np.flatnonzero(taken.has_same_flags)[::7]:
        option, of = searcher.prices.options[rules.option[number[row]]], pattern[row]
        chosen = option.rule(int(patterns.group_size[of]), int(patterns.num_in_group[of]))
        at, steps = space.settings[setting[row]], max(1, int(num_slots[row]))
        offload = Offload(
            prefetch_step=steps,
            prefill_chunk=at.prefill_chunk,
            embeddings=at.embeddings,
            packing=space.recoding,
            rules=(chosen,),
        )
        prompt_ps, step_ps = price_others(question, offload)
        assert (taken.prompt_ps[row], taken.step_ps[row]) == (prompt_ps, float(step_ps))
        assert stages.price_offload(offload, setting[row]) == price_others(question, offload)


def price_others(question: Question, offload: Offload) -> tuple[int, Fraction]:
    """Picoseconds of prompt and step in all stages but the largest."""
    held = question.hold(offload)
    assert len(held) > 1
    prompt_ps, step_ps = 0, Fraction(0)
    for stage in held:
        if stage.number == question.stage.number:
            continue
        compute = ModelCompute(stage, question.planned_machine)
        prompt = compute.price(*prefill_shapes(WORKLOAD, offload.prefill_chunk))
        step = compute.price(decode_shape(WORKLOAD))
        placement = place(stage, offload)
        times = run_request(placement, stage, question.planned_machine, prompt, step)
        prompt_ps += int(times[0])
        step_ps += times[1]
    return prompt_ps, step_ps
