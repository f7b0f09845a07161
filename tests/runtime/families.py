"""Tiny models of every causal family that transformers has, and how each compares with stock."""

import tempfile
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offplan.errors import OffplanError
from tests.runtime.plans import group, offload, open_session

NUM_STEPS = 6
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4]])
BATCH = torch.tensor([[3, 14, 15, 9, 26, 40, 33], [58, 9, 7, 9, 3, 21, 17]])
REQUESTS = ((PROMPT, 64), (PROMPT, 3), (BATCH, 64))
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
SIZES |= {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 4, "decoder_sparse_step": 1}
SIZES |= {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}

_WHOLE_HEADS = """
axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note dots3_note_text glm4_moe_lite glm_moe_dsa
kimi_linear longcat_flash
"""
OWN_SIZES: dict[str, dict[str, Any]] = {
    **{family: {"num_key_value_heads": 4} for family in _WHOLE_HEADS.split()},
    "falcon": {"head_dim": None},
    "gemma3n_text": {
        "num_kv_shared_layers": 3,
        "layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"],
    },
    "cohere_compass_text": {"layer_types": ["full_attention"] * 5},
    "lfm2_moe": {"layer_types": ["full_attention"] * 5},
    # stock zeroes the padding's row of a tied embedding, whatever is stored
    "youtu": {"num_key_value_heads": 4, "pad_token_id": None},
    "zaya": {"num_experts_per_tok": 1},
}
"""What a family insists on; None leaves a size out."""

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "windows": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "windows in some layers": {
        "sliding_window": 6,
        "use_sliding_window": True,
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
    "soft caps": {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 5.0},
}
"""Changes to a config that change what comes out in some families; others ignore them."""


@dataclass(frozen=True)
class Outcome:
    """How a family compared with stock transformers."""

    kind: str
    """``exact`` (in bfloat16: as near as stock), ``refused``, ``wrong``, or ``not built`` where
    transformers itself does not."""
    why: str = ""


def compare(
    family: str, variant: str, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Outcome:
    """Build a tiny model of a family, run it by a plan, and compare it with stock transformers.

    In float32 the logits must be the same. In bfloat16 they must be about as near to those of
    stock's float32 as those of stock's bfloat16 are: sums are rounded in another order.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            _save_model(make_config(family, VARIANTS[variant]), dtype, seed, folder)
            stock = load_stock(folder, torch.float32)
            expected = [run_stock(stock, prompt) for prompt, _ in REQUESTS]
            tokens = [
                torch.cat([prompt, *(each.argmax(-1, keepdim=True) for each in logits[:-1])], 1)
                for (prompt, _), logits in zip(REQUESTS, expected, strict=True)
            ]
            rounding = 0.0
            if dtype is not torch.float32:
                stock = load_stock(folder, dtype)
                rounding = _distance([_score_stock(stock, each) for each in tokens], expected)
        except Exception as error:
            return Outcome("not built", f"{type(error).__name__}: {error}")
        try:
            got = [
                _run_planned(folder, each, chunk)
                for each, (_, chunk) in zip(tokens, REQUESTS, strict=True)
            ]
        except OffplanError as error:
            return Outcome("refused", str(error).replace(name, family))
    if rounding:
        ratio = _distance(got, expected) / rounding
        return Outcome("exact" if ratio < MOST_ROUNDING else "wrong", f"{ratio:.2f} of stock's")
    ours, wanted = _join(got), _join(expected)
    difference = float((ours - wanted).abs().max() / wanted.abs().max())
    return Outcome("exact" if difference < TOLERANCE else "wrong", f"{difference:.1e}")


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


def _save_model(config: Any, dtype: torch.dtype, seed: int, folder: Path) -> None:
    """Save a model of this config; raises ValueError for one that is not tiny."""
    with torch.device("meta"):
        meta = AutoModelForCausalLM.from_config(config)
    if sum(parameter.numel() for parameter in meta.parameters()) > MOST_PARAMETERS:
        raise ValueError("its config has no sizes for tests")
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _draw_weights(model, seed).to(dtype).save_pretrained(folder)


def make_config(family: str, changes: dict[str, Any]) -> Any:
    sizes = {**SIZES, **OWN_SIZES.get(family, {}), **changes}
    sizes = {name: size for name, size in sizes.items() if size is not None}
    config = CONFIG_MAPPING[family](**sizes)
    text = config.get_text_config()
    if text is config:
        return config
    return CONFIG_MAPPING[family](text_config=type(text)(**sizes).to_dict(), **changes)


def _draw_weights(model: Any, seed: int) -> Any:
    """Draw weights so large that layers differ audibly; sinks and biases are not left at zero."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
            elif "sink" in name or "bias" in name:
                parameter.normal_(0, 0.5)
    return model


def load_stock(folder: Path, dtype: torch.dtype) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="eager"
    ).eval()


def run_stock(model: Any, prompt: torch.Tensor) -> list[torch.Tensor]:
    """Logits after the prompt and after each greedy token, by stock transformers, uncached."""
    logits = []
    with torch.inference_mode():
        for _ in range(NUM_STEPS + 1):
            logits.append(model(input_ids=prompt, use_cache=False).logits[:, -1])
            prompt = torch.cat([prompt, logits[-1].argmax(-1, keepdim=True)], 1)
    return logits


def _score_stock(model: Any, tokens: torch.Tensor) -> list[torch.Tensor]:
    """The same where the tokens are given, which in bfloat16 others may follow."""
    with torch.inference_mode():
        logits = model(input_ids=tokens, use_cache=False).logits
    return list(logits[:, -NUM_STEPS - 1 :].unbind(1))


def _run_planned(folder: Path, tokens: torch.Tensor, chunk: int) -> list[torch.Tensor]:
    """The same by a plan that offloads every second layer."""
    prompt, steps = tokens[:, :-NUM_STEPS], tokens[:, -NUM_STEPS:].split(1, 1)
    session = open_session(folder, offload(group(2, 1), prefill_chunk=chunk))
    with session, session.stream():
        return [session.prefill(prompt).clone(), *(session.decode(step).clone() for step in steps)]
