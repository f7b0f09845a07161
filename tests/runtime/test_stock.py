"""Transformers' own passes with offplan's movement of weights: the same bits, or a refusal."""

import re
from dataclasses import replace
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM

from offplan.capabilities import cached_experts
from offplan.capabilities.stock import STOCK
from offplan.checkpoint.open import open_model
from offplan.costs.predict import predict
from offplan.engines.export import export_plan
from offplan.errors import CheckpointError, ExportError, InputError
from offplan.forms.form import Component, Form, Kind
from offplan.held.held import hold, hold_counted
from offplan.library.asking import ask
from offplan.library.machines import load_machine
from offplan.library.runnable import why_not_run
from offplan.library.sessions import open_session as open_planned
from offplan.plan import Budget, Workload, dump_plan
from offplan.planner.make import make_plan
from offplan.runtime.loading.checks import list_shared, map_tensors
from offplan.runtime.loading.fill import Codes
from offplan.runtime.model.calls import LayerCalls, WeightWatch
from offplan.runtime.stock.generation import StockGeneration
from offplan.runtime.stock.passes import (
    TOKENS,
    LiveBytes,
    _count,
    _fit_cache,
    count_passes,
)
from offplan.runtime.stock.skeleton import build_stock
from tests.runtime.families import (
    BATCH,
    PROMPT,
    compare_stock,
    require,
    run_stock,
    save,
)
from tests.runtime.plans import group, offload, open_session, run_each_greedily, run_greedily
from tests.runtime.quantise import ALONE, FORMS, save_stored
from tests.tiers import first_quick, others_in_sweep

EXACT = """
bamba bloom deepseek_v4 falcon falcon_h1 granitemoehybrid hrm_text jamba jetmoe kimi_linear lfm3
longcat_flash mamba minimax mpt nemotron_h openai-gpt recurrent_gemma rwkv zamba zamba2 zaya
"""
"""Families that offplan's own passes refuse; HRM's call its layers several times, and several of
Zamba's read the same weights."""
BOTH = "deepseek_v32 gpt_neox llama qwen3_next"
"""Families that run in both ways, one of them an encoder by its config."""
DOZEN = """
deepseek_v4 falcon hrm_text jamba jetmoe kimi_linear longcat_flash mamba minimax openai-gpt zamba
qwen3_next
"""
"""Of both one with each sort of layer, of state and of cache."""
STORED = [
    *(("qwen3_moe", form) for form in ("fp8_block", "int4_zeros", "gptq", "awq", "nvfp4")),
    *(("deepseek_v4", form) for form in ("deepseek", "deepseek_nvfp4", "fp8_block", "int4")),
    ("nemotron_h", "nvfp4_modelopt"),
    *(("deepseek_v3", "fp8_block"), ("deepseek_v32", "fp8_block"), ("gpt_oss", "mxfp4")),
    *(("qwen3", form) for form in FORMS | ALONE),
]
"""Families with the forms that their weights are stored in; first those with experts."""
FEW_STORED = [
    *(("qwen3_moe", form) for form in ("fp8_block", "gptq", "nvfp4")),
    *(("deepseek_v4", form) for form in ("deepseek", "deepseek_nvfp4")),
    *(("nemotron_h", "nvfp4_modelopt"), ("gpt_oss", "mxfp4"), ("deepseek_v32", "fp8_block")),
    *(("qwen3", form) for form in ("int4_zeros", "int8_bytes", "bnb8", "nf4_nested")),
]
"""Which layers own codes, and codes of each sort: transformers' passes see their values alone."""

pytestmark = pytest.mark.usefixtures("counted_by_warm_processes")


@pytest.mark.slow
@pytest.mark.parametrize("family", others_in_sweep((EXACT + BOTH).split(), DOZEN.split()))
def test_a_family_gives_the_same_bits(family: str) -> None:
    require(family)
    outcome = compare_stock(family, slots=1)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize("family", ["falcon", "nemotron_h", "deepseek_v4"])
def test_a_family_gives_the_same_bits_in_bfloat16(family: str) -> None:
    require(family, torch.bfloat16)
    outcome = compare_stock(family, dtype=torch.bfloat16)
    assert outcome.kind == "exact", outcome.why


@pytest.mark.slow
@pytest.mark.parametrize(("family", "form"), others_in_sweep(STORED, FEW_STORED))
def test_tokens_are_those_of_the_values(family: str, form: str, tmp_path: Path) -> None:
    require(family)
    stored, plain = save_stored(family, form, tmp_path)
    values = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    decision, prompts = offload(group(2, 1)), (PROMPT, BATCH)
    made = run_each_greedily(stored, decision, prompts, stock=True, late_copies=True)
    for prompt, got in zip(prompts, made, strict=True):
        for ours, theirs in zip(got, run_stock(values, prompt, cached=True), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_codes_whose_shape_is_not_known_are_refused_before_loading(tmp_path: Path) -> None:
    require("deepseek_v4")
    stored, _ = save_stored("deepseek_v4", "nf4", tmp_path)
    reason = why_not_run(hold(open_model(str(stored)), way=STOCK))
    assert reason is not None
    assert re.search(r"attn.wq_b.weight stands for \[256, 256\] in nf4", reason)


@pytest.fixture(scope="module")
def falcon(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("falcon", tmp_path_factory.mktemp("falcon"))


@pytest.mark.slow
def test_offloading_moves_bytes_and_changes_nothing(falcon: Path) -> None:
    resident = run_greedily(falcon, offload(), PROMPT, stock=True)
    for rule in (
        group(2, 1),
        group(1, 1, decode="uva"),
        group(2, 1, "mlp", prefill="uva", decode="uva"),
    ):
        for slots in (1, 2, 4):
            moved = run_greedily(
                falcon, offload(rule, prefetch_step=slots), PROMPT, stock=True, late_copies=True
            )
            assert all(map(torch.equal, moved, resident))
    with open_session(falcon, offload(group(1, 1), prefetch_step=1), stock=True) as session:
        session.prefill(PROMPT)
        before = session.link_bytes
        with session.stream():
            session.decode(PROMPT[:, :1])
        slabs = session.loaded.placement.slabs
        assert session.link_bytes - before == sum(slab.nbytes for slab in slabs)


@pytest.mark.slow
def test_a_longer_prompt_than_the_plan_has_room_for_is_refused(tmp_path: Path) -> None:
    decision = offload(group(2, 1), prefill_chunk=8)
    # its cache keeps the window, and it attends to all tokens
    for family, variant in (("jamba", "plain"), ("falcon", "windows")):
        folder = save(family, tmp_path / family, variant)
        with (
            open_session(folder, decision, stock=True) as session,
            pytest.raises(InputError, match=r"14 tokens.*room for 8.*`prompt_tokens=14`"),
        ):
            session.prefill(PROMPT)


def test_a_prompt_in_chunks_is_the_whole_one(falcon: Path) -> None:
    whole = run_greedily(falcon, offload(group(1, 1)), PROMPT, stock=True)
    decision = offload(group(1, 1), prefill_chunk=5)
    parts = run_greedily(falcon, decision, PROMPT, stock=True, late_copies=True)
    for some, others in zip(parts, whole, strict=True):
        torch.testing.assert_close(some, others, atol=1e-5, rtol=1e-5)
    with open_session(falcon, decision, stock=True) as session:
        before = session.link_bytes
        session.prefill(PROMPT)
        slabs = session.loaded.placement.slabs
        # each of the three chunks finds two slabs in the ring, and leaves two for the next pass
        assert session.link_bytes - before >= 3 * sum(slab.nbytes for slab in slabs)


@pytest.mark.parametrize(
    "family", others_in_sweep(["falcon", "nemotron_h", "gemma2"], ["nemotron_h"])
)
def test_what_is_counted_is_what_is_taken(family: str, tmp_path: Path) -> None:
    # beside passes without values: real ones, their storages counted as they come and go
    folder = save(family, tmp_path / family)
    passes = count_passes(open_model(str(folder)))
    assert not passes.is_estimated
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    live, prompt = LiveBytes(), torch.arange(1, 60)[None]
    with torch.no_grad(), live:
        text = StockGeneration(model, prompt, 128)
        live.begin()
        text.prefill(0, prompt.shape[1])
        taken = live.peak - text.cache_bytes
    moved = sum(
        passes.moved_bytes(index, "prefill", 1, prompt.shape[1], prompt.shape[1])
        for index in range(-1, len(passes.caches))
    )
    # attention without values is counted step by step
    assert live.moved.total() <= 1.1 * moved <= 4 * live.moved.total()
    tokens = prompt.shape[1]
    predicted = sum(tokens * each + state for each, _, state in passes.caches)
    assert text.cache_bytes <= predicted <= 1.1 * text.cache_bytes + 4096
    of_prompt, _ = passes.activation_bytes(1, tokens, 128)
    assert taken <= 1.1 * of_prompt + 16384


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [60, 126, 300])
def test_tokens_that_wait_to_be_compressed_are_counted(tokens: int, tmp_path: Path) -> None:
    require("deepseek_v4")
    folder = save("deepseek_v4", tmp_path)
    stage = hold_counted(open_model(str(folder)), STOCK)
    model = AutoModelForCausalLM.from_pretrained(folder).requires_grad_(False)
    text = StockGeneration(model, torch.arange(tokens)[None] % 60, 512)
    with torch.no_grad():
        text.prefill(0, tokens)
    predicted = sum(layer.kv_cache.nbytes(1, tokens) for layer in stage.layers)
    assert text.cache_bytes <= predicted


def test_a_window_is_found_wherever_it_ends() -> None:
    sizes = [size + 1 for size in TOKENS]
    for window in (6, 100, 128, 200, 512, 1000):
        of_token, most, state = _fit_cache(sizes, [7 * min(size, window) for size in sizes])
        for context in (1, 64, 128, 300, 800, 4096):
            fitted = state + of_token * min(context, most or context)
            assert fitted >= 7 * min(context, window)
        assert fitted <= 7 * window + of_token


@pytest.mark.slow
def test_a_plan_is_for_transformers_passes_where_ours_refuse(falcon: Path) -> None:
    machine, model = load_machine("h200-pcie5"), open_model(str(falcon))
    workload = Workload(batch=1, prompt_tokens=14, output_tokens=8, context=48)
    plan = make_plan(ask(model, machine, workload)).plan
    assert plan.goal.stock
    assert "stock: true" in dump_plan(plan)
    assert plan.prediction.basis == "estimated"
    assert plan.offload.packing is None
    with open_planned(plan, device="cpu") as session:
        assert session.prefill(PROMPT).shape == (1, 64)
    with pytest.raises(ExportError, match="transformers' own passes"):
        export_plan(plan, model, "vllm")


@pytest.mark.parametrize(
    ("family", "chunk", "slots"),
    first_quick([("falcon", 5, 2), ("hrm_text", 64, 1), ("hrm_text", 64, 2)]),
)
def test_predicted_bytes_are_those_that_cross(
    family: str, chunk: int, slots: int, tmp_path: Path
) -> None:
    # HRM calls its layers several times, and Falcon's prompt is read in three chunks
    require(family)
    model = open_model(str(save(family, tmp_path)))
    rules = (group(2, 1),) if family == "falcon" else (group(1, 1, "mlp"),)
    decision = offload(*rules, prefetch_step=slots, prefill_chunk=chunk)
    workload = Workload(batch=1, prompt_tokens=14, output_tokens=8, context=48)
    machine, budget = load_machine("h200-pcie5").profile, Budget(gpu_memory=2**30)
    priced = predict([hold_counted(model, STOCK)], machine, workload, budget, decision)
    with open_session(tmp_path, decision, stock=True) as session:
        session.warm_up(1, 14)
        before = session.link_bytes
        session.prefill(PROMPT)
        of_prompt = session.link_bytes - before
        with session.stream():
            session.decode(PROMPT[:, :1])  # the first step finds the ring as the prompt left it
            before = session.link_bytes
            session.decode(PROMPT[:, :1])
    assert of_prompt == priced.prefill.link_bytes
    assert session.link_bytes - before == priced.decode.link_bytes


@pytest.mark.parametrize(
    ("family", "part"),
    others_in_sweep(
        [("zamba", "shared_transf."), ("zamba2", "shared_transformer.")],
        [("zamba2", "shared_transformer.")],
    ),
)
@pytest.mark.slow
def test_shared_weights_lie_and_count_once(family: str, part: str, tmp_path: Path) -> None:
    require(family)
    model = open_model(str(save(family, tmp_path)))
    # of short prompts: it reads them token by token
    passes = _count(model, (6, 14, 30), is_fake=True)
    stage, whole = (
        hold_counted(model, STOCK, passes),
        AutoModelForCausalLM.from_pretrained(tmp_path),
    )
    assert stage.loaded_bytes == sum(value.nbytes for value in whole.parameters())
    assert stage.passes is not None
    # Zamba has one block of shared weights, and Zamba 2 two
    assert [layer for layer, count in enumerate(stage.passes.borrowed) if count] == [3, 4]
    workload = Workload(batch=1, prompt_tokens=14, output_tokens=8, context=48)
    machine, budget = load_machine("h200-pcie5").profile, Budget(gpu_memory=2**30)
    decision = offload(group(1, 1), prefetch_step=1)
    priced = predict([stage], machine, workload, budget, decision)
    with open_session(tmp_path, decision, stock=True) as session:
        store, state = session.loaded.store, session.loaded.module.state_dict()
        shared = [value.data_ptr() for name, value in state.items() if part in name]
        start = store.arena.data_ptr()
        assert all(start <= each < start + store.arena.nbytes for each in shared)
        assert len(set(shared)) < len(shared)
        session.prefill(PROMPT)
        for _ in range(2):  # the first step finds the ring as the prompt left it
            before = session.link_bytes
            with session.stream():
                session.decode(PROMPT[:, :1])
    slabs = session.loaded.placement.slabs
    assert session.link_bytes - before == sum(slab.nbytes for slab in slabs)
    assert session.link_bytes - before == priced.decode.link_bytes


def test_shared_weights_that_would_lie_twice_are_refused(tmp_path: Path) -> None:
    require("zamba")
    model = open_model(str(save("zamba", tmp_path)))
    skeleton = build_stock(model)
    targets = map_tensors(skeleton, hold(model, way=STOCK))
    name = next(name for name in targets if "shared_transf.feed_forward.up_proj" in name)
    assert list_shared(skeleton, targets)[name] == (1, 3, 4)
    codes = Codes(name, Form(Kind.FP8_TENSOR), Component.WEIGHT, (48, 32), torch.float8_e4m3fn)
    with pytest.raises(CheckpointError, match="shared by several layers and stored as codes"):
        list_shared(skeleton, targets | {name: replace(targets[name], codes=codes)})
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name.replace(".1.", ".3."): tensors[name].clone()}, path)
    reason = why_not_run(hold(open_model(str(tmp_path)), way=STOCK))
    assert reason is not None
    assert f"is stored beside {name}, and both are one weight" in reason


@pytest.mark.slow
def test_experts_that_could_be_kept_need_not_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # bfloat16 experts could be kept, and on longer texts the model needs transformers' own passes
    model = open_model(str(save("deepseek_v32", tmp_path)))
    monkeypatch.setattr(cached_experts, "_why_not", lambda _: None)
    workload, machine = Workload(prompt_tokens=14, context=4096), load_machine("h200-pcie5")
    goal = ask(model, machine, workload).goal
    assert (goal.stock, goal.cached_experts) == (True, "off")
    with pytest.raises(InputError, match="leave `cached_experts` out"):
        make_plan(ask(model, machine, workload, cached_experts="auto"))


@pytest.mark.slow
def test_stock_can_be_asked_for(tmp_path: Path) -> None:
    model = open_model(str(save("llama", tmp_path)))
    machine, workload = load_machine("h200-pcie5"), Workload(prompt_tokens=14, output_tokens=8)
    assert not make_plan(ask(model, machine, workload)).plan.goal.stock
    plan = make_plan(ask(model, machine, workload, stock=True)).plan
    assert plan.goal.stock
    with pytest.raises(InputError, match="leave one of them out"):
        ask(model, machine, workload, stock=True, engine="vllm")


def test_choices_of_experts_are_not_recorded(falcon: Path) -> None:
    from offplan.routing.profile import require_routing

    with pytest.raises(InputError, match="transformers' own"):
        require_routing(open_model(str(falcon)), way=STOCK)


def test_encoders_are_refused_before_loading(tmp_path: Path) -> None:
    save("bert", tmp_path)
    with pytest.raises(CheckpointError, match="is an encoder"):
        build_stock(open_model(str(tmp_path)))


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        return made


def test_a_layer_that_calls_another_is_refused() -> None:
    outer = _Nested()
    calls = LayerCalls([outer, outer.inner])
    with pytest.raises(CheckpointError, match="layer 0 calls layer 1"):
        outer(torch.zeros(1, 2))
    calls.close()
    outer(torch.zeros(1, 2))


def test_weights_that_are_read_outside_their_layer_are_refused() -> None:
    layer, other = nn.Linear(2, 2), nn.Linear(2, 2)
    calls = LayerCalls([layer, other])
    owners = {id(layer.weight): (0, "weight of 0")}
    with torch.inference_mode(), WeightWatch(calls, owners, [], {}):
        layer(torch.zeros(1, 2))
        with pytest.raises(CheckpointError, match="weight of 0 is read outside layer 0"):
            torch.nn.functional.linear(torch.zeros(1, 2), layer.weight)


def test_a_view_of_a_slot_is_read_by_its_layers_alone() -> None:
    layers = [nn.Linear(2, 2), nn.Linear(2, 2)]
    calls, slot = LayerCalls(layers), torch.zeros(64, dtype=torch.uint8)
    view = slot[:16].view(torch.float32)
    with (
        torch.inference_mode(),
        WeightWatch(calls, {}, [slot], {0: 0}),
        pytest.raises(CheckpointError, match="read outside the layers"),
    ):
        view.sum()


def test_caches_of_a_stage_are_those_that_were_counted(falcon: Path) -> None:
    model = open_model(str(falcon))
    workload = Workload(batch=2, prompt_tokens=14, output_tokens=8, context=48)
    stage = hold_counted(model, STOCK)
    session = open_session(falcon, offload(), stock=True)
    with session:
        session.prefill(BATCH)
        text = session.runner._text
        assert text is not None
        tokens = BATCH.shape[1]
        assert text.cache_bytes * workload.context // tokens == stage.cache_bytes(workload)
    assert replace(stage, passes=None).cache_bytes(workload) > 0
    assert hold(model, way=STOCK).passes is None


def test_what_passes_take_is_the_same_on_a_busy_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save("falcon", tmp_path)
    model = open_model(str(tmp_path))
    idle = count_passes(model)
    clock = count(step=100)
    monkeypatch.setattr("time.perf_counter", lambda: float(next(clock)))
    assert count_passes(model) == idle
