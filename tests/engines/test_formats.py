"""The whole command, in each of its forms."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from offplan.checkpoint.model import KVCache
from offplan.checkpoint.open import open_model
from offplan.choices import ExportFormat
from offplan.engines.export import Export, export_plan, render_export
from offplan.errors import ExportError
from offplan.plan import Budget, Goal, Plan
from tests.engines.builders import deepseek, keep_caches, make_plan, prefetch, qwen3, uva

MODELS = Path(__file__).parent.parent / "models"
PLAN = make_plan(prefetch("self_attn", "mlp.down_proj"), prefetch_step=1)
SERVED = "--dtype bfloat16 --max-model-len 4096 --max-num-seqs 1 --max-num-batched-tokens 512"
OFFLOADED = """
--offload-group-size 2 --offload-num-in-group 1 --offload-prefetch-step 1
--offload-params self_attn mlp.down_proj
"""


def words(export: Export, form: ExportFormat) -> list[str]:
    return shlex.split(render_export(export, form).replace("\\\n", " "))


def test_the_command_of_vllm() -> None:
    """Of a GPU of 3 GiB as much must be free as the plan takes of it, rounded up."""
    export = export_plan(PLAN, qwen3(), "vllm", gpu_bytes=3 * 2**30)
    assert words(export, "command") == shlex.split(
        f"vllm serve test/model {SERVED} --gpu-memory-utilization 0.3334 {OFFLOADED}"
    )
    assert words(export, "command") == export.command


def test_flags_are_told_of_a_first_start_and_the_worker_gives_it_back() -> None:
    tied = qwen3()
    head = tied.outside[0]._replace(name="lm_head.weight")
    model = replace(tied, outside=(*tied.outside, head))
    for each, size in ((tied, "as much as its embedding"), (model, "2 MiB")):
        told = f"a start at which vLLM compiles layers may keep {size} more"
        assert any(told in note for note in export_plan(PLAN, each, "vllm").notes)
    whole = open_model(str(MODELS / "qwen3-8b" / "config.json"))
    staged = make_plan().model_copy(update={"goal": Goal(engine="vllm", pipeline_parallel=2)})
    assert any(
        "may keep 1.159 GiB more" in note for note in export_plan(staged, whole, "vllm").notes
    )
    worker = export_plan(PLAN, qwen3(), "vllm-worker").notes
    assert not any("compiles layers" in note for note in worker)


def test_vllm_is_given_the_cache_and_what_must_be_free_for_all() -> None:
    """Blocks of 128 tokens, one of which it keeps empty; a context takes none of what is free."""
    terms = {"kv_cache_bytes": 4096 * 1000, "overhead_bytes": 2**29}
    model = keep_caches(qwen3(), [KVCache(250)] * 4 + [KVCache()] * 2)
    memory = PLAN.prediction.gpu_memory.model_copy(update=terms)
    prediction = PLAN.prediction.model_copy(update={"gpu_memory": memory})
    plan = PLAN.model_copy(update={"prediction": prediction})
    export = export_plan(plan, model, "vllm")
    assert export.serve["kv-cache-memory-bytes"] == (str((4096 + 128) * 1000),)
    assert "gpu-memory-utilization" not in export.serve
    all_of_it = export_plan(plan, model, "vllm", gpu_bytes=plan.budget.gpu_memory).serve
    assert all_of_it["kv-cache-memory-bytes"] == export.serve["kv-cache-memory-bytes"]
    assert all_of_it["gpu-memory-utilization"] == ("0.5000",)


def test_the_command_of_sglang() -> None:
    export = export_plan(make_plan(prefetch("experts")), deepseek(), "sglang", gpu_bytes=4 * 2**30)
    assert " ".join(words(export, "command")) == (
        "python3 -m sglang.launch_server --model-path test/model --dtype bfloat16 "
        "--context-length 4096 --max-running-requests 1 --chunked-prefill-size 512 "
        "--max-total-tokens 4096 --mem-fraction-static 0.2500 --offload-group-size 2 "
        "--offload-num-in-group 1 --offload-prefetch-step 1 --disable-prefill-cuda-graph "
        "--disable-shared-experts-fusion"
    )


def test_sglang_has_a_share_of_what_is_free_at_its_start() -> None:
    """A budget of all of 24 GiB: 23 for weights and cache, where 0.6 are taken before them."""
    plan = make_plan()
    gpu_memory = plan.prediction.gpu_memory.model_copy(
        update={"overhead_bytes": 896 * 2**20, "activation_bytes": 128 * 2**20}
    )
    prediction = plan.prediction.model_copy(update={"gpu_memory": gpu_memory})
    budget = Budget(gpu_memory=24 * 2**30)
    plan = plan.model_copy(update={"budget": budget, "prediction": prediction})
    export = export_plan(plan, deepseek(), "sglang", gpu_bytes=24 * 2**30)
    (share,) = export.serve["mem-fraction-static"]
    assert 23 <= float(share) * (24 - 0.6) <= 23.4


@pytest.mark.parametrize("engine", ["vllm", "vllm==0.27", "sglang"])
def test_a_file_says_what_the_command_does(engine: str) -> None:
    plan = make_plan(prefetch("experts"), prefetch_step=3)
    export = export_plan(plan, deepseek(), engine)
    text = render_export(export, "yaml")
    read = yaml.safe_load(text)
    assert read.pop("model" if "vllm" in engine else "model-path") == "test/model"
    said = []
    for name, value in read.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        said += [f"--{name}", *map(str, values)]
    assert said == export.command[len(export.engine.command) + 1 :]
    assert ("# needs VLLM_USE_V2_MODEL_RUNNER=0\n" in text) == (engine == "vllm==0.27")


def test_variables() -> None:
    lines = render_export(export_plan(PLAN, qwen3(), "vllm==0.27"), "env").splitlines()
    assert lines[:2] == ["VLLM_USE_V2_MODEL_RUNNER=0", "MODEL=test/model"]
    assert lines[2].startswith(f"VLLM_ARGS={SERVED}")
    command = words(export_plan(PLAN, qwen3(), "vllm==0.27"), "command")
    assert command[:3] == ["VLLM_USE_V2_MODEL_RUNNER=0", "vllm", "serve"]


def test_a_container(tmp_path: Path) -> None:
    text = words(export_plan(PLAN, qwen3(), "vllm==0.27.1"), "docker")
    assert " ".join(text).startswith(
        "docker run --gpus all --ipc=host --ulimit memlock=-1 -p 8000:8000 "
        "-v $HOME/.cache/huggingface:/root/.cache/huggingface -e VLLM_USE_V2_MODEL_RUNNER=0 "
        f"--entrypoint vllm vllm/vllm-openai:v0.27.1 serve test/model {SERVED}"
    )
    assert text[-4:] == ["--host", "0.0.0.0", "--port", "8000"]
    (tmp_path / "config.json").write_text("{}")
    text = words(export_plan(at(PLAN, tmp_path / "config.json"), qwen3(), "vllm"), "docker")
    assert text[text.index("-v") + 1] == f"{tmp_path}:/model:ro"
    assert text[text.index("serve") + 1] == "/model"


def test_a_revision_is_loaded() -> None:
    model = PLAN.model.model_copy(update={"revision": "a1b2"})
    export = export_plan(PLAN.model_copy(update={"model": model}), qwen3(), "vllm")
    assert export.command[3:5] == ["--revision", "a1b2"]


def test_a_type_that_no_engine_computes_in() -> None:
    model = PLAN.model.model_copy(update={"dtype": "float64"})
    with pytest.raises(ExportError, match="the plan's model computes in float64"):
        export_plan(PLAN.model_copy(update={"model": model}), qwen3(), "vllm")


def test_float32_is_loaded_as_it_was_priced() -> None:
    """Left to themselves vLLM takes bfloat16 and SGLang float16."""
    model = PLAN.model.model_copy(update={"dtype": "float32"})
    for engine in ("vllm", "sglang"):
        plan = make_plan(uva("mlp")) if engine == "vllm" else make_plan()
        export = export_plan(plan.model_copy(update={"model": model}), qwen3(), engine)
        assert export.serve["dtype"] == ("float32",)


def at(plan: Plan, path: Path) -> Plan:
    return plan.model_copy(
        update={"model": plan.model.model_copy(update={"source": str(path), "revision": None})}
    )


def test_the_dockerfile_of_a_worker(tmp_path: Path) -> None:
    """It starts what the command says, with the plan that it copies."""
    file = tmp_path / "my plan.yaml"
    export = export_plan(PLAN, qwen3(), "vllm-worker", file=file)
    text = render_export(export, "docker")
    lines = [line for line in text.splitlines() if not line.startswith(("#", " "))]
    assert lines[0] == "FROM vllm/vllm-openai:v0.33.0"
    assert "pip install --no-cache-dir -c /tmp/held.txt /tmp/offplan" in text
    copied, inside = json.loads(lines[2].removeprefix("COPY "))
    assert (copied, inside) == (file.name, f"/offplan/{file.name}")
    started = json.loads(lines[-1].removeprefix("ENTRYPOINT "))
    expected = [
        json.dumps({"offplan": inside}) if str(file) in word else word for word in export.command
    ]
    assert started == [*expected, "--host", "0.0.0.0", "--port", "8000"]
    assert f"#   -f DOCKERFILE {shlex.quote(str(tmp_path))}\n" in text
    local = render_export(replace(export, source=str(tmp_path)), "docker")
    assert f"-v {tmp_path}:/model:ro" in local
    assert '["vllm", "serve", "/model"' in local
