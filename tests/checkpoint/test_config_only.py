import json
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from offplan.checkpoint import config_only, model_types
from offplan.checkpoint.model import Experts, KVCache
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.transformers_private import name_cache
from tests.checkpoint.architectures import LATENT, MODELS, TINY

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

FIXTURES = Path(__file__).parent.parent / "models"


def describe(model):
    """Everything that does not say where the tensors lie."""
    layers = [
        (layer.kind, layer.prefix, layer.segments, layer.kv_cache, layer.expert_bytes)
        for layer in model.layers
    ]
    outside = [tensor[:3] for tensor in model.outside]
    sizes = (model.num_tensors, model.num_parameters, model.total_bytes, hold(model).loaded_bytes)
    return (model.headers_sha256, model.dtype, layers, outside, sizes, model.experts, model.tied)


@pytest.fixture(autouse=True)
def nothing_kept(tmp_path_factory, monkeypatch):
    """What is built is kept on disk: not from one test to another."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path_factory.mktemp("home")))


@pytest.mark.parametrize("name", MODELS)
def test_config_alone_equals_the_saved_checkpoint(saved, name):
    folder, _ = saved(name)
    stored, alone = open_model(str(folder)), open_model(str(folder / "config.json"))
    assert describe(alone) == describe(stored)
    assert stored.notes == ()
    assert alone.notes[0].startswith("sizes come from the config alone")


@pytest.mark.parametrize("name", MODELS)
def test_checkpoint_has_the_parameters_of_the_model(saved, name):
    folder, model = saved(name)
    got = open_model(str(folder))
    # Saved buffers are among them (DeepSeek-V3's e_score_correction_bias); ties are one object.
    elements = {id(t): t.numel() for t in model.state_dict(keep_vars=True).values()}
    assert got.num_parameters == sum(elements.values())
    assert len(got.layers) == model.config.get_text_config().num_hidden_layers
    assert got.model_type == model.config.model_type


@pytest.mark.parametrize("name", MODELS)
def test_kv_cache_is_what_transformers_allocates(saved, name):
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    folder, model = saved(name)
    if name == "llama4" and version("transformers").startswith("5.24."):
        pytest.skip("transformers 5.24 fails where its multimodal Llama 4 is given no image")
    num_tokens = 3  # within gemma3's window
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        tokens = torch.ones(2, num_tokens, dtype=torch.long)
        model(tokens, use_cache=True, **{name_cache(model): cache})
    for layer, held in zip(open_model(str(folder)).layers, cache.layers, strict=True):
        if isinstance(held, LinearAttentionCacheLayerMixin):
            states = [*held.conv_states.values(), *held.recurrent_states.values()]
        else:
            states = [held.keys, held.values]
        assert layer.kv_cache.nbytes(2, num_tokens) == sum(state.nbytes for state in states)


def test_experts_one_by_one_and_fused(saved):
    mixtral = open_model(str(saved("mixtral")[0]))
    names = [tensor.name for tensor in mixtral.layers[1].parameters[0].tensors]
    assert names == [f"model.layers.1.block_sparse_moe.experts.{e}.w1.weight" for e in range(4)]
    assert mixtral.experts == Experts(4, 2, 3 * 32 * 48 * 2)
    fused = open_model(str(saved("gpt_oss")[0]))
    assert fused.experts.num_experts == 4
    assert fused.experts.bytes_per_expert == 2 * (3 * 32 * 48 + 2 * 48 + 32)


def test_windows_of_gemma3(saved):
    layers = open_model(str(saved("gemma3")[0])).layers
    assert [layer.kv_cache.window for layer in layers] == [4] * 5 + [None]


def test_deepseek_v2_lite():
    model = open_model(str(FIXTURES / "deepseek-v2-lite" / "config.json"))
    assert model.num_parameters == 15_706_484_224
    assert model.total_bytes == hold(model).loaded_bytes == 31_412_968_448
    assert model.num_tensors == 5291
    assert model.experts == Experts(64, 6, 17_301_504)
    assert [layer.kind for layer in model.layers] == ["dense"] + ["moe"] * 26
    assert {layer.kv_cache for layer in model.layers} == {KVCache((512 + 64) * 2)}
    gate = next(p for p in model.layers[1].parameters if p.segment == "mlp.experts.gate_proj")
    assert gate.tensors[0][:3] == (
        "model.layers.1.mlp.experts.0.gate_proj.weight",
        "BF16",
        (1408, 2048),
    )
    assert len(gate.tensors) == 64


def test_qwen3_8b():
    model = open_model(str(FIXTURES / "qwen3-8b" / "config.json"))
    assert model.num_parameters == 8_190_735_360
    assert model.total_bytes == hold(model).loaded_bytes == 16_381_470_720
    assert model.experts is None
    assert [layer.kv_cache for layer in model.layers] == [KVCache(2 * 8 * 128 * 2)] * 36


def rewrite(saved, tmp_path, **changes):
    """A copy of the tiny Qwen3's config with other values; None drops a key."""
    config = json.loads((saved("qwen3")[0] / "config.json").read_text()) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: v for key, v in config.items() if v is not None}))
    return path


def test_without_a_dtype_sizes_are_float32(saved, tmp_path):
    model = open_model(str(rewrite(saved, tmp_path, dtype=None)))
    assert model.dtype == "float32"
    assert "took float32" in model.notes[1]


def test_what_was_built_is_not_built_again(saved, tmp_path, monkeypatch):
    folder, _ = saved(next(iter(MODELS)))
    built = open_model(str(folder / "config.json"))
    monkeypatch.setattr(config_only, "_build_tensors", lambda *_: pytest.fail("built again"))
    assert open_model(str(folder / "config.json")) == built
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 8}))
    with pytest.raises(pytest.fail.Exception, match="built again"):
        open_model(str(tmp_path / "config.json"))


def test_old_name_of_the_dtype(saved, tmp_path):
    path = rewrite(saved, tmp_path, dtype=None, torch_dtype="float16")
    assert open_model(str(path)).dtype == "float16"


def test_infinity_in_a_config(tmp_path):
    from transformers import BambaConfig

    config = BambaConfig(**TINY, mamba_n_heads=4, mamba_d_head=16, attn_layer_indices=[1])
    config.save_pretrained(tmp_path)
    assert "__float__" in (tmp_path / "config.json").read_text()
    assert len(open_model(str(tmp_path / "config.json")).layers) == 3


def test_experts_that_compute_nothing_are_not_in_the_checkpoint(tmp_path):
    from transformers import LongcatFlashConfig

    config = LongcatFlashConfig(
        **{**TINY, "num_hidden_layers": 4, **LATENT, "q_lora_rank": 8},
        n_routed_experts=4,
        zero_expert_num=2,
        moe_topk=2,
        expert_ffn_hidden_size=16,
        ffn_hidden_size=48,
    )
    config.save_pretrained(tmp_path)
    model = open_model(str(tmp_path / "config.json"))
    assert model.experts == Experts(4, 2, 3 * 32 * 16 * 2)
    # Two attentions a layer, which transformers 5.17's config counts as layers.
    assert {layer.kv_cache for layer in model.layers} == {KVCache(2 * (16 + 8) * 2)}


def test_experts_that_are_rows_of_tables_are_no_routed_ones(tmp_path):
    from transformers import DogeConfig

    DogeConfig(**TINY, num_experts=40_000).save_pretrained(tmp_path)
    assert open_model(str(tmp_path / "config.json")).experts is None


def test_a_type_that_a_newer_transformers_has(tmp_path, monkeypatch):
    monkeypatch.setitem(model_types.SINCE, "newest", "6.1")
    (tmp_path / "config.json").write_text('{"model_type": "newest"}')
    with pytest.raises(CheckpointError, match=r"update transformers to 6\.1 or newer"):
        open_model(str(tmp_path / "config.json"))


@pytest.mark.parametrize("named", [{}, {"AutoConfig": "c.C", "AutoModelForCausalLM": "m.M"}])
def test_a_type_that_no_transformers_has(tmp_path, monkeypatch, named):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": "nonesuch", "auto_map": named}))
    with pytest.raises(CheckpointError) as raised:
        open_model(str(path))
    assert str(raised.value).count(str(path)) == 1
    assert "'nonesuch', which transformers 5." in str(raised.value)
    assert "To plan, name the folder or the Hub id" in str(raised.value)
    assert ("let it run with `trust_remote_code=True`" in str(raised.value)) == bool(named)
    monkeypatch.setattr("transformers.__version__", "5.17.1")
    with pytest.raises(CheckpointError, match=r"5\.17\.1 does not have, nor has 5\.24, the newest"):
        open_model(str(path))


TIMM = ImportError(
    "\nA requires the PIL library but it was not found in your environment. You can install it with"
    " pip:\n`pip install pillow`. Please note that you may need to restart your runtime.\n\nA "
    "requires the timm library but it was not found in your environment.\n`pip install timm`."
)
LAZY = RuntimeError("Failed to import transformers.models.kimi_linear")
LAZY.__cause__ = ModuleNotFoundError("No module named 'fla'", name="fla")


@pytest.mark.parametrize(
    ("error", "why", "help_"),
    [
        (KeyError("full_attention"), "it finds no 'full_attention'", "compare its config with"),
        (ImportError("it lacks something"), "lacks something", "install what it names"),
        (TIMM, "it needs packages that are not installed", ": pip install pillow timm"),
        (LAZY, "it needs the package fla, which is not installed", "install it"),
    ],
)
def test_what_transformers_cannot_build_is_no_fault_of_the_config(error, why, help_):
    from offplan.checkpoint.transformers_config import cannot_build

    found = str(cannot_build("here", error))
    assert why in found
    assert help_ in found
    assert "KeyError" not in found


def test_a_key_that_a_class_asks_for_and_has_no_default_of():
    from transformers import Qwen3Config

    from offplan.checkpoint.transformers_config import cannot_build

    with pytest.raises(AttributeError) as raised:  # as Qwen3-Omni's talker by default
        Qwen3Config().shared_expert_intermediate_size  # noqa: B018
    found = str(cannot_build("here", raised.value))
    assert "it finds no 'shared_expert_intermediate_size', of which Qwen3Config has no" in found
    assert "AttributeError" not in found


def test_index_beside_the_config_is_compared(saved, tmp_path):
    folder, _ = saved("qwen3-sharded")
    shutil.copy(folder / "config.json", tmp_path)
    shutil.copy(folder / "model.safetensors.index.json", tmp_path)
    model = open_model(str(tmp_path / "config.json"))
    assert len(model.notes) == 1
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["metadata"]["total_size"] += 5
    index["weight_map"] = {**index["weight_map"], "a.weight": "b"}
    del index["weight_map"]["lm_head.weight"]
    path.write_text(json.dumps(index))
    _, size, extra, missing, advice = open_model(str(tmp_path / "config.json")).notes
    assert f"says {model.total_bytes + 5} bytes" in size
    assert "the index has +5 bytes" in size
    assert "1 tensors are in model.safetensors.index.json and not in" in extra
    assert "'a.weight'" in extra
    assert "'lm_head.weight'" in missing
    assert "name the folder" in advice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "newest"}, "found model_type 'newest', which transformers 5."),
        ({"model_type": "vit"}, "has no causal language model"),
        ({"hidden_size": "wide"}, "as hidden_size, expected a whole number"),
        ({"hidden_size": -4}, "cannot build"),
        ({"dtype": "float7"}, "cannot build"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "10000"),
        ({"num_hidden_layers": [1, 2]}, "as num_hidden_layers, expected a positive"),
    ],
)
def test_config_that_cannot_be_built(saved, tmp_path, changes, message):
    with pytest.raises(CheckpointError) as raised:
        open_model(str(rewrite(saved, tmp_path, **changes)))
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_code_named_by_a_config_is_never_run(saved, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise AssertionError("tried to fetch code")

    monkeypatch.setattr("transformers.dynamic_module_utils.get_class_from_dynamic_module", refuse)
    monkeypatch.setattr("huggingface_hub.file_download.hf_hub_download", refuse)
    path = rewrite(
        saved,
        tmp_path,
        auto_map={"AutoModelForCausalLM": "modeling_evil.Evil", "AutoConfig": "evil.Evil"},
        attn_implementation="kernels-community/flash-attn",
        _attn_implementation="evil/kernel",
        architectures=["pipeline", "Trainer", "Qwen3ForCausalLM"],
    )
    assert len(open_model(str(path)).layers) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": 10_000}, "found 10000 layers or parts, expected 1000"),
        ({"split_ngram_parts": 2**39}, "layers or parts, expected 1000 at most"),
        ({"num_hidden_layers": 1e300}, "as num_hidden_layers, expected a whole number"),
        ({"num_hidden_layers": 500, "num_experts": 5_000}, "found 2500000 experts in all layers"),
        ({"vision_config": {"depth": 10**400}}, "layers or parts, expected 1000 at most"),
        ({"vision_config": {"num_layers": float("inf")}}, "found inf layers"),
    ],
)
def test_numbers_past_any_model_are_refused_before_building(tmp_path, change, message):
    config = json.loads((Path("plans/tiny-moe/config.json")).read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | change))
    with pytest.raises(CheckpointError) as raised:
        open_model(str(tmp_path / "config.json"))
    assert message in str(raised.value)
    assert len(str(raised.value)) < 400


def test_layer_counts_that_are_no_numbers_do_not_count(tmp_path):
    config = json.loads((Path("plans/tiny-moe/config.json")).read_text())
    odd = {"encoder_layers": float("nan"), "depth": None, "blocks": "many"}
    (tmp_path / "config.json").write_text(json.dumps(config | odd))
    assert open_model(str(tmp_path / "config.json")).layers


def test_quantisation_of_null_is_none(tmp_path):
    config = json.loads((Path("plans/tiny-moe/config.json")).read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": None}))
    notes = open_model(str(tmp_path / "config.json")).notes
    assert not any("quantis" in note for note in notes)
