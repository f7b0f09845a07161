"""Names that an engine gives a checkpoint's parameters once it has built the model.

An engine fuses projections that a checkpoint stores apart, and a fused parameter is offloaded whole
or not at all. ``vllm.yaml`` lists what differs by architecture.

Source: vLLM 0.33, ``packed_modules_mapping`` and ``fused_moe``.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from offplan.checkpoint.model import Layer
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import DTYPE_BITS, Tensors, split_expert
from offplan.errors import ExportError
from offplan.forms.form import Component, Kind
from offplan.forms.host_kernels import parts_of
from offplan.held.stage import Stage
from offplan.plan import Rule
from offplan.segments import cover_names, list_runs, match_segments

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


def engine_segments(rule: Rule, parameters: Iterable[EngineParameter]) -> list[str]:
    """Say the rule's segments in the engine's names; empty when the rule matches everything.

    Raises ExportError if an engine's parameter holds more than the rule chooses.
    """
    if not rule.cpu_offload_params:
        return []
    wanted: set[str] = set()
    unwanted: set[str] = set()
    for each in parameters:
        chosen = {p.name for p in each.parameters if rule.matches(p.name)}
        others = {p.name for p in each.parameters} - chosen
        if chosen and others:
            inside, outside = (", ".join(sorted(names)) for names in (chosen, others))
            raise ExportError(
                f"vLLM holds {inside} and {outside} in one parameter, {each.name}: it offloads all "
                "of them or none"
            )
        (wanted if chosen else unwanted).add(each.name)
    return choose_segments(rule.cpu_offload_params, wanted, unwanted)


def choose_segments(
    preferred: Sequence[str], wanted: Collection[str], unwanted: Collection[str]
) -> list[str]:
    """Find few segments that match all of ``wanted`` and none of ``unwanted``.

    The preferred ones are kept when they do.
    """
    fits = all(match_segments(preferred, name) for name in wanted)
    if fits and not any(match_segments(preferred, name) for name in unwanted):
        return list(preferred)
    found = cover_names(wanted, unwanted, {run for name in wanted for run in list_runs(name)})
    assert found is not None, "a whole name is a run that covers itself"
    return found


NOTE = (
    "experts stored as MXFP4 are counted as the largest that any of the engine's kernels for "
    "NVIDIA GPUs makes of them: which ones it takes depends on the GPU"
)


@dataclass(frozen=True)
class Kernels:
    """The sizes that kernels give experts, or the largest that any of several gives them."""

    hidden: int = 256
    """Weights that the hidden size is rounded up to a multiple of."""
    gate_up: int = 256
    """Weights that gate and up round the intermediate size up to a multiple of."""
    down: int = 256
    """Weights that down rounds it up to a multiple of."""
    bias_growth: int = 2
    """Times the bytes that biases are stored in: 2 where they are widened to float32."""
    code_growth: int = 1
    """Times the bytes of codes and scales: 4 where they are expanded to bfloat16."""

    def lay_out(self, each: EngineParameter) -> EngineParameter:
        """Return an engine's parameter that holds experts, with the bytes that it takes."""
        *_, rows, columns = (1, *each.parameters[0].shape)
        is_down, is_bias = ".w2_" in each.name, each.name.endswith("_bias")
        out, into = (self.hidden, self.down) if is_down else (self.gate_up, self.hidden)
        if is_bias:
            rows, columns, into = columns, 1, 1
        if not is_down:  # which has rows of gate and up, unless they are stored apart
            rows //= 2 // len(each.parameters)
        rounded = _round_up(rows, out) * _round_up(columns, into)
        growth = self.bias_growth if is_bias else self.code_growth
        return replace(each, nbytes=each.nbytes * rounded * growth // (rows * columns))


def lay_out_experts(
    parameters: Iterable[EngineParameter], kernels: Kernels
) -> dict[EngineParameter, EngineParameter]:
    """Return what kernels make of each parameter of experts stored as MXFP4, and of no other."""
    experts = [each for each in parameters if each.parameters[0].is_expert]
    coded = {each.layer for each in experts if each.parameters[0].form.kind is Kind.MXFP4}
    return {each: kernels.lay_out(each) for each in experts if each.layer in coded}


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
