"""Configs of tiny models that ranks and stages divide."""

from typing import Any

DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_hidden_layers": 5,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "vocab_size": 100,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
MOE = {
    **DENSE,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
LATENT = {
    **DENSE,
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 16,
    "q_lora_rank": 16,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
}
STORED_CODES = {
    **DENSE,
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "intermediate_size": 128,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"],
    "sliding_window": 8,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            *("model.layers.*.self_attn", "model.layers.*.mlp.router"),
            *("model.embed_tokens", "lm_head"),
        ],
    },
}
BLOCKS = {
    **DENSE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "head_dim": 32,
    "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}
HYBRID = {
    **DENSE,
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "layer_types": ["linear_attention"] * 4 + ["full_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
WITH_TOWER = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
    "text_config": {**DENSE, "model_type": "qwen3_vl_text"},
    "vision_config": {
        "model_type": "qwen3_vl",
        "depth": 2,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "num_position_embeddings": 4,
        "out_hidden_size": 64,
        "deepstack_visual_indexes": [0],
    },
}
NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "config_groups": {
        "group_0": {
            "weights": {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16},
            "input_activations": {
                "dynamic": False,
                "num_bits": 4,
                "type": "float",
                "group_size": 16,
            },
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "*gate"],
}
W4A16: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "config_groups": {
        "group_0": {
            "weights": {
                "num_bits": 4,
                "type": "int",
                "strategy": "group",
                "group_size": 32,
                "symmetric": False,
                "dynamic": False,
            },
            "targets": ["Linear"],
        }
    },
    "ignore": ["lm_head", "re:.*gate$"],
}
"""Whole numbers with zeros, as compressed-tensors stores them."""
