"""Memory terms."""

from dataclasses import replace

import pytest

from offplan.checkpoint.model import KVCache
from offplan.costs.memory import (
    ATTENTION_COPIES,
    HIDDEN_COPIES,
    LOGIT_BYTES,
    MARGIN,
    SCORE_BYTES,
    activation_bytes,
    attention_bytes,
    hidden_bytes,
    kv_cache_bytes,
    logits_bytes,
    mlp_bytes,
    overhead_bytes,
    predict_gpu_memory,
    waiting_bytes,
)
from offplan.costs.work import PassShape
from offplan.placement import Phase
from offplan.plan import Budget, Workload
from tests.costs.builders import (
    DENSE,
    HIDDEN,
    MIB,
    VOCABULARY,
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
    model = dense_model(2)
    layer = model.layers[0]
    assert hidden_bytes(model, SHAPE) == HIDDEN_COPIES * TOKENS * HIDDEN * 2
    assert logits_bytes(model, SHAPE) == 2 * VOCABULARY * LOGIT_BYTES
    width = HIDDEN + HIDDEN + 2 * (HIDDEN // 2)  # q, o, k, v
    assert attention_bytes(model, layer, SHAPE) == ATTENTION_COPIES * TOKENS * width * 2
    assert mlp_bytes(model, layer, SHAPE) == TOKENS * (3 + 3 + 1) * HIDDEN * 2


def test_each_expert_of_a_token_has_its_temporaries() -> None:
    model = moe_model(2)
    shared = 3 * HIDDEN
    routed = 2 * (3 * HIDDEN + 2 * HIDDEN)
    assert mlp_bytes(model, model.layers[1], SHAPE) == TOKENS * (shared + routed) * 2


def test_latent_attention_holds_keys_and_values_of_the_context() -> None:
    config = {
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 12,
    }
    model, plain = make_model([DENSE], **config), make_model([DENSE])

    def more(shape: PassShape) -> int:
        attention = (attention_bytes(m, m.layers[0], shape) for m in (model, plain))
        return next(attention) - next(attention)

    assert more(SHAPE) == 2 * 30 * 2 * 4 * (24 + 12) * 2
    assert more(PassShape(Phase.DECODE, 2, 1, 30)) == 2 * 30 * 4 * SCORE_BYTES


def test_a_token_alone_has_its_experts_gathered() -> None:
    model = moe_model(2)
    one, two = (
        mlp_bytes(model, model.layers[1], PassShape(Phase.DECODE, batch, 1, 9)) for batch in (1, 2)
    )
    assert model.experts is not None
    assert one - two // 2 == 2 * model.experts.bytes_per_expert


def test_activations_grow_with_the_chunk() -> None:
    workload = Workload(prompt_tokens=512, output_tokens=8, context=600)
    sizes = [activation_bytes(moe_model(3), workload, chunk) for chunk in (1, 64, 500, 512)]
    assert sizes == sorted(sizes)
    assert sizes[0] < sizes[-1]


def test_chunks_wait_with_their_hidden_states() -> None:
    """Half the chunk halves its temporaries, but not what the whole prompt keeps."""
    model, workload = dense_model(2), Workload(batch=3, prompt_tokens=8, context=200)
    chunk = PassShape(Phase.PREFILL, 3, 2, 8)
    assert waiting_bytes(model, workload, chunk) == (3 * 6 * HIDDEN + 2 * 8 * 16) * 2
    whole = PassShape(Phase.PREFILL, 3, 8, 8)
    assert waiting_bytes(model, workload, whole) == 2 * 8 * 16 * 2


def test_kv_cache_is_static() -> None:
    model = dense_model(3)
    assert kv_cache_bytes(model, Workload(batch=2, context=1000)) == 3 * 2 * 1000 * 128


def test_layers_with_a_window_keep_the_context_as_the_runtime_does() -> None:
    windowed = make_layer(0, DENSE, KVCache(128, window=8, state_bytes=100))
    model = replace(dense_model(1), layers=(windowed,))
    assert kv_cache_bytes(model, Workload(batch=2, context=1000)) == 2 * (1000 * 128 + 100)


def test_terms_add_up() -> None:
    model = dense_model(4)
    budget = Budget(gpu_memory=100 * MIB)
    placement = place_rules(model, [rule("mlp")], 2)
    memory = predict_gpu_memory(placement, model, make_machine(), Workload(), budget, 512)
    terms = memory.model_dump()
    assert memory.total_bytes == sum(terms.values()) - memory.total_bytes
    assert memory.ring_bytes == 2 * 3 * 3 * HIDDEN**2 * 2
    assert memory.overhead_bytes == overhead_bytes(make_machine(), budget)
    assert memory.overhead_bytes == pytest.approx(MARGIN * 100 * MIB, abs=1)
