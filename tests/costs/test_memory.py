"""Memory terms."""

from dataclasses import replace
from math import ceil

import pytest

from offplan.capabilities.stock import STOCK
from offplan.checkpoint.model import Experts, KVCache, Layer
from offplan.checkpoint.parameter import Parameter
from offplan.checkpoint.tensors import TensorInfo
from offplan.costs.activations import (
    ATTENTION_COPIES,
    HIDDEN_COPIES,
    JOINED_PARTS,
    LOGIT_COPIES,
    MASK_BYTES,
    PER_LAYER_COPIES,
    RULE_OF_KERNELS,
    RULE_OF_TORCH,
    RULE_STATES,
    SCORE_BYTES,
    SPLITS,
    WAITING_COPIES,
    RuleTensors,
    activation_bytes,
    attention_bytes,
    eager_expert_bytes,
    hidden_bytes,
    joined_bytes,
    latent_bytes,
    linear_bytes,
    logits_bytes,
    mlp_bytes,
    per_layer_bytes,
    phase_bytes,
    split_bytes,
    waiting_bytes,
)
from offplan.costs.memory import MARGIN, list_gpu_memory, overhead_bytes
from offplan.costs.work import PassShape, prefill_shapes
from offplan.held.held import hold
from offplan.kernel_sizes import EAGER_COPIES, LATENT_HEADS, SPAN_TOKENS
from offplan.placement import Phase
from offplan.plan import Budget, Workload
from tests.costs.builders import (
    DENSE,
    HIDDEN,
    MIB,
    MOE,
    VOCABULARY,
    Shapes,
    dense_model,
    make_layer,
    make_machine,
    make_model,
    moe_model,
    place_rules,
    rule,
)

SHAPE = PassShape(Phase.PREFILL, 2, 10, 30)
TOKENS = 20


def test_terms_of_a_dense_model() -> None:
    stage = hold(dense_model(2))
    layer = stage.layers[0]
    assert hidden_bytes(stage, SHAPE) == HIDDEN_COPIES * TOKENS * HIDDEN * 2
    assert logits_bytes(stage, SHAPE) == LOGIT_COPIES * 2 * VOCABULARY * 2
    width = HIDDEN + HIDDEN + 2 * (HIDDEN // 2)  # q, o, k, v
    first = PassShape(Phase.PREFILL, 2, 10, 10)
    assert attention_bytes(stage, layer, first) == ATTENTION_COPIES * TOKENS * width * 2
    assert mlp_bytes(stage, layer, SHAPE) == TOKENS * (3 + 3 + 1) * HIDDEN * 2


def test_what_layers_are_handed_beside_hidden_states() -> None:
    plain = hold(dense_model(2))
    own = {"altup_num_inputs": 4, "hidden_size_per_layer_input": 8, "num_hidden_layers": 2}
    stage = hold(replace(plain.model, config={**plain.model.config, **own}))
    assert hidden_bytes(stage, SHAPE) == 4 * hidden_bytes(plain, SHAPE)
    assert per_layer_bytes(stage, stage.layers[0], SHAPE) == PER_LAYER_COPIES * TOKENS * 16 * 2
    workload = Workload(batch=2, prompt_tokens=30, output_tokens=1, context=64)
    waiting = WAITING_COPIES * 2 * 20 * HIDDEN * 2
    more = waiting_bytes(stage, workload, SHAPE) - waiting_bytes(plain, workload, SHAPE)
    assert more == 3 * waiting + 2 * 30 * 16 * 2


def test_each_expert_of_a_token_has_its_temporaries() -> None:
    stage = hold(moe_model(2))
    shared = 3 * HIDDEN
    routed = 2 * (3 * HIDDEN + 2 * HIDDEN)
    assert mlp_bytes(stage, stage.layers[1], SHAPE) == TOKENS * (shared + routed) * 2


@pytest.mark.parametrize(
    ("model_type", "hidden", "inner", "num_experts", "chosen", "of_token"),
    [
        ("gpt_oss", 2880, 2880, 32, 4, 4 * (2 * 2880 + 2880 + 2 * 2880)),
        ("llama4_text", 5120, 8192, 16, 1, 2 * 8192 + 5120 + 2 * 5120),
    ],
)
def test_fused_experts_stored_with_their_inputs_first(
    model_type: str, hidden: int, inner: int, num_experts: int, chosen: int, of_token: int
) -> None:
    """gpt-oss-20b and Llama-4-Scout: gate and up, down, ROUTED_COPIES of the hidden state."""
    shapes: Shapes = {
        "mlp.experts.gate_up_proj": (num_experts, hidden, 2 * inner),
        "mlp.experts.gate_up_proj_bias": (num_experts, 2 * inner),
        "mlp.experts.down_proj": (num_experts, inner, hidden),
        "mlp.experts.down_proj_bias": (num_experts, hidden),
    }
    parameters = tuple(
        Parameter(name, (TensorInfo(f"stage.layers.0.{name}", "BF16", shape),), is_expert=True)
        for name, shape in shapes.items()
    )
    layer = Layer(0, "moe", "stage.layers.0", parameters)
    model = replace(
        make_model([], model_type=model_type, hidden_size=hidden),
        experts=Experts(num_experts, chosen, layer.expert_bytes // num_experts),
    )
    stage = hold(model)
    assert {"gpt_oss": 57_600, "llama4_text": 31_744}[model_type] == of_token
    assert mlp_bytes(stage, layer, SHAPE) == TOKENS * of_token * 2


def test_products_with_matrices_of_gpt2() -> None:
    """Conv1D stores [in, out]; ``c_proj`` is attention's output, or the MLP's."""
    shapes: Shapes = {
        "attn.c_attn.weight": (HIDDEN, 3 * HIDDEN),
        "attn.c_proj.weight": (HIDDEN, HIDDEN),
        "mlp.c_fc.weight": (HIDDEN, 4 * HIDDEN),
        "mlp.c_proj.weight": (4 * HIDDEN, HIDDEN),
    }
    stage = hold(make_model([shapes], model_type="gpt2"))
    first = PassShape(Phase.PREFILL, 2, 10, 10)
    width = (3 + 1) * HIDDEN
    assert attention_bytes(stage, stage.layers[0], first) == ATTENTION_COPIES * TOKENS * width * 2
    assert mlp_bytes(stage, stage.layers[0], first) == TOKENS * (4 + 1) * HIDDEN * 2


def test_latent_attention_holds_keys_and_values_of_the_prompt() -> None:
    config = {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    }
    stage, plain = hold(make_model([DENSE], **config)), hold(make_model([DENSE], head_dim=24))
    of_token = 4 * (24 + 12) * 2
    assert latent_bytes(stage, stage.layers[0], SHAPE) == 2 * TOKENS * of_token
    workload = Workload(batch=2, prompt_tokens=30)
    whole, part = (prefill_shapes(workload, chunk)[0] for chunk in (30, 10))
    for chunk, kept in ((whole, 0), (part, 2 * 30 * of_token)):
        more = waiting_bytes(stage, workload, chunk) - waiting_bytes(plain, workload, chunk)
        assert more == kept


@pytest.mark.parametrize(
    ("rope", "dtype", "window", "num_bytes"),
    [
        (16, "bfloat16", None, SPLITS * LATENT_HEADS * (32 + 1) * 4),
        (24, "bfloat16", None, 2 * 30 * 4 * SCORE_BYTES),
        (16, "float32", None, 2 * 30 * 4 * SCORE_BYTES),
        (16, "bfloat16", 9, 2 * 30 * 4 * SCORE_BYTES),
    ],
)
def test_latents_in_decode(rope: int, dtype: str, window: int | None, num_bytes: int) -> None:
    config = {"kv_lora_rank": 32, "qk_rope_head_dim": rope}
    stage = hold(replace(make_model([DENSE], **config), dtype=dtype))
    layer = make_layer(0, DENSE, KVCache(128, window=window))
    assert latent_bytes(stage, layer, PassShape(Phase.DECODE, 2, 1, 30)) == num_bytes


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("more", [{"model_type": "gpt_oss"}, {"attn_logit_softcapping": 5.0}])
def test_scores_that_no_kernel_keeps_to_itself(more: dict[str, object], dtype: str) -> None:
    stage, plain = (
        hold(replace(make_model([DENSE], **of), dtype=dtype)) for of in (more, dict[str, object]())
    )
    step, prompt = PassShape(Phase.DECODE, 2, 1, 30), PassShape(Phase.PREFILL, 2, 30, 30)
    splits = split_bytes(stage, stage.layers[0], step)
    scores = 2 * 30 * 4 * SCORE_BYTES if dtype == "float32" else splits
    shares = JOINED_PARTS * 2 * 30 * 4 * 16 * stage.element_bytes if "model_type" in more else 0
    for shape, num_bytes in ((step, scores), (prompt, shares)):
        found = [attention_bytes(each, each.layers[0], shape) for each in (stage, plain)]
        assert found[0] - found[1] == num_bytes


@pytest.mark.parametrize("tokens", [10, 32, 65, SPAN_TOKENS + 70])
@pytest.mark.parametrize(
    ("dim", "held", "rule"), [(12, 12, RULE_OF_TORCH), (48, 64, RULE_OF_KERNELS)]
)
def test_linear_attention_holds_what_the_rule_makes_of_a_span(
    dim: int, held: int, rule: RuleTensors, tokens: int
) -> None:
    """Kernels take powers of two."""
    sizes = {"key_head_dim": dim, "value_head_dim": 16, "conv_kernel_dim": 4}
    sizes |= {"num_key_heads": 2, "num_value_heads": 3}
    stage = hold(make_model([DENSE], **{f"linear_{name}": size for name, size in sizes.items()}))
    layer = make_layer(0, DENSE, KVCache(state_bytes=1000))
    prompt = PassShape(Phase.PREFILL, 2, tokens, 9999)
    products = 2 * HIDDEN * 2 * min(tokens, SPAN_TOKENS) + 2 * HIDDEN * tokens  # q, k, v; o
    states = RULE_STATES * 2 * 1000
    of_head = held * rule.keys + 16 * rule.values + rule.chunk * rule.pairs
    padded = rule.chunk * ceil(min(tokens, SPAN_TOKENS) / rule.chunk)
    total = ATTENTION_COPIES * 2 * products + states + 4 * 2 * padded * 3 * of_head
    assert linear_bytes(stage, layer, prompt) == attention_bytes(stage, layer, prompt) == total
    step = PassShape(Phase.DECODE, 2, 1, 9999)
    assert attention_bytes(stage, layer, step) == ATTENTION_COPIES * 2 * 2 * 3 * HIDDEN + states


def test_many_sequences_have_a_split_each() -> None:
    stage = hold(make_model([DENSE], kv_lora_rank=32, qk_rope_head_dim=16))
    shape = PassShape(Phase.DECODE, 500, 1, 30)
    assert latent_bytes(stage, stage.layers[0], shape) == 500 * LATENT_HEADS * (32 + 1) * 4


@pytest.mark.parametrize(
    ("window", "dtype", "num_bytes"),
    [
        (None, "float32", JOINED_PARTS * TOKENS * 4 * 16 * 4),
        (30, "bfloat16", JOINED_PARTS * TOKENS * 4 * 16 * 2),
        (25, "float32", MASK_BYTES * 10 * 30),
        (8, "float32", MASK_BYTES * 10 * 17),
        (8, "bfloat16", JOINED_PARTS * TOKENS * 4 * 16 * 2),
    ],
)
def test_a_later_chunk_joins_two_parts_or_has_a_mask(
    window: int | None, dtype: str, num_bytes: int
) -> None:
    stage = hold(replace(dense_model(1), dtype=dtype))
    layer = make_layer(0, DENSE, KVCache(128, window=window))
    first = attention_bytes(stage, stage.layers[0], replace(SHAPE, context=SHAPE.tokens))
    assert attention_bytes(stage, layer, SHAPE) - first == num_bytes


def test_chunks_of_the_text_need_no_mask() -> None:
    stage = hold(make_model([DENSE], attention_chunk_size=8, layer_types=["chunked_attention"]))
    layer = make_layer(0, DENSE, KVCache(128, window=8))
    plain = attention_bytes(hold(dense_model(1)), make_layer(0, DENSE), SHAPE)
    assert attention_bytes(stage, layer, SHAPE) == plain


@pytest.mark.parametrize(
    ("dtype", "phase", "tokens", "gathered"),
    [
        ("bfloat16", Phase.DECODE, 1, 0),
        ("float16", Phase.DECODE, 512, 0),
        ("float16", Phase.DECODE, 513, 0),
        ("float16", Phase.PREFILL, 513, 0),
        ("float32", Phase.PREFILL, 1, 1),
        ("float32", Phase.PREFILL, 2, 0),
        ("float32", Phase.DECODE, 3, 3),
    ],
)
def test_experts_gathered_for_each_token(
    dtype: str, phase: Phase, tokens: int, gathered: int
) -> None:
    stage = hold(replace(moe_model(2), dtype=dtype))
    layer, experts = stage.layers[1], stage.experts
    assert experts is not None
    without = tokens * (3 * HIDDEN + 2 * (3 * HIDDEN + 2 * HIDDEN)) * stage.element_bytes
    shape = PassShape(phase, tokens, 1, 9)
    assert mlp_bytes(stage, layer, shape) - without == gathered * 2 * experts.bytes_per_expert


def test_a_token_alone_gathers_experts_that_the_kernels_do_not_know() -> None:
    alone = PassShape(Phase.DECODE, 1, 1, 9)
    odd: Shapes = {n: (24, HIDDEN) if ".experts." in n else s for n, s in MOE.items()}
    stage = hold(make_model([odd]))
    experts = stage.experts
    assert experts is not None
    assert mlp_bytes(stage, stage.layers[0], alone) > 2 * experts.bytes_per_expert


def test_activations_grow_with_the_chunk() -> None:
    workload = Workload(prompt_tokens=512, output_tokens=8, context=600)
    sizes = [activation_bytes(hold(moe_model(3)), workload, chunk) for chunk in (1, 64, 500, 512)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_a_chunk_that_is_shorter_than_the_others_runs_its_experts_uncompiled() -> None:
    routed: Shapes = {name: shape for name, shape in MOE.items() if "shared" not in name}
    stage = hold(make_model([DENSE, routed]))
    workload, layer = Workload(batch=2, prompt_tokens=10, context=200), stage.layers[1]
    assert eager_expert_bytes(stage, layer, SHAPE) == TOKENS * 2 * EAGER_COPIES * HIDDEN * 2
    assert eager_expert_bytes(stage, stage.layers[0], SHAPE) == 0
    whole, longer = (activation_bytes(stage, workload, chunk) for chunk in (10, 11))
    shape = PassShape(Phase.PREFILL, 2, 10, 10)
    more = eager_expert_bytes(stage, layer, shape) - mlp_bytes(stage, layer, shape)
    assert longer - whole == more > 0


def test_a_captured_step_keeps_its_temporaries() -> None:
    """A prompt of one token takes no more than a step: there are two of them, not one."""
    stage, workload = hold(dense_model(2)), Workload(batch=5, prompt_tokens=1, context=200)
    step = PassShape(Phase.DECODE, 5, 1, 200)
    block = mlp_bytes(stage, stage.layers[0], step)
    once = hidden_bytes(stage, step) + block + logits_bytes(stage, step)
    table = waiting_bytes(stage, workload, PassShape(Phase.PREFILL, 5, 1, 1))
    assert activation_bytes(stage, workload, 1) == 2 * once + table


def test_chunks_wait_with_their_hidden_states() -> None:
    """Half the chunk halves its temporaries, but not what the whole prompt keeps."""
    stage, workload = hold(dense_model(2)), Workload(batch=3, prompt_tokens=8, context=200)
    chunk = PassShape(Phase.PREFILL, 3, 2, 8)
    assert (
        waiting_bytes(stage, workload, chunk) == (WAITING_COPIES * 3 * 6 * HIDDEN + 2 * 8 * 16) * 2
    )
    whole = PassShape(Phase.PREFILL, 3, 8, 8)
    assert waiting_bytes(stage, workload, whole) == 2 * 8 * 16 * 2


def test_keys_wait_for_the_layers_that_read_anothers_window() -> None:
    """Those of the whole prompt, until all its chunks have passed all layers."""
    kept = [KVCache(64, window=8), KVCache(128, window=8), KVCache(32), KVCache(window=8)]
    layers = [make_layer(index, DENSE, each) for index, each in enumerate(kept)]
    stages = [hold(replace(dense_model(1), layers=tuple(layers[:n]))) for n in (3, 4)]
    chunk = PassShape(Phase.PREFILL, 3, 4, 30)
    for context, bytes_per_token in ((100, 128), (8, 0)):
        workload = Workload(batch=3, prompt_tokens=6, output_tokens=2, context=context)
        alone, read = (waiting_bytes(stage, workload, chunk) for stage in stages)
        assert read - alone == 3 * 6 * bytes_per_token
    assert waiting_bytes(hold(stages[1].model, way=STOCK), workload, chunk) == alone


def test_kv_cache_is_static() -> None:
    stage = hold(dense_model(3))
    assert stage.cache_bytes(Workload(batch=2, context=1000)) == 3 * 2 * 1000 * 128


def test_layers_with_a_window_keep_rings_and_a_checkpoint() -> None:
    windowed = make_layer(0, DENSE, KVCache(128, window=8, state_bytes=100))
    model, workload = replace(dense_model(1), layers=(windowed,)), Workload(batch=2, context=1000)
    assert hold(model).cache_bytes(workload) == 2 * 2 * (8 * 128 + 100)
    # of passes that nobody has counted, the whole context
    assert hold(model, way=STOCK).cache_bytes(workload) == 2 * (1000 * 128 + 100)


def test_a_chunk_is_joined_to_what_rings_have() -> None:
    windowed = make_layer(0, DENSE, KVCache(128, window=8))
    whole = make_layer(0, DENSE, KVCache(128))
    for tokens, context, joined in ((10, 30, 17), (4, 30, 11), (4, 8, 8), (30, 30, 0)):
        shape = PassShape(Phase.PREFILL, 2, tokens, context)
        assert joined_bytes(windowed, shape) == 2 * joined * 128
    workload = Workload(batch=2, prompt_tokens=30, output_tokens=1, context=64)
    rings, none = (
        phase_bytes(hold(replace(dense_model(1), layers=(each,))), workload, 10)[0]
        for each in (windowed, whole)
    )
    assert rings > none


def test_terms_add_up() -> None:
    stage = hold(dense_model(4))
    budget = Budget(gpu_memory=100 * MIB)
    placement = place_rules(stage.model, [rule("mlp")], 2)
    terms = list_gpu_memory(placement, stage, make_machine(), Workload(), budget, 512)
    memory = {term.path.removeprefix("gpu_memory."): term.value for term in terms}
    total = memory.pop("total")
    assert total == sum(memory.values())
    assert memory["ring"] == 2 * 3 * 3 * HIDDEN**2 * 2
    assert memory["overhead"] == overhead_bytes(make_machine(), budget)
    assert memory["overhead"] == pytest.approx(MARGIN * 100 * MIB, abs=1)
