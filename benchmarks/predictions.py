"""What plans promise and what they keep, over models, budgets, batches and prompts, as JSON.

    python -m benchmarks.predictions [--sizes N] [NAME ...] > results.json

Needs a CUDA device and host memory for the weights. This machine is measured once and a model's
layers once for each workload, as ``offplan measure`` does; each plan is then run by ``offplan
bench`` on random weights, in a process of its own. A budget is stated, or holds a share of the
model's weights beside everything else that a plan with all of them on the GPU takes. NAMEs pick
cases by a part of their name, and order them. ``--sizes`` has layers timed for so many sizes of
chunks alone, the largest.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.decode_and_prefill import LITE, QWEN
from benchmarks.run_plan import describe_machine
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.held.held import hold, hold_counted
from offplan.held.packing import pack_everything
from offplan.library.asking import pose
from offplan.library.machines import MOST_TIMED
from offplan.machine.measure import measure_machine
from offplan.machine.profile import MachineProfile
from offplan.plan import Budget, Goal, Offload, Workload, dump_plan
from offplan.planner.make import make_plan
from offplan.planner.space import prefill_chunks
from offplan.runtime.measuring.layer_times import measure_layer_times, measure_model_reads
from offplan.runtime.measuring.pass_times import measure_pass_times

MODELS = {QWEN: "Qwen3-8B", LITE: "DeepSeek-V2-Lite"} | {
    f"benchmarks/models/{name.lower().replace(' ', '-')}/config.json": name
    for name in (
        *("Qwen3-8B FP8", "Qwen3-32B W4A16", "Qwen3-30B-A3B FP8", "DeepSeek-V3 8 layers"),
        *("gpt-oss-20b", "gpt-oss-120b"),
        *("Nemotron-H-8B", "DeepSeek-V4 5 layers", "Mixtral-8x22B 8 layers"),
        *("Mistral-Nemo-12B", "ERNIE-4.5-21B-A3B GPTQ"),  # neither served to tune anything
    )
}
CONFIGS = {name: config for config, name in MODELS.items()}

PLAIN = Goal(packing=False)
PACKED = Goal()
STOCK = Goal(packing=False, stock=True)
IN_PARTS = Goal(packing=False, parts="auto")


@dataclass(frozen=True)
class Case:
    """A model, the share of its weights that the GPU is to hold or all its memory, a workload."""

    config: str
    share: float | None
    batch: int = 1
    prompt_tokens: int = 512
    output_tokens: int = 128
    context: int = 2048
    gpu_gib: float | None = None
    """GPU memory of the plan, in GiB, where no share is given."""
    goal: Goal = PLAIN

    @property
    def name(self) -> str:
        """What the table calls it."""
        room = f"{self.gpu_gib} GiB" if self.share is None else f"{self.share:.0%} of the weights"
        goal = self.goal
        more = ", packed" * goal.packing + ", in parts" * (goal.parts != "off")
        what = f"batch {self.batch}, {self.prompt_tokens} tokens{more}"
        return f"{MODELS[self.config]}, {room}, {what}"

    @property
    def workload(self) -> Workload:
        """As plans have it."""
        return Workload(
            batch=self.batch,
            prompt_tokens=self.prompt_tokens,
            output_tokens=self.output_tokens,
            context=self.context,
        )


LONG: dict[str, Any] = {"prompt_tokens": 8192, "output_tokens": 64, "context": 8448}
ODD: dict[str, Any] = {"prompt_tokens": 3000, "output_tokens": 64, "context": 4096}
"""Of whole chunks and a rest."""
VERY_LONG: dict[str, Any] = {"prompt_tokens": 32_000, "output_tokens": 64, "context": 32_768}
LONGEST: dict[str, Any] = {"prompt_tokens": 130_000, "output_tokens": 64, "context": 131_072}
TWO_THOUSAND: dict[str, Any] = {"prompt_tokens": 2048, "output_tokens": 128, "context": 4096}
FOUR_THOUSAND: dict[str, Any] = {"prompt_tokens": 4096, "output_tokens": 16, "context": 4352}
SHORT: dict[str, Any] = {"prompt_tokens": 256, "output_tokens": 64, "context": 1024}
CASES = [
    *(Case(QWEN, share) for share in (0.25, 0.5, 0.8, 0.95)),
    Case(QWEN, 0.5, **LONG),
    Case(QWEN, 0.9, **LONG),
    Case(QWEN, 0.5, **ODD),
    Case(QWEN, 0.5, 16, **SHORT),
    Case(QWEN, 0.8, 64, **SHORT),
    *(Case(LITE, share) for share in (0.25, 0.5, 0.9)),
    Case(LITE, 0.5, **LONG),
    Case(LITE, 0.5, **ODD),
    Case(LITE, 0.5, 8, **SHORT),
    Case(LITE, 0.8, 16, **SHORT),
    Case(LITE, 0.5, 64, **SHORT),
    Case(CONFIGS["Qwen3-8B FP8"], 0.5),
    Case(CONFIGS["Qwen3-8B FP8"], 0.5, 16, **SHORT),
    *(Case(CONFIGS["gpt-oss-20b"], None, gpu_gib=size) for size in (8, 12)),
    Case(CONFIGS["gpt-oss-20b"], 1.0),
    *(
        Case(CONFIGS["gpt-oss-20b"], None, gpu_gib=24, **each)
        for each in (LONGEST, VERY_LONG, LONG)
    ),
    Case(QWEN, None, gpu_gib=40, **LONGEST),
    *(Case(QWEN, None, gpu_gib=32, **each) for each in (VERY_LONG, LONG)),
    Case(CONFIGS["Mistral-Nemo-12B"], None, gpu_gib=56, **LONGEST),
    *(Case(CONFIGS["gpt-oss-120b"], None, gpu_gib=size, **TWO_THOUSAND) for size in (24, 48)),
    *(Case(CONFIGS["Qwen3-30B-A3B FP8"], None, batch, gpu_gib=12) for batch in (1, 8)),
    Case(CONFIGS["DeepSeek-V3 8 layers"], 0.5),
    Case(CONFIGS["Qwen3-32B W4A16"], None, gpu_gib=12),
    *(Case(QWEN, None, gpu_gib=size, goal=PACKED) for size in (14.5, 12.7, 12, 11.3, 9)),
    Case(QWEN, None, 64, gpu_gib=24, goal=PACKED, **SHORT),
    Case(QWEN, None, gpu_gib=12, goal=PACKED, **LONG),
    Case(LITE, None, gpu_gib=16.5, goal=PACKED),
    Case(LITE, None, gpu_gib=16.5, goal=PACKED, **LONG),
    *(Case(CONFIGS["Mistral-Nemo-12B"], None, b, gpu_gib=16, goal=PACKED) for b in (1, 4, 16)),
    *(Case(CONFIGS["ERNIE-4.5-21B-A3B GPTQ"], None, b, gpu_gib=8) for b in (1, 4, 16)),
    *(Case(CONFIGS["Nemotron-H-8B"], share, goal=STOCK) for share in (1.0, 0.5)),
    *(Case(CONFIGS["DeepSeek-V4 5 layers"], share, goal=STOCK) for share in (1.0, 0.5)),
    *(Case(LITE, None, gpu_gib=4, goal=goal, **LONG) for goal in (PLAIN, IN_PARTS)),
    *(
        Case(CONFIGS["Mixtral-8x22B 8 layers"], None, 4, gpu_gib=11, goal=goal, **FOUR_THOUSAND)
        for goal in (PLAIN, IN_PARTS)
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


def count_touched(case: Case, offload: Offload) -> float | None:
    """Count the distinct experts that a decode step reads in a layer; None where none has any.

    On the same random weights; raises CalledProcessError, whose stderr says why.
    """
    command = [sys.executable, "-m", "benchmarks.run_plan", case.config]
    rules = json.dumps([rule.model_dump(mode="json") for rule in offload.rules])
    options = ["--rules", rules, "--prefetch-step", str(offload.prefetch_step)]
    options += ["--prefill-chunk", str(offload.prefill_chunk), "--context", str(case.context)]
    options += ["--prompt-tokens", str(case.prompt_tokens), "--batch", str(case.batch)]
    if offload.packing is not None:
        options += ["--packing", offload.packing.model_dump_json()]
    done = subprocess.run([*command, *options], check=True, capture_output=True, text=True)
    touched: float | None = json.loads(done.stdout)["results"][0].get("touched_experts")
    return touched


def find_budget(case: Case, model: Model, machine: MachineProfile) -> Budget:
    """Room for the case's share of the weights, and for everything else that a plan takes."""
    if case.share is None:
        assert case.gpu_gib is not None
        return Budget(gpu_memory=round(case.gpu_gib * 2**30))
    total, loaded = machine.gpu_memory.value, hold(model, way=case.goal.way).loaded_bytes
    for _ in range(2):  # the margin is a share of the budget: the second round has it right
        question = pose(model, machine, case.workload, Budget(gpu_memory=total), case.goal)
        plan = make_plan(question).plan
        total = plan.prediction.gpu_memory.total_bytes
    return Budget(gpu_memory=total - round((1 - case.share) * loaded))


def run(case: Case, model: Model, machine: MachineProfile, folder: Path) -> dict[str, Any]:
    """Plan and bench one case."""
    budget = find_budget(case, model, machine)
    planned = make_plan(pose(model, machine, case.workload, budget, case.goal))
    plan = folder / "plan.yaml"
    plan.write_text(dump_plan(planned.plan))
    # a prompt of so many tokens takes ten seconds or more, each time
    benched = bench(plan, 3 if case.prompt_tokens < LONGEST["prompt_tokens"] else 1)
    predicted, measured = benched["predicted"], benched["measured"]
    floor = asdict(planned.floor)
    touched = None
    if model.experts is not None and case.batch > 1 and case.goal.way.is_own:
        counted = count_touched(case, planned.plan.offload)
        touched = {"predicted": model.experts.touched(case.batch), "counted": counted}
    return {
        "name": case.name,
        "budget_bytes": budget.gpu_memory,
        "offload": planned.plan.offload.model_dump(mode="json"),
        "predicted": predicted,
        "measured": {key: measured[key] for key in ("gpu_memory", "link")},
        "touched_experts": touched,
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


def time_layers(
    model: Model,
    workload: Workload,
    goal: Goal,
    here: MachineProfile,
    num_sizes: int | None = None,
) -> MachineProfile:
    """Add to this machine's profile how long the model's layers take on it at a workload.

    ``num_sizes`` are the sizes of chunks, the largest, that they are timed for; all if left out.
    """
    chunks = prefill_chunks(min(workload.prompt_tokens, MOST_TIMED), workload.batch)[:num_sizes]
    if not goal.way.is_own:
        times = measure_pass_times(hold_counted(model, goal.way), workload, chunks[:1])
        return here.model_copy(update={"layer_times": times})
    stage = hold(model)
    times = measure_layer_times(stage, workload, chunks)
    if goal.packing:  # what lies outside the layers was measured with them
        known = {time.layer for time in times}
        packed = measure_layer_times(hold(model, pack_everything(model)), workload, chunks)
        times += tuple(time for time in packed if time.layer not in known)
    reads = measure_model_reads(stage, workload, chunks, here.uva.value)
    return here.model_copy(update={"layer_times": times, "in_place_reads": reads})


def main() -> None:
    """Run the cases; one that fails is part of the result."""
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", default=[""])
    parser.add_argument("--sizes", type=int)
    args = parser.parse_args()
    names = args.names
    chosen = list(dict.fromkeys(c for name in names for c in CASES if name in c.name))
    results = []
    here = measure_machine()
    machines: dict[tuple[str, Workload, bool, bool], MachineProfile] = {}
    with tempfile.TemporaryDirectory() as folder:
        for case in chosen:
            print(case.name, file=sys.stderr, flush=True)
            # absolute: a plan's relative source starts at its file
            model, workload = open_model(str(Path(case.config).resolve())), case.workload
            measured_for = case.config, workload, case.goal.packing, case.goal.stock
            if measured_for not in machines:
                began = time.perf_counter()
                machines[measured_for] = time_layers(model, workload, case.goal, here, args.sizes)
                print(f"layers: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
            try:
                machine = machines[measured_for]
                results.append(run(case, model, machine, Path(folder)))
            except subprocess.CalledProcessError as error:
                results.append({"name": case.name, "failed": error.stderr.splitlines()[-60:]})
            print(json.dumps(results[-1]), file=sys.stderr, flush=True)
    json.dump({"machine": describe_machine(), "cases": results}, sys.stdout)
    print()


if __name__ == "__main__":
    main()
