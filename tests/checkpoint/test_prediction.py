"""Layers that predict further tokens, found where a family's are known, and else refused."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from offplan.checkpoint.open import open_model
from offplan.checkpoint.prediction import PredictionLayers, find_prediction_layers
from tests.runtime.predicting import FAMILIES, save_predicting


@pytest.mark.slow
@pytest.mark.parametrize("form", [None, "fp8_block"])
@pytest.mark.parametrize("family", FAMILIES)
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
    assert (block.kind, block.key) == ("moe", last.key)
    assert found.model.experts == model.experts
    prefix, hidden = f"model.layers.{len(model.layers)}", model.architecture.hidden_size
    around = {p.name: p.shape for p in found.model.outside_parameters}
    assert around == {
        f"{prefix}.eh_proj.weight": (hidden, 2 * hidden),
        f"{prefix}.enorm.weight": (hidden,),
        f"{prefix}.hnorm.weight": (hidden,),
        f"{prefix}.shared_head.norm.weight": (hidden,),
    }
    assert found.projection == f"{prefix}.eh_proj"
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
