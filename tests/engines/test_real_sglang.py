"""What is exported, held against the real SGLang: ``pytest -m engines`` where it is installed."""

import argparse
import ast
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offplan.checkpoint.open import open_model
from offplan.costs.engine_times import build_engine_pass
from offplan.engines.engine import format_version
from offplan.engines.export import Export, export_plan, render_export
from offplan.engines.ranks import split_layers
from offplan.engines.registry import ENGINES
from offplan.engines.runner import find_runner
from offplan.engines.sglang import PREFETCHING_CLASSES
from offplan.engines.startup import SGLANG_FLAGS
from offplan.held.held import hold_whole
from offplan.placement import Phase, place
from offplan.plan import Backend, Goal, Offload, Rule
from offplan.schedule import Copy
from tests.costs.builders import dense_model
from tests.engines.builders import deepseek, make_plan, prefetch, qwen3, up_to

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("sglang") is None, reason="needs the package sglang"),
]
ROOT = Path(__file__).parent.parent.parent
EXPORTS = [
    (make_plan(prefetch("experts")), deepseek()),
    (make_plan(up_to("7GiB")), qwen3()),
    (make_plan(), qwen3()),
]


@pytest.fixture
def parser() -> argparse.ArgumentParser:
    from sglang.srt.server_args import ServerArgs

    made = argparse.ArgumentParser()
    ServerArgs.add_cli_args(made)
    return made


def test_the_version_is_the_one_that_exports_are_held_against() -> None:
    assert version("sglang") == format_version(ENGINES["sglang"].newest)


def test_a_server_says_the_options_that_are_compared(parser: argparse.ArgumentParser) -> None:
    assert set(SGLANG_FLAGS) <= set(vars(parser.parse_args(["--model-path", "test/model"])))


@pytest.mark.parametrize(("plan", "model"), EXPORTS)
def test_sglang_reads_the_command(
    parser: argparse.ArgumentParser, plan: Any, model: Any, tmp_path: Path
) -> None:
    from sglang.srt.utils.server_args_config_parser import ConfigArgumentMerger

    export = export_plan(plan, model, "sglang", gpu_bytes=2**31)
    read = parser.parse_args(export.command[3:])
    assert read.model_path == "test/model"
    for name, values in export.options.items():
        found = getattr(read, name.replace("-", "_"))
        assert found == (type(found)(values[0]) if values else True)
    assert read.offload_mode == "cpu"
    merger = ConfigArgumentMerger(parser)
    assert parser.parse_args(merger.merge_config_with_args(config(export, tmp_path))) == read


def test_sglang_reads_the_ranks(parser: argparse.ArgumentParser) -> None:
    model = open_model(str(ROOT / "tests" / "models" / "deepseek-v2-lite" / "config.json"))
    goal = Goal(engine="sglang", tensor_parallel=4, pipeline_parallel=2, expert_parallel=2)
    plan = make_plan().model_copy(update={"goal": goal})
    read = parser.parse_args(export_plan(plan, model, "sglang").command[3:])
    assert (read.tp_size, read.pp_size, read.ep_size) == (4, 2, 2)


@pytest.mark.parametrize(("num_layers", "num_stages"), [(5, 2), (5, 3), (36, 4), (61, 8)])
def test_layers_of_stages(num_layers: int, num_stages: int) -> None:
    from sglang.srt.distributed.utils import get_pp_indices

    ends = [get_pp_indices(num_layers, number, num_stages) for number in range(num_stages)]
    assert split_layers(num_layers, num_stages, "sglang") == [end - start for start, end in ends]


@pytest.mark.parametrize(("num_layers", "num_slots"), [(2, 1), (4, 1), (4, 2), (6, 3), (7, 5)])
def test_copies_are_those_that_are_priced(num_layers: int, num_slots: int) -> None:
    """In order, but for those that a step begins with."""
    from tests.engines.real_sglang import copied_layers

    step = max(1, num_slots - 1)
    stage = hold_whole(dense_model(num_layers), find_runner("sglang"))
    rule = Rule(group_size=1, num_in_group=1, prefill=Backend.PREFETCH, decode=Backend.PREFETCH)
    placement = place(stage, Offload(prefetch_step=num_slots, prefill_chunk=1, rules=(rule,)))
    runtime = stage.pass_rules
    assert runtime is not None
    prompt, decode = (
        [op.span.layer for op in each.operations if isinstance(op, Copy)]
        for each in (build_engine_pass(runtime, placement, num_layers, way) for way in Phase)
    )
    eager, captured = copied_layers(num_layers, step)
    assert prompt == eager == [(turn + step) % num_layers for turn in range(num_layers)]
    assert len(captured) == num_layers + step
    assert sorted(decode) == sorted(captured)


def test_a_captured_step_copies_its_first_layer_before_and_after() -> None:
    from tests.engines.real_sglang import copied_layers

    assert copied_layers(4, 1)[1] == [0, 1, 2, 3, 0]


def config(export: Export, folder: Path) -> list[str]:
    path = folder / "serve.yaml"
    path.write_text(render_export(export, "yaml"))
    return ["--config", str(path)]


def test_classes_that_say_what_to_move() -> None:
    """They are DeepSeek-V2's own, made of it, or hold it."""
    found = find_spec("sglang")
    assert found is not None
    assert found.submodule_search_locations is not None
    models = Path(found.submodule_search_locations[0]) / "srt" / "models"
    told = {}
    for path in models.glob("*.py"):
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                told[node.name] = ast.unparse(node)
    assert "offloader_kwargs" in told["DeepseekV2Model"]
    assert "DeepseekV2Model(" in told["DeepseekV2ForCausalLM"]
    for name in set(PREFETCHING_CLASSES) - {"DeepseekV2ForCausalLM"}:
        assert "DeepseekV2ForCausalLM" in told[name] or "DeepseekV3ForCausalLM" in told[name]
