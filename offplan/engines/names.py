"""Names that an engine gives a checkpoint's parameters once it has built the model.

An engine fuses projections that a checkpoint stores apart, and a fused parameter is offloaded whole
or not at all. ``vllm.yaml`` lists what differs by architecture.

Source: vLLM 0.33, ``packed_modules_mapping`` and ``fused_moe``.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from offplan.checkpoint.model import Layer
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import DTYPE_BITS, Tensors, split_expert
from offplan.forms.form import Component
from offplan.forms.packed import parts_of
from offplan.held.stage import Stage

FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
    "in_proj_qkvz": ("in_proj_qkv", "in_proj_z"),
    "in_proj_ba": ("in_proj_b", "in_proj_a"),
    "wk_weights_proj": ("wk", "weights_proj"),
}
"""Modules that engines make of several, where a layer has all of them."""
_EXPERTS = {
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "input_linear"), "w13"),
    **dict.fromkeys(("down_proj", "w2", "output_linear"), "w2"),
}
"""Projections of routed experts, by the parameter that holds them."""
_JOINED = {"blocks": "weight", "scales": "weight_scale", "bias": "bias"}
"""Last parts of fused experts that a checkpoint joins to the projection: ``down_proj_bias``."""


@dataclass(frozen=True)
class EngineParameter:
    """A parameter of the engine's model, and those of the checkpoint that it is made of."""

    layer: int
    name: str
    """Relative to the layer."""
    parameters: tuple[Parameter, ...]
    tensors: Tensors
    """Tensors of the checkpoint that it holds."""
    nbytes: int
    packs: str | None = None
    """The module, relative to the layer, of which it is a part of the packed weight."""


def name_part(name: str, part: Component) -> str:
    """Name a part of a packed weight as ``offplan.vllm_packed`` holds it."""
    # vLLM takes a layer with a ``weight_packed`` for one whose values ``apply`` gives
    return f"{name}_{'packed' if part is Component.WEIGHT else part.value}"


def engine_parameters(stage: Stage, renamed: Mapping[str, str]) -> tuple[EngineParameter, ...]:
    """Name every parameter of the layers as vLLM does: scales are parameters of their own.

    ``renamed`` are the architecture's own names of modules. The stage keeps what was named.
    """
    key = engine_parameters, frozenset(renamed.items())
    if key not in stage.memo:
        stage.memo[key] = tuple(_name_parameters(stage, renamed))
    found: tuple[EngineParameter, ...] = stage.memo[key]
    return found


def _name_parameters(stage: Stage, renamed: Mapping[str, str]) -> Iterator[EngineParameter]:
    for layer in stage.layers:
        fused = _find_fused(layer)
        held: defaultdict[str, list[tuple[Parameter, Component]]] = defaultdict(list)
        for parameter in layer.parameters:
            for part in parameter.components:
                weight = parameter.made_of or parameter.of(part)
                first = weight[0].name
                stored = (split_expert(first) or (0, first))[1].removeprefix(f"{layer.prefix}.")
                name = _name_expert(stored) if parameter.is_expert else _name(stored, fused)
                name = _rename(name, renamed)
                held[name_part(name, part) if parameter.is_recoded else name].append(
                    (parameter, part)
                )
        for name, parts in held.items():
            parameters = tuple(dict.fromkeys(parameter for parameter, _ in parts))
            tensors = tuple(tensor for parameter, part in parts for tensor in parameter.of(part))
            nbytes = sum(parameter.part_bytes[part] for parameter, part in parts)
            nbytes += sum(parameter.loaded_bytes - parameter.nbytes for parameter in parameters)
            packs = None
            if parameters[0].is_recoded:
                packs, nbytes = name.rpartition(".")[0], _fused_bytes(*parts)
            yield EngineParameter(layer.index, name, parameters, tensors, nbytes, packs)


def _fused_bytes(*parts: tuple[Parameter, Component]) -> int:
    """Bytes of a part of a packed weight, which is fused of several and then packed as one."""
    first, part = parts[0]
    stack, shape = first.shape[:-2], fuse([parameter for parameter, _ in parts])
    dtype, sizes = parts_of((*stack, *shape))[part]
    return len(first.tensors) * prod(sizes) * DTYPE_BITS[dtype] // 8


def fuse(parameters: Sequence[Parameter]) -> tuple[int, int]:
    """Return the shape of the matrix, [out, in], that vLLM fuses of several."""
    shapes = [parameter.shape for parameter in parameters]
    return sum(shape[-2] for shape in shapes), shapes[0][-1]


def _find_fused(layer: Layer) -> dict[str, str]:
    """Return the fused module of each module of this layer that has one, by their dotted names."""
    owners = {parameter.segment for parameter in layer.parameters if not parameter.is_expert}
    fused: dict[str, str] = {}
    for parent in {owner.rpartition(".")[0] for owner in owners}:
        for whole, parts in FUSED.items():
            names = [f"{parent}.{part}".removeprefix(".") for part in parts]
            if owners.issuperset(names):
                fused |= dict.fromkeys(names, f"{parent}.{whole}".removeprefix("."))
    return fused


def _name(stored: str, fused: Mapping[str, str]) -> str:
    owner, _, final = stored.rpartition(".")
    return f"{fused.get(owner, owner)}.{final}".removeprefix(".")


def _name_expert(stored: str) -> str:
    """Name what is stored of routed experts: ``mlp.experts.routed_experts.w13_weight``."""
    *parents, projection, final = f"..{stored}".split(".")
    if projection == "experts":  # all experts in one tensor: experts.down_proj, down_proj_bias
        parents, projection, final = [*parents, projection], final, "weight"
        for joined, part in _JOINED.items():
            if projection.endswith(f"_{joined}"):
                projection, final = projection.removesuffix(f"_{joined}"), part
    if projection not in _EXPERTS:
        return stored
    parents += [] if parents[-1] == "experts" else ["experts"]
    return ".".join((*parents, "routed_experts", f"{_EXPERTS[projection]}_{final}")).lstrip(".")


def _rename(name: str, renamed: Mapping[str, str]) -> str:
    dotted = f".{name}."
    for old, new in renamed.items():
        dotted = dotted.replace(f".{old}.", f".{new}.")
    return dotted.strip(".")
