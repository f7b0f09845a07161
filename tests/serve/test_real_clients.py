"""The server by clients that others wrote, where they are installed.

pip install litellm guidellm 'lm_eval[api,hf]'
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engines.lm_eval_tasks import CHOOSE, DOCUMENTS
from tests.serve import NAME, REST, TIMEOUT_S, Served
from tests.serve.conftest import Tiny

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("ignore")]


def test_litellm(served: Served) -> None:
    litellm: Any = pytest.importorskip("litellm")
    for provider in ("openai", "hosted_vllm"):
        asked: dict[str, Any] = {
            "model": f"{provider}/{NAME}",
            "api_base": served.url,
            "api_key": "none",
            "temperature": 0,
            "max_tokens": 5,
        }
        messages: list[Any] = [{"role": "user", "content": "Weights"}]
        made = litellm.completion(messages=messages, n=2, presence_penalty=0, **asked)
        assert [choice.message.content for choice in made.choices] == [REST[:5]] * 2
        # with the fields that litellm itself puts into a message
        messages += [made.choices[0].message.model_dump(), {"role": "user", "content": "do"}]
        chunks = litellm.completion(messages=messages, stream=True, **asked)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert text == REST[len(" that do") :][:5]


def test_lm_eval_over_http(served: Served, tiny: Tiny, tmp_path: Path) -> None:
    """The echo of prompts has the logprobs that lm_eval computes by transformers."""
    lm_eval: Any = pytest.importorskip("lm_eval")
    documents = tmp_path / "documents.jsonl"
    documents.write_text("\n".join(map(json.dumps, DOCUMENTS)))
    task = {**CHOOSE, "dataset_kwargs": {"data_files": {"test": str(documents)}}}
    (tmp_path / "choose.yaml").write_text(json.dumps(task))
    remote = {"model": NAME, "base_url": f"{served.url}/completions", "num_concurrent": 2}
    answers = []
    for model, arguments in (
        ("local-completions", {**remote, "tokenizer": str(tiny.folder)}),
        ("hf", {"pretrained": str(tiny.folder), "dtype": "float32"}),
    ):
        result = lm_eval.simple_evaluate(
            model=model,
            model_args=arguments,
            device="cpu",
            tasks=["choose"],
            task_manager=lm_eval.tasks.TaskManager(
                include_path=str(tmp_path), include_defaults=False
            ),
            bootstrap_iters=0,
        )
        answers.append(
            [
                (float(value), bool(is_greedy) and is_greedy != "False")
                for each in result["samples"]["choose"]
                for ((value, is_greedy),) in each["resps"]
            ]
        )
    for (ours, is_ours), (theirs, is_theirs) in zip(*answers, strict=True):
        assert ours == pytest.approx(theirs, abs=1e-2)
        assert is_ours == is_theirs


def test_guidellm_at_a_fixed_length(served: Served, tiny: Tiny, tmp_path: Path) -> None:
    if importlib.util.find_spec("guidellm") is None:
        pytest.skip("there is no guidellm")
    options = {
        "backend": f"kind=openai_http,target={served.url.removesuffix('/v1')}"
        ",request_format=/v1/completions",
        "profile": "kind=concurrent,streams=3",
        "constraint": "kind=max_requests,count=6",
        "data": "kind=synthetic_text,prompt_tokens=40,output_tokens=120",
        "tokenizer": f"kind=hf_auto,model={tiny.folder}",
        "output": "kind=json",
    }
    subprocess.run(
        [
            *(sys.executable, "-m", "guidellm", "run", "--disable-console"),
            *(f"--{name}={value}" for name, value in options.items()),
        ],
        cwd=tmp_path,
        check=True,
        timeout=4 * TIMEOUT_S,
    )
    (report,) = tmp_path.glob("*.json")
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    requests = benchmark["requests"]["successful"]
    assert (len(requests), benchmark["requests"]["errored"]) == (6, [])
    assert {each["output_metrics"]["text_tokens"] for each in requests} == {120}
