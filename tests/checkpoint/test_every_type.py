"""Of every model type that transformers has: its size from a config, distorted or not, is right.

The judge is transformers' module on the meta device and, of quantised checkpoints, what the
scheme's own tool makes of a tiny model.
"""

import functools
import json
from typing import Any, NamedTuple

import pytest

from offplan.capabilities.stock import STOCK
from offplan.capabilities.way import OWN
from offplan.checkpoint.model_types import TIED_BY_DEFAULT
from offplan.checkpoint.open import open_model
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.library.runnable import find_obstacle

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from transformers.models.auto import modeling_auto  # noqa: E402

from tests.checkpoint.quantising import SCHEMES, count_quantised  # noqa: E402
from tests.runtime.families import MOST_PARAMETERS, SIZES, make_config  # noqa: E402

KINDS = ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM")
TYPES = sorted(
    {
        name: None
        for kind in KINDS
        for name in getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES", {})
    }
)
CAUSAL = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
DECODERS = [name for name in TYPES if name not in CAUSAL or name in TIED_BY_DEFAULT]
"""Those that are no encoders beside."""
OTHERWISE = {
    "deepseek_v4": {"num_nextn_predict_layers": 0},  # stored, and no part of transformers' module
    "longcat_flash": {"zero_expert_num": 0},  # allocated by transformers, and not stored
}
"""Values by which transformers' module has what a checkpoint of the type stores."""
GROUPED = {
    name: {8: 64, 16: 128, 32: 256, 48: 256, 64: 256}.get(size, size)
    for name, size in SIZES.items()
    if isinstance(size, int) and not name.startswith("index_")
}
GROUPED |= dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "decoder_layers"), 2)
GROUPED |= {"moe_intermediate_size": 256, "tie_word_embeddings": False}
"""Sizes of tiny models that groups of 128 divide, with heads that tools take as such."""


LEFT = {
    # a head that transformers calls lm_head, as these configs do, and saves by another name
    **dict.fromkeys(("fuyu", "gpt_neox"), ("fp8", "compressed-tensors")),
    # a list of its own says which layers it has, and contradicts the number of a tiny model's
    "nemotron_h": ("fp8", "bitsandbytes", "torchao", "compressed-tensors"),
    # more or other layers are left as they are, for being named so in transformers' classes
    "deepseek_v4": ("fp8", "bitsandbytes", "torchao", "compressed-tensors"),
    "hrm_text": ("bitsandbytes", "torchao"),
    "hy_v4": ("bitsandbytes", "torchao"),
    "rwkv": ("fp8", "bitsandbytes", "torchao"),
    # no linear layer at all, which is refused
    **dict.fromkeys(("gpt2", "gpt-sw3", "openai-gpt"), ("fp8", "torchao", "compressed-tensors")),
}
"""Methods by which a type, published in none of them, is not sized as its tool stores it."""


class Truth(NamedTuple):
    """A config as it is saved, and the size of transformers' module of it."""

    config: dict[str, Any]
    num_bytes: int
    num_parameters: int


def build(config):
    """Build the module of a config, on the device that torch is told."""
    mappings = (getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING", {}) for kind in KINDS)
    known = [each.get(type(config), None) for each in mappings]
    # the first mapping may have the class of the text part under the whole model's type
    own = [each for each in known if getattr(each, "config_class", None) is type(config)]
    model_class = next(iter(own or filter(None, known)), None)
    if model_class is None:
        pytest.skip(f"transformers {transformers.__version__} has no language model of it")
    return model_class._from_config(config, dtype=torch.bfloat16, attn_implementation="eager")


def measure(config):
    config.dtype = "bfloat16"
    with torch.device("meta"):
        model = build(config)
    state = {id(value): value for value in model.state_dict(keep_vars=True).values()}.values()
    saved = json.loads(model.config.to_json_string())  # a decoder's class says that it is one
    return Truth(saved, sum(v.nbytes for v in state), sum(v.numel() for v in state))


@functools.cache
def truth(name, tie=None, *, tiny=False):
    """Size the default config of a type, or a tiny one where transformers builds no default."""
    changes = OTHERWISE.get(name, {}) | ({} if tie is None else {"tie_word_embeddings": tie})
    why = ""
    for is_tiny in (True,) if tiny else (False, True):
        try:
            default = transformers.CONFIG_MAPPING[name]
            return measure(make_config(name, changes) if is_tiny else default(**changes))
        except Exception as error:
            why = f"transformers does not build it: {type(error).__name__}: {error}"
    pytest.skip(why)


def text_key(config):
    """The key of the language model's part, if the config has one."""
    keys = ("text_config", "llm_config", "language_config", "thinker_config")
    return next((key for key in keys if isinstance(config.get(key), dict)), None)


def type_in_a_part(config):
    key, plain = text_key(config), without_types(config)
    if key is None:
        return plain | {"torch_dtype": "bfloat16"}
    return plain | {key: plain[key] | {"dtype": "bfloat16"}}


def without_types(config):
    return {
        key: without_types(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key != "dtype"
    }


def renamed(config):
    return config | {"architectures": ["PublishedForCausalLM"]}


def tower_beside(config):
    """The language model of LLaVA, as its config would be published."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 64, "intermediate_size": 128}
    vision |= {"num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    whole = {"model_type": "llava", "dtype": "bfloat16", "vision_config": vision}
    return whole | {"text_config": config, "image_token_index": 3}


def judge(tmp_path, config):
    """Size a config with offplan."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = open_model(str(tmp_path / "config.json"))
    return model.total_bytes, model.num_parameters


def hold_equal(tmp_path, config, expected):
    """Hold what offplan says of a config to the truth."""
    if config.get("is_encoder_decoder"):
        with pytest.raises(CheckpointError, match="encoder-decoder"):
            judge(tmp_path, config)
    else:
        assert judge(tmp_path, config) == pytest.approx(expected, rel=0.01)


@pytest.mark.sweep
@pytest.mark.parametrize("distort", [dict, type_in_a_part, renamed], ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", TYPES)
def test_size_of_a_type(tmp_path, name, distort):
    config, *expected = truth(name)
    hold_equal(tmp_path, distort(config), expected)


@pytest.mark.sweep
@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("name", TYPES)
def test_size_of_a_type_tied_or_not(tmp_path, name, tie):
    config, *expected = truth(name, tie)
    hold_equal(tmp_path, config, expected)


@pytest.mark.sweep
@pytest.mark.parametrize("name", TYPES)
def test_size_of_a_type_with_a_tower_beside(tmp_path, name):
    if text_key(truth(name).config):
        pytest.skip("it has one")
    config = tower_beside(truth(name).config)
    try:
        whole = measure(transformers.LlavaConfig.from_dict(config))
    except Exception as error:
        pytest.skip(f"transformers does not build it: {error}")
    hold_equal(tmp_path, config, whole[1:])


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("name", DECODERS)
def test_size_of_a_type_that_is_quantised(tmp_path, name, scheme):
    if scheme.split()[0] in LEFT.get(name, ()):
        pytest.xfail("its tool takes other modules than offplan says, or offplan refuses it")
    try:
        config = make_config(name, GROUPED | OTHERWISE.get(name, {}))
        config.dtype = "bfloat16"
        with torch.device("meta"):
            size = sum(parameter.numel() for parameter in build(config).parameters())
    except Exception as error:
        pytest.skip(f"transformers does not build it: {error}")
    if size > MOST_PARAMETERS:
        pytest.skip("it has no sizes for tests")
    try:
        expected = count_quantised(build(config), scheme, tmp_path)
    except Exception as error:
        pytest.skip(f"the tool does not quantise it: {error}")
    saved = json.loads(config.to_json_string())
    found, _ = judge(tmp_path, saved | {"quantization_config": SCHEMES[scheme]})
    assert found == pytest.approx(expected, rel=0.02 if "torchao" in scheme else 0.01)


@pytest.mark.sweep
@pytest.mark.parametrize("way", [OWN, STOCK])
@pytest.mark.parametrize("name", TYPES)
def test_whether_a_type_runs_is_told(tmp_path, name, way):
    config = truth(name, tiny=True).config
    if config.get("is_encoder_decoder"):
        pytest.skip("it is no decoder")
    (tmp_path / "config.json").write_text(json.dumps(config))
    try:
        model = open_model(str(tmp_path / "config.json"))
    except CheckpointError as error:
        pytest.skip(f"tiny sizes contradict what its class makes of them: {error}")
    why = find_obstacle(hold(model, way=way))
    assert why is None or why.isprintable()
