"""Seconds of the fastest plans of questions about real models, found by a wider search.

``python -m tests.planner.totals`` finds them again, in minutes. Whatever changes prices needs it.
"""

import json
import sys
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.timeline import PS_PER_S
from offplan.library.asking import ask as plan_ask
from offplan.library.machines import load_machine
from offplan.plan import Workload
from offplan.planner.aims import Fastest, Floats
from offplan.planner.find import find_plan
from offplan.planner.packed import find_best
from offplan.planner.question import Question
from offplan.planner.search import Searcher
from offplan.planner.space import Space
from tests.cli import ROOT

TOTALS = ROOT / "tests" / "planner" / "totals.json"
SLACK = 0.05
"""Share by which estimates are lowered further before a plan is passed over.

With 0.02 it found the same times of all questions, with 0.1 those of 22 and with 0.25 of 8.
"""


AT_THE_FLOOR = 1.001
"""Time of a plan over the floor of its budget up to which no wider search is made.

Where compute hides all copies, far too many plans take as long.
"""


class Total(NamedTuple):
    """A question about a real model, with the seconds of its fastest plan of up to two rules."""

    model: str
    machine: str
    gpu_memory: int
    batch: int
    prompt_tokens: int
    output_tokens: int
    context: int
    packing: bool
    least_s: float

    def ask(self) -> Question:
        """Ask it."""
        sizes = ("batch", "prompt_tokens", "output_tokens", "context")
        workload = Workload.model_validate({name: getattr(self, name) for name in sizes})
        asked: dict[str, Any] = {"gpu_memory": self.gpu_memory, "packing": self.packing}
        machine = load_machine(self.machine)
        return plan_ask(read(self.model), machine, workload, **asked, host_cores=False)


@dataclass(frozen=True)
class Wider(Fastest):
    """The least time of a request, by a search that passes over less."""

    def loosened(self, more_ps: int) -> "Fastest":
        """Return an aim for estimates."""
        return Lowered(self.weights, super().loosened(more_ps).limits_ps)


@dataclass(frozen=True)
class Lowered(Fastest):
    """Estimates of such an aim."""

    def values(self, prompt_ps: Floats, step_ps: Floats) -> Floats:
        """Weigh both phases' times, and lower the sum."""
        return (1 - SLACK) * super().values(prompt_ps, step_ps)


@cache
def read(name: str) -> Model:
    """Read a model of a folder of this checkout."""
    return open_model(str(ROOT / name))


def read_totals() -> list[Total]:
    """Read all questions."""
    return [Total(*each) for each in json.loads(TOTALS.read_text())]


def find_least(question: Question) -> float:
    """Find the seconds of the fastest plan."""
    searcher = Searcher(Space(question))
    result = find_plan(searcher, question)
    assert result is not None, "a plan fits"
    if result.gap <= AT_THE_FLOOR:
        return result.best_s
    aim = Wider(searcher.fastest.weights, searcher.fastest.limits_ps)
    found = find_best(searcher, question.budget, aim).best
    assert found is not None, "a plan fits"
    return found.value / PS_PER_S


def main() -> None:
    """Write the file again."""
    lines = []
    for each in read_totals():
        total = each._replace(least_s=round(find_least(each.ask()), 12))
        lines.append("  " + json.dumps(total))
        print(f"{total.least_s / each.least_s:.4f} {lines[-1]}", file=sys.stderr, flush=True)
    TOTALS.write_text("[\n" + ",\n".join(lines) + "\n]\n")


if __name__ == "__main__":
    main()
