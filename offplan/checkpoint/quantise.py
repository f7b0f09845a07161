"""The tensors of a quantised checkpoint, from those of the model before it was quantised."""

from collections.abc import Iterable
from enum import Enum

from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import OUTPUT_HEADS, owner
from offplan.checkpoint.tensors import TensorInfo, Tensors, split_expert
from offplan.errors import CheckpointError
from offplan.forms.quantisation import Quantisation


class Use(Enum):
    """What a model does with a tensor, as far as quantisers ask."""

    PRODUCT = "product"
    """It is the matrix of a linear layer, or of routed experts."""
    LOOKUP = "lookup"
    """It is an embedding."""
    OTHER = "other"


def quantise(
    built: Iterable[tuple[TensorInfo, Use]], architecture: Architecture, where: str
) -> Tensors:
    """Return what is stored in place of the tensors of a model, as its config says.

    Raises CheckpointError where the config, read from ``where``, does not determine it.
    """
    quantisation = architecture.quantisation
    if quantisation is None:
        return tuple(tensor for tensor, _ in built)
    if quantisation.find is None:
        raise _undetermined(where, quantisation, "what is stored")
    stored: list[TensorInfo] = []
    num_taken = 0
    for tensor, use in built:
        found = _quantise_one(tensor, use, architecture, quantisation, where)
        num_taken += found is not None
        stored += found or [tensor]
    if not num_taken:
        raise _undetermined(where, quantisation, "which layers it means")
    return tuple(stored)


def _quantise_one(
    tensor: TensorInfo,
    use: Use,
    architecture: Architecture,
    quantisation: Quantisation,
    where: str,
) -> list[TensorInfo] | None:
    """Return what is stored for a tensor; None where it is stored as it is."""
    takes = use is Use.PRODUCT or (use is Use.LOOKUP and quantisation.takes_embeddings)
    if not takes or (quantisation.skips_head and owner(tensor.name) in OUTPUT_HEADS):
        return None
    assert quantisation.find is not None
    module, _, last = tensor.name.rpartition(".")
    is_stack = len(tensor.shape) == 3
    if quantisation.takes_experts_alone and not is_stack:
        return None
    scheme = quantisation.find(module)
    if scheme is None:
        return None
    if is_stack:
        if not quantisation.takes_experts_alone:
            raise _undetermined(where, quantisation, f"what is stored of {quote(tensor.name)}")
        return _store_mxfp4_experts(tensor, architecture, quantisation, where)
    is_mlx_expert = quantisation.takes_embeddings and split_expert(tensor.name) is not None
    is_transposed = architecture.matrices_in_out and use is Use.PRODUCT
    rows, columns = tensor.shape[::-1] if is_transposed else tensor.shape
    if last != "weight" or is_mlx_expert or not scheme.fits(rows, columns):
        raise _undetermined(where, quantisation, f"what is stored of {quote(tensor.name)}")
    return [
        TensorInfo(f"{module}.{end}", dtype, shape)
        for end, dtype, shape in scheme.store(rows, columns)
    ]


def _store_mxfp4_experts(
    tensor: TensorInfo, architecture: Architecture, quantisation: Quantisation, where: str
) -> list[TensorInfo]:
    """Return the blocks and scales of fused experts, as gpt-oss stores them."""
    num_experts, rows, columns = tensor.shape
    if architecture.routing.in_out:
        rows, columns = columns, rows
    if architecture.model_type != "gpt_oss" or columns % 32:
        raise _undetermined(where, quantisation, f"what is stored of {quote(tensor.name)}")
    groups = (num_experts, rows, columns // 32)
    return [
        TensorInfo(f"{tensor.name}_blocks", "U8", (*groups, 16)),
        TensorInfo(f"{tensor.name}_scales", "U8", groups),
    ]


def _undetermined(where: str, quantisation: Quantisation, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: its quantization_config ({quote(quantisation.method)}) does not determine "
        f"{what}; name the folder or the Hub id of the checkpoint, whose headers do"
    )
