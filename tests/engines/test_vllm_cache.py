"""The KV cache that vLLM is given: enough for it to start, and for the plan's batch."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from offplan.checkpoint.model import KVCache, Model
from offplan.checkpoint.open import open_model
from offplan.costs.engine_times import cache_bytes
from offplan.costs.predict import predict
from offplan.engines.export import export_plan
from offplan.engines.runner import lower
from offplan.engines.vllm import VLLM
from offplan.errors import ExportError
from offplan.held.held import hold
from offplan.library.asking import pose
from offplan.plan import Budget, Goal, Offload, Workload
from offplan.units import format_bytes
from tests.costs.builders import make_machine
from tests.engines.builders import keep_caches, make_plan, qwen3
from tests.engines.configs import DENSE, STORED_CODES

BLOCK_TOKENS = 128
"""Tokens in a block, at most."""
TOKEN = KVCache(1024)
"""Keys and values of one head of 256 elements."""
STATE = KVCache(state_bytes=3 * 2**19)
CHUNK = 512


def every(number: int, num_layers: int, others: KVCache) -> Model:
    """A model of which every so many layers keep the whole context."""
    caches = [others if (i + 1) % number else TOKEN for i in range(num_layers)]
    return keep_caches(qwen3(num_layers), caches)


def ask(context: int, batch: int = 1) -> Workload:
    return Workload(batch=batch, prompt_tokens=32, output_tokens=16, context=context)


def count_blocks(model: Model, workload: Workload) -> float:
    """Blocks of 128 tokens of one layer."""
    return cache_bytes(hold(model), workload, CHUNK) / (BLOCK_TOKENS * 1024)


def test_layers_that_are_alike_have_the_plans_blocks_and_an_empty_one() -> None:
    assert count_blocks(every(1, 6, TOKEN), ask(300, batch=2)) == 6 * (1 + 2 * 3)


def test_windows_need_not_begin_with_a_block() -> None:
    model = every(1, 6, TOKEN)
    model = keep_caches(model, [KVCache(1024, 4096)] * 6)
    assert count_blocks(model, ask(300, batch=2)) == 6 * (1 + 2 * (3 + 1))


def test_prompts_of_a_batch_pass_their_windows_at_once() -> None:
    """Of 13 layers one has no window, and each of the others is a group."""
    model = keep_caches(qwen3(13), [TOKEN, *[KVCache(1024, 128)] * 12])
    of_window = 8 + 8 * 1024 // BLOCK_TOKENS
    assert count_blocks(model, ask(1024, batch=8)) == 1 + 8 * 8 + 12 * of_window


def test_blocks_that_hold_a_state_may_be_smaller_than_what_is_left_of_a_context() -> None:
    """With parts of 16 tokens three blocks of 112 hold a context, else two of 128."""
    model = every(4, 16, KVCache(state_bytes=112 * 1024))
    given = cache_bytes(hold(model), ask(230, batch=32), CHUNK)
    assert given == 4 * 112 * 1024 * (1 + 32 * 3 + 3 * (32 + 2))


def test_nothing_is_said_of_a_cache_that_is_not_there() -> None:
    assert "kv-cache-memory-bytes" not in export_plan(make_plan(), qwen3(), "vllm").serve


@pytest.mark.parametrize(("num_layers", "groups"), [(62, 6), (26, 6), (12, 5)])
def test_layers_with_a_window_are_grouped_by_those_without(num_layers: int, groups: int) -> None:
    """Of 62 layers 10 have none, and 52 make six groups of as many: a seventh more than there are.

    A context below the window takes all blocks of each group, and one more where it slides.
    """
    model = every(6, num_layers, KVCache(1024, 4096))
    size = num_layers // 6
    expected = size * (1 + 16 + groups * (16 + 1))
    assert count_blocks(model, ask(2048)) == max(expected, num_layers * 17)


def test_windows_of_a_batch_slide_at_once() -> None:
    """Each sequence holds its window and its chunks of two steps: all of a context of 2,048."""
    model = every(6, 62, KVCache(1024, 1024))
    assert count_blocks(model, ask(2048, batch=4)) == 10 * (1 + 4 * 16 + 6 * 4 * (16 + 1))


def test_a_long_context_leaves_windows_less_than_the_plan_has() -> None:
    model = every(6, 62, KVCache(1024, 1024))
    assert count_blocks(model, ask(32768)) == 62 * (1 + 256)


def test_layers_with_a_state_have_blocks_that_hold_one() -> None:
    """A block of 12 times 128 tokens holds a state; three groups of four want 2 + batch of them."""
    model = every(4, 16, STATE)
    workload = ask(4096, batch=2)
    assert count_blocks(model, workload) == 4 * 12 * (1 + 2 * 3 + 3 * (2 + 2))


def test_what_blocks_of_one_size_take_beyond_a_plan_is_told_or_refused() -> None:
    """A plan made for vLLM has them counted, where layers are alike too."""
    model, work = every(4, 16, STATE), ask(4096)
    plan = make_plan().model_copy(update={"workload": work})
    more = cache_bytes(hold(model), work, CHUNK) - hold(model).cache_bytes(work)
    assert f"{format_bytes(more)} more" in " ".join(export_plan(plan, model, "vllm").notes)
    made = plan.model_copy(update={"goal": Goal(engine="vllm")})
    assert "more than the plan" not in " ".join(export_plan(made, model, "vllm").notes)
    budget = plan.budget.model_copy(update={"gpu_memory": more // 2})
    with pytest.raises(ExportError, match=r"more of GPU memory .* of a budget"):
        export_plan(plan.model_copy(update={"budget": budget}), model, "vllm")


def test_blocks_of_many_short_contexts_are_counted_where_layers_are_alike() -> None:
    """A plan of another engine's has 130 tokens of each, vLLM 256; a block or so has room."""
    model, work = every(1, 6, TOKEN), ask(130, batch=64)
    more = cache_bytes(hold(model), work, CHUNK) - hold(model).cache_bytes(work)
    assert more > hold(model).cache_bytes(work) * 0.9
    plan = make_plan().model_copy(update={"workload": work})
    assert f"{format_bytes(more)} more" in " ".join(export_plan(plan, model, "vllm").notes)
    budget = plan.budget.model_copy(update={"gpu_memory": more // 2})
    with pytest.raises(ExportError, match=r"more of GPU memory .* of a budget"):
        export_plan(plan.model_copy(update={"budget": budget}), model, "vllm")
    alone = plan.model_copy(update={"workload": ask(130)})
    assert "more than the plan" not in " ".join(export_plan(alone, model, "vllm").notes)


@pytest.mark.parametrize("model", [every(1, 4, TOKEN), every(4, 16, STATE)])
def test_a_plan_for_vllm_counts_the_cache_that_vllm_is_given(model: Model) -> None:
    work, goal = ask(4096), Goal(engine="vllm")
    question = pose(model, make_machine(), work, Budget(gpu_memory=2**36), goal)
    decision = Offload(prefill_chunk=CHUNK)
    taken = predict(question.stages, make_machine(), work, question.budget, decision)
    plan = make_plan().model_copy(update={"workload": work, "goal": goal})
    given = export_plan(plan, model, "vllm").serve["kv-cache-memory-bytes"]
    assert given == (str(taken.gpu_memory.kv_cache_bytes),)


def test_the_stage_with_most_layers_tells(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**DENSE, "num_hidden_layers": 5}))
    goal = Goal.model_validate({"engine": "vllm", "pipeline_parallel": 2})
    stages = lower(open_model(str(path)), goal)
    first, last = stages
    assert (len(first.layers), len(last.layers)) == (3, 2)
    of_layer = 3 * BLOCK_TOKENS * first.layers[0].kv_cache.bytes_per_token
    plan = make_plan().model_copy(update={"workload": ask(256), "goal": goal})
    given = VLLM.serve(plan, stages, None)["kv-cache-memory-bytes"]
    assert given == (str(3 * of_layer),)


def test_stages_have_parts_of_the_groups_of_all_layers(tmp_path: Path) -> None:
    """Of eight layers each second one has a window: two groups of four.

    Of these the stages have two and one layer, one and two, one and one. By themselves the first
    two would make groups of one layer.
    """
    path = tmp_path / "config.json"
    config = {**STORED_CODES, "num_hidden_layers": 8, "sliding_window": 4096}
    config["layer_types"] = ["sliding_attention", "full_attention"] * 4
    path.write_text(json.dumps(config))
    goal = Goal.model_validate({"engine": "vllm", "pipeline_parallel": 3})
    stages = lower(open_model(str(path)), goal)
    of_layer = BLOCK_TOKENS * stages[0].layers[0].kv_cache.bytes_per_token
    found = [cache_bytes(stage, ask(100), CHUNK) for stage in stages]
    assert found == [each * of_layer * (1 + 1 + 2) for each in (2, 2, 1)]


@pytest.mark.engines
@pytest.mark.skipif(find_spec("vllm") is None, reason="needs the package vllm")
@pytest.mark.parametrize("part", [16, 64, 128])
@pytest.mark.parametrize("context", [230, 512, 2048, 4096, 32768])
@pytest.mark.parametrize(
    "model",
    [
        keep_caches(qwen3(6), [KVCache(1024, 1024)] * 6),
        every(6, 62, KVCache(1024, 1024)),
        every(6, 26, KVCache(1024, 512)),
        every(2, 24, KVCache(1024, 128)),
        every(4, 48, STATE),
        every(2, 9, STATE),
        every(4, 16, KVCache(state_bytes=112 * 1024)),
    ],
)
def test_vllm_starts_with_it(model: Model, context: int, part: int) -> None:
    """By its own count of what one context needs, with prefixes cached and the empty block."""
    caches = [layer.kv_cache for layer in model.layers]
    needed = ask_vllm(caches, context, part)
    assert cache_bytes(hold(model), ask(context), CHUNK) >= needed


def ask_vllm(caches: list[KVCache], context: int, part: int) -> int:
    """Ask for the bytes, in blocks of so many tokens, or of as many more as hold a state."""
    import torch
    from vllm.config import DeviceConfig, VllmConfig
    from vllm.v1 import kv_cache_interface as kept
    from vllm.v1.core import kv_cache_planning as planning
    from vllm.v1.core.kv_cache_config_builder import KVCacheConfigBuilder

    config: Any = VllmConfig(device_config=DeviceConfig(device="cpu"))
    config.model_config = SimpleNamespace(max_model_len=context)
    config.scheduler_config.max_num_batched_tokens = CHUNK
    config.scheduler_config.disable_hybrid_kv_cache_manager = False
    config.cache_config.kv_cache_layout = "LBHNC"
    config.cache_config.mamba_cache_mode = "align"
    block = part * max(1, *(-(-each.state_bytes // (part * 1024)) for each in caches))
    attention: Any = {"num_kv_heads": 1, "head_size": 256, "dtype": torch.bfloat16}

    def specify(cache: KVCache) -> Any:
        if cache.state_bytes:
            return kept.MambaSpec(
                block,
                shapes=((cache.state_bytes // 4,),),
                dtypes=(torch.float32,),
                page_size_padded=block * 1024,
                mamba_cache_mode="align",
                num_prefill_checkpoint_blocks=1,
            )
        if cache.window is not None:
            return kept.SlidingWindowSpec(block, sliding_window=cache.window, **attention)
        return kept.FullAttentionSpec(block, **attention)

    specs = {str(index): specify(cache) for index, cache in enumerate(caches)}
    groups = planning.get_kv_cache_groups(config, specs)
    builders = [each for each in vars(planning).values() if isinstance(each, type)]
    (builder,) = (
        each
        for each in builders
        if issubclass(each, KVCacheConfigBuilder) and each is not KVCacheConfigBuilder
    )
    return int(
        planning._max_memory_usage_bytes_from_groups(builder(), config, groups)
        + planning._pool_bytes_per_block_from_builder(builder(), config, groups)
    )
