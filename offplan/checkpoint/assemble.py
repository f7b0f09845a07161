"""The step from what a source holds to the model that the rest of offplan sees.

Source of the caches: the cache classes and the attention modules of transformers 5.23
(``cache_utils``, ``models/{deepseek_v2,deepseek_v32,qwen3_next,longcat_flash}``).
"""

import re
from collections import Counter
from collections.abc import Sequence

from offplan.checkpoint.architecture import (
    Architecture,
    LinearAttention,
    Routing,
    read_architecture,
)
from offplan.checkpoint.config import read_model_type
from offplan.checkpoint.folder import ADAPTER_ALONE
from offplan.checkpoint.group import group_parameters, resize
from offplan.checkpoint.layers import split_layers
from offplan.checkpoint.model import (
    FLOAT_BYTES,
    OUTPUT_HEADS,
    Experts,
    KVCache,
    Layer,
    Model,
    Vectors,
    compute_dtype,
    owner,
)
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import (
    CONFIG_NAME,
    TORCH_NAMES,
    Stored,
    TensorInfo,
    Tensors,
    headers_sha256,
)
from offplan.checkpoint.windows import Mixer
from offplan.errors import CheckpointError
from offplan.forms.form import Kind

_UNMERGED = re.compile(r"\.(lora_[AB]|base_layer)\.")
"""Tells the tensors that peft adds to a model's own, or hides these behind."""


def assemble(source: str, stored: Stored) -> Model:
    """Understand a checkpoint: layers, experts, cache; raises CheckpointError when it cannot be."""
    model_type = read_model_type(stored.config)
    if not stored.tensors:
        raise CheckpointError(
            f"{source}: found no tensors, expected a model's; fetch the checkpoint again"
        )
    if any(_UNMERGED.search(tensor.name) for tensor in stored.tensors):
        raise CheckpointError(f"{source}: {ADAPTER_ALONE}")
    architecture = read_architecture(stored.config)
    split = split_layers(architecture, stored.tensors)
    if architecture.num_layers is None:
        architecture = read_architecture(stored.config, len(split.layers))
    dtype = compute_dtype(_main_dtype(stored.tensors), architecture.dtype)
    parameters = [
        tuple(
            resize(parameter, architecture, dtype)
            for parameter in group_parameters(prefix, tensors, architecture)
        )
        for prefix, tensors in zip(split.prefixes, split.layers, strict=True)
    ]
    element_bytes = FLOAT_BYTES[dtype]
    caches, cache_notes = describe_kv_caches(architecture, parameters, element_bytes)
    layers = tuple(
        Layer(
            index=index,
            kind="moe" if any(parameter.is_expert for parameter in of_layer) else "dense",
            prefix=split.prefixes[index],
            parameters=of_layer,
            kv_cache=caches[index],
            fuses_gates=architecture.fuses_gates,
        )
        for index, of_layer in enumerate(parameters)
    )
    experts, expert_notes = describe_experts(architecture.routing, layers)
    tied, tie_notes = _find_tied(architecture, split.outside)
    return Model(
        source=source,
        revision=stored.revision,
        model_type=model_type,
        config=stored.config,
        dtype=dtype,
        layers=layers,
        outside=split.outside,
        tied=tied,
        not_loaded=split.not_loaded,
        towers=split.towers,
        experts=experts,
        headers_sha256=headers_sha256(stored.tensors),
        num_tensors=len(stored.tensors),
        generation=stored.generation,
        notes=(
            *stored.notes,
            *split.notes,
            *architecture.notes,
            *cache_notes,
            *expert_notes,
            *tie_notes,
        ),
    )


def _find_tied(architecture: Architecture, outside: Tensors) -> tuple[frozenset[str], list[str]]:
    """Return the names of heads that are stored though the architecture ties them, with a note.

    They may differ from the input embedding: headers cannot tell, and transformers then uses both.
    """
    heads = frozenset(tensor.name for tensor in outside if owner(tensor.name) in OUTPUT_HEADS)
    if not heads or not architecture.head_is_tied:
        return frozenset(), []
    stored = f"{' and '.join(sorted(heads))} is stored beside the input embedding"
    return heads, [f"{stored}, though {CONFIG_NAME} ties them: both are loaded"]


def _main_dtype(tensors: Tensors) -> str:
    """Return the dtype that most bytes are stored in, as torch names it."""
    counts = Counter((tensor.dtype, tensor.shape) for tensor in tensors)
    num_bytes: Counter[str] = Counter()
    for (dtype, shape), count in counts.items():
        num_bytes[dtype] += count * TensorInfo("", dtype, shape).nbytes
    # Sorted first, so that a draw is decided alike everywhere.
    most = max(sorted(num_bytes), key=num_bytes.__getitem__)
    return TORCH_NAMES.get(most, most.lower())


SECOND_PROJECTIONS = {"down_proj", "output_linear", "w2"}
"""Names of the projection whose inputs are an expert's inner columns."""


def describe_experts(routing: Routing, layers: Sequence[Layer]) -> tuple[Experts | None, list[str]]:
    """Count the routed experts, the ones a token uses and one's bytes; notes where sources differ.

    The tensors decide: None when no layer has routed experts, whatever the config says.
    """
    moe = [layer for layer in layers if layer.kind == "moe"]
    if not moe:
        return None, []
    notes = []
    stated = routing.num_experts
    counts = {count_experts(layer, stated) for layer in moe}
    num_experts = max(counts)
    if counts != {stated or num_experts}:
        found = " and ".join(map(str, sorted(counts)))
        notes.append(f"{CONFIG_NAME} says {stated} experts a layer, the tensors {found}")
    if len({layer.expert_bytes for layer in moe}) > 1:
        notes.append("experts differ in size between layers; bytes_per_expert is the largest")
    per_token = routing.num_per_token
    if per_token is None or per_token > num_experts:
        notes.append(
            f"{CONFIG_NAME} does not say how many experts a token uses: took all {num_experts}"
        )
        per_token = num_experts
    largest = max(moe, key=lambda layer: layer.expert_bytes)
    bytes_per_expert = largest.expert_bytes // count_experts(largest, stated)
    return Experts(num_experts, per_token, bytes_per_expert), notes


def count_experts(layer: Layer, stated: int | None) -> int:
    """Count the experts that a layer's tensors hold, as many as are ``stated`` if that may be."""
    routed = [parameter for parameter in layer.parameters if parameter.is_expert]
    if not routed[0].is_fused:
        return min(len(parameter.tensors) for parameter in routed)
    # Fused: the first dimension is the count, or a multiple of it (DBRX stacks rows).
    rows = min(parameter.tensors[0].shape[0] for parameter in routed)
    return stated if stated and rows % stated == 0 else rows


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
