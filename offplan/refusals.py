"""Refusals of a decision by ``run``, found from the plan, the headers and the config.

One list: a decision that is priced, checked, offered as a neighbour or run has passed it.
``library.runnable`` has the refusals that only transformers' class of the model tells,
``runtime.loading.prepared`` those that only the machine tells. No torch.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain

from offplan.backends import Backend
from offplan.capabilities.drafts import list_draft_refusals, most_drafted
from offplan.capabilities.table import APART
from offplan.checkpoint.model import Model
from offplan.checkpoint.parameter import Parameter, Role, role_of
from offplan.errors import PlanError
from offplan.forms.form import RAW, Component
from offplan.held.stage import Stage
from offplan.held.unit import Unit
from offplan.kernel_sizes import KERNEL_TYPES, is_power
from offplan.placement import Placement
from offplan.plan import Offload
from offplan.routed_experts import has_inputs_as_rows


def require_runnable(
    stage: Stage, placement: Placement, offload: Offload, *, batch: int = 1, on_gpu: bool
) -> None:
    """Raise PlanError for a decision that offplan's own runtime refuses.

    ``placement`` is where the decision places the stage's weights, ``batch`` the sequences of a
    step. An engine has a list of its own, its runner's ``demand``.
    """
    if stage.pass_rules is not None:
        return
    for why in _list_refusals(stage, placement, offload, batch, on_gpu):
        raise PlanError(why)
    require_batch(stage, offload, batch)


def _list_refusals(
    stage: Stage, placement: Placement, offload: Offload, batch: int, on_gpu: bool
) -> Iterator[str]:
    for one, key, needs in APART:
        is_asked = any(getattr(rule, key, None) is not None for rule in offload.rules)
        if one == stage.way.name and is_asked:
            yield (
                f"a rule has {key}, and {stage.way.whose} passes are to run the model: {needs} own "
                f"passes, so make a plan with `{one}=True`"
            )
    if offload.draft is not None:
        yield from list_draft_refusals(
            offload.draft,
            stage.model,
            way=stage.way,
            batch=batch,
            store=offload.store,
        )
    if on_gpu and any(layer.kv_cache.is_coded for layer in stage.layers):
        yield from list_coded_refusals(stage)
    cached = [layer for layer in stage.layers if layer.index in placement.weight_caches]
    for rule in offload.rules if on_gpu else ():
        if (why := rule.why_not_on_gpu(stage.model, stage.dtype, cached)) is not None:
            yield f"a rule has {why}"
    for slab in placement.slabs:
        for backend in {e.decode: None for e in slab.entries if e.decode.why_no_kernel}:
            given = [entry.unit for entry in slab.entries if entry.decode is backend]
            if why := why_not_multiplied(backend, stage, stage.units[slab.layer], given):
                yield f"layer {slab.layer}: `decode: {backend.name}` {why}"


def list_coded_refusals(stage: Stage) -> Iterator[str]:
    """Yield why no kernel reads a cache in FP8."""
    latents, key = stage.architecture.latents, f"`kv_cache_dtype={stage.way.kv_cache_dtype}`"
    if stage.dtype not in KERNEL_TYPES:
        yield (
            f"{key} has no kernel for {stage.dtype}, in which {stage.model.source} is computed: "
            "leave it out"
        )
    elif latents is not None and not (is_power(latents.dim) and is_power(latents.rope_dim)):
        yield (
            f"{key} has no kernel for latents of {latents.dim} and {latents.rope_dim}: leave it out"
        )


def has_kernels(
    stage: Stage,
    decode: Backend,
    layers: Iterable[Iterable[Unit]],
    taken: Sequence[Sequence[Unit]],
) -> bool:
    """Return True if a backend of decode multiplies what is ``taken`` of each layer's units."""
    if decode.why_no_kernel is None:
        return True
    has_matrices = any(u.part is Component.WEIGHT and len(u.shape) > 1 for u in chain(*taken))
    return has_matrices and not any(
        why_not_multiplied(decode, stage, units, given)
        for units, given in zip(layers, taken, strict=True)
    )


def why_not_multiplied(
    backend: Backend, stage: Stage, units: Iterable[Unit], given: Iterable[Unit]
) -> str | None:
    """Say why a backend cannot multiply what it is ``given`` of a layer's ``units``.

    Returns None if it can. The products of routed experts are computed together or not at all.
    """
    assert backend.why_no_kernel is not None
    given = [unit for unit in given if _is_multiplied(unit)]
    taken = {parameter.name for unit in given for parameter in unit.parameters if unit.is_expert}
    left = [
        parameter.name
        for unit in units
        if unit.is_expert and _is_multiplied(unit)
        for parameter in unit.parameters
        if parameter.name not in taken
    ]
    if taken and left:
        return (
            f"takes {', '.join(sorted(taken))} without {', '.join(left)}, which the cores multiply "
            "in the same task: name all of them in cpu_offload_params, or none"
        )
    for unit, parameter in ((u, p) for u in given for p in u.parameters if not _is_wide(p)):
        is_in_out = has_inputs_as_rows(stage, unit)
        num_in = parameter.shape[-2 if is_in_out else -1]
        why = backend.why_no_kernel(parameter.form, stage.dtype, num_in)
        if is_in_out and stage.architecture.routing.held_in_out:
            why = "has no kernel for experts whose rows are inputs"
        if parameter.is_expert and parameter.is_shuffled:
            why = "has no kernel for experts with inputs in an order of each one's own (g_idx)"
        if why is not None:
            return f"{why} ({parameter.name}): write decode: uva or prefetch"
    return None


def _is_multiplied(unit: Unit) -> bool:
    """Return True if a unit is a linear layer's weights, or experts: no norm, bias or router."""
    of = unit.parameters[0]
    if unit.part is not Component.WEIGHT or of.name.endswith("bias"):
        return False
    return len(unit.shape) > 1 and (not of.form.is_raw or role_of(of) is not Role.OTHER)


def _is_wide(parameter: Parameter) -> bool:
    """Return True if values are float32, which steps read in place whatever the decision says."""
    return parameter.form is RAW and all(tensor.dtype == "F32" for tensor in parameter.tensors)


def require_batch(stage: Stage | Model, offload: Offload, batch: int) -> None:
    """Raise PlanError if a rule or drafts do not serve steps of ``batch`` sequences.

    ``stage`` is what holds the experts, or the model.
    """
    draft = offload.draft
    if draft is not None and (why := draft.why_not_batch(batch)) is not None:
        raise PlanError(why)
    num_tokens = batch * (1 + most_drafted(draft))
    for rule in offload.rules:
        if (why := rule.why_not_batch(stage.experts, num_tokens)) is not None:
            raise PlanError(why)
