"""Whether an engine that has started does what was exported to it."""

import json
import re
import socketserver
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from offplan.capabilities.ranks import ONE_RANK, Ranks
from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.engines.runner import EngineRunner, find_runner, lower
from offplan.engines.startup import SGLANG_FLAGS, read_log, read_server
from offplan.engines.taken import IN_FORCE, StageTaken
from offplan.errors import InputError
from offplan.held.held import hold, hold_whole
from offplan.held.packing import pack_everything
from offplan.plan import Budget, Goal, Plan, Rule
from offplan.upkeep.engine_start import check_start, read_start
from offplan.upkeep.figures import Finding
from tests.engines.builders import deepseek, make_plan, prefetch, qwen3, up_to

GIB = 2**30
MODELS = Path(__file__).parent.parent / "models"
VERSION = "INFO [core.py:140] Initializing a V1 LLM engine (v{}) with config: model='x'\n"
RING = (
    "INFO [prefetch.py:400] [PrefetchOffloader] Initialized {} modules. Total GPU memory saved: "
    "{:.4f} GB, Static buffer pool: 1.0000 GB (group_size={}, num_in_group=1, prefetch_step=1, "
    "mode=cpu)\n"
)
IN_PLACE = "INFO [uva.py:75] Total CPU offloaded parameters: {:.2f}\n"
SGLANG_LAYER = "[offloader] offload module_index={} submodule=<class 'FusedMoE'> params=[]\n"
SGLANG_LOADED = "Load weight end. elapsed=1.00 s, avail mem=2.00 GB, mem usage={:.2f} GB.\n"
LOADED = "INFO [model_runner.py:428] Model loading took {:.2f} GiB memory and 3.1 seconds\n"


def large(model: Model) -> Model:
    """The model with parameters of 256 MiB: more than figures are rounded to."""

    def enlarge(layer: Layer) -> Layer:
        parameters = []
        for each in layer.parameters:
            tensors = tuple(t._replace(shape=(2**17, 2**10)) for t in each.tensors)
            parameters.append(replace(each, tensors=tensors))
        return replace(layer, parameters=tuple(parameters))

    return replace(model, layers=tuple(map(enlarge, model.layers)))


MODEL = large(qwen3())
WEIGHTS = hold(MODEL).loaded_bytes / GIB
PREFETCH = make_plan(prefetch("mlp"), prefetch_step=1)
MOVED = 3 * 3 / 4
UVA = make_plan(up_to("3GiB", "mlp"))


def found(plan: Plan, log: str, engine: str = "vllm", model: Model = MODEL) -> dict[str, Finding]:
    startup = read_log(engine.removesuffix("-worker"), log)
    return {each.subject: each for each in check_start(plan, model, engine, startup)}


def drifts(findings: dict[str, Finding]) -> set[str]:
    return {subject for subject, each in findings.items() if each.verdict == "drift"}


def test_a_ring_in_force() -> None:
    log = VERSION.format("0.31.2+cu130") + LOADED.format(WEIGHTS - MOVED)
    findings = found(PREFETCH, log + RING.format(3, MOVED * GIB / 1e9, 2))
    assert {each.verdict for each in findings.values()} == {"holds"}
    assert findings["version"].text == "vLLM 0.31.2+cu130"
    assert findings.keys() == {"version", "flags", "layers", "offload", "GPU memory"}


@pytest.mark.parametrize(
    ("log", "wrong"),
    [
        (LOADED.format(WEIGHTS), {"offload", "GPU memory"}),
        # loading laid the weights out anew, on the GPU
        (LOADED.format(WEIGHTS) + RING.format(3, 2.4159, 2), {"GPU memory"}),
        (LOADED.format(WEIGHTS - MOVED) + RING.format(3, 2.4159, 3), {"flags"}),
        (LOADED.format(WEIGHTS - MOVED) + RING.format(2, 1.6106, 2), {"layers", "offload"}),
    ],
)
def test_a_ring_that_is_not(log: str, wrong: set[str]) -> None:
    assert drifts(found(PREFETCH, log)) == wrong


def test_reading_in_place() -> None:
    log = LOADED.format(WEIGHTS - 3)
    # towers come first, and the last line counts all
    assert not drifts(found(UVA, log + IN_PLACE.format(0.4) + IN_PLACE.format(3.0)))
    assert drifts(found(UVA, log + IN_PLACE.format(2.5))) == {"offload"}
    assert drifts(found(UVA, log)) == {"offload"}


def test_another_version_than_it_was_exported_for() -> None:
    log = VERSION.format("0.32.0") + LOADED.format(WEIGHTS - MOVED) + RING.format(3, 2.4159, 2)
    assert drifts(found(PREFETCH, log)) == set()
    findings = check_start(PREFETCH, MODEL, "vllm==0.31", read_log("vllm", log))
    assert drifts({each.subject: each for each in findings}) == {"version"}
    findings = check_start(PREFETCH, MODEL, "vllm==0.32.1", read_log("vllm", log))
    assert drifts({each.subject: each for each in findings}) == set()


def test_sglang() -> None:
    model, plan = large(deepseek()), make_plan(prefetch("experts"), prefetch_step=2)
    plan = plan.model_copy(update={"budget": Budget(gpu_memory=64 * GIB)})
    said = export_plan(plan, model, "sglang==0.5.23").demand
    moved = sum(each.nbytes for each in said.moved) / GIB
    weights = hold_whole(model, find_runner("sglang")).loaded_bytes / GIB
    line, loaded = SGLANG_LAYER, SGLANG_LOADED
    layers = "".join(map(line.format, (1, 3, 5)))
    assert not drifts(found(plan, layers + loaded.format(weights - moved), "sglang", model))
    assert drifts(found(plan, loaded.format(weights), "sglang", model)) == {"GPU memory"}
    log = layers[: len(line)] + loaded.format(weights - moved)
    assert drifts(found(plan, log, "sglang", model)) == {"layers"}


def staged(engine: str, name: str, rule: Rule) -> tuple[Plan, Model, list[tuple[float, float]]]:
    """A plan of two stages, and the GiB that each moves and keeps on its GPUs."""
    model = open_model(str(MODELS / name / "config.json"))
    goal = Goal(engine=engine, tensor_parallel=2, pipeline_parallel=2)
    plan = make_plan(rule, prefetch_step=1)
    plan = plan.model_copy(update={"goal": goal, "budget": Budget(gpu_memory=64 * GIB)})
    stages = lower(model, goal)
    figures = []
    runner = find_runner(engine)
    assert isinstance(runner, EngineRunner)
    for stage in stages:
        said = runner.demand_of(plan.offload, stage)
        moved = sum(each.nbytes for each in said.moved)
        figures.append((moved / GIB, (stage.loaded_bytes - moved) / GIB))
    return plan, model, figures


def verdicts(findings: dict[str, Finding]) -> dict[str, str]:
    return {subject: each.verdict for subject, each in findings.items() if "stage" in subject}


def test_stages_of_a_ring() -> None:
    """The first rank alone says the ring; each says what loading took."""
    plan, model, figures = staged("vllm", "qwen3-8b", prefetch("mlp"))
    worker = "(Worker_PP{}_TP{} pid=7) "
    lines = [f"(EngineCore pid=6) {VERSION.format('0.33.0')}"]
    lines += [
        worker.format(stage, rank) + LOADED.format(figures[stage][1])
        for stage, rank in [(1, 0), (0, 1), (1, 1), (0, 0)]
    ]
    ring = worker.format(0, 0) + RING.format(9, figures[0][0] * GIB / 1e9, 2)
    findings = found(plan, "".join([*lines, ring]), model=model)
    assert verdicts(findings) == {
        "layers, stage 0": "holds",
        "offload, stage 0": "holds",
        "GPU memory, stage 0": "holds",
        "GPU memory, stage 1": "holds",
    }
    assert findings["flags"].verdict == "holds"
    lines[1] = lines[3] = worker.format(1, 0) + LOADED.format(sum(figures[1]))
    assert drifts(found(plan, "".join([*lines, ring]), model=model)) == {"GPU memory, stage 1"}
    # ranks that Ray started have no names
    unnamed = found(plan, LOADED.format(figures[1][1]), model=model)
    assert set(verdicts(unnamed).values()) == {"unknown"}
    more = "".join([*lines[:3], ring, worker.format(2, 0) + LOADED.format(1)])
    assert "stages" in drifts(found(plan, more, model=model))


def test_stages_that_read_in_place() -> None:
    plan, model, figures = staged("vllm", "qwen3-8b", up_to("2GiB", "mlp"))
    lines = []
    for stage, (moved, stays) in enumerate(figures):
        name = f"(Worker_PP{stage}_TP0 pid=7) "
        lines += [name + IN_PLACE.format(moved), name + LOADED.format(stays)]
    assert set(verdicts(found(plan, "".join(lines), model=model)).values()) == {"holds"}
    # the first model runner has only the first rank say what loading took
    findings = found(plan, "".join(lines[:3]), model=model)
    assert verdicts(findings)["GPU memory, stage 1"] == "unknown"
    del lines[2]
    assert drifts(found(plan, "".join(lines), model=model)) == {"offload, stage 1"}


@pytest.mark.slow
def test_stages_of_sglang() -> None:
    plan, model, figures = staged("sglang", "deepseek-v2-lite", prefetch("experts"))
    lines = []
    for stage, (_, stays) in enumerate(figures):
        name, num_layers = f"[2026-01-01 00:00:00 PP{stage} TP1] ", 13 + stage
        lines += [f"{name}{SGLANG_LAYER.format(index)}" for index in range(1, num_layers, 2)]
        lines.append(name + SGLANG_LOADED.format(stays))
    told = verdicts(found(plan, "".join(lines), "sglang", model))
    assert set(told.values()) == {"holds"}
    assert len(told) == 4
    log = "".join([lines[0], *lines[2:]])
    assert drifts(found(plan, log, "sglang", model)) == {"layers, stage 0"}


def test_what_is_no_log(tmp_path: Path) -> None:
    path = tmp_path / "serve.log"
    path.write_text(VERSION.format("0.33.0"))
    with pytest.raises(InputError, match="does not say what loading the weights took"):
        read_start("vllm", path, None)


@contextmanager
def serving(answers: dict[str, Any]) -> Iterator[str]:
    """Answer with JSON by path, and with 404 to others."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = answers.get(self.path.partition("?")[0])
            self.send_response(404 if answer is None else 200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_: Any) -> None: ...

    server = HTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def vllm_info(**changed: Any) -> dict[str, Any]:
    ring: dict[str, Any] = {
        "offload_group_size": 2,
        "offload_num_in_group": 1,
        "offload_prefetch_step": 1,
    }
    ring |= {"offload_params": ["mlp"], **changed}
    in_place = {"cpu_offload_gb": 0.0, "cpu_offload_params": []}
    config = {"offload_config": {"offload_backend": "auto", "prefetch": ring, "uva": in_place}}
    return {"vllm_config": config, "vllm_env": {"VLLM_USE_V2_MODEL_RUNNER": False}}


def asked(
    plan: Plan, answers: dict[str, Any], engine: str, model: Model = MODEL
) -> dict[str, Finding]:
    with serving(answers) as url:
        startup = read_start(engine, None, url)
    return {each.subject: each for each in check_start(plan, model, engine, startup)}


@pytest.mark.slow
def test_a_server_says_its_flags() -> None:
    findings = asked(
        PREFETCH, {"/server_info": vllm_info(), "/version": {"version": "0.27.1"}}, "vllm"
    )
    assert not drifts(findings)
    assert findings["environment"].verdict == "holds"
    assert findings["offload"].verdict == "unknown"
    answers = {"/server_info": vllm_info(offload_params=[]), "/version": {"version": "0.33.0"}}
    assert drifts(asked(PREFETCH, answers, "vllm")) == {"flags"}
    answers["/server_info"] = vllm_info(offload_params=["e"])
    assert drifts(asked(PREFETCH, answers, "vllm")) == {"flags"}
    answers["/server_info"] = vllm_info(offload_group_size=0, offload_params=[])
    assert drifts(asked(PREFETCH, answers, "vllm")) == {"flags"}
    assert drifts(asked(make_plan(), answers, "vllm")) == set()


COPYING = {"offload_group_size": 2, "disable_shared_experts_fusion": True}
READING = {"offload_group_size": -1, "cpu_offload_gb": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "flags", "drifted"),
    [
        (prefetch("experts"), COPYING, False),
        (prefetch("experts"), COPYING | {"offload_group_size": -1}, True),
        (prefetch("experts"), COPYING | {"cpu_offload_gb": 2}, True),
        (prefetch("experts"), COPYING | {"disable_prefill_cuda_graph": False}, True),
        (prefetch("experts"), COPYING | {"disable_shared_experts_fusion": False}, True),
        (up_to("2GiB"), READING, False),
        (up_to("2GiB"), READING | {"disable_shared_experts_fusion": True}, False),
        (up_to("2GiB"), READING | {"offload_group_size": 2}, True),
        (up_to("2GiB"), READING | {"cpu_offload_gb": 0}, True),
        (up_to("2GiB"), READING | {"disable_prefill_cuda_graph": False}, True),
    ],
)
def test_a_server_of_sglang_says_its_flags(
    rule: Rule, flags: dict[str, object], drifted: bool
) -> None:
    """Where prompts are captured they wait for each copy; -1 is what is not set."""
    model, plan = large(deepseek()), make_plan(rule, prefetch_step=1)
    plan = plan.model_copy(update={"budget": Budget(gpu_memory=64 * GIB)})
    others = {"cpu_offload_gb": 0, "offload_num_in_group": 1, "offload_prefetch_step": 1}
    others |= {"disable_shared_experts_fusion": False, "disable_prefill_cuda_graph": True}
    info = {"version": "0.5.23", "internal_states": [{}], **others, **flags}
    with serving({"/server_info": info}) as url:
        findings = check_start(plan, model, "sglang", read_start("sglang", None, url))
    assert drifts({each.subject: each for each in findings}) == ({"flags"} if drifted else set())


def test_a_server_that_does_not_say() -> None:
    with serving({}) as url, pytest.raises(InputError, match="only with VLLM_SERVER_DEV_MODE=1"):
        read_start("vllm", None, url)
    with (
        serving({"/server_info": {}}) as url,
        pytest.raises(InputError, match="no server of SGLang"),
    ):
        read_start("sglang", None, url)
    with pytest.raises(InputError, match="write it with http"):
        read_start("vllm", None, "file:///etc/passwd")


@pytest.mark.parametrize(
    "answer",
    [b"SSH-2.0-OpenSSH_9.6\r\n", b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZ\r\n"],
)
def test_what_speaks_otherwise_is_no_server(answer: bytes) -> None:
    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            self.rfile.readline()
            self.wfile.write(answer)

    with socketserver.TCPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.handle_request, daemon=True).start()
        with pytest.raises(InputError, match="--log reads what it wrote"):
            read_start("sglang", None, f"http://127.0.0.1:{server.server_address[1]}")


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://a b", "http://[::1"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(InputError, match=re.escape(url)):
        read_start("vllm", None, url)


def test_odd_values_of_a_server_are_no_tracebacks() -> None:
    plan = make_plan(prefetch("experts"), prefetch_step=1)
    plan = plan.model_copy(update={"budget": Budget(gpu_memory=64 * GIB)})
    info: dict[str, Any] = dict.fromkeys(SGLANG_FLAGS, "1.2.3")
    info |= {"internal_states": [{}], "version": 5}
    findings = asked(plan, {"/server_info": info}, "sglang", large(deepseek()))
    assert drifts(findings) == {"flags"}
    assert findings["version"].verdict == "unknown"
    for usage in (float("nan"), float("inf"), -1, "x"):
        info["internal_states"] = [{"memory_usage": {"weight": usage}}]
        with pytest.raises(ValueError, match=r"weights|convert"):
            read_server("sglang", json.dumps(info))
    with pytest.raises(ValueError, match="nested too deeply"):
        read_server("vllm", "[" * 10**5)


def test_a_line_that_is_cut_says_nothing() -> None:
    for line in ("Model loading took . GiB", "Model loading took ..5 GiB"):
        assert read_log("vllm", line).loaded_bytes is None


def pack(ranks: Ranks = ONE_RANK) -> tuple[Plan, Model, list[str]]:
    """A packed plan for the worker, and the log of its ranks from the start on."""
    model = open_model(str(MODELS / "qwen3-8b" / "config.json"))
    goal = Goal(
        engine="vllm-worker",
        tensor_parallel=ranks.tensor,
        pipeline_parallel=ranks.pipeline,
    )
    plan = make_plan(prefetch("mlp"), prefetch_step=1)
    offload = plan.offload.model_copy(update={"packing": pack_everything(model)})
    budget = Budget(gpu_memory=64 * GIB)
    plan = plan.model_copy(update={"goal": goal, "offload": offload, "budget": budget})
    lines = [VERSION.format("0.33.0")]
    for number, stage in enumerate(lower(model, goal, offload.packing)):
        taken = StageTaken.find(offload, stage, (0, 33, 0)).taken
        moved = sum(each.nbytes for layer in taken.layers for each in layer.values())
        stays = stage.loaded_bytes - moved + taken.ring_bytes
        for rank in range(ranks.tensor):
            name = f"(Worker_PP{number}_TP{rank} pid=7) " if ranks != ONE_RANK else ""
            lines.append(f"{name}{LOADED.format(stays / GIB)}")
            lines.append(f"{name}INFO [vllm.py:81] {IN_FORCE}{taken.describe()}\n")
    return plan, model, lines


@pytest.mark.slow
def test_a_packed_plan_in_force() -> None:
    plan, model, lines = pack()
    findings = found(plan, "".join(lines), "vllm-worker", model)
    assert {subject: each.verdict for subject, each in findings.items()} == {
        **dict.fromkeys(("version", "plan", "GPU memory"), "holds")
    }
    assert "GiB of the layers, and the output head, are packed" in findings["plan"].text
    assert drifts(found(plan, "".join(lines[:2]), "vllm-worker", model)) == {"plan"}
    whole = hold(model).loaded_bytes / GIB  # nothing packed, nothing moved
    log = [lines[0], LOADED.format(whole), lines[2]]
    assert drifts(found(plan, "".join(log), "vllm-worker", model)) == {"GPU memory"}
    plain = plan.offload.model_copy(update={"packing": None})
    other = plan.model_copy(update={"offload": plain})
    findings = found(other, "".join(lines), "vllm-worker", model)
    assert drifts(findings) == {"plan"}
    assert "are packed; the plan has: 36 parameters" in findings["plan"].text


@pytest.mark.slow
def test_the_stages_of_a_packed_plan() -> None:
    plan, model, lines = pack(Ranks(2, 2))
    findings = found(plan, "".join(lines), "vllm-worker", model)
    assert drifts(findings) == set()
    assert findings["plan, stage 1"].text.startswith("2 ranks say that the plan is in force: ")
    without = "".join(line for line in lines if "PP1" not in line or IN_FORCE not in line)
    assert drifts(found(plan, without, "vllm-worker", model)) == {"plan, stage 1"}
