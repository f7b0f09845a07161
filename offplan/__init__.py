"""offplan plans, then runs, a model whose weights do not fit the GPU.

The library, of which each name is imported when it is first asked for:

====================== ============================================================================
``open_model``         reads what a model is: a folder, a ``config.json`` or a Hub id
``load_machine``       takes the machine that a profile describes, by its name or file
``measure_here``       measures the machine at hand, and how long a model's layers take on it
``Workload``           what a plan is optimised for: batch, tokens of prompt and output, context
``ask``                asks for the best plan: model, machine, workload, memory, targets
``ask_again``          asks what a plan file answers, from the file alone
``Question``           what was asked
``make_plan``          finds the plan
``find_frontier``      finds the best plan of each budget
``Plan``               which weights stay on the host, how they reach the GPU, what that costs
``load_plan``          reads a plan file
``dump_plan``          prints a plan as the text of its file
``check_plan``         holds a plan against model, profile, its own decision, this machine
``compare_plans``      finds what two plans differ in
``derive_prediction``  derives every number that a plan promises
``find_neighbours``    prices one step of each knob of a plan
``rewrite_plan``       puts a plan's values into the text of another one's file
``export_plan``        says a plan as a command of vLLM or SGLang
``open_session``       loads a plan's model, ready to run
``generate``           yields tokens
``OffplanForCausalLM`` makes a session a ``PreTrainedModel`` of transformers
``Rows``               the rows of a session's cache: texts join, take steps together and leave
``generate_texts``     continues texts in such rows, and yields what each token adds
``Text``               a prompt, and what follows it until it ends
``Sampling``           how tokens are drawn, under transformers' names
``bench_plan``         measures a plan beside its prediction
``OffplanError``       what all errors have in common; ``offplan.errors`` draws the tree
====================== ============================================================================

Sizes are bytes and times are seconds, as the names say: ``gpu_memory``, ``link_bytes``, ``step_s``.
A record given a value that it does not allow raises pydantic's ValidationError, a ValueError.
"""

TYPE_CHECKING = False  # by this name type checkers know it; typing takes a while to import
if TYPE_CHECKING:  # with "as", a type checker lets others import the name from here
    from offplan.checkpoint.open import open_model as open_model
    from offplan.costs.predict import derive_prediction as derive_prediction
    from offplan.engines.export import export_plan as export_plan
    from offplan.errors import OffplanError as OffplanError
    from offplan.library.asking import ask as ask
    from offplan.library.asking import ask_again as ask_again
    from offplan.library.benchmark import bench_plan as bench_plan
    from offplan.library.machines import load_machine as load_machine
    from offplan.library.machines import measure_here as measure_here
    from offplan.library.sessions import open_session as open_session
    from offplan.plan import Plan as Plan
    from offplan.plan import Workload as Workload
    from offplan.plan import dump_plan as dump_plan
    from offplan.plan import load_plan as load_plan
    from offplan.planner.frontier import find_frontier as find_frontier
    from offplan.planner.make import make_plan as make_plan
    from offplan.planner.neighbours import find_neighbours as find_neighbours
    from offplan.planner.question import Question as Question
    from offplan.runtime.generate import generate as generate
    from offplan.runtime.hugging_face import OffplanForCausalLM as OffplanForCausalLM
    from offplan.runtime.joined import generate_texts as generate_texts
    from offplan.runtime.rows import Rows as Rows
    from offplan.runtime.sampling import Sampling as Sampling
    from offplan.runtime.texts import Text as Text
    from offplan.upkeep.checking import check_plan as check_plan
    from offplan.upkeep.comparing import compare_plans as compare_plans
    from offplan.upkeep.rewriting import rewrite_plan as rewrite_plan

__version__ = "0.1.0"

_HOMES = {
    "OffplanError": "errors",
    "OffplanForCausalLM": "runtime.hugging_face",
    "Plan": "plan",
    "Question": "planner.question",
    "Rows": "runtime.rows",
    "Sampling": "runtime.sampling",
    "Text": "runtime.texts",
    "Workload": "plan",
    "ask": "library.asking",
    "ask_again": "library.asking",
    "bench_plan": "library.benchmark",
    "check_plan": "upkeep.checking",
    "compare_plans": "upkeep.comparing",
    "derive_prediction": "costs.predict",
    "find_neighbours": "planner.neighbours",
    "rewrite_plan": "upkeep.rewriting",
    "dump_plan": "plan",
    "export_plan": "engines.export",
    "find_frontier": "planner.frontier",
    "generate": "runtime.generate",
    "generate_texts": "runtime.joined",
    "load_machine": "library.machines",
    "load_plan": "plan",
    "make_plan": "planner.make",
    "measure_here": "library.machines",
    "open_model": "checkpoint.open",
    "open_session": "library.sessions",
}
"""The module of each public name."""

__all__ = list(_HOMES)

if not TYPE_CHECKING:  # type checkers are to see the names above, and no others

    def __getattr__(name: str) -> object:
        """Import a public name when it is first asked for: planning needs no torch."""
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})
