"""From what a source holds to the model that the rest of offplan sees."""

from collections.abc import Iterable

from offplan.checkpoint.config import read_model_type
from offplan.checkpoint.experts import count_experts, describe_experts
from offplan.checkpoint.fingerprint import headers_sha256
from offplan.checkpoint.kv_cache import describe_kv_caches
from offplan.checkpoint.layers import layer_parameters, split_layers
from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.stored import Stored
from offplan.checkpoint.tensors import TensorInfo
from offplan.checkpoint.tied import find_tied
from offplan.errors import CheckpointError

TORCH_NAMES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E8M0": "float8_e8m0fnu",
    "F4": "float4_e2m1fn_x2",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "C64": "complex64",
    "F64": "float64",
    "I64": "int64",
    "U64": "uint64",
}
"""Torch's names of safetensors' types. Source: safetensors 0.8, ``safetensors.torch._TYPES``."""


def assemble(source: str, stored: Stored) -> Model:
    """Understand a checkpoint: layers, experts, cache; raises CheckpointError when it cannot be."""
    model_type = read_model_type(stored.config)
    if not stored.tensors:
        raise CheckpointError(
            f"{source}: found no tensors, expected a model's; fetch the checkpoint again"
        )
    split = split_layers(stored.config, stored.tensors)
    parameters = layer_parameters(split, count_experts(stored.config))
    caches, cache_notes = describe_kv_caches(stored.config, parameters, stored.tensors)
    layers = tuple(
        Layer(
            index=index,
            kind="moe" if any(parameter.is_expert for parameter in of_layer) else "dense",
            prefix=f"{split.prefix}.{index}",
            parameters=of_layer,
            kv_cache=caches[index],
        )
        for index, of_layer in enumerate(parameters)
    )
    experts, expert_notes = describe_experts(stored.config, layers)
    tied, tie_notes = find_tied(stored.config, split.outside)
    return Model(
        source=source,
        revision=stored.revision,
        model_type=model_type,
        config=stored.config,
        dtype=_main_dtype(stored.tensors),
        layers=layers,
        outside=split.outside,
        tied=tied,
        not_loaded=split.not_loaded,
        experts=experts,
        headers_sha256=headers_sha256(stored.tensors),
        num_tensors=len(stored.tensors),
        notes=(
            *stored.notes,
            *split.notes,
            *cache_notes,
            *expert_notes,
            *tie_notes,
            *_note_packing(stored.tensors),
        ),
    )


def _note_packing(tensors: Iterable[TensorInfo]) -> list[str]:
    """Return a note when an element of some tensor holds several weights."""
    # GPTQ, AWQ and compressed-tensors pack eight 4-bit weights in an int32; bitsandbytes, MXFP4
    # and NVFP4 two in a byte.
    if any(
        tensor.dtype in ("I32", "U8")
        and tensor.name.endswith(("qweight", "weight_packed", "_blocks", ".weight"))
        and len(tensor.shape) > 1
        for tensor in tensors
    ):
        return ["weights are packed: what is counted as parameters are the elements stored"]
    return []


def _main_dtype(tensors: Iterable[TensorInfo]) -> str:
    """Return the dtype that most bytes are stored in, as torch names it."""
    num_bytes: dict[str, int] = {}
    for tensor in tensors:
        num_bytes[tensor.dtype] = num_bytes.get(tensor.dtype, 0) + tensor.nbytes
    # Sorted first, so that a draw is decided alike everywhere.
    most = max(sorted(num_bytes), key=num_bytes.__getitem__)
    return TORCH_NAMES.get(most, most.lower())
