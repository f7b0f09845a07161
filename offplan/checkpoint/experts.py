"""Routed experts, counted."""

from collections.abc import Sequence

from offplan.checkpoint.architecture import Routing
from offplan.checkpoint.model import Experts, Layer
from offplan.checkpoint.tensors import CONFIG_NAME

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
