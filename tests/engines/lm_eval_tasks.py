"""Tasks of lm_eval that need no network."""

from typing import Any

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
