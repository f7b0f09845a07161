"""What plans promise and what they keep, over models, budgets, batches and prompts, as JSON.

    python -m benchmarks.predictions [NAME ...] > results.json

Needs a CUDA device and host memory for the weights. Each plan is the one that ``offplan plan``
writes, with nothing asked for but what a case names: this machine is measured, and the model's
layers at the case's workload. ``offplan bench`` then runs it on random weights, in a process of its
own. NAMEs pick cases by a part of their name, and order them.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.decode_and_prefill import LITE, QWEN
from benchmarks.run_plan import describe_machine
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.library.asking import ask
from offplan.library.machines import Machine, find_machine
from offplan.plan import Goal, Workload, dump_plan
from offplan.planner.make import make_plan

CONFIGS = {"Qwen3-8B": QWEN, "DeepSeek-V2-Lite": LITE} | {
    name: f"benchmarks/models/{name.lower().replace(' ', '-')}/config.json"
    for name in (
        *("Qwen3-8B FP8", "Qwen3-32B W4A16", "Qwen3-30B-A3B FP8", "DeepSeek-V3 8 layers"),
        *("gpt-oss-20b", "gpt-oss-120b"),
        *("Nemotron-H-8B", "DeepSeek-V4 5 layers", "Mixtral-8x22B 8 layers"),
        *("Mistral-Nemo-12B", "ERNIE-4.5-21B-A3B GPTQ"),  # neither served to tune anything
    )
}

USUAL = Workload()


@dataclass(frozen=True)
class Case:
    """A model, the GPU memory of its plan in GiB, a workload, and keys of ``Goal`` asked for."""

    model: str
    gpu_gib: float
    workload: Workload = USUAL
    asked: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """What the table calls it."""
        more = "".join(f", {key} {value}" for key, value in self.asked.items())
        asked_of = f"batch {self.workload.batch}, {self.workload.prompt_tokens} tokens"
        return f"{self.model}, {self.gpu_gib} GiB, {asked_of}{more}"


def texts(prompt_tokens: int, output_tokens: int, context: int, batch: int = 1) -> Workload:
    """The workload of so many texts."""
    return Workload(
        batch=batch, prompt_tokens=prompt_tokens, output_tokens=output_tokens, context=context
    )


FOUR = texts(512, 128, 2048, batch=4)
MANY = texts(256, 64, 1024, batch=16)
TWO_THOUSAND = texts(2048, 128, 4096)
FOUR_TIMES_FOUR_THOUSAND = texts(4096, 16, 4352, batch=4)
LONG = texts(8192, 64, 8448)
VERY_LONG = texts(32_000, 64, 32_768)
LONGEST = texts(130_000, 64, 131_072)
RATES = {"h2d", "uva", "cores", "cores_beside_copies", "host_reads", "cores_round_trip"}
RATES |= {"host_threads"}
"""Figures of the machine that a case's waits follow from."""
STREAMED = {"packing": False, "host_cores": False}
"""Weights as they are stored, all over the link."""
CASES = [
    *(Case("gpt-oss-20b", size) for size in (8, 12)),
    *(Case("Qwen3-30B-A3B FP8", 12, each) for each in (USUAL, FOUR)),
    *(Case("Qwen3-8B", size) for size in (8, 11)),
    *(Case("Qwen3-8B", size, asked=STREAMED) for size in (9, 15)),
    *(Case("DeepSeek-V2-Lite", size) for size in (8, 16)),
    Case("DeepSeek-V2-Lite", 16, asked=STREAMED),
    Case("Qwen3-32B W4A16", 12),
    Case("Mistral-Nemo-12B", 16),
    Case("ERNIE-4.5-21B-A3B GPTQ", 8),
    Case("Qwen3-8B FP8", 6),
    Case("gpt-oss-20b", 12, LONG),
    Case("DeepSeek-V2-Lite", 4, LONG),
    Case("Qwen3-8B", 11, LONG),
    Case("gpt-oss-120b", 24, TWO_THOUSAND),
    Case("DeepSeek-V3 8 layers", 24),
    Case("Qwen3-8B", 12, MANY),
    Case("DeepSeek-V2-Lite", 16, MANY),
    Case("Mixtral-8x22B 8 layers", 11, FOUR_TIMES_FOUR_THOUSAND),
    *(Case("Nemotron-H-8B", size, asked={"stock": True}) for size in (18, 10)),
    *(Case("DeepSeek-V4 5 layers", size, asked={"stock": True}) for size in (24, 12)),
    *(Case(name, 12, VERY_LONG) for name in ("gpt-oss-20b", "Qwen3-8B")),
    *(
        Case(name, size, LONGEST)
        for name, size in (("gpt-oss-20b", 12), ("Qwen3-8B", 28), ("Mistral-Nemo-12B", 32))
    ),
]


def offplan(*arguments: str) -> str:
    """Run ``offplan``; raises CalledProcessError, whose stderr says why."""
    command = [sys.executable, "-c", "from offplan.cli.main import main; main()", *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def bench(plan: Path, num_requests: int = 3, num_steps: int = 10, *more: str) -> dict[str, Any]:
    """Run ``offplan bench`` with ``more`` options; raises what ``offplan`` raises."""
    timed = "--repeats", str(num_requests), "--steps", str(num_steps)
    return dict(json.loads(offplan("bench", str(plan), "--dummy-weights", *timed, "--json", *more)))


def measure(model: Model, case: Case) -> Machine:
    """Measure this machine for a case's plan, as ``offplan plan`` does."""
    machine = find_machine(None, model, case.workload, goal=Goal.from_arguments(**case.asked))
    assert machine is not None, "these cases need a CUDA device"
    return machine


def run(case: Case, model: Model, machine: Machine, folder: Path) -> dict[str, Any]:
    """Plan and bench one case."""
    gpu_memory = round(case.gpu_gib * 2**30)
    planned = make_plan(ask(model, machine, case.workload, gpu_memory=gpu_memory, **case.asked))
    plan = folder / "plan.yaml"
    plan.write_text(dump_plan(planned.plan))
    # a prompt of so many tokens takes ten seconds or more, each time
    benched = bench(plan, 1 if case.workload is LONGEST else 3, 20)
    predicted, measured = benched["predicted"], benched["measured"]
    floor = asdict(planned.floor)
    return {
        "name": case.name,
        "offload": planned.plan.offload.model_dump(mode="json"),
        "machine": machine.profile.model_dump(mode="json", include=RATES),
        "predicted": predicted,
        "measured": {key: measured[key] for key in ("gpu_memory", "link", "notes")},
        **{
            phase: {
                "predicted_s": predicted[phase]["step_s"],
                "measured_s": measured[phase]["step_s"],
                # the fastest and the slowest, and what compute waited in a request of its own
                **{
                    key: measured[phase].get(key) for key in ("step_min_s", "step_max_s", "stall_s")
                },
                "ratio": measured[phase]["step_s"] / predicted[phase]["step_s"],
                "bound_s": predicted[phase]["bound_s"],
                "floor_s": floor[f"{phase}_s"],
                "over_floor": measured[phase]["step_s"] / floor[f"{phase}_s"],
            }
            for phase in ("decode", "prefill")
        },
        "gpu_memory": {
            "predicted_bytes": predicted["gpu_memory"]["total_bytes"],
            "measured_bytes": measured["gpu_memory"]["total_bytes"],
            "ratio": measured["gpu_memory"]["total_bytes"] / predicted["gpu_memory"]["total_bytes"],
        },
    }


def main() -> None:
    """Run the cases; one that fails is part of the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[""])
    names = parser.parse_args().names
    chosen = {case.name: case for name in names for case in CASES if name in case.name}
    results = []
    machines: dict[tuple[str, Workload, str], Machine] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen.values():
            began = time.perf_counter()
            # absolute: a plan's relative source starts at its file
            model = open_model(str(Path(CONFIGS[case.model]).resolve()))
            measured_for = case.model, case.workload, json.dumps(case.asked)
            if measured_for not in machines:
                machines[measured_for] = measure(model, case)
            took = time.perf_counter() - began
            print(f"{case.name}: measured in {took:.1f} s", file=sys.stderr, flush=True)
            try:
                results.append(run(case, model, machines[measured_for], Path(folder)))
            except subprocess.CalledProcessError as error:
                results.append({"name": case.name, "failed": error.stderr.splitlines()[-60:]})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    json.dump({"machine": describe_machine(), "cases": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
