"""Tensors grouped into parameters: experts by their index, scales with their weights."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.parameter import ATTENTION_OUTPUTS, MLP_OUTPUTS, Parameter
from offplan.checkpoint.tensors import DTYPE_BITS, FLOATS, TensorInfo, Tensors, split_expert
from offplan.errors import CheckpointError
from offplan.forms.form import OTHER, Component
from offplan.forms.recognise import CODE_TYPES, Shape, recognise

_EXPERTS = frozenset(("experts", "switch_mlp"))
"""Name parts that say that a module holds routed experts; the latter is MLX's."""
_NO_INDEX = -1
"""Stands for the index in what is stored for no single expert."""


def group_parameters(
    prefix: str, tensors: Iterable[TensorInfo], architecture: Architecture
) -> tuple[Parameter, ...]:
    """Group a layer's tensors into parameters, sorted by name.

    Experts stored one by one (``experts.3.up_proj.weight``) come together under the name without
    the index. Fused ones, whose first dimension is a multiple of the number of experts, are one
    tensor. Raises CheckpointError when an expert lacks a tensor that another has, unless it is past
    that number: LongCat's zero experts compute nothing.
    """
    by_name: defaultdict[str, dict[int, TensorInfo]] = defaultdict(dict)
    start = len(prefix) + 1
    for tensor in tensors:
        whole = tensor.name[start:]
        index, name = split_expert(whole) or (_NO_INDEX, whole)
        by_name[name][index] = tensor
    count = max((max(found) + 1 for found in by_name.values()), default=0)
    num_experts = architecture.routing.num_experts
    whole_by_name: dict[str, Tensors] = {}
    for name, found in by_name.items():
        if found.keys() == {_NO_INDEX}:
            whole_by_name[name] = (found[_NO_INDEX],)
            continue
        if _NO_INDEX in found:
            raise CheckpointError(
                f"{prefix}: found {quote(name)} both fused and expert by expert, expected one of "
                "them; the checkpoint mixes two layouts: fetch it again"
            )
        # Whole up to the last one needed, and without a gap after it.
        needed = max(max(found) + 1, min(count, num_experts or count))
        if len(found) != needed:
            missing = next(index for index in range(needed) if index not in found)
            raise CheckpointError(
                f"{prefix}: found {len(found)} experts with {quote(name)}, expected {needed} "
                f"(expert {missing} has none); the checkpoint is incomplete (fetch it again), or "
                "stores experts of one layer in several forms"
            )
        whole_by_name[name] = tuple(found[index] for index in range(needed))
    parameters = _join_parts(whole_by_name, architecture)
    # beside experts stored one by one, a number for each is the router's: Laguna names it so
    return tuple(
        replace(p, is_expert=False) if count and p.is_fused and len(p.shape) == 1 else p
        for p in parameters
    )


def group_outside(tensors: Tensors, architecture: Architecture) -> tuple[Parameter, ...]:
    """Group what lies outside the layers into parameters by their whole names, experts apart."""
    return _join_parts({tensor.name: (tensor,) for tensor in tensors}, architecture)


def resize(parameter: Parameter, architecture: Architecture, dtype: str) -> Parameter:
    """Return a parameter that knows what it takes once loaded in a model computed in ``dtype``.

    Floats become that type, or float32 where the model keeps them so; codes stay as they are.
    A router that every pass widens stays as it is stored.
    """
    if not parameter.form.is_raw:
        return parameter
    is_wide = any(tensor.dtype == "F32" for tensor in parameter.tensors)
    kept = architecture.kept_bits(parameter.name, dtype, is_wide=is_wide)
    changes = any(t.dtype in FLOATS and DTYPE_BITS[t.dtype] != kept for t in parameter.tensors)
    return replace(parameter, resized=kept) if changes else parameter


def _join_parts(
    by_name: Mapping[str, Tensors], architecture: Architecture
) -> tuple[Parameter, ...]:
    """Join weights that are stored as codes with what lies beside them; sorted by name."""
    parts = {name: part_of(name) for name in by_name}
    claims = Counter(weight for weight, part in parts.values() if part is Component.WEIGHT)
    weights = {
        weight: name
        for name, (weight, part) in parts.items()
        if part is Component.WEIGHT and by_name[name][0].dtype in CODE_TYPES and claims[weight] == 1
    }
    beside: defaultdict[str, dict[Component, Tensors]] = defaultdict(dict)
    alone = by_name.keys() - weights.values()
    for name, (weight, part) in parts.items():
        is_companion = (
            part is not Component.WEIGHT and weight in weights and part not in beside[weight]
        )
        if is_companion and len(by_name[name]) == len(by_name[weights[weight]]):
            beside[weight][part] = by_name[name]
            alone.discard(name)
    parameters = [
        _describe(weight, by_name[name], beside[weight], architecture)
        for weight, name in weights.items()
    ]
    parameters += [_describe(name, by_name[name], {}, architecture) for name in alone]
    return tuple(sorted(parameters, key=lambda parameter: parameter.name))


def _describe(
    name: str, tensors: Tensors, beside: Mapping[Component, Tensors], architecture: Architecture
) -> Parameter:
    """Describe one weight, of all experts if it is theirs."""
    first = {part: of_part[0] for part, of_part in beside.items()}
    quantisation = architecture.quantisation
    end = len(tensors[0].name) - len(part_of(tensors[0].name)[0].removesuffix(".weight"))
    schemes = [
        quantisation.stated(tensor.name[: len(tensor.name) - end])
        for tensor in tensors
        if quantisation is not None and beside
    ]
    stated = schemes[0] if schemes else None
    form, shape = recognise(tensors[0], first, None if stated is None else stated.form)
    if len(shape) == 1:
        shape = _unflatten(name, shape, architecture)
    # a config may take experts one by one
    alike = schemes.count(stated) == len(schemes) and all(
        len({(tensor.dtype, tensor.shape) for tensor in of_part}) == 1
        for of_part in (tensors, *beside.values())
    )
    is_known = quantisation is None or quantisation.is_known
    is_whole = stated is None or stated.needed <= beside.keys()
    is_expert = split_expert(tensors[0].name) is not None
    return Parameter(
        name,
        tensors,
        is_expert or _is_fused(name, tensors[0], architecture.routing.num_experts),
        form=form if form.is_raw or (alike and is_known and is_whole) else OTHER,
        is_shuffled=stated is not None and Component.GROUP_INDEX in stated.needed,
        beside=tuple(sorted(beside.items())),
        logical_shape=None if form.is_raw else shape,
    )


def _unflatten(name: str, shape: Shape, architecture: Architecture) -> Shape:
    """Return the shape of a matrix of which only the number of elements is known.

    A layer's products take hidden states in or give them out, but for latent attention's.
    """
    owner = name.removesuffix(".weight").rpartition(".")[2]
    size, hidden, latents = prod(shape), architecture.hidden_size, architecture.latents
    columns = hidden
    if latents is not None and owner == "kv_b_proj":
        columns = latents.dim
    if not columns or size % columns:
        return (1, size)
    gives_hidden = owner in ATTENTION_OUTPUTS | MLP_OUTPUTS
    return (columns, size // columns) if gives_hidden else (size // columns, columns)


def _is_fused(name: str, tensor: TensorInfo, num_experts: int | None) -> bool:
    """Return True if one tensor holds all of a layer's routed experts."""
    parts = name.split(".")
    is_named = not _EXPERTS.isdisjoint(parts)
    if num_experts is None:
        return is_named and len(tensor.shape) >= 3
    if is_named:
        return bool(tensor.shape) and tensor.shape[0] > 0 and tensor.shape[0] % num_experts == 0
    # Granite names no experts: block_sparse_moe.input_linear.weight [E, 2I, H].
    in_moe = any("moe" in part for part in parts)
    return in_moe and len(tensor.shape) == 3 and tensor.shape[0] == num_experts


_AFTER = {
    Component.WEIGHT: "_packed _blocks",
    Component.SCALE: "_scale _scales _scale_inv .absmax",
    Component.ZERO: "_zero_point",
    Component.GROUP_INDEX: "_g_idx",
    Component.GLOBAL_SCALE: "_scale_2",
    Component.GLOBAL_DIVISOR: "_global_scale",
    Component.INPUT_SCALE: "_input_scale _activation_scale",
    Component.SHAPE: "_shape",
    Component.CODES: ".quant_map",
    Component.NESTED_SCALE: ".nested_absmax",
    Component.NESTED_CODES: ".nested_quant_map",
    Component.STATE: "_format .quant_state.bitsandbytes__nf4 .quant_state.bitsandbytes__fp4",
}
"""Ends that follow a weight's own name: ``q_proj.weight_scale``, ``gate_up_proj_blocks``."""
_INSTEAD = {
    Component.WEIGHT: ".qweight ._weight_qdata",
    Component.SCALE: ".scales .scale .SCB ._weight_scale ._weight_scale_and_zero",
    Component.ZERO: ".qzeros ._weight_zero_point",
    Component.OFFSET: ".biases",
    Component.GROUP_INDEX: ".g_idx",
    Component.INPUT_SCALE: ".input_scale .activation_scale .input_global_scale",
}
"""Ends that stand where the weight's name ends in ``.weight``: ``q_proj.qzeros``."""
_ENDS = {
    end: (part, tail)
    for ends_of, tail in ((_AFTER, ""), (_INSTEAD, ".weight"))
    for part, ends in ends_of.items()
    for end in ends.split()
}
_LONGEST_FIRST = sorted(_ENDS, key=len, reverse=True)


def part_of(name: str) -> tuple[str, Component]:
    """Tell which weight a tensor of this name may belong to, and what it would be to it.

    ``q_proj.qzeros`` gives ``q_proj.weight`` and its ZERO. It is only a name: whether it belongs
    there is for the weight's type to say.
    """
    for end in _LONGEST_FIRST:
        if name.endswith(end):
            part, tail = _ENDS[end]
            return name.removesuffix(end) + tail, part
    return name, Component.WEIGHT
