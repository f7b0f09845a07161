"""Tiny real checkpoints: random float32 weights, saved by transformers in shards."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DeepseekV2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma4TextConfig,
    GPTJConfig,
    GPTNeoXConfig,
    GptOssConfig,
    JetMoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    MixtralConfig,
    Olmo3Config,
    Phi3Config,
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    Qwen3NextConfig,
)

from tests.warm import Warm

NUM_LAYERS = 5

SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": NUM_LAYERS,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
SLIDING_AND_FULL = ["sliding_attention", "full_attention"]
LATENTS = {
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "topk_group": 1,
    "n_group": 1,
}
LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "layer_types": [*["linear_attention", "full_attention"] * 2, "linear_attention"],
}

ROPE_OF_IMAGES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}

LIMIT = 8
"""Tokens up to which rotary embeddings that change with the text's length stay as they are."""

CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "deepseek_v2": DeepseekV2Config(**SIZES, **LATENTS, q_lora_rank=None, head_dim=8),
    "qwen3_moe_tied": Qwen3MoeConfig(
        **SIZES,
        **HEADS,
        moe_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
        tie_word_embeddings=True,
    ),
}

OTHERS: dict[str, PreTrainedConfig] = {
    "linear": Qwen3_5TextConfig(**SIZES, **{**HEADS, "head_dim": 16}, **LINEAR),
    "linear_experts": Qwen3NextConfig(
        **SIZES,
        **HEADS,
        **LINEAR,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
        num_experts=4,
        num_experts_per_tok=2,
    ),
    "mixtral": MixtralConfig(**SIZES, **HEADS, num_local_experts=4),
    "deepseek_v3": DeepseekV3Config(**SIZES, **LATENTS, q_lora_rank=16),
    # latents that the kernels read in place
    "latents": DeepseekV3Config(**SIZES, **{**LATENTS, "qk_rope_head_dim": 16}, q_lora_rank=16),
    "deepseek_v32": DeepseekV32Config(
        **SIZES,
        **LATENTS,
        q_lora_rank=16,
        index_n_heads=2,
        index_head_dim=16,
        layer_types=["full_attention"] * NUM_LAYERS,
    ),
    "gptj": GPTJConfig(**SIZES, num_attention_heads=4, rotary_dim=8),
    "gpt_neox": GPTNeoXConfig(**SIZES, num_attention_heads=4),
    "jetmoe": JetMoeConfig(**SIZES, num_key_value_heads=2, kv_channels=8, num_local_experts=4),
    "chunked": Llama4TextConfig(
        **SIZES,
        **HEADS,
        intermediate_size_mlp=48,
        num_local_experts=4,
        num_experts_per_tok=2,
        attention_chunk_size=6,
        floor_scale=4,
    ),
    "gemma2": Gemma2Config(**SIZES, **HEADS),
    "qwen3_wide": Qwen3Config(**SIZES, **{**HEADS, "head_dim": 16}),
    "mistral_windowed": MistralConfig(**SIZES, **{**HEADS, "head_dim": 16}, sliding_window=8),
    "olmo3_windowed": Olmo3Config(**SIZES, **{**HEADS, "head_dim": 16}, sliding_window=8),
    "sinks": GptOssConfig(
        **SIZES, **{**HEADS, "head_dim": 16}, sliding_window=8, num_local_experts=4
    ),
    "soft_caps": Gemma2Config(
        **SIZES, **{**HEADS, "head_dim": 16}, sliding_window=8, attn_logit_softcapping=2.0
    ),
    "dynamic": LlamaConfig(
        **{**SIZES, "max_position_embeddings": LIMIT},
        **HEADS,
        rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    ),
    "longrope": Phi3Config(
        **SIZES,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
        original_max_position_embeddings=LIMIT,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": [1.0] * 4,
            "long_factor": [1.5, 2.0, 3.0, 4.0],
        },
    ),
    "shared_keys": Gemma4TextConfig(
        **SIZES,
        **{**HEADS, "head_dim": 16},
        global_head_dim=16,
        sliding_window=8,
        layer_types=[*SLIDING_AND_FULL * 2, "full_attention"],
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    ),
    "global_heads": Gemma4TextConfig(
        **SIZES,
        **{**HEADS, "head_dim": 16},
        global_head_dim=32,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        sliding_window=8,
        layer_types=[*SLIDING_AND_FULL * 2, "full_attention"],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    ),
    "narrow_values": MiMoV2FlashConfig(
        **SIZES,
        **{**HEADS, "head_dim": 24},
        v_head_dim=16,
        sliding_window=8,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        layer_types=[*SLIDING_AND_FULL * 2, "full_attention"],
    ),
    "shared_rings": Gemma4TextConfig(
        **{**SIZES, "num_hidden_layers": 7},
        **{**HEADS, "head_dim": 16},
        global_head_dim=16,
        sliding_window=8,
        layer_types=[*SLIDING_AND_FULL * 2, SLIDING_AND_FULL[0], *SLIDING_AND_FULL],
        num_kv_shared_layers=3,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
    ),
    "shared_streams": Gemma3nTextConfig(
        **SIZES,
        **HEADS,
        sliding_window=8,
        layer_types=[*SLIDING_AND_FULL * 2, "sliding_attention"],
        num_kv_shared_layers=3,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0],
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=64,
        laurel_rank=8,
    ),
    "text_part": Qwen2_5_VLConfig(
        text_config=SIZES
        | {"num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": ROPE_OF_IMAGES},
        vision_config={"hidden_size": 16, "intermediate_size": 24, "depth": 1, "num_heads": 2}
        | {"out_hidden_size": 32, "fullatt_block_indexes": [0]},
    ),
    "latents_wide": DeepseekV2Config(
        **SIZES, **{**LATENTS, "qk_rope_head_dim": 16}, q_lora_rank=None, head_dim=16
    ),
}
"""Not run through every rule: what they have that the others have not is tested once."""


def auto_class(name: str) -> Any:
    """Return the class of transformers that builds all of the named checkpoint."""
    return AutoModelForImageTextToText if name == "text_part" else AutoModelForCausalLM


def save_tiny(name: str, folder: Path) -> Path:
    """Save the named tiny checkpoint; weights are large enough that layers differ audibly.

    The states of linear attention decay slowly, so that all of a prompt is heard.
    """
    torch.manual_seed(0)
    model = auto_class(name).from_config((CONFIGS | OTHERS)[name], dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)
            elif parameter.ndim > 1 or "sinks" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(folder, max_shard_size="60KB")
    return folder


@pytest.fixture(scope="session", params=sorted(CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def counted_by_warm_processes(warm: Warm) -> Iterator[None]:
    """What passes take is counted in a process of its own, most of whose time are imports."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offplan.held.stock.subprocess", warm.as_subprocess())
        yield
