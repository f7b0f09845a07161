"""Layers that predict further tokens, found where a family's are known, and else refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offplan.checkpoint.open import open_model
from offplan.checkpoint.prediction import PredictionLayers, find_prediction_layers
from tests.runtime.predicting import FAMILIES, STORED, save_predicting


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "form"),
    [*((each, None) for each in FAMILIES), *((each, "fp8_block") for each in STORED)],
)
def test_a_prediction_layer_is_a_model_of_one_layer(
    family: str, form: str | None, tmp_path: Path
) -> None:
    model = open_model(str(save_predicting(family, tmp_path, form)))
    found = find_prediction_layers(model)
    assert isinstance(found, PredictionLayers)
    last, block = model.layers[-1], found.block
    assert [(p.name, p.form, p.nbytes) for p in block.parameters] == [
        (p.name, p.form, p.nbytes) for p in last.parameters
    ]
    assert block.kv_cache == last.kv_cache
    assert (block.kind, block.key) == (last.kind, last.key)
    assert found.model.experts == model.experts
    hidden, prefix = model.architecture.hidden_size, f"model.layers.{len(model.layers)}"
    names = ["eh_proj", "enorm", "hnorm", "shared_head.norm"]
    if "qwen" in family:
        prefix, names = "mtp", ["fc", "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"]
    around = {p.name: p.shape for p in found.model.outside_parameters}
    projection, *norms = (f"{prefix}.{name}.weight" for name in names)
    assert around == {projection: (hidden, 2 * hidden)} | dict.fromkeys(norms, (hidden,))
    assert f"{found.projection}.weight" == projection
    size = 4 * (2 * hidden * hidden + 3 * hidden)
    assert found.loaded_bytes == sum(p.loaded_bytes for p in block.parameters) + size
    assert find_prediction_layers(model) is found


def refusal(folder: Path) -> str:
    found = find_prediction_layers(open_model(str(folder)))
    assert isinstance(found, str)
    return found


@pytest.mark.slow
def test_what_lacks_prediction_layers_says_so(tmp_path: Path) -> None:
    folder = save_predicting("deepseek_v3", tmp_path)
    told, path = json.loads((folder / "config.json").read_text()), folder / "model.safetensors"
    assert "a config alone does not tell" in refusal(folder / "config.json")
    tensors, prefix = load_file(path), f"model.layers.{told['num_hidden_layers']}."

    def change(*, without: str, config: dict[str, int] | None = None) -> None:
        kept = {name: value for name, value in tensors.items() if not name.startswith(without)}
        save_file(kept, path, {"format": "pt"})
        (folder / "config.json").write_text(json.dumps(told | (config or {})))

    change(without=f"{prefix}hnorm")
    assert f"lacks {prefix}hnorm" in refusal(folder)
    change(without=prefix)
    assert "stores no layers that predict further tokens" in refusal(folder)
    fewer = {"num_hidden_layers": told["num_hidden_layers"] - 1, "num_nextn_predict_layers": 2}
    change(without="nothing", config=fewer)
    assert "several layers" in refusal(folder)


@pytest.mark.slow
def test_other_families_are_refused_by_name(tmp_path: Path) -> None:
    folder = save_predicting("deepseek_v32", tmp_path)
    assert "prediction layers of deepseek_v32" in refusal(folder)
