import pytest

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
MOE = {**TINY, "moe_intermediate_size": 16, "num_experts_per_tok": 2}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": None,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
}
MODELS = {
    "qwen3": ("Qwen3Config", {**TINY, "head_dim": 8}, {}),
    "qwen3-tied": ("Qwen3Config", {**TINY, "head_dim": 8, "tie_word_embeddings": True}, {}),
    "qwen3-sharded": ("Qwen3Config", {**TINY, "head_dim": 8}, {"max_shard_size": "20KB"}),
    "deepseek_v2": (
        "DeepseekV2Config",
        {**MOE, **LATENT, "n_routed_experts": 4, "first_k_dense_replace": 1},
        {"max_shard_size": "20KB"},
    ),
    "mixtral": ("MixtralConfig", {**TINY, "num_local_experts": 4, "num_experts_per_tok": 2}, {}),
    "gemma3": (
        "Gemma3TextConfig",
        {**TINY, "head_dim": 8, "sliding_window": 4, "num_hidden_layers": 6},
        {},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {
            **MOE,
            "head_dim": 8,
            "num_experts": 4,
            "num_hidden_layers": 4,
            "shared_expert_intermediate_size": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
        },
        {},
    ),
    "gpt_oss": (
        "GptOssConfig",
        {**TINY, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {},
    ),
}
"""Config class, its arguments, and those of ``save_pretrained``."""


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A function: the folder of one of MODELS, made by ``save_pretrained``, and the model."""
    transformers = pytest.importorskip("transformers")
    made = {}

    def save(name):
        if name not in made:
            config_class, config, options = MODELS[name]
            model = transformers.AutoModelForCausalLM.from_config(
                getattr(transformers, config_class)(**config)
            )
            folder = tmp_path_factory.mktemp(name)
            model.save_pretrained(folder, **options)
            made[name] = folder, model
        return made[name]

    return save
