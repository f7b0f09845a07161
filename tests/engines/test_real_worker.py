"""The worker that runs plans in vLLM, held against the real package: its models, its offloaders.

On the CPU and the meta device: no weight is read, no kernel runs, and what CUDA streams and events
do happens at once.
"""

import json
import shlex
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offplan.backends import BACKENDS
from offplan.capabilities.ranks import ONE_RANK, Ranks
from offplan.checkpoint.model import Model
from offplan.checkpoint.open import open_model
from offplan.engines.export import export_plan, join_flags, render_export
from offplan.engines.runner import lower
from offplan.engines.vllm import VLLM, WORKER_VERSIONS
from offplan.engines.worker import find_taken
from offplan.errors import DriftError, ExportError, OffplanError
from offplan.held.held import hold
from offplan.placement import Placement, place
from offplan.plan import Backend, Goal, Plan, Rule, Workload, dump_plan
from tests.engines import real_vllm
from tests.engines.builders import make_plan, prefetch, up_to, uva

pytestmark = [
    pytest.mark.engines,
    pytest.mark.skipif(find_spec("vllm") is None, reason="needs the package vllm"),
]

ARCHITECTURES = (
    *("Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM", "LlamaForCausalLM"),
    "DeepseekV3ForCausalLM",
)
RULES = {
    "two backends in one layer": (prefetch("mlp"), uva("self_attn", group_size=1)),
    "arbitrary layers": (prefetch("o_proj", group_size=3), prefetch(group_size=2)),
    "bytes, then layers": (up_to("20KB", "self_attn"), prefetch("mlp", group_size=1)),
    "in place": (uva("self_attn.o_proj", group_size=2),),
}
RANKS = (Ranks(2), Ranks(2, expert=2), Ranks(1, 2), Ranks(2, 2))
AT_NOTHING = {"address": 0, "total_size": 1}
"""A block of memory in which all tensors of the meta device are."""
SMALL = ("serve", "--max-model-len", "64")


@pytest.fixture
def seam(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The worker's module where CUDA's streams and events are stand-ins."""
    from vllm.model_executor.offloader import prefetch as real
    from vllm.model_executor.offloader import uva as real_uva

    import offplan.vllm as worker

    class Stream:
        def __getattr__(self, name: str) -> Callable[..., None]:
            return lambda *_, **__: None

    # vLLM sets it for the whole process once it has met a model that wants it
    monkeypatch.delenv("VLLM_USE_BREAKABLE_CUDAGRAPH", raising=False)
    for name in ("Stream", "Event", "current_stream"):
        monkeypatch.setattr(torch.cuda, name, Stream)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(real_uva, "is_uva_available", lambda: True)
    monkeypatch.setattr(real_uva, "get_accelerator_view_from_cpu_tensor", torch.Tensor.to)
    monkeypatch.setattr(worker, "should_pin_memory", lambda: True)
    yield SimpleNamespace(worker=worker, prefetch=real, uva=real_uva, patch=monkeypatch)
    from vllm.model_executor.offloader import set_offloader

    set_offloader(None)


def write_plan(
    folder: Path, architecture: str, *rules: Rule, ranks: Ranks = ONE_RANK, **offload: object
) -> tuple[Plan, Model, Path]:
    """Write a tiny model's config and a plan for it."""
    path = real_vllm.write_config(folder, architecture)
    return write_plan_of(path, *rules, ranks=ranks, **offload)


def write_plan_of(
    path: Path, *rules: Rule, ranks: Ranks = ONE_RANK, **offload: object
) -> tuple[Plan, Model, Path]:
    """Write a plan for the model of a config, beside it."""
    model, folder = open_model(str(path)), path.parent
    plan = make_plan(*rules)
    found = plan.model.model_copy(
        update={"source": str(path), "headers_sha256": model.headers_sha256}
    )
    decided = plan.offload.model_copy(update=offload)
    goal = Goal() if ranks == ONE_RANK else make_goal(ranks)
    work = Workload(prompt_tokens=32, output_tokens=16, context=64)
    told = {"model": found, "workload": work, "offload": decided, "goal": goal}
    plan = plan.model_copy(update=told)
    (folder / "plan.yaml").write_text(dump_plan(plan))
    return plan, model, folder / "plan.yaml"


def make_goal(ranks: Ranks) -> Goal:
    return Goal(
        engine="vllm",
        tensor_parallel=ranks.tensor,
        pipeline_parallel=ranks.pipeline,
        expert_parallel=ranks.expert,
    )


def configure(folder: Path, plan: Path | None, *more: str) -> Any:
    named = [] if plan is None else ["--additional-config", json.dumps({"offplan": str(plan)})]
    words = [SMALL[0], str(folder), *SMALL[1:], "--load-format", "dummy", *named, *more]
    return real_vllm.parse_command(words)


def build_on_meta(seam: Any, config: Any, offloader: Any, folder: Path, stage: int = 0) -> Any:
    """Build the model, whose tensors stay on the meta device wherever they are moved to."""
    seam.patch.setattr(torch.Tensor, "to", lambda tensor, *_, **__: tensor)
    seam.patch.setattr(seam.uva, "get_accelerator_view_from_cpu_tensor", lambda tensor: tensor)
    seam.patch.setattr(seam.prefetch, "_CpuParamOffloader", Recorded)
    return real_vllm.build(config, offloader, folder, stage)


class Recorded:
    """Stands for vLLM's offloader of one parameter, which would copy it to host memory."""

    def __init__(self, module: torch.nn.Module, param_name: str) -> None:
        self.name = param_name


@pytest.mark.parametrize("rules", RULES.values(), ids=RULES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_worker_takes_what_the_placement_has(
    seam: Any, architecture: str, rules: tuple[Rule, ...], tmp_path: Path
) -> None:
    plan, model, path = write_plan(tmp_path, architecture, *rules)
    config = configure(tmp_path, path)
    taken = find_taken(plan, model, (0, 33, 0))
    offloader = seam.worker.PlanOffloader(taken, lambda: None)
    build_on_meta(seam, config, offloader, tmp_path)
    hold_against(place(hold(model), plan.offload), offloader, plan.offload.rules)


def hold_against(placement: Placement, offloader: Any, rules: tuple[Rule, ...]) -> None:
    """Hold what an offloader took of the layers against what a placement has."""
    found: dict[Backend, int] = dict.fromkeys(BACKENDS.values(), 0)
    taken = offloader._taken
    for layer, module in zip(taken.layers, offloader._layers, strict=True):
        of_module = [each for each in offloader.module_offloaders if each.module is module]
        copied = {name for each in of_module for name in each._param_offloaders}
        read = {n for n, p in module.named_parameters() if hasattr(p, "_vllm_is_uva_offloaded")}
        for backend, names in ((Backend.PREFETCH, copied), (Backend.UVA, read)):
            assert names == {n for n, p in layer.items() if p.backend is backend}
            found[backend] += sum(dict(module.named_parameters())[n].nbytes for n in names)
    # the bytes are those that the placement itself has, by its own names
    expected = dict.fromkeys(BACKENDS.values(), 0)
    for slab in placement.slabs:
        for entry in slab.entries:
            expected[entry.decode] += entry.unit.nbytes
    if any(rule.max_bytes is not None for rule in rules):
        most = max(parameter.nbytes for parameter in taken.of(Backend.UVA))
        found[Backend.UVA] -= (
            more if (more := found[Backend.UVA] - expected[Backend.UVA]) < most else 0
        )
    assert found == expected
    assert all(found[rule.decode] for rule in rules)


def test_what_is_made_of_weights_is_made_of_those_that_moved(seam: Any, tmp_path: Path) -> None:
    """Latent attention makes its own matrices of ``kv_b_proj``, which is then on the GPU."""
    from vllm.model_executor.layers.attention import is_deferred_attention_layer

    plan, model, path = write_plan(tmp_path, "DeepseekV2ForCausalLM", prefetch("kv_b_proj"))
    taken = find_taken(plan, model, (0, 33, 0))
    offloader = seam.worker.PlanOffloader(taken, lambda: None)
    built = build_on_meta(seam, configure(tmp_path, path), offloader, tmp_path)
    attentions = [m for m in built.modules() if is_deferred_attention_layer(m)]
    assert attentions
    assert all("kv_b_proj.weight" in dict(m.named_parameters()) for m in attentions)
    assert offloader.module_offloaders


@pytest.mark.parametrize("ranks", RANKS, ids=lambda ranks: ranks.label)
@pytest.mark.parametrize("rules", [RULES["two backends in one layer"], RULES["in place"]])
@pytest.mark.parametrize(
    "architecture", ["Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "DeepseekV2ForCausalLM"]
)
def test_the_worker_of_a_rank_takes_what_its_share_has(
    seam: Any, architecture: str, rules: tuple[Rule, ...], ranks: Ranks, tmp_path: Path
) -> None:
    """Exactly its own bytes, in each stage, whose patterns start anew."""
    plan, model, path = write_plan(tmp_path, architecture, *rules, ranks=ranks)
    if ranks.expert > 1 and model.experts is None:
        with pytest.raises(ExportError, match="has no routed experts"):
            find_taken(plan, model, (0, 33, 0), ranks)
        return
    config = configure(tmp_path, path, *join_flags(VLLM.divide(ranks)))
    stages = lower(model, plan.goal)
    assert len(stages) == ranks.pipeline
    for number, stage in enumerate(stages):
        offloader = seam.worker.PlanOffloader(seam.worker.take_plan(config, number), lambda: None)
        build_on_meta(seam, config, offloader, tmp_path, number)
        hold_against(place(stage, plan.offload), offloader, rules)


@pytest.mark.parametrize("architecture", ["Qwen3ForCausalLM", "DeepseekV2ForCausalLM"])
def test_each_of_two_ranks_holds_its_share(seam: Any, architecture: str, tmp_path: Path) -> None:
    """Both are built at once, each by a process of its own."""
    rules = prefetch("mlp", group_size=1), uva("self_attn", group_size=1)
    plan, model, _ = write_plan(tmp_path, architecture, *rules, ranks=Ranks(2))
    taken = find_taken(plan, model, (0, 33, 0), Ranks(2))
    whole = find_taken(plan.model_copy(update={"goal": Goal()}), model, (0, 33, 0))
    offloader, alone = (seam.worker.PlanOffloader(t, lambda: None) for t in (taken, whole))
    for layers in real_vllm.record_ranks(tmp_path, 2):
        for index, sizes in enumerate(layers):
            held = {name: SimpleNamespace(nbytes=nbytes) for name, nbytes in sizes.items()}
            assert not [*offloader._find_misfits(index, held)]
            assert next(alone._find_misfits(index, held), None) is not None


@pytest.mark.parametrize(
    ("planned", "started", "message"),
    [
        (
            ONE_RANK,
            Ranks(2),
            r"for one GPU, .*--tp 2: .*\(offplan plan \S+ --for vllm-worker --tp 2 ",
        ),
        (Ranks(2), ONE_RANK, "for --tp 2 of vllm, .* one GPU: .*--tensor-parallel-size 2$"),
        (Ranks(2), Ranks(4), r"for --tp 2 of vllm, .*--tp 4: .*--tensor-parallel-size 2$"),
        (
            Ranks(2),
            Ranks(2, expert=2),
            r"started on --tp 2 --ep 2: .* --for vllm-worker --tp 2 --ep 2 ",
        ),
        (Ranks(2), Ranks(1, 2), "started on --pp 2: "),
    ],
)
def test_ranks_that_the_plan_is_not_for_are_refused(
    seam: Any, planned: Ranks, started: Ranks, message: str, tmp_path: Path
) -> None:
    *_, path = write_plan(tmp_path, "Qwen3MoeForCausalLM", prefetch("mlp"), ranks=planned)
    config = configure(tmp_path, path, *join_flags(VLLM.divide(started)))
    seam.patch.setattr(seam.worker, "get_pp_group", lambda: SimpleNamespace(rank_in_group=0))
    with pytest.raises(ExportError, match=message):
        start(seam, config)


@pytest.mark.parametrize(
    ("parts", "num_slots"), [(("a", "b", "c"), 2), (("a",), 1), (("a", "c"), 3)]
)
def test_what_layers_give_stays_the_same(seam: Any, parts: tuple[str, ...], num_slots: int) -> None:
    """Steps through the real ring, with copies at their earliest and slots that do not divide."""
    layers, reference = make_stack(7), make_stack(7)
    plan = make_plan(
        prefetch(*[f"{part}.weight" for part in parts], group_size=3, num_in_group=2),
        prefetch_step=num_slots,
    )
    verify = run_on_cpu(seam, plan, layers, parts)
    verify()
    for step in range(3):
        inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        one, other = inputs, inputs
        for layer, same in zip(layers, reference, strict=True):
            one, other = layer(one), same(other)
        assert torch.equal(one, other)
    copied = [layers[i].get_parameter(f"{part}.weight") for i in (1, 2, 4, 5) for part in parts]
    assert len({parameter.data_ptr() for parameter in copied}) == num_slots * len(parts)
    verify()


def test_verification_tells_what_moved(seam: Any) -> None:
    plan = make_plan(prefetch("a.weight", group_size=3, num_in_group=2), prefetch_step=2)
    layers = make_stack(7)
    verify = run_on_cpu(seam, plan, layers, ("a",))
    layers[1].a.weight.data = layers[1].a.weight.data.clone()  # type: ignore[operator]
    layers[2].a = torch.nn.Identity()
    del layers[4].a.weight
    with pytest.raises(DriftError) as raised:
        verify()
    assert "a.weight of layer 1 is no longer in the ring, expected copied" in str(raised.value)
    assert "layer 2 has no a.weight" in str(raised.value)
    assert "layer 4 has no a.weight" in str(raised.value)


def test_another_number_of_layers_is_an_error(seam: Any) -> None:
    plan = make_plan(prefetch("a.weight", group_size=3, num_in_group=2))
    with pytest.raises(DriftError, match="was given 6 of 7 layers"):
        run_on_cpu(seam, plan, make_stack(6), ("a",), num_layers=7)()
    with pytest.raises(DriftError, match="builds more layers than the plan's 7"):
        run_on_cpu(seam, plan, make_stack(8), ("a",), num_layers=7)


def test_where_what_is_read_in_place_lies(seam: Any) -> None:
    """Loading may put it back on the GPU in silence, where torch then has allocated it."""
    parameter = torch.nn.Parameter(torch.empty(4, device="meta"))
    find = seam.worker.find_place
    assert find(parameter, None, []) == "on meta"
    parameter._vllm_is_uva_offloaded = True  # type: ignore[attr-defined]
    assert find(parameter, None, [range(16, 32)]) == "read in place"
    assert find(parameter, None, [range(32)]) == "resident"


def test_the_embedding_is_read_in_place(seam: Any, tmp_path: Path) -> None:
    plan, model, path = write_plan(tmp_path, "Qwen3ForCausalLM", embeddings="host")
    taken = find_taken(plan, model, (0, 33, 0))
    offloader = seam.worker.PlanOffloader(taken, lambda: built)  # type: ignore[has-type]
    with offloader.moving_embedding():
        built = build_on_meta(seam, configure(tmp_path, path), offloader, tmp_path)
    early = {n for n, p in built.named_parameters() if hasattr(p, "_vllm_is_uva_offloaded")}
    assert early == {"model.embed_tokens.weight"}, "loading would take more than the plan has"
    offloader.post_init()
    moved = {n for n, p in built.named_parameters() if hasattr(p, "_vllm_is_uva_offloaded")}
    assert moved == {"model.embed_tokens.weight"}
    built.lm_head = built.lm_head.tie_weights(built.model.embed_tokens)
    with pytest.raises(ExportError, match="vLLM has tied lm_head to the input embedding"):
        offloader.post_init()


@pytest.mark.parametrize("ranks", [Ranks(2), Ranks(2, 2)], ids=lambda ranks: ranks.label)
def test_the_rows_of_a_rank_are_read_in_place(seam: Any, ranks: Ranks, tmp_path: Path) -> None:
    """In the first stage, which alone embeds tokens; an odd vocabulary is padded."""
    path = real_vllm.write_config(tmp_path, "Qwen3ForCausalLM")
    path.write_text(json.dumps({**json.loads(path.read_text()), "vocab_size": 100}))
    *_, path = write_plan_of(path, ranks=ranks, embeddings="host")
    config = configure(tmp_path, path, *join_flags(VLLM.divide(ranks)))
    for stage in range(ranks.pipeline):
        taken = seam.worker.take_plan(config, stage)
        offloader = seam.worker.PlanOffloader(taken, lambda: built)  # type: ignore[has-type]  # noqa: B023
        built = build_on_meta(seam, config, offloader, tmp_path, stage)
        offloader.post_init()
        moved = {n for n, p in built.named_parameters() if hasattr(p, "_vllm_is_uva_offloaded")}
        assert moved == ({"model.embed_tokens.weight"} if stage == 0 else set())
        assert (taken.embedding is not None) == (stage == 0)
        if taken.embedding is not None:
            assert taken.embedding.shape[0] == 64


class Block(torch.nn.Module):
    """A layer of three products."""

    def __init__(self) -> None:
        super().__init__()
        for name in "abc":
            setattr(self, name, torch.nn.Linear(8, 8, bias=False))

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return self.c(torch.relu(self.b(self.a(hidden_states))))  # type: ignore[operator]


def make_stack(num_layers: int) -> torch.nn.ModuleList:
    torch.manual_seed(0)
    return torch.nn.ModuleList(Block() for _ in range(num_layers)).requires_grad_(False)


def run_on_cpu(
    seam: Any, plan: Plan, layers: torch.nn.ModuleList, parts: tuple[str, ...], num_layers: int = 0
) -> Callable[[], None]:
    """Set an offloader for layers on the CPU, which plays the GPU; return what verifies it."""
    from vllm.model_executor.offloader import set_offloader

    from offplan.engines.taken import Taken, TakenParameter

    class OnOneDevice(seam.prefetch._ModuleOffloader):  # type: ignore[misc, name-defined]
        device = property(lambda self: "cpu", lambda self, device: None)

    chosen = {f"{part}.weight": TakenParameter(Backend.PREFETCH, 8 * 8 * 4) for part in parts}
    rule, num_layers = plan.offload.rules[0], num_layers or len(layers)
    taken = Taken(
        layers=tuple(chosen if rule.selects_layer(i) else {} for i in range(num_layers)),
        num_slots=plan.offload.prefetch_step,
        ring_bytes=plan.offload.prefetch_step * len(parts) * 8 * 8 * 4,
        embedding=None,
    )
    seam.patch.setattr(seam.prefetch, "_ModuleOffloader", OnOneDevice)
    seam.patch.setattr(torch.Tensor, "is_pinned", lambda tensor: True)
    seam.patch.setattr(
        torch.cuda, "memory_snapshot", lambda: [{"address": 0, "total_size": 2**63}], raising=False
    )
    offloader = seam.worker.PlanOffloader(taken, lambda: None)
    set_offloader(offloader)
    offloader.wrap_modules(iter(layers))
    offloader.post_init()
    return offloader.verify


def start(seam: Any, config: Any, load: Callable[[], None] = lambda: None) -> Any:
    """Have a worker load its model, by ``load`` where vLLM's runner would."""
    worker = seam.worker.Worker.__new__(seam.worker.Worker)
    worker.vllm_config = config
    worker.model_runner = SimpleNamespace(
        load_model=lambda **_: load(), get_model=lambda: torch.nn.Module()
    )
    seam.patch.setattr(torch.cuda, "memory_snapshot", lambda: [])
    worker.load_model()
    return worker


def test_a_plan_without_effect_is_an_error(seam: Any, tmp_path: Path) -> None:
    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM", prefetch("mlp"))
    with pytest.raises(DriftError, match="was given 0 of 5 layers"):
        start(seam, configure(tmp_path, path))


def test_the_offloader_is_set_before_the_model_is_built(seam: Any, tmp_path: Path) -> None:
    from vllm.model_executor.offloader import get_offloader

    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM", uva("mlp"))
    config = configure(tmp_path, path)
    unlike = config.compute_hash()
    found: list[Any] = []
    with pytest.raises(DriftError):
        start(seam, config, lambda: found.append(get_offloader()))
    assert isinstance(found[0], seam.worker.PlanOffloader)
    assert config.compute_hash() != unlike, "layers compiled for another plan are not found again"


def test_the_worker_starts_only_where_loading_left_what_it_moved(seam: Any, tmp_path: Path) -> None:
    from vllm.model_executor.offloader import get_offloader

    def load() -> None:
        build_on_meta(seam, config, get_offloader(), tmp_path)
        seam.patch.setattr(torch.cuda, "memory_snapshot", lambda: [AT_NOTHING])

    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM")
    config = configure(tmp_path, path)
    start(seam, config, load)
    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM", uva("o_proj"))
    config = configure(tmp_path, path)
    with pytest.raises(DriftError, match="layer 0 is resident, expected read in place"):
        start(seam, config, load)


def test_what_compiling_took_goes_back_before_the_cache_is_made(seam: Any) -> None:
    done = []

    def compile_and_run(_: object) -> int:
        done.append("compiled")
        return 5

    seam.patch.setattr(seam.worker.GPUWorker, "determine_available_memory", compile_and_run)
    seam.patch.setattr(torch.cuda, "empty_cache", lambda: done.append("given back"))
    worker = seam.worker.Worker.__new__(seam.worker.Worker)
    assert worker.determine_available_memory() == 5
    assert done == ["compiled", "given back"]


def test_the_worker_is_found_by_its_name(seam: Any, tmp_path: Path) -> None:
    from vllm.utils.import_utils import resolve_obj_by_qualname

    config = configure(tmp_path, write_plan(tmp_path, "Qwen3ForCausalLM")[2])
    assert resolve_obj_by_qualname("offplan.vllm.Worker") is seam.worker.Worker
    assert config.additional_config.keys() == {"offplan"}


def change(name: str, value: object) -> Callable[[Any], None]:
    """Return what sets a dotted attribute of vLLM's config."""
    *parents, last = name.split(".")

    def apply(config: Any) -> None:
        for parent in parents:
            config = getattr(config, parent)
        object.__setattr__(config, last, value)

    return apply


REFUSED = {
    "EPLB": change("parallel_config.enable_eplb", True),
    "data or context parallelism": change("parallel_config.data_parallel_size", 2),
    "or context parallelism": change("parallel_config.decode_context_parallel_size", 2),
    "DBO": change("parallel_config.enable_dbo", True),
    "speculative decoding": change("speculative_config", SimpleNamespace()),
    "LoRA": change("lora_config", SimpleNamespace()),
    "sleep mode": change("model_config.enable_sleep_mode", True),
    "weight transfer": change("weight_transfer_config", SimpleNamespace()),
    "quantisation while loading": change("model_config.quantization", "fp8"),
    "vLLM's own flags": change("offload_config.uva.cpu_offload_gb", 1.0),
    "--dtype float16, expected bfloat16": change("model_config.dtype", torch.float16),
}


@pytest.mark.parametrize(("message", "apply"), REFUSED.items(), ids=REFUSED)
def test_refused(seam: Any, message: str, apply: Callable[[Any], None], tmp_path: Path) -> None:
    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM", prefetch("mlp"))
    config = configure(tmp_path, path)
    apply(config)
    with pytest.raises(ExportError, match=message):
        start(seam, config)


@pytest.mark.parametrize(
    ("mode", "rule", "phases"),
    [
        ("FULL_AND_PIECEWISE", prefetch("mlp"), "prefill"),
        ("PIECEWISE", prefetch("mlp"), "decode and prefill"),
        ("FULL_DECODE_ONLY", prefetch("mlp"), None),
        ("NONE", prefetch("mlp"), None),
        ("PIECEWISE", uva("mlp"), None),
    ],
)
def test_phases_that_a_mode_cannot_serve(
    seam: Any, mode: str, rule: Rule, phases: str | None, tmp_path: Path
) -> None:
    from vllm.config import CUDAGraphMode

    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM", rule)
    config = configure(tmp_path, path)
    config.compilation_config.cudagraph_mode = CUDAGraphMode[mode]
    if phases is None:
        seam.worker.take_plan(config)
        return
    with pytest.raises(ExportError, match=f"would capture {phases} in pieces"):
        seam.worker.take_plan(config)


def test_experts_in_place_need_kernels_that_read_them_once(seam: Any, tmp_path: Path) -> None:
    *_, path = write_plan(tmp_path, "Qwen3MoeForCausalLM", uva("experts"))
    with pytest.raises(ExportError, match="--moe-backend auto, expected triton"):
        seam.worker.take_plan(configure(tmp_path, path))
    taken = seam.worker.take_plan(configure(tmp_path, path, "--moe-backend", "triton"))
    assert taken.reads_experts


def test_what_is_no_plan_of_this_model_is_refused(seam: Any, tmp_path: Path) -> None:
    plan, _, path = write_plan(tmp_path, "Qwen3ForCausalLM", prefetch("mlp"))
    with pytest.raises(ExportError, match="was given none: expected --additional-config"):
        start(seam, configure(tmp_path, None))
    other = plan.model.model_copy(update={"headers_sha256": "1" * 64})
    path.write_text(dump_plan(plan.model_copy(update={"model": other})))
    with pytest.raises(DriftError, match="the plan was made for headers 111111111111"):
        start(seam, configure(tmp_path, path))


def test_versions_that_were_not_tried_are_refused(seam: Any, tmp_path: Path) -> None:
    *_, path = write_plan(tmp_path, "Qwen3ForCausalLM", prefetch("mlp"))
    config = configure(tmp_path, path)
    seam.patch.setattr(seam.worker, "vllm_version", "0.34.0+cu130")
    with pytest.raises(ExportError, match=r"found vLLM 0\.34\.0\+cu130, expected .*0\.33\.0"):
        start(seam, config)
    seam.patch.setattr(seam.worker, "vllm_version", "0.33.0+cu130")
    with pytest.raises(OffplanError, match="was given 0"):
        start(seam, config)


def test_vllm_reads_the_command_that_the_docs_have(seam: Any, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "docs" / "engines.md").read_text()
    command = text.partition("vllm serve MODEL ")[2].partition("```")[0].replace("\\\n", " ")
    real_vllm.write_config(tmp_path, "Qwen3ForCausalLM")
    config = real_vllm.parse_command(["serve", str(tmp_path), *shlex.split(command)])
    assert config.parallel_config.worker_cls == "offplan.vllm.Worker"
    assert config.additional_config == {"offplan": "plan.yaml"}
    assert f"vLLM {', '.join(WORKER_VERSIONS)}'s classes on the CPU" in text


def test_vllm_reads_the_command_that_is_exported(seam: Any, tmp_path: Path) -> None:
    plan, model, path = write_plan(tmp_path, "Qwen3ForCausalLM", prefetch("mlp"), uva("o_proj"))
    short = plan.workload.model_copy(update={"context": 64, "prompt_tokens": 32})
    plan = plan.model_copy(update={"workload": short})
    export = export_plan(plan, model, "vllm-worker", file=path)
    config = real_vllm.parse_command([*export.command[1:], "--load-format", "dummy"])
    assert config.parallel_config.worker_cls == "offplan.vllm.Worker"
    taken = seam.worker.take_plan(config)
    assert taken == find_taken(plan, model, (0, 33, 0))
    file = tmp_path / "serve.yaml"
    file.write_text(render_export(export, "yaml"))
    assert real_vllm.parse_command(["serve", "--config", str(file)]).additional_config == {
        "offplan": str(path)
    }


def test_the_versions_are_those_of_the_extra(seam: Any) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert all(f'vllm = ["vllm=={version}"]' in text for version in WORKER_VERSIONS)
