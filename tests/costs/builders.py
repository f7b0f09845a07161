"""Small models and machines, written out by hand."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from offplan.checkpoint.model import Experts, KVCache, Layer, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs.link import UnitUse
from offplan.costs.work import PassShape
from offplan.held.unit import Unit
from offplan.machine.profile import LayerTime, MachineProfile
from offplan.placement import Placement
from offplan.plan import Backend, Offload, Rule
from offplan.routing.profile import BatchReuse
from tests.held import place

HIDDEN = 64
VOCABULARY = 256
NUM_EXPERTS = 8
PER_TOKEN = 2
MIB = 2**20
Shapes = dict[str, tuple[int, ...]]

DENSE: Shapes = {
    "input_layernorm.weight": (HIDDEN,),
    "mlp.down_proj.weight": (HIDDEN, 3 * HIDDEN),
    "mlp.gate_proj.weight": (3 * HIDDEN, HIDDEN),
    "mlp.up_proj.weight": (3 * HIDDEN, HIDDEN),
    "self_attn.k_proj.weight": (HIDDEN // 2, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.q_norm.weight": (16,),
    "self_attn.q_proj.weight": (HIDDEN, HIDDEN),
    "self_attn.v_proj.weight": (HIDDEN // 2, HIDDEN),
}
"""Parameters of a dense layer: 16-bit, 4 heads of 16, 2 of them for keys and values."""

_MOE_MLP: Shapes = {
    "mlp.experts.down_proj.weight": (HIDDEN, HIDDEN),
    "mlp.experts.gate_proj.weight": (HIDDEN, HIDDEN),
    "mlp.experts.up_proj.weight": (HIDDEN, HIDDEN),
    "mlp.gate.weight": (NUM_EXPERTS, HIDDEN),
    "mlp.shared_experts.down_proj.weight": (HIDDEN, HIDDEN),
    "mlp.shared_experts.gate_proj.weight": (HIDDEN, HIDDEN),
    "mlp.shared_experts.up_proj.weight": (HIDDEN, HIDDEN),
}
MOE: Shapes = {
    **{name: shape for name, shape in DENSE.items() if not name.startswith("mlp.")},
    **_MOE_MLP,
}
"""Parameters of a layer with routed experts, the expert's index left out."""


def make_layer(index: int, shapes: Shapes, kv_cache: KVCache | None = None) -> Layer:
    """A layer of these parameters; those under ``.experts.`` have a tensor for each expert."""
    parameters = []
    for name, shape in sorted(shapes.items()):
        is_expert = ".experts." in name
        stems = [name]
        if is_expert:
            stems = [name.replace(".experts.", f".experts.{e}.") for e in range(NUM_EXPERTS)]
        tensors = tuple(TensorInfo(f"model.layers.{index}.{s}", "BF16", shape) for s in stems)
        parameters.append(Parameter(name, tensors, is_expert))
    kind = "moe" if any(p.is_expert for p in parameters) else "dense"
    cache = KVCache(2 * 2 * HIDDEN // 2) if kv_cache is None else kv_cache
    return Layer(index, kind, f"model.layers.{index}", tuple(parameters), cache)


def make_model(layers: Sequence[Shapes], **config: Any) -> Model:
    """A model of such layers, with an embedding and a head of their own."""
    built = tuple(make_layer(index, shapes) for index, shapes in enumerate(layers))
    has_experts = any(layer.expert_bytes for layer in built)
    outside = [
        TensorInfo(name, "BF16", (VOCABULARY, HIDDEN))
        for name in ("lm_head.weight", "model.embed_tokens.weight")
    ]
    return Model(
        source="test/model",
        revision=None,
        model_type="test",
        config={"hidden_size": HIDDEN, "num_attention_heads": 4, "head_dim": 16, **config},
        dtype="bfloat16",
        layers=built,
        outside=tuple(outside),
        tied=frozenset(),
        not_loaded=frozenset(),
        experts=Experts(NUM_EXPERTS, PER_TOKEN, 3 * 2 * HIDDEN**2) if has_experts else None,
        headers_sha256="0" * 64,
        num_tensors=0,
    )


def dense_model(num_layers: int = 6) -> Model:
    return make_model([DENSE] * num_layers)


def moe_model(num_layers: int = 5) -> Model:
    return make_model([DENSE, *[MOE] * (num_layers - 1)])


def predicting_model(num_layers: int = 3, later: Shapes = MOE, last: Shapes = MOE) -> Model:
    """A model of such layers behind a dense one that stores a prediction layer as GLM-4.5 does."""
    sizes = {"num_key_value_heads": 2, "n_routed_experts": NUM_EXPERTS, "vocab_size": VOCABULARY}
    experts = {"num_experts_per_tok": PER_TOKEN, "num_nextn_predict_layers": 1}
    family = {"model_type": "glm4_moe", "num_hidden_layers": num_layers}
    model = make_model([DENSE, *[later] * (num_layers - 1)], **sizes, **experts, **family)
    block, prefix = make_layer(num_layers, last), f"model.layers.{num_layers}"
    around: Shapes = {
        "eh_proj.weight": (HIDDEN, 2 * HIDDEN),
        "enorm.weight": (HIDDEN,),
        "hnorm.weight": (HIDDEN,),
        "shared_head.norm.weight": (HIDDEN,),
        "shared_head.head.weight": (VOCABULARY, HIDDEN),
    }
    stored = [
        *(tensor for each in block.parameters for tensor in each.tensors),
        *(TensorInfo(f"{prefix}.{name}", "BF16", shape) for name, shape in around.items()),
    ]
    names = frozenset(each.name for each in stored)
    return replace(model, outside=tuple(sorted([*model.outside, *stored])), not_loaded=names)


def make_machine(
    *,
    h2d: float = 1e9,
    uva: float = 0.9e9,
    gpu: float = 1.0,
    gpu_memory: int = 2**40,
    host_memory: int | None = None,
    peer: float | None = None,
    layer_times: Sequence[LayerTime] = (),
) -> MachineProfile:
    """A machine whose link is slow beside its memory; ``gpu`` is how many times as fast it is."""

    def figure(value: float) -> dict[str, object]:
        return {"value": value, "basis": "measured", "source": "a test"}

    return MachineProfile.model_validate(
        {
            "name": "test machine",
            "link": "test link",
            "h2d": figure(h2d),
            "copy_latency": figure(1e-6),
            "uva": figure(uva),
            "hbm": figure(gpu * 100e9),
            "matmul": figure(gpu * 1e12),
            "layer_overhead": figure(2e-6 / gpu),
            "gpu_memory": figure(gpu_memory),
            "host_memory": None if host_memory is None else figure(host_memory),
            "gpu_overhead": figure(0),
            "ranks_overhead": figure(0),
            "peer": None if peer is None else figure(peer),
            "layer_times": tuple(layer_times),
        }
    )


def measured(shape: PassShape, seconds: float, layer: str) -> LayerTime:
    """What a layer of this key took at a shape."""
    return LayerTime(
        layer=layer,
        phase=shape.phase.value,
        batch=shape.batch,
        tokens=shape.tokens,
        context=shape.context,
        is_part=shape.is_part,
        seconds=seconds,
    )


def rule(
    *segments: str,
    group: tuple[int, int] = (1, 1),
    prefill: Backend = Backend.PREFETCH,
    decode: Backend = Backend.PREFETCH,
) -> Rule:
    """A rule with a group pattern of (group_size, num_in_group)."""
    return Rule(
        cpu_offload_params=segments,
        group_size=group[0],
        num_in_group=group[1],
        prefill=prefill,
        decode=decode,
    )


def place_rules(model: Model, rules: Sequence[Rule], prefetch_step: int) -> Placement:
    """Place by rules alone."""
    offload = Offload(prefetch_step=prefetch_step, prefill_chunk=1, rules=tuple(rules))
    return place(model, offload)


def use_bytes(
    backend: Backend,
    machine: MachineProfile,
    units: Iterable[Unit],
    experts: Experts | None,
    num_tokens: int,
    reuse: BatchReuse | None = None,
) -> int:
    """Bytes that cross when a pass of so many tokens gets at units of one layer by a backend."""
    uses = (UnitUse(unit, num_tokens, experts, machine, reuse) for unit in units)
    return round(sum(map(backend.link_bytes, uses)))
