"""Weights that do not pack: found by a sample or by loading, held as stored or planned around."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from offplan.checkpoint.open import open_model
from offplan.errors import UnpackableError
from offplan.forms.form import Component
from offplan.held.held import hold
from offplan.held.packing import pack_everything
from offplan.library.analysis import Analysis
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.library.repricing import price_on
from offplan.library.sessions import open_session
from offplan.library.settled import leave_as_stored
from offplan.packing_sample import _count_patches, take_sample
from offplan.plan import Plan, Rule, Workload, dump_plan, load_plan
from offplan.planner.make import make_plan
from offplan.report.answer import describe_answer
from offplan.runtime.forms.packing import pack
from tests.cli import CLI
from tests.held import is_packed

PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8]])
Q = "model.layers.1.self_attn.q_proj.weight"
DOWN = "model.layers.2.mlp.experts.3.down_proj.weight"
HEAD = "lm_head.weight"
STREAMED = {"group_size": 1, "num_in_group": 1, "prefill": "prefetch", "decode": "prefetch"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_experts=4,
        num_experts_per_tok=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=16,
        vocab_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=False,
    )
    made = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    made.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, name: str, spoil: Callable[[torch.Tensor], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    spoil(tensors[name])
    save_file(tensors, path, {"format": "pt"})


def spread(weight: torch.Tensor) -> None:
    """Columns beside which all others are small."""
    weight[:, ::2] *= 1e-9


def hide(weight: torch.Tensor) -> None:
    """Two rows that no sample reads, of more patches than the matrix has room for."""
    weight[10:12, 1:] *= 1e-9


def plan_for(folder: Path, *rules: object, gpu_memory: int = 2**31) -> Plan:
    """A plan that packs all it can."""
    model, machine = open_model(str(folder)), load_machine("h200-pcie5")
    workload = Workload(prompt_tokens=8, output_tokens=8, context=32)
    plan = make_plan(ask(model, machine, workload, gpu_memory=gpu_memory)).plan
    update = {
        "packing": pack_everything(model),
        "rules": tuple(map(Rule.model_validate, rules)),
    }
    changed = plan.model_copy(update={"offload": plan.offload.model_copy(update=update)})
    return price_on(changed, model, machine.profile)


def logits_of(plan: Plan) -> torch.Tensor:
    with open_session(plan, device="cpu") as session, session.stream():
        return session.prefill(PROMPT).clone()


def test_a_sample_finds_what_loading_would(folder: Path) -> None:
    model = open_model(str(folder))
    packing = pack_everything(model)
    assert packing.output_head
    assert take_sample(model, packing).unpackable == ()
    assert take_sample(model, None).unpackable == ()
    for name in (Q, DOWN, HEAD):
        change(folder, name, spread)
    # of the experts two are looked at, of which this is none
    assert take_sample(model, packing).unpackable == ("1.self_attn.q_proj", "output_head")
    change(folder, DOWN.replace("3.down", "2.down"), spread)
    expected = ("1.self_attn.q_proj", "2.mlp.experts.down_proj", "output_head")
    assert take_sample(model, packing).unpackable == expected
    for layer in range(3):
        change(folder, Q.replace("1.self", f"{layer}.self"), spread)
    assert "self_attn.q_proj" in take_sample(model, packing).unpackable


@pytest.mark.parametrize("num_in", [512, 1000])
def test_a_sample_counts_as_packing_does(num_in: int) -> None:
    values = torch.randn(64, num_in).pow(19).bfloat16()
    values[3, 5], values[4, 6], values[5, :9] = torch.nan, 1e30, 1e-40
    ends = pack(values, reserve=values.numel())[Component.PATCH_BLOCKS]
    bits = values.view(torch.uint16).numpy()
    assert _count_patches(bits) == int(ends[-1, 1])


@pytest.mark.slow
@pytest.mark.parametrize("name", [Q, DOWN, HEAD])
def test_resident_weights_are_held_as_stored(folder: Path, name: str) -> None:
    change(folder, name, hide)
    plan = plan_for(folder)
    unpacked = plan.model_copy(
        update={"offload": plan.offload.model_copy(update={"packing": None})}
    )
    assert torch.equal(logits_of(plan), logits_of(unpacked))
    with open_session(plan, device="cpu") as session:
        held = [p for p in session.loaded.stage.parameters if not is_packed(p)]
        assert any(name in {t.name for t in p.tensors} for p in held)
        assert any(map(is_packed, session.loaded.stage.parameters))


def test_what_the_budget_has_no_room_for(folder: Path) -> None:
    change(folder, Q, hide)
    plan = plan_for(folder)
    tight = plan.budget.model_copy(update={"gpu_memory": 2**20})
    small = plan.model_copy(update={"budget": tight})
    model = open_model(str(folder))
    assert leave_as_stored(small, model, ("1.self_attn.q_proj",)) is None
    kept = leave_as_stored(plan, model, ("1.self_attn.q_proj",))
    assert kept is not None
    assert kept.goal.leave_unpacked == ("1.self_attn.q_proj",)
    resident = [
        sum(p.nbytes for p in hold(model, each.offload.packing).parameters) for each in (plan, kept)
    ]
    grown = [each.prediction.gpu_memory.resident_bytes for each in (plan, kept)]
    assert abs((grown[1] - grown[0]) - (resident[1] - resident[0])) < 4096


@pytest.mark.slow
def test_streamed_weights_end_opening_by_name(folder: Path) -> None:
    change(folder, Q, hide)
    change(folder, DOWN, hide)
    plan = plan_for(folder, STREAMED)
    names = "1.self_attn.q_proj,2.mlp.experts.down_proj"
    with pytest.raises(UnpackableError, match=rf"and 1 other|leave_unpacked={names}") as caught:
        open_session(plan, device="cpu")
    assert caught.value.names == tuple(names.split(","))


@pytest.mark.slow
@pytest.mark.parametrize(("command", "spoil"), [("run", spread), ("run", hide), ("bench", spread)])
def test_commands_plan_again(
    cli: CLI, folder: Path, tmp_path: Path, command: str, spoil: Callable[[torch.Tensor], object]
) -> None:
    change(folder, Q, spoil)
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan_for(folder, STREAMED)))
    code, out, err = cli(command, path, "--device", "cpu", "--json")
    assert code == 0, err
    assert "1.self_attn.q_proj cannot be held packed (more patches than room): planned again" in err
    assert json.loads(out)["left_unpacked"] == ["1.self_attn.q_proj"]
    path.write_text(dump_plan(plan_for(folder)))
    code, out, err = cli(command, path, "--device", "cpu", "--json")
    assert code == 0, err
    assert "held as stored, for which the plan has room; its GPU memory is" in err
    assert json.loads(out)["left_unpacked"] == ["1.self_attn.q_proj"]


@pytest.mark.slow
def test_replan_leaves_what_is_named(cli: CLI, folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(dump_plan(plan_for(folder)))
    code, out, err = cli("replan", path, "--leave-unpacked", "1, 2.self_attn")
    assert code == 0, err
    (tmp_path / "made.yaml").write_text(out)
    made = load_plan(tmp_path / "made.yaml")
    assert made.goal.leave_unpacked == ("1", "2.self_attn")
    code, _, err = cli("replan", path, "--leave-unpacked", "9")
    assert (code, "offplan: --leave-unpacked 9: no matrix of" in err) == (2, True)
    code, out, _ = cli("replan", tmp_path / "made.yaml")
    assert out == (tmp_path / "made.yaml").read_text()


def test_analyze_says_what_a_sample_shows(folder: Path) -> None:
    change(folder, Q, spread)
    plan, model = plan_for(folder), open_model(str(folder))
    question = ask(model, load_machine("h200-pcie5"), plan.workload, gpu_memory=2**31)
    result = replace(make_plan(question), plan=plan)
    analysis = Analysis(question.stage, None, question, result)
    assert analysis.sample.unpackable == ("1.self_attn.q_proj",)
    lines = describe_answer(analysis, plan, question)
    assert [line for line in lines if "--leave-unpacked 1.self_attn.q_proj plans" in line]
    none = Analysis(question.stage, None, question, make_plan(question))  # which packs nothing
    assert none.sample.unpackable == ()
