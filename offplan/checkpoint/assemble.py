"""The step from what a source holds to the model that the rest of offplan sees."""

import re
from collections import Counter
from collections.abc import Sequence

from offplan.checkpoint.architecture import Architecture, Routing, read_architecture
from offplan.checkpoint.config import read_model_type
from offplan.checkpoint.folder import ADAPTER_ALONE
from offplan.checkpoint.group import group_parameters, resize
from offplan.checkpoint.kv_cache import describe_kv_caches
from offplan.checkpoint.layers import split_layers
from offplan.checkpoint.model import (
    FLOAT_BYTES,
    OUTPUT_HEADS,
    Experts,
    Layer,
    Model,
    compute_dtype,
    owner,
)
from offplan.checkpoint.tensors import (
    CONFIG_NAME,
    TORCH_NAMES,
    Stored,
    TensorInfo,
    Tensors,
    headers_sha256,
)
from offplan.errors import CheckpointError

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
