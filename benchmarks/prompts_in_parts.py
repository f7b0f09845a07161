"""Ask the planner random questions, with prompts in parts and without; print counts as JSON.

    python -m benchmarks.prompts_in_parts [--number 650] [--seed 0]

A question is a model with routed experts, a machine, a share of its GPU memory and a workload,
drawn in turn from one seed. A prompt reads again whose weights cross the link more than AGAIN
times. Of those that do so with ``--parts auto`` it is counted for how many a plan fits that reads
once: experts in parts that meet the whole prompt, and all else streamed, in chunks of 512 tokens or
fewer. Memory is unused where a plan that offloads leaves more than UNUSED of its budget: for an
earlier first token, where a plan up to 1 % faster was found; or because it is less than any layer
has of what a rule takes. No GPU is needed; all times are predicted.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any, Literal

import offplan
from offplan.checkpoint.model import Model
from offplan.costs.predict import predict
from offplan.errors import OffplanError
from offplan.placement import place
from offplan.plan import Offload, Plan, Prediction, Rule, Workload
from offplan.planner.classes import expert_class
from offplan.planner.make import make_plan
from offplan.planner.parts import NUM_PARTS
from offplan.planner.question import Question

AGAIN = 1.5
UNUSED = 0.03
CHUNKS = (512, 256, 128)
CONFIGS = Path(__file__).parent / "models"
STORED = ["deepseek-v3-8-layers", "gpt-oss-120b", "gpt-oss-20b", "qwen3-30b-a3b-fp8"]
_MIXTRAL: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_key_value_heads": 8,
    "num_experts_per_tok": 2,
    "num_local_experts": 8,
    "max_position_embeddings": 65536,
    "vocab_size": 32768,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
_QWEN: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "head_dim": 128,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 65536,
    "vocab_size": 151936,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}
WRITTEN = {
    "mixtral-8x7b": {
        **_MIXTRAL,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
    },
    "mixtral-8x22b": {
        **_MIXTRAL,
        "hidden_size": 6144,
        "intermediate_size": 16384,
        "num_hidden_layers": 56,
        "num_attention_heads": 48,
    },
    "qwen3-30b-a3b": {
        **_QWEN,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
    },
    "qwen3-235b-a22b": {
        **_QWEN,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
    },
}
"""Shapes of published models, from their ``config.json``."""
MACHINES = ["rtx3060", "rtx3080-laptop", "rtx4070", "rtx3090", "rtx4090", "rtx5090", "h100"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--number", type=int, default=650)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    drawn, counts = random.Random(given.seed), Counter[str]()
    models: dict[str, Model] = {}
    worst: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for number in range(given.number):
            name = drawn.choice([*STORED, *WRITTEN])
            case = {
                "model": name,
                "machine": drawn.choice(MACHINES),
                "share": round(drawn.uniform(0.15, 1.0), 2),
                "batch": drawn.choice([1, 1, 2, 4, 8, 16]),
                "prompt": drawn.choice([512, 1024, 2048, 4096, 8192, 16384]),
                "output": drawn.choice([16, 128, 512]),
            }
            if name not in models:
                models[name] = open_shapes(name, Path(folder))
            found = compare(models[name], case)
            counts.update(key for key, value in found.items() if value is True)
            if found.get("reads_again"):
                worst.append({**case, **{k: v for k, v in found.items() if v is not True}})
            print(number, case, found, file=sys.stderr, flush=True)
    facts = {"seed": given.seed, "number": given.number, "counts": dict(sorted(counts.items()))}
    print(json.dumps({**facts, "read_again_without_parts": worst}, indent=1))


def open_shapes(name: str, folder: Path) -> Model:
    """Open a model by its config, written to a folder where it is not stored here."""
    if name in STORED:
        return offplan.open_model(str(CONFIGS / name / "config.json"))
    (folder / name).mkdir()
    path = folder / name / "config.json"
    path.write_text(json.dumps(WRITTEN[name]))
    return offplan.open_model(str(path))


def compare(model: Model, case: dict[str, Any]) -> dict[str, Any]:
    """Plan a question with parts and without; return facts, those that are counted as True."""
    context = case["prompt"] + case["output"]
    workload = Workload(
        batch=case["batch"],
        prompt_tokens=case["prompt"],
        output_tokens=case["output"],
        context=context,
    )
    machine = offplan.load_machine(case["machine"])
    memory = round(case["share"] * machine.profile.gpu_memory.value)
    plans: list[Plan] = []
    choices: tuple[Literal["off", "auto"], ...] = "off", "auto"
    for parts in choices:
        try:
            question = offplan.ask(model, machine, workload, gpu_memory=memory, parts=parts)
            made = make_plan(question)
            plans.append(made.plan)
        except OffplanError as error:
            return {f"no plan with parts {parts}": True, "error": str(error)[:100]}
    plan = plans[-1]
    reads = [count_reads(each.prediction) for each in plans]
    unused = [
        bool(each.offload.rules)
        and 1 - each.prediction.gpu_memory.total_bytes / each.budget.gpu_memory > UNUSED
        for each in plans
    ]
    facts: dict[str, Any] = {
        "fits": True,
        "offloads": bool(plan.offload.rules),
        "in_parts": any(rule.parts for rule in plan.offload.rules),
        "in_groups": any(rule.tokens_at_once for rule in plan.offload.rules),
        "unused": unused[0],
        "unused_with_parts": unused[1],
        "reads_again": reads[0] > AGAIN,
        "reads_again_with_parts": reads[1] > AGAIN,
        "reads": [round(each, 2) for each in reads],
        "first_token_s": [round(each.prediction.prefill.step_s, 3) for each in plans],
        "objective_s": [round(each.prediction.objective_s, 3) for each in plans],
    }
    if unused[1]:
        is_fastest = plan.prediction.objective_s <= made.best_s * (1 + 1e-9)
        reason = "less than a layer" if lacks_layer(question, plan) else "else"
        facts[f"unused: {reason if is_fastest else 'earlier first token'}"] = True
    if reads[1] > AGAIN:
        fitting = [each for each in list_fitting(question, plan) if count_reads(each) <= AGAIN]
        facts["reads_again_where_once_fits"] = bool(fitting)
        facts["reads_again_where_once_is_faster"] = any(
            each.objective_s < 0.99 * plan.prediction.objective_s for each in fitting
        )
    return facts


def count_reads(prediction: Prediction) -> float:
    """Divide what a prompt brings over the link by what lies on the host."""
    return prediction.prefill.link_bytes / max(1, prediction.host_memory_bytes)


def lacks_layer(question: Question, plan: Plan) -> bool:
    """Whether what a plan leaves is less than what each rule takes of any layer."""
    stage = question.hold(plan.offload)[0]
    left = plan.budget.gpu_memory - plan.prediction.gpu_memory.total_bytes
    placed = (
        place(stage, plan.offload.model_copy(update={"rules": (rule,)}))
        for rule in plan.offload.rules
    )
    return all(
        sum(e.off_gpu_bytes for e in s.entries) > left for each in placed for s in each.slabs
    )


def list_fitting(question: Question, plan: Plan) -> list[Prediction]:
    """Predict plans in parts that keep a plan's budget: what takes least memory, and reads once."""
    way: dict[str, Any] = {"group_size": 1, "num_in_group": 1, "prefill": "prefetch"}
    stage = question.stage
    experts = expert_class(stage).segments
    found = []
    for num_parts, chunk, packing in product(NUM_PARTS, CHUNKS, {plan.offload.packing, None}):
        rules = (
            {"cpu_offload_params": experts, **way, "decode": "uva", "parts": num_parts},
            {**way, "decode": "uva"},
        )
        offload = Offload(
            prefetch_step=1,
            prefill_chunk=min(chunk, plan.workload.prompt_tokens),
            embeddings="host" if stage.tables else "device",
            packing=packing,
            rules=tuple(map(Rule.model_validate, rules)),
        )
        try:
            stages = question.hold(offload)
            predicted = predict(
                stages, question.planned_machine, plan.workload, plan.budget, offload
            )
        except OffplanError:
            continue
        if predicted.gpu_memory.total_bytes <= plan.budget.gpu_memory:
            found.append(predicted)
    return found


if __name__ == "__main__":
    main()
