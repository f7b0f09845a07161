"""What a cache in FP8 costs, by hand: bytes held, read in a step, and moved by a prompt."""

from dataclasses import replace

import pytest

from offplan.capabilities.way import OWN
from offplan.checkpoint.model import Model, Vectors
from offplan.costs.activations import (
    ENCODING_BYTES,
    SPLITS,
    attention_bytes,
    cached_value_bytes,
)
from offplan.costs.compute import layer_time
from offplan.costs.kv_cache import cached_bytes
from offplan.costs.work import PassShape, layer_work
from offplan.engines.runner import lower
from offplan.held.held import hold
from offplan.kernel_sizes import CODED_PROGRAMS, LATENT_HEADS
from offplan.placement import Phase
from offplan.plan import Goal, Workload
from tests.costs.builders import DENSE, make_machine, make_model
from tests.engines.builders import qwen3

FP8 = replace(OWN, kv_cache_dtype="fp8")
STEP, PROMPT = PassShape(Phase.DECODE, 2, 1, 30), PassShape(Phase.PREFILL, 2, 10, 30)
VALUES = 2 * 2 * 16 * 2
"""Bytes of a token: a key and a value of two heads of 16, in 16 bits."""
CODES = 2 * 2 * (16 + 4)
"""A byte for each of these, and a scale for each head's."""


def make_dense() -> Model:
    """A model of one layer that caches a key and a value of two heads."""
    model = make_model([DENSE])
    (layer,) = model.layers
    cache = replace(layer.kv_cache, vectors=(Vectors(2, 16),) * 2)
    return replace(model, layers=(replace(layer, kv_cache=cache),))


def test_bytes_of_a_token() -> None:
    model = make_dense()
    plain, coded = hold(model), hold(model, way=FP8)
    work = Workload(batch=2, context=40, prompt_tokens=20, output_tokens=8)
    assert plain.cache_bytes(work) == 2 * 40 * VALUES
    assert coded.cache_bytes(work) == 2 * 40 * CODES
    assert cached_value_bytes(plain, work, 10) == 0
    assert cached_value_bytes(coded, work, 10) == 2 * 40 * VALUES


def test_an_engine_has_no_scale_for_each_token() -> None:
    goal = Goal(engine="vllm", kv_cache_dtype="fp8")
    model = replace(qwen3(2), dtype="bfloat16")
    layers = [stage.layers[0].kv_cache for stage in lower(model, goal)]
    assert [each.bytes_per_token * 2 for each in layers] == [each.value_bytes for each in layers]


def test_a_step_reads_codes_and_a_prompt_makes_values() -> None:
    stage = hold(make_dense(), way=FP8)
    work = layer_work(stage, stage.layers[0])
    codes, values = 2 * 30 * CODES, 2 * 30 * VALUES
    assert cached_bytes(work, STEP, in_place=True) == codes - values
    for shape, in_place in ((STEP, False), (PROMPT, True)):
        more = cached_bytes(work, shape, in_place=in_place)
        assert more == codes + values


def test_a_layers_measured_time_stands_for_it() -> None:
    """Layers are timed with values: what codes save of their bytes is less, for the same key."""
    model, machine = make_dense(), make_machine()
    plain, coded = hold(model), hold(model, way=FP8)
    works = [layer_work(stage, stage.layers[0]) for stage in (plain, coded)]
    assert works[1].stored is not None
    assert works[1].stored.key == works[0].key != works[1].key
    long = PassShape(Phase.DECODE, 64, 1, 10**6)
    saved = 64 * 10**6 * (VALUES - CODES) / machine.hbm.value
    seconds = [layer_time(machine, work, long).seconds for work in works]
    assert seconds[0] - seconds[1] == pytest.approx(saved, rel=1e-3)


def test_temporaries() -> None:
    """A new token's states are encoded; each program of the kernel leaves what it mixed."""
    model = make_dense()
    plain, coded = hold(model), hold(model, way=FP8)
    splits = 4 * (16 + 1) * LATENT_HEADS * CODED_PROGRAMS * SPLITS
    for shape, more in ((PROMPT, 0), (STEP, splits)):
        taken = [attention_bytes(stage, stage.layers[0], shape) for stage in (plain, coded)]
        encoded = ENCODING_BYTES * shape.num_tokens * VALUES // 2
        assert taken[1] - taken[0] == encoded + more
