"""What layers have to read and to multiply."""

from dataclasses import replace

import pytest

from offplan.checkpoint.architecture import read_architecture
from offplan.costs.work import (
    AttentionDims,
    PassShape,
    attended_pairs,
    attention_dims,
    decode_shape,
    layer_work,
    pairs_in_chunks,
    prefill_shapes,
)
from offplan.held.held import hold
from offplan.placement import Phase
from offplan.plan import Workload
from tests.costs.builders import DENSE, HIDDEN, MOE, make_model


def prefill(tokens: int, context: int, batch: int = 1) -> PassShape:
    return PassShape(Phase.PREFILL, batch, tokens, context)


@pytest.mark.parametrize(
    ("prompt", "chunk", "expected"),
    [
        (10, 10, [(10, 10)]),
        (10, 4, [(4, 4), (4, 8), (2, 10)]),
        (4, 8, [(4, 4)]),
    ],
)
def test_chunks_cover_the_prompt(prompt: int, chunk: int, expected: list[tuple[int, int]]) -> None:
    shapes = prefill_shapes(Workload(prompt_tokens=prompt, batch=3), chunk)
    assert [(shape.tokens, shape.context) for shape in shapes] == expected
    assert all(shape.num_tokens == 3 * shape.tokens for shape in shapes)


@pytest.mark.parametrize(
    ("prompt", "rests"), [(8, [False]), (16, [False] * 2), (12, [False, True]), (5, [False])]
)
def test_what_remains_behind_whole_chunks_is_a_rest(prompt: int, rests: list[bool]) -> None:
    shapes = prefill_shapes(Workload(prompt_tokens=prompt), 8)
    assert [shape.is_rest for shape in shapes] == rests


def test_decode_attends_over_the_whole_cache() -> None:
    workload = Workload(batch=2, prompt_tokens=500, output_tokens=101)
    assert decode_shape(workload) == PassShape(Phase.DECODE, 2, 1, 550)


@pytest.mark.parametrize("tokens", [1, 2, 5, 9])
@pytest.mark.parametrize("context", [9, 12])
@pytest.mark.parametrize("window", [None, 1, 4, 9, 100])
def test_pairs_are_counted(tokens: int, context: int, window: int | None) -> None:
    reach = [min(c, window or c) for c in range(context - tokens + 1, context + 1)]
    assert attended_pairs(prefill(tokens, context), window) == sum(reach)
    in_chunk = [(c - 1) % (window or context) + 1 for c in range(context - tokens + 1, context + 1)]
    assert pairs_in_chunks(prefill(tokens, context), window) == sum(in_chunk)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"num_attention_heads": 4, "head_dim": 32, "hidden_size": 64}, (4, 32, 32)),
        ({"num_attention_heads": 4, "hidden_size": 64}, (4, 16, 16)),
        ({"text_config": {"num_attention_heads": 2, "hidden_size": 64}}, (2, 32, 32)),
        (
            {
                "num_attention_heads": 16,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
            },
            (16, 192, 128),
        ),
        ({}, (0, 0, 0)),
    ],
)
def test_heads_are_read(config: dict[str, object], expected: tuple[int, int, int]) -> None:
    assert attention_dims(read_architecture(config), Phase.PREFILL) == AttentionDims(*expected)


def test_latents_are_looked_at_as_they_are_in_decode() -> None:
    config = {"num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert attention_dims(read_architecture(config), Phase.DECODE) == AttentionDims(16, 576, 512)


def test_dense_layer_reads_all_and_multiplies_matrices() -> None:
    stage = hold(make_model([DENSE]))
    work = layer_work(stage, stage.layers[0])
    matrices = 3 * 3 * HIDDEN**2 + 3 * HIDDEN**2
    assert work.weight_bytes(prefill(1, 1)) == stage.layers[0].nbytes
    assert work.flops(prefill(1, 1)) == 2 * matrices + 2 * 4 * (16 + 16)
    assert work.flops(prefill(6, 6, batch=2)) == 12 * 2 * matrices + 2 * 21 * 2 * 4 * 32
    cache = 2 * 10 * stage.layers[0].kv_cache.bytes_per_token
    assert work.device_bytes(prefill(1, 10, batch=2)) == stage.layers[0].nbytes + cache


def test_routed_experts_are_read_as_tokens_touch_them() -> None:
    stage = hold(make_model([MOE]))
    layer = stage.layers[0]
    work = layer_work(stage, layer)
    dense = layer.nbytes - layer.expert_bytes
    assert work.weight_bytes(prefill(1, 1)) == pytest.approx(dense + layer.expert_bytes * 2 / 8)
    assert work.weight_bytes(prefill(1000, 1000)) == pytest.approx(layer.nbytes)
    one, two = work.flops(prefill(1, 1)), work.flops(replace(prefill(1, 1), batch=2))
    assert two == 2 * one


def test_latent_attention_expands_each_token_once() -> None:
    latent = {**DENSE, "self_attn.kv_b_proj.weight": (96, 32)}
    stage = hold(make_model([latent], num_attention_heads=0))
    work = layer_work(stage, stage.layers[0])
    assert work.flops(prefill(1, 1)) == work.flops(prefill(1, 101))
    plain = hold(make_model([DENSE], num_attention_heads=0))
    more = work.flops(prefill(7, 7)) - layer_work(plain, plain.layers[0]).flops(prefill(7, 7))
    assert more == 7 * 2 * 96 * 32
