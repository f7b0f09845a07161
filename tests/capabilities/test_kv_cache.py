"""A KV cache in FP8: how it is asked for, planned, exported, advised and refused."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from offplan.checkpoint.model import KVCache, Vectors
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.errors import ExportError, InfeasibleError, InputError, PlanError
from offplan.held.held import hold
from offplan.library.alternatives import find_shorter_context
from offplan.library.asking import ask
from offplan.library.cache_advice import (
    CacheAdvice,
    advise_cache,
    ask_coded,
    find_longest_coded,
)
from offplan.library.machines import load_machine
from offplan.placement import place
from offplan.plan import Goal, Offload, Plan, Workload, dump_plan
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from offplan.refusals import require_runnable
from tests.cli import CLI, ROOT
from tests.costs.builders import dense_model, make_machine
from tests.planner import cases

MODELS = ROOT / "tests" / "models"
WORK = Workload(context=4096, prompt_tokens=512, output_tokens=64)
LONG = Workload(context=2**17, prompt_tokens=2**15, output_tokens=1024)


def pose(name: str = "qwen3-8b", workload: Workload = WORK, **goal: object) -> Question:
    model = open_model(MODELS / name / "config.json")
    return ask(model, load_machine("rtx4090"), workload, **goal)  # type: ignore[arg-type]


def test_it_is_left_out_where_it_is_usual() -> None:
    assert "kv_cache_dtype" not in Goal().model_dump()
    assert Goal(kv_cache_dtype="fp8").model_dump()["kv_cache_dtype"] == "fp8"


@pytest.mark.slow
def test_a_plan_keeps_it() -> None:
    question = pose(kv_cache_dtype="fp8")
    plan = make_plan(question).plan
    text = dump_plan(plan)
    assert "kv_cache_dtype: fp8" in text
    assert plan.prediction.gpu_memory.kv_cache_bytes == 36 * 4096 * 2 * 8 * (128 + 4)
    assert [*plan.goal.describe()] == ["the KV cache is kept in FP8"]


@pytest.mark.slow
@pytest.mark.parametrize(("engine", "word"), [("vllm", "fp8"), ("sglang", "fp8_e4m3")])
def test_engines_are_handed_it(engine: str, word: str) -> None:
    question = pose(kv_cache_dtype="fp8", engine=engine)
    export = export_plan(make_plan(question).plan, question.model, engine)
    assert export.options["kv-cache-dtype"] == (word,)
    assert any("scales all tokens" in note for note in export.notes)


@pytest.mark.slow
def test_latents_are_refused_to_engines() -> None:
    name = "deepseek-v2-lite"
    with pytest.raises(InputError, match="caches latents, and which of vLLM's kernels"):
        pose(name, kv_cache_dtype="fp8", engine="vllm")
    question = pose(name, kv_cache_dtype="fp8", packing=False, cached_experts="off")
    question = replace(question, goal=question.goal.without_cores())
    plan = make_plan(question).plan
    assert plan.prediction.gpu_memory.kv_cache_bytes == 27 * 4096 * (512 + 64 + 2 * 4)
    with pytest.raises(ExportError, match="leave kv_cache_dtype out"):
        export_plan(plan, question.model, "vllm")


def test_other_passes_and_unknown_heads_are_refused() -> None:
    with pytest.raises(InputError, match="a cache in FP8 needs offplan's: leave `kv_cache_dtype`"):
        pose(kv_cache_dtype="fp8", stock=True)
    model = open_model(MODELS / "qwen3-8b" / "config.json")
    layers = [replace(each, kv_cache=KVCache(4096)) for each in model.layers]
    with pytest.raises(InputError, match=r"layer 0 of .* caches what is not known"):
        ask(
            replace(model, layers=tuple(layers)),
            load_machine("rtx4090"),
            WORK,
            kv_cache_dtype="fp8",
        )


def test_types_without_a_kernel_are_refused_on_a_gpu() -> None:
    model = open_model(MODELS / "qwen3-8b" / "config.json")
    decision = Offload(prefill_chunk=512)
    stage = hold(replace(model, dtype="float32"), way=Goal(kv_cache_dtype="fp8").way)
    asked = stage, place(stage, decision), decision
    require_runnable(*asked, on_gpu=False)
    with pytest.raises(PlanError, match="`kv_cache_dtype=fp8` has no kernel for float32"):
        require_runnable(*asked, on_gpu=True)


def answer(question: Question) -> Plan:
    return make_plan(question).plan


@pytest.mark.slow
def test_it_is_advised_where_it_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offplan.library.cache_advice.why_not_run", lambda *_, **__: None)
    short, long = pose(), pose(workload=LONG)
    assert advise_cache(short, answer(short)) is None
    plan, found = answer(long), advise_cache(long, answer(long))
    assert found is not None
    assert found.cache_bytes == 36 * 2**17 * 2 * 8 * (128 + 4)
    assert found.tokens_per_s * plan.prediction.decode.step_s >= 1.1
    assert advise_cache(pose(workload=LONG, kv_cache_dtype="fp8"), None) is None
    assert advise_cache(pose(engine="vllm"), None) is None


def test_its_longest_context_is_found_and_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    why_not: list[str | None] = [None]
    monkeypatch.setattr("offplan.library.cache_advice.why_not_run", lambda *_, **__: why_not[0])
    model = dense_model(8)
    layers = [
        replace(each, kv_cache=KVCache(128, vectors=(Vectors(2, 16),) * 2)) for each in model.layers
    ]
    model = replace(model, layers=tuple(layers))
    work = Workload(prompt_tokens=16, output_tokens=20, context=5000)
    asked = cases.ask(model, make_machine(), 0.5, work, Goal(packing=False))
    asked = asked.with_workload(context=2**17)
    longest = find_shorter_context(asked)
    found = find_longest_coded(asked, longest)
    assert longest is not None
    assert found is not None
    assert found > longest
    coded = ask_coded(asked)
    assert coded is not None
    make_plan(coded.with_workload(context=found))
    with pytest.raises(InfeasibleError):
        make_plan(coded.with_workload(context=found + 1))
    monkeypatch.delattr("offplan.library.alternatives.find_longest_context")
    assert find_shorter_context(asked) == longest
    assert find_longest_coded(asked, longest) == found
    assert find_longest_coded(asked, found) is None
    assert find_longest_coded(coded, longest) is None
    why_not[0] = "its class changes what is cached"
    assert find_longest_coded(asked, longest) is None


@pytest.mark.slow
def test_the_answer_names_its_longest_context(cli: CLI) -> None:
    config, machine = MODELS / "qwen3-8b" / "config.json", "rtx4090,ram=64GiB"
    asked = ("analyze", config, "--machine", machine, "--context", "1000000")
    told = json.loads(cli(*asked, "--json").out)["infeasible"]
    longest = told["longest_context_fp8"]
    assert longest > 1.5 * told["longest_context"]
    said = " ".join(cli(*asked).out.split())
    assert f"the longest context that fits is {longest:,} tokens." in said
    told = json.loads(cli(*asked, "--kv-cache-dtype", "fp8", "--json").out)["infeasible"]
    assert (told["longest_context"], told["longest_context_fp8"]) == (longest, None)


def test_scripts_read_its_advice(cli: CLI, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ("analyze", "plans/tiny-moe", "--machine", "cpu", "--no-packing", "--json")
    assert json.loads(cli(*asked).out)["cache_advice"] is None
    advice = CacheAdvice(2**20, 20.0, 0.5, 2**30)
    monkeypatch.setattr("offplan.library.analysis.advise_cache", lambda *_: advice)
    assert CacheAdvice(**json.loads(cli(*asked).out)["cache_advice"]) == advice


@pytest.mark.slow
def test_the_answer_advises_it(cli: CLI, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offplan.library.cache_advice.why_not_run", lambda *_, **__: None)
    asked = ("analyze", MODELS / "qwen3-8b" / "config.json", "--machine", "rtx4090,ram=64GiB")
    long = ("--workload", "agent")
    told = " ".join(cli(*asked, *long).out.split())
    assert "--kv-cache-dtype fp8 would give" in told
    assert "with a KV cache of 9.281 GiB" in told
    told = " ".join(cli(*asked, *long, "--gpu-memory", "16GiB").out.split())
    assert "A plan with --kv-cache-dtype fp8 fits and gives" in told
    plan = tmp_path / "plan.yaml"
    assert cli("plan", *asked[1:], "--kv-cache-dtype", "fp8", "-o", plan).code == 0
    assert cli("check", plan, "--file-only").code == 0
    assert cli("replan", plan).out == plan.read_text("utf-8")
    assert json.loads(cli("plan", *asked[1:], "--json").out)["goal"].get("kv_cache_dtype") is None
