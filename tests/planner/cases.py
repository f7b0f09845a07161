"""Questions for the planner: small models, budgets that hold a share of them, and strategies."""

from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from offplan.checkpoint.model import Model
from offplan.costs.memory import MARGIN
from offplan.costs.predict import predict
from offplan.engines.runner import lower
from offplan.held.held import find_largest
from offplan.held.stage import Stage
from offplan.library.asking import pose
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Goal, Offload, Plan, Workload
from offplan.planner.find import ALIKE, PlanResult
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.planner.space import prefill_chunks
from tests.costs.builders import DENSE, MOE, Shapes, dense_model, make_model, moe_model
from tests.held import hold_by

WORKLOAD = Workload(prompt_tokens=600, output_tokens=20, context=700)
BATCHED = Workload(batch=3, prompt_tokens=600, output_tokens=7, context=700)
UNLIMITED = Budget(gpu_memory=2**40)
MODELS = {"dense": dense_model(4), "moe": moe_model(4)}

FEW_DENSE, FEW_MOE = (
    {name: shape for name, shape in shapes.items() if name.split(".")[-2] in parts}
    for shapes, parts in (
        (DENSE, ("down_proj", "up_proj", "o_proj")),
        (
            {name: MOE[name] for name in MOE if "shared" not in name},
            ("down_proj", "gate_proj", "up_proj", "o_proj"),
        ),
    )
)
"""Layers with few segment classes, so that more of them can be looked at."""

models = st.sampled_from(
    [dense_model(6), moe_model(6), make_model([MOE] * 3), make_model([DENSE, MOE] * 3)]
)
shares = st.floats(0.05, 1.1)
rates = st.sampled_from([0.5e9, 5e9, 50e9])
workloads = st.builds(
    Workload,
    batch=st.sampled_from([1, 3, 40]),
    prompt_tokens=st.sampled_from([1, 100, 600, 2500]),
    output_tokens=st.sampled_from([1, 50]),
    context=st.just(2600),
)


def budget_for(
    model: Model, machine: MachineProfile, share: float, workload: Workload = WORKLOAD
) -> Budget:
    """A budget for this share of the layers' weights, beside all that is not weights."""
    return _budget_for(hold_by(model), machine, share, workload)


def _budget_for(
    stages: Sequence[Stage], machine: MachineProfile, share: float, workload: Workload
) -> Budget:
    smallest = Offload(prefill_chunk=prefill_chunks(workload.prompt_tokens, workload.batch)[-1])
    terms = predict(stages, machine, workload, UNLIMITED, smallest).gpu_memory
    stage = find_largest(stages, workload)
    fixed = terms.kv_cache_bytes + terms.activation_bytes + stage.outside_bytes
    layers = stage.loaded_bytes - stage.outside_bytes
    return Budget(gpu_memory=round((fixed + share * layers) / (1 - MARGIN)))


def ask(
    model: Model,
    machine: MachineProfile,
    share: float,
    workload: Workload = WORKLOAD,
    goal: Goal | None = None,
    **others: Any,
) -> Question:
    """Ask for a plan with room for this share of the layers' weights, as they are loaded."""
    goal = goal or Goal(packing=False)
    budget = _budget_for(lower(model, goal), machine, share, workload)
    return pose(model, machine, workload, budget, goal, **others)


def plan_for(
    model: Model,
    machine: MachineProfile,
    budget: Budget = UNLIMITED,
    workload: Workload = WORKLOAD,
    goal: Goal | None = None,
    **others: Any,
) -> Plan:
    """The plan for a budget."""
    return make_plan(
        pose(model, machine, workload, budget, goal or Goal(packing=False), **others)
    ).plan


def assert_fastest(result: PlanResult, least_s: float) -> None:
    """The fastest found is within 0.5 % of the fastest there is, the chosen within 1 % of it."""
    assert least_s * (1 - 1e-12) <= result.best_s <= 1.005 * least_s
    assert result.best_s * (1 - 1e-12) <= result.plan.prediction.objective_s
    assert result.plan.prediction.objective_s <= ALIKE * result.best_s * (1 + 1e-12)


def with_cores(machine: MachineProfile, **rates: float) -> MachineProfile:
    """A machine whose profile says this of its cores."""
    figure = machine.h2d
    said = {key: figure.model_copy(update={"value": value}) for key, value in rates.items()}
    return machine.model_copy(update=said)


@st.composite
def uneven_models(draw: st.DrawFn) -> Model:
    """Layers of up to three kinds, in any order: parameters of odd sizes, some of them missing."""

    def shapes() -> Shapes:
        names = draw(st.sampled_from([sorted(DENSE), sorted(MOE)]))
        kept = [name for name in names if ".experts." in name or draw(st.integers(0, 4))]
        return {
            name: (draw(odd), draw(odd)) if name.endswith("proj.weight") else (draw(odd),)
            for name in kept or names[-1:]
        }

    odd = st.integers(1, 90)
    kinds = [shapes() for _ in range(draw(st.integers(1, 3)))]
    return make_model(draw(st.lists(st.sampled_from(kinds), min_size=2, max_size=6)))
