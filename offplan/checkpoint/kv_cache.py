"""What each layer keeps of a sequence: keys and values, the MLA latent, or a recurrent state.

Source: the cache classes and the attention modules of transformers 5.23 (``cache_utils``,
``models/{deepseek_v2,deepseek_v32,qwen3_next,longcat_flash}``).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from offplan.checkpoint.config import read_count, read_dtype, text_config
from offplan.checkpoint.model import KVCache, Parameter
from offplan.checkpoint.stored import CONFIG_NAME
from offplan.checkpoint.tensors import DTYPE_BITS, TensorInfo

_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "float64": 8}
_FLOATS = ("BF16", "F16", "F32", "F64")
_WHOLE = ("BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2")
"""Types of one element a weight: of these a shape tells the rows, of packed ones it does not."""
_RECURRENT_BYTES = 4
"""The delta rule's state is kept in float32 whatever the model's dtype."""
_ALL_SLIDING = ("mistral", "mixtral", "phi3", "phimoe", "starcoder2")
"""Model types whose every layer slides when ``sliding_window`` is set."""
_PATTERNS = {"gemma2": 2, "gemma3": 6, "gemma3_text": 6, "cohere2": 4}
"""Every n-th layer of these attends to everything, where the config leaves it to the default."""
_SLIDING = ("sliding_attention", "hybrid_sliding")
_FULL = ("full_attention", "attention", "indexed_attention", "deepseek_sparse_attention")


def describe_kv_caches(
    config: Mapping[str, Any],
    layers: Sequence[Sequence[Parameter]],
    tensors: Iterable[TensorInfo],
) -> tuple[list[KVCache], list[str]]:
    """Return each layer's cache, and notes on what was not understood (counted as no bytes).

    ``layers`` are the layers' parameters; they decide where they disagree with the config.
    """
    text = text_config(config)
    dtype_bytes = _cache_dtype_bytes(config, tensors)
    types, notes = _layer_types(text, len(layers))
    num_own = len(layers) - (read_count(text, "num_kv_shared_layers") or 0)
    caches = []
    unknown: list[int] = []
    for index, parameters in enumerate(layers):
        # Layers that read another layer's keys and values keep none of their own.
        cache = (
            _layer_cache(text, types[index], parameters, dtype_bytes)
            if index < num_own
            else KVCache()
        )
        if cache is None:
            unknown.append(index)
        caches.append(cache or KVCache())
    if unknown:
        notes.append(
            f"the cache of {len(unknown)} layers (the first is {unknown[0]}) was not understood "
            "and is counted as 0 bytes"
        )
    return caches, notes


def _layer_cache(
    text: Mapping[str, Any], kind: str | None, parameters: Sequence[Parameter], dtype_bytes: int
) -> KVCache | None:
    """Return one layer's cache; None when it is not understood."""
    names = [parameter.name for parameter in parameters]
    if kind == "linear_attention" or any(name.startswith("linear_attn.") for name in names):
        return _linear_attention(text, dtype_bytes)
    if kind in ("moe", "mlp"):
        return KVCache()
    if kind is not None and kind not in (*_SLIDING, *_FULL, "chunked_attention"):
        return None
    if not any("attn" in name or "attention" in name for name in names):
        return None
    window = read_count(text, "sliding_window") if kind in _SLIDING else None
    if kind == "chunked_attention":
        window = read_count(text, "attention_chunk_size")
    elements = _elements_per_token(text, parameters)
    return None if elements is None else KVCache(elements * dtype_bytes, window)


def _elements_per_token(text: Mapping[str, Any], parameters: Sequence[Parameter]) -> int | None:
    """Return how many numbers a layer caches a token: the MLA latent, or keys and values."""
    latent = read_count(text, "kv_lora_rank")
    if latent is None:
        return _stored_heads(text, parameters) or _configured_heads(text)
    # LongCat has two attentions a layer; Kimi-Linear has layers without the latent.
    # Segments, not names: a quantised projection has several parameters.
    segments = {parameter.segment for parameter in parameters}
    num_latents = sum(segment.endswith("kv_a_proj_with_mqa") for segment in segments)
    if not num_latents:
        return None
    elements = num_latents * (latent + (read_count(text, "qk_rope_head_dim") or 0))
    # DeepSeek-V3.2's sparse attention keeps one more key a token for its indexer.
    if any(".indexer." in parameter.name for parameter in parameters):
        elements += read_count(text, "index_head_dim") or 0
    return elements


def _stored_heads(text: Mapping[str, Any], parameters: Sequence[Parameter]) -> int | None:
    """Return the rows of the key and value projections, where they are stored apart and whole."""
    rows = {}
    for part in ("k_proj", "v_proj"):
        found = [
            parameter.tensors[0]
            for parameter in parameters
            if parameter.name.endswith(f"attn.{part}.weight")
        ]
        if len(found) == 1 and found[0].dtype in _WHOLE and len(found[0].shape) == 2:
            rows[part] = found[0].shape[0]
    if "k_proj" not in rows:
        return None
    # Without a value projection the keys serve as values, and are cached twice.
    return rows["k_proj"] + rows.get("v_proj", rows["k_proj"])


def _configured_heads(text: Mapping[str, Any]) -> int | None:
    """Return keys and values of one token by the config: 2 x KV heads x head dimension."""
    nested = text.get("attn_config")
    num_heads = read_count(text, "num_attention_heads", "n_head", "n_heads", "num_heads")
    num_kv_heads = read_count(
        text, "num_key_value_heads", "num_kv_heads", "n_head_kv", "multi_query_group_num"
    ) or (read_count(nested, "kv_n_heads") if isinstance(nested, Mapping) else None)
    if text.get("multi_query") is True and text.get("new_decoder_architecture") is not True:
        num_kv_heads = 1
    num_kv_heads = num_kv_heads or num_heads
    head_dim = read_count(text, "head_dim", "kv_channels", "attention_head_dim")
    if head_dim is None and num_heads:
        head_dim = (read_count(text, "hidden_size", "n_embd", "d_model") or 0) // num_heads
    return 2 * num_kv_heads * head_dim if num_kv_heads and head_dim else None


def _linear_attention(text: Mapping[str, Any], dtype_bytes: int) -> KVCache | None:
    """Return the gated delta rule's state: the convolution's last inputs and one matrix a head.

    Source: transformers 5.23, ``Qwen3NextGatedDeltaNet``: conv state [B, 2 key_dim + value_dim,
    kernel] in the model's dtype, recurrent state [B, value heads, key dim, value dim] in float32.
    """
    num_keys = read_count(text, "linear_num_key_heads")
    num_values = read_count(text, "linear_num_value_heads")
    key_dim = read_count(text, "linear_key_head_dim")
    value_dim = read_count(text, "linear_value_head_dim")
    kernel = read_count(text, "linear_conv_kernel_dim")
    if not (num_keys and num_values and key_dim and value_dim and kernel):
        return None
    conv = (2 * num_keys * key_dim + num_values * value_dim) * kernel
    recurrent = num_values * key_dim * value_dim
    return KVCache(state_bytes=conv * dtype_bytes + recurrent * _RECURRENT_BYTES)


def _layer_types(text: Mapping[str, Any], num_layers: int) -> tuple[list[str | None], list[str]]:
    """Return what each layer attends to, and notes; None means everything."""
    stated = text.get("layer_types")
    if isinstance(stated, list) and len(stated) >= num_layers:
        return [kind if isinstance(kind, str) else "?" for kind in stated[:num_layers]], []
    interval = read_count(text, "full_attention_interval")
    if interval is not None:
        return _every(interval, "linear_attention", num_layers), []
    if read_count(text, "sliding_window") is None or text.get("use_sliding_window") is False:
        return [None] * num_layers, []
    model_type = str(text.get("model_type"))
    pattern = read_count(text, "sliding_window_pattern", "_sliding_window_pattern")
    pattern = pattern or _PATTERNS.get(model_type)
    if pattern is not None:
        return _every(pattern, "sliding_attention", num_layers), []
    if text.get("use_sliding_window") is True:
        # Qwen2: the layers below max_window_layers attend to everything.
        first = read_count(text, "max_window_layers") or 0
        return [None if i < first else "sliding_attention" for i in range(num_layers)], []
    if model_type in _ALL_SLIDING:
        return ["sliding_attention"] * num_layers, []
    note = (
        f"{CONFIG_NAME} has a sliding_window but does not say for which layers: the cache is "
        "counted as if every layer kept the whole context"
    )
    return [None] * num_layers, [note]


def _every(interval: int, between: str, num_layers: int) -> list[str | None]:
    """Return full attention in every ``interval``-th layer, ``between`` in the others."""
    return ["full_attention" if (i + 1) % interval == 0 else between for i in range(num_layers)]


def _cache_dtype_bytes(config: Mapping[str, Any], tensors: Iterable[TensorInfo]) -> int:
    """Return the bytes of one cached number: the config's dtype, else the commonest float's."""
    stated = _DTYPE_BYTES.get(read_dtype(config) or "")
    if stated is not None:
        return stated
    num_bytes = dict.fromkeys(_FLOATS, 0)
    for tensor in tensors:
        if tensor.dtype in num_bytes:
            num_bytes[tensor.dtype] += tensor.nbytes
    most = max(num_bytes, key=num_bytes.__getitem__)
    return DTYPE_BITS[most] // 8
