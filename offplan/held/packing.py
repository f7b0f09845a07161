"""Weights that a plan holds packed without loss."""

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from offplan.capabilities.packing import OUTPUT_HEAD, Packing, Unpacked, is_matrix
from offplan.checkpoint.architecture import Architecture
from offplan.checkpoint.layers import held_shape
from offplan.checkpoint.model import Layer, Model
from offplan.checkpoint.parameter import Parameter, Role, role_of
from offplan.checkpoint.tensors import TensorInfo
from offplan.errors import PlanError
from offplan.forms.form import Component
from offplan.forms.host_kernels import PACKED, can_pack, parts_of
from offplan.held.runner import OWN_RUNTIME, Runner
from offplan.held.stage import Stage
from offplan.kernel_sizes import CODES_ROWS
from offplan.segments import describe_unmatched

NOTHING = Unpacked()
"""No weight is left out."""


def pack_everything(
    held: Model | Stage, unpacked: Unpacked = NOTHING, runner: Runner = OWN_RUNTIME, batch: int = 1
) -> Packing:
    """Return the packing that takes all that can be packed but what is left ``unpacked``.

    ``held`` is a model, or what ``runner`` holds of the last stage of a pipeline. Values of a head
    are made for a ``batch`` of many sequences, which takes more than packing it saves.
    """
    packs_head = not unpacked.takes_head and batch <= CODES_ROWS
    packs_head = packs_head and _why_not_pack_head(held, runner) is None
    names = tuple(name for name in unpacked.names if name != OUTPUT_HEAD)
    return Packing(group_size=1, num_in_group=1, output_head=packs_head, leave_unpacked=names)


def exclude_from_packing(model: Model, packing: Packing, names: Iterable[str]) -> Packing | None:
    """Return a packing that leaves some more weights as they are stored; None if all are, then."""
    unpacked = Unpacked(packing.leave_unpacked).with_names(names)
    left = tuple(name for name in unpacked.names if name != OUTPUT_HEAD)
    head = packing.output_head and not unpacked.takes_head
    less = packing.model_copy(update={"leave_unpacked": left, "output_head": head})
    return less if _taken(model, less, OWN_RUNTIME) else None


def name_weights(model: Model, weights: Collection[str]) -> tuple[str, ...]:
    """Name weights of a model, given by the tensors that the checkpoint stores, as ``Unpacked``.

    A weight that is given in all layers which have it is named by its segment alone.
    """
    found: dict[str, list[int]] = {}
    everywhere: Counter[str] = Counter()
    for layer in model.layers:
        for p in layer.parameters:
            name = p.name.removesuffix(".weight")
            everywhere[name] += 1
            if any(tensor.name in weights for tensor in p.tensors):
                found.setdefault(name, []).append(layer.index)
    names: list[str] = []
    for name, layers in found.items():
        is_everywhere = 1 < len(layers) == everywhere[name]
        names += [name] if is_everywhere else [f"{layer}.{name}" for layer in layers]
    head = model.head
    if head is not None and any(t.name in weights for t in head.tensors):
        names.append(OUTPUT_HEAD)
    return NOTHING.with_names(names).names


def pack_stage(stage: Stage, packing: Packing | None, runner: Runner) -> Stage:
    """Return a stage of ``runner`` with the weights packed that a plan says.

    Each packing is computed once, and a stage is packed by one alone. Sizes are certain: each
    packed matrix takes its reserve of patches, whatever its values. The pattern of layers starts
    anew in each stage of a pipeline, as that of a rule does. Raises PlanError for packing that
    takes nothing, or some of a layer's experts alone, or a head that cannot be packed. Raises
    PlanError for a name that it leaves out and that is not there.
    """
    assert stage.recoding in (None, packing), "a stage is packed once"
    if packing is None or stage.recoding is not None:
        return stage
    if packing not in stage.memo:
        stage.memo[packing] = _pack_stage(stage, packing, runner)
    packed: Stage = stage.memo[packing]
    return packed


def _pack_stage(stage: Stage, packing: Packing, runner: Runner) -> Stage:
    model, source, architecture = stage.model, stage.model.source, stage.architecture
    unpacked = Unpacked(packing.leave_unpacked)
    for why in unpacked.list_absent(model):
        raise PlanError(f"packing: {why}")
    unmatched = describe_unmatched(packing.cpu_offload_params, model.parameter_names)
    if unmatched is not None:
        raise PlanError(f"packing {unmatched}")
    packs = _taken(stage, packing, runner)

    def hold(layer: Layer) -> Layer:
        held = tuple(_pack(p, architecture) if id(p) in packs else p for p in layer.parameters)
        return replace(layer, parameters=held)

    layers = tuple(map(hold, stage.layers))
    if not packs:
        where = f" on {stage.label}" if stage.label else ""
        raise PlanError(
            f"packing takes nothing: {source} has{where} no bfloat16 matrices in the layers that "
            "it matches and that can be packed; leave out `packing`, or plan again with "
            f"{packing.without}"
        )
    for layer in layers:
        if len({p.is_recoded for p in layer.parameters if is_matrix(p) and p.is_expert}) > 1:
            raise PlanError(
                f"packing takes some of the routed experts' weights of layer {layer.index} only: "
                "kernels multiply a layer's experts in one way; take all of them, or none"
            )
    outside = stage.outside
    if packing.output_head and not unpacked.takes_head:
        if why_not := _why_not_pack_head(stage, runner):
            raise PlanError(
                f"packing takes the output head, and the head of {source} cannot be packed: "
                f"{why_not}; leave out `output_head`"
            )
        outside = tuple(_pack(p, architecture) if _is_head(p, model) else p for p in outside)
    packed = replace(stage, layers=layers, outside=outside, recoding=packing)
    return packed.with_layout(runner.lay_out(packed))


def packable(
    held: Model | Stage, unpacked: Unpacked = NOTHING, runner: Runner = OWN_RUNTIME
) -> list[Parameter]:
    """List the weights of the layers that can be packed, told from headers and config alone.

    Of several GPUs they are one's shares. Weights that are left ``unpacked`` are not among them.
    The routed experts of a layer are multiplied in one way: where one of their weights stays, all
    do.
    """
    architecture, first = held.architecture, 0 if isinstance(held, Model) else held.first_layer
    if held.dtype != "bfloat16" or architecture.quantisation is not None:
        return []
    if architecture.matrices_in_out:
        return []
    fit = [p for layer in held.layers for p in layer.parameters if _fits(p, architecture)]
    held_so = set(map(id, fit)) if isinstance(held, Model) else runner.choose_packed(held, fit)
    found: list[Parameter] = []
    for layer in held.layers:
        fitting = [
            p
            for p in layer.parameters
            if id(p) in held_so and not unpacked.takes(first + layer.index, p.name)
        ]
        num_experts = sum(is_matrix(p) and p.is_expert for p in layer.parameters)
        all_fit = sum(p.is_expert for p in fitting) == num_experts
        found += [p for p in fitting if all_fit or not p.is_expert]
    return found


def _taken(held: Model | Stage, packing: Packing, runner: Runner) -> set[int]:
    """Return the identities of the layers' weights that a packing takes."""
    packs = {id(p) for p in packable(held, Unpacked(packing.leave_unpacked), runner)}
    return {
        id(p)
        for layer in held.layers
        if packing.selects_layer(layer.index)
        for p in layer.parameters
        if id(p) in packs and packing.matches(p.name)
    }


def _why_not_pack_head(held: Model | Stage, runner: Runner) -> str | None:
    """Say why the output head of a model whose layers can be packed cannot, None if it can.

    Of several GPUs each one's rows must allow it, padded as they are, and the whole head, too.
    """
    model = held if isinstance(held, Model) else held.model
    head = model.head
    if head is None:
        return "it was not found"
    shares = [] if isinstance(held, Model) else [p for p in held.outside if _is_head(p, model)]
    if not isinstance(held, Model) and len(runner.choose_packed(held, shares)) < len(shares):
        return f"{runner.name} builds it as it is stored"
    for each in (head, *shares):
        if not _is_raw_matrix(each) or not can_pack(each.shape):
            found = f"{each.name} of {each.tensors[0].dtype}, {list(each.shape)}"
            return (
                f"found {found}, expected BF16 of rows in multiples of 64, of inputs of 8, and "
                "fewer than 2^30 weights"
            )
    return None


def _is_head(parameter: Parameter, model: Model) -> bool:
    """Return True if a parameter is the head, which vLLM builds in each stage of some pipelines."""
    return model.head is not None and parameter.name == model.head.name


def _fits(parameter: Parameter, architecture: Architecture) -> bool:
    """Return True if a parameter is a matrix of bfloat16, multiplied as it is held, [out, in].

    Latent attention's ``kv_b_proj`` is not only multiplied, but expanded in every step: it stays.
    """
    if not _is_raw_matrix(parameter) or not can_pack(held_shape(parameter, architecture)):
        return False
    if parameter.is_expert:
        return not (parameter.is_fused and architecture.routing.held_in_out)
    is_product = parameter.name.endswith(".weight") and role_of(parameter) is not Role.OTHER
    return is_product and not parameter.name.endswith("kv_b_proj.weight")


def _is_raw_matrix(parameter: Parameter) -> bool:
    is_raw = parameter.form.is_raw and parameter.resized is None
    return is_raw and is_matrix(parameter) and all(t.dtype == "BF16" for t in parameter.tensors)


def _pack(parameter: Parameter, architecture: Architecture) -> Parameter:
    """Return a weight held by the parts that its values are packed into."""
    names = [tensor.name for tensor in parameter.tensors]
    parts, shape = {}, held_shape(parameter, architecture)
    for part, (dtype, size) in parts_of(shape).items():
        end = f":{part.value}"
        parts[part] = tuple(TensorInfo(name + end, dtype, size) for name in names)
    weight = parts.pop(Component.WEIGHT)
    return replace(
        parameter,
        tensors=weight,
        form=PACKED,
        beside=tuple(parts.items()),
        logical_shape=shape,
        made_of=parameter.tensors,
    )
