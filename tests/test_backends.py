"""A backend that offplan does not have: declared by one record and one server, and nothing else.

``echo`` fetches a layer's weights at use, by an ordinary copy. Plans name it, the planner chooses
it where it is fastest, and a session on the CPU runs by it.
"""

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import nn

from offplan.backends import BACKENDS, Backend, Words
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.costs.predict import derive_prediction
from offplan.engines.runner import find_runner
from offplan.errors import ExportError, PlanError
from offplan.library.asking import pose
from offplan.library.repricing import hold_planned
from offplan.library.sessions import open_session
from offplan.placement import Phase
from offplan.plan import Budget, Goal, Offload, Rule, Workload, dump_plan, load_plan
from offplan.planner.make import make_plan
from offplan.report.explain import explain_plan
from offplan.report.plan import describe_offload
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.generate import generate
from offplan.runtime.memory.store import SERVERS, Server
from offplan.schedule import Compute, Serve, build_steady_request
from tests.costs.builders import dense_model, make_machine, moe_model, place_rules, rule
from tests.held import hold_by, place, predict
from tests.planner.brute_force import BruteForce
from tests.planner.cases import MODELS, UNLIMITED, ask, budget_for
from tests.runtime import plans
from tests.runtime.conftest import save_tiny
from tests.runtime.plans import group, offload, run_each_greedily
from tests.tiers import each_value_once, others_in_sweep

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7]])
BATCH = torch.tensor([[3, 14, 15, 9, 26], [58, 9, 7, 9, 3], [2, 38, 4, 6, 2]])
MACHINE = make_machine(h2d=1e9, uva=0.8e9)


@dataclass(frozen=True)
class MadeUp:
    """The rate of ``echo``, in bytes per second."""

    value: float
    basis: str = "estimated"
    source: str = "made up"


def make_echo(bytes_per_s: float, name: str = "echo", kept: float = 0.0) -> Backend:
    """Declare ``echo``: its rate, and the part of each unit that stays on the GPU all the same."""
    return Backend(
        name,
        Words(
            *("fetches", " at use", "{who} fetches {what} at use"),
            *("fetched at use", "fetched at use"),
        ),
        rate_name=f"{name}_rate",
        rate=lambda machine: MadeUp(bytes_per_s),
        link_bytes=lambda use: use.nbytes,
        is_served=True,
        gpu_bytes=lambda num_bytes: math.floor(kept * num_bytes),
    )


class Echo(Server):
    """Copies a layer's weights from their slab when the layer needs them, over all others."""

    def __init__(self, device: torch.device) -> None:
        self.bytes_moved = 0
        self._pairs: dict[tuple[Phase, int], list[tuple[nn.Parameter, nn.Parameter]]] = {}

    def view(self, phase: Phase, layer: int, stored: nn.Parameter) -> nn.Parameter:
        fetched = nn.Parameter(torch.full_like(stored, math.nan), requires_grad=False)
        self._pairs.setdefault((phase, layer), []).append((stored, fetched))
        return fetched

    def serve(self, phase: Phase, layer: int) -> None:
        for fetched in [each for pairs in self._pairs.values() for _, each in pairs]:
            fetched.fill_(math.nan)  # whatever reads it without having been served comes out wrong
        for stored, fetched in self._pairs[phase, layer]:
            fetched.copy_(stored)
            self.bytes_moved += stored.nbytes

    def close(self) -> None:
        self._pairs.clear()


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> Backend:
    """``echo`` of a rate beyond the link's."""
    return add(monkeypatch, make_echo(4e9))


def add(monkeypatch: pytest.MonkeyPatch, backend: Backend) -> Backend:
    monkeypatch.setitem(BACKENDS, backend.name, backend)
    monkeypatch.setitem(SERVERS, backend, Echo)
    return backend


CHECKPOINTS = ["qwen3", "deepseek_v2"]


@pytest.fixture(scope="module", params=CHECKPOINTS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


def test_without_it_a_plan_that_names_it_is_refused() -> None:
    with pytest.raises(ValueError, match="Input should be 'prefetch' or 'uva' or 'host'"):
        group(1, 1, decode="echo")


def test_each_backend_that_reads_at_use_has_a_server() -> None:
    served = set(SERVERS).union(*(each.servers for each in EXECUTORS.values()))
    assert {each for each in BACKENDS.values() if not each.streams} == served


def test_rules_are_checked(monkeypatch: pytest.MonkeyPatch, fast: Backend) -> None:
    assert group(1, 1, decode="echo").decode is fast
    Rule.model_validate({"max_bytes": 10, "prefill": "echo", "decode": "echo"})
    with pytest.raises(ValueError, match="prefill and decode are uva or echo"):
        Rule.model_validate({"max_bytes": 10, "prefill": "uva", "decode": "echo"})
    with pytest.raises(ValueError, match=r"rule 1 is fetched at use \(echo\), which reads no sec"):
        offload(group(1, 1, decode="echo"), store="peer")
    assert Rule.model_json_schema()["properties"]["decode"]["enum"] == [*BACKENDS]
    monkeypatch.setitem(BACKENDS, "steps", replace(fast, name="steps", phases=("decode",)))
    with pytest.raises(ValueError, match="prefill: steps serves decode alone; choose prefetch or"):
        group(1, 1, prefill="steps", decode="steps")


def test_a_layer_is_served_right_before_it_runs(fast: Backend) -> None:
    placement = place_rules(moe_model(4), [rule("mlp", group=(2, 1), decode=fast)], 1)
    request = build_steady_request(placement, 4)
    served = [op for op in request.decode.operations if isinstance(op, Serve)]
    assert served == [Serve(Phase.DECODE, 1, fast)]  # layer 3 is where prefill left it
    assert request.decode.operations[1:3] == (served[0], Compute(1))
    assert not any(isinstance(op, Serve) for op in request.prefill.operations)


def test_its_own_rate_prices_it(fast: Backend) -> None:
    model, workload = moe_model(4), Workload(batch=3, prompt_tokens=64, context=256)
    decision = Offload(prefill_chunk=16, rules=(rule("mlp", prefill=fast, decode=fast),))
    num_bytes = sum(e.unit.nbytes for slab in place(model, decision).slabs for e in slab.entries)
    prediction = predict(model, MACHINE, workload, UNLIMITED, decision)
    for phase in (prediction.prefill, prediction.decode):  # chunks are served together
        assert phase.link_bytes == num_bytes
        assert phase.link_s == pytest.approx(num_bytes / 4e9)
        assert phase.stall_s == pytest.approx(phase.link_s)


def test_explain_has_its_rate(fast: Backend) -> None:
    question = ask(MODELS["moe"], MACHINE, 0.5)
    plan = make_plan(question).plan
    terms = {each.path: each for each in derive_prediction(question.stages, MACHINE, plan)}
    link = terms["decode.link"]
    assert link.formula.endswith("+ read in place / uva + fetched at use / echo_rate")
    assert [(each.value, each.source) for each in link.inputs if each.name == "echo_rate"] == [
        (4e9, "estimated: made up")
    ]
    assert link.value == pytest.approx(plan.prediction.decode.link_s, rel=1e-9)
    assert terms["decode.link_bytes"].value == plan.prediction.decode.link_bytes


def name_backends(decision: Offload) -> set[str]:
    return {each.name for rule in decision.rules for each in (rule.prefill, rule.decode)}


RATES = {50e9: True, 0.9e9: None, 1e6: False}
"""Rates of ``echo`` in bytes per second, and whether it is chosen where that is certain."""
CHOICES = [
    *((dense_model, 50e9, 0.0), (dense_model, 0.9e9, 0.25), (dense_model, 1e6, 0.25)),
    *((moe_model, 50e9, 0.25), (moe_model, 0.9e9, 0.0), (moe_model, 1e6, 0.0)),
]
"""Every two of a model, a rate and what is kept: any search finds the best of all single rules.

In CI each rate, with both models and both of what is kept.
"""


@pytest.mark.parametrize("num_layers", [3, pytest.param(4, marks=pytest.mark.sweep)])
@pytest.mark.parametrize(
    ("make_model", "bytes_per_s", "kept"), others_in_sweep(CHOICES, CHOICES[1:4])
)
@pytest.mark.slow
def test_the_planner_chooses_it_where_it_is_fastest(
    monkeypatch: pytest.MonkeyPatch,
    make_model: Callable[[int], Model],
    bytes_per_s: float,
    kept: float,
    num_layers: int,
) -> None:
    add(monkeypatch, make_echo(bytes_per_s, kept=kept))
    is_chosen = RATES[bytes_per_s]
    question = ask(make_model(num_layers), MACHINE, 0.6)
    result = make_plan(question)
    expected = min(each.objective_s for each in BruteForce(question, (600, 512)).singles)
    best_single = result.best_s * result.second_rule_gain
    assert best_single == pytest.approx(expected, rel=1e-12)
    if is_chosen is not None:
        assert ("echo" in name_backends(result.plan.offload)) == is_chosen
    assert result.floor.objective_s <= result.plan.prediction.objective_s * (1 + 1e-9)


def test_what_it_keeps_on_the_gpu_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    add(monkeypatch, make_echo(4e9, kept=0.25))
    rules = group(1, 1, "mlp", decode="echo"), group(1, 1, "mlp", decode="uva")
    some, none = (place(MODELS["dense"], offload(each)) for each in rules)
    units = [entry.unit for slab in some.slabs for entry in slab.entries]
    assert some.resident_bytes - none.resident_bytes == sum(u.nbytes // 4 for u in units)
    assert some.slab_bytes == none.slab_bytes


def test_reports_name_it(fast: Backend) -> None:
    result = make_plan(ask(MODELS["moe"], MACHINE, 0.3))
    assert "echo" in name_backends(result.plan.offload)
    assert any("echo" in line for line in describe_offload(result.plan))
    assert explain_plan(result)


@pytest.mark.parametrize("engine", ["vllm", "sglang", "vllm-worker"])
def test_engines_refuse_it_by_name(fast: Backend, engine: str) -> None:
    stages = hold_by(MODELS["dense"], engine)
    with pytest.raises(ExportError, match=r"rule 1 has the backend echo, which .* does not"):
        find_runner(engine).demand(
            Offload(prefill_chunk=1, rules=(rule(prefill=fast, decode=fast),)), stages
        )


@functools.cache
def run_resident(folder: Path, chunk: int) -> list[list[torch.Tensor]]:
    return run_each_greedily(folder, offload(prefill_chunk=chunk), (PROMPT, BATCH))


RULES: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "in both": [("echo", "echo", ())],
    "in decode": [("prefetch", "echo", ("mlp",))],
    "in prefill": [("echo", "prefetch", ())],
    "beside in place": [("uva", "echo", ("mlp",)), ("echo", "uva", ("self_attn",))],
}


@pytest.mark.parametrize(
    ("folder", "rules", "chunk"),
    each_value_once(product(CHECKPOINTS, RULES, [64, 3])),
    indirect=["folder"],
)
@pytest.mark.slow
def test_a_session_runs_by_it(fast: Backend, folder: Path, rules: str, chunk: int) -> None:
    made = [group(2, 1, *names, prefill=p, decode=d) for p, d, names in RULES[rules]]
    decision = offload(*made, prefetch_step=1, prefill_chunk=chunk)
    for late in (False, True):
        got = run_each_greedily(folder, decision, (PROMPT, BATCH), late_copies=late)
        for some, resident in zip(got, run_resident(folder, chunk), strict=True):
            assert all(map(torch.equal, some, resident))


def test_a_server_that_reads_elsewhere_is_noticed(
    monkeypatch: pytest.MonkeyPatch, fast: Backend, folder: Path
) -> None:
    class Forgetful(Echo):
        """Returns another view than the one it was asked for last."""

        def view(self, phase: Phase, layer: int, stored: nn.Parameter) -> nn.Parameter:
            wrong = nn.Parameter(stored.flatten()[:1].clone(), requires_grad=False)
            super().view(phase, layer, stored)
            return wrong

    monkeypatch.setitem(SERVERS, fast, Forgetful)
    with pytest.raises(PlanError, match=r"expected .* bytes at .* \(what echo fetches\)"):
        plans.open_session(folder, offload(group(2, 1, prefill="echo", decode="echo")))


def tokens_of(steps: Iterator[torch.Tensor]) -> list[list[int]]:
    return [tokens.tolist() for tokens in steps]


@pytest.mark.slow
def test_from_a_question_to_tokens(fast: Backend, folder: Path, tmp_path: Path) -> None:
    """A plan that the planner makes is written, read, and run: tokens and bytes are as promised."""
    model = open_model(str(folder))
    work = Workload(prompt_tokens=10, output_tokens=6, context=48)
    budgets = budget_for(model, MACHINE, 0.5, work), Budget(gpu_memory=2**40)
    offloaded, resident = (
        make_plan(pose(model, MACHINE, work, budget, Goal(packing=False))).plan
        for budget in budgets
    )
    assert "echo" in name_backends(offloaded.offload)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(offloaded), "utf-8")
    plan = load_plan(path)
    assert plan.offload == offloaded.offload
    assert derive_prediction(hold_planned(plan, model), MACHINE, plan)
    with open_session(resident, model=model, device="cpu") as session:
        expected = tokens_of(generate(session, PROMPT, 6))
    with open_session(plan, model=model, device="cpu") as session:
        session.warm_up(*PROMPT.shape)
        assert tokens_of(generate(session, PROMPT, 6)) == expected
        before = session.link_bytes
        with session.stream():
            session.decode(torch.tensor([[3]]))
        assert session.link_bytes - before == offloaded.prediction.decode.link_bytes
