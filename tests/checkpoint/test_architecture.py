"""What is read from a config, beside what each model type's tests already hold."""

from typing import Any

import pytest

from offplan.checkpoint.architecture import Attention, Routing, read_architecture
from offplan.checkpoint.assemble import assemble
from offplan.checkpoint.model import compute_dtype
from offplan.checkpoint.tensors import Stored, TensorInfo
from offplan.checkpoint.windows import Mixer
from offplan.errors import CheckpointError
from tests.checkpoint.files import DENSE_CONFIG, dense_shapes

PLAIN: dict[str, Any] = {"sinks": False, "changes_cached": False, "soft_cap": None}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, Attention(0, 0, 0, **PLAIN)),
        ({"num_attention_heads": 4, "hidden_size": 64}, Attention(4, 4, 16, **PLAIN)),
        ({"n_heads": 4, "d_model": 64}, Attention(4, 4, 16, **PLAIN)),
        (
            {"model_type": "gpt_oss", "num_attention_heads": 8, "num_key_value_heads": 2},
            Attention(8, 2, 0, **{**PLAIN, "sinks": True}),
        ),
        ({"model_type": "gemma2"}, Attention(0, 0, 0, **{**PLAIN, "soft_cap": 50.0})),
        ({"model_type": "gemma2", "attn_logit_softcapping": None}, Attention(0, 0, 0, **PLAIN)),
        ({"attn_logit_softcapping": 10**400}, Attention(0, 0, 0, **PLAIN)),
        ({"attn_config": {"kv_n_heads": 2}}, Attention(0, 2, 0, **PLAIN)),
    ],
)
def test_attention(config, expected):
    assert read_architecture(config).attention == expected


def test_experts_of_gpt_oss():
    config = {"model_type": "gpt_oss", "num_local_experts": 32, "experts_per_token": 4}
    assert read_architecture(config).routing == Routing(32, 4, False, True, True)


def test_what_stays_in_float32():
    architecture = read_architecture({"model_type": "deepseek_v32"})
    assert architecture.float32_parts == ("e_score_correction_bias",)
    assert architecture.float32_parts_in_float16 == ("indexer.weights_proj",)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"model_type": "deepseek_v32"}, 2048),
        ({"model_type": "glm_moe_dsa", "index_topk": 512}, 512),
        ({"model_type": "deepseek_v3", "index_topk": 512}, None),
    ],
)
def test_tokens_that_an_indexer_chooses(config, tokens):
    assert read_architecture(config).index_topk == tokens


def test_llama4_attends_in_chunks():
    architecture = read_architecture(
        {"text_config": {"model_type": "llama4_text", "num_hidden_layers": 8}}
    )
    assert architecture.mixers == (*[Mixer.CHUNKED] * 3, Mixer.FULL) * 2
    assert architecture.windows == (8192, 8192, 8192, None) * 2


def test_a_hostile_interval_is_no_longer_than_the_model():
    config = {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window_pattern": 2**39}
    assert read_architecture(config).mixers == (Mixer.SLIDING,) * 3


@pytest.mark.parametrize("value", [0, 10_001, "two", [1, 2]])
def test_number_of_layers_that_cannot_be(value):
    with pytest.raises(CheckpointError, match=r"layers, expected|num_hidden_layers, expected"):
        read_architecture({"num_hidden_layers": value})


@pytest.mark.parametrize(
    ("stored", "stated", "expected"),
    [
        ("float32", "bfloat16", "float32"),
        ("bfloat16", "float32", "bfloat16"),
        ("float8_e4m3fn", "float16", "float16"),
        ("uint8", None, "bfloat16"),
        ("uint8", "float8", "bfloat16"),
    ],
)
def test_what_is_computed_in(stored, stated, expected):
    assert compute_dtype(stored, stated) == expected


def test_the_cache_is_of_what_the_weights_are_stored_in():
    """``run`` computes in what is stored, whatever dtype the config names."""
    sizes = []
    for dtype in ("BF16", "F32"):
        tensors = (TensorInfo(name, dtype, shape) for name, (_, shape) in dense_shapes().items())
        model = assemble("test", Stored({**DENSE_CONFIG, "dtype": "bfloat16"}, tuple(tensors)))
        sizes.append((model.element_bytes, model.layers[0].kv_cache.bytes_per_token))
    (small, cache), (large, larger_cache) = sizes
    assert (small, large) == (2, 4)
    assert larger_cache == 2 * cache > 0


def test_end_tokens_of_both_configs():
    config = {"eos_token_id": 2, "text_config": {"eos_token_id": [1, 2, None]}}
    assert read_architecture(config).end_tokens == (2, 1)


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 40960}, 40960),
        ({"n_positions": 1024}, 1024),
        ({}, None),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {"factor": 8.0, "original_max_position_embeddings": 8192},
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 8,
                "rope_scaling": {"factor": True, "original_max_position_embeddings": 8},
            },
            8,
        ),
        ({"max_position_embeddings": 8, "rope_scaling": {"factor": 2.0}}, 8),
    ],
)
def test_the_context_that_a_model_was_trained_for(
    config: dict[str, object], tokens: int | None
) -> None:
    assert read_architecture(config).trained_context == tokens


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({}, None),
        ({"n_positions": 8}, 8),
        ({"max_position_embeddings": 8, "model_max_length": 16}, None),
        ({"max_position_embeddings": 8, "rope_scaling": {"type": "linear", "factor": 2.0}}, 16),
        ({"max_position_embeddings": 8, "rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, 8),
        ({"max_position_embeddings": 8, "rope_parameters": {"full": {"factor": 2}, "x": 1}}, 16),
        ({"max_position_embeddings": 8, "rope_scaling": {"factor": float("nan")}}, 8),
    ],
)
def test_the_context_that_engines_serve(config: dict[str, object], tokens: int | None) -> None:
    assert read_architecture(config).engine_context == tokens


def test_the_type_of_a_part_within_a_part():
    """As of Qwen2.5-Omni: the thinker states it, neither the whole nor the thinker's text."""
    thinker = {"torch_dtype": "bfloat16", "text_config": {"model_type": "qwen2_5_omni_text"}}
    config = {"model_type": "qwen2_5_omni", "thinker_config": thinker}
    assert read_architecture(config).dtype == "bfloat16"


def test_mlps_that_are_saved_as_layers():
    """As Dory's; ``test_every_type`` holds the class of transformers 5.24 to it."""
    kinds = ["sliding_attention", "mlp", "full_attention", "mlp"]
    config = {"model_type": "dory", "num_hidden_layers": 4, "layer_types": kinds}
    found = read_architecture(config | {"sliding_window": 7})
    assert (found.num_layers, len(found.mixers), len(found.windows)) == (2, 2, 2)
