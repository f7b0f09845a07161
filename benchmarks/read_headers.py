"""Analyze a model of 163 shards and 92 thousand tensors from a local server; print JSON.

    python benchmarks/read_headers.py [--drops 20] [--delay 0.0]

The model has DeepSeek-R1's names, types and shapes (61 layers, 256 experts, FP8 with block scales,
a prediction layer); no byte of weights exists. Each run is a process of its own: the first reads
every header, the next has the server cut 20 connections, the last ones read the cache, with the
server and without any network. Seconds and memory are the process's own, imports included.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from offplan.checkpoint.tensors import TensorInfo  # noqa: E402
from tests.checkpoint.files import entries, header_bytes  # noqa: E402
from tests.checkpoint.hub_server import REPO, Hub, start  # noqa: E402

NUM_SHARDS = 163
NUM_LAYERS, NUM_DENSE, NUM_EXPERTS = 61, 3, 256
CONFIG = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": NUM_LAYERS,
    "num_nextn_predict_layers": 1,
    "n_routed_experts": NUM_EXPERTS,
    "num_experts_per_tok": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
ATTENTION = {
    "q_a_proj": (1536, 7168),
    "q_b_proj": (24576, 1536),
    "kv_a_proj_with_mqa": (576, 7168),
    "kv_b_proj": (32768, 512),
    "o_proj": (7168, 16384),
}


def list_tensors() -> list[TensorInfo]:
    """Return DeepSeek-R1's tensors in the order of its layers."""
    tensors: list[TensorInfo] = []

    def add_quantised(name: str, rows: int, columns: int) -> None:
        scales = (-(-rows // 128), -(-columns // 128))
        tensors.append(TensorInfo(f"{name}.weight", "F8_E4M3", (rows, columns)))
        tensors.append(TensorInfo(f"{name}.weight_scale_inv", "F32", scales))

    def add(name: str, *shape: int, dtype: str = "BF16") -> None:
        tensors.append(TensorInfo(name, dtype, shape))

    add("model.embed_tokens.weight", 129280, 7168)
    for layer in range(NUM_LAYERS + 1):
        prefix = f"model.layers.{layer}"
        for name, (rows, columns) in ATTENTION.items():
            add_quantised(f"{prefix}.self_attn.{name}", rows, columns)
        add(f"{prefix}.self_attn.q_a_layernorm.weight", 1536)
        add(f"{prefix}.self_attn.kv_a_layernorm.weight", 512)
        add(f"{prefix}.input_layernorm.weight", 7168)
        add(f"{prefix}.post_attention_layernorm.weight", 7168)
        mlps = {"mlp": 18432}
        if layer >= NUM_DENSE:
            mlps = {f"mlp.experts.{expert}": 2048 for expert in range(NUM_EXPERTS)}
            mlps["mlp.shared_experts"] = 2048
            add(f"{prefix}.mlp.gate.weight", NUM_EXPERTS, 7168)
            add(f"{prefix}.mlp.gate.e_score_correction_bias", NUM_EXPERTS, dtype="F32")
        for name, width in mlps.items():
            add_quantised(f"{prefix}.{name}.gate_proj", width, 7168)
            add_quantised(f"{prefix}.{name}.up_proj", width, 7168)
            add_quantised(f"{prefix}.{name}.down_proj", 7168, width)
    extra = f"model.layers.{NUM_LAYERS}"
    add(f"{extra}.eh_proj.weight", 7168, 14336)
    for name in ("enorm", "hnorm", "shared_head.norm"):
        add(f"{extra}.{name}.weight", 7168)
    for name in ("embed_tokens", "shared_head.head"):
        add(f"{extra}.{name}.weight", 129280, 7168)
    add("model.norm.weight", 7168)
    add("lm_head.weight", 129280, 7168)
    return tensors


def make_hub(tensors: list[TensorInfo]) -> Hub:
    """Spread the tensors over shards of about one size; headers are real, the data is not there."""
    total_bytes = sum(tensor.nbytes for tensor in tensors)
    shards: dict[str, dict[str, Any]] = {}
    done_bytes = 0
    for tensor in tensors:
        number = done_bytes * NUM_SHARDS // total_bytes + 1
        shard = f"model-{number:05}-of-{NUM_SHARDS:06}.safetensors"
        shards.setdefault(shard, {})[tensor.name] = (tensor.dtype, tensor.shape)
        done_bytes += tensor.nbytes
    weight_map = {name: shard for shard, shapes in shards.items() for name in shapes}
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    hub = Hub(
        {
            "config.json": json.dumps(CONFIG).encode(),
            "model.safetensors.index.json": json.dumps(index).encode(),
        }
    )
    for shard, shapes in shards.items():
        header, hub.tails[shard] = entries(shapes)
        hub.files[shard] = header_bytes(header)
    return hub


def run(hub: Hub, home: Path, **environment: str) -> dict[str, Any]:
    """Run ``offplan analyze --json`` in its own process and return what it took."""
    variables = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
    variables |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT)}
    variables |= {"HF_HUB_DISABLE_TELEMETRY": "1", "NO_PROXY": "127.0.0.1", **environment}
    command = [sys.executable, "-c", "from offplan.cli.main import main; main()", "analyze", REPO]
    sent_before, requests_before = hub.sent_bytes, len(hub.requests)
    with tempfile.TemporaryFile() as out:
        before = time.monotonic()
        process = subprocess.Popen([*command, "--json"], env=variables, stdout=out)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.monotonic() - before
        process.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        if process.returncode:
            raise SystemExit(f"offplan analyze ended with {process.returncode}")
        model = json.load(out)["model"]
    assert model["num_layers"] == NUM_LAYERS
    return {
        "seconds": round(seconds, 2),
        "peak_mib": round(usage.ru_maxrss / 1024, 1),
        "fetched_bytes": hub.sent_bytes - sent_before,
        "requests": len(hub.requests) - requests_before,
        "headers_sha256": model["headers_sha256"],
    }


def describe_machine() -> dict[str, Any]:
    names = [
        line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line
    ]
    return {
        "cpu": names[0].partition(": ")[2] if names else platform.machine(),
        "num_cpus": os.cpu_count(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--drops", type=int, default=20, help="connections cut in the second run")
    parser.add_argument("--delay", type=float, default=0.0, help="seconds before each answer")
    arguments = parser.parse_args()
    tensors = list_tensors()
    hub = make_hub(tensors)
    hub.delay_s = arguments.delay
    server = start(hub)
    headers = {name: data for name, data in hub.files.items() if name in hub.tails}
    with tempfile.TemporaryDirectory() as first, tempfile.TemporaryDirectory() as second:
        runs = {"first": run(hub, Path(first))}
        hub.drops = dict.fromkeys(list(headers)[: arguments.drops], 1)
        runs["first, connections cut"] = run(hub, Path(second))
        assert not any(hub.drops.values())
        runs["again"] = run(hub, Path(first))
        server.shutdown()
        server.server_close()
        runs["again, no network"] = run(hub, Path(first), HF_HUB_OFFLINE="1")
    assert len({found.pop("headers_sha256") for found in runs.values()}) == 1
    result = {
        "num_shards": len(headers),
        "num_tensors": len(tensors),
        "model_bytes": sum(tensor.nbytes for tensor in tensors),
        "headers_bytes": sum(map(len, headers.values())),
        "index_and_config_bytes": sum(map(len, hub.files.values()))
        - sum(map(len, headers.values())),
        "delay_s": arguments.delay,
        "runs": runs,
        "machine": describe_machine(),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
