"""The best plan of a space for a budget and its targets, and the batch of most tokens a second."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from offplan.costs.floor import Floor, find_floor
from offplan.costs.pass_compute import PassCompute
from offplan.costs.timeline import PS_PER_S
from offplan.errors import InfeasibleError
from offplan.plan import Budget, Plan
from offplan.planner.aims import NEVER, Balanced, value_of
from offplan.planner.infeasible import explain_infeasible
from offplan.planner.options import SETTLED
from offplan.planner.packed import find_best
from offplan.planner.question import Question
from offplan.planner.search import MAX_RULES, Candidate, Searcher
from offplan.planner.space import Space, find_room

ALIKE = 1.01
"""Requests that take up to this multiple of the fastest are as good. Source: chosen, since
predictions are off by more."""
SOONER = 0.05
"""Share of the time to the first token that a rule has to spare to make the request longer.

Source: chosen; first tokens are predicted to that.
"""


@dataclass(frozen=True)
class PlanResult:
    """A plan, and what it took to find it."""

    plan: Plan
    best_s: float
    """Seconds of a request by the fastest plan found: this one takes at most ALIKE times that."""
    num_candidates: int
    """Plans of at most one rule that fit the budget."""
    num_priced: int
    """Plans whose timeline was run on the way to the fastest one."""
    second_rule_gain: float
    """Time of the fastest plan of at most one rule over that of the fastest; at least 1."""
    max_rules: int
    """Plans of up to so many rules were searched."""
    floor: Floor
    """Lower bound of this budget's plans."""

    @property
    def gap(self) -> float:
        """The plan's time over the floor's; 1 is the best there can be."""
        return self.plan.prediction.objective_s / self.floor.objective_s


def find_plan(searcher: Searcher, question: Question, below_s: float = NEVER) -> PlanResult | None:
    """Find the plan of a question about a searcher's space, of requests of less than ``below_s``.

    Returns None if plans fit, but none keeps the targets or is as fast. Raises InfeasibleError when
    none fits.
    """
    space, goal = searcher.space, question.goal
    aim = searcher.fastest
    search = find_best(searcher, question.budget, aim, below_s * PS_PER_S)
    if search.best is None:
        if search.gpu_lack or search.host_lack or (below_s == NEVER and not goal.targets):
            raise explain_infeasible(searcher, question, search)
        return None
    fastest = chosen = search.best
    if question.workload.num_steps:  # else the first token is all
        balanced = Balanced(aim, ALIKE * fastest.value)
        rival = fastest._replace(value=value_of(fastest.times_ps, balanced))
        chosen = find_best(searcher, question.budget, balanced, rival=rival).best or fastest
        if _trades(chosen) and not _trades(fastest):
            other = find_best(searcher.untraded, question.budget, balanced, rival=rival).best
            if other is not None and chosen.times_ps[0] > (1 - SOONER) * other.times_ps[0]:
                chosen = other
    offload = chosen.offload
    for settle in SETTLED:
        offload = settle(question, offload)
    return PlanResult(
        plan=question.answer(offload),
        best_s=fastest.value / PS_PER_S,
        num_candidates=search.num_candidates,
        num_priced=search.num_priced,
        second_rule_gain=search.second_rule_gain,
        max_rules=1 if space.question.runner.takes_one_rule else MAX_RULES,
        floor=find_floor_of(searcher, question.budget),
    )


def _trades(found: Candidate) -> bool:
    return any(rule.trades_request for rule in found.offload.rules)


def find_floor_of(searcher: Searcher, budget: Budget) -> Floor:
    """Find a budget's floor: memory of the chunks that need least, compute of the fastest ones.

    As far as memory goes, all weights that may be packed are, or none: their scratch may take more
    than packing saves. As far as time goes, only weights that are faster so are packed.
    """
    spaces, space = searcher.spaces, searcher.space
    ways = [(each.space.stage, _missing_bytes(each, budget)) for each in searcher.every]
    prompts = zip(*([each.prefill for each in space.settings] for space in spaces), strict=True)
    fastest = min(map(_fastest_ps, prompts)), _fastest_ps([space.decode for space in spaces])
    others = (0, 0) if searcher.stages is None else searcher.stages.fastest_ps
    asked = space.question
    beside = asked.goal.more_backends
    return find_floor(ways, space.machine, asked.workload, fastest, others, beside, space.mix)


def _missing_bytes(searcher: Searcher, budget: Budget) -> int:
    """Bytes of weights that are to leave the GPU at least."""
    missing = find_room(searcher.space, budget).missing_bytes
    return max(0, missing - searcher.spared_bytes) if missing > 0 else 0  # asked if it matters


def _fastest_ps(ways: Sequence[PassCompute]) -> int:
    """Picoseconds of a pass with everything resident, each layer held as it is fastest."""
    layers: Iterable[tuple[int, ...]] = zip(*(way.layer_ps for way in ways), strict=True)
    return sum(map(min, layers)) + min(way.behind_ps for way in ways)


MOST_BATCH = 4096
"""Larger batches are not tried."""


def plan_throughput(question: Question) -> PlanResult | None:
    """Find a batch whose plan gives most tokens a second within the targets.

    Every power of two that fits is tried, and three sizes between two powers. Memory spent on KV
    cache instead of weights may pay again after it did not, and so may more texts after kernels for
    many took over. If layer times were measured, a larger batch may be the one that keeps a target.
    Then steps of a half of the best size, of a quarter and so on to one are tried, up and down from
    the best. Returns None if no batch has a plan.
    """
    best: PlanResult | None = None
    tried: set[int] = set()
    routing = question.stage.routing

    def attempt(batch: int) -> None:
        """Keep the plan of a batch if it is the best."""
        nonlocal best
        tried.add(batch)
        if routing is not None and all(each.batch != batch for each in routing.batches):
            return  # how such a batch chooses experts was not recorded
        sized = question.with_workload(batch=batch)
        below_s = NEVER if best is None else batch * best.best_s / best.plan.workload.batch
        searcher = Searcher(Space(sized))
        if not any(_may_fit(each) for each in searcher.every):
            return
        if find_floor_of(searcher, sized.budget).objective_s >= below_s:
            return  # no plan can be as fast
        try:
            best = find_plan(searcher, sized, below_s) or best
        except InfeasibleError:
            return

    powers = [2**power for power in range(MOST_BATCH.bit_length())]
    sizes = {power * quarters // 4 for power in powers for quarters in (4, 5, 6, 7)}
    for size in sorted(sizes, reverse=True):  # the largest rules out most others
        if size <= MOST_BATCH:
            attempt(size)
    if best is None:
        return None
    step = best.plan.workload.batch
    while step := step // 2:
        batch = best.plan.workload.batch
        for other in (batch - step, batch + step):
            if other not in tried and other <= MOST_BATCH:
                attempt(other)
    return best


def _may_fit(searcher: Searcher) -> bool:
    """Return True if the budget has room for all that is no layer's weight."""
    space = searcher.space
    lacking_bytes = find_room(space, space.question.budget).lacking_bytes.min()
    lacking_bytes -= space.stage.loaded_bytes - space.stage.outside_bytes
    return bool(lacking_bytes <= 0 or lacking_bytes <= searcher.spared_bytes)


def tokens_per_s(plan: Plan) -> float:
    """Output tokens of all sequences a second over the whole request, prompt included."""
    workload = plan.workload
    return workload.batch * workload.output_tokens / plan.prediction.objective_s
