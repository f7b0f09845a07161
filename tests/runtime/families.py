"""Tiny models of every causal family that transformers has, and how each compares with stock."""

import re
import tempfile
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain, groupby
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    PreTrainedConfig,
)

from offplan.checkpoint import model_types
from offplan.checkpoint.open import open_model
from offplan.errors import OffplanError
from offplan.held.held import hold
from offplan.plan import Offload, Rule
from offplan.planner.classes import expert_class
from offplan.runtime.model.frequencies import RENEWING
from offplan.runtime.stock.generation import reads_chunks
from offplan.transformers_private import complete_outputs
from tests.runtime.plans import group, in_parts, offload, open_session

TEXT_PARTS = [
    (family, text)
    for family, texts in model_types.TEXT_PARTS.items()
    for text in texts
    if text != family
]
"""Multimodal families with their text parts. One of the family's own model type, as Qwen2-VL's on
the Hub, has no part of the config to itself."""
NUM_STEPS = 6
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4]])
BATCH = torch.tensor([[3, 14, 15, 9, 26, 40, 33], [58, 9, 7, 9, 3, 21, 17]])
LONG = torch.randint(3, 60, (1, 40 + NUM_STEPS), generator=torch.Generator().manual_seed(0))
"""A prompt of 40 tokens, and what follows."""
REQUESTS = ((PROMPT, 64), (PROMPT, 3), (BATCH, 3))
"""Prompts, and the chunks that they are read in; all go past a window of six tokens."""
TOLERANCE = 1e-4
"""Part of the largest logit that float32 logits may differ by: sums are made in another order."""
MOST_ROUNDING = 1.5
"""Distance of bfloat16 logits from float32 ones, as a multiple of what stock's have."""
MOST_PARAMETERS = 20_000_000

SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What most families call their sizes; each ignores what it does not have."""
SIZES |= dict.fromkeys(("n_embd", "d_model"), 32) | dict.fromkeys(("n_layer", "n_layers"), 5)
SIZES |= dict.fromkeys(("n_head", "n_heads", "num_local_experts", "n_routed_experts"), 4)
SIZES |= dict.fromkeys(("num_experts", "moe_num_experts", "linear_num_value_heads"), 4)
SIZES |= dict.fromkeys(("n_inner", "ffn_dim", "ffn_hidden_size", "intermediate_size_mlp"), 48)
SIZES |= dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 16)
SIZES |= dict.fromkeys(("expert_ffn_hidden_size", "kv_lora_rank", "q_lora_rank"), 16)
SIZES |= dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rotary_dim"), 8)
SIZES |= dict.fromkeys(("attn_head_dim", "kv_channels", "global_head_dim"), 8)
SIZES |= dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), 8)
SIZES |= dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k", "zero_expert_num"), 2)
SIZES |= dict.fromkeys(("linear_num_key_heads", "num_global_key_value_heads"), 2)
SIZES |= dict.fromkeys(("n_shared_experts", "n_group", "topk_group", "first_k_dense_replace"), 1)
SIZES |= dict.fromkeys(("decoder_layers", "encoder_layers"), 5)
SIZES |= {"word_embed_proj_dim": 32, "n_positions": 128, "linear_conv_kernel_dim": 4}
SIZES |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64, "decoder_sparse_step": 1}
SIZES |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}

_WHOLE_HEADS = """
axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 glm4_moe_lite glm_moe_dsa kimi_linear longcat_flash
"""
_MROPES = """
cosmos3_edge_text glm4v_text glm4v_moe_text glm_ocr_text hunyuan_vl_text paddleocr_vl_text
qwen2_vl_text qwen2_5_vl_text qwen2_5_omni_text qwen3_omni_moe_text qwen3_5_text qwen3_5_moe_text
"""
MROPE = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 1.0,
    "mrope_section": [2, 1, 1],
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_d_ssm": 64}
_MAMBA |= {"ssm_state_size": 16, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 1}
_DOTS3 = {"num_key_value_heads": 4, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4}
_DOTS3 |= {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 16}
_DOTS3 |= {"swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
OWN_SIZES: dict[str, dict[str, Any]] = {
    **{family: {"num_key_value_heads": 4} for family in _WHOLE_HEADS.split()},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "num_kv_shared_layers": 3,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0, 0.0],
    },
    "lfm2_moe": {"layer_types": ["full_attention"] * 5},
    # or neither chunks nor positions would count before thousands of tokens
    **{name: {"attention_chunk_size": 6, "floor_scale": 4} for name in ("llama4", "llama4_text")},
    # the last is 5.17's name
    "longcat_flash": {"n_layer": None, "n_layers": None, "num_key_value_heads": 4, "num_layers": 5},
    # stock zeroes the padding's row of the embedding, whatever is stored: docs/families.md
    "youtu": {"num_key_value_heads": 4, "pad_token_id": None},
    **{family: {"rope_parameters": MROPE} for family in _MROPES.split()},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp", "moe"],
        **_MAMBA,
    },
    "granitemoehybrid": {"layer_types": [*["mamba", "attention"] * 2, "mamba"], **_MAMBA},
    "bamba": {"attn_layer_indices": [1, 3], **_MAMBA},
    "falcon_h1": _MAMBA,
    "mamba2": {"num_heads": 4, "head_dim": 16, "state_size": 16, "n_groups": 1},
    "bailing_hybrid": {
        "layer_group_size": 2,
        "num_experts_per_token": 2,
        "num_expert_group": 1,
        "num_key_value_heads": 4,
    },
    "zamba": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "attention_hidden_size": 64,
        "attention_head_dim": 16,
        "mamba_d_state": 4,
        "layers_block_type": ["linear_attention", *["hybrid", "linear_attention"], *["hybrid"] * 2],
    },
    "zamba2": {
        "num_key_value_heads": 4,
        "head_dim": None,
        "kv_channels": None,
        "n_mamba_heads": 4,
        "mamba_d_state": 8,
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "layers_block_type": ["linear_attention", *["hybrid"] * 4],
    },
    # a prompt's chunks would take 64 x 64 x 128 values for each of 32 heads
    "kimi_linear": {"num_key_value_heads": 4, "linear_num_heads": 4, "linear_head_dim": 16},
    "gpt_neo": {"num_layers": 5, "attention_types": [[["global", "local"], 2], [["global"], 1]]},
    "minicpm3": {"num_key_value_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
    "dots3_note": _DOTS3,
    "dots3_note_text": _DOTS3,
    "cohere_compass_text": {
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), MROPE),
    },
    "ernie4_5_vl_moe_text": {
        "moe_intermediate_size": [16, 16],
        "rope_parameters": MROPE | {"mrope_section": [1, 1, 2]},
    },
    "glm5_next_text": {
        "num_key_value_heads": 4,
        "qk_rope_head_dim": 0,
        "index_kpool": 4,
        "linear_num_heads": 4,
        "linear_head_dim": 16,
    },
    "inkling2_text": {"unpadded_vocab_size": 64},
    "mistral_large4_text": {"num_key_value_heads": 4},
    "step3p5": {
        "share_expert_dim": 16,
        "sliding_window": 6,
        "num_sliding_attention_heads": 8,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "qwen4_exp_text": {
        "hc_lowrank": 8,
        "ple_layer_ids": [2, 3],
        "ngram_vocab_size_base": 64,
        "heads_per_ngram": 2,
        "split_ngram_parts": 2,
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
    },
}
"""What a family insists on; None leaves a size out."""

VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "depth": 2,
    "num_attention_heads": 2,
    "num_heads": 2,
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 14,
    "fullatt_block_indexes": [1],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 4,
    "embed_dim": 16,
}
VISION |= dict.fromkeys(
    ("out_hidden_size", "text_hidden_size", "adapter_out_dim", "output_dim"), 32
)
VISION |= dict.fromkeys(("projection_hidden_dim", "encoder_ffn_dim", "mm_embed_dim"), 24)
VISION |= dict.fromkeys(("encoder_layers", "num_layers", "n_layers"), 2)
VISION |= dict.fromkeys(("encoder_attention_heads", "num_key_value_heads"), 2)
VISION |= dict.fromkeys(("d_model", "hidden_dim", "downsample_hidden_size"), 16)
"""Sizes of what reads images and sound, as ``SIZES`` are those of what reads text."""
OWN_TOWERS: dict[str, dict[str, Any]] = {
    "dots3_note": {
        "vision_config": {"mlp_layer_types": ["dense", "sparse"], "adapter_in_dim": 16},
        "audio_config": {"adapter_input_size": 16},
    },
    "fun_asr_nano": {"adaptor_config": {"hidden_size": 32, "intermediate_size": 8}},
    "janus": {
        "vq_config": {"projection_dim": 16, "num_embeddings": 64, "image_token_embed_dim": 16}
    },
    "glm5_next": {"vision_config": {"projection_intermediate_size": 24}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0], "text_hidden_size": 32}},
    "muse_glimmer": {"vision_config": {"pos_emb_height": 2, "pos_emb_width": 2}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2, "summary_idxs": [0]}},
}
"""What a family's towers insist on."""
OWN_WHOLES: dict[str, dict[str, Any]] = {
    "muse_glimmer": {"out_hidden_size": 24, "projector_hidden_size": 24},
    "nemotron_h_omni": {"projector_hidden_size": 24},
}
"""What a family's own config insists on."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "windows in some layers": {
        "sliding_window": 6,
        "use_sliding_window": True,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "shared keys and values": {
        "num_kv_shared_layers": 3,
        "sliding_window": 6,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "to both sides": {"is_causal": False},
    "to both sides, by the mask": {"use_bidirectional_attention": True},
    "tied": {"tie_word_embeddings": True},
    "untied": {"tie_word_embeddings": False},
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "rope_theta": 10000.0,
        }
    },
    "biases": dict.fromkeys(("attention_bias", "mlp_bias", "use_bias", "bias", "qkv_bias"), True),
    "chunks": {"attention_chunk_size": 6},
    "as a decoder": {"is_decoder": True},
    "shared indexers": {"indexer_types": ["full", "shared", "full", "shared", "shared"]},
    "soft caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
}
"""Changes to a config that change what comes out in some families; others ignore them."""
LIMIT = 10
"""Tokens up to which rotary embeddings stay as they are; REQUESTS begin or grow beyond them."""
_DYNAMIC = {"rope_type": "dynamic", "factor": 3.3, "rope_theta": 10000.0}
_LONGROPE = {
    "rope_type": "longrope",
    "factor": 4.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.5, 2.0, 3.0, 4.0],
    "short_mscale": 1.1,
    "long_mscale": 1.3,
    "original_max_position_embeddings": LIMIT,
    "rope_theta": 10000.0,
}
CHANGING: dict[str, dict[str, Any]] = {
    "dynamic": {"max_position_embeddings": LIMIT, "rope_parameters": _DYNAMIC},
    "dynamic with alpha": {
        "max_position_embeddings": LIMIT,
        "rope_parameters": _DYNAMIC | {"alpha": 8.0},
    },
    "longrope": {"original_max_position_embeddings": LIMIT, "rope_parameters": _LONGROPE},
    "longrope in some layers": VARIANTS["windows in some layers"]
    | {
        "rope_parameters": {
            "full_attention": _LONGROPE,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        }
    },
}
"""Changes by which keys keep the rotation of their pass: stock's own cache is what to compare with,
but for families that read the text again (which transformers 5.17 does wrong)."""
VARIANTS |= CHANGING


@dataclass(frozen=True)
class Outcome:
    """How a family compared with stock transformers."""

    kind: str
    """``exact`` (in bfloat16: as near as stock), ``refused``, ``wrong``, or ``not built`` where
    transformers itself does not."""
    why: str = ""


def compare(
    family: str,
    variant: str,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    *,
    text: str | None = None,
    change: Callable[[Path], object] = lambda folder: None,
) -> Outcome:
    """Build a tiny model of a family, run it by a plan, and compare it with stock transformers.

    In float32 the logits must be the same. In bfloat16 they must be about as near to those of
    stock's float32 as those of stock's bfloat16 are: sums are rounded in another order. ``text`` is
    the model type of a multimodal family's text part, which alone is then run, while all of the
    model is built, saved and compared with. ``change`` is made to what was saved.
    """
    auto_class = AutoModelForCausalLM if text is None else AutoModelForMultimodalLM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            config = make_config(family, VARIANTS[variant], text)
            save_model(config, auto_class, dtype, seed, folder)
            change(folder)
            stock = load_stock(folder, auto_class=auto_class)
            cached = variant in CHANGING and family not in RENEWING
            made = {
                id(prompt): run_stock(stock, prompt, cached=cached) for prompt in (PROMPT, BATCH)
            }
            expected = [made[id(prompt)] for prompt, _ in REQUESTS]
            tokens = [
                extend(prompt, logits)
                for (prompt, _), logits in zip(REQUESTS, expected, strict=True)
            ]
            rounding = 0.0
            if dtype is not torch.float32:
                stock = load_stock(folder, dtype, auto_class)
                rounding = _distance([_score_stock(stock, each) for each in tokens], expected)
        except Exception as error:
            return Outcome("not built", f"{type(error).__name__}: {error}")
        try:
            got = []
            chunks = [chunk for _, chunk in REQUESTS]
            for chunk, texts in groupby(zip(chunks, tokens, strict=True), itemgetter(0)):
                decision = offload(*_rules_for(folder, chunk), prefill_chunk=chunk)
                got += run_each_planned(folder, [text for _, text in texts], decision)
        except OffplanError as error:
            return Outcome("refused", str(error).replace(name, family))
    if rounding:
        ratio = _distance(got, expected) / rounding
        return Outcome("exact" if ratio < MOST_ROUNDING else "wrong", f"{ratio:.2f} of stock's")
    ours, wanted = _join(got), _join(expected)
    difference = float((ours - wanted).abs().max() / wanted.abs().max())
    return Outcome("exact" if difference < TOLERANCE else "wrong", f"{difference:.1e}")


def _rules_for(folder: Path, chunk: int) -> list[Rule]:
    """Take every second layer; of prompts in several chunks all routed experts, in parts."""
    stage, every_second = hold(open_model(str(folder))), group(2, 1)
    if stage.experts is None or stage.experts.num_experts % 2 or chunk == REQUESTS[0][1]:
        return [every_second]
    segments = {"cpu_offload_params": expert_class(stage).segments}
    return [in_parts(2).model_copy(update=segments), every_second]


def compare_stock(
    family: str,
    variant: str = "plain",
    dtype: torch.dtype = torch.float32,
    *,
    slots: int = 2,
    text: str | None = None,
    change: Callable[[Path], object] = lambda folder: None,
    tells_chunks: bool = False,
) -> Outcome:
    """Run a tiny model by transformers' own passes, and compare it with stock's own ``generate``.

    Every second layer is offloaded, and copies are made at the latest legal moment. Logits must be
    the same to the last bit. With ``tells_chunks`` the ``why`` of an exact outcome says whether
    prompts in chunks give what whole ones do: ``chunks`` or ``whole``. ``text`` is as in
    ``compare``.
    """
    auto_class = AutoModelForCausalLM if text is None else AutoModelForMultimodalLM
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            config = make_config(family, VARIANTS[variant], text)
            save_model(config, auto_class, dtype, 0, folder)
            PUBLISHED.get(family, change)(folder)
            stock = auto_class.from_pretrained(folder, dtype=dtype)
            complete_outputs(stock)  # or transformers 5.24 would run no Llama 4
            # torch folds products of three dimensions where weights ask for gradients
            stock.requires_grad_(False)
            whole = [run_stock(stock, prompt, cached=True) for prompt in (PROMPT, BATCH)]
        except Exception as error:
            return Outcome("not built", f"{type(error).__name__}: {error}")
        texts = [extend(each, logits) for each, logits in zip((PROMPT, BATCH), whole, strict=True)]
        decision = offload(group(2, 1), prefetch_step=slots)
        try:
            *got, of_long = run_each_planned(folder, [*texts, LONG], decision, stock=True)
            if not torch.equal(_join(got), _join(whole)):
                difference = (_join(got) - _join(whole)).abs().max()
                return Outcome("wrong", f"{float(difference):.1e}")
        except OffplanError as error:
            return Outcome("refused", str(error).replace(name, family))
        # in shorter types sums in another order are rounded otherwise
        is_to_be = dtype is torch.float32 and reads_chunks(stock.config)
        if not is_to_be and not tells_chunks:
            return Outcome("exact")
        is_equal = _reads_chunks(folder, of_long)
        if is_to_be and not is_equal:
            return Outcome("wrong", "in chunks")
        return Outcome("exact", "chunks" if is_equal else "whole")


def _reads_chunks(folder: Path, whole: list[torch.Tensor]) -> bool:
    """Whether transformers' own passes give of LONG in chunks what they gave of the whole."""
    try:
        with patch("offplan.runtime.stock.runner.reads_chunks", return_value=True):
            parts = run_planned(folder, LONG, offload(group(2, 1), prefill_chunk=7), stock=True)
    except Exception:  # whatever transformers does with a chunk
        return False
    difference = (_join([parts]) - _join([whole])).abs().max() / _join([whole]).abs().max()
    return float(difference) < TOLERANCE


def compare_rounding(family: str, variant: str) -> Outcome:
    """Compare in bfloat16; what is further away than stock must be so for each of three drawings.

    Where scores of experts are all but equal, rounding alone sends a token to another one, which
    moves a few logits far, in stock's bfloat16 or in ours.
    """
    for seed in range(3):
        outcome = compare(family, variant, torch.bfloat16, seed)
        if outcome.kind != "wrong":
            break
    return outcome


Logits = list[list[torch.Tensor]]
"""Of each request, those of each step."""


def _join(logits: Logits) -> torch.Tensor:
    return torch.cat([*chain(*logits)]).float()


def _distance(some: Logits, others: Logits) -> float:
    """Mean absolute difference over all positions."""
    return float((_join(some) - _join(others)).abs().mean())


def save_model(config: Any, auto_class: Any, dtype: torch.dtype, seed: int, folder: Path) -> None:
    """Save a model of this config; raises ValueError for one that is not tiny."""
    with torch.device("meta"):
        meta = auto_class.from_config(config)
    if sum(parameter.numel() for parameter in meta.parameters()) > MOST_PARAMETERS:
        raise ValueError("its config has no sizes for tests")
    model = auto_class.from_config(config, dtype=torch.float32)
    draw_weights(model, seed).to(dtype).save_pretrained(folder)


def _save_as_published(folder: Path) -> None:
    """Name and type tensors as DeepSeek-V4's own files do, which transformers 5.23 never writes.

    What it writes, ``model.norm.weight``, it does not find again: its mapping takes it for a norm
    of a layer's.
    """
    path = folder / "model.safetensors"
    named = {}
    for name, tensor in load_file(path).items():
        name = name.removeprefix("model.").replace("embed_tokens.", "embed.")
        name = name.replace("hc_head.hc_", "hc_head_").replace(".attn.norm.", ".attn.kv_norm.")
        is_wide = re.search(r"hc_|\.attn_sink$|\.ape$|\.gate\.bias$", name)
        named[name] = tensor.float() if is_wide else tensor
    save_file(named, path)


PUBLISHED: dict[str, Callable[[Path], object]] = {"deepseek_v4": _save_as_published}
"""What makes a saved folder of a family one that transformers reads."""


def make_config(family: str, changes: dict[str, Any], text: str | None = None) -> Any:
    """Make the config of a tiny model; ``text`` is as in ``compare``."""
    changes = deepcopy(changes)  # configs complete the dictionaries that they are given
    sizes = {**SIZES, **OWN_SIZES.get(text or family, {}), **changes}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    if text is not None:
        tie = {name: value for name, value in changes.items() if name == "tie_word_embeddings"}
        parts = {"text_config": sizes | {"model_type": text}, **_make_towers(family)}
        return CONFIG_MAPPING[family](**(parts | OWN_WHOLES.get(family, {})), **tie)
    config = CONFIG_MAPPING[family](**sizes)
    part = config.get_text_config()
    if part is config:
        return config
    return CONFIG_MAPPING[family](text_config=type(part)(**sizes).to_dict(), **changes)


def _make_towers(family: str) -> dict[str, Any]:
    """Make the parts of a multimodal family's config beside its text, in sizes for tests."""
    config = CONFIG_MAPPING[family]
    made: dict[str, Any] = {}
    for name, stated in config.sub_configs.items():
        kind: Any = type(getattr(config(), name, None)) if stated is AutoConfig else stated
        if name != "text_config" and issubclass(kind, PreTrainedConfig):
            known = kind()
            fitting = {key: size for key, size in VISION.items() if _takes(known, key, size)}
            own = OWN_TOWERS.get(family, {}).get(name, {})
            made[name] = {"model_type": kind.model_type, **fitting, **own}
    return made


def _takes(config: Any, key: str, size: Any) -> bool:
    default = getattr(config, key, None)
    return default is None or type(default) is type(size)


def draw_weights(model: Any, seed: int = 0) -> Any:
    """Draw weights so large that layers differ audibly; sinks and biases are not left at zero.

    The states of linear attention decay slowly, so that all of a prompt is heard.
    """
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("A_log"):
                parameter.uniform_(-4, -1)
            elif parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            elif "sink" in name or "bias" in name:
                parameter.normal_(0, 0.5)
    return model


def load_stock(
    folder: Path, dtype: torch.dtype = torch.float32, auto_class: Any = AutoModelForCausalLM
) -> Any:
    model = auto_class.from_pretrained(folder, dtype=dtype, attn_implementation="eager")
    complete_outputs(model)  # or transformers 5.24 would run no Llama 4
    return model


def run_stock(model: Any, prompt: torch.Tensor, *, cached: bool = False) -> list[torch.Tensor]:
    """Logits after the prompt and after each greedy token, by stock transformers' ``generate``."""
    model = deepcopy(model)  # its rotary embeddings may keep what a text has made of them
    made = model.generate(
        prompt,
        max_new_tokens=NUM_STEPS + 1,
        do_sample=False,
        eos_token_id=None,
        use_cache=cached,
        return_dict_in_generate=True,
        output_logits=True,
    )
    return list(made.logits)


def extend(prompt: torch.Tensor, logits: list[torch.Tensor]) -> torch.Tensor:
    """Return the prompt and the greedy tokens that were decoded from."""
    return torch.cat([prompt, *(each.argmax(-1, keepdim=True) for each in logits[:-1])], 1)


def _score_stock(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The same where the tokens are given, which in bfloat16 others may follow."""
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
    return list(logits[:, -NUM_STEPS - 1 :].unbind(1))


def run_planned(
    folder: Path, tokens: torch.Tensor, decision: Offload, **options: Any
) -> list[torch.Tensor]:
    """The same by a plan's decision, for the second of two requests."""
    return run_each_planned(folder, [tokens], decision, **options)[0]


def run_each_planned(
    folder: Path, texts: Sequence[torch.Tensor], decision: Offload, **options: Any
) -> Logits:
    """The same of several texts in one session, each behind a request that is no matter of it."""
    session = open_session(folder, decision, late_copies=True, **options)
    made = []
    with session, session.stream():
        for tokens in texts:
            prompt, steps = tokens[:, :-NUM_STEPS], tokens[:, -NUM_STEPS:].split(1, 1)
            session.prefill(BATCH)
            logits = [session.prefill(prompt).clone()]
            made.append([*logits, *(session.decode(step).clone() for step in steps)])
    return made


FAILING = {("deepseek_v4", torch.bfloat16)}
"""What transformers 5.17 itself cannot compute."""


def require(family: str, dtype: torch.dtype = torch.float32) -> None:
    """Skip a test of what the installed transformers does not have, or cannot compute itself."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    if (family, dtype) in FAILING and transformers.__version__.startswith("5.17."):
        pytest.skip(f"transformers {transformers.__version__} fails with {family} in {dtype}")


def save(family: str, folder: Path, variant: str = "plain") -> Path:
    config = make_config(family, VARIANTS[variant])
    draw_weights(AutoModelForCausalLM.from_config(config)).save_pretrained(folder)
    return folder
