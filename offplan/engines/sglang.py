"""A rule as SGLang's command line.

Source: SGLang 0.5.23, ``srt/utils/offloader.py`` and ``models/deepseek_v2.py``.
"""

from offplan.checkpoint.model import Model
from offplan.errors import ExportError
from offplan.placement import Placement
from offplan.plan import Backend, Rule
from offplan.units import format_bytes

PREFETCHING_CLASSES = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")
"""Model classes that tell SGLang's prefetching offloader what to move; others raise."""

MAX_BYTES_UNIT = 2**30
"""``--cpu-offload-gb`` is a whole number of these."""


def sglang_flags(rule: Rule, placement: Placement, model: Model) -> list[str]:
    """Flags of a rule with one backend; ``placement`` is what the rule resolves to.

    Raises ExportError for what the flags cannot say.
    """
    if rule.decode is Backend.UVA:
        _require_no_experts(placement)
        return ["--cpu-offload-gb", str(_whole_gib(rule))]
    _require_prefetching(model)
    _require_experts(rule, model)
    num_layers = sum(rule.selects_layer(layer.index) for layer in model.layers)
    if placement.num_slots >= num_layers:
        raise ExportError(
            f"SGLang needs a prefetch step below its {num_layers} offloaded layers; the plan has "
            f"{placement.num_slots}"
        )
    flags = ["--offload-group-size", str(rule.group_size)]
    flags += ["--offload-num-in-group", str(rule.num_in_group)]
    return [*flags, "--offload-prefetch-step", str(placement.num_slots)]


def sglang_notes(rule: Rule, placement: Placement) -> list[str]:
    """What the flags do not promise."""
    if rule.decode is Backend.UVA:
        return ["SGLang copies these parameters before each use: it does not read them in place"]
    extra = format_bytes(placement.slot_bytes)
    return [
        f"SGLang holds one layer more than the plan's ring at its peak: {extra} more GPU memory"
    ]


def _require_no_experts(placement: Placement) -> None:
    """Refuse experts in a rule that reads in place: SGLang copies what such a rule takes."""
    for slab in placement.slabs:
        if any(entry.unit.is_expert for entry in slab.entries):
            raise ExportError(
                f"SGLang copies all routed experts of layer {slab.layer} before each use; the plan "
                "reads in place, and only the experts that tokens are sent to: it would be many "
                "times slower"
            )


def _whole_gib(rule: Rule) -> int:
    if rule.max_bytes is None:
        raise ExportError(
            "SGLang reads no group of layers in place; a rule of max_bytes without segments is "
            "what its --cpu-offload-gb says"
        )
    if rule.cpu_offload_params:
        raise ExportError(
            f"SGLang's --cpu-offload-gb takes all parameters from layer 0 on: the segments "
            f"{list(rule.cpu_offload_params)} would be lost"
        )
    if rule.max_bytes % MAX_BYTES_UNIT:
        raise ExportError(
            f"SGLang's --cpu-offload-gb is a whole number of GiB; max_bytes is "
            f"{format_bytes(rule.max_bytes)}"
        )
    return rule.max_bytes // MAX_BYTES_UNIT


def _require_prefetching(model: Model) -> None:
    classes = model.architecture.class_names or (f"model type {model.model_type}",)
    if not set(classes) & set(PREFETCHING_CLASSES):
        raise ExportError(
            f"SGLang prefetches layers of {' and '.join(PREFETCHING_CLASSES)} only; this model "
            f"is {', '.join(classes)}"
        )


def _require_experts(rule: Rule, model: Model) -> None:
    """Refuse a rule that chooses anything but the weights of the routed experts."""
    for layer in model.layers:
        for parameter in layer.parameters:
            moves = parameter.is_expert and parameter.name.endswith(".weight")
            if rule.matches(parameter.name) and not moves:
                raise ExportError(
                    f"SGLang prefetches the routed experts' weights and nothing else: "
                    f"{parameter.name} of layer {layer.index} would stay on the GPU"
                )
            if moves and not rule.matches(parameter.name):
                raise ExportError(
                    f"SGLang prefetches all of a layer's routed experts: {parameter.name} of "
                    f"layer {layer.index} cannot stay on the GPU"
                )
