"""Plans are made again around weights that turn out not to fit a form."""

from collections.abc import Callable, Sequence

from offplan.checkpoint.model import Model
from offplan.errors import OffplanError
from offplan.library.asking import ask_again
from offplan.library.repricing import find_planned_machine, price_on
from offplan.library.settled import Settle, leave_as_stored
from offplan.plan import Plan
from offplan.planner.make import make_plan
from offplan.units import format_bytes

Tell = Callable[[str], object]
"""Is told in a line what changes in a plan."""


def replan_without(tell: Tell) -> Settle:
    """Return what finds another plan in any case: it plans again where the budget has no room.

    ``tell`` hears of it. The new plan raises what ``ask_again`` and ``make_plan`` raise.
    """

    def settle(plan: Plan, model: Model, names: Sequence[str]) -> Plan:
        recoding = plan.offload.recoding
        assert recoding is not None, "weights that are as they are stored fit"
        told = f"{', '.join(names)} cannot be held {recoding.done} (more patches than room)"
        kept = keep_priced(plan, model, names)
        if kept is not None:
            sizes = [each.prediction.gpu_memory.total_bytes for each in (plan, kept)]
            tell(
                f"{told}: held as stored, for which the plan has room; its GPU memory is "
                f"{format_bytes(sizes[1])} instead of {format_bytes(sizes[0])}"
            )
            return kept
        made = plan_around(plan, model, names)
        tell(f"{told}: planned again without {recoding.word} these")
        return made

    return settle


def keep_priced(plan: Plan, model: Model, names: Sequence[str]) -> Plan | None:
    """Return the plan of ``leave_as_stored`` with its times, too, where the profile is there."""
    kept, machine = leave_as_stored(plan, model, names), find_planned_machine(plan)
    if kept is None or machine is None:
        return kept
    priced = price_on(kept, model, machine)
    return priced if priced.describe_excess() is None else None


def plan_around(plan: Plan, model: Model, names: Sequence[str]) -> Plan:
    """Make a plan again that leaves some more weights as they are stored.

    Raises what ``ask_again`` and ``make_plan`` raise, and says then what was to be done.
    """
    around = plan.model_copy(update={"goal": plan.goal.exclude(names)})
    try:
        return make_plan(ask_again(around, model=model)).plan
    except OffplanError as error:
        raise type(error)(
            f"{', '.join(names)} cannot be held packed, and the plan cannot be made again without: "
            f"{error}; ask again with {around.goal.excluded}"
        ) from None
