"""lm_eval gives a plan the numbers that it gives stock transformers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.cli import RULES, TINY_MOE, write_plan
from tests.engines.lm_eval_tasks import CHOOSE, CONTINUE, DOCUMENTS

pytestmark = pytest.mark.engines


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
