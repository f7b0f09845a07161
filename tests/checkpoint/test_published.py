"""Published checkpoints, sized from the facts of their configs alone."""

import json
from pathlib import Path

import pytest
import yaml

from offplan.capabilities.stock import STOCK
from offplan.checkpoint.config import read_model_type
from offplan.checkpoint.open import open_model
from offplan.checkpoint.popular import list_checkpoints, unpack
from offplan.errors import CheckpointError
from offplan.held.held import hold
from offplan.held.stock import find_passes

SHIPPED = {each.name: each for each in list_checkpoints()}
PUBLISHED = yaml.safe_load(Path(__file__).with_name("published.yaml").read_bytes())
QUICK = ("gpt-oss-20b", "Qwen3-32B-FP8-Static-PerTensor", "Qwen3-VL-8B-Instruct")


def find_config(row):
    """Return the facts of a row's config, of some those that offplan ships."""
    return SHIPPED[row["shipped"]].config if "shipped" in row else unpack(row["config"])


def write_published(folder, name):
    """Write the config of a published checkpoint, and what lies beside it."""
    row = PUBLISHED[name]
    (folder / "config.json").write_text(json.dumps(find_config(row)))
    if "beside" in row:
        beside = {"quantization": unpack(row["beside"])}
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    return folder / "config.json"


LARGE = """
DeepSeek-R1 DeepSeek-V3.2 DeepSeek-V4-Flash DeepSeek-V4-Flash-NVFP4 GLM-5.2-FP8
Kimi-K2-Instruct Kimi-K2.5
MiMo-V2-Flash MiniMax-M2.5-NVFP4 MiniMax-M3-NVFP4
NVIDIA-Nemotron-3.5-Lightning-30B-A3B-NVFP4 Qwen3-235B-A22B-FP8 Qwen3-Coder-480B-A35B
Qwen3-Next-80B-A3B Qwen3.5-122B-A10B-NVFP4
"""
"""Models of so many experts that they take seconds; each form and family of theirs has a smaller
one in the list, or tests of its own."""


def mark(name):
    """Leave large models to the sweep; of the others three are quick."""
    if name in QUICK:
        return name
    is_large = name in LARGE.split()
    return pytest.param(name, marks=pytest.mark.sweep if is_large else pytest.mark.slow)


NAMES = [*map(mark, PUBLISHED)]


@pytest.mark.parametrize("name", NAMES)
def test_a_published_config_tells_what_is_stored(tmp_path, name):
    pytest.importorskip("transformers")
    model = open_model(write_published(tmp_path, name))
    cache = sum(layer.kv_cache.bytes_per_token for layer in model.layers)
    row = PUBLISHED[name]
    found = {"bytes": model.total_bytes, "parameters": model.num_parameters, "cache": cache}
    assert found == {key: row[key] for key in found}


@pytest.mark.slow
@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_module_has_as_many_parameters(tmp_path, name):
    """The judge is no formula of ours: the class that the config names, on the meta device."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    config = json.loads(write_published(tmp_path, name).read_text())
    config.pop("quantization_config", None)
    built = transformers.CONFIG_MAPPING[read_model_type(config)].from_dict(config)
    auto_class = transformers.AutoModelForCausalLM
    if built.get_text_config() is not built:
        auto_class = transformers.AutoModelForImageTextToText
    with torch.device("meta"):
        model = auto_class.from_config(built, attn_implementation="eager")
    state = {id(value): value.numel() for value in model.state_dict(keep_vars=True).values()}
    assert sum(state.values()) + PUBLISHED[name].get("beside_module", 0) == pytest.approx(
        PUBLISHED[name]["parameters"], rel=1e-6
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_run_does_with_a_published_model(tmp_path, name):
    pytest.importorskip("torch")
    from offplan.library.runnable import find_obstacle

    model = open_model(write_published(tmp_path, name))
    way, _, reason = PUBLISHED[name]["run"].partition(": ")
    own = find_obstacle(hold(model))
    assert (own is None) == (way == "own"), own
    if way != "own":
        stock = find_obstacle(hold(model, way=STOCK))
        assert (stock is None) == (way == "stock"), stock
        assert reason in str(own)


BY_STOCK = [name for name, row in PUBLISHED.items() if row["run"].startswith("stock")]


@pytest.mark.sweep
@pytest.mark.parametrize("name", BY_STOCK)
def test_what_transformers_passes_of_a_published_model_take(tmp_path, name):
    """`run` asks before it loads anything, and a model may be built that no pass runs of."""
    pytest.importorskip("torch")
    find_passes(open_model(write_published(tmp_path, name)))


@pytest.mark.parametrize(
    "changes",
    [
        {"dtype": "bfloat16"},
        {"torch_dtype": "bfloat16"},
        {"text_config": {"dtype": "bfloat16"}},
        {"text_config": {"torch_dtype": "bfloat16"}},
        {"dtype": None, "text_config": {"torch_dtype": "bfloat16"}},
        {"torch_dtype": "bfloat16", "text_config": {"dtype": "bfloat16"}},
    ],
    ids=str,
)
def test_the_type_is_read_wherever_a_config_may_say_it(tmp_path, changes):
    pytest.importorskip("transformers")
    row = dict(find_config(PUBLISHED["Qwen3-VL-8B-Instruct"]))
    text = {key: value for key, value in row["text_config"].items() if key != "dtype"}
    config = row | changes | {"text_config": text | changes.get("text_config", {})}
    (tmp_path / "config.json").write_text(json.dumps(config))
    expected = PUBLISHED["Qwen3-VL-8B-Instruct"]["bytes"]
    assert open_model(tmp_path / "config.json").total_bytes == expected


def test_a_type_that_is_asked_for_is_that_of_all_that_is_not_quantised(tmp_path):
    pytest.importorskip("transformers")
    path = write_published(tmp_path, "Qwen3-32B-FP8-Static-PerTensor")
    stated, asked = open_model(path), open_model(path, dtype="float32")
    assert (asked.dtype, stated.dtype) == ("float32", "bfloat16")
    embedding = 2 * 151936 * 5120
    assert asked.total_bytes - stated.total_bytes == pytest.approx(2 * embedding, rel=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    # transformers lists the class of the text part, too, under the other two's model types
    ["Qwen3-VL-8B-Instruct", "Qwen3.5-35B-A3B", "Llama-4-Scout-17B-16E-Instruct"],
)
def test_a_class_of_another_name_is_found_by_its_model_type(tmp_path, name):
    pytest.importorskip("transformers")
    path = write_published(tmp_path, name)
    config = json.loads(path.read_text()) | {"architectures": ["PublishedForText"]}
    path.write_text(json.dumps(config))
    assert open_model(path).total_bytes == PUBLISHED[name]["bytes"]


def test_what_is_no_language_model_is_refused_as_that(tmp_path):
    pytest.importorskip("transformers")
    config = {"model_type": "vit", "num_hidden_layers": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="has no causal language model"):
        open_model(tmp_path / "config.json")


def test_shipped_facts_are_in_the_table_and_in_order():
    rows = {row["shipped"]: row for row in PUBLISHED.values() if "shipped" in row}
    assert {*SHIPPED} - {*rows} == {"Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8"}
    assert all(SHIPPED[name].num_bytes == row["bytes"] for name, row in rows.items())
    sizes = [each.num_bytes for each in SHIPPED.values()]
    assert sizes == sorted(sizes)
    for name in ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B-FP8"):
        assert SHIPPED[name].open().total_bytes == SHIPPED[name].num_bytes
