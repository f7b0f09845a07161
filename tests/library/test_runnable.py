"""Whether a model can be run is known from its headers and config, before anything is fetched."""

import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from transformers import AutoModelForCausalLM

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.cli.output import JSON_VERSION
from offplan.errors import CheckpointError, MemoryLimitError, OffplanError
from offplan.held import stock
from offplan.held.held import hold
from offplan.held.stage import Stage
from offplan.held.stock import find_passes
from offplan.hostmem import limits
from offplan.library import runnable
from offplan.library.runnable import check_before_fetching, find_obstacle, why_not_run
from offplan.plan import Goal
from offplan.runtime.loading.prepared import fit, shorten
from offplan.runtime.refusal import refuse_config
from tests.checkpoint.quantised import FORMATS, write_quantised
from tests.cli import CLI, ROOT, TINY_MOE
from tests.engines.configs import STORED_CODES
from tests.held import open_stage
from tests.runtime.families import PROMPT, make_config
from tests.runtime.plans import group, offload, open_session
from tests.runtime.predicting import predicting, save_predicting
from tests.tiers import first_quick

CPU = torch.device("cpu")


@pytest.fixture
def both_ways(copy: Path) -> Path:
    """A checkpoint whose config asks for attention to tokens behind each one's own."""
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"is_causal": False}))
    return copy


def test_what_runs_and_what_does_not(both_ways: Path) -> None:
    assert find_obstacle(open_stage(TINY_MOE)) is None
    assert "tokens behind its own" in (find_obstacle(open_stage(both_ways)) or "")


def test_a_config_without_a_padding_token(tmp_path: Path) -> None:
    """As CodeGen's: a class of transformers need not have the attribute."""
    sizes = {"n_embd": 32, "n_head": 4, "n_layer": 1, "n_positions": 64, "rotary_dim": 8}
    config = {"model_type": "codegen", "vocab_size": 8, "tie_word_embeddings": False, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    stage = hold(open_model(str(tmp_path / "config.json")))
    assert find_obstacle(stage) is None


def test_passes_that_fail_are_not_planned_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformers' class of Step-3.7 leaves out what its published config has beside parts."""
    asked = []

    def fail(model: Model, here: object) -> None:
        asked.append(model)
        raise CheckpointError("fails without weights")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        runnable, "why_not_run", lambda stage, _: "no" if stage.way.is_own else None
    )
    monkeypatch.setattr(stock, "find_passes", fail)
    assert runnable.suit(Goal(), open_model(str(TINY_MOE)), 64) == Goal()
    assert asked


def test_a_refusal_to_count_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path))
    model, asked = open_model(str(TINY_MOE)), []

    def count(model: Model) -> str:
        asked.append(model.source)
        return f"{model.source}: fails without weights"

    for each in (model, model, replace(model, source="other"), replace(model, code="c" * 64)):
        with pytest.raises(CheckpointError, match=f"^{each.source}: fails without weights"):
            find_passes(each, count)
    assert asked == [model.source, "other", model.source]
    monkeypatch.setattr(stock, "installed_packages", lambda: ["one more"])
    with pytest.raises(CheckpointError):
        find_passes(model, count)
    assert len(asked) == 4


@pytest.mark.slow
def test_what_a_gpu_runs_is_told_where_no_kernel_can_be_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans for a GPU are made on laptops, too, whose torch comes without triton."""
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    stage = hold(open_model(str(ROOT / "tests" / "models" / "deepseek-v2-lite" / "config.json")))
    rule = group(2, 1, "experts", decode="uva").model_copy(update={"cached_experts": 4})
    assert runnable._ask_process(stage, offload(rule), True) is None


def test_headers_that_no_parameter_takes(both_ways: Path) -> None:
    config = json.loads((TINY_MOE / "config.json").read_text())
    (both_ways / "config.json").write_text(json.dumps(config | {"n_shared_experts": 2}))
    assert "belongs to another" in (find_obstacle(open_stage(both_ways)) or "")


def test_one_layer_of_each_kind_is_built(both_ways: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All are where a rule takes layers by their number, and where a reason is told."""
    built: list[int] = []

    def note(stage: Stage, *asked: Any, **others: Any) -> Any:
        built.append(len(stage.layers))
        return fit(stage, *asked, **others)

    monkeypatch.setattr("offplan.runtime.loading.prepared.fit", note)
    assert find_obstacle(open_stage(TINY_MOE)) is None
    assert find_obstacle(open_stage(TINY_MOE), offload(group(6, 1))) is None
    assert find_obstacle(open_stage(both_ways)) is not None
    assert built == [2, 6, 2, 6]


@pytest.mark.slow
def test_prediction_layers_are_found_beside_layers_that_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of layers that are alike one is built; those that predict are found behind the last."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    stage = open_stage(save_predicting("glm4_moe", tmp_path / "model"))
    assert len(shorten(stage).layers) < len(stage.layers)
    assert why_not_run(stage, offload=predicting(offload())) is None
    why = why_not_run(open_stage(TINY_MOE), offload=predicting(offload()))
    assert "stores no layers that predict" in (why or "")


@pytest.mark.parametrize(
    ("family", "changes", "said"),
    first_quick(
        [
            ("qwen3_moe", {"num_experts_per_tok": 5}, "k not in range"),
            ("deepseek_v3", {"n_group": 3}, "is invalid for input of size"),
            ("deepseek_v3", {"n_group": 0}, "ZeroDivisionError"),
            ("deepseek_v3", {"topk_group": None}, "must be int, not NoneType"),
            ("gemma3_text", {"query_pre_attn_scalar": -1}, "must be float, not complex"),
        ]
    ),
)
def test_a_config_that_no_pass_survives(
    family: str, changes: dict[str, object], said: str, tmp_path: Path
) -> None:
    _save_changed(family, changes, tmp_path)
    obstacle = find_obstacle(open_stage(tmp_path)) or ""
    assert "correct config.json if it contradicts itself" in obstacle
    assert said in obstacle
    with pytest.raises(CheckpointError, match=re.escape(said)):
        open_session(tmp_path, offload())


def test_a_package_that_a_pass_needs_is_no_fault_of_the_config() -> None:
    error = ModuleNotFoundError("No module named 'fla'", name="fla")
    why = str(refuse_config(object(), error))
    assert "it needs the package fla, which is not installed" in why
    assert "config" not in why


def test_buffers_that_cannot_be_computed(tmp_path: Path) -> None:
    _save_changed("deepseek_v3", {"initializer_range": -1.0}, tmp_path)
    with pytest.raises(CheckpointError, match="expects std >= 0"):
        open_session(tmp_path, offload())


@pytest.mark.parametrize("changes", [{"output_router_logits": True}, {"return_dict": False}])
def test_a_config_that_asks_for_more_than_logits(
    changes: dict[str, object], tmp_path: Path
) -> None:
    _save_changed("gpt_oss", changes, tmp_path)
    with open_session(tmp_path, offload()) as session, session.stream():
        session.prefill(PROMPT)


def _save_changed(family: str, changes: dict[str, object], folder: Path) -> None:
    """Save a tiny model of a family, and a config that says something else than its own."""
    AutoModelForCausalLM.from_config(make_config(family, {})).save_pretrained(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_what_keeps_a_model_from_running_is_kept_until_packages_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    model = open_model(str(TINY_MOE))

    def ask(answer: str | None) -> str | None:
        monkeypatch.setattr(runnable, "find_obstacle", lambda *_: answer)
        return why_not_run(hold(model))

    assert ask("a package is missing") == "a package is missing"
    assert ask("never asked") == "a package is missing"
    monkeypatch.setattr(runnable, "installed_packages", lambda: [])
    assert ask(None) is None
    assert ask("never asked") is None


def test_that_it_could_not_be_told_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path / "home"))
    model = open_model(str(TINY_MOE))

    def fail(*_: object) -> str | None:
        raise OSError("it was busy")

    monkeypatch.setattr(runnable, "find_obstacle", fail)
    assert "could not be told" in (why_not_run(hold(model)) or "")
    monkeypatch.setattr(runnable, "find_obstacle", lambda *_: None)
    assert why_not_run(hold(model)) is None


@pytest.mark.slow
def test_a_process_of_its_own_says_the_same(both_ways: Path) -> None:
    stage = open_stage(both_ways)
    assert runnable._ask_process(stage, offload(), False) == find_obstacle(stage)


@pytest.mark.slow
def test_a_process_is_asked_of_a_quantised_model_that_was_planned(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(STORED_CODES))
    stage = open_stage(path)
    assert stage.model.architecture.quantisation is not None  # it holds a function from now on
    assert runnable._ask_process(stage, offload(), False) == find_obstacle(stage)


def test_nothing_is_fetched_for_a_model_that_cannot_run(both_ways: Path) -> None:
    model = open_model(str(both_ways), name="on/the-hub")
    with pytest.raises(CheckpointError, match="tokens behind its own"):
        check_before_fetching(model, offload(), 1, CPU)
    check_before_fetching(open_model(str(both_ways)), offload(), 1, CPU)  # loading says so itself


@pytest.mark.slow
def test_long_texts_that_sparse_attention_leaves_tokens_of(tmp_path: Path) -> None:
    _save_changed("deepseek_v32", {"index_topk": 8}, tmp_path)
    model, told = open_model(str(tmp_path), name="on/the-hub"), "texts of more than 8 tokens"
    assert why_not_run(hold(model), context=8) is None
    assert told in (why_not_run(hold(model), context=9) or "")
    check_before_fetching(model, offload(), 8, CPU)
    with pytest.raises(CheckpointError, match=told):
        check_before_fetching(model, offload(), 9, CPU)


def test_nothing_is_fetched_for_a_host_without_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "host_room", lambda *_: iter([(2**10, "this machine")]))
    model = open_model(str(TINY_MOE), name="on/the-hub")
    with pytest.raises(MemoryLimitError, match="this machine has 1 KiB left"):
        check_before_fetching(model, offload(), 1, CPU)


def test_nothing_is_fetched_without_a_gpus_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    model = open_model(str(TINY_MOE), name="on/the-hub")
    with pytest.raises(OffplanError, match="pip install triton"):
        check_before_fetching(model, offload(), 1, torch.device("cuda"))


def test_the_commands_say_so(cli: CLI, both_ways: Path) -> None:
    code, out, _ = cli("analyze", both_ways, "--machine", "cpu", "--json")
    answer = json.loads(out)
    assert (code, answer["offplan"]) == (0, JSON_VERSION)
    assert answer["run"]["can_execute"] is False
    assert "tokens behind its own" in answer["run"]["why_not"]
    code, out, err = cli("plan", both_ways, "--machine", "cpu", "--context", 1024)
    assert (code, out.splitlines()[0]) == (0, "offplan: 1")
    assert "Plans only: " in err


@pytest.mark.parametrize("name", first_quick(FORMATS))
def test_codes_that_no_config_explains_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_quantised(tmp_path, FORMATS[name]._replace(config=None))
    assert find_obstacle(open_stage(folder)) is not None
