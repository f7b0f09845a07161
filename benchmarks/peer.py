"""A second GPU's memory as the store: decode and prefill against their bounds, as JSON.

    python -m benchmarks.peer > benchmarks/results/h200-peer.json

Needs two CUDA devices with peer access and, of the first, 30 GB; some two minutes on two H200s.
Random weights of Qwen3-8B's shapes; every case runs in a process of its own. The bound is the
larger of the same shape with everything resident, stored alike, measured in the same run, and the
bytes over the rate of copies of 1 GiB between the GPUs, measured too. ``--limit`` seconds after the
start no further case is begun, and a case that runs is ended; what is missing is named in the
result.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from typing import Any

import torch

from benchmarks.decode_and_prefill import PACKED_HALF, QWEN, QWEN_FP8, Case, stream

LARGE_BYTES = 2**30
NUM_ROUNDS = 5
NUM_COPIES = 20

EVERY_2ND, DOWN_PROJ = [stream(group_size=2)], [stream("down_proj")]
CASES = [
    Case("resident", QWEN, [], (1, 16, 64)),
    Case("every 2nd layer", QWEN, EVERY_2ND, (1, 16, 64)),
    Case("down_proj of every layer", QWEN, DOWN_PROJ, (1, 16, 64)),
    Case("every 2nd layer, packed there", QWEN, EVERY_2ND, (1, 16), packing=PACKED_HALF),
    Case("FP8 resident", QWEN_FP8, [], (1, 16)),
    Case("FP8 every 2nd layer", QWEN_FP8, EVERY_2ND, (1, 16)),
    Case("resident, long", QWEN, [], (), 8192, 8192, 8448),
    Case("every 2nd layer, long", QWEN, EVERY_2ND, (), 8192, 8192, 8448),
]


def time_copies(num_bytes: int) -> float:
    """Bytes per second of copies from the second GPU to the first, one behind the other."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:1")
    target = torch.empty(num_bytes, dtype=torch.uint8, device="cuda:0")
    rates = []
    for _ in range(NUM_ROUNDS + 1):
        torch.cuda.synchronize(0)
        torch.cuda.synchronize(1)
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        for _ in range(NUM_COPIES):
            target.copy_(source, non_blocking=True)
        ended.record()
        ended.synchronize()
        rates.append(NUM_COPIES * num_bytes / (began.elapsed_time(ended) / 1e3))
    return statistics.median(rates[1:])  # the first round enables the access


def run(case: Case, limit_s: float) -> dict[str, Any]:
    """Run one case for ``limit_s`` at most; a failure is part of the result."""
    command = [
        *(sys.executable, "-m", "benchmarks.run_plan", case.config),
        *("--rules", json.dumps(case.rules), "--store", "peer"),
        *("--prefill-chunk", str(case.chunk), "--context", str(case.context)),
        *("--batch", *map(str, case.batches)),
    ]
    if case.packing:
        command += ["--packing", json.dumps(case.packing)]
    if case.prompt:
        command += ["--prefill", str(case.prompt)]
    print(f"{case.name}, {limit_s:.0f} s left", file=sys.stderr, flush=True)
    if limit_s <= 0:
        return {"name": case.name, "failed": "no time left"}
    began = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"name": case.name, "failed": f"not done after {limit_s:.0f} s"}
    if done.returncode:
        return {"name": case.name, "failed": done.stderr.splitlines()[-3:]}
    return {
        "name": case.name,
        "case_s": round(time.monotonic() - began, 1),
        **json.loads(done.stdout),
    }


def compare(cases: list[dict[str, Any]], rate: float) -> list[dict[str, Any]]:
    """Set each offloaded measurement beside its bound; ``rate`` is the link's, in bytes/s."""
    found = {
        (case["name"], row["batch"], key): (case, row)
        for case in cases
        for row in case.get("results", ())
        for key in ("step_s", "prefill_s")
        if key in row
    }
    rows = []
    for (name, batch, key), (case, row) in found.items():
        long = ", long" * (key == "prefill_s")
        stored = "FP8 " * name.startswith("FP8 ")
        _, resident = found.get((f"{stored}resident{long}", batch, key), (None, None))
        if not case["rules"] or resident is None:
            continue
        num_bytes = row["link_bytes"] if key == "step_s" else case["offloaded_bytes"]
        bound_s = max(resident[key], num_bytes / rate)
        rows.append(
            {
                "plan": name,
                "what": key,
                "batch": batch,
                "resident_s": resident[key],
                "measured_s": row[key],
                "link_s": num_bytes / rate,
                "bound_s": bound_s,
                "ratio": round(row[key] / bound_s, 4),
                "link_share": round(num_bytes / rate / row[key], 4),
            }
        )
    return rows


def main() -> None:
    """Print one JSON document: the link, every offloaded measurement, every case, the machine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--limit", type=float, default=230, help="seconds for everything")
    limit_s = parser.parse_args().limit
    if torch.cuda.device_count() < 2 or not torch.cuda.can_device_access_peer(1, 0):
        sys.exit("benchmarks.peer needs two CUDA devices with peer access")
    ends = time.monotonic() + limit_s
    cases = [run(case, ends - time.monotonic()) for case in CASES]
    sizes = [*sorted({case.get("slot_bytes", 0) for case in cases} - {0}), LARGE_BYTES]
    rates = {str(size): time_copies(size) for size in sizes}
    report = {
        "copies_bytes_per_s": rates,
        "plans": compare(cases, rates[str(LARGE_BYTES)]),
        "cases": cases,
        "peer_access": torch.cuda.can_device_access_peer(1, 0),
    }
    json.dump(report, sys.stdout)
    print()


if __name__ == "__main__":
    main()
