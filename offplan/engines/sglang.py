"""A rule as SGLang's command line.

Source: SGLang 0.5.23, ``srt/utils/offloader.py`` and ``models/deepseek_v2.py``.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np

from offplan.costs.work import step_tokens
from offplan.engines.engine import (
    Engine,
    EngineDemand,
    Flags,
    Version,
    first_layers,
    note_overshoot,
    relaid,
)
from offplan.engines.names import EngineParameter, Kernels, engine_parameters
from offplan.errors import ExportError
from offplan.forms.form import Kind
from offplan.held.layout import PassRules
from offplan.held.stage import Stage
from offplan.placement import Placement
from offplan.plan import Backend, Plan, Rule

SGLANG_PASSES = PassRules(
    copies_in_place=True,
    allocates_copies=True,
    copies_first_again=True,
    shares_blocks=False,
    num_pools=2,  # that of prompts, and that of captured steps
)
"""While it captures, it does not take what was copied outside the graph, and the last layers'
copies are captured all the same.
Source: SGLang 0.5.23, ``_hook_module_forward_for_offloader``, ``_ModuleOffloader``."""
PREFETCHING_CLASSES = (
    *("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM"),
    *("GlmMoeDsaForCausalLM", "MistralLarge3ForCausalLM", "KimiVLForConditionalGeneration"),
    *("KimiK25ForConditionalGeneration", "DeepseekVL2ForCausalLM", "DotsVLMForCausalLM"),
)
"""Model classes that tell SGLang's prefetching offloader what to move; others raise."""
FORMS = {Kind.RAW, Kind.FP8_BLOCK}
"""Stored forms of experts whose weights are known to move; their scales stay on the GPU."""
EAGER_PROMPTS: Flags = {"disable-prefill-cuda-graph": ()}
"""Prompts compute beside copies only where they are not captured, and SGLang captures them, in
breakable graphs. Source: ``model_executor/cuda_graph_config.py``, ``_ModuleOffloader``."""
MAX_BYTES_UNIT = 2**30
"""``--cpu-offload-gb`` is a whole number of these."""


def demand_rule(rule: Rule, placement: Placement, stage: Stage, version: Version) -> EngineDemand:
    """Return flags for a rule with one backend; ``placement`` is what the rule resolves to.

    Raises ExportError for what the flags cannot say.
    """
    parameters = engine_parameters(stage, {})
    if rule.decode is Backend.UVA:
        _require_first_layers(rule)
        return _demand_in_place(rule, placement, parameters)
    _require_prefetching(stage)
    _require_experts(rule, stage)
    num_layers = sum(rule.selects_layer(layer.index) for layer in stage.layers)
    step = int(SGLANG_PASSES.slots_ahead(np.array(placement.num_slots)))
    if step >= num_layers:
        raise ExportError(
            f"SGLang needs a prefetch step below its {num_layers} offloaded layers; the plan has "
            f"{placement.num_slots} slots"
        )
    flags: dict[str, tuple[str, ...]] = {
        "offload-group-size": (str(rule.group_size),),
        "offload-num-in-group": (str(rule.num_in_group),),
        "offload-prefetch-step": (str(step),),
        **EAGER_PROMPTS,
    }
    taken = [p for p in parameters if rule.selects_layer(p.layer) and p.parameters[0].is_expert]
    moved = tuple(each for each in taken if each.name.endswith("_weight"))
    scale_bytes = sum(each.nbytes for each in taken) - sum(each.nbytes for each in moved)
    num_copies = SGLANG_PASSES.num_pools * (step + 1)
    more = (num_copies - placement.num_slots) * placement.slot_bytes + scale_bytes
    if any("shared_expert" in name for layer in stage.layers for name in layer.segments):
        # or the shared expert is one more of those that are routed, and moves with them
        flags["disable-shared-experts-fusion"] = ()
    notes = ("SGLang's captured decode steps copy and compute in turns: neither hides the other",)
    return EngineDemand(flags, notes=notes, moved=moved, more_gpu_bytes=more)


def find_kernels(stage: Stage, version: Version) -> tuple[Kernels, Kernels]:
    """Return the kernels of experts, which are the same twice: none of them moves.

    If ranks have whole experts, SGLang expands their codes: it has no kernel for them but on
    Blackwell. Source: ``arg_groups/model_overrides/gpt_oss.py``.
    """
    are_whole = stage.experts is not None and stage.experts.groups > 1
    kernels = Kernels(code_growth=4 if are_whole else 1)
    return kernels, kernels


def serve(plan: Plan, stages: Sequence[Stage], gpu_bytes: int | None) -> Flags:
    """Hold SGLang to the plan's type, workload and, where the GPU's bytes are known, budget.

    Weights, copies ahead and cache are a share of what was free before the weights were loaded.
    Overhead is most of what was not free. ``max-total-tokens`` ends the cache if there is more.
    Source: ``_profile_available_bytes``.
    """
    work, memory = plan.workload, plan.prediction.gpu_memory
    flags = {
        "dtype": plan.model.dtype,
        "context-length": work.context,
        "max-running-requests": work.batch,
        "chunked-prefill-size": step_tokens(work, plan.offload.prefill_chunk),
        "max-total-tokens": work.batch * work.context,
    }
    if gpu_bytes is not None:
        static = plan.budget.gpu_memory - memory.activation_bytes - memory.overhead_bytes
        share = max(1, -(-static * 10**4 // (gpu_bytes - memory.overhead_bytes))) / 10**4
        flags["mem-fraction-static"] = f"{min(share, 0.9999):.4f}"
    return {name: (str(value),) for name, value in flags.items()}


def _demand_in_place(
    rule: Rule, placement: Placement, parameters: Sequence[EngineParameter]
) -> EngineDemand:
    """Return flags for a rule that reads in place: SGLang copies each layer before it runs.

    It takes parameters in an order of its own until it has so many whole GiB. Weights of the rule
    beyond those may stay on the GPU. Source: ``OffloaderV1``, ``_get_resident_parameter_ids``.
    """
    assert rule.max_bytes is not None, "refused otherwise"
    num_bytes = placement.unit_bytes
    gib = -(-min(rule.max_bytes, num_bytes) // MAX_BYTES_UNIT)
    # matrices are made of it while it is on the GPU, and it stays there
    movable = [each for each in parameters if ".kv_b_proj." not in f".{each.name}."]
    moved = first_layers(movable, gib * MAX_BYTES_UNIT)
    _require_copyable(moved)
    notes = (
        "SGLang copies these parameters before each use: it does not read them in place",
        *note_overshoot("SGLang", moved, num_bytes),
    )
    layers = Counter[int]()
    for each in moved:
        layers[each.layer] += each.nbytes
    copied_bytes = SGLANG_PASSES.num_pools * max(layers.values())
    more = copied_bytes + num_bytes - min(gib * MAX_BYTES_UNIT, sum(layers.values()))
    flags = {"cpu-offload-gb": (str(gib),), **EAGER_PROMPTS}
    return EngineDemand(flags, {}, notes, tuple(moved), more)


def _require_copyable(moved: list[EngineParameter]) -> None:
    """Refuse what SGLang would copy many times slower, or lay out anew."""
    for each in moved:
        if each.parameters[0].is_expert:
            raise ExportError(
                f"SGLang copies all routed experts of layer {each.layer} before each use; the plan "
                "reads in place, and only the experts that tokens are sent to: it would be many "
                "times slower"
            )
        if not each.parameters[0].form.is_raw:
            raise relaid("SGLang", each.parameters[0], each.layer)


def _require_first_layers(rule: Rule) -> None:
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


def _require_prefetching(stage: Stage) -> None:
    classes = stage.architecture.class_names or (f"model type {stage.model.model_type}",)
    if not set(classes) & set(PREFETCHING_CLASSES):
        raise ExportError(
            f"SGLang prefetches layers of {', '.join(PREFETCHING_CLASSES)} only; this model is "
            f"{', '.join(classes)}"
        )


def _require_experts(rule: Rule, stage: Stage) -> None:
    """Refuse a rule that chooses anything but the weights of the routed experts."""
    for layer in stage.layers:
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
            if moves and parameter.form.kind not in FORMS:
                raise ExportError(
                    f"that SGLang moves {parameter.name} of layer {layer.index}, stored as "
                    f"{parameter.form.kind.value}, is not known"
                )


SGLANG = Engine(
    name="sglang",
    title="SGLang",
    oldest=(0, 5, 23),
    newest=(0, 5, 23),
    pass_rules=SGLANG_PASSES,
    demand_rule=demand_rule,
    kernels=find_kernels,
    serve=serve,
    rank_flags=("tp-size", "pp-size", "ep-size"),
    command=("python3", "-m", "sglang.launch_server", "--model-path"),
    image="lmsysorg/sglang",
    port=30000,
    bind={},
    cache_types={"fp8": "fp8_e4m3"},
    max_bytes_unit=MAX_BYTES_UNIT,
)
