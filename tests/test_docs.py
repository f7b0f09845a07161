"""The pages say what the code does: options, links, and the numbers of the worked example."""

import json
import re
import shlex
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from docs import make_cli_reference, make_fields, make_home, make_records, make_speeds
from offplan.backends import Backend
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs import kernels
from offplan.costs.activations import (
    CODED_EXPERTS_BYTES,
    attention_bytes,
    hidden_bytes,
    logits_bytes,
    mlp_bytes,
    waiting_bytes,
)
from offplan.costs.compute import ModelCompute
from offplan.costs.cores import WAIT_ERRORS
from offplan.costs.kernels import (
    ATTENTION_EFFICIENCY,
    CODE_EFFICIENCY,
    CODE_INSTRUCTIONS,
    CODES_LAUNCHES,
    GROUP_S,
    LAUNCH_SLOWDOWN,
    MATMUL_EFFICIENCY,
    REST_EFFICIENCY,
    RULE_INSTRUCTIONS,
    SORTING_S,
    VALUES_LAUNCHES,
    WINDOW_TOKENS,
)
from offplan.costs.link import TILE_ROWS, UVA_SLOWDOWN
from offplan.costs.memory import MARGIN
from offplan.costs.packing import PACKED_EXPERT_SLOWDOWNS, PACKED_SLOWDOWNS
from offplan.costs.predict import derive_stage
from offplan.costs.ranges import COMPUTE_ERRORS, WAITING_ERRORS
from offplan.costs.timeline import to_seconds
from offplan.costs.work import PassShape, decode_shape, prefill_shapes
from offplan.held.held import hold
from offplan.held.runner import OWN_RUNTIME
from offplan.held.stage import Stage
from offplan.machine.profile import MachineProfile, load_profile
from offplan.placement import ALIGNMENT_BYTES, Phase, Placement, Slab, place
from offplan.plan import Plan, Prediction, load_plan
from offplan.planner.options import backend_pairs
from offplan.planner.search import MAX_RULES
from offplan.planner.space import PREFETCH_STEPS, PREFILL_CHUNKS
from offplan.runtime.session import Session
from offplan.schedule import Compute, Copy, build_steady_request, slots_of
from tests.cli import CLI, ROOT
from tests.pages import CODE_BLOCK, anchors

DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PLAN = ROOT / "plans" / "qwen3-8b-h200-12gib.yaml"
WALKED = (DOCS / "reading-a-plan.md").read_text("utf-8")

LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]*")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_resolve(page: Path) -> None:
    text = CODE_BLOCK.sub("", page.read_text("utf-8"))
    for target in LINK.findall(text):
        if target.startswith(("https://", "http://")):
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        assert file.exists(), f"{page.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(file), f"{page.name}: no heading for {target}"


VLLM_OPTIONS = {
    *("--worker-cls", "--additional-config", "--compilation-config", "--moe-backend"),
    *("--quantization", "--tensor-parallel-size", "--enable-expert-parallel"),
}
"""What pages tell to give to vLLM itself."""
OTHERS_OPTIONS = {
    *("--stop-timeout", "--gpus", "--rm", "--ulimit", "--memory", "--cpus", "--cpuset-cpus"),
    *("--shm-size", "--ipc", "--no-cache-dir", "--no-install-recommends", "--local-dir"),
}
"""Options of docker, pip, apt and hf."""


def test_every_page_is_in_the_index() -> None:
    index = (DOCS / "README.md").read_text("utf-8")
    pages = {page.name for page in DOCS.glob("*.md")} - {"README.md"}
    assert pages <= set(LINK.findall(index))


def test_the_reference_is_what_the_commands_declare() -> None:
    written = make_cli_reference.PAGE.read_text("utf-8")
    assert written == make_cli_reference.render_page(), "run python docs/make_cli_reference.py"


def test_the_table_of_fields_is_the_servers() -> None:
    written = make_fields.PAGE.read_text("utf-8")
    assert written == make_fields.render_page(), "run python docs/make_fields.py"


def test_the_page_of_records_is_what_the_source_says() -> None:
    written = make_records.PAGE.read_text("utf-8")
    assert written == make_records.render_page(), "run python docs/make_records.py"
    listed = {kind for kinds in make_records.CHAPTERS.values() for kind in kinds}
    returned = {kind for kind in make_records.list_returned() if kind is not Session}
    assert returned <= listed


@pytest.mark.slow
def test_the_table_of_home_machines_is_what_analyze_answers() -> None:
    written = make_home.PAGE.read_text("utf-8")
    assert make_home.render_table() in written, "run python docs/make_home.py"


def test_published_speeds_are_within_the_factors_that_the_page_states() -> None:
    written = make_speeds.PAGE.read_text("utf-8")
    assert written == make_speeds.render_page(), "run python docs/make_speeds.py"
    for each in make_speeds.SPEEDS:
        decode, prompt = each.estimates
        most = make_speeds.OTHER_FORM if each.source.is_gguf else make_speeds.SAME_FORM
        assert 1 / most <= each.decode / decode <= most, each
        if each.prompt is not None:
            assert 1 / make_speeds.PROMPTS <= each.prompt / prompt <= make_speeds.PROMPTS, each


@pytest.mark.parametrize("command", make_cli_reference.list_commands())
def test_the_reference_has_every_option(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = CLI(monkeypatch, capsys)(command, "--help").out.partition("Options:")[2]
    entries = re.findall(r"^  (?:-\w, )?(--[a-z-]+(?: / --[a-z-]+)?)", shown, re.MULTILINE)
    listed = {name for entry in entries for name in entry.split(" / ")}
    rows = make_cli_reference.list_rows(make_cli_reference.list_commands()[command])
    assert listed - {"--help"} == {name for row in rows for name in OPTION.findall(row.name)}


def test_pages_name_no_unknown_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    declared = {
        name
        for function in make_cli_reference.list_commands().values()
        for row in make_cli_reference.list_rows(function)
        for name in OPTION.findall(row.name)
    }
    for page in DOCS.glob("*.md"):
        named = set(OPTION.findall(page.read_text("utf-8")))
        known = {"--help", "--version", "--install-completion"} | VLLM_OPTIONS | OTHERS_OPTIONS
        assert named <= declared | known, page.name


def test_the_glossary_is_sorted() -> None:
    text = (DOCS / "glossary.md").read_text("utf-8")
    terms = [term.lower() for term in re.findall(r"^\*\*(.+?)\*\*", text, re.MULTILINE)]
    assert len(terms) > 40
    assert terms == sorted(set(terms))
    used = set(re.findall(r"(?<!\*)\*(\w[^*]*)\*(?!\*)", text)) - {"italics"}
    known = {term.partition(",")[0] for term in terms}
    singular = {re.sub(r"^copies$", "copy", word.lower()).removesuffix("s") for word in used}
    assert singular <= {term.removesuffix("s") for term in known} | {"in place"}


class Walk:
    """What the worked example computes, by the code that plans and runs."""

    def __init__(self) -> None:
        self.plan: Plan = load_plan(PLAN)
        config = ROOT / "tests" / "models" / "qwen3-8b" / "config.json"
        self.model: Model = open_model(str(config))
        self.machine: MachineProfile = load_profile(self.plan.machine.profile or "")
        self.stage: Stage = hold(self.model, self.plan.offload.packing)
        self.placement: Placement = place(self.stage, self.plan.offload)
        self.slab: Slab = next(slab for slab in self.placement.slabs if slab.layer == 13)
        self.taken = [[e.unit.nbytes for e in slab.entries] for slab in self.placement.slabs]
        """Bytes of what the rules take of each layer that streams."""
        workload, budget = self.plan.workload, self.plan.budget
        self.prediction: Prediction = derive_stage(
            self.stage, self.machine, workload, budget, self.plan.offload
        ).predict()

    def sizes(self) -> Iterator[int]:
        """Bytes that the page names."""
        stage, memory = self.stage, self.prediction.gpu_memory
        (embedding,) = self.placement.host_tables
        first, second = (entry.unit.nbytes for entry in self.slab.entries)
        yield from (stage.loaded_bytes, embedding.nbytes, self.plan.budget.gpu_memory)
        for one in (first, second):
            yield from (one, sum(one in sizes for sizes in self.taken) * one)
        yield from (self.placement.slot_bytes, first + second)
        yield from (memory.resident_bytes, memory.ring_bytes, memory.kv_cache_bytes)
        yield from (memory.activation_bytes, memory.overhead_bytes, memory.total_bytes)
        yield memory.overhead_bytes - self.machine.gpu_overhead.value
        yield self.plan.budget.gpu_memory - memory.total_bytes
        yield from (self.placement.slab_bytes, self.prediction.host_memory_bytes)
        (prompt,) = prefill_shapes(self.plan.workload, self.plan.offload.prefill_chunk)
        layer = stage.layers[0]
        yield from (hidden_bytes(stage, prompt), mlp_bytes(stage, layer, prompt))
        yield from (logits_bytes(stage, prompt), waiting_bytes(stage, self.plan.workload, prompt))
        step = PassShape(Phase.DECODE, 1, 1, self.plan.workload.context)
        assert attention_bytes(stage, layer, step) < mlp_bytes(stage, layer, step)
        yield hidden_bytes(stage, step) + mlp_bytes(stage, layer, step) + logits_bytes(stage, step)

    def times(self) -> Iterator[str]:
        """Times that the page names, as it names them."""
        machine, workload = self.machine, self.plan.workload
        sizes = [entry.unit.nbytes for entry in self.slab.entries]
        compute = ModelCompute(self.stage, machine)
        step = compute.price(decode_shape(workload))
        prompt = compute.price(*prefill_shapes(workload, self.plan.offload.prefill_chunk))
        copy_s = machine.copy_seconds(sum(sizes))
        yield f"= {copy_s * 1e6:,.1f} us"
        yield f"computes for {step.layer_ps[13] / 1e6:.1f} us"
        for some in (sizes, sizes[:1], sizes[1:]):
            number, some_s = self.taken.count(some), machine.copy_seconds(sum(some))
            yield f"| {number} x {some_s * 1e6:,.1f} us | {number * some_s * 1e3:.3f} |"
        yield f"+ {step.outside_ps / 1e6:.1f} us"
        yield f"= {to_seconds(step.resident_ps) * 1e3:.3f} ms"
        decode, prefill = self.prediction.decode, self.prediction.prefill
        assert decode.bound_s == decode.link_s
        assert decode.step_s == pytest.approx(decode.bound_s)
        yield f"takes its bound: {decode.step_s * 1e3:.2f} ms"
        yield f"| link | | {decode.link_s * 1e3:.3f} |"
        yield f"busy for {prefill.link_s * 1e3:.2f} ms"
        yield f"bound is {prefill.bound_s * 1e3:.2f} ms"
        assert prefill.link_s - prefill.bound_s == pytest.approx(2 * copy_s)
        waits = [*prompt.layer_ps[:2], prompt.layer_ps[35], prompt.outside_ps]
        assert prefill.step_s - prefill.bound_s == pytest.approx(sum(waits) * 1e-12)
        yield f"takes {(prefill.step_s - prefill.bound_s) * 1e3:.2f} ms more"
        assert waits[0] == waits[1]
        yield f"(2 x {waits[0] * 1e-9:.2f} ms)"
        yield f"({waits[2] * 1e-9:.2f} + {waits[3] * 1e-9:.2f} ms)"
        yield f"{prefill.step_s * 1e3:.2f} ms + 127 x {decode.step_s * 1e3:.3f} ms"
        yield f"= {self.prediction.objective_s:.3f} s"


@pytest.fixture(scope="module")
def walk() -> Walk:
    return Walk()


def test_the_walk_shows_the_plan() -> None:
    assert f"```yaml\n{PLAN.read_text('utf-8')}```\n" in WALKED


def test_the_walk_shows_the_command() -> None:
    """As ``plans/replan.sh`` has it, but for the model, which is a copy of its config there."""
    lines = (ROOT / "plans" / "replan.sh").read_text("utf-8").splitlines()
    (line,) = (line for line in lines if line.endswith(f" -o {PLAN.name}"))
    asked = line.partition(" --machine ")[2].removesuffix(f" --force -o {PLAN.name}")
    assert f"\noffplan plan Qwen/Qwen3-8B --machine {asked}\n" in WALKED


def test_the_walk_names_the_bytes(walk: Walk) -> None:
    assert not [size for size in walk.sizes() if f"{size:,}" not in WALKED]


def test_the_walk_names_the_times(walk: Walk) -> None:
    text = " ".join(WALKED.split())
    assert not [time for time in walk.times() if time not in text]


def test_the_walk_shows_the_slab(walk: Walk) -> None:
    rows = [
        f"| {entry.offset:,} | `{entry.unit.name}` | {entry.prefill.name} | {entry.decode.name} |"
        for entry in walk.slab.entries
    ]
    assert "\n".join(rows) in WALKED
    resident = set(range(36)) - {slab.layer for slab in walk.placement.slabs}
    assert resident == {0, 24}


def test_the_walk_follows_the_ring(walk: Walk) -> None:
    request = build_steady_request(walk.placement, len(walk.model.layers))
    for phase, schedule in ((Phase.PREFILL, request.prefill), (Phase.DECODE, request.decode)):
        assert slots_of(walk.placement, phase)[13][0] == 0
        following: dict[int, int] = {}
        ran = -1
        for operation in schedule.operations:
            if isinstance(operation, Compute):
                ran = operation.layer
            elif isinstance(operation, Copy):
                following[ran] = operation.span.layer
        assert [following[layer] for layer in (11, 13, 34, 35)] == [13, 15, 1, 2]
        assert len(following) == 34


def test_the_cost_model_names_the_constants() -> None:
    text = " ".join((DOCS / "cost-model.md").read_text("utf-8").split())
    results = json.loads((ROOT / "benchmarks/results/predictions-h200.json").read_text("utf-8"))
    dense, routed = list[Any](), list[Any]()
    for case in results["cases"]:
        segments = {s for rule in case["offload"]["rules"] for s in rule["cpu_offload_params"]}
        (routed if any("experts" in each for each in segments) else dense).append(case)
    ratios = [
        [case[what]["ratio"] for case in cases]
        for cases, what in (
            *((results["cases"], what) for what in ("prefill", "gpu_memory")),
            *((cases, "decode") for cases in (routed, dense)),
        )
    ]
    (_, least), *_, (many, most) = PACKED_SLOWDOWNS
    ttft, memory, *tpot = (f"{min(each):.3f} to {max(each):.3f}" for each in ratios)
    for stated in (
        f"at {MATMUL_EFFICIENCY} of `matmul`",
        f"{CODE_INSTRUCTIONS.half:g} instructions for each value of 4 bits, "
        f"{CODE_INSTRUCTIONS.whole:g} of 8",
        f"at {CODE_EFFICIENCY.half} and {CODE_EFFICIENCY.whole} of `matmul`",
        f"causal pairs at {ATTENTION_EFFICIENCY} of `matmul`, "
        f"at {REST_EFFICIENCY} behind whole chunks",
        f"windows look {WINDOW_TOKENS:,} tokens further",
        f"half a tile of {kernels.TILE_ROWS} rows",
        f"{VALUES_LAUNCHES} with routed experts, {CODES_LAUNCHES} with their codes, each",
        f"each {LAUNCH_SLOWDOWN} times as long",
        f"Groups of experts take {1e6 * GROUP_S:.0f} us",
        f"a prompt's routing {1e6 * SORTING_S:.0f} us",
        *(
            f"{errors.least:g} to {errors.most:g} of {what}"
            for what, errors in (
                ("a step's compute", COMPUTE_ERRORS[Phase.DECODE]),
                ("a prompt's", COMPUTE_ERRORS[Phase.PREFILL]),
                ("waiting", WAITING_ERRORS),
                ("it with the cores", WAIT_ERRORS[Backend.HOST.capability]),
            )
        ),
        f"else {UVA_SLOWDOWN} |",
        f"by {least} for one token to {most} for {many}",
        f"(routed experts: {PACKED_EXPERT_SLOWDOWNS[-1][1]})",
        f"never less than rows / {TILE_ROWS}",
        f"| {RULE_INSTRUCTIONS} instructions for each token and element of a state |",
        f"a margin of {100 * MARGIN:.1f} % of the budget",
        f"{CODED_EXPERTS_BYTES // 2**20} MiB where experts are stored as codes",
        f"on a {ALIGNMENT_BYTES}-byte boundary",
        f"rings of {PREFETCH_STEPS[0]} to {PREFETCH_STEPS[-1]} slots",
        f"chunks of {PREFILL_CHUNKS[0]:,} tokens down to {PREFILL_CHUNKS[-1]}",
        f"{len(results['cases'])} plans of seven models",
        f"took {ttft} of the predicted time to the first token",
        f"{memory} of the predicted GPU memory",
        f"Steps of models with experts took {tpot[0]} of the predicted time",
        f"share a dense model, steps took {tpot[1]}",
    ):
        assert stated in text
    assert MAX_RULES == 2, "the page says: no rule, one or two"
    assert len(backend_pairs(OWN_RUNTIME.backends, "host")) == 3, (
        "the page names three pairs of backends"
    )


def test_the_hook_and_the_workflow_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    page = (DOCS / "living-with-plans.md").read_text("utf-8")
    hooks, workflow = map(yaml.safe_load, re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S))
    (hook,) = hooks["repos"][0]["hooks"]
    plan = "plans/tiny-moe.yaml"
    assert re.search(hook["files"], plan)
    runs = [step["run"].partition(" >>")[0] for step in workflow["steps"] if "run" in step]
    ours = [run for run in (f"{hook['entry']} {plan}", *runs) if run.startswith("offplan ")]
    assert len(ours) == 3
    for run in ours:
        # a clone need not have the revision: the file itself stands for it
        arguments = shlex.split(run.replace("origin/main", plan))[1:]
        assert CLI(monkeypatch, capsys)(*arguments).code == 0


def test_every_room_is_described() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    rooms = [path.parent.name for path in (ROOT / "offplan").glob("*/__init__.py")]
    assert rooms
    assert not [room for room in rooms if f"| `{room}/` |" not in text]


def test_contributing_names_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    path = r"(?<![\w/.-])\.?\w[\w./-]*(?:/|\.(?:py|sh|md|toml|txt|ya?ml)\b)"
    found = set(re.findall(path, text))
    named = {each for each in found if "NAME" not in each and not each.startswith(".venv")}
    assert len(named) > 40
    places = (ROOT, ROOT / "offplan", ROOT / "docs", ROOT / "tests")
    assert not [each for each in named if not any((at / each).exists() for at in places)]


def test_contributing_names_what_is_there_to_read_first() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    first = text.partition("## Read this first")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)` in `([\w/]+\.py)`", first)
    assert len(named) > 10
    for name, path in named:
        code = (ROOT / "offplan" / path).read_text("utf-8")
        assert re.search(rf"^(def|class) {name}\b", code, re.MULTILINE), f"{path} has no {name}"


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    pins = [Requirement(line) for line in lines if line and not line.startswith("#")]
    assert all(str(pin.specifier).startswith("==") for pin in pins)
    pinned = {canonicalize_name(pin.name): pin for pin in pins if not pin.marker}
    pinned |= {
        canonicalize_name(pin.name): pin for pin in pins if pin.marker and pin.marker.evaluate()
    }
    for each in map(Requirement, requires("offplan") or ()):
        (version,) = pinned[canonicalize_name(each.name)].specifier
        assert each.specifier.contains(version.version), f"{each} is pinned to {version.version}"
