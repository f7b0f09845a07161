import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offplan.checkpoint.assemble import assemble
from offplan.checkpoint.model import Experts
from offplan.checkpoint.tensors import Stored, TensorInfo
from offplan.engines.runner import find_runner
from offplan.errors import CheckpointError
from offplan.held.held import hold, hold_whole
from tests.checkpoint.files import DENSE_CONFIG, dense_shapes

MOE_CONFIG = {**DENSE_CONFIG, "num_experts": 4, "num_experts_per_tok": 2}


UNTIED_TEXT = {"model_type": "llama", "num_hidden_layers": 2}
TIED_TEXT = {"model_type": "gemma3_text", "num_hidden_layers": 2}


def model(shapes, config=DENSE_CONFIG):
    tensors = (TensorInfo(name, *shape) for name, shape in shapes.items())
    return assemble("test", Stored(config, tuple(tensors)))


def routed(prefix="model.layers.1.mlp", num_experts=4, parts=("gate_proj", "up_proj")):
    return {
        f"{prefix}.experts.{expert}.{part}.weight": ("BF16", (8, 6))
        for expert in range(num_experts)
        for part in parts
    }


def under(prefix, shapes):
    return {prefix + name: shape for name, shape in shapes.items()}


def names(parameters):
    return [parameter.name for parameter in parameters]


def test_a_table_that_a_layer_reads_by_row_lies_outside():
    name = "model.layers.1.ple.ple_embedding.ngram_embedding.shard_{}.weight"
    shards = {name.format(number): ("BF16", (40, 6)) for number in range(3)}
    config = {**DENSE_CONFIG, "model_type": "qwen4_exp_text"}
    got = model(dense_shapes() | shards, config)
    assert got.layers[1].nbytes == model(dense_shapes(), config).layers[1].nbytes
    embedding, table = got.tables
    assert (embedding.is_input, table.num_rows, table.rows_per_token) == (True, 120, 16)
    assert {t.name for t in table.tensors} == {*shards} <= {t.name for t in got.outside}
    codes = {each: ("F8_E4M3", shape) for each, (_, shape) in shards.items()}
    kept = model(dense_shapes() | codes, config)
    assert kept.layers[1].nbytes > got.layers[1].nbytes
    later = {each.replace("layers.1", "layers.2"): shape for each, shape in shards.items()}
    extra = {**config, "num_nextn_predict_layers": 1}
    assert model(dense_shapes() | later, extra).not_loaded == {*later}


def test_layers_and_what_is_outside():
    got = model(dense_shapes())
    assert [(layer.index, layer.kind, layer.prefix) for layer in got.layers] == [
        (0, "dense", "model.layers.0"),
        (1, "dense", "model.layers.1"),
    ]
    assert names(got.layers[0].parameters) == [
        "mlp.up_proj.weight",
        "self_attn.k_proj.weight",
        "self_attn.q_proj.weight",
        "self_attn.v_proj.weight",
    ]
    assert got.layers[0].segments == {
        "mlp.up_proj": 192,
        "self_attn.k_proj": 64,
        "self_attn.q_proj": 128,
        "self_attn.v_proj": 64,
    }
    assert [tensor.name for tensor in got.outside] == [
        "lm_head.weight",
        "model.embed_tokens.weight",
    ]
    assert got.experts is None
    assert got.notes == ()


def test_names_of_another_family():
    shapes = {
        f"transformer.h.{i}.{name}.weight": ("F32", (4, 4))
        for i in range(12)
        for name in ("attn.c_attn", "mlp.c_fc")
    }
    got = model(shapes, {"model_type": "gpt2", "n_layer": 12, "n_head": 2, "n_embd": 4})
    assert got.layers[10].prefix == "transformer.h.10"
    assert got.dtype == "float32"


def test_vision_tower_stays_outside():
    # More bytes than the decoder, but not its count of layers.
    vision = {f"vision.blocks.{i}.attn.qkv.weight": ("BF16", (512, 512)) for i in range(5)}
    config = {"model_type": "vl", "text_config": DENSE_CONFIG, "num_hidden_layers": 5}
    got = model({**under("language_model.", dense_shapes()), **vision}, config)
    assert got.layers[0].prefix == "language_model.model.layers.0"
    assert sum("vision" in tensor.name for tensor in got.outside) == 5
    assert not got.not_loaded


def test_a_tower_of_as_many_layers_and_more_bytes():
    config = {"model_type": "llava", "text_config": DENSE_CONFIG | {"model_type": "llama"}}
    vision = {
        f"vision_tower.layers.{i}.proj.weight": ("BF16", (4096, 4096))
        for i in range(DENSE_CONFIG["num_hidden_layers"])
    }
    got = model({**under("language_model.", dense_shapes()), **vision}, config)
    assert got.layers[0].prefix == "language_model.model.layers.0"
    assert got.towers == got.not_loaded == vision.keys()
    assert hold(got).loaded_bytes + got.tower_bytes == got.total_bytes
    assert hold_whole(got, find_runner("vllm")).loaded_bytes == got.total_bytes
    unknown = model(under("language_model.", dense_shapes()), config | {"model_type": "vl"})
    assert unknown.architecture.is_multimodal
    assert not unknown.architecture.runs_text_alone


@pytest.mark.parametrize(
    ("prefix", "tower"),
    [
        ("language_model.", "mlp1.0.weight"),  # Nemotron-Omni
        ("", "vit_large_projector.weight"),  # Step-3.7
        ("", "blocks.0.attn.qkv.weight"),  # Cosmos 3
        ("", "model.resampler_model.spatial_linear.0.weight"),  # ERNIE-VL
    ],
)
def test_what_is_beside_a_text_part_is_a_tower(prefix, tower):
    config = {"model_type": "llava", "text_config": DENSE_CONFIG | {"model_type": "llama"}}
    got = model({**under(prefix, dense_shapes()), tower: ("BF16", (16, 16))}, config)
    assert got.towers == {tower}


def test_experts_do_not_pass_for_layers():
    # Two experts and two layers: the outer index has the more bytes.
    shapes = {**dense_shapes(), **routed(num_experts=2)}
    assert model(shapes).layers[1].prefix == "model.layers.1"
    with pytest.raises(CheckpointError, match=r"stacks: 'model.layers' with 2\)"):
        model(shapes | routed(num_experts=3), {**DENSE_CONFIG, "num_hidden_layers": 3})


def test_layers_that_predict_further_tokens_are_not_loaded():
    got = model(dense_shapes(3), {**DENSE_CONFIG, "num_nextn_predict_layers": 1})
    assert len(got.layers) == 2
    assert {name.split(".")[2] for name in got.not_loaded} == {"2"}
    assert got.total_bytes - hold(got).loaded_bytes == 448
    assert got.num_parameters == 2 * 128 + 3 * 224
    assert "model.layers.2" in got.notes[0]


def test_prediction_head_beside_the_stack_is_not_loaded():
    shapes = {**dense_shapes(), **under("mtp.", {"layers.0.up.weight": ("BF16", (99, 99))})}
    assert model(shapes).not_loaded == {"mtp.layers.0.up.weight"}


def test_stored_rotary_frequencies_are_not_loaded():
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    got = model({**dense_shapes(), name: ("F32", (4,))})
    assert got.not_loaded == {name}


def test_config_that_does_not_count_the_layers():
    config = {key: value for key, value in DENSE_CONFIG.items() if key != "num_hidden_layers"}
    got = model(dense_shapes(5), config)
    assert len(got.layers) == 5
    assert "does not say how many layers" in got.notes[0]


@pytest.mark.parametrize("present", [1, 0])
def test_fewer_layers_than_the_config_says(present):
    with pytest.raises(CheckpointError, match=r"no stack of 2 layers.*incomplete"):
        model(dense_shapes(present))


def test_a_gap_between_layers():
    shapes = {name: s for name, s in dense_shapes(3).items() if "layers.1." not in name}
    with pytest.raises(CheckpointError, match="no stack of 2 layers"):
        model(shapes)


def test_an_index_with_a_leading_zero_is_not_a_layer():
    shapes = {name.replace("layers.1.", "layers.01."): s for name, s in dense_shapes().items()}
    with pytest.raises(CheckpointError, match="no stack of 2 layers"):
        model(shapes)


def test_experts_one_by_one_are_one_parameter():
    shared = {"model.layers.1.mlp.shared_experts.up_proj.weight": ("BF16", (8, 6))}
    got = model(
        {**dense_shapes(), **routed(num_experts=12), **shared}, {**MOE_CONFIG, "num_experts": 12}
    )
    dense, moe = got.layers
    assert (dense.kind, moe.kind) == ("dense", "moe")
    experts = [parameter for parameter in moe.parameters if parameter.is_expert]
    assert names(experts) == ["mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"]
    # In the order of the indices, not of the text: 2 before 10.
    assert [tensor.name.split(".")[5] for tensor in experts[0].tensors] == list(map(str, range(12)))
    assert got.experts.num_experts == 12
    assert got.experts.num_experts_per_token == 2
    assert got.experts.bytes_per_expert == 2 * 96
    assert moe.expert_bytes == 12 * 2 * 96
    assert moe.segments["mlp.experts.up_proj"] == 12 * 96
    assert moe.segments["mlp.shared_experts.up_proj"] == 96


def test_a_number_for_each_expert_is_the_routers():
    of_router = {"model.layers.1.mlp.experts.e_score_correction_bias": ("F32", (4,))}
    got = model({**dense_shapes(), **routed(), **of_router}, MOE_CONFIG)
    experts = [parameter for parameter in got.layers[1].parameters if parameter.is_expert]
    assert names(experts) == ["mlp.experts.gate_proj.weight", "mlp.experts.up_proj.weight"]
    assert got.experts == Experts(num_experts=4, num_experts_per_token=2, bytes_per_expert=2 * 96)


def test_scales_count_under_their_weights_segment():
    prefix = "model.layers.1.mlp.experts"
    shapes = {
        f"{prefix}.{expert}.gate_proj.{part}": (dtype, shape)
        for expert in range(4)
        for part, dtype, shape in (
            ("weight", "F8_E4M3", (8, 6)),
            ("weight_scale_inv", "F32", (1, 1)),
        )
    }
    got = model({**dense_shapes(), **shapes}, MOE_CONFIG)
    assert got.layers[1].segments["mlp.experts.gate_proj"] == 4 * (48 + 4)
    assert got.experts.bytes_per_expert == 52


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.experts.gate_up_proj", (4, 8, 12)),
        ("mlp.experts.gate_up_proj_blocks", (4, 8, 3, 16)),
        ("mlp.experts.gate_up_proj_bias", (4, 12)),
        ("ffn.experts.mlp.w1", (4 * 6, 8)),
        ("block_sparse_moe.input_linear.weight", (4, 12, 8)),
    ],
)
def test_fused_experts(name, shape):
    got = model({**dense_shapes(), f"model.layers.1.{name}": ("BF16", shape)}, MOE_CONFIG)
    layer = got.layers[1]
    assert [parameter.name for parameter in layer.parameters if parameter.is_expert] == [name]
    assert got.experts.num_experts == 4
    assert got.experts.bytes_per_expert == layer.expert_bytes // 4


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("mlp.shared_expert.gate_proj.weight", (4, 8, 8)),
        ("mlp.gate.weight", (4, 8)),
        ("conv.weight", (4, 1, 4)),
    ],
)
def test_not_routed_experts(name, shape):
    got = model({**dense_shapes(), f"model.layers.1.{name}": ("BF16", shape)}, MOE_CONFIG)
    assert got.experts is None


def test_a_single_expert_stored_by_itself():
    got = model({**dense_shapes(), **routed(num_experts=1)}, {**MOE_CONFIG, "num_experts": 1})
    assert got.experts == Experts(1, 1, 2 * 96)


def test_an_expert_that_lacks_a_tensor():
    shapes = {**dense_shapes(), **routed()}
    del shapes["model.layers.1.mlp.experts.2.up_proj.weight"]
    with pytest.raises(CheckpointError, match=r"found 3 experts .*expert 2 has none"):
        model(shapes, MOE_CONFIG)


def test_tensors_decide_how_many_experts_there_are():
    got = model({**dense_shapes(), **routed()}, {**MOE_CONFIG, "num_experts": 8})
    assert got.experts.num_experts == 4
    assert got.notes == ("config.json says 8 experts a layer, the tensors 4",)


def test_config_that_does_not_say_how_many_experts_a_token_uses():
    got = model({**dense_shapes(), **routed()}, {**DENSE_CONFIG, "n_routed_experts": 4})
    assert got.experts.num_experts_per_token == 4
    assert "does not say how many experts a token uses" in got.notes[0]


@pytest.mark.parametrize(
    ("config", "tied"),
    [
        ({"tie_word_embeddings": True}, {"lm_head.weight"}),
        ({"tie_word_embeddings": False}, set()),
        # The model type's default, llama's here; a multimodal model's is its text part's.
        ({"tie_word_embeddings": None}, set()),
        ({"tie_word_embeddings": None, "model_type": "gemma2"}, {"lm_head.weight"}),
        ({"tie_word_embeddings": None, "model_type": "newest"}, set()),
        ({"tie_word_embeddings": None, "text_config": UNTIED_TEXT}, set()),
        ({"tie_word_embeddings": None, "text_config": TIED_TEXT}, {"lm_head.weight"}),
    ],
)
def test_stored_tied_head(config, tied):
    got = model(dense_shapes(), {**DENSE_CONFIG, **config})
    assert got.tied == tied
    # headers cannot tell whether it differs: transformers would use both
    assert got.total_bytes == hold(got).loaded_bytes
    assert got.num_parameters == 2 * 224 + 2 * 128
    assert any("both are loaded" in note for note in got.notes) == bool(tied)


def test_fingerprint_leaves_out_order_and_place():
    shapes = dense_shapes()
    backwards = dict(reversed(shapes.items()))
    assert model(shapes).headers_sha256 == model(backwards).headers_sha256
    other = {**shapes, "lm_head.weight": ("F16", (16, 8))}
    assert model(shapes).headers_sha256 != model(other).headers_sha256


FIGURES = st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.integers()
TYPES = st.sampled_from(["llama4_text", "modernbert-decoder", "qwen2", "smollm3", "mimo_v2_flash"])
VALUES = (
    FIGURES
    | TYPES
    | st.text(max_size=3)
    | st.lists(FIGURES, max_size=3)
    | st.just({"n_experts": 4})
)
KEYS = [
    "num_hidden_layers",
    "n_layer",
    "num_nextn_predict_layers",
    "num_experts",
    "num_experts_per_tok",
    "ffn_config",
    "hidden_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "attn_config",
    "kv_lora_rank",
    "dtype",
    "sliding_window",
    "layer_types",
    "sliding_window_pattern",
    "use_sliding_window",
    "max_window_layers",
    "no_rope_layers",
    "attention_chunk_size",
    "local_attention",
    "attn_logit_softcapping",
    "eos_token_id",
    "architectures",
    "num_kv_shared_layers",
    "tie_word_embeddings",
    "full_attention_interval",
    "linear_num_key_heads",
    "text_config",
    "is_encoder_decoder",
    "model_type",
]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(KEYS), VALUES, max_size=6))
def test_any_config_is_understood_or_refused(changes):
    shapes = {name: s for name, s in dense_shapes().items() if "k_proj" not in name}
    try:
        got = model({**shapes, **routed()}, {**MOE_CONFIG, **changes})
    except CheckpointError:
        return
    assert sum(got.layers[-1].segments.values()) == got.layers[-1].nbytes
    assert all(layer.kv_cache.nbytes(1, 16) >= 0 for layer in got.layers)


@pytest.mark.slow
def test_ninety_thousand_tensors():
    # The shape of DeepSeek-R1: 61 layers, 256 experts, a scale beside every weight.
    shapes = {"model.embed_tokens.weight": ("BF16", (100, 10))}
    for layer in range(62):
        shapes[f"model.layers.{layer}.self_attn.o_proj.weight"] = ("BF16", (10, 10))
        if layer >= 3:
            prefix = f"model.layers.{layer}.mlp"
            parts = ("gate_proj", "up_proj", "down_proj")
            experts = routed(prefix, 256, parts)
            scales = {f"{name}_scale_inv": ("F32", (1, 1)) for name in experts}
            shapes |= experts | scales
    config = {
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "num_nextn_predict_layers": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
    }
    got = model(shapes, config)
    assert got.num_tensors > 90_000
    assert got.experts.bytes_per_expert == 3 * (96 + 4)
    assert len(got.layers[60].parameters) == 7


def test_layers_that_are_stored_and_would_not_be_built():
    with pytest.raises(CheckpointError, match=r"found 2 layers .*, expected 1"):
        model(dense_shapes(), {**DENSE_CONFIG, "num_hidden_layers": 1})
    further = {**DENSE_CONFIG, "num_hidden_layers": 1, "num_nextn_predict_layers": 1}
    assert len(model(dense_shapes(), further).layers) == 1
