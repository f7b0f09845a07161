"""What one rank holds of a model that an engine divides among GPUs."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offplan.capabilities.ranks import Ranks
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan
from offplan.engines.ranks import split_layers
from offplan.engines.runner import find_runner, lower
from offplan.errors import ExportError, InputError
from offplan.held.held import find_largest, hold_whole
from offplan.held.stage import Stage
from offplan.library.asking import pose
from offplan.plan import Budget, Goal, Workload
from offplan.planner.make import make_plan
from tests.costs.builders import make_machine
from tests.engines.builders import make_plan as write_plan
from tests.engines.builders import prefetch, uva
from tests.engines.configs import (
    BLOCKS,
    DENSE,
    HYBRID,
    LATENT,
    MOE,
    NVFP4,
    STORED_CODES,
    W4A16,
    WITH_TOWER,
)

MODELS = Path(__file__).parent.parent / "models"
GIB = 2**30
SHORT = Workload(prompt_tokens=32, output_tokens=16, context=64)


def read(folder: Path, config: Mapping[str, Any]) -> Model:
    path = folder / "config.json"
    path.write_text(json.dumps(config))
    return open_model(str(path))


def divide(model: Model, engine: str = "vllm", **ranks: int) -> tuple[Stage, ...]:
    return lower(model, Goal.model_validate({"engine": engine, **ranks}))


def hold(model: Model, engine: str = "vllm", **ranks: int) -> Stage:
    """What a rank of the stage that is planned for holds."""
    return find_largest(divide(model, engine, **ranks), SHORT)


def shapes(model: Model | Stage) -> dict[str, tuple[int, ...]]:
    """Those of the last layer, by the names that are the same in all; of experts their number."""
    return {
        p.name: (len(p.tensors), *p.shape) if p.is_expert and not p.is_fused else p.shape
        for p in model.layers[-1].parameters
    }


def differing(held: Stage, whole: Model) -> dict[str, tuple[int, ...]]:
    before, after = shapes(whole), shapes(held)
    assert before.keys() == after.keys()
    return {name: shape for name, shape in after.items() if shape != before[name]}


DENSE_MLP = {
    "mlp.gate_proj.weight": (48, 64),
    "mlp.up_proj.weight": (48, 64),
    "mlp.down_proj.weight": (64, 48),
}


def test_columns_and_rows_are_divided_and_norms_are_not(tmp_path: Path) -> None:
    whole = read(tmp_path, DENSE)
    held = hold(whole, tensor_parallel=2)
    assert differing(held, whole) == {
        **DENSE_MLP,
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.o_proj.weight": (64, 64),
    }
    heads = held.architecture.attention
    assert (heads.num_heads, heads.num_kv_heads, heads.head_dim) == (8, 4, 8)
    assert held.layers[0].kv_cache.bytes_per_token == 2 * 4 * 8 * 2
    # 100 rows are padded to 128
    assert {p.name: p.shape for p in held.outside} == {
        "lm_head.weight": (64, 64),
        "model.embed_tokens.weight": (64, 64),
        "model.norm.weight": (64,),
    }
    assert held.model is whole


def test_heads_of_keys_and_values_are_repeated_beyond_their_number(tmp_path: Path) -> None:
    whole = read(tmp_path, DENSE)
    held = hold(whole, tensor_parallel=16)
    assert shapes(held)["self_attn.q_proj.weight"] == (8, 64)
    assert shapes(held)["self_attn.k_proj.weight"] == (8, 64)
    assert held.layers[0].kv_cache.bytes_per_token == 2 * 8 * 2
    assert held.architecture.attention.num_kv_heads == 1


@pytest.mark.parametrize(
    ("engine", "ranks", "experts"),
    [
        ("vllm", {"tensor_parallel": 4}, (8, 8, 64)),
        ("vllm", {"tensor_parallel": 4, "expert_parallel": 4}, (2, 32, 64)),
        ("sglang", {"tensor_parallel": 4, "expert_parallel": 2}, (4, 16, 64)),
    ],
)
def test_experts_are_divided_inside_or_by_number(
    engine: str, ranks: dict[str, int], experts: tuple[int, ...], tmp_path: Path
) -> None:
    whole = read(tmp_path, MOE)
    held = hold(whole, engine, **ranks)
    assert shapes(held)["mlp.experts.gate_proj.weight"] == experts
    assert shapes(held)["mlp.experts.down_proj.weight"] == (experts[0], 64, experts[1])
    assert shapes(held)["mlp.gate.weight"] == (8, 64)
    assert held.experts is not None
    assert whole.experts is not None
    assert held.experts.num_in_all == 8
    assert held.experts.bytes_per_expert == 3 * experts[1] * 64 * 2
    share = held.experts.num_experts / 8
    assert held.experts.touched(3) == pytest.approx(share * whole.experts.touched(3))


def test_latents_are_whole_and_heads_are_divided(tmp_path: Path) -> None:
    whole = read(tmp_path, LATENT)
    held = hold(whole, tensor_parallel=4)
    assert differing(held, whole) == {
        "self_attn.q_b_proj.weight": (4 * 12, 16),
        "self_attn.kv_b_proj.weight": (4 * 16, 32),
        "self_attn.o_proj.weight": (64, 4 * 8),
        "mlp.shared_experts.gate_proj.weight": (8, 64),
        "mlp.shared_experts.up_proj.weight": (8, 64),
        "mlp.shared_experts.down_proj.weight": (64, 8),
        "mlp.experts.gate_proj.weight": (8, 8, 64),
        "mlp.experts.up_proj.weight": (8, 8, 64),
        "mlp.experts.down_proj.weight": (8, 64, 8),
    }
    assert held.layers[0].kv_cache == whole.layers[0].kv_cache
    assert 4 * held.derived_bytes == hold_whole(whole, find_runner("vllm")).derived_bytes


def test_codes_are_divided_with_their_scales(tmp_path: Path) -> None:
    whole = read(tmp_path, STORED_CODES)
    held = hold(whole, tensor_parallel=2)
    assert differing(held, whole) == {
        "mlp.experts.gate_up_proj": (4, 128, 64),
        "mlp.experts.gate_up_proj_bias": (4, 128),
        "mlp.experts.down_proj": (4, 64, 64),
        "self_attn.q_proj.weight": (64, 64),
        "self_attn.q_proj.bias": (64,),
        "self_attn.k_proj.weight": (32, 64),
        "self_attn.k_proj.bias": (32,),
        "self_attn.v_proj.weight": (32, 64),
        "self_attn.v_proj.bias": (32,),
        "self_attn.o_proj.weight": (64, 64),
        "self_attn.sinks": (8,),
    }
    down = next(p for p in held.layers[0].parameters if p.name == "mlp.experts.down_proj")
    assert [tensor.shape for tensor in down.stored] == [(4, 64, 2, 16), (4, 64, 2)]
    blocks = hold(read(tmp_path, BLOCKS), tensor_parallel=2)
    found = {p.name: [t.shape for t in p.stored] for p in blocks.layers[0].parameters}
    assert found["mlp.down_proj.weight"] == [(256, 256), (2, 2)]
    assert found["mlp.gate_proj.weight"] == [(256, 256), (2, 2)]


@pytest.mark.parametrize(
    ("quantisation", "parts"),
    [
        (NVFP4, [(256, 128), (256, 16), (), ()]),
        (W4A16, [(256, 32), (2,), (256, 8), (32, 8)]),
    ],
)
def test_inputs_of_codes_are_divided_with_their_groups(
    quantisation: Mapping[str, Any], parts: list[tuple[int, ...]], tmp_path: Path
) -> None:
    config = {**DENSE, "hidden_size": 256, "intermediate_size": 512, "head_dim": 32}
    held = hold(read(tmp_path, {**config, "quantization_config": quantisation}), tensor_parallel=2)
    down = next(p for p in held.layers[0].parameters if p.name == "mlp.down_proj.weight")
    assert sorted(tensor.shape for tensor in down.stored) == sorted(parts)


def test_ranks_have_whole_blocks_of_codes_the_first_ones_more(tmp_path: Path) -> None:
    """gpt-oss has 90 blocks; here are 7, of which four ranks have 2, 2, 2 and 1."""
    held = hold(read(tmp_path, {**STORED_CODES, "intermediate_size": 224}), tensor_parallel=4)
    found = {p.name: [t.shape for t in p.stored] for p in held.layers[0].parameters}
    assert found["mlp.experts.gate_up_proj"] == [(4, 128, 2, 16), (4, 128, 2)]
    assert found["mlp.experts.gate_up_proj_bias"] == [(4, 128)]
    assert found["mlp.experts.down_proj"] == [(4, 64, 2, 16), (4, 64, 2)]
    assert found["mlp.experts.down_proj_bias"] == [(4, 64)]


@pytest.mark.parametrize(
    ("engine", "num_layers", "num_stages", "counts"),
    [
        ("vllm", 5, 2, [3, 2]),
        ("vllm", 5, 3, [2, 2, 1]),
        ("vllm", 62, 4, [15, 16, 16, 15]),
        ("sglang", 5, 2, [2, 3]),
        ("sglang", 62, 4, [15, 15, 16, 16]),
    ],
)
def test_layers_of_stages(engine: str, num_layers: int, num_stages: int, counts: list[int]) -> None:
    """Source: ``get_pp_indices`` of both."""
    assert split_layers(num_layers, num_stages, engine) == counts


def test_stages_count_their_layers_anew(tmp_path: Path) -> None:
    stages = divide(read(tmp_path, DENSE), pipeline_parallel=2)
    first, last = stages
    assert [[layer.index for layer in stage.layers] for stage in (first, last)] == [
        [0, 1, 2],
        [0, 1],
    ]
    assert last.layers[0].prefix == "model.layers.3"
    assert [p.name for p in first.outside] == ["model.embed_tokens.weight"]
    assert [p.name for p in last.outside] == ["lm_head.weight", "model.norm.weight"]
    assert (first.head, last.head is not None) == (None, True)
    assert find_largest(stages, SHORT) is first  # the one of three layers


def test_all_ranks_lock_memory(tmp_path: Path) -> None:
    whole = read(tmp_path, DENSE)
    stages, plan = divide(whole, tensor_parallel=2), write_plan(prefetch("mlp"), prefetch_step=1)
    said = find_runner("vllm").demand(plan.offload, stages)
    assert {each.layer for each in said.moved} == {1, 3}
    assert said.pinned_bytes == 2 * 2 * (16384 + 8192)  # gate_up of 12 KiB, down of 6
    limits = {
        "goal": Goal(engine="vllm", tensor_parallel=2),
        "budget": Budget(gpu_memory=GIB, host_memory=90000),
    }
    with pytest.raises(ExportError, match="page-locks 96 KiB"):
        export_plan(plan.model_copy(update=limits), whole, "vllm")


def test_stages_with_other_flags_are_refused(tmp_path: Path) -> None:
    stages = divide(read(tmp_path, DENSE), pipeline_parallel=2)
    plan = write_plan(uva("self_attn"))
    with pytest.raises(ExportError, match="all stages of a pipeline the same flags"):
        find_runner("vllm").demand(plan.offload, stages)


@pytest.mark.parametrize(
    ("config", "ranks", "why"),
    [
        (DENSE, {"tensor_parallel": 3}, "--tp 3: how 16 heads"),
        ({**DENSE, "num_key_value_heads": 6}, {"tensor_parallel": 4}, "how 6 heads of keys"),
        ({**DENSE, "intermediate_size": 97}, {"tensor_parallel": 2}, "how 97 of mlp.down_proj"),
        (BLOCKS, {"tensor_parallel": 4}, "how 256 in blocks of 128 of "),
        (
            {**STORED_CODES, "num_key_value_heads": 2},
            {"tensor_parallel": 4},
            "GptOssForCausalLM with 2 heads",
        ),
        (STORED_CODES, {"tensor_parallel": 8}, "how 128 in blocks of 32 of mlp.experts.down_proj"),
        (DENSE, {"tensor_parallel": 2, "expert_parallel": 2}, "has no routed experts"),
        (MOE, {"tensor_parallel": 4, "expert_parallel": 2}, "all ranks of a stage or none"),
        ({**MOE, "num_experts": 9}, {"tensor_parallel": 2, "expert_parallel": 2}, "the 9 experts"),
        (DENSE, {"pipeline_parallel": 6}, "has 5 layers, fewer than stages"),
        (
            {**DENSE, "architectures": ["FalconForCausalLM"]},
            {"tensor_parallel": 2},
            "how FalconForCausalLM is divided among ranks is not known",
        ),
        (HYBRID, {"tensor_parallel": 8}, "how 4 and 8 heads of linear attention"),
    ],
)
def test_what_ranks_cannot_divide(
    config: Mapping[str, Any], ranks: dict[str, Any], why: str, tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=why):
        hold(read(tmp_path, config), **ranks)


def test_heads_of_linear_attention_are_divided_with_their_state(tmp_path: Path) -> None:
    whole = read(tmp_path, HYBRID)
    held = hold(whole, tensor_parallel=2)
    before, after = (of.layers[0] for of in (whole, held))
    assert before.kv_cache.state_bytes == 2 * after.kv_cache.state_bytes > 0
    sizes = {p.name: p.shape for p in after.parameters}
    assert sizes["linear_attn.conv1d.weight"] == (64, 1, 4)
    assert sizes["linear_attn.out_proj.weight"] == (64, 32)
    assert sizes["linear_attn.A_log"] == (4,)
    assert sizes["linear_attn.norm.weight"] == (8,)
    linear = held.architecture.linear
    assert linear is not None
    assert (linear.num_key_heads, linear.num_value_heads) == (2, 4)


def test_what_reads_images_is_divided_by_its_heads(tmp_path: Path) -> None:
    whole = read(tmp_path, WITH_TOWER)
    held, alone = hold(whole, tensor_parallel=2), hold_whole(whole, find_runner("vllm"))
    sizes = {p.name: p.shape for p in held.outside}
    block = "model.visual.blocks.0"
    assert sizes[f"{block}.attn.qkv.weight"] == (24, 16)
    assert sizes[f"{block}.attn.proj.weight"] == (16, 8)
    assert sizes[f"{block}.mlp.linear_fc2.bias"] == (16,)
    assert {p.name for p in alone.outside} == {p.name for p in held.outside}
    with pytest.raises(ExportError, match="how 2 heads of what reads images"):
        hold(whole, tensor_parallel=4)


def test_buffers_that_may_be_too_small_are_refused(tmp_path: Path) -> None:
    """Some kernels of SGLang's have room for a quarter of 224 columns, and are given 64."""
    model = read(tmp_path, {**STORED_CODES, "intermediate_size": 224})
    with pytest.raises(ExportError, match=r"how 224 in blocks of 32 .* --ep 4, by which ranks"):
        hold(model, "sglang", tensor_parallel=4)


@pytest.mark.parametrize(
    ("goal", "why"),
    [
        ({"tensor_parallel": 2}, "--tp 2 without an engine"),
        (
            {"engine": "vllm", "tensor_parallel": 4, "expert_parallel": 3},
            "`expert_parallel=3` does not divide",
        ),
        (
            {"engine": "vllm", "pipeline_parallel": 2, "objective": "throughput"},
            "`pipeline_parallel=2` with the objective throughput",
        ),
    ],
)
def test_goals_that_contradict_themselves(goal: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Goal.model_validate(goal)


def test_a_question_is_asked_of_a_model_that_can_be_divided() -> None:
    model = open_model(str(MODELS / "qwen3-8b" / "config.json"))
    with pytest.raises(InputError, match="`engine=vllm`: --tp 3: how 32 heads"):
        pose(
            model,
            make_machine(),
            Workload(),
            Budget(gpu_memory=8 * GIB),
            Goal(engine="vllm", tensor_parallel=3),
        )


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(1, 2), Ranks(2, 2)], ids=lambda r: r.label)
@pytest.mark.parametrize("host_memory", [None, 3 * GIB])
def test_a_plan_of_ranks_can_be_exported(ranks: Ranks, host_memory: int | None) -> None:
    model = open_model(str(MODELS / "qwen3-8b" / "config.json"))
    goal = Goal(engine="vllm", tensor_parallel=ranks.tensor, pipeline_parallel=ranks.pipeline)
    budget = Budget(gpu_memory=14 * GIB // (ranks.tensor * ranks.pipeline), host_memory=host_memory)
    question = pose(model, make_machine(), Workload(), budget, goal)
    plan = make_plan(question).plan
    export = export_plan(plan, model, "vllm")
    memory = plan.prediction.gpu_memory
    assert memory.total_bytes <= budget.gpu_memory
    assert plan.prediction.host_memory_bytes > 0
    for name, size in (("tensor", ranks.tensor), ("pipeline", ranks.pipeline)):
        flag = export.options.get(f"{name}-parallel-size")
        assert flag == ((str(size),) if size > 1 else None)
    if host_memory is not None:
        assert export.demand.pinned_bytes <= host_memory


def test_sglang_is_told_the_ranks() -> None:
    plan = write_plan()
    goal = Goal(engine="sglang", tensor_parallel=4, pipeline_parallel=2, expert_parallel=2)
    model = open_model(str(MODELS / "deepseek-v2-lite" / "config.json"))
    options = export_plan(plan.model_copy(update={"goal": goal}), model, "sglang").options
    assert {name: options[name] for name in ("tp-size", "pp-size", "ep-size")} == {
        "tp-size": ("4",),
        "pp-size": ("2",),
        "ep-size": ("2",),
    }


@pytest.mark.parametrize(
    ("numa_nodes", "binds", "note"),
    [
        (None, False, "on one of several add --numa-bind"),
        (1, False, None),
        (2, True, "--numa-bind binds each rank to the NUMA node of its GPU"),
    ],
)
def test_ranks_copy_from_their_own_nodes(
    numa_nodes: int | None, binds: bool, note: str | None
) -> None:
    """On a host of one node vLLM does not start with the option: it finds no topology."""
    model = open_model(str(MODELS / "qwen3-8b" / "config.json"))
    goal = Goal(engine="vllm", tensor_parallel=2)
    plan = write_plan(prefetch("mlp"), prefetch_step=1).model_copy(update={"goal": goal})
    export = export_plan(plan, model, "vllm", numa_nodes=numa_nodes)
    assert ("--numa-bind" in export.command) is binds
    told = [each for each in export.notes if "NUMA" in each]
    assert [note in each for each in told] == [True] if note else not told
    alone = plan.model_copy(update={"goal": Goal(engine="vllm")})
    assert "--numa-bind" not in export_plan(alone, model, "vllm", numa_nodes=2).command


def test_sglang_binds_its_ranks_by_itself() -> None:
    model = open_model(str(MODELS / "deepseek-v2-lite" / "config.json"))
    goal = Goal(engine="sglang", tensor_parallel=2)
    rule = prefetch("experts", group_size=2)
    plan = write_plan(rule, prefetch_step=1)
    plan = plan.model_copy(update={"goal": goal, "budget": Budget(gpu_memory=2 * GIB)})
    export = export_plan(plan, model, "sglang", numa_nodes=2)
    assert any("by itself, where numactl" in note for note in export.notes)
    assert not any("numa" in word for word in export.command)
