"""What plans promise and what they keep, over models, budgets, batches and prompts, as JSON.

    python -m benchmarks.predictions [NAME ...] > benchmarks/results/predictions-h200.json

Needs a CUDA device and host memory for the weights. Every case is what a user would do, by the same
commands: measure this machine and the model's layers at the workload, analyze for a budget, bench
the plan on random weights. The budget holds a share of the model's weights beside everything else
that a plan with all of them on the GPU takes. NAMEs pick cases by a part of their name.
"""

import hashlib
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.run_plan import describe_machine

QWEN = "tests/models/qwen3-8b/config.json"
LITE = "tests/models/deepseek-v2-lite/config.json"
MODELS = {QWEN: "Qwen3-8B", LITE: "DeepSeek-V2-Lite"}
HOST_MEMORY = ("--host-memory", "1TiB")


@dataclass(frozen=True)
class Case:
    """A model, the share of its weights that the GPU is to hold, and a workload."""

    config: str
    share: float
    batch: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    context: int = 2048

    @property
    def name(self) -> str:
        """What the table calls it."""
        return (
            f"{MODELS[self.config]}, {self.share:.0%} of the weights, batch {self.batch}, "
            f"{self.prompt_tokens} tokens"
        )

    @property
    def workload(self) -> tuple[str, ...]:
        """The workload as options."""
        return (
            *("--batch", str(self.batch), "--prompt-tokens", str(self.prompt_tokens)),
            *("--output-tokens", str(self.output_tokens), "--context", str(self.context)),
        )


LONG = {"prompt_tokens": 8192, "output_tokens": 64, "context": 8448}
SHORT = {"prompt_tokens": 256, "output_tokens": 64, "context": 1024}
CASES = [
    *(Case(QWEN, share) for share in (0.25, 0.5, 0.8, 0.95)),
    Case(QWEN, 0.5, **LONG),
    Case(QWEN, 0.9, **LONG),
    Case(QWEN, 0.5, 16, **SHORT),
    Case(QWEN, 0.8, 64, **SHORT),
    *(Case(LITE, share) for share in (0.25, 0.5, 0.9)),
    Case(LITE, 0.5, **LONG),
    Case(LITE, 0.5, 8, **SHORT),
    Case(LITE, 0.8, 16, **SHORT),
    Case(LITE, 0.5, 64, **SHORT),
]


def offplan(*arguments: str) -> dict[str, Any]:
    """Run a command with ``--json``; raises CalledProcessError, whose stderr says why."""
    command = [sys.executable, "-c", "from offplan.cli.main import main; main()", *arguments]
    done = subprocess.run([*command, "--json"], check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def run(case: Case, folder: Path) -> dict[str, Any]:
    """Plan and bench one case."""
    kind = f"{Path(case.config).parent.name} {case.workload}"
    profile = folder / f"{hashlib.sha256(kind.encode()).hexdigest()}.yaml"
    plan = folder / "plan.yaml"
    if not profile.exists():
        offplan("measure", case.config, *case.workload, "-o", str(profile))
    analyze = ("analyze", case.config, *case.workload, "--machine", str(profile), *HOST_MEMORY)
    budget = str(sys.maxsize)
    for _ in range(2):  # the margin is a share of the budget: the second round has it right
        planned = offplan(*analyze, "--gpu-memory", budget)
        resident = planned["plan"]["prediction"]["gpu_memory"]
        budget = str(resident["total_bytes"])
    budget = str(int(budget) - round((1 - case.share) * resident["resident_bytes"]))
    planned = offplan(*analyze, "--gpu-memory", budget, "-o", str(plan), "--force")
    benched = offplan("bench", str(plan), "--dummy-weights", "--repeats", "3", "--steps", "10")
    predicted, measured = benched["predicted"], benched["measured"]
    floor = planned["why"]["floor"]
    return {
        "name": case.name,
        "budget_bytes": int(budget),
        "offload": planned["plan"]["offload"],
        "predicted": predicted,
        "measured": {key: measured[key] for key in ("gpu_memory", "link")},
        **{
            phase: {
                "predicted_s": predicted[phase]["step_s"],
                "measured_s": measured[phase]["step_s"],
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
    chosen = [c for c in CASES if not sys.argv[1:] or any(n in c.name for n in sys.argv[1:])]
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            print(case.name, file=sys.stderr, flush=True)
            try:
                results.append(run(case, Path(folder)))
            except subprocess.CalledProcessError as error:
                results.append({"name": case.name, "failed": error.stderr.splitlines()[-3:]})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    json.dump({"machine": describe_machine(), "cases": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
