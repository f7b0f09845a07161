"""Weights that a plan holds packed give the very bits that they give as they are stored."""

import json
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    DeepseekV2Config,
    Gemma3TextConfig,
    PreTrainedConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

import offplan.forms.host_kernels
import offplan.runtime.forms.packing
import offplan.runtime.loading.packed
import offplan.runtime.loading.staging
from offplan.capabilities.packing import Packing, Unpacked
from offplan.checkpoint.open import open_model
from offplan.errors import PlanError, UnpackableError
from offplan.forms.form import Component
from offplan.held.held import hold
from offplan.held.packing import exclude_from_packing, name_weights, pack_everything
from offplan.placement import Phase
from offplan.plan import Offload
from offplan.runtime.forms.stored import StoredEmbedding, StoredLinear
from offplan.runtime.model.kernels import ExpertKernels
from tests.held import is_packed, place
from tests.runtime.conftest import LATENTS
from tests.runtime.families import draw_weights, make_config
from tests.runtime.plans import group, load, offload, open_session, run_greedily
from tests.tiers import each_value_once

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "vocab_size": 64,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
HEADS: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
CONFIGS: dict[str, PreTrainedConfig] = {
    "qwen3": Qwen3Config(**SIZES, **HEADS),
    "qwen3_moe": Qwen3MoeConfig(**SIZES, **HEADS, **EXPERTS),
    "deepseek_v2": DeepseekV2Config(
        **SIZES, **LATENTS | {"moe_intermediate_size": 64}, q_lora_rank=None, head_dim=8
    ),
}
TIED: dict[str, PreTrainedConfig] = {
    "gemma3_text": Gemma3TextConfig(
        **SIZES | {"tie_word_embeddings": True},
        **HEADS,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
    ),
    "qwen3_tied": Qwen3Config(**SIZES | {"tie_word_embeddings": True}, **HEADS),
}
PROMPT = torch.tensor([[3, 14, 15, 9, 26, 5, 35, 8, 9, 7, 11, 23, 45, 4]])
LAYERS = Packing(group_size=1, num_in_group=1)
WITH_HEAD = Packing(group_size=1, num_in_group=1, output_head=True)
EVERY_SECOND = Packing(group_size=2, num_in_group=1)
FAMILIES = """
afmoe cohere2 ernie4_5_moe gemma2 gemma3n_text gemma4_text glm4_moe granite_swa llama
mimo_v2_flash minimax_m2 mixtral olmo3 olmo_hybrid olmoe phi3 phimoe qwen2_moe qwen3_5_moe_text
qwen3_next stablelm
"""
"""Families whose layers are built in as many ways as there are."""


def save(name: str, folder: Path) -> Path:
    """Save a tiny checkpoint in bfloat16, with escapes and zeros in all its matrices."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config((CONFIGS | TIED)[name], dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.3)
                flat = parameter.view(-1)
                flat[5::701] *= 1e-9
                flat[6::701] = -0.0
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(request.param, tmp_path_factory.mktemp(request.param))


def packed(*rules: Any, packing: Packing = LAYERS, **options: Any) -> Offload:
    return offload(*rules, **options).model_copy(update={"packing": packing})


@pytest.mark.slow
@pytest.mark.parametrize(
    "decision",
    [
        packed(),
        packed(group(2, 1)),
        packed(group(1, 1, "self_attn"), group(2, 1, "mlp", decode="uva"), prefill_chunk=5),
        packed(packing=LAYERS.model_copy(update={"output_head": True}), embeddings="host"),
    ],
    ids=["resident", "every second layer", "in place", "head"],
)
def test_logits_are_those_of_the_values(folder: Path, decision: Offload) -> None:
    plain = decision.model_copy(update={"packing": None})
    for ours, theirs in zip(
        run_greedily(folder, decision, PROMPT, late_copies=True),
        run_greedily(folder, plain, PROMPT),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.slow
def test_some_layers_of_a_dense_model_are_packed(tmp_path: Path) -> None:
    folder = save("qwen3", tmp_path)
    for packing in (
        EVERY_SECOND,
        Packing(group_size=1, num_in_group=1, cpu_offload_params=("mlp",)),
    ):
        decision = packed(group(1, 1), packing=packing)
        ours = run_greedily(folder, decision, PROMPT)
        theirs = run_greedily(folder, offload(group(1, 1)), PROMPT)
        assert all(map(torch.equal, ours, theirs))


LEFT = [
    ("1",),
    ("1.mlp.experts", "2.self_attn"),
    ("mlp.experts.down_proj",),
    ("2.self_attn.o_proj",),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "names"), each_value_once(product(["qwen3_moe", "deepseek_v2"], LEFT))
)
def test_weights_are_left_unpacked(tmp_path: Path, name: str, names: tuple[str, ...]) -> None:
    """Experts of some layers, all weights of a layer, one matrix: the others are packed."""
    folder = save(name, tmp_path)
    packing = LAYERS.model_copy(update={"leave_unpacked": names})
    model = open_model(str(folder))
    unpacked = Unpacked(names)
    whole, held = hold(model, LAYERS), hold(model, packing)
    assert whole.loaded_bytes != held.loaded_bytes != hold(model).loaded_bytes
    for before, after in zip(whole.layers, held.layers, strict=True):
        left = {p.name for p in before.parameters if unpacked.takes(before.index, p.name)}
        if any("experts.down" in each and "shared" not in each for each in left):
            left |= {p.name for p in before.parameters if p.is_expert}
        for one, other in zip(before.parameters, after.parameters, strict=True):
            assert is_packed(other) == (is_packed(one) and one.name not in left)
    decision = packed(group(2, 1, decode="uva"), packing=packing)
    ours = run_greedily(folder, decision, PROMPT, late_copies=True)
    theirs = run_greedily(folder, offload(group(2, 1, decode="uva")), PROMPT)
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.slow
def test_experts_of_an_unpacked_layer_are_compiled_whole(tmp_path: Path) -> None:
    """A captured step must not fall out of the graph where a layer's experts are multiplied."""
    folder = save("qwen3_moe", tmp_path)
    packing = LAYERS.model_copy(update={"leave_unpacked": ("1",)})
    with open_session(folder, packed(packing=packing)) as session, torch.inference_mode():
        experts = session.loaded.module.get_decoder().layers[1].mlp.experts
        for num_tokens, phase in ((1, Phase.DECODE), (14, Phase.PREFILL)):
            ExpertKernels(
                session.loaded.model, session.loaded.module, session.device, with_own=False
            ).choose(phase, num_tokens)
            x = torch.randn(num_tokens, 64).bfloat16()
            chosen = torch.arange(2 * num_tokens).view(-1, 2) % 4
            shares = torch.full(chosen.shape, 0.5).bfloat16()
            compiled = torch.compile(experts.__call__, backend="eager", fullgraph=True)
            assert torch.equal(compiled(x, chosen, shares), experts(x, chosen, shares))


def test_names_of_weights(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3_moe", tmp_path)))
    part = "model.layers.{}.mlp.experts.{}.down_proj.weight"
    some = {part.format(layer, 2) for layer in (0, 2)} | {"lm_head.weight"}
    assert name_weights(model, some) == (
        "0.mlp.experts.down_proj",
        "2.mlp.experts.down_proj",
        "output_head",
    )
    every = {part.format(layer, layer) for layer in range(3)}
    assert name_weights(model, every) == ("mlp.experts.down_proj",)
    assert name_weights(model, every) == ("mlp.experts.down_proj",)
    packing = LAYERS.model_copy(update={"output_head": True})
    less = exclude_from_packing(model, packing, ("1", "output_head"))
    assert less == Packing(group_size=1, num_in_group=1, leave_unpacked=("1",))
    assert exclude_from_packing(model, packing, ("0", "1", "2")) is None
    assert exclude_from_packing(model, EVERY_SECOND, ("1",)) is None


def pack_tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have matrices packed that are too small for it."""
    for module in (
        offplan.forms.host_kernels,
        offplan.runtime.forms.packing,
        offplan.runtime.loading.packed,
    ):
        monkeypatch.setattr(module, "PATCH_ROWS", 8)


@pytest.mark.sweep
@pytest.mark.parametrize("family", FAMILIES.split())
def test_families_give_the_same_bits(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pack_tiny(monkeypatch)
    config = make_config(family, {})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    draw_weights(model).save_pretrained(tmp_path)
    packing = pack_everything(open_model(str(tmp_path)))
    ours = run_greedily(tmp_path, packed(group(2, 1), packing=packing), PROMPT)
    theirs = run_greedily(tmp_path, offload(group(2, 1)), PROMPT)
    assert all(map(torch.equal, ours, theirs))


def test_memory_is_what_is_placed(folder: Path) -> None:
    model = open_model(str(folder))
    decision = packed(group(2, 1))
    loaded = load(model, decision, folder)
    placement, plain = place(model, decision), place(model, offload(group(2, 1)))
    store = loaded.store
    assert sum(slab.nbytes for slab in store.slabs.values()) == placement.offloaded_bytes
    held = sum(value.nbytes for value in store.resident.values())
    assert held == placement.resident_bytes
    assert placement.slot_bytes < plain.slot_bytes
    assert placement.resident_bytes < plain.resident_bytes
    loaded.close()


def test_what_brings_the_kernels_runs_all_of_them() -> None:
    parts = offplan.runtime.loading.packed.pack_a_little(torch.device("cpu"))
    assert parts[Component.PATCH_BLOCKS].tolist() == [[0, 1]]


@pytest.mark.slow
def test_random_weights_are_those_of_a_plan_without_packing(folder: Path) -> None:
    model = open_model(str(folder))
    plain = load(model, offload(), None)
    loaded = load(model, packed(), None)
    num_packed = 0
    for path, module in loaded.module.named_modules():
        kept = vars(module).get("stored_experts", {})
        for stored in [*kept.values(), *([module.stored] if hasattr(module, "stored") else [])]:
            made = stored.expand(module, torch.bfloat16)
            assert torch.equal(made, plain.store.resident[f"{path}.{stored.name}"])
            num_packed += 1
    assert num_packed == len(plain.store.resident.keys() - loaded.store.resident.keys())
    for each in (plain, loaded):
        each.close()


def change(folder: Path, name: str, value: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    tensors[name] = value.to(tensors[name].dtype).expand(tensors[name].shape).contiguous()
    save_file(tensors, path, {"format": "pt"})


@pytest.mark.slow
def test_every_bit_pattern_is_kept_or_refused(tmp_path: Path) -> None:
    """What no code of its block reaches is kept apart, as long as there is room."""
    folder = save("qwen3", tmp_path)
    name = "model.layers.1.mlp.up_proj.weight"
    few = torch.full((128, 64), 1.0)
    few[1, ::8] = torch.tensor([float("nan"), float("inf"), float("-inf"), 1e30]).repeat(2)
    few[2] = torch.tensor([0.0, -0.0, 1e-40, -1e-40]).repeat(16)
    few[3:67, 7] = torch.tensor([1e-39, -0.0, 1e-40, -1e-9]).repeat(16)
    few[67:127, ::2], few[68:127, 1::4] = 0.0, -0.0  # which take no room
    change(folder, name, few)
    loaded = load(open_model(str(folder)), packed(), folder)
    module = loaded.module.get_submodule("model.layers.1.mlp.up_proj")
    made = module.stored.expand(module, torch.bfloat16)
    expected = load_file(folder / "model.safetensors")[name]
    assert torch.equal(made.view(torch.int16), expected.view(torch.int16))
    loaded.close()

    few[127, :15] = 1e30
    change(folder, name, few)
    told = rf"{name} .* found 71 .* most 64; .*`leave_unpacked=1\.mlp\.up_proj"
    with pytest.raises(UnpackableError, match=told):
        load(open_model(str(folder)), packed(), folder)


@pytest.mark.slow
@pytest.mark.parametrize("name", TIED)
def test_a_head_is_packed_with_the_embedding_that_it_is_tied_to(tmp_path: Path, name: str) -> None:
    """Both read one set of parts; prompts in chunks, steps and batches give the same bits."""
    folder = save(name, tmp_path)
    model, decision = open_model(str(folder)), packed(group(2, 1), packing=WITH_HEAD)
    assert pack_everything(model) == WITH_HEAD
    for chunk, prompt in ((64, PROMPT), (5, PROMPT.view(2, -1))):
        decision = decision.model_copy(update={"prefill_chunk": chunk})
        ours = run_greedily(folder, decision, prompt, late_copies=True)
        theirs = run_greedily(folder, offload(group(2, 1), prefill_chunk=chunk), prompt)
        assert all(map(torch.equal, ours, theirs))


@pytest.mark.slow
def test_a_tied_head_takes_what_is_placed(tmp_path: Path) -> None:
    folder = save("gemma3_text", tmp_path)
    model, decision = open_model(str(folder)), packed(packing=WITH_HEAD)
    loaded = load(model, decision, folder)
    both = loaded.module.get_input_embeddings(), loaded.module.get_output_embeddings()
    parts = [dict(module.named_parameters()) for module in both]
    assert int(parts[0]["weight_patch_blocks"][-1, 1])
    assert [*parts[0]] == [*parts[1]]
    assert all(parts[0][part] is parts[1][part] for part in parts[0])
    held = sum(value.nbytes for value in loaded.store.resident.values())
    assert held == place(model, decision).resident_bytes
    saved = place(model, packed()).resident_bytes - held
    assert saved == 2 * 64 * 64 - sum(value.nbytes for value in parts[0].values())
    loaded.close()


@pytest.mark.slow
def test_a_head_that_is_stored_though_it_is_tied_is_packed_alone(tmp_path: Path) -> None:
    folder = save("qwen3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    model = open_model(str(folder))
    assert model.tied == {"lm_head.weight"}
    loaded = load(model, packed(packing=WITH_HEAD), folder)
    assert type(loaded.module.get_input_embeddings()) is torch.nn.Embedding
    assert isinstance(loaded.module.get_output_embeddings(), StoredLinear)
    loaded.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma4_text", "gemma4"])
def test_a_tied_head_is_packed_beside_a_table_on_the_host(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole model's class also reads one row of the embedding, the padding token's."""
    pack_tiny(monkeypatch)
    text, auto_class = None, AutoModelForCausalLM
    if family == "gemma4":
        text, auto_class = "gemma4_text", AutoModelForMultimodalLM
    model = auto_class.from_config(make_config(family, {}, text), dtype=torch.bfloat16)
    draw_weights(model).save_pretrained(tmp_path)
    head = packed(group(2, 1), packing=WITH_HEAD, embeddings="host")
    with open_session(tmp_path, head) as session:
        assert session.loaded.placement.table_bytes > 0
        embedding = session.loaded.module.get_input_embeddings()
        assert isinstance(embedding, StoredEmbedding)
    ours = run_greedily(tmp_path, head, PROMPT)
    theirs = run_greedily(tmp_path, offload(group(2, 1)), PROMPT)
    assert all(map(torch.equal, ours, theirs))


def test_a_tied_embedding_lies_on_no_host(tmp_path: Path) -> None:
    model = open_model(str(save("gemma3_text", tmp_path)))
    with pytest.raises(PlanError, match="is tied to the head"):
        place(model, packed(packing=WITH_HEAD, embeddings="host"))


def test_what_cannot_be_packed_is_refused(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3_moe", tmp_path)))
    down = Packing(group_size=1, num_in_group=1, cpu_offload_params=("down_proj",))
    with pytest.raises(PlanError, match="some of the routed experts' weights"):
        place(model, packed(packing=down))
    absent = LAYERS.model_copy(update={"leave_unpacked": ("2.mlp.down_proj",)})
    with pytest.raises(PlanError, match=r"`leave_unpacked=2\.mlp\.down_proj`: no matrix"):
        place(model, packed(packing=absent))
    norms = Packing(group_size=1, num_in_group=1, cpu_offload_params=("input_layernorm",))
    with pytest.raises(PlanError, match=r"packing takes nothing: .*; leave out `packing`"):
        place(model, packed(packing=norms))


def test_a_head_too_large_to_number_its_weights_is_not_packed(tmp_path: Path) -> None:
    model = open_model(str(save("qwen3", tmp_path)))
    assert model.head is not None
    large = model.head.tensors[0]._replace(shape=(2**18, 2**12))
    model = replace(
        model, outside=tuple(large if t.name == large.name else t for t in model.outside)
    )
    assert pack_everything(model) == LAYERS
    with pytest.raises(PlanError, match=r"\[262144, 4096\], expected .* fewer than 2\^30 weights"):
        place(model, packed(packing=LAYERS.model_copy(update={"output_head": True})))
