"""Write the page of the library's records, ``docs/records.md``, from their source.

    python docs/make_records.py

``tests/test_docs.py`` holds the file to what is written here, and the list to what the library's
functions return.
"""

import ast
import inspect
import re
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path

import offplan
from offplan.capabilities.table import Goal, Offload, Rule
from offplan.checkpoint.model import Experts, KVCache, Layer, Model
from offplan.costs.term import Term
from offplan.engines.export import Export
from offplan.errors import InfeasibleError, OffplanError
from offplan.library.benchmark import BenchResult
from offplan.library.machines import Machine
from offplan.machine.profile import MachineProfile
from offplan.plan import (
    Budget,
    DraftPrediction,
    GPUMemoryPrediction,
    MachineRef,
    ModelRef,
    PhasePrediction,
    Plan,
    Prediction,
    Workload,
)
from offplan.planner.find import PlanResult
from offplan.planner.frontier import Point
from offplan.planner.neighbours import Neighbour
from offplan.planner.question import Question
from offplan.runtime.measuring.bench import Measurement, PhaseCost, Spread
from offplan.runtime.sampling import Sampling
from offplan.runtime.texts import Text
from offplan.upkeep.comparing import Difference, Move
from offplan.upkeep.figures import Finding

PAGE = Path(__file__).with_name("records.md")
HEAD = """\
# Records of the library

`python docs/make_records.py` makes this page from the records' source; do not edit it by hand.
[As a library](library.md) shows them at work. `help(offplan.NAME)` prints what functions take,
return and raise. `offplan schema plan` and `offplan schema profile` print the keys of files.
"""
CHAPTERS: dict[str, tuple[type, ...]] = {
    "The question": (Workload, Budget, Goal, Question),
    "The model": (Model, Layer, Experts, KVCache),
    "The machine": (Machine, MachineProfile),
    "The plan": (Plan, ModelRef, MachineRef, Offload, Rule, Prediction, PhasePrediction,
                 GPUMemoryPrediction, DraftPrediction),
    "Answers": (PlanResult, Point, Neighbour, Term, Finding, Difference, Move, Export),
    "What runs": (Sampling, Text, BenchResult, Measurement, PhaseCost, Spread),
    "Errors": (OffplanError, InfeasibleError),
}  # fmt: skip
_PLAIN = {
    "Count": "int",
    "(Exact)?Bytes": "int",
    "(Exact)?Seconds": "float",
    "Rate": "float",
    "(ObjectiveName|StoreName|KVCacheDtype|PartsChoice|Basis|Verdict|UnitName)": "str",
    "Segments": "tuple[str, ...]",
}
"""Types of Python for the source's own names of numbers and words."""
LEFT_OUT = {"computed_by", "model_config"}


def list_attributes(kind: type) -> Iterator[tuple[str, str, str]]:
    """List a class's attributes, those of its bases first, with type and text of the source."""
    rows: dict[str, tuple[str, str]] = {}
    for each in reversed(kind.__mro__):
        if each.__module__.startswith("offplan."):
            rows.update({name: (of, text) for name, of, text in _read_class(each)})
    yield from ((name, *cells) for name, cells in rows.items())


def _read_class(kind: type) -> Iterator[tuple[str, str, str]]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(node, ast.ClassDef)
    for each, behind in zip(node.body, [*node.body[1:], None], strict=True):
        name, text, of = "", None, None
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            is_class = "ClassVar" in ast.unparse(each.annotation)
            name, of = "" if is_class else each.target.id, each.annotation
            if isinstance(behind, ast.Expr) and isinstance(behind.value, ast.Constant):
                text = str(behind.value.value)
        elif isinstance(each, ast.FunctionDef):
            kinds = {ast.unparse(decorator) for decorator in each.decorator_list}
            name = each.name if kinds & {"property", "cached_property"} else ""
            text, of = ast.get_docstring(each), each.returns
        if name and not name.startswith("_") and name not in LEFT_OUT:
            yield name, _name_type(of), " ".join((text or "").split("\n\n")[0].split())


def _name_type(annotation: ast.expr | None) -> str:
    """Return a type as the source has it, without what checks values."""
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value) == "Annotated":
        assert isinstance(annotation.slice, ast.Tuple)
        annotation = annotation.slice.elts[0]
    text = "" if annotation is None else ast.unparse(annotation).strip("'\"")
    for name, plain in _PLAIN.items():
        text = re.sub(rf"\b{name}\b", plain, text)
    return text.replace("|", "or").replace("'", "")


def list_returned() -> Iterator[type]:
    """List the records that the library's functions return."""
    for name in offplan.__all__:
        function = getattr(offplan, name)
        if inspect.isfunction(function):
            found = function.__annotations__["return"]
            for each in (found, *typing.get_args(found)):
                if inspect.isclass(each) and each.__module__.startswith("offplan."):
                    yield each


def render_page() -> str:
    """Return the whole page."""
    lines = [HEAD]
    for title, kinds in CHAPTERS.items():
        lines.append(f"## {title}\n")
        for kind in kinds:
            where = f"offplan.{kind.__name__}"
            if getattr(offplan, kind.__name__, None) is not kind:
                where = f"{kind.__module__}.{kind.__name__}"
            about = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
            rows = [f"| `{name}` | {of} | {text} |" for name, of, text in list_attributes(kind)]
            lines += [f"### {kind.__name__}\n", f"`{where}`: {about}\n"]
            lines += ["| attribute | type | meaning |", "|---|---|---|", *rows, ""] if rows else []
    return "\n".join(lines).replace("``", "`")


if __name__ == "__main__":
    PAGE.write_text(render_page(), "utf-8")
