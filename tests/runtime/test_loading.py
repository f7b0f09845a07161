"""Every stored tensor reaches its place, whole and as it is stored; what cannot is an error."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config
from transformers.core_model_loading import Chunk, Transpose, WeightConverter

from offplan import transformers_private
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError, PlanError
from offplan.held.held import hold
from offplan.placement import Phase, Placement, Span
from offplan.plan import Rule
from offplan.progress import Progress
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading import loader, staging
from offplan.runtime.loading.checks import map_tensors, verify_places
from offplan.runtime.loading.fill import Target
from offplan.runtime.loading.loaded import LoadedModel, assign
from offplan.runtime.loading.prepared import find_offloaded, prepare
from offplan.runtime.loading.skeleton import build_skeleton
from offplan.runtime.memory import store
from offplan.schedule import slots_read
from tests.checkpoint.files import write_sparse
from tests.held import place
from tests.runtime.conftest import CONFIGS, HEADS, NUM_LAYERS, OTHERS, SIZES, save_tiny
from tests.runtime.plans import group, offload, open_session
from tests.tiers import each_value_once, first_quick

RULES: dict[str, tuple[Rule, ...]] = {
    "nothing": (),
    "every layer": (group(1, 1),),
    "every second layer": (group(2, 1),),
    "attention, and mlp in place": (
        group(1, 1, "self_attn"),
        group(2, 1, "mlp", prefill="prefetch", decode="uva"),
    ),
}


def load(folder: Path, *rules: Rule, on_progress: Progress | None = None) -> LoadedModel:
    device = torch.device("cpu")
    prepared = prepare(open_model(str(folder)), offload(*rules), device, EXECUTORS)
    return LoadedModel(prepared, folder, on_progress)


def loaded_values(loaded: LoadedModel) -> Mapping[str, torch.Tensor]:
    return loaded.store.resident | loaded.store.offloaded


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "rules"),
    each_value_once(product(sorted(CONFIGS), RULES.values())),
    indirect=["checkpoint"],
)
def test_values_equal_what_safetensors_reads(checkpoint: Path, rules: tuple[Rule, ...]) -> None:
    loaded = load(checkpoint, *rules)
    values = loaded_values(loaded)
    model = loaded.model
    num_read = 0
    for name, target in map_tensors(build_skeleton(model), hold(model)).items():
        for piece in target.pieces:
            with safe_open(checkpoint / str(piece.tensor.shard), framework="pt") as file:
                stored = file.get_tensor(piece.tensor.name)
            assert torch.equal(piece.select(values[name]), stored), piece.tensor.name
            num_read += stored.nbytes
    assert num_read == hold(model).loaded_bytes == sum(value.nbytes for value in values.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "extent_bytes"),
    each_value_once(product(sorted(CONFIGS), [16, 100, 2**20])),
    indirect=["checkpoint"],
)
def test_values_equal_what_transformers_loads(
    checkpoint: Path, extent_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(staging, "EXTENT_BYTES", extent_bytes)
    stock = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).state_dict()
    values = loaded_values(load(checkpoint, *RULES["every second layer"]))
    assert stock.keys() - values.keys() <= {"lm_head.weight"}
    assert all(torch.equal(stock[name], value) for name, value in values.items())


@pytest.mark.slow
def test_resident_weights_are_converted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "EXTENT_BYTES", 100)
    folder = save_tiny("qwen3", tmp_path)
    name = "model.layers.0.mlp.up_proj.weight"
    path = next(p for p in folder.glob("*.safetensors") if name in load_file(p))
    tensors = load_file(path)
    tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, path, {"format": "pt"})
    values = loaded_values(load(folder))
    assert values[name].dtype == torch.float32
    assert torch.equal(values[name], tensors[name].float())
    kept = load(folder, group(1, 1, "up_proj")).store
    assert len(kept.offloaded) == NUM_LAYERS - 1
    assert torch.equal(kept.resident[name], tensors[name].float())


def test_extents_of_a_strided_view(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staging, "EXTENT_BYTES", 24)
    whole = torch.arange(60.0).view(2, 3, 10)
    for view in (whole, whole[:, :, :4], whole[:, 1:], whole[1, 2, 3], whole.transpose(1, 2)):
        tensor = staging.TensorInfo("t", "F32", tuple(view.shape), "shard", 8)
        extents = staging.split_extents(tensor, view)
        assert torch.equal(
            torch.cat([extent.view.reshape(-1) for extent in extents]), view.reshape(-1)
        )
        starts = [0]
        for extent in extents:
            starts.append(starts[-1] + extent.nbytes)
            assert extent.nbytes <= 24
        assert starts[:-1] == [extent.start for extent in extents]
        assert starts[-1] == tensor.nbytes


@pytest.mark.slow
def test_other_conversions_are_transformers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked as HRM stores its projections, and transposed as Qwen3-VL stores its experts."""
    mapping = [
        WeightConverter(
            source_patterns="mlp.gate_up_proj.weight",
            target_patterns=["mlp.gate_proj.weight", "mlp.up_proj.weight"],
            operations=[Chunk(dim=0)],
        ),
        WeightConverter("mlp.down_proj_t.weight", "mlp.down_proj.weight", [Transpose(0, 1)]),
    ]
    folder = save_tiny("qwen3", tmp_path)
    expected = loaded_values(load(folder))
    monkeypatch.setattr(transformers_private, "get_model_conversion_mapping", lambda _: mapping)
    stored = {name: value.clone() for name, value in expected.items()}
    for layer in range(NUM_LAYERS):
        mlp = f"model.layers.{layer}.mlp"
        halves = [stored.pop(f"{mlp}.{part}_proj.weight") for part in ("gate", "up")]
        stored[f"{mlp}.gate_up_proj.weight"] = torch.cat(halves)
        down = stored.pop(f"{mlp}.down_proj.weight")
        stored[f"{mlp}.down_proj_t.weight"] = down.T.contiguous()
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})

    loaded = load(folder, group(2, 1, "self_attn", "down_proj_t"))
    values = loaded_values(loaded)
    assert values.keys() == expected.keys()
    assert all(torch.equal(expected[name], value) for name, value in values.items())
    assert "model.layers.1.mlp.down_proj.weight" in loaded.store.offloaded
    with pytest.raises(PlanError, match="is split or changes type"):
        load(folder, group(2, 1, "gate_up_proj"))


def test_progress_ends_at_the_whole(checkpoint: Path) -> None:
    heard: list[tuple[int, int]] = []
    loaded = load(checkpoint, on_progress=lambda done, total: heard.append((done, total)))
    total = hold(loaded.model).loaded_bytes
    assert heard[-1] == (total, total)
    assert heard == sorted(heard)


def damage(folder: Path, change: Callable[[Path], None]) -> None:
    """Load after a shard was changed behind the model's back."""
    model = open_model(str(folder))
    path = sorted(folder.glob("*.safetensors"))[-1]
    change(path)
    with pytest.raises(CheckpointError) as caught:
        LoadedModel(prepare(model, offload(group(2, 1)), torch.device("cpu"), EXECUTORS), folder)
    assert str(path) in str(caught.value)
    assert "found" in str(caught.value)
    assert "expected" in str(caught.value)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


def cut_header(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5])


def rename(path: Path) -> None:
    save_file({f"x{n}": t for n, t in load_file(path).items()}, path, {"format": "pt"})


def move(path: Path) -> None:
    save_file(load_file(path), path, {"format": "pt", "note": "a longer header"})


def retype(path: Path) -> None:
    save_file({n: t.bfloat16() for n, t in load_file(path).items()}, path, {"format": "pt"})


@pytest.mark.parametrize("change", first_quick([cut, cut_header, rename, move, retype]))
def test_a_changed_shard_is_an_error(change: Callable[[Path], None], tmp_path: Path) -> None:
    damage(save_tiny("qwen3_moe_tied", tmp_path), change)


def test_experts_of_another_number_are_an_error(tmp_path: Path) -> None:
    folder = save_tiny("qwen3_moe_tied", tmp_path)
    config = copy.deepcopy(CONFIGS["qwen3_moe_tied"])
    for config.num_experts in (2, 8):
        (folder / "config.json").write_text(config.to_json_string())
        with pytest.raises(CheckpointError, match=r"experts.*_proj: found \d+ .* expected \d+"):
            load(folder)


def test_a_missing_shard_is_an_error(tmp_path: Path) -> None:
    folder = save_tiny("qwen3", tmp_path)
    model = open_model(str(folder))
    path = sorted(folder.glob("*.safetensors"))[-1]
    path.unlink()
    with pytest.raises(CheckpointError, match=path.name):
        LoadedModel(prepare(model, offload(), torch.device("cpu"), EXECUTORS), folder)


def test_a_shard_cut_while_it_is_read_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_tiny("qwen3", tmp_path)
    path = sorted(folder.glob("*.safetensors"))[-1]
    own = loader._reading
    monkeypatch.setattr(loader, "_reading", lambda *opened: cut(path) or own(*opened))
    with pytest.raises(CheckpointError, match=r"the file ends at byte \d+, expected .* up to byte"):
        load(folder)


def test_layers_in_another_order_are_refused(checkpoint: Path) -> None:
    model = open_model(str(checkpoint))
    turned = replace(model, layers=tuple(reversed(model.layers)))
    with pytest.raises(CheckpointError, match=r"is not of the layer that \S+ is stored for"):
        map_tensors(build_skeleton(turned), hold(turned))


def test_what_is_not_loaded_as_it_is_placed_is_refused(checkpoint: Path) -> None:
    model = open_model(str(checkpoint))
    skeleton, decision = build_skeleton(model), offload(group(1, 1, "o_proj"))
    placement, wanted = place(model, decision), skeleton.state_dict()
    targets = map_tensors(skeleton, hold(model))
    name = next(name for name in targets if name.endswith("o_proj.weight"))
    other = next(name for name in targets if name.endswith("input_layernorm.weight"))
    assert name in find_offloaded(skeleton, placement, targets, wanted)
    joined = Target(targets[name].pieces + targets[other].pieces)
    with pytest.raises(PlanError, match=r"loaded together with other parameters .*o_proj"):
        find_offloaded(skeleton, placement, targets | {name: joined}, wanted)
    with pytest.raises(PlanError, match=r"layer \d: .* is stored in .* and used in"):
        find_offloaded(skeleton, placement, targets, wanted | {name: wanted[name].double()})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "rules"),
    each_value_once(product(sorted(CONFIGS), list(RULES.values())[1:])),
    indirect=["checkpoint"],
)
def test_a_parameter_elsewhere_is_noticed(checkpoint: Path, rules: tuple[Rule, ...]) -> None:
    loaded = load(checkpoint, *rules)
    targets = map_tensors(build_skeleton(loaded.model), hold(loaded.model))

    def verify() -> None:
        for phase in Phase:
            loaded.enter_phase(phase)
            verify_places(loaded.module, phase, targets, loaded.store)

    verify()
    for name, value in [*loaded_values(loaded).items()]:
        by_phase = loaded.store.by_phase[Phase.DECODE]
        kept = by_phase.get(name)
        moved = torch.nn.Parameter(value.clone(), requires_grad=False)
        if kept is None:
            assign(loaded._places, {name: moved})
        else:
            by_phase[name] = moved
        with pytest.raises(PlanError, match=name):
            verify()
        if kept is None:
            assign(loaded._places, {name: loaded.store.resident[name]})
        else:
            by_phase[name] = kept
    verify()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("checkpoint", "rules"),
    each_value_once(product(sorted(CONFIGS), list(RULES.values())[1:])),
    indirect=["checkpoint"],
)
def test_a_store_that_reads_other_slots_than_the_schedule_fills_is_noticed(
    checkpoint: Path, rules: tuple[Rule, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def turned(placement: Placement, phase: Phase) -> dict[int, tuple[int, Span]]:
        slots = slots_read(placement, phase)
        return {layer: (1 - slot, span) for layer, (slot, span) in slots.items()}

    wrong: Callable[[Placement, Phase], dict[int, tuple[int, Span]]]
    for wrong in (turned, lambda *_: {}):
        monkeypatch.setattr(store, "slots_read", wrong)
        with pytest.raises(PlanError, match=r"expected .* \(slot"):
            load(checkpoint, *rules)


MEASURE_PEAK = """
import sys
from pathlib import Path

import torch

from offplan.checkpoint.open import open_model
from offplan.held.held import hold
from offplan.plan import Offload, Rule
from offplan.runtime.executors import EXECUTORS
from offplan.runtime.loading.loaded import LoadedModel
from offplan.runtime.loading.prepared import prepare
from offplan.runtime.loading.checks import map_tensors
from offplan.runtime.loading.skeleton import build_skeleton

def memory(key):
    return int(Path("/proc/self/status").read_text().split(key)[1].split()[0]) * 1024

model = open_model(sys.argv[1])
map_tensors(build_skeleton(model), hold(model))  # imports what loading will import
before = memory("VmRSS:")
rule = Rule(group_size=1, num_in_group=1, prefill="uva", decode="uva")
decision = Offload(prefetch_step=1, prefill_chunk=64, rules=(rule,))
loaded = LoadedModel(prepare(model, decision, torch.device("cpu"), EXECUTORS), Path(sys.argv[1]))
offloaded = sum(view.nbytes for view in loaded.store.offloaded.values())
print(memory("VmHWM:") - before, offloaded, loaded.store.arena.nbytes)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the peak from /proc")
def test_host_memory_peaks_near_the_weights(tmp_path: Path) -> None:
    num_layers, hidden, intermediate, num_experts = 2, 1024, 1024, 16
    config = copy.deepcopy(CONFIGS["qwen3_moe_tied"])
    config.num_hidden_layers, config.hidden_size = num_layers, hidden
    config.num_experts, config.moe_intermediate_size = num_experts, intermediate
    config.dtype = "bfloat16"
    shapes = {"model.embed_tokens.weight": (64, hidden), "model.norm.weight": (hidden,)}
    for layer in range(num_layers):
        prefix = f"model.layers.{layer}"
        for name, shape in {
            "input_layernorm": (hidden,),
            "post_attention_layernorm": (hidden,),
            "self_attn.q_proj": (32, hidden),
            "self_attn.k_proj": (16, hidden),
            "self_attn.v_proj": (16, hidden),
            "self_attn.o_proj": (hidden, 32),
            "self_attn.q_norm": (8,),
            "self_attn.k_norm": (8,),
            "mlp.gate": (num_experts, hidden),
        }.items():
            shapes[f"{prefix}.{name}.weight"] = shape
        for expert in range(num_experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shapes[f"{prefix}.mlp.experts.{expert}.{part}.weight"] = (intermediate, hidden)
    (tmp_path / "config.json").write_text(config.to_json_string())
    write_sparse(
        tmp_path / "model.safetensors", {name: ("BF16", shape) for name, shape in shapes.items()}
    )
    command = [sys.executable, "-c", MEASURE_PEAK, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    peak, offloaded, resident = map(int, done.stdout.split())
    assert offloaded > 200e6
    # on the CPU, what is resident is host memory too
    assert peak < 1.1 * offloaded + resident + 100e6


@pytest.mark.slow
@pytest.mark.parametrize("stored", first_quick([torch.float32, torch.bfloat16]))
def test_what_stays_in_float32(tmp_path: Path, stored: torch.dtype) -> None:
    """Router biases near 8 would lose what tells experts apart if they were rounded to bfloat16."""
    torch.manual_seed(0)
    stock = AutoModelForCausalLM.from_config(OTHERS["deepseek_v3"], dtype=torch.bfloat16)
    biases = {}
    for name, buffer in stock.named_buffers():
        if name.endswith("e_score_correction_bias"):
            biases[name] = (8 + torch.rand(buffer.shape)).to(stored)
            buffer.data = biases[name]
    stock.save_pretrained(tmp_path)
    with open_session(tmp_path, offload()) as session:
        values = dict(session.loaded.module.named_buffers())
        for name, bias in biases.items():
            torch.testing.assert_close(values[name], bias.float(), rtol=0, atol=0)
    with open_session(tmp_path, offload(group(1, 1))) as session:
        session.prefill(torch.tensor([[3, 1, 4]]))
        placement, model = session.loaded.placement, session.loaded.model
        widened = sum(bias.nbytes for bias in biases.values()) * (stored is torch.bfloat16)
        assert placement.resident_bytes == hold(model).outside_bytes + 2 * widened


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "end"),
    each_value_once(
        product(
            [torch.float32, torch.bfloat16],
            ["1.mlp.up_proj.weight", "experts.2.up_proj.weight", "norm.weight"],
        )
    ),
)
def test_what_is_stored_in_another_type_stays_on_the_device(
    tmp_path: Path, dtype: torch.dtype, end: str
) -> None:
    """Its bytes are not those that a slab would hold, nor are those of what it is fused with."""
    save_tiny("qwen3_moe_tied" if "experts" in end else "qwen3", tmp_path)
    other = torch.bfloat16 if dtype is torch.float32 else torch.float32
    for path in tmp_path.glob("*.safetensors"):
        kept = {n: t.to(other if n.endswith(end) else dtype) for n, t in load_file(path).items()}
        save_file(kept, path, {"format": "pt"})
    model = open_model(str(tmp_path))
    assert model.dtype == str(dtype).removeprefix("torch.")
    prompt = torch.tensor([[3, 1, 4]])
    with open_session(tmp_path, offload()) as session:
        expected = session.prefill(prompt).clone()
        held = {id(v): v.nbytes for v in session.loaded.module.state_dict(keep_vars=True).values()}
        assert hold(model).loaded_bytes == sum(held.values())
    with open_session(tmp_path, offload(group(1, 1))) as session:
        assert session.loaded.store.offloaded
        assert torch.equal(session.prefill(prompt), expected)


def test_an_embedding_stored_in_another_type_is_not_read_by_row(tmp_path: Path) -> None:
    save_tiny("qwen3", tmp_path)
    for path in tmp_path.glob("*.safetensors"):
        kept = {n: t if "embed" in n else t.bfloat16() for n, t in load_file(path).items()}
        save_file(kept, path, {"format": "pt"})
    with pytest.raises(PlanError, match="changes its type when it is loaded"):
        place(open_model(str(tmp_path)), offload(embeddings="host"))


def test_a_stored_head_that_the_config_ties_is_used(tmp_path: Path) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(**SIZES, **HEADS, tie_word_embeddings=False)
    untied = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    untied.save_pretrained(tmp_path)
    told = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(told | {"tie_word_embeddings": True}))
    prompt = torch.tensor([[3, 1, 4, 1, 5]])
    with open_session(tmp_path, offload(group(2, 1))) as session:
        got = session.prefill(prompt).clone()
    with torch.inference_mode():
        expected = untied.eval()(input_ids=prompt).logits[:, -1]
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
