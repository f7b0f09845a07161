"""The tables by model type say what the installed transformers does."""

import functools
import inspect
import re
import sys
from typing import Any

import pytest

from offplan.checkpoint import model_types
from offplan.checkpoint.architecture import read_architecture
from offplan.checkpoint.config import class_type
from offplan.transformers_private import TRIED
from tests.tiers import first_quick

transformers = pytest.importorskip("transformers")
torch = pytest.importorskip("torch")

from transformers.models.auto import modeling_auto  # noqa: E402
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402
from transformers.models.auto.modeling_auto import (  # noqa: E402
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

IS_NEWEST = transformers.__version__.startswith(f"{TRIED[-1]}.")
"""Whether the tables, which say what the newest version does, are all that there is to say."""
OLDER_NAMES = {"moe_statics"}
"""Parts that older versions, and the checkpoints that they load, name so."""
PARTS_OF = {"hy_v4": ["HYV4PreTrainedModel"]}
"""Classes whose parts stay in float32 beside those that the causal model's class lists."""
KINDS_OF_MODELS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
NUM_LAYERS = 13
KINDS_IN_TURN = ("sliding_attention", "full_attention") * (NUM_LAYERS // 2)
KINDS = {"sliding_attention", "hybrid_sliding", "chunked_attention"}


def known(names):
    """Those that the installed transformers has too."""
    return [name for name in names if name in CONFIG_MAPPING]


CAUSAL = [
    name
    for name in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
    if name in model_types.TIED_BY_DEFAULT and name in CONFIG_MAPPING
]
"""Decoder-only model types with a causal model."""


def causal_class(name):
    """The causal model of a type; its file is imported here, as all of them take seconds."""
    found = MODEL_FOR_CAUSAL_LM_MAPPING[CONFIG_MAPPING[name]]
    return found[0] if isinstance(found, tuple) else found


@functools.cache
def source(name):
    """The file that the causal model of a type is written in."""
    return inspect.getsource(sys.modules[causal_class(name).__module__])


def default_config(name, **changes):
    """Transformers' config of a type, its language model's part; None where it needs values."""
    try:
        return CONFIG_MAPPING[name](**changes).get_text_config()
    except Exception:
        return None


@pytest.mark.slow
def test_ties():
    table = model_types.TIED_BY_DEFAULT
    found = {name: CONFIG_MAPPING[name].tie_word_embeddings for name in known(table)}
    assert found == {name: table[name] for name in found}


def test_since():
    """Each version in turn has what the table says, in this environment or in another."""
    version = transformers.__version__
    mappings = (vars(modeling_auto)[f"MODEL_FOR_{kind}_MAPPING_NAMES"] for kind in KINDS_OF_MODELS)
    found = {name for mapping in mappings for name in mapping}
    here = {name for name, since in model_types.SINCE.items() if since <= version}
    assert here == found & model_types.SINCE.keys()


def slides_everywhere(name):
    """Whether every attention layer gets the config's window, though no list of layers says so."""
    text = source(name)
    # OLMoE's mask does not slide, but its cache and kernels that need no mask do
    masked = re.search(r"sliding_window is None else create_sliding_window_causal_mask", text)
    told = re.search(r'sliding_window=getattr\(self.config, "sliding_window", None\)', text)
    return bool(masked or told)


def windows_of(name, config):
    """What each layer of transformers' model sees, by its config with all defaults filled in."""
    window = getattr(config, "sliding_window", None) or None
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    num_layers = config.num_hidden_layers
    if name == "gpt_neo":
        return tuple(config.window_size if k == "local" else None for k in config.attention_layers)
    if kinds is None:
        return (window if slides_everywhere(name) else None,) * num_layers
    tokens = dict.fromkeys(KINDS, window) | {"chunked_attention": chunk}
    if slides_everywhere(name) and name not in ("deepseek_v4", "recurrent_gemma"):
        tokens["full_attention"] = window
    return tuple(tokens.get(kind) for kind in kinds)


CHANGES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 7},
    {"sliding_window": 7, "use_sliding_window": True, "max_window_layers": 5},
    {"sliding_window": 7, "use_sliding_window": False},
    {"sliding_window": None},
    {"sliding_window_pattern": 3},
    {"attention_chunk_size": 9, "no_rope_layers": [1, 0] * NUM_LAYERS},
    {"sliding_window": 7, "layer_types": ["full_attention", *KINDS_IN_TURN]},
]


def is_compared(name, config, changes):
    """Whether transformers' config says itself what its decoder's layers see."""
    if config is None or config.model_type != name or config.is_encoder_decoder:
        return False  # its class refuses such values, or its decoder is a model type of its own
    if name == "longcat_flash":
        return False  # two attentions a layer, of which transformers counts each
    if "layer_types" in changes and name.startswith("zamba"):
        return False  # it writes them under another name, and has no windows
    # dots3's own switch and default are not read: its config lists the layers
    return (
        name != "dots3_note_text" or not {"use_sliding_window", "sliding_window"} & changes.keys()
    )


@pytest.mark.parametrize("name", first_quick(CAUSAL))
def test_windows_by_layer(name):
    sizes: dict[str, Any] = {"num_hidden_layers": NUM_LAYERS}
    if name == "gpt_neo":
        sizes |= {"num_layers": NUM_LAYERS + 1, "attention_types": [[["global", "local"], 7]]}
    for changes in CHANGES:
        taken = class_type(name, changes)
        config = default_config(taken, **sizes, **changes)
        if not is_compared(taken, config, changes):
            continue
        raw = {"model_type": name, "num_hidden_layers": config.num_hidden_layers, **changes}
        expected = windows_of(taken, config)
        assert read_architecture(raw).windows == expected, changes
        # and as the class writes what it made of them
        assert read_architecture(config.to_dict(), len(expected)).windows == expected, changes


@pytest.mark.slow
def test_matrices_stored_the_other_way_round():
    found = {name for name in CAUSAL if "Conv1D(" in source(name)}
    assert found == set(known(model_types.CONV1D_TYPES))


@pytest.mark.slow
def test_orientation_of_experts():
    transposed = {name for name in CAUSAL if "is_transposed=True" in source(name)}
    # these two say it otherwise: in code of their own, in what loading turns round
    own = {"llama4", "llama4_text"} | {"qwen3_vl_moe_text"}
    assert transposed | own <= set(model_types.EXPERTS_IN_OUT)
    assert not IS_NEWEST or transposed | own == set(model_types.EXPERTS_IN_OUT)


@pytest.mark.parametrize("name", known(model_types.ROUTED_TO))
def test_routers_that_heed_no_number_of_the_config(name):
    """What others choose is what their configs say, as ``tests/runtime`` runs them by."""
    config = CONFIG_MAPPING[name](
        hidden_size=16,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=4,
        num_experts_per_tok=3,
        vocab_size=8,
        pad_token_id=0,
    )
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    routed = model.model.layers[0].mlp.router(torch.zeros(1, 16))[-1]
    assert routed.shape[-1] == model_types.ROUTED_TO[name]
    assert read_architecture(config.to_dict()).routing.num_per_token == routed.shape[-1]


@pytest.mark.slow
def test_shared_experts_are_added_last():
    ending = re.compile(
        r"hidden_states = self\.experts\(.*\)\.view\(\*orig_shape\)\n"
        r" +hidden_states = hidden_states \+ self\.shared_experts\(residuals\)\n"
        r" +return hidden_states\n"
    )
    found = {name for name in CAUSAL if ending.search(source(name))}
    assert found == set(known(model_types.SHARED_BEHIND))


def test_llama4_experts_are_in_out():
    from transformers.models.llama4.modeling_llama4 import Llama4TextExperts

    config = transformers.Llama4TextConfig(
        hidden_size=8, intermediate_size=12, num_local_experts=2, num_attention_heads=2
    )
    with torch.device("meta"):
        experts = Llama4TextExperts(config)
    assert experts.gate_up_proj.shape == (2, 8, 24)
    assert experts.down_proj.shape == (2, 12, 8)


def test_loading_turns_the_experts_of_qwen3_vl_moe_round():
    conversions = pytest.importorskip("transformers.conversion_mapping")
    text = inspect.getsource(conversions)
    start = text.index('"qwen3_vl_moe": [')
    assert "Transpose(1, 2" in text[start : start + 700]


def test_sinks():
    found = {name for name in CAUSAL if "self.sinks = " in source(name)}
    assert found == set(known(model_types.SINK_TYPES))


def test_soft_caps():
    for name in CAUSAL:
        config = default_config(name)
        if config is not None:
            cap = getattr(config, "attn_logit_softcapping", None)
            assert model_types.SOFT_CAPS.get(name) == cap, name


@pytest.mark.parametrize(
    ("table", "attribute"),
    [
        (model_types.FLOAT32_PARTS, "_keep_in_fp32_modules_strict"),
        (model_types.FLOAT32_PARTS_IN_FLOAT16, "_keep_in_fp32_modules"),
    ],
)
def test_what_stays_in_float32(table, attribute):
    for name in CAUSAL:
        whole = causal_class(name)
        classes = [
            whole,
            *(vars(sys.modules[whole.__module__])[each] for each in PARTS_OF.get(name, ())),
        ]
        kept = {part for each in classes for part in getattr(each, attribute, None) or ()}
        routers = tuple(model_types.WIDENED_ROUTERS.get(name, ()))
        kept = {part for part in kept if not (routers and part.endswith(routers))}
        if IS_NEWEST:
            assert set(table.get(name, ())) - OLDER_NAMES == kept, name
        else:  # newer ones keep more of a model so, always or in float16
            assert kept <= {*table.get(name, ()), *model_types.FLOAT32_PARTS.get(name, ())}, name


@pytest.mark.parametrize("family", known(model_types.TEXT_CLASSES))
def test_what_a_class_of_several_modalities_keeps_in_float32(family):
    whole = transformers.AutoModelForMultimodalLM._model_mapping[CONFIG_MAPPING[family]]
    text = model_types.TEXT_CLASSES[family]
    assert CONFIG_MAPPING[family].sub_configs["text_config"].model_type == text
    kept = set(getattr(whole, "_keep_in_fp32_modules_strict", None) or ())
    have = {*model_types.FLOAT32_PARTS.get(text, ()), *model_types.WIDENED_ROUTERS.get(text, ())}
    assert all(any(part in each for each in have) for part in kept), kept - have


def test_routers_are_widened_in_every_pass():
    widens = re.compile(r"self\.weight\.(type\(torch\.float32\)|float\(\))\)")
    for name in set(CAUSAL) & model_types.WIDENED_ROUTERS.keys():
        assert widens.search(source(name)), name


def test_sizes_of_text_parts():
    for name, sizes in model_types.TEXT_SIZES.items():
        default = CONFIG_MAPPING[name]()
        assert {key: getattr(default, key) for key in sizes} == sizes, name
        stated = {"num_hidden_layers": 2, "text_config": {"model_type": name, "hidden_size": 64}}
        read = read_architecture({"model_type": "llava", **stated})
        assert (read.hidden_size, read.num_layers) == (64, default.num_hidden_layers)
        assert read.vocabulary_size == default.vocab_size
        assert read.attention.num_kv_heads == default.num_key_value_heads
