"""A model as another checkpoint of it would be stored: the same weights, in fewer bits."""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

from offplan.checkpoint.architecture import Architecture, read_architecture
from offplan.checkpoint.assemble import describe_experts
from offplan.checkpoint.config_only import with_dtype
from offplan.checkpoint.group import group_parameters, resize
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter, Role, role_of
from offplan.checkpoint.quantise import Use, quantise
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import CheckpointError
from offplan.forms.form import Kind

_FP8_KINDS = (Kind.FP8_BLOCK, Kind.FP8_TENSOR)


def _in_groups(size: int) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "input_activations": None,
                "output_activations": None,
                "weights": {
                    "num_bits": 4,
                    "type": "int",
                    "symmetric": True,
                    "strategy": "group",
                    "group_size": size,
                    "dynamic": False,
                },
            }
        },
    }


_FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
_SCHEMES = {8: (_FP8,), 4: tuple(_in_groups(size) for size in (128, 64, 32))}
"""The ``quantization_config`` by bits of a weight: FP8 in blocks of 128 x 128, and whole numbers in
groups of 128. Source: the published FP8 and W4A16 checkpoints of Qwen3. Smaller groups are for
matrices that 128 does not divide: the experts of Gemma 4 have 704 columns."""


def requantise(model: Model, bits: int) -> Model | None:
    """Size a model as its checkpoint of 8 or 4 bits a weight; None where that is not determined.

    It is sized from names and shapes: another checkpoint, with values and a quality of its own.
    The size of its groups is that which gives the fewest bytes. Weights that no groups divide stay
    in 16 bits. Returns None for a model that is stored in so few bits already.
    """
    kinds = {p.form.kind for layer in model.layers for p in layer.parameters if not p.form.is_raw}
    if kinds - {*_FP8_KINDS} or (kinds and bits >= 8):
        return None
    unquantised = ("quantization_config", "compression_config", "quantization")
    config = {key: value for key, value in model.config.items() if key not in unquantised}
    # what is not quantised is stored, and all is computed, in the model's type: the config may
    # state another one, in whose place the caller named a type
    config = with_dtype(config, model.dtype)
    made = (_store(model, {**config, "quantization_config": s}) for s in _SCHEMES[bits])
    return min((m for m in made if m), key=lambda m: m.total_bytes, default=None)


def _store(model: Model, config: Mapping[str, Any]) -> Model | None:
    """Size a model as ``config`` stores it; None where that is not determined."""
    try:
        architecture = read_architecture(config)
        assert architecture.quantisation is not None
        left = replace(architecture.quantisation, leaves_misfits=True)
        architecture = replace(architecture, quantisation=left)
        return _restate(model, config, architecture)
    except CheckpointError:
        return None


def _restate(model: Model, config: Mapping[str, Any], architecture: Architecture) -> Model:
    """Return a model whose layers are stored as an architecture says, each kind of them once.

    Layers of one kind have the tensors of the first of them, names and all, and fingerprints stay
    those of ``model``. Raises CheckpointError where what is stored is not determined.
    """
    first = {layer.key: layer for layer in reversed(model.layers)}
    built = [each for layer in first.values() for p in layer.parameters for each in _restore(p)]
    stored: defaultdict[str, list[TensorInfo]] = defaultdict(list)
    prefixes = tuple(layer.prefix for layer in first.values())
    for tensor in quantise(built, architecture, model.source):
        prefix = next(each for each in prefixes if tensor.name.startswith(f"{each}."))
        stored[prefix].append(tensor)
    parameters = {
        key: tuple(
            resize(parameter, architecture, model.dtype)
            for parameter in group_parameters(layer.prefix, stored[layer.prefix], architecture)
        )
        for key, layer in first.items()
    }
    # copies: a packing tells parameters apart by what they are, not by what they are like
    layers = tuple(
        replace(each, parameters=tuple(map(copy, parameters[each.key]))) for each in model.layers
    )
    experts, _ = describe_experts(architecture.routing, layers)
    return replace(model, config=config, layers=layers, experts=experts)


def _restore(parameter: Parameter) -> Iterator[tuple[TensorInfo, Use]]:
    """Yield a parameter's tensors in 16 bits, each with what the model does with it."""
    is_matrix = all(len(tensor.shape) == 2 for tensor in parameter.tensors)
    is_product = parameter.is_expert or role_of(parameter) is not Role.OTHER
    is_fused = parameter.is_fused and len(parameter.shape) == 3
    for tensor in parameter.tensors:
        use = Use.OTHER
        if is_fused or (is_matrix and is_product and tensor.name.endswith(".weight")):
            use = Use.PRODUCT
        yield (tensor if parameter.form.is_raw else tensor._replace(dtype="BF16")), use
