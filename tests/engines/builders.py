"""Small models and plans for the exporters, written out by hand."""

from collections.abc import Sequence
from dataclasses import replace

from offplan.checkpoint.model import Experts, KVCache, Layer, Model
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.plan import Plan, Rule, parse_plan

NUM_EXPERTS = 4
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm")
MLA = ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
KIB = 1024


def dense_names(attention: Sequence[str]) -> list[str]:
    names = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    names += [f"self_attn.{part}.weight" for part in attention]
    return sorted(names + [f"mlp.{part}.weight" for part in MLP])


def moe_names(attention: Sequence[str], extra: Sequence[str] = ()) -> list[str]:
    names = [name for name in dense_names(attention) if not name.startswith("mlp.")]
    names += ["mlp.gate.weight", *(f"mlp.shared_experts.{part}.weight" for part in MLP)]
    names += [f"mlp.experts.{part}.weight" for part in MLP]
    return sorted([*names, *extra])


def make_parameter(layer: int, name: str) -> Parameter:
    """A parameter of 2 KiB, or of as much for each expert."""
    is_expert = ".experts." in name
    stems = [name]
    if is_expert:
        stems = [name.replace(".experts.", f".experts.{e}.") for e in range(NUM_EXPERTS)]
    tensors = tuple(TensorInfo(f"model.layers.{layer}.{s}", "BF16", (KIB,)) for s in stems)
    return Parameter(name, tensors, is_expert)


def make_model(architecture: str, layers: Sequence[Sequence[str]]) -> Model:
    built = []
    for index, names in enumerate(layers):
        kind = "moe" if any(".experts." in name for name in names) else "dense"
        parameters = tuple(make_parameter(index, name) for name in names)
        built.append(Layer(index, kind, f"model.layers.{index}", parameters))
    return Model(
        source="test/model",
        revision=None,
        model_type="test",
        config={"architectures": [architecture]},
        dtype="bfloat16",
        layers=tuple(built),
        outside=(TensorInfo("model.embed_tokens.weight", "BF16", (KIB, KIB)),),
        tied=frozenset(),
        not_loaded=frozenset(),
        experts=Experts(NUM_EXPERTS, 2, 3 * 2 * KIB),
        headers_sha256="0" * 64,
        num_tensors=0,
    )


def qwen3(num_layers: int = 6) -> Model:
    return make_model("Qwen3ForCausalLM", [dense_names(ATTENTION)] * num_layers)


def deepseek(num_layers: int = 7, extra: Sequence[str] = ()) -> Model:
    layers = [dense_names(MLA), *[moe_names(MLA, extra)] * (num_layers - 1)]
    return make_model("DeepseekV2ForCausalLM", layers)


def keep_caches(model: Model, caches: Sequence[KVCache]) -> Model:
    """The same model with a cache for each layer."""
    pairs = zip(model.layers, caches, strict=True)
    return replace(model, layers=tuple(replace(layer, kv_cache=kept) for layer, kept in pairs))


def make_plan(*rules: Rule, prefetch_step: int = 2) -> Plan:
    phase = {"step": 0, "compute": 0, "link": 0, "stall": 0, "bound": 0, "link_bytes": 0}
    terms = ("resident", "ring", "kv_cache", "activations", "overhead", "total")
    return parse_plan(
        {
            "offplan": 1,
            "model": {"source": "test/model", "headers_sha256": "0" * 64, "dtype": "bfloat16"},
            "workload": {},
            "budget": {"gpu_memory": "1 GiB"},
            "machine": {
                "name": "test",
                "link": "test",
                "h2d": "1 GB/s",
                "uva": "1 GB/s",
                "basis": "estimated",
                "fingerprint": "0",
            },
            "offload": {
                "prefetch_step": prefetch_step,
                "prefill_chunk": 512,
                "rules": [rule.model_dump() for rule in rules],
            },
            "prediction": {
                "objective": 0,
                "basis": "estimated",
                "prefill": phase,
                "decode": phase,
                "gpu_memory": dict.fromkeys(terms, 0),
                "host_memory": 0,
            },
        },
        "test plan",
    )


def prefetch(*segments: str, group_size: int = 2, num_in_group: int = 1) -> Rule:
    return make_rule("prefetch", segments, group_size=group_size, num_in_group=num_in_group)


def uva(*segments: str, group_size: int = 1, num_in_group: int = 1) -> Rule:
    return make_rule("uva", segments, group_size=group_size, num_in_group=num_in_group)


def up_to(max_bytes: str, *segments: str) -> Rule:
    return make_rule("uva", segments, max_bytes=max_bytes)


def streamed_then_read(*segments: str) -> Rule:
    return make_rule("prefetch", segments, decode="uva", group_size=2, num_in_group=1)


def make_rule(
    prefill: str, segments: Sequence[str], decode: str | None = None, **pattern: int | str
) -> Rule:
    data = {"cpu_offload_params": segments, "prefill": prefill, "decode": decode or prefill}
    return Rule.model_validate({**data, **pattern})
