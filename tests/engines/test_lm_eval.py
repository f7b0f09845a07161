"""lm_eval gives a plan the numbers that it gives stock transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli import RULES, TINY_MOE, write_plan

pytestmark = pytest.mark.engines

DOCUMENTS = [
    {"text": "Weights that do not fit", "choices": [" the GPU", " a table", " me"], "label": 0},
    {"text": "Weights that", "choices": [" are big", " do not fit"], "label": 1},
    {"text": "cross the link before", "choices": [" noon", " their layer."], "label": 1},
]
TASK: dict[str, Any] = {
    "dataset_path": "json",
    "test_split": "test",
    "doc_to_text": "{{text}}",
    "doc_to_target": "{{label}}",
}
CHOOSE: dict[str, Any] = {**TASK, "task": "choose", "output_type": "multiple_choice"}
CHOOSE |= {"doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc"}]}
CONTINUE: dict[str, Any] = {**TASK, "task": "continue", "output_type": "generate_until"}
CONTINUE |= {
    "metric_list": [{"metric": "exact_match"}],
    "generation_kwargs": {"until": ["."], "max_gen_toks": 12, "do_sample": False},
}


def test_the_same_numbers_as_stock(tmp_path: Path) -> None:
    lm_eval: Any = pytest.importorskip("lm_eval")
    pytest.importorskip("offplan.lm_eval")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    tasks = tmp_path / "tasks"
    tasks.mkdir()
    for task in (CHOOSE, CONTINUE):
        read = {**task, "dataset_kwargs": {"data_files": {"test": str(documents)}}}
        (tasks / f"{task['task']}.yaml").write_text(json.dumps(read))  # JSON is YAML
    found = []
    for model, arguments in (
        ("offplan", {"plan": str(write_plan(tmp_path, RULES["mixed"]))}),
        ("hf", {"pretrained": str(TINY_MOE), "dtype": "bfloat16"}),
    ):
        result = lm_eval.simple_evaluate(
            model=model,
            model_args={**arguments, "batch_size": 2},
            # its command line names none either, and lm_eval then names a GPU that may not be here
            device="cpu" if model == "hf" or torch.cuda.is_available() else "cuda:0",
            tasks=["choose", "continue"],
            task_manager=lm_eval.tasks.TaskManager(
                include_path=str(tmp_path / "tasks"), include_defaults=False
            ),
            bootstrap_iters=0,
        )
        answers = [
            [each["resps"] for each in result["samples"][task]] for task in ("choose", "continue")
        ]
        found.append((answers, result["results"]))
    assert found[0] == found[1]
