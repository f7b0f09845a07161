"""What is exported, held against the real vLLM: ``pytest -m engines`` where it is installed."""

import json
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from math import prod
from pathlib import Path
from typing import Any

import pytest

from offplan.capabilities.ranks import ONE_RANK, Ranks
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.engines import vllm
from offplan.engines.engine import format_version
from offplan.engines.export import export_plan, render_export
from offplan.engines.names import engine_parameters, lay_out_experts
from offplan.engines.ranks import FACTS, split_layers
from offplan.engines.registry import ENGINES, find_engine
from offplan.engines.runner import find_runner, lower
from offplan.errors import ExportError
from offplan.held.held import hold, hold_whole
from offplan.held.stage import Stage
from offplan.placement import Phase, place
from offplan.plan import Backend, Budget, Goal, Offload, Plan, Rule
from offplan.schedule import Copy, build_repeated_pass
from tests.costs.builders import dense_model
from tests.engines.builders import make_plan, prefetch, up_to, uva
from tests.engines.configs import NVFP4, W4A16

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the package vllm"),
]

WIDER = (".gate.weight", "e_score_correction_bias", ".A_log", "k_norm.weight", "k_norm.bias")
"""Small parameters that vLLM keeps in float32, whatever they are stored in."""
SELECTED = (
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "MixtralForCausalLM", "LlamaForCausalLM"),
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "GraniteMoeForCausalLM"),
    "GptOssForCausalLM",
)
RANKS = (Ranks(2), Ranks(4), Ranks(2, expert=2), Ranks(1, 2), Ranks(2, 3))
"""Of four heads and two of keys and values, which four ranks have each twice; of five layers."""
RULES = {
    "layers": prefetch(group_size=2),
    "attention": prefetch("self_attn", group_size=3, num_in_group=2),
    "outputs": prefetch("o_proj", group_size=1),
    "in place": uva("self_attn"),
    "bytes": up_to("20KB"),
}


def test_the_version_is_the_one_that_exports_are_held_against() -> None:
    from importlib.metadata import version

    assert version("vllm") == format_version(ENGINES["vllm"].newest)


def test_breakable_graphs() -> None:
    from tests.engines.real_vllm import breakable_architectures

    drafts = {name for name in breakable_architectures() if "MTP" in name}
    assert set(vllm.FACTS["breakable"]) == breakable_architectures() - drafts


@pytest.mark.parametrize("num_layers", range(1, 9))
def test_slots_are_filled_in_the_order_that_is_priced(num_layers: int) -> None:
    from tests.engines.real_vllm import next_filled

    for step in range(1, num_layers + 1):
        offload = Offload(prefetch_step=step, prefill_chunk=1, rules=(prefetch(group_size=1),))
        placement = place(hold(dense_model(num_layers)), offload)
        passed = build_repeated_pass(placement, num_layers, Phase.DECODE)
        filled = [op.span.layer for op in passed.operations if isinstance(op, Copy)]
        assert filled == [next_filled(turn, step, num_layers) for turn in range(num_layers)]


@pytest.mark.parametrize("architecture", sorted({*vllm.FACTS["usual"], *vllm.FACTS["renamed"]}))
def test_names_and_bytes(architecture: str, tmp_path: Path) -> None:
    from tests.engines.real_vllm import parse_command, record_layers, write_config

    if "Qwen3_5" in architecture or "Conditional" in architecture:
        pytest.importorskip("torchvision")
    model = open_model(str(write_config(tmp_path, architecture)))
    real = record_layers(parse_command(["serve", str(tmp_path), "--max-model-len", "64"]), tmp_path)
    check_layers(hold_whole(model, find_runner("vllm")), real)


def check_layers(stage: Stage, real: Sequence[Mapping[str, int]]) -> None:
    """Hold names and bytes of a stage's layers against those of vLLM's own."""
    ours: list[dict[str, int]] = [{} for _ in stage.layers]
    for each in engine_parameters(stage, vllm.find_names(stage)):
        ours[each.layer][each.name] = each.nbytes
    for one, other in zip(ours, real, strict=True):
        assert one.keys() == other.keys()
        unlike = {name for name in one if one[name] != other[name]}
        assert all(name.endswith(WIDER) for name in unlike)


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: ranks.label)
@pytest.mark.parametrize("architecture", sorted(FACTS["architectures"]["vllm"]))
def test_what_ranks_hold(architecture: str, ranks: Ranks, tmp_path: Path) -> None:
    """Names and bytes of the layers of each stage, and bytes outside them."""
    from tests.engines.real_vllm import parse_command, record_stage, write_config

    if "Conditional" in architecture:
        pytest.importorskip("torchvision")
    path = write_config(tmp_path, architecture)
    data = json.loads(path.read_text())
    path.write_text(json.dumps({**data, "vocab_size": 100}))  # padded to 128
    model, plan = open_model(str(path)), with_source(make_plan(), path, open_model(str(path)))
    goal = Goal(
        engine="vllm",
        tensor_parallel=ranks.tensor,
        pipeline_parallel=ranks.pipeline,
        expert_parallel=ranks.expert,
    )
    # two heads of keys, of linear attention or of a tower
    has_states = any(layer.kv_cache.state_bytes for layer in model.layers)
    few = has_states or model.towers or architecture in FACTS["repeats_no_heads"]
    if (ranks.tensor > 2 and few) or (ranks.expert > 1 and model.experts is None):
        with pytest.raises(ExportError, match=r"no routed experts|heads of (keys|linear|what)"):
            lower(model, goal)
        return
    stages = lower(model, goal)
    export = export_plan(plan.model_copy(update={"goal": goal}), model, "vllm")
    assert len(stages) == ranks.pipeline
    for number, stage in enumerate(stages):
        config = parse_command(export.command[1:])
        real, outside_bytes = record_stage(config, tmp_path, number)
        check_layers(stage, real)
        assert stage.outside_bytes == outside_bytes


@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(2, expert=2)], ids=lambda ranks: ranks.label)
@pytest.mark.parametrize("stored", [NVFP4, W4A16], ids=["nvfp4", "w4a16"])
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM"])
def test_what_ranks_hold_of_codes(
    architecture: str, stored: Mapping[str, Any], ranks: Ranks, tmp_path: Path
) -> None:
    """Scales of the cache, and shapes that are stored once for each part, are of no size."""
    from tests.engines.real_vllm import parse_command, record_layers, write_config

    path = write_config(tmp_path, architecture)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64}
    data = {**json.loads(path.read_text()), **sizes, **heads, "quantization_config": stored}
    path.write_text(json.dumps(data))
    model = open_model(str(path))
    if ranks.expert > 1 and model.experts is None:
        pytest.skip("it has no experts")
    goal = Goal(engine="vllm", tensor_parallel=ranks.tensor, expert_parallel=ranks.expert)
    plan = with_source(make_plan(), path, model).model_copy(update={"goal": goal})
    (stage,) = lower(model, goal)
    real = record_layers(parse_command(export_plan(plan, model, "vllm").command[1:]), tmp_path)
    ours: list[dict[str, int]] = [{} for _ in stage.layers]
    for each in engine_parameters(stage, vllm.find_names(stage)):
        ours[each.layer][each.name] = each.nbytes

    def without_small(layer: Mapping[str, int]) -> dict[str, int]:
        small = ("weight_shape", "attn.k", "attn.q", "attn.v", "attn.prob", *WIDER)
        return {name: size for name, size in layer.items() if not any(s in name for s in small)}

    for one, other in zip(ours, real, strict=True):
        assert without_small(one) == without_small(other)


def test_states_of_linear_attention_are_divided(tmp_path: Path) -> None:
    from vllm.model_executor.models.qwen3_next import Qwen3NextForCausalLM

    from tests.engines.real_vllm import parse_command, write_config

    model, sizes = open_model(str(write_config(tmp_path, "Qwen3NextForCausalLM"))), []
    for tensor in (1, 2):
        words = ["serve", str(tmp_path), "--max-model-len", "64", "--tensor-parallel-size"]
        config = parse_command([*words, str(tensor)])
        shapes = Qwen3NextForCausalLM.get_mamba_state_shape_from_config(config)
        dtypes = Qwen3NextForCausalLM.get_mamba_state_dtype_from_config(config)
        real = sum(prod(shape) * of.itemsize for shape, of in zip(shapes, dtypes, strict=True))
        (stage,) = lower(model, Goal(engine="vllm", tensor_parallel=tensor))
        (ours,) = {layer.kv_cache.state_bytes for layer in stage.layers} - {0}
        # vLLM's convolution keeps one token less
        assert 0.9 * ours < real <= ours
        sizes.append((ours, real))
    assert sizes[0] == tuple(2 * size for size in sizes[1])


@pytest.mark.parametrize(
    ("rule", "ranks"),
    [
        *((rule, Ranks(2)) for rule in RULES.values()),
        *((rule, Ranks(2, 2)) for rule in RULES.values() if rule.decode is Backend.PREFETCH),
    ],
)
@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_vllm_moves_what_the_plan_says_of_ranks(
    architecture: str, rule: Rule, ranks: Ranks, tmp_path: Path
) -> None:
    """In each stage, whose pattern starts anew."""
    from tests.engines.real_vllm import parse_command, record_moved, write_config

    path = write_config(tmp_path, architecture)
    model = open_model(str(path))
    goal = Goal(engine="vllm", tensor_parallel=ranks.tensor, pipeline_parallel=ranks.pipeline)
    plan = with_source(make_plan(rule, prefetch_step=1), path, model)
    plan = plan.model_copy(update={"goal": goal})
    stages = lower(model, goal)
    command = export_plan(plan, model, "vllm").command
    assert len(stages) == ranks.pipeline
    for number, stage in enumerate(stages):
        engine, version = find_engine("vllm")
        assert engine.demand_rule is not None
        demand = engine.demand_rule(rule, place(stage, plan.offload), stage, version)
        moved = record_moved(parse_command(command[1:]), tmp_path, number)
        found = {(layer, name) for layer, names in enumerate(moved) for name in names}
        ours = {(each.layer, each.name) for each in demand.moved}
        assert found == ours if rule.max_bytes is None else found <= ours


def test_ranks_are_bound_to_nodes(tmp_path: Path) -> None:
    from tests.engines.real_vllm import parse_command, write_config

    path = write_config(tmp_path, "Qwen3ForCausalLM")
    model = open_model(str(path))
    plan = with_source(make_plan(RULES["layers"], prefetch_step=1), path, model)
    plan = plan.model_copy(update={"goal": Goal(engine="vllm", tensor_parallel=2)})
    for nodes, binds in ((2, True), (1, False)):
        command = export_plan(plan, model, "vllm", numa_nodes=nodes).command
        assert parse_command(command[1:]).parallel_config.numa_bind is binds


@pytest.mark.parametrize(("num_layers", "num_stages"), [(5, 2), (5, 3), (36, 4), (61, 8)])
def test_layers_of_stages(num_layers: int, num_stages: int) -> None:
    from vllm.distributed.utils import get_pp_indices

    ends = [get_pp_indices(num_layers, number, num_stages) for number in range(num_stages)]
    assert split_layers(num_layers, num_stages, "vllm") == [end - start for start, end in ends]


@pytest.mark.parametrize("kernels", ["", "triton", "flashinfer_trtllm", "flashinfer_cutlass"])
@pytest.mark.parametrize(
    "ranks", [ONE_RANK, Ranks(2), Ranks(2, expert=2), Ranks(4), Ranks(8), Ranks(8, expert=8)]
)
@pytest.mark.parametrize(
    "sizes",
    [
        {"hidden_size": 96, "intermediate_size": 736},
        {"hidden_size": 2880, "intermediate_size": 2880},  # gpt-oss': 90 blocks of scales
    ],
)
def test_experts_of_mxfp4(
    kernels: str, ranks: Ranks, sizes: Mapping[str, int], tmp_path: Path
) -> None:
    """Kernels round sizes up: Marlin's, where some move, by these bytes; others by no more.

    Blocks need not divide by the ranks.
    """
    from tests.engines.real_vllm import lay_out_by_triton, parse_command, record_layers

    path = write_gpt_oss(tmp_path, sizes)
    model = open_model(str(path))
    goal = Goal(engine="vllm", tensor_parallel=ranks.tensor, expert_parallel=ranks.expert)
    rules = [] if kernels else [prefetch("experts", group_size=2, num_in_group=1)]
    plan = with_source(make_plan(*rules, prefetch_step=1), path, model)
    plan = plan.model_copy(update={"goal": goal, "budget": Budget(gpu_memory=2**40)})
    stages = lower(model, goal)
    export = export_plan(plan, model, "vllm")
    chosen = ["--moe-backend", kernels] if kernels else []
    real = record_layers(parse_command([*export.command[1:], *chosen]), tmp_path)
    laid_out = lay_out_experts(
        engine_parameters(stages[0], {}), vllm.ANY_KERNELS if kernels else vllm.MARLIN_KERNELS
    )
    assert len(laid_out) == 6 * len(real)
    stored = sum(each.nbytes for each in laid_out)
    if kernels:
        assert export.demand.more_gpu_bytes == sum(e.nbytes for e in laid_out.values()) - stored
    else:
        moved = {(each.layer, each.name): each.nbytes for each in export.demand.moved}
        assert len(moved) == 6 * (len(real) // 2)
        assert all(real[layer][name] == nbytes for (layer, name), nbytes in moved.items())
    for each in laid_out.values():
        nbytes = real[each.layer][each.name]
        if not kernels:
            assert each.nbytes == nbytes
        else:  # most widen biases once they are loaded
            assert each.nbytes >= nbytes * (1 + each.name.endswith("_bias"))
    if kernels == "triton":
        found = {each.name.rpartition(".")[2]: each.nbytes for each in laid_out.values()}
        num_experts = 8 // ranks.expert
        hidden = sizes["hidden_size"]
        size = -(-sizes["intermediate_size"] * ranks.expert // ranks.tensor // 64) * 64
        for name, shape in (("w13_weight", (2 * size, hidden)), ("w2_weight", (hidden, size))):
            most = (found[name] + found[f"{name}_scale"]) // num_experts
            assert max(lay_out_by_triton(*shape)) <= most


def write_gpt_oss(folder: Path, sizes: Mapping[str, int]) -> Path:
    """Write the config of a tiny gpt-oss of eight experts, stored as MXFP4."""
    from tests.engines.real_vllm import write_config

    path = write_config(folder, "GptOssForCausalLM")
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config = json.loads(path.read_text())
    config |= {
        **sizes,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts": 8,
    }
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    path.write_text(json.dumps(config))
    return path


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("architecture", SELECTED)
def test_vllm_moves_what_the_plan_says(architecture: str, rule: Rule, tmp_path: Path) -> None:
    """By the whole command, read by vLLM's parser, and vLLM's own selection."""
    from tests.engines.real_vllm import parse_command, record_moved, write_config

    path = write_config(tmp_path, architecture)
    model = open_model(str(path))
    export = export_plan(with_source(make_plan(rule), path, model), model, "vllm")
    moved = record_moved(parse_command(export.command[1:]), tmp_path)
    said = {(each.layer, each.name) for each in export.demand.moved}
    found = {(layer, name) for layer, names in enumerate(moved) for name in names}
    if rule.max_bytes is None:
        assert found == said
    else:
        sizes = {(each.layer, each.name): each.nbytes for each in export.demand.moved}
        assert found <= said
        assert sum(sizes[each] for each in found) >= rule.max_bytes


def test_vllm_reads_the_config_file(tmp_path: Path) -> None:
    from tests.engines.real_vllm import parse_command, write_config

    path = write_config(tmp_path, "Qwen3ForCausalLM")
    model = open_model(str(path))
    export = export_plan(with_source(make_plan(prefetch("mlp")), path, model), model, "vllm")
    file = tmp_path / "serve.yaml"
    file.write_text(render_export(export, "yaml"))
    said, read = parse_command(export.command[1:]), parse_command(["serve", "--config", str(file)])
    assert read.offload_config == said.offload_config
    assert read.scheduler_config.max_num_batched_tokens == 64


def with_source(plan: Plan, path: Path, model: Model) -> Plan:
    workload = plan.workload.model_copy(
        update={"context": 64, "prompt_tokens": 32, "output_tokens": 16}
    )
    found = plan.model.model_copy(update={"source": str(path)})
    return plan.model_copy(update={"model": found, "workload": workload})
