"""Imports point one way, and what needs no GPU starts without torch."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
PACKAGE = TESTS.parent / "offplan"

ARROWS = {
    "errors": [],
    "units": ["errors"],
    "files": [],
    "kinds": [],
    "kernel_sizes": [],
    "disk_cache": ["files"],
    "records": ["errors", "units", "files"],
    "progress": [],
    "choices": [],
    "stores": [],
    "lean": [],
    "transformers_private": [],
    "hostmem": ["errors", "units"],
    "forms": ["errors", "files"],
    "hostcores": ["errors", "files", "forms"],
    "checkpoint": [
        "errors",
        "units",
        "progress",
        "disk_cache",
        "kinds",
        "forms",
        "transformers_private",
    ],
    "machine": [
        "records",
        "kinds",
        "kernel_sizes",
        "progress",
        "disk_cache",
        "hostmem",
        "stores",
    ],
    "segments": [],
    "backends": ["stores", "forms"],
    "row_cache": ["checkpoint"],
    "capabilities": ["records", "choices", "backends", "segments", "kernel_sizes", "row_cache"],
    "plan": ["capabilities"],
    "drafts": ["plan"],
    "routing": ["plan"],
    "held": ["routing", "drafts", "row_cache"],
    "packing_sample": ["held"],
    "routed_experts": ["held"],
    "placement": ["routed_experts"],
    "schedule": ["placement"],
    "refusals": ["placement", "kernel_sizes"],
    "costs": ["checkpoint", "machine", "schedule", "refusals"],
    "engines": ["costs"],
    "planner": ["costs"],
    "runtime": [],
    "runtime.device": ["errors"],
    "runtime.faults": ["errors"],
    "runtime.refusal": ["checkpoint", "errors"],
    "runtime.gpu_limits": [],
    "runtime.forms": [
        "kernel_sizes",
        "hostcores",
        "capabilities",
        "runtime.gpu_limits",
        "transformers_private",
        "runtime.refusal",
        "checkpoint",
    ],
    "runtime.memory": ["runtime.device", "runtime.forms", "hostmem", "schedule"],
    "runtime.model": ["runtime.forms", "placement"],
    "runtime.loading": ["runtime.memory", "runtime.model", "refusals"],
    "runtime.passes": ["runtime.loading", "routing"],
    "runtime.parts": ["runtime.passes"],
    "runtime.peer": ["runtime.loading"],
    "runtime.cached_experts": ["runtime.loading"],
    "runtime.stock": ["runtime.passes"],
    "runtime.host_cores": ["runtime.loading"],
    "runtime.executors": [
        "runtime.parts",
        "runtime.peer",
        "runtime.cached_experts",
        "runtime.host_cores",
        "runtime.stock",
    ],
    "runtime.prediction": ["runtime.executors", "runtime.faults"],
    "runtime.session": ["runtime.prediction"],
    "runtime.sampling": ["errors"],
    "runtime.generate": ["drafts", "runtime.session", "runtime.sampling"],
    "runtime.rendering": ["checkpoint"],
    "runtime.prompts": ["plan", "runtime.rendering"],
    "runtime.rows": ["runtime.generate"],
    "runtime.rules": ["checkpoint"],
    "runtime.texts": ["runtime.rules"],
    "runtime.masks": ["errors"],
    "runtime.joined": ["runtime.texts", "runtime.generate", "runtime.rows", "runtime.masks"],
    "runtime.hugging_face": ["runtime.rows"],
    "runtime.measuring": ["runtime.joined", "machine"],
    "library.planned": ["machine", "routing", "drafts"],
    "library.held_memory": ["placement"],
    "library.runnable": ["held", "lean", "runtime.executors", "runtime.measuring"],
    "library.settled": ["refusals", "library.held_memory", "packing_sample", "runtime.memory"],
    "library.sessions": [
        "library.planned",
        "library.runnable",
        "library.settled",
        "runtime.session",
    ],
    "library": ["planner", "engines", "library.sessions", "runtime.measuring", "runtime.prompts"],
    "vllm": ["library"],
    "lm_eval": ["library"],
    "vllm_packed": ["engines", "runtime.forms"],
    "upkeep": ["library"],
    "report": ["upkeep", "runtime.joined"],
    "serve": ["runtime.joined", "runtime.prompts"],
    "cli": ["lean", "report", "serve"],
    "__main__": ["cli"],
}
"""Room by room, what it may import; what that room may import in turn is allowed too."""


def room_of(module: str) -> str:
    """The room that a module, ``offplan.room.module``, is in.

    The runtime has rooms of its own, and each module that opens a session is one.
    """
    parts = module.split(".")[1:]
    room = ".".join(parts[:2])
    return room if "runtime" in parts[:1] or room in ARROWS else "".join(parts[:1])


def allowed(room: str) -> set[str]:
    rooms = set(ARROWS[room])
    return rooms.union(*(allowed(other) for other in rooms)) | {room}


@cache
def imported_names(path: Path) -> set[str]:
    """What a file imports anywhere in it, inside functions as well, by its full name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import hides where it leads"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_rooms(path: Path) -> set[str]:
    """Rooms that a file imports."""
    names = (name for name in imported_names(path) if name.startswith("offplan."))
    return {room_of(name) for name in names} - {"__version__"}


@cache
def rooms() -> dict[str, list[Path]]:
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
        if room := room_of(".".join(parts).removesuffix(".__init__")):
            found.setdefault(room, []).append(path)
    return found


def test_every_room_is_in_the_order() -> None:
    assert set(rooms()) <= set(ARROWS)


@pytest.mark.parametrize("room", rooms())
def test_arrows(room: str) -> None:
    wrong = {
        str(path.relative_to(PACKAGE)): sorted(forbidden)
        for path in rooms()[room]
        if (forbidden := imported_rooms(path) - allowed(room))
    }
    assert not wrong, f"{room} may import {sorted(allowed(room))}"


MEASURING = {
    "runtime.host_cores": {"runtime.measuring"},
}
"""Rooms beside the table that import a capability's: they measure it."""


@pytest.mark.parametrize("capability", ARROWS["runtime.executors"])
def test_the_table_alone_imports_a_capability(capability: str) -> None:
    """Without its folder and its row in the table, everything else is there."""
    importing = {
        room
        for room, paths in rooms().items()
        for path in paths
        if capability in imported_rooms(path) and room != capability
    }
    assert importing == {"runtime.executors"} | MEASURING.get(capability, set())


@pytest.mark.parametrize(
    ("capability", "importers"),
    [
        ("capabilities.parts", {"capabilities/table.py"}),
        ("costs.parts", {"costs/capabilities.py", "planner/parts.py"}),
        ("costs.packing", {"costs/capabilities.py"}),
        ("planner.parts", {"planner/options.py"}),
        ("held.stock", {"held/runtimes.py", "runtime/stock/passes.py"}),
        ("planner.cached_experts", {"planner/options.py"}),
    ],
)
def test_tables_alone_import_a_capability(capability: str, importers: set[str]) -> None:
    """Without its files and its rows of the tables all else is imported as before."""
    name = f"offplan.{capability}"
    every = (path for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    found = {
        str(path.relative_to(PACKAGE))
        for path in every
        if any(each == name or each.startswith(f"{name}.") for each in imported_names(path))
    }
    assert found == importers


def test_tests_import_helpers_never_one_another() -> None:
    wrong = {
        f"{path.relative_to(TESTS)}: {name}"
        for path in TESTS.rglob("*.py")
        for name in imported_names(path)
        if name.startswith("tests.") and ".test_" in name
    }
    assert not wrong


def loaded_files(code: str) -> set[str]:
    """Modules by their full names in a fresh interpreter that has run ``code``."""
    script = f"{code}\nimport sys; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    return {*done.stdout.splitlines()[-1].split()}


def loaded_modules(code: str) -> set[str]:
    """Top-level modules in a fresh interpreter that has run ``code``."""
    return {name.partition(".")[0] for name in loaded_files(code)}


@pytest.mark.slow
def test_opening_a_session_prices_nothing() -> None:
    """Neither costs, nor a planner, nor another's runner is imported to open one and generate."""
    path = PACKAGE.parent / "plans" / "tiny-moe.yaml"
    loaded = loaded_files(
        "from pathlib import Path; import torch, offplan\n"
        f"plan = offplan.load_plan(Path({str(path)!r}))\n"
        "with offplan.open_session(plan, device='cpu') as session:\n"
        "    list(offplan.generate(session, torch.tensor([[3, 1, 4]]), 2))"
    )
    rooms_loaded = {room_of(name) for name in loaded if name.startswith("offplan.")}
    assert "library.sessions" in rooms_loaded
    assert not rooms_loaded & {"costs", "engines", "planner", "upkeep", "report", "cli", "vllm"}


def test_help_loads_nothing_heavy() -> None:
    loaded = loaded_modules("import offplan.cli.main, offplan.cli.app")
    heavy = {"torch", "transformers", "pydantic", "yaml", "huggingface_hub", "safetensors"}
    assert not loaded & heavy


@pytest.mark.slow
@pytest.mark.parametrize("what", [("plan",), ("analyze",), ("plan", "--frontier")])
def test_planning_from_a_folder_needs_no_torch(what: tuple[str, ...]) -> None:
    command = [
        "offplan",
        *what,
        str(PACKAGE.parent / "plans" / "tiny-moe"),
        "--machine",
        "h200-pcie5",
        "--context",
        "1024",
    ]
    assert not loaded_by(command) & {"torch", "transformers"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", ["show", "report -o -", "check --file-only", "diff", "explain", "replan"]
)
def test_looking_after_a_plan_needs_no_torch(what: str) -> None:
    plan = str(PACKAGE.parent / "plans" / "tiny-moe.yaml")
    plans = [plan] * (2 if what == "diff" else 1)
    assert not loaded_by(["offplan", *what.split(), *plans]) & {"torch", "transformers"}


def loaded_by(command: list[str]) -> set[str]:
    """Top-level modules in a fresh interpreter that has run a command."""
    return loaded_modules(
        f"import sys; sys.argv = {command!r}\n"
        "from offplan.cli.main import main\n"
        "try: main()\n"
        "except SystemExit as error: assert error.code == 0, error.code"
    )
