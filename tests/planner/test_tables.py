"""Tables that passes read by row: placed on the host, priced by the rows that a token needs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs.floor import find_floor
from offplan.held.held import hold
from offplan.library.asking import pose
from offplan.machine.profile import load_profile
from offplan.plan import Budget, Goal, Workload
from offplan.planner.make import make_plan
from tests.costs.builders import HIDDEN, VOCABULARY, dense_model, make_machine
from tests.held import input_embedding
from tests.planner.cases import budget_for, plan_for

WORKLOAD = Workload(prompt_tokens=512, output_tokens=20, context=700)
WIDTH = 8 * HIDDEN


def with_table(module: str = "model.embed_tokens_per_layer", **config: Any) -> Model:
    """A model whose head is tied, with a table that is read by row."""
    model = dense_model(4)
    _, embedding = model.outside
    table = TensorInfo(f"{module}.weight", "BF16", (VOCABULARY, WIDTH))
    config = {**model.config, "model_type": "gemma4_text", **config}
    return replace(model, config=config, outside=(embedding, table))


def test_a_table_leaves_the_gpu_before_any_layer() -> None:
    model, machine = with_table(), make_machine()
    (table,) = model.tables
    assert input_embedding(model) is None
    whole = budget_for(model, machine, 1.0, WORKLOAD)
    budget = Budget(gpu_memory=whole.gpu_memory - table.nbytes // 2)
    plan = plan_for(model, machine, budget, WORKLOAD)
    assert (plan.offload.rules, plan.offload.embeddings) == ((), "host")
    assert plan.prediction.decode.link_bytes == 2 * WIDTH
    assert plan.prediction.prefill.link_bytes == 512 * 2 * WIDTH
    assert plan.prediction.host_memory_bytes == 2 * VOCABULARY * WIDTH


def test_rows_of_ngrams_are_priced_for_each_of_them() -> None:
    module = "model.layers.1.ple.ple_embedding.ngram_embedding"
    model = with_table(module, model_type="qwen4_exp_text", ngram_size=4, heads_per_ngram=5)
    (table,) = model.tables
    assert (table.name, table.rows_per_token, table.token_bytes) == (module, 15, 30 * WIDTH)
    stage = hold(model)
    floor = find_floor([(stage, table.nbytes)], make_machine(), WORKLOAD, (0, 0))
    assert floor.decode_link_bytes == 15 * 2 * WIDTH


E4B: dict[str, Any] = {
    **{"model_type": "gemma4_text", "architectures": ["Gemma4ForCausalLM"], "dtype": "bfloat16"},
    **{"vocab_size": 262144, "hidden_size": 2560, "intermediate_size": 10240, "head_dim": 256},
    **{"num_hidden_layers": 42, "num_attention_heads": 8, "num_key_value_heads": 2},
    **{"tie_word_embeddings": True, "sliding_window": 512, "num_kv_shared_layers": 18},
    "layer_types": 7 * [*["sliding_attention"] * 5, "full_attention"],
    **{"vocab_size_per_layer_input": 262144, "hidden_size_per_layer_input": 256},
    **{"global_head_dim": 512, "attention_k_eq_v": False, "use_double_wide_mlp": False},
}
"""The text part of Gemma-4-E4B."""


def open_config(folder: Path, config: dict[str, Any]) -> Model:
    (folder / "config.json").write_text(json.dumps(config))
    return open_model(str(folder / "config.json"))


@pytest.mark.slow
def test_gemma_4_e4b_fits_8_gb(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = open_config(tmp_path, E4B)
    (table,) = model.tables
    assert (table.short_name, table.nbytes) == ("embed_tokens_per_layer", 262144 * 42 * 256 * 2)
    budget = Budget(gpu_memory=7 * 2**30)
    plan = make_plan(pose(model, load_profile("rtx4060"), Workload(), budget)).plan
    assert plan.offload.embeddings == "host"
    assert plan.prediction.host_memory_bytes < table.nbytes + 2**31


FLASH: dict[str, Any] = {
    **{"model_type": "qwen4_exp_text", "architectures": ["Qwen4ExpForCausalLM"]},
    **{"dtype": "bfloat16", "hidden_size": 2560, "num_hidden_layers": 48, "vocab_size": 248320},
    "layer_types": ["linear_attention"] * 3 + ["qwen_sparse_attention"],
    **{"num_attention_heads": 24, "num_key_value_heads": 2, "head_dim": 256},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 48, "linear_conv_kernel_dim": 4},
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128, "num_experts": 512},
    **{"num_experts_per_tok": 10, "moe_intermediate_size": 640, "hc_count": 4, "hc_lowrank": 320},
    **{"shared_expert_intermediate_size": 640, "ple_layer_ids": [2], "ple_embed_dim": 2560},
    **{"ngram_size": 3, "heads_per_ngram": 8, "ngram_vocab_size_base": 20_000_000},
    **{"split_ngram_parts": 128, "indexer_n_heads": 4, "indexer_kv_heads": 1},
    **{"indexer_head_dim": 128, "indexer_budget": 2048, "indexer_compress_ratio": 4},
    **{"tie_word_embeddings": False, "eos_token_id": 248044},
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
}
"""The text part of Qwen3.8-Flash-Next; its kinds of layers repeat twelve times."""


@pytest.mark.slow
def test_qwen_3_8_flash_moves_what_a_token_needs(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    model = open_config(tmp_path, FLASH | {"layer_types": 12 * FLASH["layer_types"]})
    table = next(each for each in model.tables if not each.is_input)
    assert (table.rows_per_token, table.token_bytes) == (16, 16 * 160 * 2)
    assert table.nbytes > 95 * 2**30
    budget, goal = Budget(gpu_memory=12 * 2**30), Goal(packing=False)
    plan = make_plan(pose(model, load_profile("rtx4090"), Workload(), budget, goal)).plan
    assert plan.offload.embeddings == "host"
    experts = 48 * 10 * 3 * 2560 * 640 * 2
    rows = sum(each.token_bytes for each in model.tables)
    assert plan.prediction.decode.link_bytes == pytest.approx(experts + rows, rel=0.01)
