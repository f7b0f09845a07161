"""The cache of each layer: keys and values, the MLA latent, or a recurrent state.

Source: the cache classes and the attention modules of transformers 5.23 (``cache_utils``,
``models/{deepseek_v2,deepseek_v32,qwen3_next,longcat_flash}``).
"""

from collections.abc import Sequence

from offplan.checkpoint.architecture import Architecture, LinearAttention
from offplan.checkpoint.model import KVCache, Vectors
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.windows import Mixer
from offplan.forms.form import Kind

_RECURRENT_BYTES = 4
"""Bytes of an element of the delta rule's state, kept in float32 whatever is computed in."""


def describe_kv_caches(
    architecture: Architecture, layers: Sequence[Sequence[Parameter]], element_bytes: int
) -> tuple[list[KVCache], list[str]]:
    """Return each layer's cache, and notes on what was not understood (counted as no bytes).

    ``layers`` are the layers' parameters; they decide where they disagree with the config.
    ``element_bytes`` is the size of what the model computes in.
    """
    # Layers that read another layer's keys and values keep none of their own, but see as many.
    num_own = max(0, len(layers) - architecture.num_sharing_layers)
    caches = [
        _layer_cache(architecture, index, parameters, element_bytes)
        for index, parameters in enumerate(layers[:num_own])
    ]
    notes = []
    if unknown := [index for index, cache in enumerate(caches) if cache is None]:
        notes.append(
            f"the cache of {len(unknown)} layers (the first is {unknown[0]}) was not understood "
            "and is counted as 0 bytes"
        )
    sharing = [KVCache(window=window) for window in architecture.windows[num_own : len(layers)]]
    return [cache or KVCache() for cache in caches] + sharing, notes


def _layer_cache(
    architecture: Architecture, index: int, parameters: Sequence[Parameter], element_bytes: int
) -> KVCache | None:
    """Return one layer's cache; None when it is not understood."""
    names = [parameter.name for parameter in parameters]
    mixer = architecture.mixers[index]
    if mixer is Mixer.LINEAR or any(name.startswith("linear_attn.") for name in names):
        return architecture.linear and _linear_attention(architecture.linear, element_bytes)
    if mixer is Mixer.NONE:
        return KVCache()
    attends = any(part in name for name in names for part in ("attn", "attention", "k_proj"))
    if mixer is Mixer.UNKNOWN or not attends:
        return None
    elements = _elements_per_token(architecture, parameters)
    window = architecture.windows[index]
    if elements is None:
        return None
    vectors = _vectors_per_token(architecture, index, parameters)
    is_whole = sum(each.number * each.dim for each in vectors) == elements
    return KVCache(elements * element_bytes, window, vectors=vectors if is_whole else ())


def _elements_per_token(architecture: Architecture, parameters: Sequence[Parameter]) -> int | None:
    """Return how many numbers a layer caches a token: the MLA latent, or keys and values."""
    latents = architecture.latents
    if latents is None:
        heads = architecture.attention
        stored = _stored_heads(parameters)
        return sum(stored) if stored else 2 * heads.num_kv_heads * heads.head_dim or None
    # LongCat has two attentions a layer; Kimi-Linear has layers without the latent.
    # Segments, not names: a projection may have a bias.
    segments = {parameter.segment for parameter in parameters}
    num_latents = sum(segment.endswith("kv_a_proj_with_mqa") for segment in segments)
    if not num_latents:
        return None
    elements = num_latents * (latents.dim + latents.rope_dim)
    # DeepSeek-V3.2's sparse attention keeps one more key a token for its indexer.
    if any(".indexer." in parameter.name for parameter in parameters):
        elements += latents.index_dim
    return elements


def _vectors_per_token(
    architecture: Architecture, index: int, parameters: Sequence[Parameter]
) -> tuple[Vectors, ...]:
    """Return the vectors that a layer caches a token, if it caches nothing else."""
    latents = architecture.latents
    if latents is not None:
        return Vectors(1, latents.dim), Vectors(1, latents.rope_dim)
    size = architecture.head_sizes[index]
    stored, num_heads = _stored_heads(parameters), architecture.attention.num_kv_heads
    if not size.key or not size.value:
        return ()
    heads = [num_heads] * 2 if stored is None else [stored[0] // size.key, stored[1] // size.value]
    return Vectors(heads[0], size.key), Vectors(heads[1], size.value)


def _stored_heads(parameters: Sequence[Parameter]) -> tuple[int, int] | None:
    """Return the rows of the key and value projections, where they are stored apart and whole."""
    keys, values = (_rows(parameters, f"attn.{part}.weight") for part in ("k_proj", "v_proj"))
    # Without a value projection the keys serve as values, and are cached twice.
    return (keys, values or keys) if keys else None


def _rows(parameters: Sequence[Parameter], end: str) -> int | None:
    """Return the rows of the only matrix whose name ends so; None where its form hides them."""
    found = [parameter for parameter in parameters if parameter.name.endswith(end)]
    hiding = (Kind.NF4, Kind.FP4, Kind.OTHER)
    if len(found) != 1 or len(found[0].shape) != 2 or found[0].form.kind in hiding:
        return None
    return found[0].shape[0]


def _linear_attention(linear: LinearAttention, element_bytes: int) -> KVCache:
    """Return the gated delta rule's state: the convolution's last inputs and one matrix a head.

    Source: transformers 5.23, ``Qwen3NextGatedDeltaNet``. The conv state is [B, 2 key_dim +
    value_dim, kernel] in the model's dtype. The recurrent state is [B, value heads, key dim, value
    dim] in float32.
    """
    conv = linear.channels * linear.conv_kernel_dim
    recurrent = linear.num_value_heads * linear.value_head_dim * linear.key_head_dim
    return KVCache(state_bytes=conv * element_bytes + recurrent * _RECURRENT_BYTES)


def addition_bytes(linear: LinearAttention, element_bytes: int) -> int:
    """Bytes of what a token of a pass that checks drafts adds to one layer's state.

    Source: ``runtime.model.delta_rule.Additions``.
    """
    of_head = linear.key_head_dim + linear.value_head_dim + 1
    return linear.num_value_heads * of_head * _RECURRENT_BYTES + linear.channels * element_bytes
