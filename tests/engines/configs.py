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
