"""What is understood of each architecture, saved by transformers or laid out as published."""

from dataclasses import dataclass, replace
from typing import Any

import pytest

from offplan.checkpoint.assemble import assemble
from offplan.checkpoint.model import Experts, KVCache
from offplan.checkpoint.open import open_model
from offplan.checkpoint.tensors import Stored, TensorInfo
from offplan.held.held import hold
from offplan.report.model import render_model
from tests.checkpoint.architectures import MODELS
from tests.rendering import Terminal, show

QKVO = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj"
MLP = "mlp.gate_proj mlp.up_proj mlp.down_proj"
EXPERTS = "mlp.gate mlp.experts.gate_proj mlp.experts.up_proj mlp.experts.down_proj"
SHARED = EXPERTS + "".join(f" mlp.shared_experts.{p}_proj" for p in ("gate", "up", "down"))
MLA = "self_attn.kv_a_proj_with_mqa self_attn.kv_b_proj self_attn.o_proj"
FUSED = "dense query_key_value"
OUTSIDE = "lm_head model.embed_tokens model.norm"
OLD_MLP = "mlp.dense_h_to_4h mlp.dense_4h_to_h"
EACH = KVCache(2 * 2 * 8 * 2)
ALL = KVCache(2 * 4 * 8 * 2)
ONE = KVCache(2 * 1 * 8 * 2)
NEAR = KVCache(EACH.bytes_per_token, window=4)
LATENT = KVCache((16 + 8) * 2)
STATE = KVCache(state_bytes=(2 * 2 * 8 + 4 * 8) * 4 * 2 + 4 * 8 * 8 * 4)
SMALL = Experts(4, 2, 3 * 32 * 16 * 2)
LARGE = Experts(4, 2, 3 * 32 * 48 * 2)


@dataclass(frozen=True)
class Expected:
    """What a saved model must be understood as."""

    segments: str
    """Of the last layer, norms left out."""
    caches: list[KVCache]
    kinds: str = "ddd"
    experts: Experts | None = None
    prefix: str = "model.layers"
    outside: str = OUTSIDE
    """Vision towers left out."""


GPT_OSS = Experts(4, 2, (3 * 32 * 48 + 2 * 48 + 32) * 2)
GPT_OSS_CACHES = [KVCache(64, 128), EACH, KVCache(64, 128)]
LLAMA4_CACHES = [KVCache(64, 8192)] * 3 + [EACH]
TIED = "model.embed_tokens model.norm"
GEMMA3 = [NEAR] * 5 + [EACH]
LANGUAGE = "language_model."
PROJECTOR = " multi_modal_projector.linear_1"
ARCHITECTURES = {
    "llama": Expected(f"{QKVO} {MLP}", [EACH] * 3),
    "mistral": Expected(f"{QKVO} {MLP}", [NEAR] * 3),
    "qwen2": Expected(f"{QKVO} {MLP}", [EACH] * 3),
    "qwen2-sliding": Expected(f"{QKVO} {MLP}", [EACH, NEAR, NEAR]),
    "qwen3": Expected(f"{QKVO} {MLP}", [EACH] * 3),
    "qwen3-tied": Expected(f"{QKVO} {MLP}", [EACH] * 3, outside=TIED),
    "qwen3-sharded": Expected(f"{QKVO} {MLP}", [EACH] * 3),
    "qwen3_moe": Expected(f"{QKVO} {EXPERTS}", [EACH] * 3, "mmm", SMALL),
    "qwen3_next": Expected(
        f"{QKVO} {SHARED.replace('shared_experts', 'shared_expert')} mlp.shared_expert_gate",
        [STATE] * 3 + [EACH],
        "mmmm",
        SMALL,
    ),
    "qwen3_5": Expected(
        f"{QKVO} {MLP}",
        [STATE] * 3 + [EACH],
        "dddd",
        prefix="model.language_model.layers",
        outside=OUTSIDE.replace("model.", "model.language_model."),
    ),
    "mixtral": Expected(
        f"{QKVO} {EXPERTS}".replace("mlp", "block_sparse_moe")
        .replace("gate_proj", "w1")
        .replace("down_proj", "w2")
        .replace("up_proj", "w3"),
        [EACH] * 3,
        "mmm",
        LARGE,
    ),
    "deepseek_v2": Expected(f"self_attn.q_proj {MLA} {SHARED}", [LATENT] * 3, "dmm", SMALL),
    "deepseek_v3": Expected(
        f"self_attn.q_a_proj self_attn.q_b_proj {MLA} {SHARED}", [LATENT] * 3, "dmm", SMALL
    ),
    "gpt_oss": Expected(f"{QKVO} self_attn mlp.experts mlp.router", GPT_OSS_CACHES, "mmm", GPT_OSS),
    "glm4_moe": Expected(f"{QKVO} {SHARED}", [EACH] * 3, "dmm", SMALL),
    "gemma3": Expected(f"{QKVO} {MLP}", GEMMA3, "dddddd", outside=TIED),
    "gemma3-vision": Expected(
        f"{QKVO} {MLP}",
        GEMMA3,
        "dddddd",
        prefix="language_model.model.layers",
        outside=f"{LANGUAGE}model.embed_tokens {LANGUAGE}model.norm multi_modal_projector "
        "multi_modal_projector.mm_soft_emb_norm",
    ),
    "phi3": Expected(
        "self_attn.qkv_proj self_attn.o_proj mlp.gate_up_proj mlp.down_proj", [NEAR] * 3
    ),
    "falcon": Expected(
        f"self_attention.query_key_value self_attention.dense {OLD_MLP}",
        [ONE] * 3,
        prefix="transformer.h",
        outside="transformer.word_embeddings transformer.ln_f",
    ),
    "falcon-old": Expected(
        f"self_attention.query_key_value self_attention.dense {OLD_MLP}",
        [ALL] * 3,
        prefix="transformer.h",
        outside="transformer.word_embeddings transformer.ln_f",
    ),
    "gpt_neox": Expected(
        f"attention.query_key_value attention.dense {OLD_MLP}",
        [ALL] * 3,
        prefix="gpt_neox.layers",
        outside="embed_out gpt_neox.embed_in gpt_neox.final_layer_norm",
    ),
    "gpt2": Expected(
        "attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj ln_1 ln_2",
        [ALL] * 3,
        prefix="transformer.h",
        outside="transformer.wte transformer.wpe transformer.ln_f",
    ),
    "opt": Expected(
        "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.out_proj fc1 fc2",
        [ALL] * 3,
        prefix="model.decoder.layers",
        outside=" ".join(
            f"model.decoder.{name}"
            for name in ("embed_tokens", "embed_positions", "final_layer_norm")
        ),
    ),
    "granitemoe": Expected(
        f"{QKVO} block_sparse_moe.input_linear block_sparse_moe.output_linear "
        "block_sparse_moe.router.layer",
        [EACH] * 3,
        "mmm",
        LARGE,
    ),
    "llava": Expected(
        f"{QKVO} {MLP}",
        [EACH] * 3,
        prefix="language_model.model.layers",
        outside=" ".join(LANGUAGE + name for name in OUTSIDE.split())
        + f"{PROJECTOR} multi_modal_projector.linear_2",
    ),
    "llama4": Expected(
        f"{QKVO} feed_forward.router feed_forward.experts "
        + " ".join(f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")),
        LLAMA4_CACHES,
        "dmdm",
        Experts(4, 1, LARGE.bytes_per_expert),
        "language_model.model.layers",
        " ".join(LANGUAGE + name for name in OUTSIDE.split()) + PROJECTOR,
    ),
    "dbrx": Expected(
        "ffn.experts.mlp ffn.router.layer norm_attn_norm.attn.Wqkv norm_attn_norm.attn.out_proj",
        [EACH] * 3,
        "mmm",
        LARGE,
        "transformer.blocks",
        "lm_head transformer.wte transformer.norm_f",
    ),
}


def owners(names):
    return {name.rpartition(".")[0] for name in names}


@pytest.mark.parametrize("name", MODELS)
def test_saved_model_is_understood(saved, name):
    model, expected = open_model(str(saved(name)[0])), ARCHITECTURES[name]
    assert [layer.prefix for layer in model.layers] == [
        f"{expected.prefix}.{index}" for index in range(len(expected.kinds))
    ]
    assert "".join(layer.kind[0] for layer in model.layers) == expected.kinds
    segments = {s for s in model.layers[-1].segments if "norm" not in s.rpartition(".")[2]}
    assert segments == set(expected.segments.split())
    assert [layer.kv_cache for layer in model.layers] == expected.caches
    assert model.experts == expected.experts
    outside = owners(tensor.name for tensor in model.outside)
    assert {name for name in outside if "visi" not in name and "visual" not in name} == (
        set(expected.outside.split())
    )
    assert not model.notes
    assert not model.tied
    assert (
        model.not_loaded
        == model.towers
        == {
            tensor.name
            for tensor in model.outside
            if any(part in tensor.name for part in ("vision", "visual", "projector"))
            and model.architecture.runs_text_alone
        }
    )


@pytest.mark.parametrize("name", MODELS)
def test_report_fits_a_terminal_of_eighty_columns(saved, name, monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "80")
    model = replace(open_model(str(saved(name)[0])), source=name)
    lines = show(*render_model(model), file=Terminal()).splitlines()
    assert max(map(len, lines)) <= 80
    # No name was folded: each segment's row has its share.
    start = lines.index(next(line for line in lines if line.startswith("segment "))) + 2
    rows = lines[start : lines.index("", start)] if "" in lines[start:] else lines[start:]
    assert all("%" in row for row in rows if row.strip())


Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes(dtype: str, prefix: str = "", /, **sizes: tuple[int, ...]) -> Shapes:
    """Tensors of one type; names write a dot as a double underscore."""
    return {prefix + name.replace("__", "."): (dtype, size) for name, size in sizes.items()}


def understand(config: dict[str, Any], tensors: Shapes):
    infos = (TensorInfo(name, *shape) for name, shape in tensors.items())
    return assemble("test", Stored(config, tuple(infos)))


def block_scaled(name: str, rows: int, columns: int) -> Shapes:
    """A weight in FP8 with a scale for each block of 128 x 128."""
    blocks = (-(-rows // 128), -(-columns // 128))
    return {
        f"{name}.weight": ("F8_E4M3", (rows, columns)),
        f"{name}.weight_scale_inv": ("F32", blocks),
    }


def test_deepseek_v3_as_published():
    """Real sizes, two layers of 61 (the first three are dense), the prediction layer after them."""
    tensors: Shapes = shapes(
        "BF16",
        model__embed_tokens__weight=(129280, 7168),
        model__norm__weight=(7168,),
        lm_head__weight=(129280, 7168),
    )
    for index in range(3):
        prefix = f"model.layers.{index}."
        for name, rows, columns in (
            ("self_attn.q_a_proj", 1536, 7168),
            ("self_attn.q_b_proj", 24576, 1536),
            ("self_attn.kv_a_proj_with_mqa", 576, 7168),
            ("self_attn.kv_b_proj", 32768, 512),
            ("self_attn.o_proj", 7168, 16384),
        ):
            tensors |= block_scaled(prefix + name, rows, columns)
        tensors |= shapes("BF16", prefix, input_layernorm__weight=(7168,))
        mlps = ["mlp"] if index == 0 else [f"mlp.experts.{e}" for e in range(256)]
        width = 18432 if index == 0 else 2048
        for mlp in mlps:
            tensors |= block_scaled(f"{prefix}{mlp}.gate_proj", width, 7168)
            tensors |= block_scaled(f"{prefix}{mlp}.up_proj", width, 7168)
            tensors |= block_scaled(f"{prefix}{mlp}.down_proj", 7168, width)
        if index:
            tensors |= shapes("BF16", prefix, mlp__gate__weight=(256, 7168))
            tensors |= shapes("F32", prefix, mlp__gate__e_score_correction_bias=(256,))
    tensors |= shapes(
        "BF16",
        "model.layers.2.",
        eh_proj__weight=(7168, 14336),
        enorm__weight=(7168,),
        hnorm__weight=(7168,),
        embed_tokens__weight=(129280, 7168),
        shared_head__head__weight=(129280, 7168),
        shared_head__norm__weight=(7168,),
    )
    model = understand(
        {
            "model_type": "deepseek_v3",
            "num_hidden_layers": 2,
            "num_nextn_predict_layers": 1,
            "n_routed_experts": 256,
            "num_experts_per_tok": 8,
            "kv_lora_rank": 512,
            "qk_rope_head_dim": 64,
            "torch_dtype": "bfloat16",
            "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
        },
        tensors,
    )
    assert [layer.kind for layer in model.layers] == ["dense", "moe"]
    # The scales count under their weights: 16 x 56 blocks of 4 bytes for each of three matrices.
    assert model.experts == Experts(256, 8, 3 * (2048 * 7168 + 16 * 56 * 4))
    assert model.layers[1].segments["self_attn.o_proj"] == 7168 * 16384 + 56 * 128 * 4
    assert {layer.kv_cache for layer in model.layers} == {KVCache((512 + 64) * 2)}
    assert all(name.startswith("model.layers.2.") for name in model.not_loaded)
    assert hold(model).loaded_bytes == sum(layer.nbytes for layer in model.layers) + 2 * (
        2 * 129280 * 7168 + 7168
    )
    assert model.dtype == "bfloat16"


def test_gpt_oss_as_published():
    """gpt-oss-20b: MXFP4 experts, two weights a byte and a scale for 32 of them."""
    tensors = shapes(
        "BF16",
        model__embed_tokens__weight=(201088, 2880),
        model__norm__weight=(2880,),
        lm_head__weight=(201088, 2880),
    )
    for index in range(24):
        prefix = f"model.layers.{index}."
        tensors |= shapes(
            "BF16",
            prefix,
            input_layernorm__weight=(2880,),
            post_attention_layernorm__weight=(2880,),
            self_attn__sinks=(64,),
            self_attn__q_proj__weight=(4096, 2880),
            self_attn__q_proj__bias=(4096,),
            self_attn__k_proj__weight=(512, 2880),
            self_attn__k_proj__bias=(512,),
            self_attn__v_proj__weight=(512, 2880),
            self_attn__v_proj__bias=(512,),
            self_attn__o_proj__weight=(2880, 4096),
            self_attn__o_proj__bias=(2880,),
            mlp__router__weight=(32, 2880),
            mlp__router__bias=(32,),
            mlp__experts__gate_up_proj_bias=(32, 5760),
            mlp__experts__down_proj_bias=(32, 2880),
        )
        tensors |= shapes(
            "U8",
            prefix,
            mlp__experts__gate_up_proj_blocks=(32, 5760, 90, 16),
            mlp__experts__gate_up_proj_scales=(32, 5760, 90),
            mlp__experts__down_proj_blocks=(32, 2880, 90, 16),
            mlp__experts__down_proj_scales=(32, 2880, 90),
        )
    model = understand(
        {
            "model_type": "gpt_oss",
            "num_hidden_layers": 24,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 12,
            "tie_word_embeddings": False,
            "quantization_config": {"quant_method": "mxfp4"},
        },
        tensors,
    )
    # 13.76 GB, the size of the files on the Hub less their headers.
    assert model.total_bytes == 13_761_264_768
    assert model.experts == Experts(32, 4, (5760 + 2880) * (90 * 17 + 2))
    assert model.layers[0].segments["mlp.experts"] == 32 * model.experts.bytes_per_expert
    assert [layer.kv_cache for layer in model.layers] == [KVCache(2048, 128), KVCache(2048)] * 12
    assert model.num_parameters == 20_914_757_184


def test_prediction_layers_beside_the_stack_are_not_loaded():
    """Qwen3-Next and Qwen3.5 publish them under ``mtp``, with a layer and experts of its own."""
    attention = {"linear_attn__in_proj_qkvz__weight": (8, 8)}
    tensors = shapes("BF16", model__embed_tokens__weight=(16, 8), lm_head__weight=(16, 8))
    for index in range(2):
        tensors |= shapes("BF16", f"model.layers.{index}.", **attention)
    tensors |= shapes("BF16", "mtp.", fc__weight=(8, 16), layers__0__mlp__gate__weight=(4, 8))
    model = understand({"model_type": "qwen3_next", "num_hidden_layers": 2}, tensors)
    assert model.not_loaded == {"mtp.fc.weight", "mtp.layers.0.mlp.gate.weight"}


@pytest.mark.parametrize(
    ("prefix", "attention", "dtype"),
    [("h", "attn", "F32"), ("gpt_neox.layers", "attention", "U8"), ("transformer.h", "attn", "U8")],
)
def test_stored_causal_masks_are_not_loaded(prefix, attention, dtype):
    """GPT-2, Pythia and GPT-J store their masks as buffers beside real biases."""
    layer = {
        f"{prefix}.0.{attention}.bias": (dtype, (1, 1, 64, 64)),
        f"{prefix}.0.{attention}.masked_bias": ("F32", ()),
        f"{prefix}.0.{attention}.dense.weight": ("F16", (8, 8)),
        f"{prefix}.0.{attention}.dense.bias": ("F16", (8,)),
    }
    config = {"model_type": "gpt2", "n_layer": 1, "n_head": 2, "n_embd": 8}
    model = understand(config, layer)
    assert model.not_loaded == {name for name in layer if "dense" not in name}
    loaded = sum(parameter.nbytes for parameter in hold(model).parameters)
    assert model.layers[0].nbytes == loaded == (64 + 8) * 2
