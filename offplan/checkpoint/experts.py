"""Routed experts: told from the rest of a layer, and counted."""

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence

from offplan.checkpoint.architecture import Routing
from offplan.checkpoint.jsontext import quote
from offplan.checkpoint.model import Experts, Layer, Parameter
from offplan.checkpoint.tensors import CONFIG_NAME, INDEX, TensorInfo
from offplan.errors import CheckpointError

_EXPERTS = "experts"
_NO_INDEX = -1
"""Stands for the index in what is stored for no single expert."""
_EXPERT_PART = re.compile(rf"(?:^|\.){_EXPERTS}\.{INDEX}\.")


def group_parameters(
    prefix: str, tensors: Iterable[TensorInfo], num_experts: int | None
) -> tuple[Parameter, ...]:
    """Group a layer's tensors into parameters, sorted by name.

    Experts stored one by one (``experts.3.up_proj.weight``) come together under the name without
    the index; fused ones (first dimension a multiple of ``num_experts``) are one tensor.
    Raises CheckpointError when an expert lacks a tensor that another has, unless it is past
    ``num_experts``: LongCat's zero experts compute nothing.
    """
    by_name: defaultdict[str, dict[int, TensorInfo]] = defaultdict(dict)
    start = len(prefix) + 1
    for tensor in tensors:
        whole = tensor.name[start:]
        index, name = split_expert(whole) or (_NO_INDEX, whole)
        by_name[name][index] = tensor
    count = max((max(found) + 1 for found in by_name.values()), default=0)
    parameters = []
    for name, found in sorted(by_name.items()):
        if found.keys() == {_NO_INDEX}:
            only = found[_NO_INDEX]
            parameters.append(Parameter(name, (only,), _is_fused(name, only, num_experts)))
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
                f"(expert {missing} has none); the checkpoint is incomplete: fetch it again"
            )
        parameters.append(Parameter(name, tuple(found[index] for index in range(needed)), True))
    return tuple(parameters)


def describe_experts(routing: Routing, layers: Sequence[Layer]) -> tuple[Experts | None, list[str]]:
    """Count the routed experts, the ones a token uses and one's bytes; notes where sources differ.

    The tensors decide: None when no layer has routed experts, whatever the config says.
    """
    moe = [layer for layer in layers if layer.kind == "moe"]
    if not moe:
        return None, []
    notes = []
    stated = routing.num_experts
    counts = {_count_stored(layer, stated) for layer in moe}
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
    bytes_per_expert = largest.expert_bytes // _count_stored(largest, stated)
    return Experts(num_experts, per_token, bytes_per_expert), notes


def _count_stored(layer: Layer, stated: int | None) -> int:
    """Return how many experts a layer's tensors hold."""
    routed = [parameter for parameter in layer.parameters if parameter.is_expert]
    first = routed[0].tensors[0]
    # Only where the experts are stored one by one does a tensor's name hold an index of theirs.
    if not first.name.endswith(f".{routed[0].name}"):
        return min(len(parameter.tensors) for parameter in routed)
    # Fused: the first dimension is the count, or a multiple of it (DBRX stacks rows).
    rows = min(parameter.tensors[0].shape[0] for parameter in routed)
    return stated if stated and rows % stated == 0 else rows


def split_expert(name: str) -> tuple[int, str] | None:
    """Part ``mlp.experts.3.up_proj.weight`` into 3 and ``mlp.experts.up_proj.weight``.

    None for a name without an expert's index.
    """
    found = _EXPERT_PART.search(name)
    return found and (int(found[1]), name[: found.start(1)] + name[found.end() :])


def _is_fused(name: str, tensor: TensorInfo, num_experts: int | None) -> bool:
    """Whether one tensor holds all of a layer's routed experts."""
    parts = name.split(".")
    if num_experts is None:
        return _EXPERTS in parts and len(tensor.shape) >= 3
    if _EXPERTS in parts:
        return bool(tensor.shape) and tensor.shape[0] > 0 and tensor.shape[0] % num_experts == 0
    # Granite names no experts: block_sparse_moe.input_linear.weight [E, 2I, H].
    in_moe = any("moe" in part for part in parts)
    return in_moe and len(tensor.shape) == 3 and tensor.shape[0] == num_experts
