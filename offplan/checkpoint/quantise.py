"""The tensors of a quantised checkpoint, from those of the model before it was quantised."""

from collections.abc import Iterator
from enum import Enum

from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.layers import is_of_tower
from offplan.checkpoint.model import OUTPUT_HEADS, owner
from offplan.checkpoint.tensors import TensorInfo, Tensors, split_expert
from offplan.errors import CheckpointError
from offplan.forms.methods import READ_METHODS
from offplan.forms.quantisation import Quantisation
from offplan.forms.quantisation import Tensor as StoredPart


class Use(Enum):
    """The use that a model makes of a tensor, as far as quantisers ask."""

    PRODUCT = "product"
    """It is the matrix of a linear layer."""
    EXPERTS = "experts"
    """It holds a matrix of each routed expert, or is one of those that such a one is saved as."""
    LOOKUP = "lookup"
    """It is an embedding."""
    OTHER = "other"

    @property
    def is_product(self) -> bool:
        """True if inputs are multiplied by it."""
        return self in (Use.PRODUCT, Use.EXPERTS)


BuiltTensors = list[tuple[TensorInfo, Use]]
"""The tensors of an unquantised model, each with what the model does with it."""


def require_read(quantisation: Quantisation | None, where: str) -> None:
    """Raise CheckpointError if offplan does not read the form that a config, ``where``, states."""
    if quantisation is not None and quantisation.find is None:
        raise CheckpointError(
            f"{where}: {describe_unread(quantisation)}; to plan, name the folder or the Hub id of "
            "the checkpoint, whose headers tell its sizes"
        )


def quantise(built: BuiltTensors, architecture: Architecture, where: str) -> Tensors:
    """Return what is stored in place of the tensors of a model, as its config says.

    Raises CheckpointError where the config, read from ``where``, does not determine it.
    """
    quantisation = architecture.quantisation
    if quantisation is None:
        return tuple(tensor for tensor, _ in built)
    stored: list[TensorInfo] = []
    num_taken = 0
    memo: Memo = {}
    for tensor, use in _one_by_one(built, architecture, quantisation):
        found = _quantise_one(tensor, use, architecture, quantisation, where, memo)
        num_taken += found is not None
        stored += found or [tensor]
        if quantisation.has_cache_scales and (name := _cache_scale(tensor.name)):
            stored.append(TensorInfo(name, "F32", ()))
    if not num_taken:
        raise _undetermined(where, quantisation, "which layers it means")
    return tuple(stored)


_NO_CONV1D = ("fp8", "compressed-tensors", "torchao")
"""Methods whose tools take the class Linear and not Conv1D. Source: what each makes of a GPT-2, in
tests/checkpoint/quantising.py."""
Memo = dict[tuple[int, int, int], list[StoredPart]]
"""The tensors that a scheme, by its identity, stores of a matrix of so many rows and columns."""


def _quantise_one(
    tensor: TensorInfo,
    use: Use,
    architecture: Architecture,
    quantisation: Quantisation,
    where: str,
    memo: Memo,
) -> list[TensorInfo] | None:
    """Return what is stored for a tensor; None where it is stored as it is."""
    takes = use.is_product or (use is Use.LOOKUP and quantisation.takes_embeddings)
    if not takes or (quantisation.skips_head and owner(tensor.name) in OUTPUT_HEADS):
        return None
    if quantisation.takes_text_alone and is_of_tower(tensor.name):
        return None
    assert quantisation.find is not None
    module, _, last = tensor.name.rpartition(".")
    is_stack = len(tensor.shape) == 3
    if quantisation.takes_experts_alone and not is_stack:
        return None
    is_fused = use is Use.EXPERTS and (is_stack or architecture.fused_experts)
    if quantisation.takes_linear_alone and is_fused:
        return None
    scheme = quantisation.find(module)
    if scheme is None:
        return None
    if is_stack and quantisation.takes_experts_alone:
        return _store_mxfp4_experts(tensor, architecture, quantisation, where)
    is_transposed = architecture.matrices_in_out and use.is_product
    if is_transposed and quantisation.method in _NO_CONV1D:
        return None
    rows, columns = tensor.shape[-2:][::-1] if is_transposed else tensor.shape[-2:]
    if is_stack and architecture.routing.in_out and not quantisation.takes_embeddings:
        rows, columns = columns, rows
    stacked = is_stack and last == "weight" and quantisation.method in _STACKED
    if (is_stack and not stacked) or last != "weight" or not scheme.fits(rows, columns):
        # what is of a tower is not loaded, and stops nothing
        if is_of_tower(tensor.name) or quantisation.leaves_misfits:
            return None
        raise _undetermined(where, quantisation, f"what is stored of {quote(tensor.name)}")
    key = id(scheme), rows, columns  # a quantisation keeps its schemes, and makes none anew
    if key not in memo:
        memo[key] = scheme.store(rows, columns)
    count = tensor.shape[:1] if is_stack else ()
    return [
        TensorInfo(f"{module}.{end}", dtype, (*count, *shape)) for end, dtype, shape in memo[key]
    ]


_STACKED = ("fp8", "compressed-tensors", "mlx")
"""Methods whose tools store a stack of experts, [experts, out, in], as one of what each would be.

Source: what each makes of Granite's and Aria's, in tests/checkpoint/quantising.py; llm-compressor
0.11, ``granite4``; mlx-lm, ``SwitchLinear``.
"""


def _one_by_one(
    built: BuiltTensors, architecture: Architecture, quantisation: Quantisation
) -> Iterator[tuple[TensorInfo, Use]]:
    """Yield tensors, of fused experts each expert's own: so quantisers see and store them.

    Source: ModelOpt's and llm-compressor's exports of Gemma 4, Qwen3.5 and Qwen3-VL. gpt-oss' stay
    fused, and so do others where a tool takes modules of the class Linear alone. MLX has a stack of
    each of an expert's matrices.
    """
    stays_fused = quantisation.takes_experts_alone or quantisation.takes_linear_alone
    for tensor, use in built:
        experts, _, name = tensor.name.rpartition(".")
        if quantisation.takes_embeddings and use.is_product and ".experts." in tensor.name:
            yield from _as_stacks(tensor, use, architecture)
            continue
        names = _FUSED.get(name)
        if (
            stays_fused
            or names is None
            or len(tensor.shape) != 3
            or not experts.endswith("experts")
        ):
            yield tensor, use
            continue
        count, rows, columns = tensor.shape
        if architecture.routing.in_out:
            rows, columns = columns, rows
        if quantisation.divides_experts:
            for index in range(count):
                name_of_one = f"{tensor.name}s.{index}.weight"
                yield TensorInfo(name_of_one, tensor.dtype, (rows, columns)), use
            continue
        for index in range(count):
            for each in names:
                shape = (rows // len(names), columns)
                yield TensorInfo(f"{experts}.{index}.{each}.weight", tensor.dtype, shape), use


def _as_stacks(
    tensor: TensorInfo, use: Use, architecture: Architecture
) -> Iterator[tuple[TensorInfo, Use]]:
    """Yield the stacks that MLX makes of experts, with the first of them where they lie apart.

    Source: mlx-lm, ``sanitize`` of Qwen3-MoE, DeepSeek-V3 and GLM-4.5, and ``SwitchLinear``.
    """
    at = split_expert(tensor.name)
    experts, _, name = tensor.name.removesuffix(".weight").rpartition(".")
    names, sizes = _FUSED.get(name), tensor.shape
    if at is not None:
        experts = tensor.name.partition(".experts.")[0] + ".experts"
        sizes = (architecture.routing.num_experts or 1, *sizes)
    if names is None or len(sizes) != 3 or not experts.endswith(".experts"):
        yield tensor, use
        return
    count, rows, columns = sizes
    if at is None and architecture.routing.in_out:
        rows, columns = columns, rows
    for each in names if at is None or at[0] == 0 else ():
        stack = f"{experts.removesuffix('experts')}switch_mlp.{each}.weight"
        yield TensorInfo(stack, tensor.dtype, (count, rows // len(names), columns)), use


_FUSED = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_proj": ("gate_proj",),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Names of an expert's matrices, by the name under which transformers fuses all experts'."""


def _cache_scale(name: str) -> str | None:
    """Name the scale of an FP8 KV cache that ModelOpt stores beside a projection of keys or values.

    It is None for all other tensors.
    """
    module, _, last = name.rpartition(".")
    projection = module.rpartition(".")[2]
    if last != "weight" or projection not in ("k_proj", "v_proj") or is_of_tower(name):
        return None
    return f"{module}.{projection[0]}_scale"


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


def describe_unread(quantisation: Quantisation) -> str:
    """Say what of a ``quantization_config`` offplan does not read."""
    method = quote(quantisation.method)
    found = [
        f"no {key}" if value is None else f"{key}: {quote(value)}"
        for key, value in quantisation.unread.items()
    ]
    if not found:
        return (
            f"found a quantization_config of the method {method}, which offplan does not read (it "
            f"reads {', '.join(READ_METHODS)})"
        )
    return (
        f"found {', '.join(found)} in its quantization_config ({method}), which offplan does not "
        "read"
    )


def _undetermined(where: str, quantisation: Quantisation, what: str) -> CheckpointError:
    return CheckpointError(
        f"{where}: its quantization_config ({quote(quantisation.method)}) does not determine "
        f"{what}; name the folder or the Hub id of the checkpoint, whose headers do"
    )
