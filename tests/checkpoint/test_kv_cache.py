from dataclasses import replace

import pytest

from offplan.checkpoint.architecture import read_architecture
from offplan.checkpoint.assemble import describe_kv_caches
from offplan.checkpoint.model import KVCache
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.forms.form import OTHER, RAW


def parameters(*names, form=RAW, **shapes):
    """Parameters of one layer; keyword names write a dot as a double underscore."""
    by_name = dict.fromkeys(names, (8, 8)) | {k.replace("__", "."): v for k, v in shapes.items()}
    return tuple(
        Parameter(name, (TensorInfo(name, "BF16", shape),), form=form)
        for name, shape in by_name.items()
    )


def describe(config, layers, element_bytes=2):
    return describe_kv_caches(read_architecture(config, len(layers)), layers, element_bytes)


FUSED = parameters("self_attn.qkv_proj.weight")
LATENT = parameters("self_attn.kv_a_proj_with_mqa.weight")
LINEAR = parameters("linear_attn.in_proj.weight")
GQA = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
LINEAR_KEYS = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}
STATE = KVCache(state_bytes=(2 * 2 * 8 + 4 * 16) * 4 * 2 + 4 * 8 * 16 * 4)


@pytest.mark.parametrize(
    ("config", "layer", "bytes_per_token"),
    [
        (GQA, FUSED, 2 * 2 * 16 * 2),
        ({"num_attention_heads": 8, "hidden_size": 64}, FUSED, 2 * 8 * 8 * 2),
        ({"n_head": 4, "n_embd": 32, "multi_query": True}, FUSED, 2 * 8 * 2),
        (MLA, LATENT, (512 + 64) * 2),
        ({**GQA, **MLA}, LATENT, (512 + 64) * 2),
        # Nested in a multimodal config.
        ({"text_config": GQA}, FUSED, 2 * 2 * 16 * 2),
        # The projections' rows outweigh the config.
        (
            GQA,
            parameters(self_attn__k_proj__weight=(64, 8), self_attn__v_proj__weight=(32, 8)),
            (64 + 32) * 2,
        ),
        # Shapes of what is not understood say nothing.
        (GQA, parameters(self_attn__k_proj__weight=(999, 1), form=OTHER), 2 * 2 * 16 * 2),
        # A quantised projection is one projection.
        (
            MLA,
            (*LATENT, *parameters("self_attn.kv_a_proj_with_mqa.weight_scale_inv")),
            (512 + 64) * 2,
        ),
        # Two attentions a layer; an indexer's key beside the latent.
        (
            MLA,
            parameters(
                "self_attn.0.kv_a_proj_with_mqa.weight", "self_attn.1.kv_a_proj_with_mqa.weight"
            ),
            2 * (512 + 64) * 2,
        ),
        (
            {**MLA, "index_head_dim": 128},
            (*LATENT, *parameters("self_attn.indexer.wk.weight")),
            (512 + 64 + 128) * 2,
        ),
    ],
)
def test_bytes_per_token(config, layer, bytes_per_token):
    assert describe(config, [layer]) == ([KVCache(bytes_per_token)], [])


def test_cached_numbers_have_the_size_of_what_the_model_computes_in():
    (cache,), _ = describe(GQA, [FUSED], element_bytes=4)
    assert cache == KVCache(2 * 2 * 16 * 4)


FULL = KVCache(128)
SLIDING = KVCache(128, window=32)
WINDOW = {**GQA, "sliding_window": 32}


@pytest.mark.parametrize(
    ("config", "caches"),
    [
        ({**WINDOW, "layer_types": ["sliding_attention", "full_attention"] * 2}, "sfsf"),
        ({**WINDOW, "model_type": "gemma2"}, "sfsf"),
        ({**WINDOW, "sliding_window_pattern": 3}, "ssfs"),
        ({**WINDOW, "model_type": "mistral"}, "ssss"),
        ({**WINDOW, "use_sliding_window": False}, "ffff"),
        ({**WINDOW, "use_sliding_window": True, "max_window_layers": 3}, "fffs"),
        ({**GQA, "sliding_window": None}, "ffff"),
        ({**GQA, "attention_chunk_size": 32, "layer_types": ["chunked_attention"] * 4}, "ssss"),
    ],
)
def test_windows(config, caches):
    expected = [SLIDING if kind == "s" else FULL for kind in caches]
    assert describe(config, [FUSED] * 4) == (expected, [])


def test_window_of_unknown_layers_keeps_everything_and_says_so():
    config = {**WINDOW, "model_type": "new"}
    assert describe(config, [FUSED] * 2) == ([FULL] * 2, [])
    (note,) = read_architecture(config, 2).notes
    assert "does not say for which layers" in note


@pytest.mark.parametrize(
    "types",
    [
        {"layer_types": ["linear_attention", "linear_attention", "full_attention"]},
        {"full_attention_interval": 3},
        {},
    ],
)
def test_linear_attention_keeps_a_state(types):
    config = {**GQA, **LINEAR_KEYS, **types}
    caches, notes = describe(config, [LINEAR, LINEAR, FUSED])
    assert caches == [STATE, STATE, FULL]
    assert not notes


@pytest.mark.parametrize(
    ("config", "layer"),
    [
        (GQA, parameters("mamba.in_proj.weight")),
        ({**GQA, "layer_types": ["conv"]}, FUSED),
        ({**GQA, "layer_types": [3]}, FUSED),
        ({**GQA, "layer_types": ["linear_attention"]}, LINEAR),
        (MLA, FUSED),
        ({}, FUSED),
    ],
)
def test_what_is_not_understood_is_nothing_and_noted(config, layer):
    caches, notes = describe(config, [layer])
    assert caches == [KVCache()]
    assert "1 layers (the first is 0) was not understood" in notes[0]


def test_layers_that_read_anothers_cache_keep_none():
    caches, _ = describe({**GQA, "num_kv_shared_layers": 2}, [FUSED] * 3)
    assert caches == [FULL, KVCache(), KVCache()]


def test_a_window_that_others_read_is_like_the_others():
    kinds = [f"{kind}_attention" for kind in ("sliding", "sliding", "full", "sliding", "full")]
    config = {**GQA, "layer_types": kinds, "sliding_window": 8, "num_kv_shared_layers": 2}
    caches, _ = describe(config, [FUSED] * 5)
    windowed = replace(FULL, window=8)
    assert caches == [windowed, windowed, FULL, KVCache(window=8), KVCache()]
