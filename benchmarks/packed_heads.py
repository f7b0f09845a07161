"""Output heads packed with the embedding that they are tied to, beside heads as stored, as JSON.

    python -m benchmarks.packed_heads [NAME ...] > benchmarks/results/packed-heads-h100.json

Needs a CUDA device. Each plan has all weights on the GPU and is run by ``offplan bench`` on random
weights, in a process of its own. Two plans that pack one layer alone differ by the head: what it
costs and saves is their difference. This machine is measured once, and the layers once for each
model and batch, as stored and packed. NAMEs pick cases by a part of their name. A line on stderr
for each plan has predicted / measured.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.predictions import bench
from benchmarks.run_plan import describe_machine
from offplan.capabilities.packing import Packing
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.library.asking import pose
from offplan.library.machines import measure_here
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Goal, Offload, Workload, dump_plan

MODELS = Path(__file__).with_name("models")
NAMES = ("gemma-3-270m", "gemma-3-4b")
BATCHES = (1, 16)


def list_packings(model: Model) -> dict[str, Packing | None]:
    """Return the packings that are compared: nothing, one layer and all, with the head or not."""
    of_one: dict[str, Any] = {"group_size": len(model.layers), "num_in_group": 1}
    of_all: dict[str, Any] = {"group_size": 1, "num_in_group": 1}
    return {
        "as stored": None,
        "a layer packed": Packing(**of_one),
        "a layer and the head": Packing(**of_one, output_head=True),
        "all layers and the head": Packing(**of_all, output_head=True),
    }


def run(
    name: str, model: Model, machine: MachineProfile, workload: Workload, packing: Packing | None
) -> dict[str, Any]:
    """Predict and bench one plan."""
    budget = Budget(gpu_memory=machine.gpu_memory.value)
    question = pose(model, machine, workload, budget, Goal())
    offload = Offload(prefill_chunk=workload.prompt_tokens, packing=packing)
    written = question.answer(offload)
    with tempfile.TemporaryDirectory() as folder:
        plan = Path(folder, "plan.yaml")
        plan.write_text(dump_plan(written))
        benched = bench(plan)
    predicted, measured = benched["predicted"], benched["measured"]
    figures = {
        "step_s": [each["decode"]["step_s"] for each in (predicted, measured)],
        "prompt_s": [each["prefill"]["step_s"] for each in (predicted, measured)],
        "gpu_bytes": [each["gpu_memory"]["total_bytes"] for each in (predicted, measured)],
    }
    of = " / "
    print(
        f"{name}: step {of.join(f'{1e3 * s:.3f}' for s in figures['step_s'])} ms, "
        f"prompt {of.join(f'{1e3 * s:.3f}' for s in figures['prompt_s'])} ms, "
        f"GPU {of.join(f'{b / 2**20:.1f}' for b in figures['gpu_bytes'])} MiB",
        file=sys.stderr,
        flush=True,
    )
    resident_bytes = written.prediction.gpu_memory.resident_bytes
    return {"name": name, "resident_bytes": resident_bytes, "predicted_and_measured": figures}


def main() -> None:
    """Run the cases; one that fails is part of the result."""
    wanted = sys.argv[1:] or [""]
    results = list[dict[str, Any]]()
    for config in NAMES:
        model = open_model(str((MODELS / config / "config.json").resolve()))
        for batch in BATCHES:
            workload = Workload(batch=batch, prompt_tokens=512, output_tokens=128, context=2048)
            cases = {
                f"{config}, batch {batch}, {what}": packing
                for what, packing in list_packings(model).items()
            }
            chosen = [name for name in cases if any(each in name for each in wanted)]
            if not chosen:
                continue
            machine = measure_here(model, workload).profile
            for name in chosen:
                try:
                    results.append(run(name, model, machine, workload, cases[name]))
                except subprocess.CalledProcessError as error:
                    print(f"{name}: failed", file=sys.stderr, flush=True)
                    results.append({"name": name, "failed": error.stderr.splitlines()[-60:]})
    json.dump({"machine": describe_machine(), "cases": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
