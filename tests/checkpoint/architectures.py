"""Small models of the architectures that people have, to be saved by transformers itself."""

from typing import Any

TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "dtype": "bfloat16",
}
HEADS = {**TINY, "head_dim": 8}
# Two lines of keys that many mixtures share; transformers ignores what a model does not have.
MOE = {**HEADS, "moe_intermediate_size": 16, "num_experts_per_tok": 2, "num_experts": 4}
GROUPED = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
LINEAR = {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
SLIDING = {"sliding_window": 4}
MULTI_HEAD = {key: value for key, value in TINY.items() if key != "num_key_value_heads"}
OLD = {"n_embd": 32, "n_layer": 3, "n_head": 4, "vocab_size": 64, "dtype": "bfloat16"}
VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "out_hidden_size": 32,
    "image_size": 28,
    "patch_size": 14,
}
DBRX = {
    "d_model": 32,
    "n_layers": 3,
    "n_heads": 4,
    "vocab_size": 64,
    "dtype": "bfloat16",
    "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 500000},
    "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
}

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TINY),
    "mistral": ("MistralConfig", {**TINY, **SLIDING}),
    "qwen2": ("Qwen2Config", TINY),
    "qwen2-sliding": (
        "Qwen2Config",
        {**TINY, **SLIDING, "use_sliding_window": True, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", HEADS),
    "qwen3-tied": ("Qwen3Config", {**HEADS, "tie_word_embeddings": True}),
    "qwen3-sharded": ("Qwen3Config", HEADS),
    "qwen3_moe": ("Qwen3MoeConfig", MOE),
    "qwen3_next": ("Qwen3NextConfig", {**MOE, **LINEAR, "shared_expert_intermediate_size": 16}),
    "qwen3_5": (
        "Qwen3_5Config",
        {"text_config": {**HEADS, **LINEAR}, "vision_config": VISION, "dtype": "bfloat16"},
    ),
    "mixtral": ("MixtralConfig", {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "deepseek_v2": ("DeepseekV2Config", {**MOE, **LATENT, **GROUPED}),
    "deepseek_v3": ("DeepseekV3Config", {**MOE, **LATENT, **GROUPED, "q_lora_rank": 8}),
    "gpt_oss": ("GptOssConfig", {**HEADS, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4_moe": ("Glm4MoeConfig", {**MOE, **GROUPED}),
    "gemma3": ("Gemma3TextConfig", {**HEADS, **SLIDING, "num_hidden_layers": 6}),
    "gemma3-vision": (
        "Gemma3Config",
        {
            "text_config": {**HEADS, **SLIDING, "num_hidden_layers": 6},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "dtype": "bfloat16",
        },
    ),
    "phi3": ("Phi3Config", {**TINY, **SLIDING}),
    "falcon": ("FalconConfig", MULTI_HEAD),
    "falcon-old": ("FalconConfig", {**MULTI_HEAD, "multi_query": False}),
    "gpt_neox": ("GPTNeoXConfig", MULTI_HEAD),
    "gpt2": ("GPT2Config", OLD),
    "opt": (
        "OPTConfig",
        {**MULTI_HEAD, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 32},
    ),
    "granitemoe": ("GraniteMoeConfig", {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "llava": (
        "LlavaConfig",
        {
            "text_config": {**TINY, "model_type": "llama"},
            "vision_config": {**VISION, "model_type": "clip_vision_model"},
            "dtype": "bfloat16",
        },
    ),
    "llama4": (
        "Llama4Config",
        {
            "text_config": {
                **HEADS,
                "num_hidden_layers": 4,
                "intermediate_size_mlp": 48,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
            },
            "vision_config": VISION,
            "dtype": "bfloat16",
        },
    ),
    "dbrx": ("DbrxConfig", DBRX),
}
"""Config class and its arguments."""

SHARD_SIZES = {"qwen3-sharded": "20KB", "deepseek_v2": "20KB"}
"""Models saved in several files."""
