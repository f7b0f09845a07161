"""The speed table of the docs: offloaded decode and prefill against their bounds, as JSON.

    python -m benchmarks.decode_and_prefill [NAME ...] > benchmarks/results/h200.json

Needs a CUDA device and room for each model's weights. Random weights of the real shapes; every case
runs in a process of its own. A step is timed by CUDA events, twenty in a row after four that warm
up; a prompt by the host's clock, around a synchronised call. The bound is the larger of the same
shape with everything resident, measured in the same run, and the bytes over the link's rate,
measured too. NAMEs pick cases by a part of their name.
"""

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

QWEN = "tests/models/qwen3-8b/config.json"
LITE = "tests/models/deepseek-v2-lite/config.json"
QWEN_FP8 = "benchmarks/models/qwen3-8b-fp8/config.json"
OSS = "benchmarks/models/gpt-oss-20b/config.json"
EXPERTS = {
    "cpu_offload_params": ["experts"],
    "group_size": 2,
    "num_in_group": 1,
    "prefill": "prefetch",
    "decode": "uva",
}


def stream(*segments: str, group_size: int = 1) -> dict[str, Any]:
    """A rule that streams the segments of every ``group_size``-th layer in both phases."""
    return {
        "cpu_offload_params": list(segments),
        "group_size": group_size,
        "num_in_group": 1,
        "prefill": "prefetch",
        "decode": "prefetch",
    }


HALF = [stream(group_size=2)]
PACKED_HALF = {"group_size": 2, "num_in_group": 1}
FEW = stream("k_proj", "o_proj", group_size=4)


@dataclass(frozen=True)
class Case:
    """One process: a model, what is offloaded, and the shapes to time."""

    name: str
    config: str
    rules: list[dict[str, Any]]
    batches: tuple[int, ...] = ()
    prompt: int = 0
    """Tokens of a prompt to time; 0 for none."""
    chunk: int = 8192
    context: int = 2048
    packing: dict[str, Any] | None = None


CASES = [
    Case("Qwen3-8B resident", QWEN, [], (1, 16, 64)),
    Case("Qwen3-8B resident, long", QWEN, [], (), 8192, 8192, 8448),
    Case("Qwen3-8B every 2nd layer", QWEN, HALF, (1, 16, 64)),
    Case("Qwen3-8B every 2nd layer, long", QWEN, HALF, (), 8192, 8192, 8448),
    Case("Qwen3-8B every 2nd layer, 2k chunks", QWEN, HALF, (), 8192, 2048, 8448),
    Case("Qwen3-8B every 2nd layer, packed there", QWEN, HALF, (1, 16, 64), packing=PACKED_HALF),
    Case(
        "Qwen3-8B every 2nd layer, packed there, long",
        QWEN,
        HALF,
        prompt=8192,
        context=8448,
        packing=PACKED_HALF,
    ),
    Case("Qwen3-8B down_proj of every layer", QWEN, [stream("down_proj")], (1,)),
    # nine copies of 40 MiB take as long as compute at this batch
    Case("Qwen3-8B k_proj and o_proj of 9 layers", QWEN, [FEW], (64,)),
    Case("Qwen3-8B FP8 resident", QWEN_FP8, [], (1, 16, 64)),
    Case("Qwen3-8B FP8 resident, long", QWEN_FP8, [], (), 8192, 8192, 8448),
    Case("Qwen3-8B FP8 every 2nd layer", QWEN_FP8, HALF, (1, 16, 64)),
    Case("Qwen3-8B FP8 every 2nd layer, long", QWEN_FP8, HALF, (), 8192, 8192, 8448),
    Case("gpt-oss-20b resident", OSS, [], (1, 16), 2048, 2048, 4096),
    Case("DeepSeek-V2-Lite resident", LITE, [], (1, 8, 16, 64)),
    Case("DeepSeek-V2-Lite resident, long", LITE, [], (), 8192, 8192, 8448),
    Case("DeepSeek-V2-Lite experts of 13 layers", LITE, [EXPERTS], (1, 8)),
    Case("DeepSeek-V2-Lite experts of 13 layers, long", LITE, [EXPERTS], (), 8192, 8192, 8448),
]


def run(case: Case) -> dict[str, Any]:
    """Run one case; a failure is part of the result."""
    command = [
        *(sys.executable, "-m", "benchmarks.run_plan", case.config),
        *("--rules", json.dumps(case.rules)),
        *("--prefill-chunk", str(case.chunk), "--context", str(case.context)),
        *("--batch", *map(str, case.batches)),
    ]
    if case.packing:
        command += ["--packing", json.dumps(case.packing)]
    if case.prompt:
        command += ["--prefill", str(case.prompt)]
    print(case.name, file=sys.stderr, flush=True)
    done = subprocess.run(command, capture_output=True, text=True)
    print(done.stdout, file=sys.stderr, flush=True)
    if done.returncode:
        return {"name": case.name, "failed": done.stderr.splitlines()[-1:]}
    return {"name": case.name, **json.loads(done.stdout)}


def measure_link() -> dict[str, float]:
    """The link's own rates, in bytes per second."""
    from offplan.machine.measure import measure_machine

    profile = measure_machine()
    return {"h2d": profile.h2d.value, "uva": profile.uva.value, "hbm": profile.hbm.value}


def main() -> None:
    """Print one JSON document: the link, then every case."""
    chosen = [c for c in CASES if not sys.argv[1:] or any(n in c.name for n in sys.argv[1:])]
    cases = [run(case) for case in chosen]
    json.dump({"link_bytes_per_s": measure_link(), "cases": cases}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
