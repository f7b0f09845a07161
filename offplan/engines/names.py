"""What vLLM calls a checkpoint's parameters once it has built the model.

An engine fuses projections that a checkpoint stores apart, and a fused parameter is offloaded
whole or not at all.

Source: vLLM 0.33, ``packed_modules_mapping`` and ``fused_moe``.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import split_expert

_EXPERT_WEIGHTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"), "w13"),
    **dict.fromkeys(("down_proj", "w2"), "w2"),
}
_KEPT = """
q_proj k_proj v_proj qkv_proj o_proj q_a_proj q_b_proj kv_a_proj_with_mqa kv_b_proj
gate_proj up_proj gate_up_proj down_proj gate shared_expert_gate
"""
_UNCHANGED = frozenset(_KEPT.split())
"""Modules that keep their name, unless they are fused; so do norms."""


@dataclass(frozen=True)
class EngineParameter:
    """One checkpoint parameter and an engine's parameter that holds it, or a part of it."""

    layer: int
    parameter: Parameter
    name: str | None
    """Relative to the layer; None where the engine's name is not known."""


def vllm_parameters(model: Model) -> Iterator[EngineParameter]:
    """Name every parameter of the layers as vLLM does: scales are parameters of their own."""
    for layer in model.layers:
        fused = _fused_projections(layer)
        for parameter in layer.parameters:
            for tensors in (parameter.tensors, *(of_part for _, of_part in parameter.beside)):
                _, name = split_expert(tensors[0].name) or (0, tensors[0].name)
                stored = name.removeprefix(f"{layer.prefix}.")
                named = _vllm_expert_name if parameter.is_expert else partial(_vllm_name, fused)
                yield EngineParameter(layer.index, parameter, named(stored))


def _fused_projections(layer: Layer) -> dict[str, str]:
    """Projections of this layer that vLLM fuses, by their dotted name."""
    owners = {parameter.segment for parameter in layer.parameters if not parameter.is_expert}
    fused: dict[str, str] = {}
    for owner in owners:
        parent, _, last = owner.rpartition(".")
        if last in ("q_proj", "k_proj", "v_proj") and f"{parent}.k_proj" in owners:
            fused[owner] = f"{parent}.qkv_proj"
        elif last in ("gate_proj", "up_proj"):
            fused[owner] = f"{parent}.gate_up_proj"
        elif last in ("q_a_proj", "kv_a_proj_with_mqa") and f"{parent}.q_a_proj" in owners:
            fused[owner] = f"{parent}.fused_qkv_a_proj"
    return fused


def _vllm_name(fused: dict[str, str], stored: str) -> str | None:
    owner, _, final = stored.rpartition(".")
    last = owner.rpartition(".")[2]
    if last not in _UNCHANGED and not last.endswith("norm"):
        return None
    return f"{fused.get(owner, owner)}.{final}"


def _vllm_expert_name(stored: str) -> str | None:
    """Name what is stored of routed experts: ``mlp.experts.routed_experts.w13_weight``."""
    module, found, rest = f".{stored}".partition(".experts.")
    projection, _, final = rest.partition(".")
    weight = _EXPERT_WEIGHTS.get(projection)
    if not found or weight is None:
        return None
    return f"{module}.experts.routed_experts.{weight}_{final or 'weight'}".removeprefix(".")
