"""Tiny bfloat16 checkpoints, and vLLM's loading of them with their weights packed."""

import json
import subprocess
import sys
from collections.abc import Container, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offplan.capabilities.packing import Packing
from offplan.capabilities.ranks import ONE_RANK, Ranks
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.forms.host_kernels import PACKED
from offplan.plan import Goal, Plan, Rule, Workload, dump_plan
from offplan.runtime.forms.reference import expand
from tests.engines import real_vllm
from tests.engines.builders import make_plan

ROOT = Path(__file__).parents[2]

SIZES = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
OF_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2}
LATENT = {
    **{"q_lora_rank": None, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "qk_rope_head_dim": 64},
    **{"v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1},
    **{"n_group": 1, "topk_group": 1, "head_dim": 64, "num_key_value_heads": 4},
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": OF_EXPERTS | {"num_experts": 4, "norm_topk_prob": True},
    "deepseek_v2": OF_EXPERTS | LATENT,
    "deepseek_v3": OF_EXPERTS | LATENT | {"topk_method": "noaux_tc"},
    "gpt_oss": {
        **{"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 128},
        **{"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    },
}


def save(family: str, folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a tiny bfloat16 checkpoint of a family; return its tensors."""
    torch.manual_seed(0)
    sizes = SIZES | MODELS[family] | changes
    if "layer_types" in sizes:
        sizes["layer_types"] = sizes["layer_types"][: sizes["num_hidden_layers"]]
    config = CONFIG_MAPPING[family](**sizes)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    path = folder / "config.json"
    told = {key: value for key, value in sizes.items() if value is not None}
    path.write_text(json.dumps(json.loads(path.read_text()) | told))
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def store_codes(folder: Path) -> dict[str, torch.Tensor]:
    """Store the experts of a tiny gpt-oss as MXFP4, of random codes; return the tensors."""
    path = folder / "model.safetensors"
    with safe_open(path, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name in [each for each in tensors if each.endswith(("gate_up_proj", "down_proj"))]:
        experts, size, rows = tensors.pop(name).shape
        codes = torch.randint(0, 256, (experts, rows, size // 32, 16), dtype=torch.uint8)
        tensors[f"{name}_blocks"] = codes
        tensors[f"{name}_scales"] = torch.full_like(codes[..., 0], 120)
    save_file(tensors, path, {"format": "pt"})
    config = folder / "config.json"
    stored = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    config.write_text(json.dumps(json.loads(config.read_text()) | {"quantization_config": stored}))
    return tensors


def load(folder: Path, *more: str, quantised: bool = True, stage: int = 0) -> Any:
    words = ["serve", str(folder), "--max-model-len", "64", "--dtype", "bfloat16", *more]
    words += ["--quantization", "offplan_packed"] if quantised else []
    return real_vllm.load(real_vllm.parse_command(words), folder, stage=stage)


def register(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Register packed weights with vLLM, by stand-ins for what only a GPU computes."""
    from vllm.model_executor.layers.fused_moe import UnquantizedFusedMoEMethod
    from vllm.model_executor.layers.quantization.mxfp4 import GptOssMxfp4MoEMethod

    import offplan.vllm_packed as module

    def activate(_: Any, out: torch.Tensor, x: torch.Tensor, **__: Any) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return out.copy_(torch.nn.functional.silu(gate) * up)

    monkeypatch.setattr(module, "apply_moe_activation", activate)
    monkeypatch.setattr(UnquantizedFusedMoEMethod, "_setup_kernel", lambda *_, **__: None)
    name = "process_weights_after_loading"
    monkeypatch.setattr(GptOssMxfp4MoEMethod, name, lambda *_: None)
    module.register()
    return module


def values_of(packed: Any, model: Any) -> dict[str, torch.Tensor]:
    """Return the values of all that is multiplied, by the names of vLLM's modules."""
    found = {}
    for path, module in model.named_modules():
        for name in ("weight", "w13_weight", "w2_weight"):
            if hasattr(module, f"{name}_packed"):
                parts = packed._held(module, name)
                found[f"{path}.{name}"] = expand(PACKED, parts, torch.bfloat16)
            elif name in module._parameters:
                found[f"{path}.{name}"] = module._parameters[name].data
    return found


class InPlace:
    """Stands for vLLM's offloader of what is read in place, which moves nothing on a CPU."""

    uva_offloading = True

    def __init__(self, most: int, names: Container[str] | None = None) -> None:
        self._names = names

    def wrap_modules(self, modules: Iterator[torch.nn.Module]) -> None:
        for module in modules:
            for name, parameter in module.named_parameters():
                if self._names is not None and name not in self._names:
                    continue
                parameter._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]


def find_place(parameter: Any, held: Any, blocks: list[range]) -> str:
    """Say where a parameter lies where all memory is the CPU's."""
    if held is not None:
        return "copied through the ring" if parameter.data is not held._cpu_storage else "elsewhere"
    return "read in place" if hasattr(parameter, "_vllm_is_uva_offloaded") else "resident"


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return the worker's module where what CUDA does happens at once, in this process's memory."""
    from vllm.model_executor.offloader import prefetch as real
    from vllm.model_executor.offloader import uva as real_uva

    import offplan.vllm as module

    class Stream:
        def __getattr__(self, name: str) -> Any:
            return lambda *_, **__: None

    class OnOneDevice(real._ModuleOffloader):  # type: ignore[misc, name-defined]
        device = property(lambda self: "cpu", lambda self, device: None)

    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", list, raising=False)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    monkeypatch.setattr(real, "_ModuleOffloader", OnOneDevice)
    monkeypatch.setattr(real_uva, "is_uva_available", lambda: True)
    monkeypatch.setattr(module, "should_pin_memory", lambda: True)
    monkeypatch.setattr(module, "UVAOffloader", InPlace)
    monkeypatch.setattr(module, "find_place", find_place)
    return module


def write_plan(
    folder: Path,
    packing: Packing | None,
    *rules: Rule,
    ranks: Ranks = ONE_RANK,
    embeddings: Literal["device", "host"] = "device",
) -> Plan:
    """Write a plan for the checkpoint of a folder, into it."""
    model, plan = open_model(str(folder)), make_plan(*rules, prefetch_step=1)
    named = {"source": str(folder), "headers_sha256": model.headers_sha256}
    goal = Goal(
        engine="vllm-worker",
        tensor_parallel=ranks.tensor,
        pipeline_parallel=ranks.pipeline,
        expert_parallel=ranks.expert,
    )
    changes = {
        "model": plan.model.model_copy(update=named),
        "workload": Workload(prompt_tokens=32, output_tokens=16, context=64),
        "offload": plan.offload.model_copy(update={"packing": packing, "embeddings": embeddings}),
        "goal": goal,
    }
    plan = plan.model_copy(update=changes)
    (folder / "plan.yaml").write_text(dump_plan(plan))
    return plan


def load_planned(
    worker: Any, folder: Path, rank: int | None = None, stage: int = 0
) -> tuple[Any, Any]:
    """Load a checkpoint as the exported command and the worker do; return model and offloader."""
    export = export_plan(folder / "plan.yaml", open_model(str(folder)), "vllm-worker")
    config = real_vllm.parse_command(export.command[1:])
    taken = worker.take_plan(config, stage)
    config.quant_config.taken = taken
    loaded: list[Any] = []
    offloader = worker.PlanOffloader(taken, lambda: loaded[0])
    with offloader.moving_embedding():
        model = real_vllm.load(config, folder, rank, offloader, stage)
    loaded.append(model)
    offloader.post_init()
    return model, offloader


def start_worker(worker: Any, folder: Path, rank: int) -> None:
    """Have the worker of a rank load its shard of a checkpoint, and write what vLLM logs of it."""
    from vllm.model_executor.offloader import get_offloader
    from vllm.utils.system_utils import decorate_logs

    export = export_plan(folder / "plan.yaml", open_model(str(folder)), "vllm-worker")
    config = real_vllm.parse_command(export.command[1:])

    def load(**_: Any) -> None:
        offloader = get_offloader()
        real_vllm.load(config, folder, rank, offloader)
        offloader.post_init()

    started = worker.Worker.__new__(worker.Worker)
    started.vllm_config = config
    started.model_runner = SimpleNamespace(load_model=load)
    decorate_logs(f"Worker_TP{rank}")
    started.load_model()


def values_by_layer(packed: Any, offloader: Any) -> list[dict[str, torch.Tensor]]:
    """Return the values of each layer, copied through the ring where they lie on the host."""
    copied = {each.module: each for each in offloader.module_offloaders}
    found = []
    for layer in offloader._layers:
        if layer in copied:  # the ring holds one layer at a time
            copied[layer].start_onload_to_static()
        values = values_of(packed, layer)
        found.append({name: each.clone() for name, each in values.items()})
    return found


def run_ranks(code: str, folder: Path, *arguments: Any) -> list[Any]:
    """Run Python for each of two ranks, in a process each; return what they leave in ``result``.

    What they write is left in ``0.log`` and ``1.log`` of the folder.

    The code has ``folder``, ``rank``, ``arguments``, a ``monkeypatch``, and ``packed``, the module
    of packed weights, which is registered with vLLM.
    """
    before = (
        "import json, os, sys\nfrom pathlib import Path\nimport pytest, torch\n"
        "os.environ['VLLM_LOGGING_LEVEL'] = 'INFO'\n"
        "from tests.engines import real_packed, real_vllm\n"
        "folder, rank, arguments = json.loads(sys.argv[1])\nfolder = Path(folder)\n"
        "monkeypatch = pytest.MonkeyPatch()\n"
        "packed = real_packed.register(monkeypatch)\n"
    )
    after = "\ntorch.save(result, folder / f'{rank}.pt')\n"
    (folder / "store").unlink(missing_ok=True)
    told = [json.dumps([str(folder), rank, arguments]) for rank in range(2)]
    started = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                before + code + after,
                of_rank,
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
        )
        for of_rank in told
    ]
    logs = [process.communicate(timeout=300)[0] for process in started]
    for rank, (process, log) in enumerate(zip(started, logs, strict=True)):
        assert process.returncode == 0, log[-2000:]
        (folder / f"{rank}.log").write_text(log)
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]
