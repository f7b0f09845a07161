"""Plans of at most one rule: bounds that hold, in an order that the search can stop in."""

from hypothesis import assume, given, settings
from hypothesis import strategies as st
from offplan.planner.contents import Pricer
from offplan.planner.problem import Problem
from offplan.planner.targets import NEVER, Fastest

from offplan.checkpoint.model import Model
from offplan.plan import Workload
from offplan.planner.classes import price_classes
from offplan.planner.space import list_singles
from tests.costs.builders import DENSE, MOE, dense_model, make_machine, make_model, moe_model
from tests.test_planner import budget_for

MODELS = [dense_model(5), moe_model(5), make_model([DENSE, MOE] * 3)]
WORKLOADS = [
    Workload(prompt_tokens=600, output_tokens=20, context=700),
    Workload(batch=3, prompt_tokens=2500, output_tokens=7, context=2600),
]


def pose(model: Model, h2d: float, uva: float, share: float, workload: Workload) -> Problem:
    machine = make_machine(h2d=h2d, uva=uva * h2d)
    return Problem(model, machine, workload, budget_for(model, machine, share, workload))


problems = st.builds(
    pose,
    st.sampled_from(MODELS),
    st.sampled_from([1e8, 5e9, 50e9]),
    st.sampled_from([0.7, 1.0, 1.3]),
    st.floats(0.1, 1.0),
    st.sampled_from(WORKLOADS),
)


@settings(deadline=None, max_examples=25)
@given(st.data(), problems)
def test_no_member_takes_less_than_its_group(data: st.DataObject, problem: Problem) -> None:
    """Of each phase a group's bound is no more than its families', theirs no more than members'."""
    singles, pricer = list_singles(problem, price_classes(problem)), Pricer(problem)
    assume(singles.groups)
    settings = [(each.prefill_chunk, each.embeddings) for each in problem.settings]
    for number in data.draw(st.lists(st.integers(0, 10**6), min_size=5, max_size=20)):
        group = singles.groups[number % len(singles.groups)]
        prefill_ps, decode_ps = singles.least_ps(group)
        families = list(singles.split(group))
        assert sum(family.num_members for family in families) == group.num_members
        for family in families:
            assert prefill_ps <= family.prefill_ps
            assert decode_ps <= family.decode_ps
            setting = settings.index((family.prefill_chunk, family.embeddings))
            for member in range(family.num_members):
                contents = pricer.contents(family.choices(member))
                weighed = pricer.weigh(contents, family.prefetch_step)
                assert weighed.saved_bytes >= problem.settings[setting].lacking_bytes
                where = contents, weighed.num_slots, setting
                assert family.prefill_ps <= pricer.prefill_ps(*where)
                assert family.decode_ps <= pricer.decode_ps(*where)


@settings(deadline=None, max_examples=25)
@given(problems, st.floats(1.0, 3.0))
def test_families_come_in_the_order_of_bound_and_rank(problem: Problem, beyond: float) -> None:
    singles = list_singles(problem, price_classes(problem))
    goal = Fastest(problem.weights)
    listed = [(bound, family.rank) for bound, family in singles.by_bound(goal)]
    families = singles.families + [
        family for group in singles.groups for family in singles.split(group)
    ]
    ordered = sorted((goal.value(*family[:2]), family.rank) for family in families)
    assert listed == ordered
    assert singles.num_members == sum(family.num_members for family in families)
    # with a target, those that cannot keep it are left out
    assume(families)
    least_ps = min(family.decode_ps for family in families)
    within = Fastest(problem.weights, (NEVER, beyond * least_ps))
    listed = [(bound, family.rank) for bound, family in singles.by_bound(within)]
    bounded = ((within.value(*family[:2]), family.rank) for family in families)
    assert listed == sorted(each for each in bounded if each[0] < NEVER)
