"""What engines do not start with is refused before anything is planned."""

import json
from pathlib import Path

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.errors import ExportError, InputError
from offplan.library.asking import pose
from offplan.plan import Budget, Goal, Plan, Workload
from offplan.planner.longest import find_longest_context
from offplan.planner.make import make_plan
from offplan.planner.question import Question
from tests.costs.builders import make_machine
from tests.engines.configs import DENSE

WORK = Workload(prompt_tokens=32, output_tokens=16, context=256)


def open_tiny(folder: Path, **config: object) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps({**DENSE, **config}))
    return open_model(str(path))


def plan_it(model: Model, engine: str | None) -> Plan:
    return make_plan(ask(model, engine)).plan


def ask(model: Model, engine: str | None) -> Question:
    goal = Goal(engine=engine)
    return pose(model, make_machine(), WORK, Budget(gpu_memory=2**30), goal)


@pytest.mark.parametrize("engine", ["vllm", "vllm-worker", "sglang"])
def test_a_context_beyond_the_positions_of_the_model(engine: str, tmp_path: Path) -> None:
    model = open_tiny(tmp_path, max_position_embeddings=128)
    plan = plan_it(model, None)
    expected = r"does not start with a context of 256 tokens: .* states 128 positions"
    with pytest.raises(ExportError, match=expected):
        export_plan(plan, model, engine)
    with pytest.raises(InputError, match=f"`engine={engine}`: .* {expected}"):
        ask(model, engine)


def test_the_longest_context_is_one_that_the_engine_serves(tmp_path: Path) -> None:
    """YaRN stretches the positions, but engines serve no more than those that are stated."""
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    model = open_tiny(tmp_path, max_position_embeddings=512, rope_parameters=rope)
    assert find_longest_context(ask(model, "vllm")) == 512
    assert find_longest_context(ask(model, None)) == 2048


def test_a_type_that_vllm_does_not_compute_in(tmp_path: Path) -> None:
    config = {"architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2"}
    model = open_tiny(tmp_path, **config, dtype="float16")
    plan = plan_it(model, None)
    with pytest.raises(ExportError, match="does not compute gemma2 in float16"):
        export_plan(plan, model, "vllm")
    with pytest.raises(InputError, match="does not compute gemma2 in float16"):
        ask(model, "vllm")
    assert export_plan(plan, model, "sglang").serve["dtype"] == ("float16",)


def test_what_engines_start_with_is_served(tmp_path: Path) -> None:
    model = open_tiny(tmp_path, max_position_embeddings=256, dtype="float16")
    for engine in ("vllm", "sglang"):
        assert export_plan(plan_it(model, engine), model, engine).options
