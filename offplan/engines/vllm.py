"""A rule as vLLM's command line.

Source: vLLM 0.33, ``config/offload.py`` and ``model_executor/offloader``.
"""

from offplan.checkpoint.model import Model
from offplan.engines.segments import vllm_segments
from offplan.errors import ExportError
from offplan.placement import Placement
from offplan.plan import Backend, Rule


def vllm_flags(rule: Rule, placement: Placement, model: Model) -> list[str]:
    """Flags of a rule with one backend; ``placement`` is what the rule resolves to.

    Raises ExportError for what the flags cannot say.
    """
    segments = vllm_segments(rule, model)
    if rule.decode is Backend.PREFETCH:
        _require_whole_turns(placement)
        flags = ["--offload-group-size", str(rule.group_size)]
        flags += ["--offload-num-in-group", str(rule.num_in_group)]
        # vLLM allocates as many slots as it is told, offplan no more than there are layers
        flags += ["--offload-prefetch-step", str(placement.num_slots)]
        return flags + (["--offload-params", *segments] if segments else [])
    # so many digits that vLLM's int(gb * 2**30) gives the bytes again
    flags = ["--cpu-offload-gb", f"{_uva_bytes(rule, placement, model) / 2**30:.15g}"]
    return flags + (["--cpu-offload-params", *segments] if segments else [])


def vllm_notes(rule: Rule, placement: Placement) -> list[str]:
    """What the flags do not promise."""
    if rule.max_bytes is not None:
        last = placement.slabs[-1].layer
        return [f"within layer {last}, where the limit falls, vLLM has its own parameter order"]
    return []


def _require_whole_turns(placement: Placement) -> None:
    """Refuse what makes vLLM generate wrong text. Source: vLLM pull request 54975."""
    num_layers, num_slots = len(placement.slabs), placement.num_slots
    if num_layers % num_slots:
        raise ExportError(
            f"vLLM may read a slot too early where the offloaded layers do not divide into its "
            f"slots: the plan has {num_layers} and {num_slots}; choose a prefetch_step that "
            f"divides {num_layers}, or plan with --for vllm"
        )


def _uva_bytes(rule: Rule, placement: Placement, model: Model) -> int:
    """Bytes to give vLLM, which reads parameters in place from layer 0 on and skips none."""
    if rule.max_bytes is not None:
        return rule.max_bytes
    offloaded = [slab.layer for slab in placement.slabs]
    skipped = [
        layer.index
        for layer in model.layers[: offloaded[-1]]
        if layer.index not in offloaded
        and any(rule.matches(parameter.name) for parameter in layer.parameters)
    ]
    if skipped:
        raise ExportError(
            f"vLLM reads parameters in place from layer 0 on, up to a number of bytes: it "
            f"cannot skip layer {skipped[0]} as group_size {rule.group_size}, num_in_group "
            f"{rule.num_in_group} does"
        )
    return sum(entry.unit.nbytes for slab in placement.slabs for entry in slab.entries)
